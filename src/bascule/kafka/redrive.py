"""Move records from a topic to others, each once: one Kafka transaction writes the records and the position after them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from bascule.core.errors import TooLarge, Unavailable
from bascule.core.kafka_records import KafkaRecord, Outgoing
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.appender import CLIENT_SETTINGS, hand_over
from bascule.kafka.consumer import received_of
from bascule.kafka.errors import TOO_LARGE
from bascule.kafka.history import TopicHistory, committed_offset
from bascule.kafka.log import introduce, patient

COORDINATOR_TIMEOUT_S = 30.0


@dataclass(slots=True)
class _Counted:
    """The offsets of a partition that wait, as far as it was read."""

    end: int = 0
    offsets: list[int] = field(default_factory=list)


class Redrive:
    """The records of a topic that have not been moved. The position is the committed offset of ``group``, in which nobody consumes."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, group: str) -> None:
        self._kafka = {**CLIENT_SETTINGS, **kafka}
        self._topic = topic
        self._group = group
        self._counted: dict[int, _Counted] = {}

    def waiting(self) -> list[KafkaRecord]:
        """Return these records, by partition and offset. Raises Unavailable."""
        return list(self._each())

    def count(self) -> int:
        """Return the number of these records; each call reads the new ones. Not thread-safe. Raises Unavailable."""
        for partition, history in self._histories():
            first, end = self._first(partition, history), history.latest()
            counted = self._counted.setdefault(partition, _Counted())
            if end < counted.end:  # another topic of the same name
                counted = self._counted[partition] = _Counted()
            del counted.offsets[: bisect_left(counted.offsets, first)]
            new = [message.offset() or 0 for message in history.records(max(first, counted.end), end, committed=True)]
            counted.offsets += new
            counted.end = end
        return sum(len(counted.offsets) for counted in self._counted.values())

    def move(self, make: Callable[[KafkaRecord], Outgoing | None], count: int | None = None) -> int:
        """Write what ``make`` returns for each record (None skips it), at most ``count``; return the number of written records.

        This call fences another redrive that is in progress. Raises Unavailable if all or none of the records were moved; TooLarge if
        none were.
        """
        refused: list[tuple[int, str]] = []
        settings = {
            "message.max.bytes": RECORD_BYTES_MAX, **self._kafka, "transactional.id": self._group, "partitioner": "murmur2_random",
        }  # fmt: skip
        producer = clients.producer(settings)
        consumer = clients.consumer({**self._kafka, "group.id": self._group, "enable.auto.commit": False})
        try:
            introduce(producer, self._topic, COORDINATOR_TIMEOUT_S)
            producer.init_transactions(COORDINATOR_TIMEOUT_S)
            # From here on, commits of another redrive are visible, and it cannot commit any more.
            records = list(islice(self._each(), count))
            if not records:
                return 0
            with _transaction(producer):
                made = [(record, outgoing) for record in records if (outgoing := make(record)) is not None]
                produce = patient(producer)
                for record, outgoing in made:
                    _hand_over(produce, record, outgoing, refused)
                after = self._behind(records)
                producer.send_offsets_to_transaction(after, consumer.consumer_group_metadata(), COORDINATOR_TIMEOUT_S)
        except KafkaException as error:
            if refused:
                raise TooLarge(f"{max(refused)[1]}; nothing was moved") from error
            raise Unavailable(
                f"{self._topic}: records were not moved, or the move is in doubt: {error.args[0].str()}; check the topic"
            ) from error
        finally:
            consumer.close()
        return len(made)

    def _each(self) -> Iterator[KafkaRecord]:
        for partition, history in self._histories():
            yield from map(received_of, history.records(self._first(partition, history), history.latest(), committed=True))

    def _histories(self) -> Iterator[tuple[int, TopicHistory]]:
        for partition in range(Topics(self._kafka).partitions().get(self._topic, 0)):
            yield partition, TopicHistory(self._kafka, self._topic, partition)

    def _first(self, partition: int, history: TopicHistory) -> int:
        return max(history.earliest(), committed_offset(self._kafka, self._group, self._topic, partition))

    def _behind(self, records: Sequence[KafkaRecord]) -> list[TopicPartition]:
        after = {record.partition: record.offset + 1 for record in records}
        return [TopicPartition(self._topic, partition, offset) for partition, offset in after.items()]


def _hand_over(produce: Callable[..., None], record: KafkaRecord, outgoing: Outgoing, refused: list[tuple[int, str]]) -> None:
    """Append to ``refused`` each record that is too large, with its size, by the error of the client or of Kafka for the whole batch."""
    size_bytes = len(outgoing.value or b"")

    def told(error: KafkaError | None, _message: object = None) -> None:
        if error is not None and error.code() in TOO_LARGE:
            place = f"{record.topic}-{record.partition}, offset {record.offset}, of {size_bytes} bytes"
            refused.append((size_bytes, f"{place}, is too large for {outgoing.topic}; raise max.message.bytes of that topic"))

    try:
        hand_over(produce, outgoing, told)
    except KafkaException as error:
        told(error.args[0])
        raise


@contextmanager
def _transaction(producer: Producer) -> Iterator[None]:
    """Run a transaction that always ends. An open transaction would block all readers of its topics until Kafka aborts it."""
    producer.begin_transaction()
    try:
        yield
        producer.commit_transaction(COORDINATOR_TIMEOUT_S)
    except BaseException:
        with suppress(KafkaException):  # for example of a commit in doubt; the next init_transactions ends it
            producer.abort_transaction(COORDINATOR_TIMEOUT_S)
        raise
