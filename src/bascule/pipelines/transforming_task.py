"""The resident task of diverts with transformations: it carries like a plain one, and gets their records from waiting Spark tasks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from bascule.core.kafka_records import KafkaRecord, Place, Taken
from bascule.pipelines.carry import Carrier, held_position, read_again
from bascule.pipelines.divert import JournalReader, WantedMessage
from bascule.pipelines.exchange import AskedMessage, MadeRow, NotTransformed, Transformer
from bascule.pipelines.jobs import spark_watch
from bascule.pipelines.tasks import (
    MADE_BYTES_MAX,
    DivertTask,
    ForeignRow,
    Made,
    OpenSource,
    carry_messages,
    made_record,
    rest_at_tail,
    transformed_of,
)
from bascule.writer.lineage import SeenRecord

#: A batch for the waiting tasks ends after a journal record with which it has this many messages, or this many bytes of them.
ASKED_MESSAGES: Final = 2_000
ASKED_BYTES: Final = 16 << 20
#: The first batch ends after this many messages. Batches grow while they take less than this time, in seconds, and shrink if one takes
#: twice as long: a transformation may call a service for each message, and waiting tasks must answer within exchange.ANSWER_S.
FIRST_MESSAGES: Final = 100
ASKED_S: Final = 10.0
#: A batch may have this many times the messages of the one before, if this is expected to take no longer than ASKED_S.
GROWTH_MAX: Final = 10
#: How long the task looks for further records before it commits a transformed batch, in seconds. Kafka's client counts in milliseconds.
FURTHER_S: Final = 0.001
#: How long the task waits for waiting tasks before it takes the next records, in seconds. All that come meanwhile are one batch.
GATHERED_S: Final = 0.25
#: Returns the records of messages, both by divert, up to a number of bytes, and calls a function meanwhile (``Transformer.records``).
Ask = Callable[[Mapping[str, Sequence[AskedMessage]], int, Callable[[], None]], dict[str, list[MadeRow]]]


@dataclass(slots=True)
class BatchLimit:
    """The number of messages after which a batch ends."""

    messages: int = FIRST_MESSAGES

    def took(self, messages: int, duration_s: float) -> None:
        """Adapt to the time, in seconds, that waiting tasks needed for a batch."""
        if duration_s > 2 * ASKED_S:
            self.messages = max(1, int(messages * ASKED_S / duration_s))
        elif duration_s < ASKED_S and messages >= self.messages / 2:
            growth = ASKED_S / max(duration_s, ASKED_S / GROWTH_MAX)
            self.messages = min(ASKED_MESSAGES, max(self.messages + 1, int(growth * self.messages)))


class FurtherRecords:
    """How long the source gathers further records behind those that it has given.

    While a batch is transformed, more records come. If they are handed over before the batch is committed, Spark transforms them while
    Kafka commits. So a batch is committed where the source has no further record after it was transformed.
    """

    def __init__(self) -> None:
        self._at_tail = True
        self._until_s = 0.0

    def gathers_s(self, _place: Place) -> float:
        """Return how long the records of the source are not a tail yet, in seconds (``KafkaSource``).

        The source asks when it gives the first records behind a tail, and while it looks for further ones.
        """
        if self._at_tail:
            self._look()
        return self._until_s - time.monotonic()

    def carried(self, taken: Taken) -> None:
        """Look for further records behind those that were carried."""
        self._look()
        self._at_tail = not taken.records or bool(taken.tails)

    def _look(self) -> None:
        self._at_tail = False
        self._until_s = time.monotonic() + FURTHER_S


@dataclass(slots=True)
class AskedBatch:
    """Journal records that were read and not carried yet, with what their messages are for the transformations."""

    messages_max: int
    records: list[tuple[SeenRecord, list[WantedMessage], dict[str, Any]]] = field(default_factory=list)
    asked: dict[str, list[AskedMessage]] = field(default_factory=dict)
    messages: int = 0
    size_bytes: int = 0

    @property
    def full(self) -> bool:
        """Return whether the batch has to be transformed before more is read."""
        return self.messages >= min(self.messages_max, ASKED_MESSAGES) or self.size_bytes >= ASKED_BYTES

    def add(self, record: KafkaRecord, messages: list[WantedMessage], state: dict[str, Any]) -> None:
        """Add a record with its messages, and the state of the reader after it."""
        self.records.append((SeenRecord(record.offset, record.key, record.value), messages, state))
        for taken in messages:
            send = taken.send
            for divert in taken.diverts:
                if divert.transformed and divert.name not in taken.faults:
                    self.messages += 1
                    self.size_bytes += len(send.body)
                    self.asked.setdefault(divert.name, []).append(
                        AskedMessage(taken.offset, taken.epoch, taken.sequence, taken.index, send.address, send.timestamp_ms, send.body)
                    )


@dataclass(frozen=True, slots=True)
class TransformingTask:
    """A DivertTask some of whose diverts have transformations. Waiting tasks reach it at the socket ``path``. Pickled for a worker.

    The first batch ends after ``first`` messages.
    """

    task: DivertTask
    path: str
    first: int = FIRST_MESSAGES

    def run(self, open_source: OpenSource) -> None:
        """Carry the records of the journal from the position on. Raises NotTransformed with the records that need another way."""
        names = [divert.name for divert in self.task.diverts if divert.transformed]
        with Transformer(self.path, names, spark_watch()) as transformer:
            read_again(partial(self._carry, open_source, transformer))

    def _carry(self, open_source: OpenSource, transformer: Transformer) -> None:
        task = self.task
        position = held_position(task.pipelines, task.claim)
        reader, engine, place = task.reader(position), task.engine(), (task.claim.topic, task.claim.partition)
        state, limit, further = reader.state(), BatchLimit(self.first), FurtherRecords()
        with (
            # The reader is ahead of what is carried: the position gets the state as of the last record that was carried.
            Carrier(task.pipelines, task.claim, position, lambda: state) as carrier,
            open_source({place: carrier.start}, further.gathers_s) as source,
        ):
            for taken in source:
                asked: Collection[str] = ()
                for batch in batches_of(taken.records, reader, carrier.begun_at, limit):
                    transformed = _asked(batch, transformer.records, carrier)
                    limit.took(batch.messages, transformer.took_s if batch.asked else 0.0)
                    asked = batch.asked
                    for record, messages, after in batch.records:
                        state = after
                        carry_messages(messages, record, engine, carrier, transformed)
                rest_at_tail(taken, carrier)
                if taken.records and not asked and carrier.gathers_s() <= 0:
                    carrier.rest()  # a journal that is busy with other messages has no tail
                if not transformer.ready(asked, 0.0):
                    carrier.pause()
                    transformer.ready(asked, GATHERED_S)
                further.carried(taken)
            carrier.commit()


def batches_of(records: Sequence[KafkaRecord], reader: JournalReader, begun_at: int, limit: BatchLimit) -> Iterator[AskedBatch]:
    """Yield the records from ``begun_at`` on, in batches of bounded size."""
    batch = AskedBatch(limit.messages)
    for record in records:
        if record.offset < begun_at:
            continue
        batch.add(record, reader.take(record.offset, record.key, record.value), reader.state())
        if batch.full:
            yield batch
            batch = AskedBatch(limit.messages)
    if batch.records:
        yield batch


def _asked(batch: AskedBatch, ask: Ask, carrier: Carrier) -> Any:
    """Return a function that returns the records of each message of the batch. Meanwhile, the previous batch is committed.

    Raises NotTransformed with the records to carry in another way, and ForeignRow.
    """
    made: Made = {}
    if batch.asked:
        try:
            answered = ask(batch.asked, MADE_BYTES_MAX, carrier.pause)
        except NotTransformed as error:
            error.start, error.end = carrier.position.offset, batch.records[-1][0].offset + 1
            raise
        for divert, rows in answered.items():
            known = {(message.offset, message.index) for message in batch.asked[divert]}
            for offset, index, topic, has_key, key, value, headers in rows:
                if (offset, index) not in known:
                    raise ForeignRow.of(divert, offset, index)
                made.setdefault((divert, offset, index), []).append(made_record(topic, has_key, key, value, headers))
    return partial(transformed_of, made, {})
