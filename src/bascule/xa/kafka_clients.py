"""The clients of Kafka as a resource: for its side topic and log, and a slot for each transactional id."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from bascule.core.errors import Denied, InvalidInput, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.appender import Appender
from bascule.kafka.compacted import Stored, TableReader
from bascule.kafka.history import TopicHistory
from bascule.kafka.slot import Slot
from bascule.xa.blocking import now_ms
from bascule.xa.kafka_records import BranchTopics, SideEnds
from bascule.xa.kafka_targets import TargetRules, size_bytes_of

#: How long, in seconds, the rules of a topic are used before they are read again.
RULES_KEPT_S: Final = 300.0


class Clients:
    """The clients of one Kafka resource."""

    def __init__(self, kafka: Mapping[str, Any], branches: BranchTopics, held_up: Callable[[Mapping[bytes, Stored]], None]) -> None:
        self._kafka, self._branches, self._held_up = kafka, branches, held_up
        self._topics = Topics(kafka)
        own_topics.prepare(kafka, {branches.side: own_topics.SIDE, branches.log: own_topics.BRANCHES})
        self.appender = Appender(kafka)
        self.reader = TableReader(kafka, branches.log, range(branches.partitions))
        self._rules: dict[str, tuple[TargetRules, float]] = {}  # by topic, with the time of the read
        self._slots: dict[str, Slot] = {}
        self._turns: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def check(self, record: Outgoing) -> int:
        """Return the size of a record in bytes if its topic will accept the record: a prepared branch must be able to commit.

        Raises InvalidInput if the topic does not exist or would refuse the record, TooLarge if the record is too large for the topic,
        Unavailable, Denied if this program may not write to the topic.
        """
        size_bytes, rules = size_bytes_of(record), self._kept_rules(record.topic)
        if rules is None or rules.refusal(record, size_bytes, now_ms()) is not None:  # the rules may have changed
            rules = self._read_rules(record.topic)
        if (refusal := rules.refusal(record, size_bytes, now_ms())) is not None:
            raise refusal
        return size_bytes

    def _kept_rules(self, topic: str) -> TargetRules | None:
        """Return the rules of a topic if they were read before. Old ones are read again, and apply until Kafka answers."""
        rules, read_s = self._rules.get(topic, (None, 0.0))
        if rules is None or time.monotonic() - read_s < RULES_KEPT_S:
            return rules
        try:
            return self._read_rules(topic)
        except Denied:
            raise
        except Unavailable:
            self._rules[topic] = rules, time.monotonic()
            return rules

    def _read_rules(self, topic: str) -> TargetRules:
        """Read the rules of a topic. Raises InvalidInput if the topic does not exist, Denied, Unavailable."""
        self._rules.pop(topic, None)
        if (partitions := self._topics.partitions().get(topic)) is None:
            raise InvalidInput(f"topic {topic!r} does not exist")
        self._topics.check_writable(topic)
        rules = TargetRules.of(self._topics.config(topic), partitions)
        self._rules[topic] = rules, time.monotonic()
        return rules

    def side_ends(self) -> SideEnds:
        """Return the ends of the side topic. Raises Unavailable, also if the topic is replaced meanwhile."""
        side = self._branches.side
        topic_id = self._topics.id(side)
        ends = {partition: TopicHistory(self._kafka, side, partition).latest() for partition in range(self._branches.partitions)}
        if self._topics.id(side) != topic_id:
            raise Unavailable(f"topic {side} was replaced while its ends were read")
        return SideEnds(topic_id, ends)

    @contextmanager
    def slot(self, transactional_id: str, *, own: bool) -> Iterator[Slot]:
        """Yield the slot of a transactional id. The slot of another process's id is closed afterwards."""
        if not own:
            slot = self._slot(transactional_id, ahead=False)
            try:
                yield slot
            finally:
                slot.close()
            return
        with self._lock:
            if transactional_id not in self._slots:
                self._slots[transactional_id] = self._slot(transactional_id, ahead=True)
        yield self._slots[transactional_id]

    def turn(self, transactional_id: str) -> threading.Lock:
        """Return the lock whose holder ends the branches that wait for the id."""
        with self._lock:
            return self._turns.setdefault(transactional_id, threading.Lock())

    def _slot(self, transactional_id: str, *, ahead: bool) -> Slot:
        partition = self._branches.partition_of(transactional_id)
        return Slot(self._kafka, transactional_id, self._branches.log, partition, ahead=ahead, held_up=self._held_up)

    def close(self) -> None:
        """Close the clients."""
        for slot in self._slots.values():
            slot.close()
        self.appender.close()
        self.reader.close()
