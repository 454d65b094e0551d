"""Checks of a partition's end: performs the effects of :mod:`bascule.writer.lineage` in the caller's thread.

OffsetForLeaderEpoch answers whether a log reaches an offset within a leader epoch. librdkafka sends this request when a consumer is
assigned an offset with a leader epoch (KIP-320), and reports a log that does not reach the offset.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.kafka import clients
from bascule.kafka.errors import passing
from bascule.kafka.history import PartitionOffsets, content_of, offsets_client
from bascule.kafka.topic_view import viewing
from bascule.writer.lineage import STALE_TIMEOUT_S, LogEnd, SeenRecord, check_read, check_tail, still_leads
from bascule.writer.position import Position

log = get_log(__name__)

#: Timeout of one request to Kafka, in seconds.
ANSWER_S: Final = 10.0
_SETTINGS: Final[Mapping[str, Any]] = {
    "group.id": "bascule.lineage.unused",
    "enable.auto.commit": False,
    "enable.partition.eof": True,
    "auto.offset.reset": "error",
    "fetch.wait.max.ms": 10,
    "isolation.level": "read_uncommitted",
    "check.crcs": True,
}
#: librdkafka's text about a log that does not reach the offset. The code of the error is that of any unreadable offset.
_TRUNCATED: Final = re.compile(r"truncation detected.*broker end offset is (-?\d+)")


class PartitionLineage:
    """One partition, as ``bascule.writer.lineage.LineageEffects``. Not thread-safe."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, partition: int, admin: AdminClient | None = None) -> None:
        """Share ``admin`` with other partitions. Raises Unavailable if no client can be made."""
        self.place = f"{topic}-{partition}"
        self.now_s = time.monotonic
        self._kafka = dict(kafka)
        self._topic, self._partition = topic, partition
        self._offsets = PartitionOffsets(kafka, [TopicPartition(topic, partition)], admin)

    def check_tail(self, position: Position, timeout_s: float = STALE_TIMEOUT_S) -> int:
        """Return a leader epoch in which the log has all records before a position. Raises PositionLost, Unavailable."""
        return run_blocking(check_tail(self, position.offset, position.leader_epoch, timeout_s=timeout_s))

    def check_read(self, at: Position, leader_epoch: int, last: SeenRecord, offset: int) -> int:
        """See ``bascule.writer.lineage.check_read``. Raises PositionLost, Unavailable."""
        return run_blocking(check_read(self, at, leader_epoch, last, offset))

    def leader_epoch(self) -> int:
        """Return the epoch of the leader; UNKNOWN_EPOCH if the cluster has no leader epochs. Raises Unavailable."""
        return self._offsets.end(ANSWER_S).leader_epoch

    def confirms(self, leader_epoch: int, offset: int, timeout_s: float) -> bool:
        """Return whether the leader of this epoch says in time that its log reaches ``offset``. See ``still_leads``."""
        try:
            end = self._offsets.end(timeout_s)
        except Unavailable:
            return False
        return still_leads(end, leader_epoch, offset)

    async def sleep(self, seconds: float) -> None:
        """Block the thread."""
        time.sleep(seconds)

    async def end(self, *, again: bool = False) -> LogEnd:
        """Return the high watermark. Raises Unavailable."""
        return self._offsets.end(ANSWER_S, again=again)

    async def reached(self, offset: int, leader_epoch: int, since: int) -> bool | None:
        """Ask Kafka through a consumer. Raises Unavailable."""
        try:
            first = self._first(TopicPartition(self._topic, self._partition, offset, leader_epoch=leader_epoch), since)
            return None if first is None else _reached(first.error())
        except KafkaException as error:
            raise Unavailable(f"the leader epochs of {self.place} cannot be read: {error.args[0].str()}") from error

    async def has(self, record: SeenRecord, since: int) -> bool | None:
        """Read the record again and compare it. Raises Unavailable."""
        try:
            first = self._first(TopicPartition(self._topic, self._partition, record.offset), since)
        except KafkaException as error:
            raise Unavailable(f"{self.place} cannot be read: {error.args[0].str()}") from error
        if first is None or (failure := first.error()) is None:
            return None if first is None else _same(first, record)
        if failure.code() != KafkaError._PARTITION_EOF:
            raise Unavailable(f"{self.place} cannot be read: {failure.str()}")
        return False

    def _first(self, at: TopicPartition, since: int) -> Message | None:
        """Return the first record, end or permanent error that a new consumer finds; None if its leader may be one before ``since``.

        Raises KafkaException. The node that the consumer asks for the leader may be a former leader, which names itself.
        """
        settings, view = viewing({**self._kafka, **_SETTINGS}, log)
        with closing(clients.consumer(settings, view)) as consumer:
            clients.assign(consumer, [at])
            first = _first_word(consumer)
        led = view.first_leader_epoch((self._topic, self._partition))
        return None if led is not None and led < since else first


def _first_word(consumer: Consumer) -> Message:
    """Return the first record or permanent error of a consumer. Raises KafkaException if neither comes in time."""
    until_s = time.monotonic() + ANSWER_S
    while (left_s := until_s - time.monotonic()) > 0:
        if (message := consumer.poll(left_s)) is not None:
            error = message.error()
            if error is None or not passing(error):
                return message
    raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


def _reached(error: KafkaError | None) -> bool | None:
    if error is None or error.code() == KafkaError._PARTITION_EOF:
        return True
    if error.code() != KafkaError._AUTO_OFFSET_RESET:
        raise KafkaException(error)
    found = _TRUNCATED.search(error.str())
    # A node that does not know the epoch does not know its end, either.
    return None if found is None or int(found[1]) < 0 else False


class Lineages:
    """The partitions that a process checks; they share a client. Not thread-safe."""

    def __init__(self, kafka: Mapping[str, Any], admin: AdminClient | None = None) -> None:
        """Create the client, unless ``admin`` is one to share with others. Raises Unavailable if that fails."""
        self._kafka = kafka
        self._admin = offsets_client(kafka) if admin is None else admin
        self._known: dict[tuple[str, int], PartitionLineage] = {}

    def of(self, topic: str, partition: int) -> PartitionLineage:
        """Return the lineage of a partition."""
        if (topic, partition) not in self._known:
            self._known[topic, partition] = PartitionLineage(self._kafka, topic, partition, self._admin)
        return self._known[topic, partition]


def _same(message: Message, record: SeenRecord) -> bool:
    key, value = content_of(message)
    if message.offset() != record.offset or key != record.key:
        return False
    if record.timestamp_ms is None:
        return (value or b"").startswith(record.value or b"")
    return (value, message.timestamp()[1]) == (record.value, record.timestamp_ms)
