"""Write partitions again: records in their order, and empty records for offsets whose records no longer exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, Producer

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka import clients
from bascule.kafka.admin import ADMIN_TIMEOUT_S
from bascule.kafka.compacted import hand_over
from bascule.kafka.errors import words
from bascule.kafka.log import introduce, patient

#: A record that Kafka does not store within this time fails the restore.
DELIVERY_TIMEOUT_MS: Final = 120_000
#: Empty records that are passed to the client at once, and that the client may hold.
FILL_COUNT: Final = 50_000
FILL_HELD_MAX: Final = 500_000
_POLL_S: Final = 0.1
_PRODUCER: Final[Mapping[str, Any]] = {
    "enable.idempotence": True, "acks": "all", "message.max.bytes": RECORD_BYTES_MAX, "message.timeout.ms": DELIVERY_TIMEOUT_MS,
    "queue.buffering.max.kbytes": 2 * RECORD_BYTES_MAX // 1024,
}  # fmt: skip


class OrderedAppends:
    """Appends to partitions in order, and fails if Kafka refuses a record."""

    def __init__(self, kafka: Mapping[str, Any], **settings: Any) -> None:
        self.producer: Producer = clients.producer({**_PRODUCER, **kafka, **settings})
        self._failures: list[str] = []
        self._produce = patient(self.producer)

    def introduce(self, topic: str) -> None:
        """Connect the client. Raises KafkaException."""
        introduce(self.producer, topic, ADMIN_TIMEOUT_S)

    def append(self, record: Outgoing) -> None:
        """Append a record. Raises Unavailable if an earlier record failed."""
        self.check(record.topic)
        hand_over(self._produce, record, self._delivered)
        self.producer.poll(0)

    def _delivered(self, error: KafkaError | None, _: Any) -> None:
        if error is not None:
            self._failures.append(words(error))

    def check(self, topic: str) -> None:
        """Raise Unavailable if a record failed."""
        if self._failures:
            raise Unavailable(f"topic {topic!r} could not be restored: {self._failures[0]}. Repeat the restore")

    def flush(self, topic: str) -> None:
        """Return when all records are stored. Raises Unavailable."""
        while self.producer.flush(_POLL_S):
            self.check(topic)
        self.check(topic)


def fill(kafka: Mapping[str, Any], topic: str, partition: int, count: int, progress: Callable[[int], None]) -> None:
    """Append ``count`` empty records. Raises Unavailable."""
    settings = {"compression.type": "zstd", "linger.ms": 50, "batch.num.messages": 1_000_000}
    filler = OrderedAppends(kafka, **settings, **{"queue.buffering.max.messages": FILL_HELD_MAX + FILL_COUNT})
    filler.introduce(topic)
    left = count
    while left:
        left -= filler.producer.produce_batch(topic, [{"value": None}] * min(left, FILL_COUNT), partition=partition)
        progress(count - left)
        while len(filler.producer) > FILL_HELD_MAX:
            filler.producer.poll(_POLL_S)
    filler.flush(topic)
