"""The resources of a simulated transaction manager besides the broker: the decision log, and a database that takes part.

Both may be unavailable for a while. A call may be in flight when its caller dies, and an answer may never come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from bascule.core.errors import Unavailable
from bascule.xa.errors import BranchRolledBack, ResourceFailed, UnknownXid
from bascule.xa.log import Decision, Heuristic, LogIdentity, LogState, Outcome, decode, encode
from bascule.xa.log_topic import LogRecord
from bascule.xa.resource import Vote
from bascule.xa.xid import Xid
from tests.sim.decisions import TopicDecisions
from tests.sim.world import Promise, World

T = TypeVar("T")
#: The longest way of a call or its answer, and how long the caller waits.
WAY_MS: Final = 6.0
PATIENCE_MS: Final = 60.0
#: How often the client of the log does not learn the offset of a stored record.
UNKNOWN_OFFSETS: Final = 0.02
#: The largest lag of a standby.
BEHIND_MS: Final = 400.0


@dataclass(slots=True)
class FaultRates:
    """Frequencies of a manager's faults: its output to the broker is delayed, an answer is lost, the database votes no.

    ``standbys``: how often a standby answers which branches are prepared. ``hands``: how often the operator of a database ends one.
    ``namesakes``: two managers have the same name, and each has its own decision log. ``frank``: a database answers XA_RB* to the
    commit of a branch that its operator has rolled back.
    """

    slowness: float = 0.0
    lost_answers: float = 0.0
    refusals: float = 0.0
    standbys: float = 0.0
    hands: float = 0.0
    namesakes: bool = False
    frank: bool = False


class Remote:
    """A server that carries out calls some time later, whatever has become of the caller."""

    def __init__(self, world: World, mishaps: FaultRates, name: str) -> None:
        self.world = world
        self.mishaps = mishaps
        self.name = name
        self.away_until_ms = 0.0

    @property
    def away(self) -> bool:
        """Return True if it carries nothing out."""
        return self.world.now_ms < self.away_until_ms

    def call(self, effect: Callable[[], T], *, standby: bool = False) -> Promise[T]:
        """Carry out a call. The promise fails with Unavailable if the call or its answer is lost: its caller cannot tell which.

        ``standby``: another server answers while this one is away.
        """
        answer: Promise[T] = Promise()
        self.world.after(self.world.random.random() * WAY_MS, self._carry_out, effect, answer, standby)
        return answer

    def _carry_out(self, effect: Callable[[], T], answer: Promise[T], standby: bool) -> None:
        if self.away and not standby:
            self.world.note(f"lose {self.name}")
            self.world.after(PATIENCE_MS, answer.fail, Unavailable("no answer"))
            return
        try:
            value = effect()
        except Exception as error:
            self.world.after(self.world.random.random() * WAY_MS, answer.fail, error)
            return
        if self.world.chance(self.mishaps.lost_answers):
            self.world.note("lose verdict")
            self.world.after(PATIENCE_MS, answer.fail, Unavailable("no answer"))
        else:
            self.world.after(self.world.random.random() * WAY_MS, answer.keep, value)


class Log(Remote, TopicDecisions):
    """The decision log: the protocol of the topic on a partition with its own calls.

    ``standing`` has the first stored outcome of each transaction for the judgement, ``recorded`` each heuristic outcome.
    """

    def __init__(self, world: World, mishaps: FaultRates, log_id: str = "") -> None:
        super().__init__(world, mishaps, "log")
        self._violations = world.violations
        self.standing: dict[bytes, Decision] = {}
        self.recorded: set[Xid] = set()
        #: Called when a decision is the first one of its transaction.
        self.on_decision: Callable[[Decision], None] = lambda _: None
        self._table: dict[bytes, LogRecord] = {b"#0": LogRecord(encode(LogIdentity(log_id, 0)), 0)} if log_id else {}
        self._end = 0
        self._keys = 0

    @property
    def state(self) -> LogState:
        """Return all entries, in order."""
        state = LogState()
        for record in sorted(self._table.values(), key=lambda record: record.offset):
            state.add(decode(record.value))
        return state

    @property
    def open(self) -> list[str]:
        """Return the entries that are not forgotten, except rollbacks, which are kept for a day."""
        state = self.state
        commits = [str(gtrid) for gtrid, decision in state.decisions.items() if decision.outcome is Outcome.COMMIT]
        return commits + [str(xid) for xid in state.heuristics]

    # TopicCalls

    def new_key(self) -> bytes:
        """See TopicCalls."""
        self._keys += 1
        return b"%d" % self._keys

    async def append(self, key: bytes, value: bytes) -> int | None:
        """See TopicCalls."""
        offset = await self.call(lambda: self._store(key, value))
        return None if self.world.chance(UNKNOWN_OFFSETS) else offset

    async def reach(self, offset: int) -> Mapping[bytes, LogRecord]:
        """See TopicCalls."""
        return await self.call(lambda: dict(self._table))

    async def tail(self, *, barrier: bool = True) -> Mapping[bytes, LogRecord]:
        """See TopicCalls."""
        return await self.call(lambda: dict(self._table))

    def known(self) -> Iterable[bytes]:
        """See TopicCalls."""
        return list(self._table)

    def post(self, key: bytes, value: bytes | None) -> None:
        """See TopicCalls."""
        self.call(lambda: self._store(key, value))

    def _store(self, key: bytes, value: bytes | None) -> int:
        self._end += 1
        if value is None:
            self._table.pop(key, None)
            return self._end
        self._table[key] = LogRecord(value, self._end)
        entry = decode(value)
        if isinstance(entry, Heuristic):
            self.recorded.add(entry.xid)
        elif isinstance(entry, Decision) and entry.gtrid not in self.standing:
            self.standing[entry.gtrid] = entry
            self.on_decision(entry)
        return self._end


class Database(Remote):
    """A database with a row for each transaction that has committed in it. At times it votes no.

    Its list of prepared branches may be that of a standby. Its operator may end prepared branches by hand, which the database does not
    record.
    """

    priority = 0
    decider = None
    decides = False

    def __init__(self, world: World, mishaps: FaultRates) -> None:
        super().__init__(world, mishaps, "database")
        self.prepared: dict[Xid, None] = {}
        self.rows: set[bytes] = set()
        #: The outcome of each prepared branch, as ``pg_xact_status`` reports it; and the branches that the operator has ended.
        self.ended: dict[Xid, Outcome] = {}
        self.by_hand: set[Xid] = set()
        #: Transactions that it has committed in one phase.
        self.alone: set[bytes] = set()
        self._lists: list[tuple[float, tuple[Xid, ...]]] = [(0.0, ())]

    def end_some(self) -> None:
        """End a prepared branch as the operator, if there is one."""
        if self.prepared:
            xid = self.world.random.choice(list(self.prepared))
            outcome = self.world.random.choice(list(Outcome))
            self.world.note("end by hand", f"{self.name}, {xid.gtrid.decode()}: {outcome}")
            self.by_hand.add(xid)
            self._end(xid, outcome)

    # the calls of a Participant

    async def start(self, xid: Xid, *, timeout_s: float) -> None:
        """See Participant: a session of its own."""

    async def end(self, xid: Xid, *, success: bool) -> None:
        """See Participant."""

    async def prepare(self, xid: Xid) -> Vote:
        """See Participant."""
        return await self._answer(lambda: self._prepare(xid))

    async def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Participant."""
        await self._answer(lambda: self._commit_alone(xid) if one_phase else self._finish(xid, Outcome.COMMIT))

    async def rollback(self, xid: Xid) -> None:
        """See Participant."""
        await self._answer(lambda: self._finish(xid, Outcome.ROLLBACK))

    async def recover(self) -> Sequence[Xid]:
        """See Participant."""
        return await self._answer(self._listed, standby=self.world.chance(self.mishaps.standbys))

    async def forget(self, xid: Xid) -> None:
        """See Participant."""
        raise UnknownXid(str(xid))

    async def token(self, xid: Xid) -> str:
        """See Participant."""
        return str(xid)

    async def outcome(self, xid: Xid, token: str) -> Outcome | None:
        """See Participant."""
        return await self._answer(lambda: self.ended.get(xid) if token == str(xid) else None)

    async def _answer(self, effect: Callable[[], T], *, standby: bool = False) -> T:
        try:
            return await self.call(effect, standby=standby)
        except Unavailable as error:
            raise ResourceFailed(str(error)) from error

    def _prepare(self, xid: Xid) -> Vote:
        if self.world.chance(self.mishaps.refusals):
            raise BranchRolledBack(f"{xid} is refused")
        self.prepared[xid] = None
        self._changed()
        return Vote.YES

    def _commit_alone(self, xid: Xid) -> None:
        if self.world.chance(self.mishaps.refusals):
            raise BranchRolledBack(f"{xid} is refused")
        self.alone.add(xid.gtrid)
        self.rows.add(xid.gtrid)

    def _finish(self, xid: Xid, outcome: Outcome) -> None:
        if xid not in self.prepared:
            if self.mishaps.frank and outcome is Outcome.COMMIT and self.ended.get(xid) is Outcome.ROLLBACK:
                raise BranchRolledBack(f"{xid} was rolled back")
            raise UnknownXid(str(xid))
        self._end(xid, outcome)

    def _end(self, xid: Xid, outcome: Outcome) -> None:
        del self.prepared[xid]
        self.ended[xid] = outcome
        if outcome is Outcome.COMMIT:
            self.rows.add(xid.gtrid)
        self._changed()

    def _changed(self) -> None:
        self._lists.append((self.world.now_ms, tuple(self.prepared)))

    def _listed(self) -> Sequence[Xid]:
        """Return the prepared branches. With several hosts, a standby answers while the primary is away, and at times when it is not."""
        if not self.away and not self.world.chance(self.mishaps.standbys):
            return list(self.prepared)
        self.world.note("ask standby", self.name)
        behind_ms = self.world.now_ms - self.world.random.random() * BEHIND_MS
        return next(list(xids) for at_ms, xids in reversed(self._lists) if at_ms <= behind_ms or at_ms == 0.0)
