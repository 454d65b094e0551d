"""The tasks that Spark runs: one picklable object per query.

A plain divert and an ingress are *resident*: their task reads its source itself and runs until Spark's job is cancelled. A divert with a
transformation gets its rows in micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from bascule.core import crash
from bascule.core.errors import BadRecord, BasculeError, InvalidInput, Scope, Unavailable
from bascule.core.kafka_records import Gather, KafkaRecord, Place, SourceStart, Taken
from bascule.journal.errors import ForeignRecord
from bascule.journal.records import KEY_OF_KIND, Kind, Op, decode_send, entries
from bascule.pipelines.carry import Carrier, NewLeader, allow_writers, held_position, read_again
from bascule.pipelines.divert import (
    DivertEngine,
    DivertFilter,
    JournalReader,
    Transformed,
    TransformedRecord,
    WantedMessage,
    journal_header,
)
from bascule.pipelines.ingress import IngressEngine
from bascule.pipelines.rows import message_row
from bascule.pipelines.spec import DivertSpec, IngressSpec, PipelinesSpec
from bascule.writer.claims import Claim
from bascule.writer.lineage import SeenRecord
from bascule.writer.position import COMMON, Position

if TYPE_CHECKING:  # resident tasks do without Arrow, which is half of the start of the process that forks their workers
    import pyarrow as pa

#: The place of a message in the journal: the offset of its record, and its index there.
Message = tuple[int, int]
OFFSET_MAX = 2**63 - 1
#: Transformed records stay in memory until the journal's own rows come. Beyond this size, the batch is written in parts: the records of a
#: loaded broker contain many messages each, and a batch of them would not fit into memory.
MADE_BYTES_MAX = 256 << 20
#: Memory, in bytes, of a record in addition to its content.
HELD_BYTES = 1_000
#: The report of a task: Spark requires a row, and only the driver's progress shows it.
REPORT_SCHEMA = "records long, written long"


DATA_KEY = KEY_OF_KIND[Kind.DATA]
_RECORD_COLUMNS = ("divert", "offset", "index", "topic", "has_key", "key", "value", "headers")
_JOURNAL_COLUMNS = ("offset", "key", "value")
#: Where a message row has its place in the journal.
_OFFSET, _INDEX = 1, 4

#: Opens source partitions, each at its start, with how long its records are gathered. Iterating over them ends only in tests.
OpenSource = Callable[[Mapping[Place, SourceStart], Gather], AbstractContextManager[Iterable[Taken]]]


def rest_at_tail(taken: Taken, carrier: Carrier) -> None:
    """Let the carrier of a divert commit if no further record of the journal is there."""
    if taken.tails or not taken.records:
        carrier.rest()
        crash.point("task.divert.end")


def _rows(batch: pa.RecordBatch, columns: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    return zip(*(batch.column(name).to_pylist() for name in columns), strict=True)


def _dead_letter_topic(pipelines: PipelinesSpec) -> str | None:
    return None if pipelines.stop_on_error else pipelines.topics.dead_letters


class UnknownDivert(BasculeError):
    """The broker applies an exclusive divert that these pipelines do not know. A restart of the pipelines helps."""

    retriable = True
    scope = Scope.OPERATION


class BatchTooLarge(BasculeError):
    """Transformations make more records of a batch than fit into memory: the batch must be written in parts."""

    retriable = False
    scope = Scope.OPERATION


class ForeignRow(InvalidInput):
    """A transformation returned a row that belongs to none of the messages that it got: it has changed ``offset`` or ``index``."""

    scope = Scope.PIPELINE

    @classmethod
    def of(cls, divert: str, offset: int | None, index: int | None) -> Self:
        """Return the error of a row."""
        return cls(
            f"divert {divert!r}: the transformation returned a row with offset {offset} and index {index}, which belongs to no message that"
            " it got; it must keep the columns offset and index"
        )


@dataclass(frozen=True, slots=True)
class KnownDiverts:
    """The exclusive diverts that a driver found at its start.

    Those in ``separate`` have a position of their own; those in ``removed`` are no longer configured.

    The driver has not seen epochs that began in the journal at ``end`` or later.
    """

    separate: frozenset[str] = frozenset()
    removed: frozenset[str] = frozenset()
    end: int = 0

    def covers(self, name: str, epoch: int) -> bool:
        """Return whether the common position covers messages that a divert, not a member, took in an epoch.

        Raises UnknownDivert.
        """
        if name in self.separate:
            return False
        if epoch >= self.end and name not in self.removed:
            raise UnknownDivert(
                f"exclusive divert {name!r} of the broker is not configured in these pipelines. Add the divert and restart the pipelines"
            )
        return True


Batches = Iterator["pa.RecordBatch"]


@dataclass(frozen=True, slots=True)
class DivertTask:
    """Writes journal records to target topics, for all diverts that share a position.

    Without transformations the task is resident (``run``). Otherwise it is called for each batch of rows. Rows with a ``divert`` are
    results of users' transformations (transformation.RECORD_SCHEMA); they come before the journal's own rows. ``failed`` has the messages
    on which a transformation failed, by divert, and why. Messages of exclusive diverts that are not configured are dead-lettered by the
    position that answers for them: the divert's own position if it has one, otherwise the common position (``known``). ``made_bytes_max``
    limits the size of transformed rows; it is None for a single journal record, which is never split. A batch whose rows begin at the
    offset ``start`` is refused if the position is before it: it would skip the records between them. If Spark reads batch after
    batch, ``leader_epoch`` is the epoch that the position had before the first batch. A batch is refused once the position has another
    epoch, because Spark may hold records of a former leader. It is None for a batch that reads its records itself.
    """

    pipelines: PipelinesSpec
    claim: Claim
    diverts: tuple[DivertSpec, ...]
    known: KnownDiverts = KnownDiverts()
    failed: dict[tuple[str, int, int], str] = field(default_factory=dict)
    made_bytes_max: int | None = MADE_BYTES_MAX
    start: int = 0
    leader_epoch: int | None = None

    def __call__(self, batches: Batches) -> Batches:
        """Carry the rows of one batch in order.

        Raises, before anything is written, BatchTooLarge, NewLeader, and Unavailable if it would skip records. Raises ForeignRow.
        """
        import pyarrow as pa

        position = held_position(self.pipelines, self.claim)
        if position.offset < self.start:
            raise Unavailable(f"the batch begins at offset {self.start}, and the position was moved back to {position.offset}")
        if self.leader_epoch not in (None, position.leader_epoch):
            raise NewLeader(f"{position.topic}-{position.partition} has a new leader, so the query must read the records again")
        reader, engine = self.reader(position), self.engine()
        made: Made = {}
        transformed = partial(transformed_of, made, self.failed) if any(divert.transformed for divert in self.diverts) else None
        records = made_bytes = 0
        rows = _RowPlaces(made)
        with Carrier(self.pipelines, self.claim, position, reader.state, unseen=True) as carrier:
            for batch in batches:
                if transformed is not None:
                    batch, added_bytes = _split(batch, made)
                    made_bytes += added_bytes
                    if self.made_bytes_max is not None and made_bytes > self.made_bytes_max:
                        raise BatchTooLarge(f"transformations produced more than {self.made_bytes_max} bytes from a batch")
                records += batch.num_rows
                for offset, key, value in _rows(batch, _JOURNAL_COLUMNS):
                    rows.reach(offset)
                    places = rows.of(offset)
                    if offset >= carrier.begun_at:
                        messages = reader.take(offset, key, value)
                        self._check_rows(places, messages, offset, key, value)
                        carry_messages(messages, SeenRecord(offset, key, value), engine, carrier, transformed)
            rows.reach(None)
            carrier.commit()
        yield pa.RecordBatch.from_pydict({"records": [records], "written": [carrier.written]})

    def run(self, open_source: OpenSource) -> None:
        """Carry the records of the journal from the position on. A transaction ends where no further record is there, or at its limits."""
        read_again(partial(self._carry, open_source))

    def _carry(self, open_source: OpenSource) -> None:
        position = held_position(self.pipelines, self.claim)
        reader, engine, place = self.reader(position), self.engine(), (self.claim.topic, self.claim.partition)
        with (
            Carrier(self.pipelines, self.claim, position, reader.state) as carrier,
            open_source({place: carrier.start}, lambda _: carrier.gathers_s()) as source,
        ):
            for taken in source:
                for record in taken.records:
                    if record.offset >= carrier.begun_at:
                        messages = reader.take(record.offset, record.key, record.value)
                        carry_messages(messages, SeenRecord(record.offset, record.key, record.value), engine, carrier, None)
                rest_at_tail(taken, carrier)
            carrier.commit()

    def failed_of(self, divert: DivertSpec) -> frozenset[Message]:
        """Return the messages on which a divert's transformation failed."""
        return frozenset((offset, index) for name, offset, index in self.failed if name == divert.name)

    def reader(self, position: Position) -> JournalReader:
        """Return a reader of the journal that begins at a position."""
        return JournalReader(position, self.diverts, self._answers)

    def engine(self) -> DivertEngine:
        """Return what converts messages to records."""
        source = (self.claim.topic, self.claim.partition)
        return DivertEngine(self.pipelines.bridge_id, source, _dead_letter_topic(self.pipelines), self.pipelines.topics.reserved)

    def _check_rows(
        self, rows: set[tuple[str, int, int]], messages: Sequence[WantedMessage], offset: int, key: bytes | None, value: bytes | None
    ) -> None:
        """Raise ForeignRow if one of these transformed rows belongs to no message of the journal record."""
        rows -= {(divert.name, offset, taken.index) for taken in messages for divert in taken.diverts}
        if rows and key is not None and value is not None:
            # The transformation also gets messages that the reader drops.
            for divert in self.diverts:
                got = RowsTask(divert, self.failed_of(divert)).places(offset, key, value) if divert.transformed else ()
                rows -= {(divert.name, *place) for place in got}
        if rows:
            raise ForeignRow.of(*min(rows))

    def _answers(self, name: str, epoch: int) -> bool:
        return self.known.covers(name, epoch) if self.claim.key.startswith(f"{COMMON}/") else name in self.claim.members


