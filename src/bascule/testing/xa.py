"""Test support for transactions: an in-memory resource and decision log that can fail, and a check of the order of calls.

The state that survives a crash is separate: ``ModelResource.durable`` and ``ModelLog.durable`` outlive the objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from bascule.core.errors import Unavailable
from bascule.xa.branches import BranchStates
from bascule.xa.errors import BranchHeuristic, BranchRolledBack, Code, ResourceFailed, UnknownXid
from bascule.xa.log import Decision, DecisionLog, Heuristic, LogState, Outcome
from bascule.xa.resource import NEXT, BranchState, Call, CommitPriority, Resource, TellsOutcome, Vote, priority_of, refusal
from bascule.xa.xid import Xid

HandleT = TypeVar("HandleT")
AnswerT = TypeVar("AnswerT")
#: Called before and after each call of a resource or log, with the name ``who.call.before`` or ``who.call.after``.
Watch = Callable[[str], None]


def unwatched(_point: str) -> None:
    """Do nothing."""


class Checked(Generic[HandleT]):
    """A resource that checks its callers: a call in a wrong order is refused."""

    def __init__(self, inner: Resource[HandleT]) -> None:
        self.inner = inner
        self.name = inner.name
        self.priority = priority_of(inner)
        self._branches = BranchStates()

    def start(self, xid: Xid, *, timeout_s: float) -> HandleT:
        """See Resource."""
        after = self._branches.check(xid, Call.START)
        handle = self.inner.start(xid, timeout_s=timeout_s)
        self._branches.move(xid, after)
        return handle

    def end(self, xid: Xid, *, success: bool) -> None:
        """See Resource."""
        after = self._branches.check(xid, Call.END if success else Call.END_FAILED)
        self.inner.end(xid, success=success)
        self._branches.move(xid, after)

    def prepare(self, xid: Xid) -> Vote:
        """See Resource."""
        after = self._branches.check(xid, Call.PREPARE)
        try:
            vote = self.inner.prepare(xid)
        except BranchRolledBack:
            self._branches.move(xid, BranchState.NONE)
            raise
        self._branches.move(xid, after if vote is Vote.YES else BranchState.NONE)
        return vote

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Resource."""
        self._finish(xid, Call.COMMIT_ONE_PHASE if one_phase else Call.COMMIT, lambda: self.inner.commit(xid, one_phase=one_phase))

    def rollback(self, xid: Xid) -> None:
        """See Resource."""
        self._finish(xid, Call.ROLLBACK, lambda: self.inner.rollback(xid))

    def recover(self) -> Sequence[Xid]:
        """See Resource."""
        return self.inner.recover()

    def forget(self, xid: Xid) -> None:
        """See Resource."""
        self.inner.forget(xid)

    def token(self, xid: Xid) -> str:
        """See TellsOutcome."""
        return self.inner.token(xid) if isinstance(self.inner, TellsOutcome) else ""

    def outcome(self, xid: Xid, token: str) -> Outcome | None:
        """See TellsOutcome."""
        return self.inner.outcome(xid, token) if isinstance(self.inner, TellsOutcome) else None

    def _finish(self, xid: Xid, call: Call, act: Callable[[], None]) -> None:
        state = self._branches.state(xid)
        if state is not BranchState.NONE and (state, call) not in NEXT:  # a branch of another process may be finished here
            raise refusal(state, call, xid)
        try:
            act()
        except (BranchRolledBack, UnknownXid):
            self._branches.move(xid, BranchState.NONE)
            raise
        self._branches.move(xid, BranchState.NONE)


