"""A model of Kafka: partitions, idempotent and transactional producers by protocol v1, and a network that loses, repeats and delays.

What a client library does inside itself is here as well: it repeats a request until its answer comes, so a request may be carried out
more than once, and late. That is how an EndTxn of one transaction can end the next one of the same producer epoch.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from tests.sim.world import Process, Promise, World

T = TypeVar("T")
Headers = Sequence[tuple[str, str | bytes | None]]

#: How long a client waits for an answer before it repeats the request, and how long it goes on with that.
REQUEST_MS: Final = 40.0
GIVE_UP_MS: Final = 130.0
#: How soon a client asks again when it was told to.
BACKOFF_MS: Final = 4.0
#: A request that was held up arrives at most so much later.
HELD_MS: Final = 400.0
#: So much more often it is the end of a transaction: of all repetitions the one that does most harm.
LATE_ENDS: Final = 2.5
#: The broker's topics.
JOURNAL, SNAPSHOTS, STORE, INGRESS = "journal", "snapshots", "store", "ingress"
#: Of a fetch: what was to be read has been deleted.
TRIMMED: Final = "trimmed"


class KafkaFault(Exception):
    """What a client is told: ``fenced``, ``invalid-state``, ``incomplete``, ``failed``, ``timed-out``, ``trimmed`` or ``closed``."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


class NotNow(Exception):
    """The server says: ask again."""


@dataclass(slots=True)
class Weather:
    """What the network and the servers do to requests; probabilities of one request."""

    lost: float = 0.0  # it never arrives
    unanswered: float = 0.0  # it is carried out, and the answer is lost
    held: float = 0.0  # it arrives after its own repetition
    slow: float = 0.0  # it takes ten times as long
    failed_append: float = 0.0  # an append is reported failed, stored or not
    delay_ms: float = 1.0  # a way in the network takes up to this
    transaction_ms: float = 900.0  # the coordinator ends a transaction that is open for longer


class Transaction:
    """One transaction of a transactional id."""

    __slots__ = ("partitions",)

    def __init__(self) -> None:
        self.partitions: dict[Partition, None] = {}


class Record(NamedTuple):
    """A stored record. ``transaction`` is None for one outside of transactions; ``key`` and ``value`` are None for a marker."""

    offset: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    transaction: Transaction | None
    marker: bool = False


class ToWrite(NamedTuple):
    """A record to be stored."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()


@dataclass(slots=True)
class _Sequence:
    """What a partition knows of a producer: its epoch, and the offsets of its batches by sequence."""

    epoch: int
    next: int = 0
    offsets: dict[int, int] = field(default_factory=dict)


class Partition:
    """A partition's log."""

    def __init__(self, topic: str, index: int = 0) -> None:
        self.topic = topic
        self.index = index
        self.records: list[Record] = []  # also what was trimmed, for the judgement
        self.start = 0  # what is before it has been deleted
        self.end = 0  # the high watermark
        self.open: dict[Transaction, int] = {}  # first offset of each open transaction
        self.committed: dict[Transaction, bool] = {}
        self.producers: dict[int, _Sequence] = {}
        self.on_delete: Callable[[], None] = lambda: None  # records are trimmed, or keys deleted

    @property
    def stable(self) -> int:
        """The last stable offset: a reader of committed records stops there."""
        return min(self.open.values(), default=self.end)

    def store(self, record: ToWrite, transaction: Transaction | None = None, *, marker: bool = False) -> int:
        """At the end."""
        offset = self.end
        self.records.append(Record(offset, record.key, record.value, record.headers, transaction, marker))
        self.end += 1
        if transaction is not None and not marker:
            self.open.setdefault(transaction, offset)
        return offset

    def produce(self, producer: int, epoch: int, sequence: int, records: Sequence[ToWrite], transaction: Transaction | None) -> int:
        """A batch of an idempotent producer; returns its first offset. Raises KafkaFault or NotNow."""
        known = self.producers.get(producer)
        if known is None or epoch > known.epoch:
            known = self.producers[producer] = _Sequence(epoch)
        if epoch < known.epoch:
            raise KafkaFault("fenced")
        if sequence < known.next:
            return known.offsets[sequence]
        if sequence > known.next:
            raise NotNow
        offset = self.end
        known.offsets[sequence] = offset
        known.next = sequence + 1
        for record in records:
            self.store(record, transaction)
        if records[0].value is None:
            self.on_delete()
        return offset

    def finish(self, transaction: Transaction, producer: int, epoch: int, *, commit: bool) -> None:
        """A transaction's marker."""
        self.open.pop(transaction, None)
        self.committed[transaction] = commit
        self.store(ToWrite(None, None), transaction, marker=True)
        known = self.producers.get(producer)
        if known is None or epoch > known.epoch:
            self.producers[producer] = _Sequence(epoch)

    def read(self, start: int, *, committed: bool, count: int = 1 << 30) -> tuple[list[Record], int]:
        """Records from an offset on, and where to read on. Raises KafkaFault."""
        if start < self.start:
            raise KafkaFault(TRIMMED)
        limit = self.stable if committed else self.end
        found: list[Record] = []
        for place in range(bisect_left(self.records, (start,), key=lambda record: (record.offset,)), len(self.records)):
            record = self.records[place]
            if record.offset >= limit:
                break
            if len(found) == count:
                return found, record.offset
            if not record.marker and not (committed and record.transaction is not None and not self.committed.get(record.transaction)):
                found.append(record)
        return found, max(start, limit)

    def trim(self, end: int) -> None:
        """DeleteRecords: none before an offset is there any more."""
        self.start = max(self.start, end)
        self.on_delete()

    def compact(self, below: int) -> int:
        """Of committed records below an offset only the newest of each key stays; returns how many go."""
        before, below = len(self.records), min(below, self.stable)
        newest = {record.key: record.offset for record in self.records if record.offset < below and self._counts(record)}
        self.records = [
            record for record in self.records if record.offset >= below or (self._counts(record) and newest[record.key] == record.offset)
        ]
        return before - len(self.records)

    def _counts(self, record: Record) -> bool:
        return not record.marker and (record.transaction is None or bool(self.committed.get(record.transaction)))


