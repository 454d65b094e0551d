"""Transaction managers of the simulation: transactions over the broker and a database, and the recovery of what others have left.

As bascule.xa does it, call by call: the log's first outcome stands, a transaction without one is rolled back, and what a recovery does is
decided by the real plan. Several processes of one manager may be at work at once; each may die or stand still between any two calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from bascule.broker.message import Message
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.xa import log as decisions
from bascule.xa.errors import Code
from bascule.xa.log import Decision, Heuristic
from bascule.xa.plan import Action, Step, View, plan
from bascule.xa.xid import branch as branch_of
from tests.sim import requests
from tests.sim.broker import Connection, ConnectionLost
from tests.sim.clients import Stage, Transacted, id_of
from tests.sim.ledger import Ledger, Log, Mishaps
from tests.support.history_branches import NEVER_MS, Branch, End, Listing, Said
from tests.support.operations import Outcome, Place

MANAGER: Final = "tm"
BROKER, DATABASE = "broker", "database"
#: What a branch takes from and sends to: what other clients work with, too.
SOURCES: Final = (Place("orders"), Place("moved"), Place("alerts"), Place("away"), Place("topic:news", "all"))
TARGETS: Final = ("orders", "topic:news", "alerts", "away")
ENDINGS: Final = {decisions.Outcome.COMMIT: Ending.COMMITTED, decisions.Outcome.ROLLBACK: Ending.ROLLED_BACK}
HEURISTIC: Final[dict[Said, Code]] = {"forced-commit": Code.XA_HEURCOM, "forced-rollback": Code.XA_HEURRB}
FIRST_MS: Final = 60.0
MORE_MS: Final = 3.0
#: Recovery looks again so often, and where it has found nothing to do; a transaction without a decision may be left alone for so long.
INTERVAL_MS: Final = 120.0
IDLE_MS: Final = 500.0
DEADLINES_MS: Final = (40, 200)
#: How long a manager may take from one call to the next.
PAUSE_MAX_MS: Final = 70.0
#: How often the answer to a commit in one phase is lost where nothing else is.
DEAFNESS: Final = 0.8
#: How often its connection breaks while it waits for that answer, and how soon: most commits are on their way into the journal then.
IMPATIENCE: Final = 0.5
PATIENCE_MS: Final = 2.0
#: How long it may be before it asks what became of a commit that was not answered.
LATE_MAX_MS: Final = 400.0


class RolledBack(Exception):
    """A branch votes no, or is gone."""


class Unfinished(Exception):
    """A branch cannot be ended now."""


@dataclass(slots=True)
class Work:
    """A transaction as the one sees it who sees everything. ``xid`` is its branch at the broker."""

    xid: Xid
    client: str
    begun_ms: float
    branch: Branch
    redelivered: tuple[str, ...] = ()
    stale: bool = False  # what it took came from a broker that knew nothing yet of a newer epoch
    one_phase: Outcome | None = None  # how it ended, if that was how
    over_ms: float = NEVER_MS  # somebody has been told that the branch is over


@dataclass(slots=True)
class Books:
    """What outlives every process of the manager."""

    stage: Stage
    log: Log
    ledger: Ledger
    mishaps: Mishaps
    left: int  # transactions to begin
    pause_ms: float
    works: dict[Xid, Work] = field(default_factory=dict)
    listings: list[Listing] = field(default_factory=list)

    def begin(self, client: str) -> Work:
        """The next transaction."""
        self.left -= 1
        pick = self.stage.world.random
        now_ms = self.stage.world.now_ms
        gtrid = f"{MANAGER}/{int(now_ms) + pick.choice(DEADLINES_MS):012x}{pick.getrandbits(80):020x}".encode()
        xid = branch_of(gtrid, BROKER)
        work = self.works[xid] = Work(xid, f"{client}:{len(self.works)}", now_ms, Branch(str(xid)))
        return work

    def over(self, work: Work) -> None:
        """The branch is over, as somebody was told just now."""
        self.stage.last_work_ms = self.stage.world.now_ms
        work.over_ms = min(work.over_ms, self.stage.world.now_ms)

    def ended(self, xid: Xid, end: End, said: Said) -> None:
        """Somebody who asked for the end of a branch has an answer."""
        end.answered_ms, end.said = self.stage.world.now_ms, said
        self.stage.world.say(f"branch {xid.gtrid.decode()}: {end.wanted}: {end.said}")
        if end.said != "busy":
            self.over(self.works[xid])


class Manager(Transacted):
    """One process of the manager."""

    def __init__(self, books: Books, name: str, workers: int) -> None:
        super().__init__(books.stage, name)
        self.books = books
        self.live: dict[bytes, None] = {}
        self.patient = self.world.chance(0.5)
        self._pending = True  # there may be something for recovery
        self._connections: dict[Connection, None] = {}
        for _ in range(workers):
            self.process.spawn(self._work())
        self.process.spawn(self._recover())

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self.live.clear()
        for connection in self._connections:
            connection.drop()

    def calm(self) -> None:
        """What it says arrives in time from now on."""
        for connection in self._connections:
            connection.slowness = 0.0

    async def _connected(self) -> Connection:
        """The connection of all its sessions."""
        for connection in list(self._connections):
            if not connection.lost.done:
                return connection
            del self._connections[connection]
        connection = await self.connect()
        connection.slowness = self.books.mishaps.slowness
        self._connections[connection] = None
        return connection

    async def _pause(self) -> None:
        """Between two calls anything may take its time."""
        if self.world.chance(0.6):
            await self.process.sleep(self.world.random.random() * PAUSE_MAX_MS)

    # -- transactions --------------------------------------------------------------------------------------------------

    async def _work(self) -> None:
        while True:
            await self.process.sleep(self.world.random.random() * self.books.pause_ms)
            if not self.books.left:
                return
            work = self.books.begin(self.name)
            self.live[work.xid.gtrid] = None
            try:
                await self._transaction(work)
            finally:
                self.live.pop(work.xid.gtrid, None)

    async def _transaction(self, work: Work) -> None:
        connection = await self._connected()
        try:
            await self._fill(connection, work)
        except ConnectionLost:
            return  # what it has done so far is undone by that
        kind = self.world.random.random()
        if kind < 0.1:
            await self.end(connection, work.xid.gtrid, commit=False)
        elif kind < 0.4:
            await self._one_phase(connection, work)
        else:
            await self._two_phases(connection, work)

    async def _fill(self, connection: Connection, work: Work) -> None:
        """Takes and sends."""
        pick, name = self.world.random, work.xid.gtrid
        connection.up(self._begin, connection, name)
        if pick.random() < 0.7:
            await self._take(connection, work, pick.choice(SOURCES))
        for to in pick.sample(TARGETS, pick.randint(0, 2)):
            ids: list[str] = []
            for _ in range(pick.randint(1, 2)):
                id, body, said = self.message(to, self.some_facts())
                ids.append(id)
                connection.up(self._send_in, connection, name, to, body, said)
            work.branch.sent[to] = tuple(ids)
        if connection.lost.done:
            raise ConnectionLost

    async def _take(self, connection: Connection, work: Work, source: Place) -> None:
        port = await connection.ask(self._attach, connection, source, "")
        taken: list[tuple[Message, int]] = []
        for _ in range(self.world.random.randint(1, 3)):
            found = await self._next(connection, port, MORE_MS if taken else FIRST_MS)
            if found is None:
                break
            taken.append(found)
            connection.up(self._acknowledge_in, connection, work.xid.gtrid, port, found[0])
        ids = [id_of(message.body or b"") for message, _ in taken]
        work.branch.source, work.branch.taken = source, tuple(ids)
        work.redelivered = tuple(id for id, (_, count) in zip(ids, taken, strict=True) if count)
        work.stale = connection.broker.superseded
        connection.up(self._detach, connection, port)  # what was sent ahead goes back

    async def _one_phase(self, connection: Connection, work: Work) -> None:
        """The broker alone decides."""
        work.branch.one_phase_ms = self.world.now_ms
        work.one_phase = "indeterminate"
        if self.world.chance(IMPATIENCE):
            self.process.after(self.world.random.random() * PATIENCE_MS, connection.drop)
        try:
            said = await self._ask_of(connection, requests.commit_one_phase, work)
            work.one_phase = "ok" if said == "done" else "fail"
            if self.world.chance(DEAFNESS):
                raise ConnectionLost  # what was said does not come to who has to know it
        except ConnectionLost:
            with suppress(ConnectionLost):
                work.one_phase = await self._settle(work)
        if work.one_phase == "indeterminate":
            self.world.note("doubt", self.name)
        else:
            self.books.over(work)

    async def _settle(self, work: Work) -> Outcome:
        """What became of a commit in one phase that has not been answered. It will not be carried out after this."""
        if self.world.chance(0.5):
            await self.process.sleep(self.world.random.random() * LATE_MAX_MS)
        while True:
            said = await self._end_at_broker(work.xid, decisions.Outcome.ROLLBACK)
            if said != "busy":
                return "ok" if said == "committed" else "fail"
            await self.process.sleep(MORE_MS)

    async def _two_phases(self, connection: Connection, work: Work) -> None:
        gtrid = work.xid.gtrid
        xids = self.world.random.sample((work.xid, branch_of(gtrid, DATABASE)), 2)
        asked: list[Xid] = []
        prepared: list[Xid] = []
        try:
            for xid in xids:
                asked.append(xid)
                if await self._vote(connection, work, xid):
                    prepared.append(xid)
                await self._pause()
        except (RolledBack, ConnectionLost, Unavailable):
            if work.xid not in asked:  # it is the connection's own yet
                await self.end(connection, gtrid, commit=False)
            await self._finish(asked, decisions.Outcome.ROLLBACK)
            return
        names = tuple(xid.bqual.decode() for xid in prepared)
        try:
            decision = await self.books.log.decide(self._decision(gtrid, decisions.Outcome.COMMIT, names))
        except Unavailable:
            self._pending = True  # it may be stored or not; recovery will see
            return
        await self._pause()
        if await self._finish(prepared, decision.outcome) and decision.outcome is decisions.Outcome.COMMIT:
            self.books.log.forget(gtrid)

    def _decision(self, gtrid: bytes, outcome: decisions.Outcome, names: tuple[str, ...] = ()) -> Decision:
        return Decision(gtrid, outcome, names, int(self.world.now_ms), self.name)

    async def _vote(self, connection: Connection, work: Work, xid: Xid) -> bool:
        """Whether there is something to commit. Raises RolledBack, and ConnectionLost or Unavailable, where that is not known."""
        if xid != work.xid:
            if not await self.books.ledger.prepare(xid):
                raise RolledBack
            return True
        said = await self._ask_of(connection, requests.prepare, work)
        self.world.say(f"branch {xid.gtrid.decode()}: prepare: {said}")
        if said == "done":
            work.branch.prepared_ms = self.world.now_ms
        elif said != "read-only":
            raise RolledBack
        return said == "done"

    async def _ask_of(self, connection: Connection, ask: Callable[[Connection, Xid, bytes], Awaitable[Said]], work: Work) -> Said:
        """About a transaction of the connection; a client may repeat that on another one."""
        try:
            return await ask(connection, work.xid, work.xid.gtrid)
        except ConnectionLost:
            if self.world.chance(0.5):
                raise
            self.world.note("repeat request", self.name)
            return await ask(await self._connected(), work.xid, work.xid.gtrid)

    async def _finish(self, xids: Sequence[Xid], outcome: decisions.Outcome) -> bool:
        """Tell the branches; False where one could not be told: recovery will."""
        done = True
        for xid in xids:
            try:
                await self._tell(xid, outcome)
            except (Unfinished, ConnectionLost, Unavailable):
                done = False
                self._pending = True
            await self._pause()
        return done

    async def _tell(self, xid: Xid, outcome: decisions.Outcome) -> None:
        """See bascule.xa.recovery.finish. Raises ConnectionLost, Unavailable, Unfinished."""
        if xid.bqual.decode() == DATABASE:
            await self.books.ledger.end(xid, outcome)
            return
        said = await self._end_at_broker(xid, outcome)
        if said == "busy":
            raise Unfinished
        if said in HEURISTIC:
            await self.books.log.record(Heuristic(xid, HEURISTIC[said], outcome, said, int(self.world.now_ms)))

    async def _end_at_broker(self, xid: Xid, outcome: decisions.Outcome) -> Said:
        """Asked once more where the connection turns out to be lost. Raises ConnectionLost."""
        for last in (False, True):
            connection = await self._connected()
            end = End("commit" if outcome is decisions.Outcome.COMMIT else "rollback", self.world.now_ms)
            self.books.works[xid].branch.ends.append(end)
            try:
                said = await requests.end(connection, xid, ENDINGS[outcome])
            except ConnectionLost:
                if last:
                    raise
                continue
            self.books.ended(xid, end, said)
            return said
        raise AssertionError("the last one raises")

    # -- recovery ------------------------------------------------------------------------------------------------------

    async def _recover(self) -> None:
        while True:
            with suppress(BasculeError):  # then the next time
                await self._pass()
            await self.process.sleep(self.world.random.random() * (INTERVAL_MS if self._pending else IDLE_MS))

    async def _pass(self) -> None:
        """See Recoverer.run. Raises Unavailable without the log."""
        log, at_work = self.books.log, set(self.live)
        before = await log.read()
        branches: dict[str, Sequence[Xid]] = {DATABASE: await self.books.ledger.recover()}
        with suppress(ConnectionLost):
            branches[BROKER] = await self._list()
        at_work |= set(self.live)
        after = await log.read()
        steps = plan(MANAGER, View(branches, before, after, at_work, int(self.world.now_ms)), patient=self.patient)
        self._pending = bool(steps) or BROKER not in branches
        for step in steps:
            with suppress(Unfinished, ConnectionLost, Unavailable):
                await self._step(step)

    async def _list(self) -> Sequence[Xid]:
        connection = await self._connected()
        asked_ms = self.world.now_ms
        found = await requests.recover(connection)
        self.books.listings.append(Listing(asked_ms, self.world.now_ms, frozenset(map(str, found))))
        return found

    async def _step(self, step: Step) -> None:
        if step.action is Action.FORGET:
            self.books.log.forget(step.xid.gtrid)
        elif step.action is not Action.WAIT:
            await self._pause()
            outcome = decisions.Outcome(step.action)
            if outcome is decisions.Outcome.ROLLBACK:
                outcome = (await self.books.log.decide(self._decision(step.xid.gtrid, outcome))).outcome
            self.world.note("recover branch", self.name)
            await self._tell(step.xid, outcome)
