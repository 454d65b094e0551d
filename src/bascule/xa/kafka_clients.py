"""The clients of Kafka as a resource: for its side topic and log, and a slot for each transactional id."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from bascule.core.errors import InvalidInput, TooLarge, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.appender import Appender
from bascule.kafka.compacted import Stored, TableReader
from bascule.kafka.history import TopicHistory
from bascule.kafka.slot import Slot
from bascule.xa.kafka_records import BranchTopics, SideEnds

#: Maximum overhead of a record in bytes. A record that is too large is refused when it is sent, not when it is committed.
RECORD_OVERHEAD_BYTES = 200


class Clients:
    """The clients of one Kafka resource."""

    def __init__(self, kafka: Mapping[str, Any], branches: BranchTopics, held_up: Callable[[Mapping[bytes, Stored]], None]) -> None:
        self._kafka, self._branches, self._held_up = kafka, branches, held_up
        self._topics = Topics(kafka)
        own_topics.prepare(kafka, {branches.side: own_topics.SIDE, branches.log: own_topics.BRANCHES})
        self.appender = Appender(kafka)
        self.reader = TableReader(kafka, branches.log, range(branches.partitions))
        self._limits: dict[str, int] = {}
        self._slots: dict[str, Slot] = {}
        self._turns: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def check(self, record: Outgoing) -> int:
        """Return the size of a record in bytes if its topic will accept the record: a prepared branch must be able to commit.

        Raises InvalidInput if the topic does not exist, TooLarge if the record is larger than max.message.bytes of the topic.
        """
        headers = sum(len(name) + len(value or b"") + 4 for name, value in record.headers)
        size_bytes = len(record.key or b"") + len(record.value or b"") + headers + RECORD_OVERHEAD_BYTES
        limit = self._limits.get(record.topic)
        if limit is None or size_bytes > limit:  # the limit may have been raised
            if record.topic not in self._topics.partitions():
                raise InvalidInput(f"topic {record.topic!r} does not exist")
            limit = self._limits[record.topic] = int(self._topics.config(record.topic)["max.message.bytes"])
        if size_bytes > limit:
            raise TooLarge(
                f"a record of {size_bytes} bytes is too large for topic {record.topic!r}: max.message.bytes of the topic is {limit}"
            )
        return size_bytes

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
