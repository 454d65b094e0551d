"""Transactions over Kafka and a database in the simulated world, with the decision log on the same Kafka.

Several processes of one manager work and recover at once; they die, stop, and may share their transactional ids. The rules are those that
ship: ``two_phase``, ``recovery_protocol``, ``log_topic``, ``kafka_protocol`` and ``bascule.writer.table``. This module is the world around
them.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from typing import Final

from bascule.core.errors import BasculeError, InvalidInput, Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.xa.effects import Participant
from bascule.xa.errors import HeuristicOutcome, TransactionInDoubt, TransactionRolledBack, TransactionTimedOut, XaError
from bascule.xa.kafka_protocol import BranchLimits, KafkaBranches
from bascule.xa.kafka_records import STARTED, is_about_branch
from bascule.xa.log import Decision, LogState, Outcome, decode
from bascule.xa.recovery_protocol import RecoveryProtocol
from bascule.xa.resource import Vote
from bascule.xa.two_phase import TwoPhase
from bascule.xa.xid import Xid, branch
from tests.sim.branch_calls import ROOM_MS, TOPICS, SimulatedCalls
from tests.sim.cluster import NODES
from tests.sim.effects import Clock
from tests.sim.kafka import Kafka, NetworkConditions
from tests.sim.managers import Told
from tests.sim.tables import DECISIONS, DecisionTopic
from tests.sim.world import Process, World
from tests.sim.xa_resources import Database, FaultRates
from tests.support.history import Tally

#: How long faults happen, and how soon after that all transactions must have ended.
TROUBLE_MS: Final = 700.0
HEALED_MS: Final = 12_000.0
LOOK_MS: Final = 25.0
MANAGER: Final = "tm"
KAFKA, DATABASE = "kafka", "database"
TARGETS: Final = ("out.a", "out.b")
#: Processes share their names in Kafka, as on one host.
INSTANCES: Final = ("one", "two", "three")
SLOTS: Final = 2
PROCESSES_MAX: Final = 3
RECOVER_MS: Final = 60.0
PAUSE_MAX_MS: Final = 70.0
DEADLINES_MS: Final = (40, 200)
TIMEOUTS_S: Final = (0.15, 100.0, 100.0)
OUTAGE_MS: Final = 200.0
#: Share of the runs with applications that use several tasks in one transaction, and how often one of these sends while another one
#: commits.
SEVERAL_TASKS: Final = 0.25
BESIDE: Final = 0.5
#: How many runs have a slow line, so that Kafka aborts some transactions by their time-out; and how slow it is.
SLOW_LINES: Final = 0.1
SLOW_LINE_MS: Final = 12.0
PREPARE_WITHIN_S, UNPREPARED_KEPT_S = 0.12, 0.3


@dataclass(slots=True)
class Work:
    """A transaction, as an all-seeing observer knows it."""

    gtrid: bytes
    alone: bool
    sent: dict[str, list[bytes]] = field(default_factory=dict)
    told: Told | None = None


class KafkaPart:
    """Kafka as a participant of one process."""

    name = KAFKA
    priority = 0
    decider = None
    decides = False

    def __init__(self, process: Worker) -> None:
        self._process = process

    async def start(self, xid: Xid, *, timeout_s: float) -> None:
        """See Participant."""
        await self._process.branches.start(xid)

    async def end(self, xid: Xid, *, success: bool) -> None:
        """See Participant."""
        await self._process.branches.end(xid, success=success)

    async def prepare(self, xid: Xid) -> Vote:
        """See Participant."""
        await self._process.pause()
        return await self._process.branches.prepare(xid)

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Participant."""
        await self._process.pause()
        await self._process.branches.commit(xid, one_phase=one_phase)

    async def rollback(self, xid: Xid) -> None:
        """See Participant."""
        await self._process.pause()
        await self._process.branches.rollback(xid)

    async def recover(self) -> Sequence[Xid]:
        """See Participant."""
        return await self._process.branches.recover()

    async def forget(self, xid: Xid) -> None:
        """See Participant."""

    async def token(self, xid: Xid) -> str:
        """See Participant."""
        return ""

    async def outcome(self, xid: Xid, token: str) -> Outcome | None:
        """See Participant."""
        return None


