"""A model of Kafka: a cluster, idempotent and transactional producers by protocol v1, and a network that loses, repeats and delays.

The internal work of a client library is modelled, too: it repeats a request until its answer comes, so a request may be carried out more
than once, and late. This is how an EndTxn of one transaction can end the next one of the same producer epoch. A client sends a request
about a partition to the node that is the leader in its metadata.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

from tests.sim.cluster import Cluster, NetworkConditions
from tests.sim.coordinator import Coordinators
from tests.sim.partition import TRIMMED, FormerLeader, Headers, KafkaFault, Later, NotNow, Partition, Record, ToWrite, Transaction
from tests.sim.world import Process, Promise, World

__all__ = [
    "GIVE_UP_MS",
    "INGRESS",
    "JOURNAL",
    "SNAPSHOTS",
    "STORE",
    "TRIMMED",
    "Appender",
    "Headers",
    "Kafka",
    "KafkaFault",
    "NetworkConditions",
    "NotNow",
    "Partition",
    "Producer",
    "Record",
    "ToWrite",
    "Transaction",
]

T = TypeVar("T")

#: How long a client waits for an answer before it repeats the request, and when it gives up.
REQUEST_MS: Final = 40.0
GIVE_UP_MS: Final = 130.0
#: How soon a client asks again after a retriable error.
BACKOFF_MS: Final = 4.0
#: The broker's topics.
JOURNAL, SNAPSHOTS, STORE, INGRESS = "journal", "snapshots", "store", "ingress"
#: Requests that a former leader answers.
_READS: Final = ("Fetch", "ListOffsets")


class Answer(Promise[T]):
    """The answer to a request, and how often the request was sent without one."""

    __slots__ = ("unanswered",)

    def __init__(self) -> None:
        super().__init__()
        self.unanswered = 0


class Kafka:
    """The cluster, as clients reach it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.cluster = Cluster(world)
        self.coordinators = Coordinators(self.cluster)
        #: The longest delay of a held request, and the factor by which ends of transactions are held more often: of all repetitions they do
        #: most harm.
        self.held_ms = 400.0
        self.late_ends = 2.5

    @property
    def weather(self) -> NetworkConditions:
        """Return the faults of network and servers."""
        return self.cluster.weather

    @weather.setter
    def weather(self, weather: NetworkConditions) -> None:
        self.cluster.use(weather)

    def partition(self, topic: str, index: int = 0) -> Partition:
        """Return a partition, which is created on first use."""
        return self.cluster.partition(topic, index)

    @property
    def unfinished(self) -> bool:
        """Return True if some partition has records of an open transaction."""
        return any(partition.open for partition in self.cluster.partitions.values())

    def new_producer(self) -> int:
        """Return a new producer id."""
        return self.coordinators.new_producer()

    # -- the network -------------------------------------------------------------------------------------------------

    def request(
        self,
        process: Process,
        what: str,
        carry_out: Callable[[], T],
        give_up_ms: float = GIVE_UP_MS,
        *,
        at: Partition | None = None,
    ) -> Answer[T]:
        """Repeat a request until it is answered, to the leader of a partition as far as the client knows. Fails with KafkaFault."""
        promise: Answer[T] = Answer()
        self._try(process, what, carry_out, promise, self.world.now_ms + give_up_ms, at)
        return promise

    def _try(
        self, process: Process, what: str, carry_out: Callable[[], T], promise: Answer[T], deadline_ms: float, at: Partition | None
    ) -> None:
        world, weather = self.world, self.cluster.weather
        if promise.done:
            return
        if world.now_ms > deadline_ms:
            world.note("time out", f"{process.name}, {what}")
            promise.fail(KafkaFault("timed-out"))
            return
        again = (self._try, process, what, carry_out, promise, deadline_ms, at)
        fate, unanswered = world.random.random(), weather.lost + weather.unanswered
        held = weather.held * (self.late_ends if what == "EndTxn" else 1.0)
        if fate >= unanswered + held:
            world.after(self._way_ms(), self._arrive, process, what, carry_out, promise, again, at)
            return
        promise.unanswered += 1
        if fate < weather.lost:
            world.note("lose request", f"{process.name}, {what}")
        elif fate < unanswered:
            world.note("lose answer", f"{process.name}, {what}")
            world.after(self._way_ms(), self._arrive_silently, carry_out, at)
        else:
            held_ms = REQUEST_MS * (0.5 + world.random.random()) + world.random.random() ** 3 * self.held_ms
            world.note("hold up EndTxn" if what == "EndTxn" else "hold up request", f"{process.name}, {what} for {held_ms:.0f} ms")
            world.after(held_ms, self._arrive_silently, carry_out, at)
        process.after(REQUEST_MS, *again)

    def _way_ms(self) -> float:
        weather, world = self.cluster.weather, self.world
        way_ms = world.random.random() * weather.delay_ms
        if not weather.slow or not world.chance(weather.slow):
            return way_ms
        world.note("slow down")
        return way_ms * 10

    def _arrive(
        self,
        process: Process,
        what: str,
        carry_out: Callable[[], T],
        promise: Answer[T],
        again: tuple[Callable[..., None], ...],
        at: Partition | None,
    ) -> None:
        try:
            if at is not None and at.former is not None and self.cluster.takes_for_leader(process, at.former):
                if not what.startswith(_READS):
                    # The former leader appends, and can never acknowledge: its peers do not fetch.
                    self.world.note("write to former leader", f"{process.name}, {what}")
                    self.cluster.refresh(process, at.former)
                    promise.unanswered += 1
                    process.after(REQUEST_MS, *again)
                    return
                value = self._from_former(process, carry_out, at, at.former)
            else:
                if at is not None and self.world.now_ms < at.away_until_ms:
                    self.world.note("change leader", process.name)
                    raise NotNow
                value = carry_out()
        except NotNow:
            process.after(self._way_ms() + BACKOFF_MS, *again)
        except KafkaFault as fault:
            if fault.code == "fenced":
                self.world.note("fence", process.name)
            process.after(self._way_ms(), promise.fail, fault)
        except Later as later:
            self.world.note("wait for replicas", process.name)
            later.answer.then(partial(self._answer, process, later.answer, promise, again))
        else:
            process.after(self._way_ms(), promise.keep, value)

    def _answer(self, process: Process, answer: Promise[T], promise: Answer[T], again: tuple[Callable[..., None], ...]) -> None:
        """Answer a request after its record was replicated, or truncated."""
        if answer.error is not None:
            process.after(self._way_ms() + BACKOFF_MS, *again)
        elif self.world.random.random() < self.cluster.answer_lost:
            self.world.note("lose answer", process.name)
            promise.unanswered += 1
            process.after(REQUEST_MS, *again)
        else:
            process.after(self._way_ms(), promise.keep, answer.value)

    def _from_former(self, process: Process, carry_out: Callable[[], T], at: Partition, former: FormerLeader) -> T:
        if former.end < at.end:
            self.world.note("read from former leader", f"{process.name}, {at.topic}")
        at.view = former
        try:
            return carry_out()
        finally:
            at.view = None

    def _arrive_silently(self, carry_out: Callable[[], object], at: Partition | None) -> None:
        if at is None or self.world.now_ms >= at.away_until_ms:
            try:
                carry_out()
            except (NotNow, KafkaFault, Later):
                return

    # -- reading -----------------------------------------------------------------------------------------------------

    def fetch(
        self, process: Process, partition: Partition, start: int, *, committed: bool, count: int = 1 << 30
    ) -> Answer[tuple[list[Record], int]]:
        """Return records from an offset on, and where to continue."""
        return self.request(
            process, f"Fetch {partition.topic}", lambda: partition.read(start, committed=committed, count=count), at=partition
        )

    def end_of(self, process: Process, partition: Partition, *, committed: bool = False) -> Promise[int]:
        """Return the high watermark, or the last stable offset."""
        return self.request(process, "ListOffsets", lambda: partition.latest(committed=committed), at=partition)

    def bounds_of(self, process: Process, partition: Partition) -> Promise[tuple[int, int]]:
        """Return the first offset and the high watermark."""
        return self.request(process, "ListOffsets", lambda: (partition.earliest, partition.latest()), at=partition)