class Watched(Generic[HandleT]):
    """A resource that reports its calls, before and after each."""

    def __init__(self, inner: Resource[HandleT], watch: Watch) -> None:
        self.inner = inner
        self.name = inner.name
        self.priority = priority_of(inner)
        self._watch = watch

    def start(self, xid: Xid, *, timeout_s: float) -> HandleT:
        """See Resource."""
        return self._around("start", lambda: self.inner.start(xid, timeout_s=timeout_s))

    def end(self, xid: Xid, *, success: bool) -> None:
        """See Resource."""
        self._around("end", lambda: self.inner.end(xid, success=success))

    def prepare(self, xid: Xid) -> Vote:
        """See Resource."""
        return self._around("prepare", lambda: self.inner.prepare(xid))

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Resource."""
        self._around("commit", lambda: self.inner.commit(xid, one_phase=one_phase))

    def rollback(self, xid: Xid) -> None:
        """See Resource."""
        self._around("rollback", lambda: self.inner.rollback(xid))

    def recover(self) -> Sequence[Xid]:
        """See Resource."""
        return self._around("recover", self.inner.recover)

    def forget(self, xid: Xid) -> None:
        """See Resource."""
        self._around("forget", lambda: self.inner.forget(xid))

    def token(self, xid: Xid) -> str:
        """See TellsOutcome."""
        return self.inner.token(xid) if isinstance(self.inner, TellsOutcome) else ""

    def outcome(self, xid: Xid, token: str) -> Outcome | None:
        """See TellsOutcome."""
        inner = self.inner
        return self._around("outcome", lambda: inner.outcome(xid, token)) if isinstance(inner, TellsOutcome) else None

    def _around(self, call: str, act: Callable[[], AnswerT]) -> AnswerT:
        self._watch(f"{self.name}.{call}.before")
        answer = act()
        self._watch(f"{self.name}.{call}.after")
        return answer


class WatchedLog:
    """A decision log that reports its calls, before and after each."""

    def __init__(self, inner: DecisionLog, watch: Watch) -> None:
        self.inner = inner
        self._watch = watch

    def decide(self, decision: Decision) -> Decision:
        """See DecisionLog."""
        return self._around("decide", lambda: self.inner.decide(decision))

    def read(self) -> LogState:
        """See DecisionLog."""
        return self._around("read", self.inner.read)

    def record(self, heuristic: Heuristic) -> None:
        """See DecisionLog."""
        self._around("record", lambda: self.inner.record(heuristic))

    def forget(self, gtrids: Iterable[bytes]) -> None:
        """See DecisionLog."""
        self._around("forget", lambda: self.inner.forget(gtrids))

    def forget_heuristic(self, xid: Xid) -> None:
        """See DecisionLog."""
        self._around("forget_heuristic", lambda: self.inner.forget_heuristic(xid))

    def close(self) -> None:
        """See DecisionLog."""
        self.inner.close()

    def _around(self, call: str, act: Callable[[], AnswerT]) -> AnswerT:
        self._watch(f"log.{call}.before")
        answer = act()
        self._watch(f"log.{call}.after")
        return answer


@dataclass
class DurableBranches:
    """The state of a resource that survives a crash."""

    prepared: dict[Xid, list[str]] = field(default_factory=dict)
    committed: list[str] = field(default_factory=list)
    #: Branches finished by hand: the code returned to callers until forgotten.
    heuristic: dict[Xid, Code] = field(default_factory=dict)
    #: The outcome of each prepared branch, as ``pg_xact_status`` reports it.
    ended: dict[Xid, Outcome] = field(default_factory=dict)


class ModelResource:
    """A list of strings as a resource. A branch appends to it; the handle is the branch's own list."""

    def __init__(
        self,
        name: str,
        durable: DurableBranches | None = None,
        *,
        vote: str = "yes",
        watch: Watch = unwatched,
        priority: int = CommitPriority.DATABASE,
    ) -> None:
        """``vote`` is ``yes``, ``read-only`` or ``no``; for ``priority`` see CommitPriority."""
        self.name = name
        self.priority = priority
        self.durable = durable or DurableBranches()
        self.vote = vote
        self._watch = watch
        self._active: dict[Xid, list[str]] = {}

    def start(self, xid: Xid, *, timeout_s: float) -> list[str]:  # noqa: ARG002 - no timeout
        """See Resource."""
        with _Point(self, "start"):
            return self._active.setdefault(xid, [])

    def end(self, xid: Xid, *, success: bool) -> None:  # noqa: ARG002 - a rollback follows, or a prepare
        """See Resource."""
        with _Point(self, "end"):
            if xid not in self._active:
                raise BranchRolledBack(f"{xid} is lost")

    def prepare(self, xid: Xid) -> Vote:
        """See Resource."""
        with _Point(self, "prepare"):
            if (work := self._active.pop(xid, None)) is None:
                raise BranchRolledBack(f"{xid} is lost")
            if self.vote == "no":
                raise BranchRolledBack(f"{self.name} votes no")
            if self.vote == "read-only":
                return Vote.READ_ONLY
            self.durable.prepared[xid] = work
            return Vote.YES

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """See Resource."""
        with _Point(self, "commit"):
            if xid in self.durable.heuristic:
                raise BranchHeuristic(f"{xid} was finished by hand", self.durable.heuristic[xid])
            work = self._active.pop(xid, None) if one_phase else self.durable.prepared.pop(xid, None)
            if work is None:
                raise BranchRolledBack(f"{xid} is lost") if one_phase else UnknownXid(f"no branch {xid}")
            if one_phase and self.vote == "no":
                raise BranchRolledBack(f"{self.name} refuses")
            self.durable.committed += work
            self.durable.ended[xid] = Outcome.COMMIT

    def rollback(self, xid: Xid) -> None:
        """See Resource."""
        with _Point(self, "rollback"):
            if xid in self.durable.heuristic:
                raise BranchHeuristic(f"{xid} was finished by hand", self.durable.heuristic[xid])
            if self._active.pop(xid, None) is None and self.durable.prepared.pop(xid, None) is None:
                raise UnknownXid(f"no branch {xid}")
            self.durable.ended[xid] = Outcome.ROLLBACK

    def recover(self) -> Sequence[Xid]:
        """See Resource."""
        with _Point(self, "recover"):
            return [*self.durable.prepared, *self.durable.heuristic]

    def forget(self, xid: Xid) -> None:
        """See Resource."""
        with _Point(self, "forget"):
            if self.durable.heuristic.pop(xid, None) is None:
                raise UnknownXid(f"no branch {xid}")

    def token(self, xid: Xid) -> str:
        """See TellsOutcome."""
        return str(xid)

    def outcome(self, xid: Xid, token: str) -> Outcome | None:
        """See TellsOutcome."""
        with _Point(self, "outcome"):
            return self.durable.ended.get(xid) if token == str(xid) else None

    def end_by_hand(self, xid: Xid, outcome: Outcome) -> None:
        """Finish a prepared branch by hand without a trace in the resource, as ``ROLLBACK PREPARED`` in psql does."""
        work = self.durable.prepared.pop(xid)
        if outcome is Outcome.COMMIT:
            self.durable.committed += work
        self.durable.ended[xid] = outcome

    def force(self, xid: Xid, code: Code) -> None:
        """Finish a prepared branch by hand; the resource remembers it."""
        work = self.durable.prepared.pop(xid)
        if code is Code.XA_HEURCOM:
            self.durable.committed += work
        self.durable.heuristic[xid] = code

    def crash(self) -> None:
        """Lose all branches that are not prepared."""
        self._active.clear()

    def watched(self, point: str) -> None:
        """Report a call to the watcher; a crash of the resource is not an answer for the caller."""
        try:
            self._watch(f"{self.name}.{point}")
        except ResourceFailed:
            self.crash()
            raise


