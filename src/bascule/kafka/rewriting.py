"""Write partitions again: records in their order, and empty records for offsets whose records no longer exist."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException, Producer

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka import clients
from bascule.kafka.admin import ADMIN_TIMEOUT_S
from bascule.kafka.appender import hand_over
from bascule.kafka.errors import words
from bascule.kafka.log import introduce, patient

#: A record that Kafka does not store within this time fails the restore.
DELIVERY_TIMEOUT_MS: Final = 120_000
#: Empty records between two looks at the client, and that the client may hold. Each look takes as long as some records.
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
        """Connect the client. Raises Unavailable."""
        try:
            introduce(self.producer, topic, ADMIN_TIMEOUT_S)
        except KafkaException as error:
            raise _failed(topic, words(error)) from error

    def append(self, record: Outgoing) -> None:
        """Append a record. Raises Unavailable if the client refuses it, or if an earlier record failed."""
        self.check(record.topic)
        try:
            hand_over(self._produce, record, self._delivered)
        except KafkaException as error:
            raise _failed(record.topic, words(error)) from error
        self.producer.poll(0)

    def _delivered(self, error: KafkaError | None, _: Any) -> None:
        if error is not None:
            self._failures.append(words(error))

    def check(self, topic: str) -> None:
        """Raise Unavailable if a record failed."""
        if self._failures:
            raise _failed(topic, self._failures[0])

    def flush(self, topic: str) -> None:
        """Return when all records are stored. Raises Unavailable."""
        while self.producer.flush(_POLL_S):
            self.check(topic)
        self.check(topic)


def fill(
    kafka: Mapping[str, Any], topic: str, partition: int, count: int, progress: Callable[[int], None], *, timestamp_ms: int = 0
) -> None:
    """Append ``count`` empty records with a time, in ms since the epoch; 0 is now. Raises Unavailable.

    The time should be that of the record behind them: Kafka finds an offset by time only if times do not decrease from segment to segment.
    """
    settings = {"compression.type": "zstd", "linger.ms": 50, "batch.num.messages": 1_000_000}
    filler = OrderedAppends(kafka, **settings, **{"queue.buffering.max.messages": FILL_HELD_MAX + FILL_COUNT})
    filler.introduce(topic)
    produce, left = filler.producer.produce, count
    while left:
        taken = min(left, FILL_COUNT)
        try:
            for _ in range(taken):
                produce(topic, None, None, partition, timestamp=timestamp_ms)
        except KafkaException as error:
            raise _failed(topic, words(error)) from error
        left -= taken
        progress(count - left)
        while len(filler.producer) > FILL_HELD_MAX:
            filler.producer.poll(_POLL_S)
    filler.flush(topic)


def _failed(topic: str, why: str) -> Unavailable:
    return Unavailable(f"topic {topic!r} could not be restored: {why}. Repeat the restore")
