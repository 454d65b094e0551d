"""Reads the source partitions of a pipeline with librdkafka: records in order, and where a partition has no further records now."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Gather, KafkaRecord, Place, SourceStart, Taken
from bascule.core.log import get_log
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.consumer import received_of
from bascule.kafka.errors import passing, words
from bascule.kafka.history import PROMPT, READ_AHEAD, known_offset, taken_at_once
from bascule.kafka.topic_view import viewing

log = get_log(__name__)

#: Maximum number of records that are taken from the client at once.
TAKEN_MAX: Final = 1_000
#: Interval, in seconds, at which a source without new records returns nothing, so that its reader can do other work.
PAUSE_S: Final = 1.0
#: With more records than this to come, a transaction is filled, and does not end because the client has no further record yet.
BACKLOG_RECORDS: Final = 1_000
#: How long, in seconds, a partition must have no further record before its end is reported: less than PAUSE_S, so that a source without
#: records reports it at its first pause.
END_LASTS_S: Final = 0.9
#: How long the reader waits for records that Kafka has announced, in seconds. An open transaction of another producer may hold them up.
ANNOUNCED_S: Final = 0.05
#: Kafka answers a fetch as soon as there is a record. Without one it answers after this time: an idle source costs two requests a second.
_FETCH_WAIT_MS: Final = 500
#: The client counts in milliseconds: with less it does not wait.
_SHORTEST_S: Final = 0.001
_DEFAULTS: Final[Mapping[str, Any]] = {
    **READ_AHEAD,
    **PROMPT,
    "fetch.wait.max.ms": _FETCH_WAIT_MS,
    "socket.nagle.disable": True,
}
_SETTINGS: Final[Mapping[str, Any]] = {
    "group.id": "bascule.source.unused",
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "check.crcs": True,
}


class KafkaSource:
    """Source partitions, each read from an offset, as an endless iterator. Not thread-safe."""

    def __init__(
        self, kafka: Mapping[str, Any], start: Mapping[Place, SourceStart], *, committed: bool, gather: Gather = lambda _: 0.0
    ) -> None:
        """``start`` says where each partition is read from. ``committed`` leaves out records of aborted transactions.

        ``gather`` is asked how long a partition with few records left is not a tail yet, because more records may come. Raises
        Unavailable if no client can be made.
        """
        isolation = "read_committed" if committed else "read_uncommitted"
        try:
            settings, self._view = viewing({**_DEFAULTS, **kafka, **_SETTINGS, "isolation.level": isolation}, log)
            self._consumer: Consumer = clients.consumer(settings, self._view)
            clients.assign(self._consumer, [TopicPartition(*place, at.offset) for place, at in start.items()])
            self._start = dict(start)
            self._kafka = dict(kafka)
            self._topics: Topics | None = None
            #: Partitions with records that were taken, and with more records to come.
            self._filling: set[Place] = set()
            #: Partitions with few records left, which wait for more because ``gather`` says so.
            self._gathering: set[Place] = set()
            self._gather = gather
            #: The ends that the client has reported, with the time since when no record has come. It reports each of them once.
            self._ends: dict[Place, tuple[int, float]] = {}
        except KafkaException as error:
            raise Unavailable(f"could not create a client to read sources: {words(error)}") from error

    def __iter__(self) -> Iterator[Taken]:
        """Yield the records that are there, and nothing after PAUSE_S without a record. Raises Unavailable, also for deleted records."""
        while True:
            messages = taken_at_once(self._consumer, TAKEN_MAX, self._patience_s())
            if messages:
                yield self._taken(messages)
            elif self._gathering:
                if tails := self._gathered():
                    yield Taken([], tails, self._lasting_ends())
            else:
                tails, self._filling = self._filling, set()
                yield Taken([], tails, self._lasting_ends())

    def close(self) -> None:
        """Free the client."""
        self._consumer.close()

    def _taken(self, messages: list[Message]) -> Taken:
        records: list[KafkaRecord] = []
        for message in messages:
            failure = message.error()
            place = (message.topic() or "", message.partition() or 0)
            if failure is None:
                records.append(received_of(message))
                self._ends.pop(place, None)
            elif failure.code() == KafkaError._PARTITION_EOF:
                _, since_s = self._ends.get(place, (0, time.monotonic()))  # an end behind a further marker is no record
                self._ends[place] = known_offset(message), since_s
            elif not passing(failure):
                raise Unavailable(f"{place[0]}-{place[1]} cannot be read: {failure.str()}")
        reached = {(record.topic, record.partition): record.offset + 1 for record in records}
        self._check_read(reached.keys() | self._ends.keys())
        # A partition without a record this time has its announced records held up, or others come first: its transaction must not wait.
        tails = {at for at, end in reached.items() if self._near_end(at, end)} | (self._filling - reached.keys())
        self._filling = (self._filling | reached.keys()) - tails
        self._gathering |= tails
        return Taken(records, self._gathered(), self._lasting_ends())

    def _check_read(self, places: Collection[Place]) -> None:
        """Raise Unavailable if records or ends of these partitions may come from a recreated topic or from a former leader.

        The client continues at the same offset without an error in both cases. If it does not know which topic it reads, Kafka is asked.
        """
        unknown: dict[str, str] = {}
        for place in places:
            (topic, _), at = place, self._start[place]
            first = self._view.first_leader_epoch(place)
            if first is not None and first < at.leader_epoch:
                raise Unavailable(f"{topic}-{place[1]} was read from a former leader (leader epoch {first}, expected {at.leader_epoch})")
            if at.topic_id and (found := self._view.topic_id(topic)) not in ("", at.topic_id):
                raise _recreated(topic, found, at.topic_id)
            if at.topic_id and not found:
                unknown[topic] = at.topic_id
        if unknown:
            self._topics = self._topics or Topics(self._kafka)
            ids = self._topics.ids(unknown)
            for topic, topic_id in unknown.items():
                if topic not in ids:
                    raise Unavailable(f"topic {topic!r} no longer exists")
                if ids[topic] != topic_id:
                    raise _recreated(topic, ids[topic], topic_id)

    def _patience_s(self) -> float:
        """Return how long the reader waits for a record, in seconds."""
        patience_s = ANNOUNCED_S if self._filling else PAUSE_S
        return min([patience_s, *(max(_SHORTEST_S, self._gather(place)) for place in self._gathering)])

    def _gathered(self) -> set[Place]:
        """Return the partitions that wait no longer for more records."""
        found = {place for place in self._gathering if self._gather(place) <= 0}
        self._gathering -= found
        return found

    def _lasting_ends(self) -> dict[Place, int]:
        """Return the ends behind which no record has come for END_LASTS_S, each once.

        A source that is written in transactions has an end behind each marker. To move the position there would cost a transaction for each
        of them, as much as the records do, and the records behind would wait for it.
        """
        before_s = time.monotonic() - END_LASTS_S
        found = {place: end for place, (end, since_s) in self._ends.items() if since_s <= before_s}
        for place in found:
            del self._ends[place]
        return found

    def _near_end(self, place: Place, reached: int) -> bool:
        """Return whether few records are left, as the last answer of Kafka says."""
        known = self._consumer.get_watermark_offsets(TopicPartition(*place), cached=True)
        return known is None or known[1] - reached < BACKLOG_RECORDS


def _recreated(topic: str, found: str, expected: str) -> Unavailable:
    return Unavailable(f"topic {topic!r} was recreated: its id is {found}, and the positions belong to id {expected}")