@dataclass(slots=True)
class _Coordinated:
    """What the coordinator knows of a transactional id. ``state``: empty, ongoing, prepare-commit, complete-commit, and as -abort."""

    producer: int
    epoch: int = 0
    state: str = "empty"
    transaction: Transaction = field(default_factory=Transaction)
    markers_due: int = 0


class Kafka:
    """The cluster, as clients reach it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weather = Weather()
        self.away_until_ms = 0.0  # a leader is being elected: nothing is carried out
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._coordinated: dict[str, _Coordinated] = {}
        self._producers = 0

    def partition(self, topic: str, index: int = 0) -> Partition:
        """A partition; there from the first time it is asked for."""
        found = self._partitions.get((topic, index))
        if found is None:
            found = self._partitions[topic, index] = Partition(topic, index)
        return found

    @property
    def unfinished(self) -> bool:
        """Whether some partition holds records of an open transaction."""
        return any(partition.open for partition in self._partitions.values())

    def new_producer(self) -> int:
        """A producer id."""
        self._producers += 1
        return self._producers

    # -- the network -------------------------------------------------------------------------------------------------

    def request(self, process: Process, what: str, carry_out: Callable[[], T], give_up_ms: float = GIVE_UP_MS) -> Promise[T]:
        """A request, repeated until it is answered. Fails with KafkaFault."""
        promise: Promise[T] = Promise()
        self._try(process, what, carry_out, promise, self.world.now_ms + give_up_ms)
        return promise

    def _try(self, process: Process, what: str, carry_out: Callable[[], T], promise: Promise[T], deadline_ms: float) -> None:
        world, weather = self.world, self.weather
        if promise.done:
            return
        if world.now_ms > deadline_ms:
            world.note("time out", f"{process.name}, {what}")
            promise.fail(KafkaFault("timed-out"))
            return
        again = (self._try, process, what, carry_out, promise, deadline_ms)
        fate = world.random.random()
        held = weather.held * (LATE_ENDS if what == "EndTxn" else 1.0)
        if fate < weather.lost:
            world.note("lose request", f"{process.name}, {what}")
            process.after(REQUEST_MS, *again)
        elif fate < weather.lost + weather.unanswered:
            world.note("lose answer", f"{process.name}, {what}")
            world.after(self._way_ms(), self._arrive_silently, carry_out)
            process.after(REQUEST_MS, *again)
        elif fate < weather.lost + weather.unanswered + held:
            held_ms = REQUEST_MS * (0.5 + world.random.random()) + world.random.random() ** 3 * HELD_MS
            world.note("hold up EndTxn" if what == "EndTxn" else "hold up request", f"{process.name}, {what} for {held_ms:.0f} ms")
            world.after(held_ms, self._arrive_silently, carry_out)
            process.after(REQUEST_MS, *again)
        else:
            world.after(self._way_ms(), self._arrive, process, carry_out, promise, again)

    def _way_ms(self) -> float:
        way_ms = self.world.random.random() * self.weather.delay_ms
        if not self.world.chance(self.weather.slow):
            return way_ms
        self.world.note("slow down")
        return way_ms * 10

    def _arrive(self, process: Process, carry_out: Callable[[], T], promise: Promise[T], again: tuple[Callable[..., None], ...]) -> None:
        try:
            if self.world.now_ms < self.away_until_ms:
                self.world.note("change leader", process.name)
                raise NotNow
            value = carry_out()
        except NotNow:
            process.after(self._way_ms() + BACKOFF_MS, *again)
        except KafkaFault as fault:
            if fault.code == "fenced":
                self.world.note("fence", process.name)
            process.after(self._way_ms(), promise.fail, fault)
        else:
            process.after(self._way_ms(), promise.keep, value)

    def _arrive_silently(self, carry_out: Callable[[], object]) -> None:
        if self.world.now_ms >= self.away_until_ms:
            try:
                carry_out()
            except (NotNow, KafkaFault):
                return

    # -- reading and writing -----------------------------------------------------------------------------------------

    def fetch(
        self, process: Process, partition: Partition, start: int, *, committed: bool, count: int = 1 << 30
    ) -> Promise[tuple[list[Record], int]]:
        """Records from an offset on, and where to read on."""
        return self.request(process, f"Fetch {partition.topic}", lambda: partition.read(start, committed=committed, count=count))

    def end_of(self, process: Process, partition: Partition, *, committed: bool = False) -> Promise[int]:
        """The high watermark, or the last stable offset."""
        return self.request(process, "ListOffsets", lambda: partition.stable if committed else partition.end)

    # -- the coordinator of transactions, protocol v1 ----------------------------------------------------------------

    def init(self, transactional_id: str) -> tuple[int, int]:
        """InitProducerId: a new epoch, which ends what an older one has open."""
        known = self._coordinated.get(transactional_id)
        if known is None:
            known = self._coordinated[transactional_id] = _Coordinated(self.new_producer())
            return known.producer, known.epoch
        if known.state == "ongoing":
            known.epoch += 1
            self._finish(known, commit=False)
        if known.state.startswith("prepare"):
            raise NotNow
        known.epoch += 1
        known.state = "empty"
        return known.producer, known.epoch

    def _known(self, transactional_id: str, producer: int, epoch: int) -> _Coordinated:
        known = self._coordinated[transactional_id]
        if known.producer != producer or known.epoch != epoch:
            raise KafkaFault("fenced")
        return known

    def add_partition(self, transactional_id: str, producer: int, epoch: int, partition: Partition) -> None:
        """AddPartitionsToTxn; the first one begins the transaction."""
        known = self._known(transactional_id, producer, epoch)
        if known.state.startswith("prepare"):
            raise NotNow
        if known.state != "ongoing":
            known.state = "ongoing"
            known.transaction = Transaction()
            self.world.after(self.weather.transaction_ms, self._expire, known, known.transaction)
        known.transaction.partitions[partition] = None

    def produce(
        self, transactional_id: str, producer: int, epoch: int, partition: Partition, sequence: int, records: Sequence[ToWrite]
    ) -> int:
        """Produce in a transaction; the partition's leader asks the coordinator whether it is one that is going on."""
        known = self._coordinated[transactional_id]
        batch = partition.producers.get(producer)
        if batch is not None and batch.epoch == epoch and sequence < batch.next:
            return batch.offsets[sequence]
        going_on = known.state == "ongoing" and known.epoch == epoch and partition in known.transaction.partitions
        if not going_on:
            raise KafkaFault("fenced" if known.epoch > epoch else "invalid-state")
        return partition.produce(producer, epoch, sequence, records, known.transaction)

    def end(self, transactional_id: str, producer: int, epoch: int, *, commit: bool) -> None:
        """EndTxn. A repetition finds the transaction ended, or the next one going on: with protocol v1 nothing tells them apart."""
        known = self._known(transactional_id, producer, epoch)
        if known.state == "ongoing":
            self._finish(known, commit=commit)
        elif not known.state.endswith("commit" if commit else "abort"):
            raise KafkaFault("invalid-state")

    def _expire(self, known: _Coordinated, transaction: Transaction) -> None:
        if known.state == "ongoing" and known.transaction is transaction:
            self.world.note("expire transaction")
            known.epoch += 1
            self._finish(known, commit=False)

    def _finish(self, known: _Coordinated, *, commit: bool) -> None:
        end = "commit" if commit else "abort"
        known.state = f"prepare-{end}"
        known.markers_due = len(known.transaction.partitions)
        for partition in known.transaction.partitions:
            self.world.after(self._way_ms(), self._mark, known, partition, known.transaction, known.epoch, commit)
        if not known.markers_due:
            known.state = f"complete-{end}"

    def _mark(self, known: _Coordinated, partition: Partition, transaction: Transaction, epoch: int, commit: bool) -> None:
        partition.finish(transaction, known.producer, epoch, commit=commit)
        known.markers_due -= 1
        if not known.markers_due:
            known.state = f"complete-{'commit' if commit else 'abort'}"


