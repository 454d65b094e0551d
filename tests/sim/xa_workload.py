"""The source of the simulation's transactions: processes of the managers, and the administrator of the broker."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final

from bascule.broker.branches import listed
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.xa import log_topic
from bascule.xa.log import Decision
from bascule.xa.log import Outcome as Decided
from tests.sim import requests
from tests.sim.broker import Broker
from tests.sim.clients import Client, Stage
from tests.sim.connections import ConnectionLost
from tests.sim.managers import DATABASE, LOG_IDS, MANAGERS, Manager, Work, XaState, outcome_of
from tests.sim.xa_resources import Database, FaultRates, Log
from tests.support.history import Tally
from tests.support.history_branches import FORCED, NEVER_MS, End, judge
from tests.support.operations import Operation, Outcome

#: Warnings of bascule.xa are expected in a run.
logging.getLogger("bascule.xa").addHandler(logging.NullHandler())
#: How often an administrator looks for heuristic outcomes to forget.
LOOK_MS: Final = 60.0
#: Most live processes of one manager.
PROCESSES_MAX: Final = 3
#: How often the administrator looks for a branch to end, in that time.
LOOKS_MAX: Final = 30
#: How often a run has two managers that share the decision log.
COMPANY: Final = 0.5
#: How often the operator of a database looks for a branch to end, if there is one who does.
HAND_MS: Final = 60.0


class XaWorkload:
    """The transactions with branches in a run. ``count`` of them are begun."""

    def __init__(self, stage: Stage, count: int, pause_ms: float, mishaps: FaultRates) -> None:
        world = self.world = stage.world
        self.stage = stage
        self.managers = MANAGERS if world.chance(COMPANY) else MANAGERS[:1]
        databases = {name: Database(world, mishaps) for name in self.managers}
        shared = Log(world, mishaps)
        logs = {name: Log(world, mishaps, LOG_IDS[name]) if mishaps.namesakes else shared for name in self.managers}
        self.state = XaState(stage, logs, databases, mishaps, count, pause_ms)
        for log in self.state.all_logs:
            log.on_decision = self._decided
        self.processes: list[Manager] = []
        self._disturbed: list[str] = []
        self._workers = world.random.randint(1, 2)
        self.administrator = Administrator(stage, self.state)
        if count:
            for name in self.managers * world.random.randint(1, 2):
                self.launch(name)
            world.after(HAND_MS, self._end_by_hand)

    @property
    def alive(self) -> list[Manager]:
        """Return the processes of all managers."""
        return [each for each in self.processes if each.process.alive]

    def one(self) -> list[Manager]:
        """Return one process, if there are any."""
        return self.world.random.sample(self.alive, min(1, len(self.alive)))

    def launch(self, manager: str) -> None:
        """Start another process of a manager, if there are not enough."""
        if sum(each.manager == manager for each in self.alive) < PROCESSES_MAX:
            self.processes.append(Manager(self.state, manager, f"{manager}{len(self.processes)}", self._workers))

    def supervise(self) -> None:
        """Make sure that every manager has a process."""
        for name in {each.manager: None for each in self.processes}:
            if not any(each.manager == name for each in self.alive):
                self.launch(name)

    def lose(self, what: str, duration_ms: float) -> None:
        """Make the log, or one of the databases, unavailable for ``duration_ms``."""
        parts = [each for each in (*self.state.all_logs, *self.state.databases.values()) if each.name == what]
        self.world.random.choice(parts).away_until_ms = self.world.now_ms + duration_ms

    def calm(self) -> None:
        """End all faults."""
        mishaps = self.state.mishaps
        mishaps.slowness = mishaps.lost_answers = mishaps.refusals = mishaps.standbys = mishaps.hands = 0.0
        for each in (*self.state.all_logs, *self.state.databases.values()):
            each.away_until_ms = 0.0
        self.administrator.calm()
        for process in self.processes:
            process.calm()

    def _end_by_hand(self) -> None:
        for database in self.state.databases.values():
            if self.world.chance(self.state.mishaps.hands):
                database.end_some()
        self.world.after(HAND_MS, self._end_by_hand)

    def _decided(self, decision: Decision) -> None:
        if any(each.disturbs(decision) for each in self.alive):
            self._disturbed.append(decision.gtrid.decode())

    # -- the end -------------------------------------------------------------------------------------------------------

    def in_doubt(self, serving: Sequence[Broker]) -> Iterator[str]:
        """Yield what has not ended yet, and what still remembers an outcome."""
        for broker in serving:
            yield from (f"{each.xid} at {broker.name}" for each in listed(broker.engine))
        for database in self.state.databases.values():
            yield from (f"{xid} in the database" for xid in database.prepared)
        yield from (f"{name} in the log" for log in self.state.all_logs for name in log.open)
        yield from (f"{each.name} at work" for each in self.alive if each.live)
        if self.state.left:
            yield f"{self.state.left} to begin"

    def note(self) -> None:
        """Add the transactions to the history."""
        for work in sorted(self.state.works.values(), key=lambda work: work.over_ms):
            self._note(work)

    def _note(self, work: Work) -> None:
        branch, outcome = work.branch, self._outcome(work)
        branch.decided = "commit" if self._committed(work.xid.gtrid) else "rollback"
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
        """Return the outcome of the broker's branch: an administrator's request takes precedence over the manager's."""
        for end in work.branch.ends:
            if end.said in FORCED:
                return "ok" if end.said == "forced-commit" else "fail"
        if work.alone:
            return outcome_of(work.told) if work.branch.one_phase_ms < NEVER_MS else "fail"
        return "ok" if self._committed(work.xid.gtrid) else "fail"

    def _committed(self, gtrid: bytes) -> bool:
        decision = self.state.log_of(gtrid).standing.get(gtrid)
        return decision is not None and decision.outcome is Decided.COMMIT

    def judge(self, tally: Tally, serving: Sequence[Broker]) -> None:
        """Judge branches, databases, the answers to applications, and what has not ended."""
        judge(tally, self.stage.operations, [work.branch for work in self.state.works.values()], self.state.listings)
        for name, database in self.state.databases.items():
            self._judge_rows(tally, name, database)
        tally.report("xa-told", "applications were told another outcome than the log's", map(str, self._told_otherwise()))
        tally.report("xa-heuristic", "ended against the decision, and nobody was told", map(str, self._unrecorded()))
        tally.report("xa-disturbed", "rolled back though they were not left behind", self._disturbed)
        tally.report("xa-stuck", "without an end though all was well", self.in_doubt(serving))

    def _judge_rows(self, tally: Tally, name: str, database: Database) -> None:
        """Check that each row, or its absence, is the decided outcome, unless the operator of the database has ended the branch."""
        standing, by_hand = self.state.logs[name].standing, {xid.gtrid for xid in database.by_hand}
        prepared = {work.xid.gtrid for work in self.state.works.values() if work.branch.prepared_ms < NEVER_MS}
        alone = database.alone - prepared
        decided = {gtrid for gtrid in standing if self._committed(gtrid)}
        wanted = {gtrid for gtrid in decided if self.state.owner(gtrid) == name and DATABASE in standing[gtrid].resources}
        tally.report("xa-split", "transactions in the database that were not decided", map(str, database.rows - decided - by_hand - alone))
        tally.report("xa-split", "committed, and not in the database", map(str, wanted - database.rows - by_hand))

    def _told_otherwise(self) -> Iterator[bytes]:
        """Yield decided transactions whose applications were told another outcome. The log has decided them, or a database alone."""
        alone = set().union(*(database.alone for database in self.state.databases.values()))
        for work in self.state.works.values():
            gtrid = work.xid.gtrid
            committed = self._committed(gtrid) or gtrid in alone
            if (work.told == "rolled back" and committed) or (work.told == "committed" and self._rolled_back(gtrid)):
                yield gtrid

    def _rolled_back(self, gtrid: bytes) -> bool:
        decision = self.state.log_of(gtrid).standing.get(gtrid)
        return decision is not None and decision.outcome is Decided.ROLLBACK

    def _unrecorded(self) -> Iterator[Xid]:
        """Yield the branches of committed transactions that were rolled back from outside, without a record of that."""
        recorded = set().union(*(log.recorded for log in self.state.all_logs))
        for database in self.state.databases.values():
            for xid in database.by_hand - recorded:
                if self._committed(xid.gtrid) and database.ended[xid] is Decided.ROLLBACK:
                    yield xid
        for work in self.state.works.values():
            told = any(end.wanted == "commit" and end.said == "forced-rollback" and not end.forced for end in work.branch.ends)
            if told and work.xid not in recorded:
                yield work.xid


