"""Transaction managers of the simulation: drivers of the protocols of bascule.xa over the broker, a database and a decision log.

Several managers share the broker, and the log unless they have the same name; each has its own database under the same name. Several
processes of one manager may work at once; each may die or be suspended between any two calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Literal

from bascule.broker.message import BrokerMessage
from bascule.core.errors import BasculeError
from bascule.xa import broker_protocol
from bascule.xa.broker_protocol import COMMITTED, ROLLED_BACK, AnswerLost, Reply
from bascule.xa.effects import Participant
from bascule.xa.errors import HeuristicOutcome, TransactionInDoubt, TransactionRolledBack, TransactionTimedOut, XaError
from bascule.xa.log import Decision
from bascule.xa.log import Outcome as Decided
from bascule.xa.recovery_protocol import RecoveryProtocol
from bascule.xa.resource import Vote
from bascule.xa.two_phase import TwoPhase
from bascule.xa.xid import Xid, deadline_ms_of, log_id_of_gtrid, manager_of_gtrid
from bascule.xa.xid import branch as branch_of
from tests.sim import requests
from tests.sim.clients import Stage, Transacted, id_of
from tests.sim.connections import Connection, ConnectionLost
from tests.sim.effects import Clock, at_once
from tests.sim.requests import NOTHING, RECEIVING, Handed, sessions_of
from tests.sim.world import Promise
from tests.sim.xa_resources import Database, FaultRates, Log
from tests.support.history_branches import NEVER_MS, Branch, End, Listing, Said
from tests.support.operations import Outcome, Place

#: The names of managers; a run has one or both.
MANAGERS: Final = ("tm", "shop")
#: The ids of their decision logs if both have the name of the first one.
LOG_IDS: Final = dict(zip(MANAGERS, ("aaaaaaaa", "bbbbbbbb"), strict=True))
BROKER, DATABASE = "broker", "database"
#: The places that a branch takes from and sends to; other clients use them, too.
SOURCES: Final = (Place("orders"), Place("moved"), Place("alerts"), Place("away"), Place("topic:news", "all"))
TARGETS: Final = ("orders", "topic:news", "alerts", "away")
FIRST_MS: Final = 60.0
MORE_MS: Final = 3.0
#: Pause of recovery, and pause if it found nothing to do; how long a transaction without a decision may be left alone.
INTERVAL_MS: Final = 120.0
IDLE_MS: Final = 500.0
DEADLINES_MS: Final = (40, 200)
#: Some applications have a timeout of their own, in seconds; the clocks of the recoverers of the others are ahead.
TIMEOUTS_S: Final = (0.15, 100.0, 100.0, 100.0)
#: How long a manager may pause between two calls.
PAUSE_MAX_MS: Final = 70.0
#: How often the answer to a one-phase commit is lost if nothing else is.
DEAFNESS: Final = 0.8
#: How often its connection breaks while it waits for that answer, and how soon: most commits are in flight to the journal then.
IMPATIENCE: Final = 0.5
PATIENCE_MS: Final = 2.0
#: The longest time until it asks for the outcome of an unanswered commit.
LATE_MAX_MS: Final = 400.0

Told = Literal["committed", "rolled back", "in doubt", "heuristic"]


@dataclass(slots=True)
class Work:
    """A transaction, as an all-seeing observer knows it. ``xid`` is its branch at the broker."""

    xid: Xid
    client: str
    begun_ms: float
    branch: Branch
    redelivered: tuple[str, ...] = ()
    stale: bool = False  # its messages came from a broker that did not know of a newer epoch yet
    alone: bool = False  # the broker is the only resource
    told: Told | None = None  # the outcome that its application was told
    over_ms: float = NEVER_MS  # when somebody was told that the branch has ended


@dataclass(slots=True)
class XaState:
    """The state that outlives every process of the managers.

    Decision logs and databases have the names of MANAGERS, whatever the managers' names.
    """

    stage: Stage
    logs: dict[str, Log]
    databases: dict[str, Database]
    mishaps: FaultRates
    left: int  # transactions to begin
    pause_ms: float
    works: dict[Xid, Work] = field(default_factory=dict)
    listings: list[Listing] = field(default_factory=list)

    @property
    def all_logs(self) -> list[Log]:
        """Return each decision log once."""
        return list(dict.fromkeys(self.logs.values()))

    def name_of(self, manager: str) -> str:
        """Return the name that a manager has in its transactions."""
        return MANAGERS[0] if self.mishaps.namesakes else manager

    def owner(self, gtrid: bytes) -> str:
        """Return the manager of a transaction."""
        if log_id := log_id_of_gtrid(gtrid):
            return next(manager for manager, each in LOG_IDS.items() if each == log_id)
        return str(manager_of_gtrid(gtrid))

    def log_of(self, gtrid: bytes) -> Log:
        """Return the decision log of a transaction."""
        return self.logs[self.owner(gtrid)]

    def begin(self, manager: str, client: str) -> Work:
        """Begin the next transaction."""
        self.left -= 1
        pick = self.stage.world.random
        now_ms = self.stage.world.now_ms
        deadline_ms, name = int(now_ms) + pick.choice(DEADLINES_MS), self.name_of(manager)
        if self.mishaps.namesakes:
            gtrid = f"{name}/{deadline_ms:011x}.{LOG_IDS[manager]}.{pick.getrandbits(44):011x}".encode()
        else:
            gtrid = f"{name}/{deadline_ms:012x}{pick.getrandbits(80):020x}".encode()
        xid = branch_of(gtrid, BROKER)
        work = self.works[xid] = Work(xid, f"{client}:{len(self.works)}", now_ms, Branch(str(xid)))
        return work

    def over(self, work: Work) -> None:
        """Note that somebody was told that the branch has ended."""
        self.stage.last_work_ms = self.stage.world.now_ms
        work.over_ms = min(work.over_ms, self.stage.world.now_ms)

    def ended(self, xid: Xid, end: End, said: Said) -> None:
        """Note the answer to a request to end a branch."""
        end.answered_ms, end.said = self.stage.world.now_ms, said
        self.stage.world.say(f"branch {xid.gtrid.decode()}: {end.wanted}: {end.said}")
        if end.said != "busy":
            self.over(self.works[xid])


class Manager(Transacted):
    """One process of a manager."""

    def __init__(self, state: XaState, manager: str, name: str, workers: int) -> None:
        super().__init__(state.stage, name)
        self.state = state
        self.manager = manager
        self.live: dict[bytes, None] = {}
        self.patient = self.world.chance(0.5)
        self.clock = Clock(self.process)
        self.position: int | None = None  # of the broker's answers
        self._pending = True  # there may be work for recovery
        self._connections: dict[Connection, None] = {}
        parts: list[Participant] = [BrokerPart(self), DatabasePart(self)]
        named = {part.name: part for part in parts}
        self._log = state.logs[manager]
        self._recovery = RecoveryProtocol(state.name_of(manager), self._log, named, self.clock, name, violations=self.world.violations)
        for coroutine in (*(self._work() for _ in range(workers)), self._recover()):
            running = self.process.spawn(coroutine)
            running.then(running.result)  # an error of this module ends the run

    def kill(self) -> None:
        """Kill the process (kill -9)."""
        self.process.kill()
        self.live.clear()
        for connection in self._connections:
            connection.drop()

    def calm(self) -> None:
        """Deliver its output in time from now on. If its clock has jumped, do not wait for deadlines many minutes away."""
        self.patient = self.patient and not self.world.offsets_ms.get(self.process.machine)
        for connection in self._connections:
            connection.slowness = 0.0

    async def connected(self) -> Connection:
        """Return the connection of all its sessions."""
        for connection in list(self._connections):
            if not connection.lost.done:
                return connection
            del self._connections[connection]
        connection = await self.connect()
        connection.slowness = self.state.mishaps.slowness
        self._connections[connection] = None
        return connection

    async def pause(self) -> None:
        """Sleep for a random time, since anything may be slow between two calls."""
        if self.world.chance(0.6):
            await self.process.sleep(self.world.random.random() * PAUSE_MAX_MS)

    # -- transactions --------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            await self.process.sleep(self.world.random.random() * self.state.pause_ms)
            if not self.state.left:
                return
            work = self.state.begin(self.manager, self.name)
            self.live[work.xid.gtrid] = None
            try:
                await self._transaction(work)
            finally:
                self.live.pop(work.xid.gtrid, None)

    async def _transaction(self, work: Work) -> None:
        pick, violations = self.world.random, self.world.violations
        timeout_s = pick.choice(TIMEOUTS_S)
        parallel = at_once(self.process) if work.xid.gtrid[-1:] < b"8" else None  # of half of them
        transaction = TwoPhase(work.xid.gtrid, timeout_s, self._log, self.clock, self.name, at_once=parallel, violations=violations)
        connection = await self.connected()
        work.alone = pick.random() < 0.33
        parts: list[Participant] = [BrokerPart(self, connection, work), *([] if work.alone else [DatabasePart(self)])]
        try:
            for part in pick.sample(parts, len(parts)):
                await transaction.enlist(part)
            await self._fill(connection, work)
            if pick.random() < 0.1:
                raise ConnectionLost  # or another error of the application
        except (ConnectionLost, XaError, TransactionTimedOut):
            await self._told(work, transaction, commit=False)
        else:
            await self._told(work, transaction, commit=True)

    async def _told(self, work: Work, transaction: TwoPhase, *, commit: bool) -> None:
        try:
            await (transaction.commit() if commit else transaction.rollback())
            work.told = "committed" if commit else "rolled back"
        except TransactionRolledBack:
            work.told = "rolled back"
        except TransactionInDoubt:
            work.told = "in doubt"
            self.world.note("doubt", self.name)
        except HeuristicOutcome:
            work.told = "heuristic"
        self.world.say(f"{work.client} {work.xid.gtrid.decode()}: {transaction.status.value}, told {work.told}")
        if transaction.pending:
            self._pending = True
        if work.alone and work.told != "in doubt":
            self.state.over(work)

    async def _fill(self, connection: Connection, work: Work) -> None:
        """Receive and send in the transaction."""
        pick, sessions = self.world.random, sessions_of(work.xid.gtrid)
        if pick.random() < 0.7:
            await self._take(connection, work, pick.choice(SOURCES))
        for place, to in enumerate(pick.sample(TARGETS, pick.randint(0, 2))):
            ids: list[str] = []
            for _ in range(pick.randint(1, 2)):
                id, body, said = self.message(to, self.some_facts())
                ids.append(id)
                connection.up(self._send_in, connection, sessions[place % len(sessions)], to, body, said)
            work.branch.sent[to] = tuple(ids)
        if connection.lost.done:
            raise ConnectionLost

    async def _take(self, connection: Connection, work: Work, source: Place) -> None:
        port = await connection.ask(self._attach, connection, source, "")
        session = sessions_of(work.xid.gtrid)[-1 if work.xid.gtrid[-3:-2] in RECEIVING else 0]
        taken: list[tuple[BrokerMessage, int]] = []
        for _ in range(self.world.random.randint(1, 3)):
            found = await self._next(connection, port, MORE_MS if taken else FIRST_MS)
            if found is None:
                break
            taken.append(found)
            connection.up(self._acknowledge_in, connection, session, port, found[0])
        ids = [id_of(message.body or b"") for message, _ in taken]
        work.branch.source, work.branch.taken = source, tuple(ids)
        work.redelivered = tuple(id for id, (_, count) in zip(ids, taken, strict=True) if count)
        work.stale = connection.broker.superseded
        connection.up(self._detach, connection, port)  # returns prefetched messages

    def begin_at(self, connection: Connection, gtrid: bytes) -> None:
        """Begin the local transactions of a branch."""
        connection.up(self._begin_all, connection, sessions_of(gtrid))

    def _begin_all(self, connection: Connection, names: Sequence[bytes]) -> None:
        for name in names:
            self._begin(connection, name)
        if len(names) > 1:
            self.world.note("join session", self.name)

    def _end(self, connection: Connection, name: bytes, commit: bool, answer: Promise[None]) -> None:
        for joined in sessions_of(name)[1:]:
            connection.broker.engine.rollback(connection.transactions.pop(joined))
        super()._end(connection, name, commit, answer)

    # -- recovery ------------------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        while True:
            with suppress(BasculeError):  # else the next time
                self._pending = not (await self._recovery.run(lambda: self.live, patient=self.patient)).finished
            await self.process.sleep(self.world.random.random() * (INTERVAL_MS if self._pending else IDLE_MS))

    def disturbs(self, decision: Decision) -> bool:
        """Return True if the recovery of this process rolls back a transaction that still runs, or that belongs to another manager."""
        if decision.outcome is Decided.COMMIT or decision.by != self.name:
            return False
        early = self.patient and self.process.wall_ms < deadline_ms_of(decision.gtrid)
        return decision.gtrid in self.live or early or self.state.owner(decision.gtrid) != self.manager


class DatabasePart:
    """The database of a process's manager."""

    name = DATABASE
    priority = 0
    decider = None
    decides = False

    def __init__(self, process: Manager) -> None:
        self._process = process
        self._database = process.state.databases[process.manager]

    async def start(self, xid: Xid, *, timeout_s: float) -> None:
        """See Participant."""
        await self._database.start(xid, timeout_s=timeout_s)

    async def end(self, xid: Xid, *, success: bool) -> None:
        """See Participant."""
        await self._database.end(xid, success=success)

    async def prepare(self, xid: Xid) -> Vote:
        """See Participant."""
        await self._process.pause()
        return await self._database.prepare(xid)

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Participant."""
        await self._process.pause()
        await self._database.commit(xid, one_phase=one_phase)

    async def rollback(self, xid: Xid) -> None:
        """See Participant."""
        await self._process.pause()
        await self._database.rollback(xid)

    async def recover(self) -> Sequence[Xid]:
        """See Participant."""
        return await self._database.recover()

    async def forget(self, xid: Xid) -> None:
        """See Participant."""
        await self._database.forget(xid)

    async def token(self, xid: Xid) -> str:
        """See Participant."""
        return await self._database.token(xid)

    async def outcome(self, xid: Xid, token: str) -> Decided | None:
        """See Participant."""
        return await self._database.outcome(xid, token)


class BrokerPart:
    """The broker: for one transaction, whose work is on a connection, or for recovery. Performs the effects of ``broker_protocol``."""

    name = BROKER
    priority = 0
    decider = None
    decides = False

    def __init__(self, process: Manager, connection: Connection | None = None, work: Work | None = None) -> None:
        self._process = process
        self._world = process.world
        self._state = process.state
        self._connection = connection
        self._work = work
        self._on_connection = False  # the branch is a transaction of the connection

    # Participant

    async def start(self, xid: Xid, *, timeout_s: float) -> None:
        """See Participant."""
        if self._connection is not None:
            self._on_connection = True
            self._process.begin_at(self._connection, xid.gtrid)

    async def end(self, xid: Xid, *, success: bool) -> None:
        """See Participant."""

    async def prepare(self, xid: Xid) -> Vote:
        """See Participant."""
        await self._process.pause()
        vote = await broker_protocol.prepare(self, xid)
        if vote is Vote.YES and self._work is not None:
            self._work.branch.prepared_ms = self._world.now_ms
        return vote

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Participant."""
        await self._process.pause()
        if one_phase:
            await broker_protocol.commit_one_phase(self, xid)
        else:
            await broker_protocol.end(self, xid, COMMITTED)

    async def rollback(self, xid: Xid) -> None:
        """See Participant. A transaction that still belongs to the connection is rolled back there."""
        if self._on_connection and self._connection is not None:
            self._on_connection = False
            await self._process.end(self._connection, xid.gtrid, commit=False)
            return
        await self._process.pause()
        await broker_protocol.end(self, xid, ROLLED_BACK)

    async def recover(self) -> Sequence[Xid]:
        """See Participant."""
        asked_ms = self._world.now_ms
        found = await broker_protocol.recover(self)
        self._state.listings.append(Listing(asked_ms, self._world.now_ms, frozenset(map(str, found))))
        return found

    async def forget(self, xid: Xid) -> None:
        """See Participant."""
        await broker_protocol.request(self, "forget", xid)

    async def token(self, xid: Xid) -> str:
        """See Participant."""
        return ""

    async def outcome(self, xid: Xid, token: str) -> Decided | None:
        """See Participant."""
        return None

    # BrokerCalls

    async def ask(self, operation: str, xid: Xid | None, since: int | None = None) -> Reply:
        """See BrokerCalls."""
        connection = await self._process.connected()
        if xid is None or operation == "forget":
            return await self._lost(connection, operation, xid)
        if self._work is None:
            self._world.note("recover branch", self._process.name)
        end = End("commit" if operation == "commit" else "rollback", self._world.now_ms)
        self._state.works[xid].branch.ends.append(end)
        reply = await self._lost(connection, operation, xid, since=since)
        self._state.ended(xid, end, requests.said(reply))
        return reply

    async def hand_over(self, operation: str, xid: Xid, since: int | None = None) -> Reply | None:
        """See BrokerCalls. The answer to a commit is often lost; a client may repeat the request on another connection."""
        connection, work = self._connection, self._work
        if connection is None or work is None:
            raise AssertionError("recovery has no work of its own")
        self._on_connection = False
        one_phase = operation == "commit"
        handed = requests.handed(xid.gtrid)
        if one_phase:
            work.branch.one_phase_ms = min(work.branch.one_phase_ms, self._world.now_ms)
            if self._world.chance(IMPATIENCE):
                self._process.process.after(self._world.random.random() * PATIENCE_MS, connection.drop)
        try:
            reply = await self._lost(connection, operation, xid, handed, since)
        except AnswerLost:
            if self._world.chance(0.5):
                await self._late(one_phase)
                raise
            self._world.note("repeat request", self._process.name)
            reply = await self._lost(await self._process.connected(), operation, xid, handed, since)
        self._world.say(f"branch {xid.gtrid.decode()}: {operation} of its own: {requests.said(reply)}")
        if one_phase and self._world.chance(DEAFNESS):
            await self._late(one_phase)
            raise AnswerLost("what was said does not come to who has to know it")
        return reply

    def position(self) -> int | None:
        """See BrokerCalls."""
        return self._process.position

    async def sleep(self, seconds: float) -> None:
        """See BrokerCalls."""
        await self._process.process.sleep(seconds * 1000)

    def monotonic_s(self) -> float:
        """See BrokerCalls."""
        return self._process.clock.monotonic_s()

    async def _late(self, one_phase: bool) -> None:
        if one_phase and self._world.chance(0.5):
            await self._process.process.sleep(self._world.random.random() * LATE_MAX_MS)

    async def _lost(
        self, connection: Connection, operation: str, xid: Xid | None, handed: Handed = NOTHING, since: int | None = None
    ) -> Reply:
        try:
            reply = await requests.ask(connection, operation, xid, handed, since)
        except ConnectionLost as error:
            raise AnswerLost("connection lost") from error
        self._process.position = max(self._process.position or 0, reply.position or 0)
        return reply


def outcome_of(told: Told | None) -> Outcome:
    """Return the outcome of an operation in the history by what was told of a commit in one phase."""
    return {"committed": "ok", "rolled back": "fail"}.get(told or "", "indeterminate")  # type: ignore[return-value]