class Producer:
    """A transactional producer, from its ``init`` on."""

    def __init__(self, kafka: Kafka, process: Process, transactional_id: str) -> None:
        self._kafka = kafka
        self._process = process
        self._id = transactional_id
        self._added: dict[Partition, None] = {}
        self._sequences: dict[Partition, int] = {}
        self._producer = self._epoch = -1
        self._incomplete = False  # a record of the transaction was not stored

    async def init(self) -> None:
        """Whatever an earlier one had open is ended."""
        self._producer, self._epoch = await self._kafka.request(self._process, "InitProducerId", lambda: self._kafka.init(self._id))

    def begin(self) -> None:
        """A transaction; nothing is sent for that."""
        self._added.clear()
        self._incomplete = False

    async def produce(self, partition: Partition, records: Sequence[ToWrite]) -> None:
        """Records of the transaction. Raises KafkaFault: then it cannot be committed any more."""
        kafka, name = self._kafka, (self._id, self._producer, self._epoch)
        sequence = self._sequences.get(partition, 0)
        self._sequences[partition] = sequence + 1
        try:
            if partition not in self._added:
                await kafka.request(self._process, "AddPartitionsToTxn", lambda: kafka.add_partition(*name, partition))
                self._added[partition] = None
            await kafka.request(self._process, f"Produce {partition.topic}", lambda: kafka.produce(*name, partition, sequence, records))
        except KafkaFault:
            self._incomplete = True
            raise

    async def end(self, *, commit: bool) -> None:
        """Commit or abort. Raises KafkaFault: ``timed-out`` leaves open which it was."""
        if commit and self._incomplete:
            raise KafkaFault("incomplete")
        kafka, name = self._kafka, (self._id, self._producer, self._epoch)
        await kafka.request(self._process, "EndTxn", lambda: kafka.end(*name, commit=commit))