def carry_messages(
    messages: Sequence[WantedMessage], record: SeenRecord, engine: DivertEngine, carrier: Carrier, transformed: Transformed | None
) -> None:
    """Carry the messages of a journal record."""
    for taken in messages:
        for divert, output in engine.outputs(taken, transformed):
            carrier.add(output, partial(engine.dead_letter, taken, divert, "KAFKA_PRODUCE"), divert.name, taken.send.timestamp_ms)
            if carrier.spans is not None:
                carrier.spans.sent(divert, taken, output)
    carrier.reach(record)


#: Records that transformations made, by divert, offset and index of the message.
Made = dict[tuple[str, int, int], list[TransformedRecord]]


def transformed_of(
    made: Made, failed: Mapping[tuple[str, int, int], str], taken: WantedMessage, divert: DivertSpec
) -> list[TransformedRecord]:
    """Return the records of a message. Raises the reason if the transformation failed on it, or if it has no row."""
    key = (divert.name, taken.offset, taken.index)
    if key in failed:
        raise BadRecord(f"the transformation failed: {failed[key]}")
    records = made.get(key)
    if records is None:
        # The transformation left the message out, or it has no row: then this raises the reason.
        message_row(taken.send, taken.offset, taken.epoch, taken.sequence, taken.index, divert.key)
    return records or []