class Producer:
    """A transactional producer. ``init`` gives it its producer id and epoch."""

    def __init__(self, kafka: Kafka, process: Process, transactional_id: str) -> None:
        self._kafka = kafka
        self._process = process
        self._id = transactional_id
        self._coordinator = kafka.coordinators.of(transactional_id)
        self._added: dict[Partition, None] = {}
        self._sequences: dict[Partition, int] = {}
        self.producer_id = self.producer_epoch = -1
        self._incomplete = False  # a record of the transaction was not stored
        self._unanswered = 0

    @property
    def settled(self) -> bool:
        """Return True if each request was answered each time that it was sent."""
        return not self._unanswered

    async def _ask(self, what: str, carry_out: Callable[[], T]) -> T:
        """Ask the coordinator."""
        return await self._answered(self._kafka.request(self._process, what, carry_out, at=self._coordinator.partition))

    async def _answered(self, answer: Answer[T]) -> T:
        try:
            return await answer
        finally:
            self._unanswered += answer.unanswered

    async def init(self, time_out_ms: float | None = None) -> None:
        """Begin a new incarnation, and end the open transaction of an earlier one. ``time_out_ms``: None for the default."""
        coordinator = self._coordinator
        self.producer_id, self.producer_epoch = await self._ask("InitProducerId", lambda: coordinator.init(self._id, time_out_ms))

    def begin(self) -> None:
        """Begin a transaction; no request is needed."""
        self._added.clear()
        self._incomplete = False

    async def produce(self, partition: Partition, records: Sequence[ToWrite]) -> int:
        """Store records of the transaction. Return the first offset, which may be unknown.

        Raises KafkaFault: the transaction then cannot be committed any more.
        """
        coordinator, name = self._coordinator, (self._id, self.producer_id, self.producer_epoch)
        sequence = self._sequences.get(partition, 0)
        self._sequences[partition] = sequence + 1
        try:
            if partition not in self._added:
                await self._ask("AddPartitionsToTxn", lambda: coordinator.add_partition(*name, partition))
                self._added[partition] = None
            store = partial(self._store, partition, sequence, records)
            return await self._answered(self._kafka.request(self._process, f"Produce {partition.topic}", store, at=partition))
        except KafkaFault:
            self._incomplete = True
            raise

    def _store(self, partition: Partition, sequence: int, records: Sequence[ToWrite]) -> int:
        """Store records at the leader, which asks the coordinator whether the transaction is ongoing."""
        batch = partition.producers.get(self.producer_id)
        repeated = batch is not None and batch.epoch == self.producer_epoch and sequence < batch.next
        transaction = None if repeated else self._coordinator.takes(self._id, self.producer_epoch, partition)
        return partition.produce(self.producer_id, self.producer_epoch, sequence, records, transaction)

    async def end(self, *, commit: bool) -> None:
        """Commit or abort. Raises KafkaFault; after ``timed-out`` the outcome is unknown."""
        if commit and self._incomplete:
            raise KafkaFault("incomplete")
        coordinator, name = self._coordinator, (self._id, self.producer_id, self.producer_epoch)
        await self._ask("EndTxn", lambda: coordinator.end(*name, commit=commit))


class Appender:
    """An idempotent producer to one partition, with many appends in flight. ``on_outcome(offset, error)`` is called in their order."""

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
        """Send a record. It is retried without end; the fault of reporting one as failed, stored or not, is part of Kafka's weather."""
        kafka, sequence = self._kafka, self._sequence
        self._sequence += 1
        promise = kafka.request(
            self._process, f"Produce {self._partition.topic}", lambda: self._store(sequence, record), float("inf"), at=self._partition
        )
        if kafka.world.chance(kafka.weather.failed_append):
            # About the usual duration: sometimes before it is stored, sometimes before the report of that.
            self._process.after(kafka.world.random.random() * 3 * kafka.weather.delay_ms, self._report_failed, sequence, promise)
        self._waiting.append(promise)
        promise.then(self._settle)

    def _store(self, sequence: int, record: ToWrite) -> int:
        try:
            offset = self._partition.produce(self._producer, 0, sequence, [record], None)
        except Later:
            self._store_known(sequence)
            raise
        self._store_known(sequence)
        return offset

    def _store_known(self, sequence: int) -> None:
        self._stored.add(sequence)
        self._compare(sequence)

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
        """Give up the appends in flight; some of them may arrive nevertheless."""
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
