"""The pipelines of the simulation: the real engines for diverts and ingress, under Spark's contract for batches.

A batch may run again, in whole or in part, by the same driver or the next one; a task may be tried again while the first try still runs;
the checkpoint may be lost. None of this decides anything: the position does.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final

from bascule.core.errors import BasculeError
from bascule.core.kafka_records import KafkaRecord, Output
from bascule.pipelines.divert import DivertEngine, JournalReader
from bascule.pipelines.ingress import IngressEngine
from bascule.pipelines.spec import DivertSpec, IngressSpec
from bascule.writer.claims import Claim, Claims
from bascule.writer.position import DIVERT, Position, PositionLost, PositionTaken, position_key
from tests.sim.kafka import INGRESS, JOURNAL, Kafka, KafkaFault, Partition, Record
from tests.sim.world import Process, Promise, TimeOut, World
from tests.sim.writer import DIVERTS, Writer

BRIDGE: Final = "sim"
#: What a query carries: an ingress, a divert that is carried alone, or (None) all diverts of the configuration.
Carried = IngressSpec | DivertSpec | None
#: Most records of one batch, and most outputs of one transaction: small, so that there are many.
BATCH_MAX: Final = 30
TRANSACTION_MAX: Final = 6
#: Tries of a task before its query fails, as Spark's default.
TRIES_MAX: Final = 4
TRIGGER_MS: Final = 25.0
#: How long a task waits for records that exist, as far as its driver knows.
POLL_MS: Final = 100.0
#: How often a driver checks whether a worker still lives.
LOOK_MS: Final = 15.0
#: Most drivers that may believe at one time that they are the active one. Many would fence one another for ever.
DRIVERS_MAX: Final = 2
#: How long a worker may continue after its driver's death.
ORPHANED_MS: Final = 150.0


#: How long the leader of a source needs to confirm that it still leads.
CONFIRM_MS: Final = 4.0


class NotConfirmed(Exception):
    """Raised when the source has another leader, which has the records that were read."""


class QueryFailed(Exception):
    """Raised when a task failed too often."""


class Worker:
    """A Python worker of Spark. It keeps its writers, with their next incarnation, from task to task."""

    def __init__(self, world: World, name: str, kafka: Kafka) -> None:
        self.process = Process(world, name)
        self._kafka = kafka
        self._writers: dict[str, Writer] = {}
        self.busy = False  # it runs one task at a time

    def writer(self, key: str) -> Writer:
        """Return the writer of a position."""
        if key not in self._writers:
            self._writers[key] = Writer(self._kafka, self.process, key)
        return self._writers[key]


class Pipelines:
    """The configured pipelines, and the driver runs that carry them out. ``launch`` starts another driver."""

    def __init__(self, world: World, kafka: Kafka, diverts: Sequence[DivertSpec], ingresses: Sequence[IngressSpec]) -> None:
        self.world, self.kafka, self.diverts, self.ingresses = world, kafka, tuple(diverts), tuple(ingresses)
        self.reruns = 0.0  # how often a batch begins before completed records
        self.zombies = 0.0  # how often a running task is taken for dead
        self.refusals = 0.0  # how often the leader of a source has changed when a transaction is to be committed
        self.refused = 0
        self.restlessness = 0.0  # how often a task goes to a new worker although another one is idle
        self.drivers: list[Driver] = []
        self.claimed_twice: list[str] = []  # tasks that wrote under another driver's name
        #: What each driver does besides the configured pipelines.
        self.beside: Callable[[Driver], Coroutine[Any, Any, None]] | None = None

    def launch(self) -> None:
        """Start a driver, whatever became of the previous one."""
        alive = [driver for driver in self.drivers if driver.process.alive and not driver.taken_over]
        if len(alive) >= DRIVERS_MAX:
            alive[0].kill()
        self.drivers.append(Driver(self, len(self.drivers)))

    def sources(self) -> list[tuple[IngressSpec | None, Partition]]:
        """Return the sources: the journal for all diverts, and each ingress's topics."""
        found: list[tuple[IngressSpec | None, Partition]] = [(None, self.kafka.partition(JOURNAL))]
        return found + [(ingress, self.kafka.partition(topic)) for ingress in self.ingresses for topic in ingress.topics]

    def key(self, carried: Carried, partition: Partition) -> str:
        """Return the key of a source's position."""
        name = DIVERTS if carried is None else f"{DIVERT}{carried.name}" if isinstance(carried, DivertSpec) else carried.name
        return position_key(name, partition.topic, partition.index)