class ModelLog:
    """A decision log in memory."""

    name = "log"

    def __init__(self, durable: LogState | None = None, *, watch: Watch = unwatched) -> None:
        self.durable = durable or LogState()
        self._watch = watch

    def decide(self, decision: Decision) -> Decision:
        """See DecisionLog."""
        with _Point(self, "decide"):
            self.durable.add(decision)
            return self.durable.decisions[decision.gtrid]

    def read(self) -> LogState:
        """See DecisionLog."""
        with _Point(self, "read"):
            return self.durable.copy()

    def record(self, heuristic: Heuristic) -> None:
        """See DecisionLog."""
        with _Point(self, "record"):
            self.durable.add(heuristic)

    def forget(self, gtrids: Iterable[bytes]) -> None:
        """See DecisionLog."""
        try:
            with _Point(self, "forget"):
                for gtrid in gtrids:
                    self.durable.decisions.pop(gtrid, None)
        except Unavailable:
            return

    def forget_heuristic(self, xid: Xid) -> None:
        """See DecisionLog."""
        with _Point(self, "forget_heuristic"):
            self.durable.heuristics.pop(xid, None)

    def close(self) -> None:
        """See DecisionLog."""

    def watched(self, point: str) -> None:
        """Report a call to the watcher, for ``_Point``."""
        self._watch(f"{self.name}.{point}")


class _Point:
    """The points before and after a call. A failure after the call does not undo its effect."""

    def __init__(self, model: ModelResource | ModelLog, call: str) -> None:
        self._model = model
        self._call = call

    def __enter__(self) -> None:
        self._model.watched(f"{self._call}.before")

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self._model.watched(f"{self._call}.after")