class Worker:
    """One process of the manager, which begins transactions and recovers."""

    def __init__(self, run: BranchSimulation, name: str) -> None:
        world = self.world = run.world
        self.run = run
        self.process = Process(world, name)
        self.clock = Clock(self.process)
        self.live: dict[bytes, None] = {}
        self.patient = world.chance(0.5)
        instance = world.random.choice(INSTANCES)
        slots = [f"xa.{instance}.{number}" for number in range(SLOTS)]
        calls = SimulatedCalls(run.kafka, self.process, slots, run.tasks, run.line_ms)
        self.branches = KafkaBranches(
            KAFKA, TOPICS, slots, calls, instance=instance, limits=run.limits, violations=world.violations
        )  # fmt: skip
        self.log = DecisionTopic(run.kafka, self.process)
        self.parts: tuple[Participant, ...] = (KafkaPart(self), run.database)
        self._recovery = RecoveryProtocol(
            MANAGER, self.log, {part.name: part for part in self.parts}, self.clock, name, violations=world.violations
        )
        for coroutine in (*(self._work() for _ in range(run.workers)), self._recover()):
            running = self.process.spawn(coroutine)
            running.then(running.result)  # an error of this module ends the run

    def kill(self) -> None:
        """Kill the process (kill -9)."""
        self.process.kill()
        self.live.clear()

    async def pause(self) -> None:
        """Sleep for a random time, since anything may be slow between two calls."""
        if self.world.chance(0.6):
            await self.process.sleep(self.world.random.random() * PAUSE_MAX_MS)

    async def _work(self) -> None:
        while True:
            await self.process.sleep(self.world.random.random() * 40)
            if not self.run.left:
                return
            work = self.run.begin()
            self.live[work.gtrid] = None
            try:
                await self._transaction(work)
            finally:
                self.live.pop(work.gtrid, None)

    async def _transaction(self, work: Work) -> None:
        pick = self.world.random
        timeout_s = pick.choice(TIMEOUTS_S)
        transaction = TwoPhase(work.gtrid, timeout_s, self.log, self.clock, self.process.name, violations=self.world.violations)
        xid, parts = branch(work.gtrid, KAFKA), self.parts[:1] if work.alone else self.parts
        commit = True
        try:
            for part in pick.sample(parts, len(parts)):
                await transaction.enlist(part)
            for number in range(pick.randint(0, 4)):
                topic, value = pick.choice(TARGETS), work.gtrid + b"#%d" % number
                work.sent.setdefault(topic, []).append(value)
                await self.branches.send(xid, Outgoing(topic, None, value))
                if self.world.chance(0.2):
                    await self.process.sleep(pick.random() * PAUSE_MAX_MS)
            await self._send_beside(work, xid)
            commit = pick.random() > 0.1
        except (XaError, Unavailable, TransactionTimedOut):
            commit = False
        try:
            await (transaction.commit() if commit else transaction.rollback())
            work.told = "committed" if commit else "rolled back"
        except TransactionRolledBack:
            work.told = "rolled back"
        except TransactionInDoubt:
            self.world.note("doubt", self.process.name)
            work.told = "in doubt"
        except HeuristicOutcome:
            work.told = "heuristic"
        self.world.say(f"{work.gtrid.decode()}: {transaction.status.value}, told {work.told}")

    async def _send_beside(self, work: Work, xid: Xid) -> None:
        """Send a message of the transaction in another task, while this one soon continues to the commit."""
        tasks = self.run.tasks
        if tasks is not None and tasks.random() < BESIDE:
            running = self.process.spawn(self._sent_beside(work, xid, Outgoing(TARGETS[0], None, work.gtrid + b"#beside")))
            running.then(running.result)
            await self.process.sleep(tasks.random() * ROOM_MS)

    async def _sent_beside(self, work: Work, xid: Xid, message: Outgoing) -> None:
        try:
            await self.branches.send(xid, message)
        except (XaError, InvalidInput):
            self.world.note("refuse beside", self.process.name)
            return
        self.world.note("send beside", self.process.name)
        work.sent.setdefault(message.topic, []).append(message.value or b"")  # the application believes that the message is sent

    async def _recover(self) -> None:
        while True:
            with suppress(BasculeError):  # else the next time
                await self._recovery.run(lambda: self.live, patient=self.patient)
            await self.process.sleep(self.world.random.random() * RECOVER_MS)


