"""Bascule's internal topics that a broker creates, and the sizes that the journal accepts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bascule.config.settings import Journal, Settings
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.core.topics import MESSAGE_BYTES_MAX, RECORD_BYTES_MAX, JournalTopics
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.guards import Finding, TopicRole, UnsafeTopic, guard, too_small
from bascule.threads.lasting import end_process, lasting_thread

log = get_log(__name__)

#: Bytes of a journal record around a message or a transaction. For small records half the record is enough.
AROUND_BYTES = RECORD_BYTES_MAX - MESSAGE_BYTES_MAX
#: With less the journal cannot work: small entries are gathered up to a quarter of this size, and Kafka's client gathers further.
RECORD_BYTES_MIN = 1_000_000
#: Bytes that Kafka counts besides the value of a record: the header of a batch, the header of the record, its key.
FRAME_BYTES = 128
#: Interval of the checks of a running broker's topics. Kafka checks every five minutes what it may delete.
WATCH_S = 5.0


def ensure(kafka: Mapping[str, Any], topics: JournalTopics, journal: Journal, message_bytes: int = MESSAGE_BYTES_MAX) -> list[Finding]:
    """Create missing topics, and return the findings that weaken a promise for messages of this size; blocks.

    Raises Unavailable, UnsafeTopic.
    """
    Topics(kafka).reach()
    return own_topics.ensure(
        kafka,
        _made_here(topics),
        replication_factor=journal.replication_factor,
        min_insync_replicas=journal.min_insync_replicas,
        record_bytes=_record_bytes(message_bytes),
    )


def _made_here(topics: JournalTopics) -> dict[str, own_topics.OwnTopic]:
    return {
        topics.journal: own_topics.JOURNAL,
        topics.ingress: own_topics.INGRESS,
        topics.snapshots: own_topics.SNAPSHOTS,
        topics.store: own_topics.STORE,
        topics.brokers: own_topics.BROKERS,
        topics.control: own_topics.CONTROL,
        topics.reports: own_topics.CONTROL,
        topics.redrive: own_topics.REDRIVE,
    }


class TopicWatch:
    """A watch for changes of topic settings that break a promise. It reports what a start would refuse.

    It also watches the topics of pipelines and programs, which check their topics when they start, if these topics are in this Kafka and
    have their usual names.
    """

    def __init__(self, kafka: Mapping[str, Any], settings: Settings) -> None:
        self.trouble = ""  # the current problem
        self._kafka = kafka
        topics = settings.journal_topics
        own = {**_made_here(topics), topics.positions: own_topics.POSITIONS}
        others = {topics.dead_letters: own_topics.DEAD_LETTERS, **own_topics.SHARED}
        # Separate: if this broker may not describe other topics, it continues to check its own.
        self._watched = [own_topics.expected(each) for each in (own, others)]
        self._over = threading.Event()
        lasting_thread(self._run, "topic-watch", on_failure=end_process).start()

    def close(self) -> None:
        """End the watch without waiting for a check that is in progress."""
        self._over.set()

    def _run(self) -> None:
        topics, found = Topics(self._kafka), [""] * len(self._watched)
        while not self._over.wait(WATCH_S):
            for place, watched in enumerate(self._watched):
                with suppress(Unavailable):
                    found[place] = _broken(topics, watched)
            trouble = "; ".join(filter(None, found))
            if trouble and trouble != self.trouble:
                log.error("unsafe topic setting", reason=trouble)
            self.trouble = trouble


def _broken(topics: Topics, watched: Mapping[str, tuple[TopicRole, int | None]]) -> str:
    try:
        guard(topics, watched, record_bytes=0)  # each epoch checks the sizes
    except UnsafeTopic as error:
        return str(error)
    return ""


def _record_bytes(message_bytes: int) -> int:
    return max(RECORD_BYTES_MIN, min(message_bytes + AROUND_BYTES, 2 * message_bytes))


@dataclass(frozen=True, slots=True)
class JournalCapacity:
    """The sizes that the journal's topic accepts now: records of ``record_bytes``; ``needed_bytes`` would be right."""

    topic: str
    record_bytes: int
    needed_bytes: int

    @property
    def content_bytes(self) -> int:
        """Return the size in bytes of the largest message or transaction."""
        return max(self.record_bytes - AROUND_BYTES, self.record_bytes // 2)

    @property
    def shortage(self) -> Finding | None:
        """Return what is wrong, or None."""
        return too_small(self.topic, self.record_bytes, self.needed_bytes) if self.record_bytes < self.needed_bytes else None

    def check(self, value_bytes: Iterable[int]) -> None:
        """Check records that an epoch could not store. Raises UnsafeTopic if the next epoch could not store one of them, either."""
        largest = max(value_bytes, default=0) + FRAME_BYTES
        if largest > self.record_bytes:
            raise UnsafeTopic(str(too_small(self.topic, self.record_bytes, max(largest, self.needed_bytes))))


def room(kafka: Mapping[str, Any], topic: str, message_bytes: int) -> JournalCapacity:
    """Return the capacity of the journal ``topic`` for an epoch with messages of ``message_bytes``; blocks.

    Raises Unavailable; UnsafeTopic if the topic is too small for any message.
    """
    found = JournalCapacity(topic, int(Topics(kafka).config(topic)["max.message.bytes"]), _record_bytes(message_bytes))
    if found.record_bytes < RECORD_BYTES_MIN:
        raise UnsafeTopic(str(found.shortage))
    return found
