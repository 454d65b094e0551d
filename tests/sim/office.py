"""Where the transactions of the simulation come from: the manager's processes, and the administrator who puts his hand in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from bascule.broker.branches import listed
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.xa import log as decisions
from tests.sim import requests
from tests.sim.broker import Broker, ConnectionLost
from tests.sim.clients import Client, Stage
from tests.sim.ledger import Ledger, Log, Mishaps
from tests.sim.managers import Books, Manager, Work
from tests.support.history import Tally
from tests.support.history_branches import FORCED, NEVER_MS, End, judge
from tests.support.operations import Operation, Outcome

#: How often an administrator looks for heuristic outcomes that are to be forgotten.
LOOK_MS: Final = 60.0
#: So many processes of one manager are alive at once.
PROCESSES_MAX: Final = 3
#: So often he looks for a branch to end, in that time.
LOOKS_MAX: Final = 30


class Office:
    """All about transactions that have branches. ``count`` of them are begun."""

    def __init__(self, stage: Stage, count: int, pause_ms: float, mishaps: Mishaps) -> None:
        world = self.world = stage.world
        self.stage = stage
        self.books = Books(stage, Log(world, mishaps), Ledger(world, mishaps), mishaps, count, pause_ms)
        self.processes: list[Manager] = []
        self._workers = world.random.randint(1, 2)
        self.administrator = Administrator(stage, self.books)
        if count:
            self.launch()

    @property
    def alive(self) -> list[Manager]:
        """The processes of the manager."""
        return [each for each in self.processes if each.process.alive]

    def one(self) -> list[Manager]:
        """One of them, if there are any."""
        return self.world.random.sample(self.alive, min(1, len(self.alive)))

    def launch(self) -> None:
        """One more process of the manager, if there are not enough."""
        if len(self.alive) < PROCESSES_MAX:
            self.processes.append(Manager(self.books, f"tm{len(self.processes)}", self._workers))

    def supervise(self) -> None:
        """Somebody has to be there."""
        if self.processes and not self.alive:
            self.launch()

    def calm(self) -> None:
        """Nothing goes wrong from now on."""
        self.books.mishaps.slowness = self.books.mishaps.lost_answers = self.books.mishaps.refusals = 0.0
        self.administrator.calm()
        for process in self.processes:
            process.calm()

    # -- the end -------------------------------------------------------------------------------------------------------

    def in_doubt(self, serving: Sequence[Broker]) -> Iterator[str]:
        """What has no end yet, and what still remembers one."""
        for broker in serving:
            yield from (f"{each.xid} at {broker.name}" for each in listed(broker.engine))
        yield from (f"{xid} in the database" for xid in self.books.ledger.prepared)
        yield from (f"{name} in the log" for name in self.books.log.open)
        yield from (f"{each.name} at work" for each in self.alive if each.live)
        if self.books.left:
            yield f"{self.books.left} to begin"

    def note(self) -> None:
        """What the transactions were, for the history."""
        for work in sorted(self.books.works.values(), key=lambda work: work.over_ms):
            self._note(work)

    def _note(self, work: Work) -> None:
        branch, outcome = work.branch, self._outcome(work)
        branch.decided = "commit" if self._committed(work) else "rollback"
        note = partial(self._operation, work, outcome)
        if branch.source is not None and branch.taken:
            if work.stale and outcome != "ok":
                self.stage.stale += len(branch.taken)
            else:
                where = {"source": branch.source.destination, "subscription": branch.source.subscription}
                note("receive", branch.taken, redelivered=work.redelivered, **where)
        for target, ids in branch.sent.items():
            note("send", ids, target=target, transaction=branch.name, facts={id: self.stage.facts[id] for id in ids})

    def _operation(self, work: Work, outcome: Outcome, op: str, ids: tuple[str, ...], **more: object) -> None:
        ended_ms = min(work.over_ms, self.world.now_ms)
        self.stage.note(Operation(work.client, ids, outcome, op=op, begun_ms=work.begun_ms, ended_ms=ended_ms, **more))  # type: ignore[arg-type]

    def _outcome(self, work: Work) -> Outcome:
        """Of the broker's branch: an administrator's word goes before the manager's."""
        for end in work.branch.ends:
            if end.said in FORCED:
                return "ok" if end.said == "forced-commit" else "fail"
        if work.one_phase is not None:
            return work.one_phase
        return "ok" if self._committed(work) else "fail"

    def _committed(self, work: Work) -> bool:
        return self.books.log.standing.get(work.xid.gtrid) is decisions.Outcome.COMMIT

    def judge(self, tally: Tally, serving: Sequence[Broker]) -> None:
        """Branches, whether the database has what was decided, and what has no end at the end."""
        judge(tally, self.stage.operations, [work.branch for work in self.books.works.values()], self.books.listings)
        rows = self.books.ledger.rows
        decided = {gtrid for gtrid, outcome in self.books.log.standing.items() if outcome is decisions.Outcome.COMMIT}
        tally.report("xa-split", "transactions in the database that were not decided", map(str, rows - decided))
        tally.report("xa-stuck", "without an end though all was well", self.in_doubt(serving))