class Appender:
    """An idempotent producer to one partition, with many appends on their way; ``on_outcome(offset, error)`` is called in their order."""

    def __init__(self, kafka: Kafka, process: Process, partition: Partition, on_outcome: Callable[[int, str | None], None]) -> None:
        self._kafka = kafka
        self._process = process
        self._partition = partition
        self._on_outcome = on_outcome
        self._producer = kafka.new_producer()
        self._sequence = 0
        self._waiting: list[Promise[int]] = []
        self._stored: set[int] = set()  # sequences
        self._failed: set[int] = set()
        self.closed = False

    def append(self, record: ToWrite) -> None:
        """Send it off. It is never given up; the fault to report one as failed, stored or not, is Kafka's weather."""
        kafka, sequence = self._kafka, self._sequence
        self._sequence += 1
        promise = kafka.request(
            self._process, f"Produce {self._partition.topic}", lambda: self._store(sequence, record), give_up_ms=float("inf")
        )
        if kafka.world.chance(kafka.weather.failed_append):
            # About as long as it takes: now before it is stored, now before that is told.
            self._process.after(kafka.world.random.random() * 3 * kafka.weather.delay_ms, self._report_failed, sequence, promise)
        self._waiting.append(promise)
        promise.then(self._settle)

    def _store(self, sequence: int, record: ToWrite) -> int:
        offset = self._partition.produce(self._producer, 0, sequence, [record], None)
        self._stored.add(sequence)
        self._compare(sequence)
        return offset

    def _report_failed(self, sequence: int, promise: Promise[int]) -> None:
        if not promise.done:
            self._kafka.world.note("fail append", f"{self._process.name}, append {sequence}")
            self._failed.add(sequence)
            self._compare(sequence)
            promise.fail(KafkaFault("failed"))

    def _compare(self, sequence: int) -> None:
        if sequence in self._stored and sequence in self._failed:
            self._kafka.world.note("fail stored append", f"{self._process.name}, append {sequence}")

    def close(self) -> None:
        """Give up what is on its way; some of it may arrive nevertheless."""
        self.closed = True
        for promise in self._waiting:
            promise.fail(KafkaFault("closed"))

    def _settle(self) -> None:
        while self._waiting and self._waiting[0].done and not self.closed:
            promise = self._waiting.pop(0)
            if promise.error is not None:
                self._on_outcome(-1, str(promise.error))
            else:
                self._on_outcome(promise.value, None)