def made_record(
    topic: str | None, has_key: bool, key: bytes | None, value: bytes | None, headers: Iterable[tuple[str, str | None]] | None
) -> TransformedRecord:  # fmt: skip
    """Return a record from the columns of a transformation's result."""
    return TransformedRecord(topic, has_key, key, value, {name: (text or "").encode() for name, text in headers or ()})


class _RowPlaces:
    """Which transformed rows have not met their journal record yet. All of them come before the first of these records."""

    def __init__(self, made: Made) -> None:
        self._made = made
        self._left: list[tuple[int, str, int]] | None = None

    def reach(self, offset: int | None) -> None:
        """Come to the next journal record, or to the end. Raises ForeignRow for rows of a record that does not exist before it."""
        if self._left is None:
            self._left = sorted(((at, divert, index) for divert, at, index in self._made), reverse=True)
        if self._left and (offset is None or self._left[-1][0] < offset):
            at, divert, index = self._left[-1]
            raise ForeignRow.of(divert, at, index)

    def of(self, offset: int) -> set[tuple[str, int, int]]:
        """Return the places of the rows of a journal record, once."""
        found = set()
        while self._left and self._left[-1][0] == offset:
            at, divert, index = self._left.pop()
            found.add((divert, at, index))
        return found


def _split(batch: pa.RecordBatch, made: Made) -> tuple[pa.RecordBatch, int]:
    """Keep the transformed rows of a batch. Return its journal rows and the number of bytes kept. Raises ForeignRow."""
    import pyarrow.compute as pc

    own = pc.is_null(batch.column("divert"))
    kept = batch.filter(pc.invert(own))
    for divert, offset, index, topic, has_key, key, value, headers in _rows(kept, _RECORD_COLUMNS):
        if offset is None or index is None:
            raise ForeignRow.of(divert, offset, index)
        made.setdefault((divert, offset, index), []).append(made_record(topic, has_key, key, value, headers))
    return batch.filter(own), kept.nbytes + HELD_BYTES * kept.num_rows