class Administrator(Client):
    """A client that ends branches by force, and forgets them once their manager has been told."""

    def __init__(self, stage: Stage, state: XaState) -> None:
        super().__init__(stage, "administrator")
        self._state = state
        self._calm = False
        if state.left:
            self._lets_lie = self.world.chance(0.5)
            self.process.spawn(self._forget())
            if self.world.chance(0.5):
                self.process.spawn(self._meddle())

    def calm(self) -> None:
        """End no more branches, and forget those that are left."""
        self._calm, self._lets_lie = True, False

    def force(self) -> None:
        """End one of the branches that are, or soon will be, prepared."""
        self.process.spawn(self._force_some())

    async def _meddle(self) -> None:
        while not self._calm:
            await self.process.sleep(self.world.random.random() * 2 * LOOK_MS)
            await self._force_some()

    async def _force_some(self) -> None:
        ending = self.world.random.choice((Ending.FORCED_COMMIT, Ending.FORCED_ROLLBACK))
        for _ in range(LOOKS_MAX):
            works = [work for work in self._state.works.values() if work.branch.prepared_ms < NEVER_MS == work.over_ms]
            if works:
                await self._force(self.world.random.choice(works), ending)
                return
            await self.process.sleep(LOOK_MS / 10)

    async def _force(self, work: Work, ending: Ending) -> None:
        connection = await self.connect()
        end = End("commit" if ending is Ending.FORCED_COMMIT else "rollback", self.world.now_ms, forced=True)
        work.branch.ends.append(end)
        try:
            said = await requests.force(connection, work.xid, ending)
        except ConnectionLost:
            return
        finally:
            connection.drop()
        if said == "done":
            self.world.note("force branch", self.name)
            said = "forced-commit" if ending is Ending.FORCED_COMMIT else "forced-rollback"
        self._state.ended(work.xid, end, said)

    async def _forget(self) -> None:
        while True:
            await self.process.sleep(self.world.random.random() * 2 * LOOK_MS)
            logs = [] if self._lets_lie else self._state.all_logs
            for xid, log in {xid: each for each in logs for xid in each.state.heuristics}.items():
                if xid.bqual == DATABASE.encode():
                    log_topic.forget_heuristic(log, xid)
                else:
                    await self._forget_one(xid)

    async def _forget_one(self, xid: Xid) -> None:
        connection = await self.connect()
        branch = self._state.works[xid].branch
        branch.forget_ms = min(branch.forget_ms, self.world.now_ms)
        try:
            reply = await requests.ask(connection, "forget", xid)
        except ConnectionLost:
            return
        finally:
            connection.drop()
        if requests.said(reply) != "busy":
            branch.forgotten_ms = min(branch.forgotten_ms, self.world.now_ms)
            log_topic.forget_heuristic(self._state.log_of(xid.gtrid), xid)
