"""Whether a consumer reads a recreated topic or a former leader, from the debug lines of its client.

A fetch request of librdkafka names its topic by the topic's id (Fetch version 13 or later), and Kafka does not answer a request for a
deleted topic with records of another one. The client learns the id of a recreated topic only from an answer to a metadata request, and
continues at the same offset. So all records that come between two such answers belong to one topic. The client also writes a line
when it learns the id: the records behind this line belong to the topic with this id.

The client also logs the epoch of each leader that it learns. A fetch request names this epoch, and a node that leads in another epoch
refuses the request.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from typing import Any, Final

from bascule.core.kafka_records import Place
from bascule.core.log import ClientLog, EventLog

#: The debug contexts of the client whose lines a TopicViewLog reads. ``topic`` adds no lines for each fetch.
CONTEXT: Final = "protocol,topic"
#: The first words of lines about answers and about what they say, and the answers that count.
_ANSWERED: Final = "RECV"
_METADATA: Final = "METADATA"
_ANSWER: Final = re.compile(r": Received (Fetch|Metadata)Response \(v(\d+),")
#: A line about the id of a topic, and the id that stands for none.
_LEARNT: Final = re.compile(r": Topic (.*) changed id from \S+ to (\S+)$")
#: The first word of a line about the leader of a partition, and the line.
_LEADER: Final = "BROKER"
_LED: Final = re.compile(r": (\S+) \[(\d+)\]: leader -?\d+ epoch -?\d+ -> leader -?\d+ epoch (\d+)$")
_NO_ID: Final = "A" * 22
#: From this version on, a fetch request names the id of a topic.
_BY_ID: Final = 13
#: The level of debug lines.
_DEBUG: Final = 10
#: The views of all clients of the process. No two clients have the same one.
_views: Final = itertools.count(1)


class TopicViewLog(ClientLog):
    """The log of one consumer. It reads the answers to its requests from debug lines, and logs all other lines.

    If a later librdkafka writes other lines, ``view`` stays None: the topic is checked after each read, which is slower, but as safe.
    """

    __slots__ = ("_by_id", "_debugging", "_first_epochs", "_ids", "_view")

    def __init__(self, log: EventLog, *, debugging: bool = False) -> None:
        """``debugging``: the user has asked for debug lines, so they are logged as well."""
        super().__init__(log)
        self._debugging = debugging
        self._by_id = False
        self._view: int | None = None
        self._ids: dict[str, str] = {}
        self._first_epochs: dict[Place, int] = {}

    def topic_id(self, topic: str) -> str:
        """Return the id of the topic to which the records belong that the client returns; "" if this cannot be known."""
        return self._ids.get(topic, "") if self._by_id else ""

    def first_leader_epoch(self, place: Place) -> int | None:
        """Return the epoch of the first leader of a partition that the client knew, None if this cannot be known.

        The client forgets no later epoch. So its records come from the leader of this epoch, or of a later one.
        """
        return self._first_epochs.get(place)

    @property
    def view(self) -> int | None:
        """Return a number that changes before the client returns records of a recreated topic; None if this cannot be known."""
        return self._view if self._by_id else None

    def log(self, level: int, text: str, *arguments: object) -> None:
        """Handle a log line of the client."""
        if level > _DEBUG or self._debugging:
            super().log(level, text, *arguments)
        if level > _DEBUG or not arguments:
            return
        if arguments[0] == _METADATA and (learnt := _LEARNT.search(str(arguments[-1]))) is not None:
            self._ids[learnt[1]] = "" if learnt[2] == _NO_ID else learnt[2]
        if arguments[0] == _LEADER and (led := _LED.search(str(arguments[-1]))) is not None:
            self._first_epochs.setdefault((led[1], int(led[2])), int(led[3]))
        if arguments[0] != _ANSWERED or (found := _ANSWER.search(str(arguments[-1]))) is None:
            return
        if found[1] == "Metadata":
            self._view = next(_views)
        else:
            self._by_id = int(found[2]) >= _BY_ID


def viewing(settings: Mapping[str, Any], log: EventLog) -> tuple[dict[str, Any], TopicViewLog]:
    """Return the settings of a consumer with the debug contexts, and its log, which passes other lines on to ``log``."""
    contexts = [str(each) for each in (settings.get("debug"),) if each]
    return {**settings, "debug": ",".join([*contexts, CONTEXT])}, TopicViewLog(log, debugging=bool(contexts))