@dataclass(frozen=True, slots=True)
class RowsTask:
    """Converts journal rows to message rows for one divert's transformation: at least those of the messages that the divert takes.

    Of these, it yields the messages from ``first`` to ``last`` (by offset and index) that are not in ``without``. It does not check the
    fence; the writer does, and drops messages that do not count.
    """

    divert: DivertSpec
    without: frozenset[Message] = frozenset()
    first: Message = (0, 0)
    last: Message = (OFFSET_MAX, 0)

    def __call__(self, batches: Batches) -> Batches:
        """Yield batches of message rows: a journal record may contain hundreds of messages, each a dozen times as large in memory."""
        from bascule.pipelines.arrow_rows import arrow_batches

        choice = DivertFilter(self.divert)
        for batch in batches:
            yield from arrow_batches(row for journal_row in _rows(batch, _JOURNAL_COLUMNS) for row in self._messages(choice, *journal_row))

    def places(self, offset: int, key: bytes, value: bytes) -> list[Message]:
        """Return the messages of a journal record that the transformation gets."""
        return [(row[_OFFSET], row[_INDEX]) for row in self._messages(DivertFilter(self.divert), offset, key, value)]

    def _messages(self, choice: DivertFilter, offset: int, key: bytes, value: bytes) -> Iterator[tuple[Any, ...]]:
        if key != DATA_KEY:
            return
        try:
            header = journal_header(key, value)
        except ForeignRecord:
            return
        sends = (decode_send(value, start, end) for op, start, end in entries(value) if op == Op.SEND)
        for index, send in enumerate(sends):
            message = (offset, index)
            if message in self.without or not self.first <= message <= self.last:
                continue
            if choice.wants(send, frozenset(), {}):
                with suppress(BasculeError, ValueError):  # the writer decodes the message as well, and dead-letters it
                    yield message_row(send, offset, header.epoch, header.sequence, index, self.divert.key)


@dataclass(frozen=True, slots=True)
class IngressTask:
    """Writes Kafka records to ``bascule.ingress``. A task may have several source partitions, each with its own position and writer."""

    pipelines: PipelinesSpec
    claims: tuple[Claim, ...]
    ingress: IngressSpec

    def run(self, open_source: OpenSource) -> None:
        """Carry the records of each source partition from its position on."""
        allow_writers(len(self.claims))
        read_again(partial(self._carry, open_source))

    def _carry(self, open_source: OpenSource) -> None:
        pipelines = self.pipelines
        engine = IngressEngine(
            self.ingress, pipelines.bridge_id, pipelines.topics.ingress, _dead_letter_topic(pipelines), pipelines.message_bytes_max
        )
        with ExitStack() as opened:
            carriers = {
                (claim.topic, claim.partition): opened.enter_context(Carrier(pipelines, claim, held_position(pipelines, claim)))
                for claim in self.claims
            }
            starts = {place: carrier.start for place, carrier in carriers.items()}
            source = opened.enter_context(open_source(starts, lambda place: carriers[place].gathers_s()))
            for taken in source:
                for record in taken.records:
                    _take_record(record, self.ingress, engine, carriers[record.topic, record.partition])
                for place in taken.tails if taken.records or taken.tails else carriers:
                    carriers[place].rest()
                for place, end in taken.ends.items():
                    carriers[place].pass_over(end)
                crash.point("task.ingress.end")
            for carrier in carriers.values():
                carrier.commit()


def _take_record(record: KafkaRecord, ingress: IngressSpec, engine: IngressEngine, carrier: Carrier) -> None:
    if record.offset < carrier.begun_at:
        return
    output = engine.output(record)
    if output is not None:
        carrier.add(output, partial(engine.dead_letter, record, "KAFKA_PRODUCE"), ingress.name, record.timestamp_ms)
        if carrier.spans is not None:
            carrier.spans.received(ingress, record, output)
    carrier.reach(SeenRecord(record.offset, record.key, record.value, record.timestamp_ms))