class Driver:
    """One driver run with its workers. It works on a position as long as the position has its name."""

    def __init__(self, pipelines: Pipelines, number: int) -> None:
        self.pipelines = pipelines
        self.world, self.kafka = pipelines.world, pipelines.kafka
        self.name = f"driver{number}"
        self.process = Process(self.world, self.name)
        self.taken_over = False
        self.workers: list[Worker] = []
        self._runs = 0
        self.claims = Claims(self.name)
        for ingress, partition in pipelines.sources():
            self.process.spawn(self._keep_running(ingress, partition))
        if pipelines.beside is not None:
            self.process.spawn(pipelines.beside(self))

    def kill(self) -> None:
        """Kill the driver (kill -9); its workers end when they find out."""
        self.process.kill()
        for worker in self.workers:
            self.world.after(self.world.random.random() * ORPHANED_MS, worker.process.kill)

    async def _keep_running(self, ingress: IngressSpec | None, source: Partition) -> None:
        """Run a query, and restart it with a fresh checkpoint when it fails."""
        while not self.taken_over:
            await self.guarded(partial(self.query, ingress, source))
            await self.process.sleep(TRIGGER_MS * 4 * self.world.random.random())

    async def guarded(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Work, and note why it ends. A driver that has found its successor does nothing more."""
        self._runs += 1
        owner = f"{self.name}.{self._runs}"
        try:
            await work()
        except PositionTaken as error:
            self.world.note("PositionTaken", f"{owner}, {error}")
            self.taken_over = True
        except (BasculeError, KafkaFault, QueryFailed) as error:
            self.world.note("fail query", f"{owner}, {type(error).__name__} {error}")

    async def _take(self, carried: Carried, key: str, source: Partition) -> Position:
        """Write the driver's name into a position."""
        writer = Writer(self.kafka, self.process, key)
        found = await self.claims.take(writer, key)
        if found is not None:
            return found
        if isinstance(carried, DivertSpec):
            raise PositionLost(f"position {key!r} is missing")
        fence = (-1, 0) if source.topic == JOURNAL else (-1, -1)
        position = replace(Position(source.topic, "id", source.index, 0, *fence), owner=self.claims.name(key))
        await writer.write([], None, position)
        self.claims.hold([key])
        return position

    async def query(self, carried: Carried, source: Partition, wanted: Callable[[], bool] = lambda: True) -> None:
        """Take a position over and carry what comes, batch by batch, as long as this is wanted."""
        pipelines, pick = self.pipelines, self.world.random
        key = pipelines.key(carried, source)
        position = await self._take(carried, key, source)
        owner = position.owner
        if position.offset:
            self.world.note("lose checkpoint", owner)
        claim = Claim(key, source.topic, "id", source.index, owner, position.members)
        start = position.offset
        while wanted():
            end = min(await self.kafka.end_of(self.process, source, committed=isinstance(carried, IngressSpec)), start + BATCH_MAX)
            if end > start:
                again = pick.randint(min(source.start, start), start) if self.world.chance(pipelines.reruns) else start
                if again < start:
                    self.world.note("rerun batch", owner)
                await self._batch(carried, source, claim, again, end)
                start = end
            await self.process.sleep(pick.random() * TRIGGER_MS)

    async def _batch(self, carried: Carried, source: Partition, claim: Claim, start: int, end: int) -> None:
        for _ in range(TRIES_MAX):
            worker = self._worker()
            self.world.say(f"{claim.owner}: {claim.key} from {start} to {end} in {worker.process.name}")
            worker.busy = True
            task = worker.process.spawn(carry(self.pipelines, worker, carried, source, claim, start, end))
            task.then(partial(setattr, worker, "busy", False))
            patience_ms = self.world.random.random() * 60 if self.world.chance(self.pipelines.zombies) else float("inf")
            if await self._ended(worker, task, self.world.now_ms + patience_ms):
                if task.error is None:
                    return
                self.world.say(f"{claim.owner}: task fails: {type(task.error).__name__} {task.error}")
                if isinstance(task.error, PositionTaken):
                    raise task.error
            else:
                self.world.note("zombie task" if worker.process.alive else "lose task", f"{claim.owner} in {worker.process.name}")
        raise QueryFailed(f"{TRIES_MAX} tries")

    async def _ended(self, worker: Worker, task: Promise[None], deadline_ms: float) -> bool:
        """Return True if the task has ended; False if its worker or the driver's patience has ended first."""
        ended: Promise[None] = Promise()
        task.then(partial(ended.keep, None))
        while not task.done and worker.process.alive and self.world.now_ms < deadline_ms:
            with suppress(TimeOut):
                await self.process.within(LOOK_MS, ended)
        return task.done

    def _worker(self) -> Worker:
        idle = [worker for worker in self.workers if worker.process.alive and not worker.busy]
        if not idle or self.world.chance(self.pipelines.restlessness):
            name = f"{self.name}.worker{len(self.workers)}"
            idle = [Worker(self.world, name, self.kafka)]
            self.workers += idle
        return self.world.random.choice(idle)


async def carry(pipelines: Pipelines, worker: Worker, carried: Carried, source: Partition, claim: Claim, start: int, end: int) -> None:
    """Run a task: write the records of a range in order, in transactions of bounded size, each with the position after it."""
    writer = worker.writer(claim.key)
    violations = pipelines.world.violations
    position = claim.check(await writer.current(), violations=violations)
    begin = claim.begin(position, start, violations=violations)
    if position.owner != claim.owner:
        pipelines.claimed_twice.append(f"{claim.owner} in the name of {position.owner}")
    records = await _range(pipelines, worker.process, source, start, end, committed=isinstance(carried, IngressSpec))
    outputs_of, state = _mapping(pipelines, carried, source, begin)
    written = partial(_written, pipelines, worker.process, writer)
    outputs: list[Output] = []
    reached, size = begin.offset, pipelines.world.random.randint(1, TRANSACTION_MAX)
    ahead = pipelines.world.chance(0.3)
    try:
        for record in records:
            if not reached <= record.offset < end:
                continue
            outputs += outputs_of(record)
            reached = record.offset + 1
            if len(outputs) >= size:
                after = replace(position, offset=reached, **state())
                await written(outputs, position, after)
                position, outputs = after, []
            elif ahead and outputs:
                await writer.ahead(outputs, position)
        if reached > position.offset:
            await written(outputs, position, replace(position, offset=reached, **state()))
    except Exception:
        await writer.abandon()
        raise


async def _written(
    pipelines: Pipelines, process: Process, writer: Writer, outputs: list[Output], before: Position, after: Position
) -> None:  # fmt: skip
    """Write a transaction that the leader of the source confirms, as ``bascule.pipelines.carry`` does."""

    async def confirm() -> None:
        if pipelines.refusals:
            await process.sleep(CONFIRM_MS * pipelines.world.random.random())
            if pipelines.world.chance(pipelines.refusals):
                pipelines.refused += 1
                raise NotConfirmed

    while True:
        try:
            await writer.write(outputs, before, after, confirm=confirm)
            return
        except NotConfirmed:
            await process.sleep(LOOK_MS)


async def _range(pipelines: Pipelines, process: Process, source: Partition, start: int, end: int, *, committed: bool) -> list[Record]:
    """Return the records of a range, reading until they are complete as Spark's consumer does. Raises KafkaFault if that takes too long."""
    found: list[Record] = []
    deadline_ms = pipelines.world.now_ms + POLL_MS
    while start < end:
        records, start = await pipelines.kafka.fetch(process, source, start, committed=committed)
        found += records
        if start < end:
            if pipelines.world.now_ms > deadline_ms:
                raise KafkaFault("timed-out")
            await process.sleep(LOOK_MS)
    return found


def _mapping(
    pipelines: Pipelines, carried: Carried, source: Partition, position: Position
) -> tuple[Callable[[Record], list[Output]], Callable[[], dict[str, Any]]]:
    """Return the mapping of a record to outputs, and the content of the position besides the offset."""
    if not isinstance(carried, IngressSpec):
        diverts = pipelines.diverts if carried is None else (carried,)
        reader = JournalReader(position, diverts, violations=pipelines.world.violations)
        diverting = DivertEngine(BRIDGE, (source.topic, source.index), "dead-letter")

        def diverted(record: Record) -> list[Output]:
            return [output for taken in reader.take(record.offset, record.key, record.value) for _, output in diverting.outputs(taken)]

        return diverted, reader.state
    taking_in = IngressEngine(carried, BRIDGE, INGRESS, "dead-letter", violations=pipelines.world.violations)

    def taken_in(record: Record) -> list[Output]:
        headers = [(name, value.encode() if isinstance(value, str) else value) for name, value in record.headers]
        output = taking_in.output(KafkaRecord(source.topic, source.index, record.offset, record.key, record.value, headers, 1))
        return [] if output is None else [output]

    return taken_in, dict