class Administrator(Client):
    """Ends branches by force, and forgets them once their manager has been told."""

    def __init__(self, stage: Stage, books: Books) -> None:
        super().__init__(stage, "administrator")
        self._books = books
        self._calm = False
        if books.left:
            self._lets_lie = self.world.chance(0.5)
            self.process.spawn(self._forget())
            if self.world.chance(0.5):
                self.process.spawn(self._meddle())

    def calm(self) -> None:
        """He lets branches be, and sees to what is left."""
        self._calm, self._lets_lie = True, False

    def force(self) -> None:
        """Ends one of the branches that are prepared, as far as anybody knows, or that soon will be."""
        self.process.spawn(self._force_some())

    async def _meddle(self) -> None:
        while not self._calm:
            await self.process.sleep(self.world.random.random() * 2 * LOOK_MS)
            await self._force_some()

    async def _force_some(self) -> None:
        ending = self.world.random.choice((Ending.FORCED_COMMIT, Ending.FORCED_ROLLBACK))
        for _ in range(LOOKS_MAX):
            works = [work for work in self._books.works.values() if work.branch.prepared_ms < NEVER_MS == work.over_ms]
            if works:
                await self._force(self.world.random.choice(works), ending)
                return
            await self.process.sleep(LOOK_MS / 10)

    async def _force(self, work: Work, ending: Ending) -> None:
        connection = await self.connect()
        end = End("commit" if ending is Ending.FORCED_COMMIT else "rollback", self.world.now_ms, forced=True)
        work.branch.ends.append(end)
        try:
            said = await requests.end(connection, work.xid, ending)
        except ConnectionLost:
            return
        finally:
            connection.drop()
        if said == "done":
            self.world.note("force branch", self.name)
            said = "forced-commit" if ending is Ending.FORCED_COMMIT else "forced-rollback"
        self._books.ended(work.xid, end, said)

    async def _forget(self) -> None:
        while True:
            await self.process.sleep(self.world.random.random() * 2 * LOOK_MS)
            for xid in () if self._lets_lie else list(self._books.log.state.heuristics):
                await self._forget_one(xid)

    async def _forget_one(self, xid: Xid) -> None:
        connection = await self.connect()
        branch = self._books.works[xid].branch
        branch.forget_ms = min(branch.forget_ms, self.world.now_ms)
        try:
            said = await requests.forget(connection, xid)
        except ConnectionLost:
            return
        finally:
            connection.drop()
        if said != "busy":
            branch.forgotten_ms = min(branch.forgotten_ms, self.world.now_ms)
            self._books.log.forget_heuristic(xid)