class BranchSimulation:
    """A run of the simulation of branches."""

    def __init__(
        self,
        seed: int,
        violations: Collection[enum.StrEnum] = (),
        *,
        trace: bool = False,
        arrange: Callable[[BranchSimulation], None] | None = None,
    ) -> None:
        """Draw a run. ``violations`` are rules that the run breaks on purpose. ``arrange`` changes the run once its weather is drawn."""
        world = self.world = World(seed, violations)
        world.trace = [] if trace else None
        self.kafka = Kafka(world)
        #: Chance for applications with several tasks in one transaction, in some runs; separate from the world's chance, whose course must
        #: not change.
        tasks = Random(f"tasks {seed}")
        self.tasks = tasks if tasks.random() < SEVERAL_TASKS else None
        #: How long a record of a branch is on its way to Kafka.
        self.line_ms = SLOW_LINE_MS if Random(f"line {seed}").random() < SLOW_LINES else 0.0
        self.mishaps = FaultRates()
        self.database = Database(world, self.mishaps)
        self.left = world.random.choice((4, 8))
        self.workers = world.random.randint(1, 2)
        self.troubles: dict[str, float] = {}
        self.pause_ms = 60.0
        self.works: dict[bytes, Work] = {}
        self.processes: list[Worker] = []
        self.healed = False
        self.limits = BranchLimits(
            records_max=world.random.choice((4, 10)),
            kept_bytes_max=world.random.choice((0, 1 << 20)),
            prepare_within_s=PREPARE_WITHIN_S,
            unprepared_kept_s=UNPREPARED_KEPT_S,
            clean_interval_s=0.03,
        )
        self._draw()
        if arrange is not None:
            arrange(self)

    def _draw(self) -> None:
        pick = self.world.random

        def some(most: float) -> float:
            return pick.random() * most if pick.random() < 0.5 else 0.0

        self.kafka.weather = NetworkConditions(
            lost=some(0.04), unanswered=some(0.06), held=some(0.25), slow=some(0.1), failed_append=some(0.03),
            delay_ms=pick.choice((0.5, 2.0, 6.0)), transaction_ms=pick.choice((150.0, 900.0)), lag_ms=pick.choice((0.0, 0.0, 1.0, 5.0)),
        )  # fmt: skip
        self.mishaps.lost_answers, self.mishaps.refusals, self.mishaps.standbys = some(0.1), some(0.2), some(0.5)
        self.troubles = {name: pick.random() for name in TROUBLES if pick.random() < 0.5}
        self.pause_ms = pick.choice((15.0, 60.0, 200.0))

    def begin(self) -> Work:
        """Begin the next transaction."""
        self.left -= 1
        pick, world = self.world.random, self.world
        gtrid = f"{MANAGER}/{int(world.now_ms) + pick.choice(DEADLINES_MS):012x}{pick.getrandbits(80):020x}".encode()
        work = self.works[gtrid] = Work(gtrid, alone=pick.random() < 0.4)
        return work

    def run(self) -> Tally:
        """Run troubles and healing, and return the verdict."""
        for _ in range(self.world.random.randint(1, 2)):
            self.launch()
        self.world.after(self.world.random.random() * 40, self._trouble)
        self.world.run(self.world.now_ms + TROUBLE_MS)
        self._heal()
        self._look()
        self.world.run(self.world.now_ms + HEALED_MS)
        return self._judge()

    # -- what goes wrong -----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> list[Worker]:
        """Return the live processes."""
        return [each for each in self.processes if each.process.alive]

    def launch(self) -> None:
        """Start another process, if there are not enough."""
        if len(self.alive) < PROCESSES_MAX:
            self.processes.append(Worker(self, f"{MANAGER}{len(self.processes)}"))

    def _trouble(self) -> None:
        if not self.healed:
            if self.troubles:
                TROUBLES[self.world.random.choices(list(self.troubles), list(self.troubles.values()))[0]](self)
            self.world.after(self.world.random.random() * self.pause_ms * 2, self._trouble)

    def kill(self) -> None:
        """Kill a process (kill -9). Another one starts soon."""
        for each in self.world.random.sample(self.alive, min(1, len(self.alive))):
            self.world.note("kill manager", each.process.name)
            each.kill()
            self.world.after(self.world.random.random() * 60, self.launch)

    def stop(self) -> None:
        """Suspend a process (SIGSTOP); others continue."""
        for each in self.world.random.sample(self.alive, min(1, len(self.alive))):
            self.world.note("stop manager", each.process.name)
            each.process.stop()
            self.world.after(self.world.random.random() * 300, each.process.go_on)
            if self.world.random.random() < 0.7:
                self.launch()

    def change_leader(self) -> None:
        """Let a node of Kafka hand its partitions over to others."""
        self.kafka.cluster.change_leaders()

    def cut_off_node(self) -> None:
        """Cut a node off from its peers, but not from its clients."""
        self.kafka.cluster.leave(self.world.random.choice(NODES), cut_off=True)

    def stop_node(self) -> None:
        """Stop a node, and start it again."""
        self.kafka.cluster.leave(self.world.random.choice(NODES), cut_off=False)

    def lose_database(self) -> None:
        """Make the database unavailable for a while."""
        self.database.away_until_ms = self.world.now_ms + self.world.random.random() * OUTAGE_MS

    def compact(self) -> None:
        """Run the log cleaner on the log of branches."""
        for index in range(TOPICS.partitions):
            partition = self.kafka.partition(TOPICS.log, index)
            if partition.compact(self.world.random.randint(0, partition.end)):
                self.world.note("compact", f"{TOPICS.log}-{index}")

    # -- the end -------------------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self.healed = True
        self.world.say("healed")
        self.kafka.cluster.heal()
        self.database.away_until_ms = 0.0
        self.mishaps.lost_answers = self.mishaps.refusals = self.mishaps.standbys = 0.0
        for each in self.processes:
            if each.process.stopped:
                each.process.go_on()
        if not self.alive:
            self.launch()

    def _look(self) -> None:
        if not any(self._open()):
            self.world.stop()
        self.world.after(LOOK_MS, self._look)

    def _open(self) -> Iterator[str]:
        """Yield what has not ended yet."""
        prepared = self._latest(TOPICS.log, TOPICS.partitions)
        branches = [key.decode() for key in prepared if is_about_branch(key) and not key.endswith(STARTED)]
        yield from (f"{branch} in the log of branches" for branch in branches)
        # The coordinator has answered the commit, and the marker is on its way to the partition.
        yield from (f"a transaction in {topic}" for topic in TARGETS if self.kafka.partition(topic).open)
        yield from (f"{xid} in the database" for xid in self.database.prepared)
        state = LogState()
        for value in self._latest(DECISIONS, 1).values():
            state.add(decode(value))
        yield from (f"{gtrid!r} in the decision log" for gtrid, each in state.decisions.items() if each.outcome is Outcome.COMMIT)
        yield from (f"{xid} in the decision log" for xid in state.heuristics)
        yield from (f"{each.process.name} at work" for each in self.alive if each.live)
        if self.left:
            yield f"{self.left} to begin"

    def _latest(self, topic: str, partitions: int) -> dict[bytes, bytes]:
        """Return the values of all keys, in the order of their offsets."""
        found: dict[bytes, bytes] = {}
        for record in (each for index in range(partitions) for each in self.kafka.partition(topic, index).all_committed()):
            found.pop(record.key or b"", None)
            if record.key is not None and record.value is not None:
                found[record.key] = record.value
        return found

    def _judge(self) -> Tally:
        tally = Tally()
        standing = self._standing()
        arrived = Counter(record.value or b"" for topic in TARGETS for record in self.kafka.partition(topic).all_committed())
        for work in self.works.values():
            self._judge_work(tally, work, standing.get(work.gtrid), arrived)
        tally.report(
            "duplicated", "messages are in their topics more than once", (str(value) for value, count in arrived.items() if count > 1)
        )
        tally.report("xa-stuck", "without an end though all was well", self._open())
        return tally

    def _standing(self) -> dict[bytes, Outcome]:
        """Return the first decision for each transaction."""
        standing: dict[bytes, Outcome] = {}
        for record in self.kafka.partition(DECISIONS).all_committed():
            entry = decode(record.value) if record.value is not None else None
            if isinstance(entry, Decision):
                standing.setdefault(entry.gtrid, entry.outcome)
        return standing

    def _judge_work(self, tally: Tally, work: Work, standing: Outcome | None, arrived: Counter[bytes]) -> None:
        name = str(work.gtrid)
        here = {value in arrived for values in work.sent.values() for value in values}
        if here == {True, False}:
            tally.report("torn-tx", "messages of one transaction are in their topics, others are not", [name])
        row = work.gtrid in self.database.rows
        if standing is Outcome.COMMIT or (work.told == "committed" and here):
            if False in here:
                tally.report("lost", "committed, and its messages are not in their topics", [name])
        elif standing is Outcome.ROLLBACK and not work.alone and True in here and work.told != "committed":
            tally.report("unexpected", "rolled back, and its messages are in their topics", [name])
        if work.told == "rolled back" and (True in here or row or standing is Outcome.COMMIT):
            tally.report("xa-told", "its application was told that it was rolled back", [name])
        if not work.alone and here and row != (True in here):
            tally.report("xa-split", "in one of database and Kafka only", [name])


TROUBLES: Final[dict[str, Callable[[BranchSimulation], None]]] = {
    "kill": BranchSimulation.kill,
    "stop": BranchSimulation.stop,
    "change leader": BranchSimulation.change_leader,
    "cut off node": BranchSimulation.cut_off_node,
    "stop node": BranchSimulation.stop_node,
    "lose database": BranchSimulation.lose_database,
    "compact": BranchSimulation.compact,
}
