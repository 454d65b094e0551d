"""Transactions on one host in the simulated world: the decision is a row of a database, or in a log that is a file.

Processes of one or two managers work and recover at once; they die and stop, databases do not answer, and the file is moved away for a
while. What runs in them is the blocking code that ships: ``bascule.xa.local_database``, ``deciding_database``, ``decision_table``,
``database``, ``file_log``, ``two_phase``, ``recovery_protocol``. Here is the world around them, with ``driver``.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, TypeVar

from sqlalchemy.util import await_, greenlet_spawn

from bascule.core.effects import run_blocking
from bascule.core.errors import BasculeError, TransactionRolledBack, Unavailable
from bascule.xa.blocking import BlockingLog, BlockingParticipant
from bascule.xa.database import DbapiResource
from bascule.xa.errors import HeuristicOutcome, OutOfOrder, TransactionInDoubt
from bascule.xa.file_log import FileLog
from bascule.xa.local_database import LocalConnection, LocalDatabaseResource
from bascule.xa.log import Decision, Heuristic, LogState, Outcome
from bascule.xa.recovery_protocol import RecoveryProtocol
from bascule.xa.resource import Resource
from bascule.xa.two_phase import TwoPhase
from bascule.xa.xid import Xid
from tests.sim import driver
from tests.sim.driver import Connection, Server, ServerFaults
from tests.sim.effects import Clock
from tests.sim.managers import Told
from tests.sim.world import Process, World
from tests.support.history import Tally

T = TypeVar("T")
#: How long things go wrong, and how soon after that all transactions must be over.
TROUBLE_MS: Final = 700.0
HEALED_MS: Final = 8_000.0
LOOK_MS: Final = 25.0
MANAGERS: Final = ("tm", "shop")
#: A database that decides, and two that prepare.
ORDERS, BILLING, AUDIT = "orders", "billing", "audit"
#: What takes part in a transaction.
TOGETHER: Final = ((ORDERS, BILLING), (ORDERS, BILLING), (ORDERS, BILLING, AUDIT), (BILLING, AUDIT), (ORDERS,))
PROCESSES_MAX: Final = 3
IDLE_MAX: Final = 2
RECOVER_MS: Final = 60.0
PAUSE_MAX_MS: Final = 50.0
OUTAGE_MS: Final = 200.0
DEADLINES_MS: Final = (40, 200)
TIMEOUTS_S: Final = (0.15, 100.0, 100.0)
#: How often an application works on the handle of a transaction that has ended, and how soon.
LATE: Final = 0.15
LATE_MS: Final = 60.0
#: When all is over, days pass, each longer than decisions are kept: then the decisions are deleted.
LATER_S: Final = 25 * 3600.0
DAY_MS: Final = 500.0


@dataclass(slots=True)
class Work:
    """A transaction as the one sees it who sees everything. ``late`` is what its application has written after its end."""

    number: int
    gtrid: bytes
    databases: tuple[str, ...]
    told: Told | None = None
    late: list[str] = field(default_factory=list)

    @property
    def row(self) -> str:
        """What it writes into each database."""
        return f"work {self.number}"


class LaterClock(Clock):
    """The clocks of a process; at the end of a run days pass."""

    def __init__(self, process: Process, run: HostSimulation) -> None:
        super().__init__(process)
        self._run = run

    def monotonic_s(self) -> float:
        """See bascule.xa.effects.Clock."""
        return super().monotonic_s() + LATER_S * self._run.days


class Billing(DbapiResource[LocalConnection]):
    """A database that prepares, with a pool of connections; the handle ends with its branch, as that of PostgresResource does."""

    def begun(self, raw: Any, timeout_s: float) -> None:
        """See DbapiResource. This driver ends no transaction alone, so transactions are not marked."""

    def lent(self, connection: Any) -> LocalConnection:
        """See DbapiResource."""
        return LocalConnection(connection)

    def cut_off(self, handle: LocalConnection) -> None:
        """See DbapiResource."""
        handle.cut_off()


class HostLog:
    """The file of the decision log, as one process uses it. A process may die before and after each call."""

    def __init__(self, host: Host, path: Path) -> None:
        self._host = host
        self._file = FileLog(path, violations=host.world.violations)
        self.log_id = self._file.read().log_id

    def decide(self, decision: Decision) -> Decision:
        """See DecisionLog."""
        return self._call(lambda: self._file.decide(decision))

    def read(self) -> LogState:
        """See DecisionLog."""
        return self._call(self._file.read)

    def record(self, heuristic: Heuristic) -> None:
        """See DecisionLog."""
        self._call(lambda: self._file.record(heuristic))

    def forget(self, gtrids: Iterable[bytes]) -> None:
        """See DecisionLog."""
        self._file.forget(gtrids)

    def forget_heuristic(self, xid: Xid) -> None:
        """See DecisionLog."""
        self._call(lambda: self._file.forget_heuristic(xid))

    def close(self) -> None:
        """See DecisionLog. Only the descriptor: what was forgotten and not written is lost with a process."""
        self._file._forgotten.clear()
        self._file.close()

    def _call(self, effect: Callable[[], T]) -> T:
        self._host.pause()
        if not self._host.process.alive:
            raise Unavailable("the process has died")
        value = effect()
        self._host.pause()
        return value


class Host:
    """One process of a manager: begins transactions, and recovers."""

    def __init__(self, run: HostSimulation, manager: str, name: str) -> None:
        world = self.world = run.world
        self.run, self.manager = run, manager
        self.process = Process(world, name)
        self.clock = LaterClock(self.process, run)
        self.live: dict[bytes, None] = {}
        self.patient = world.chance(0.5)
        self._connections: list[Connection] = []
        self.log = HostLog(self, run.path)
        resources: list[Resource[Any]] = [
            LocalDatabaseResource(ORDERS, self._connect(run.servers[ORDERS]), violations=world.violations),
            *(self._prepares(each) for each in (BILLING, AUDIT)),
        ]
        self._parts = {each.name: BlockingParticipant(each, self._within) for each in resources}
        self._log = BlockingLog(self.log)
        self._recovery = RecoveryProtocol(manager, self._log, self._parts, self.clock, name, violations=world.violations)
        for work in (*(self._work for _ in range(run.workers)), self._recover):
            running = self.process.spawn(greenlet_spawn(work))
            running.then(running.result)  # an error of this module ends the run

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.live.clear()
        self.log.close()
        for connection in self._connections:
            connection.close()

    def pause(self) -> None:
        """Between two calls anything may take its time."""
        if self.process.alive and self.world.chance(0.4):
            await_(self.process.sleep(self.world.random.random() * PAUSE_MAX_MS))

    def _sleep(self, most_ms: float) -> None:
        await_(self.process.sleep(self.world.random.random() * most_ms))

    def _within(self, _resource: str, call: Callable[[], T]) -> T:
        self.pause()
        return call()

    def _prepares(self, name: str) -> Billing:
        return Billing(name, self._connect(self.run.servers[name]), idle_max=IDLE_MAX, violations=self.world.violations)

    def _connect(self, server: Server) -> Callable[[], Any]:
        def connect() -> Connection:
            connection = Connection(server, self.process)
            self._connections.append(connection)
            return connection

        return connect

    def _work(self) -> None:
        while True:
            self._sleep(40)
            if not self.run.left:
                return
            work = self.run.begin(self.manager, self.log.log_id)
            self.live[work.gtrid] = None
            try:
                handles = self._transaction(work)
            finally:
                self.live.pop(work.gtrid, None)
            self._write_late(work, handles)

    def _transaction(self, work: Work) -> list[Any]:
        pick, handles = self.world.random, []
        timeout_s = pick.choice(TIMEOUTS_S)
        transaction = TwoPhase(work.gtrid, timeout_s, self._log, self.clock, self.process.name, violations=self.world.violations)
        commit = True
        try:
            for name in pick.sample(work.databases, len(work.databases)):
                handles.append(run_blocking(transaction.enlist(self._parts[name])))
                self.pause()
                handles[-1].cursor().execute("INSERT INTO work (name) VALUES (?)", (work.row,))
            commit = pick.random() > 0.1
        except (BasculeError, driver.Error):
            commit = False
        try:
            run_blocking(transaction.commit() if commit else transaction.rollback())
            work.told = "committed" if commit else "rolled back"
        except TransactionRolledBack:
            work.told = "rolled back"
        except TransactionInDoubt:
            self.world.note("doubt", self.process.name)
            work.told = "in doubt"
        except HeuristicOutcome:
            work.told = "heuristic"
        self.world.say(f"{self.process.name}, {work.row}: {transaction.status.value}, told {work.told}")
        return handles

    def _write_late(self, work: Work, handles: list[Any]) -> None:
        """The application has kept a handle, and works on it."""
        if handles and self.world.chance(LATE):
            self._sleep(LATE_MS)
            self.world.note("write late", self.process.name)
            work.late.append(f"late {work.number}")
            with suppress(OutOfOrder, driver.Error):
                self.world.random.choice(handles).cursor().execute("INSERT INTO work (name) VALUES (?)", (work.late[-1],))

    def _recover(self) -> None:
        while True:
            with suppress(BasculeError):  # then the next time
                run_blocking(self._recovery.run(lambda: self.live, patient=self.patient))
            self._sleep(RECOVER_MS)


class HostSimulation:
    """A run."""

    def __init__(
        self,
        seed: int,
        violations: Collection[enum.StrEnum] = (),
        *,
        trace: bool = False,
        arrange: Callable[[HostSimulation], None] | None = None,
    ) -> None:
        """``violations`` are rules that the run breaks on purpose. ``arrange`` changes the run once its faults are drawn."""
        world = self.world = World(seed, violations)
        world.trace = [] if trace else None
        pick = world.random

        def some(most: float) -> float:
            return pick.random() * most if pick.random() < 0.5 else 0.0

        self.faults = ServerFaults(some(0.05), some(0.05), some(0.2), some(0.2))
        self.servers = {name: Server(world, name, self.faults) for name in (ORDERS, BILLING, AUDIT)}
        self.managers = MANAGERS if pick.random() < 0.5 else MANAGERS[:1]
        self.left, self.workers = pick.choice((4, 8)), pick.randint(1, 2)
        self.troubles = {name: pick.random() for name in TROUBLES if pick.random() < 0.5}
        self.pause_ms = pick.choice((15.0, 60.0, 200.0))
        self.works: list[Work] = []
        self.hosts: list[Host] = []
        self.healed = False
        self.days = 0
        self.path = Path()
        if arrange is not None:
            arrange(self)

    def begin(self, manager: str, log_id: str) -> Work:
        """The next transaction."""
        self.left -= 1
        pick = self.world.random
        deadline_ms = int(self.world.now_ms) + pick.choice(DEADLINES_MS)
        gtrid = f"{manager}/{deadline_ms:011x}-{log_id}.{pick.getrandbits(44):011x}".encode()
        work = Work(len(self.works), gtrid, pick.choice(TOGETHER))
        self.works.append(work)
        return work

    def run(self) -> Tally:
        """Trouble, healing, and the verdict."""
        with TemporaryDirectory(dir=_memory()) as directory:
            self.path = Path(directory, "decisions")
            try:
                return self._run()
            finally:
                for each in self.alive:
                    each.kill()

    def _run(self) -> Tally:
        world = self.world
        for manager in self.managers * world.random.randint(1, 2):
            self.launch(manager)
        world.after(world.random.random() * 40, self._trouble)
        world.run(world.now_ms + TROUBLE_MS)
        self._heal()
        self._look()
        world.run(world.now_ms + HEALED_MS)
        return self._judge()

    # -- what goes wrong -----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> list[Host]:
        """The processes that live."""
        return [each for each in self.hosts if each.process.alive]

    def launch(self, manager: str) -> None:
        """One more process of a manager, if there are not enough. Nobody starts one while the log is away."""
        if self._log_is_away:
            self.world.after(LOOK_MS, self.launch, manager)
        elif sum(each.manager == manager for each in self.alive) < PROCESSES_MAX:
            self.hosts.append(Host(self, manager, f"{manager}{len(self.hosts)}"))

    def _trouble(self) -> None:
        if not self.healed:
            if self.troubles:
                TROUBLES[self.world.random.choices(list(self.troubles), list(self.troubles.values()))[0]](self)
            self.world.after(self.world.random.random() * self.pause_ms * 2, self._trouble)

    def kill(self) -> None:
        """kill -9 of a process; another one starts."""
        for each in self.world.random.sample(self.alive, min(1, len(self.alive))):
            self.world.note("kill manager", each.process.name)
            each.kill()
            self.world.after(self.world.random.random() * 60, self.launch, each.manager)

    def stop(self) -> None:
        """SIGSTOP for a while; others go on."""
        for each in self.world.random.sample(self.alive, min(1, len(self.alive))):
            self.world.note("stop manager", each.process.name)
            each.process.stop()
            self.world.after(self.world.random.random() * 300, each.process.go_on)
            if self.world.random.random() < 0.7:
                self.launch(each.manager)

    def lose_database(self) -> None:
        """A database does not answer for a while."""
        server = self.world.random.choice(list(self.servers.values()))
        server.away_until_ms = self.world.now_ms + self.world.random.random() * OUTAGE_MS

    def remove_log(self) -> None:
        """Somebody moves the file of the decision log away, and back after a while."""
        if not self._log_is_away and self.path.exists():
            self.world.note("remove log")
            self.path.rename(self._elsewhere)
            self.world.after(self.world.random.random() * OUTAGE_MS, self._restore_log)

    @property
    def _elsewhere(self) -> Path:
        return self.path.with_name("elsewhere")

    @property
    def _log_is_away(self) -> bool:
        return self._elsewhere.exists()

    def _restore_log(self) -> None:
        if self._log_is_away:
            self._elsewhere.replace(self.path)

    # -- the end -------------------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        self.healed = True
        self.world.say("healed")
        self._restore_log()
        for server in self.servers.values():
            server.faults, server.away_until_ms = ServerFaults(), 0.0
        for each in self.hosts:
            if each.process.stopped:
                each.process.go_on()
        for manager in self.managers:
            if not any(each.manager == manager for each in self.alive):
                self.launch(manager)

    def _look(self) -> None:
        if not any(self._open()):
            if self.days:
                self.world.stop()
            else:
                self._pass_day()
        self.world.after(LOOK_MS, self._look)

    def _pass_day(self) -> None:
        self.days += 1
        self.world.after(DAY_MS, self._pass_day)

    def _open(self) -> Iterator[str]:
        """What is not over yet."""
        yield from (f"{xid} in {server.name}" for server in self.servers.values() for xid in server.prepared)
        yield from (f"work {each.gtrid!r} of {host.process.name}" for host in self.alive for each in self.works if each.gtrid in host.live)
        log = FileLog(self.path)
        state = log.read()
        log.close()
        yield from (f"{each} in the log" for each in state.heuristics)
        yield from (f"{each!r} in the log" for each in state.decisions.values() if self.days or each.outcome is Outcome.COMMIT)
        if self.days:
            yield from (f"{key} in {server.name}" for server in self.servers.values() for key in server.decisions)
        if self.left:
            yield f"{self.left} to begin"

    def _judge(self) -> Tally:
        tally = Tally()
        for work in self.works:
            self._judge_work(tally, work)
        for server in self.servers.values():
            tally.report("duplicated", "rows are there twice", (row for row, count in server.rows.items() if count > 1))
        tally.report("xa-stuck", "without an end though all was well", self._open())
        return tally

    def _judge_work(self, tally: Tally, work: Work) -> None:
        there = {work.row in self.servers[name].rows for name in work.databases}
        if there == {True, False}:
            tally.report("xa-split", "in some of their databases only", [work.row])
        if work.told == "committed" and False in there:
            tally.report("lost", "committed, and not in a database", [work.row])
        if work.told == "rolled back" and True in there:
            tally.report("xa-told", "its application was told that it was rolled back", [work.row])
        written = [row for row in work.late for server in self.servers.values() if row in server.rows]
        tally.report("unexpected", "written after the end of their transaction", written)


def _memory() -> str | None:
    """A directory without a disk behind it, if there is one: each decision is synced."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


TROUBLES: Final[dict[str, Callable[[HostSimulation], None]]] = {
    "kill": HostSimulation.kill,
    "stop": HostSimulation.stop,
    "lose database": HostSimulation.lose_database,
    "remove log": HostSimulation.remove_log,
}
