"""What becomes of branches that a crash has left: a plan made of what resources and log say, and its execution.

The plan is a pure function, so that ``bascule xa recover --explain`` shows what would be done and why.
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from bascule.core import crash
from bascule.core.errors import BasculeError
from bascule.threads.background import in_background
from bascule.xa.errors import BranchHeuristic, Code, ResourceFailed, UnknownXid
from bascule.xa.log import ROLLBACK_KEPT_S, Decision, DecisionLog, Heuristic, LogState, Outcome
from bascule.xa.resource import Resource
from bascule.xa.xid import Xid, deadline_ms_of, manager_of

T = TypeVar("T")

_log = logging.getLogger("bascule.xa")
_log.addHandler(logging.NullHandler())


class Action(enum.StrEnum):
    """What recovery does with a branch, or with a decision."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    WAIT = "wait"
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing to do. ``xid`` has no bqual where the step is about a decision; ``why`` is a sentence for the operator."""

    action: Action
    resource: str
    xid: Xid
    why: str


@dataclass(slots=True)
class Pass:
    """What one pass of recovery has found and done."""

    steps: list[Step] = field(default_factory=list)
    #: Resources that did not answer, and what they said instead.
    unreachable: dict[str, str] = field(default_factory=dict)
    #: Steps that failed, to be tried again.
    failed: dict[Step, str] = field(default_factory=dict)
    heuristics: list[Heuristic] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the next pass would find nothing: decisions are forgotten by the pass after the one that carried them out."""
        return not self.unreachable and not self.failed and all(step.action is Action.FORGET for step in self.steps)


@dataclass(frozen=True, slots=True)
class View:
    """What is known when a plan is made. ``before`` is the log before the resources were asked, ``after`` the log after that."""

    branches: Mapping[str, Sequence[Xid]]
    before: LogState
    after: LogState
    live: Collection[bytes]
    now_ms: int


def plan(manager: str, view: View, *, patient: bool) -> list[Step]:
    """What is to be done with the manager's own branches and decisions.

    ``patient`` leaves a transaction without a decision alone until its deadline: the process that began it may still be at work.
    """
    steps = [_step(resource, xid, view, patient) for resource, xids in view.branches.items() for xid in xids if manager_of(xid) == manager]
    decided = (decision for decision in view.before.decisions.values() if decision.gtrid not in view.live)
    return [*filter(None, steps), *filter(None, (_done(decision, view) for decision in decided))]


def _step(resource: str, xid: Xid, view: View, patient: bool) -> Step | None:
    if xid.gtrid in view.live or xid.bqual.decode() != resource:
        return None
    if xid in view.after.heuristics:
        return Step(Action.WAIT, resource, xid, "it was finished from outside; the operator has to look at it and forget it")
    if (decision := view.after.decisions.get(xid.gtrid)) is not None:
        return Step(Action(decision.outcome), resource, xid, f"the log says {decision.outcome}, by {decision.by}")
    left_s = (deadline_ms_of(xid.gtrid) - view.now_ms) / 1000
    if patient and left_s > 0:
        return Step(Action.WAIT, resource, xid, f"nothing is decided, and its process has {left_s:.0f} s left for it")
    return Step(Action.ROLLBACK, resource, xid, "the log has no decision, so it was not committed (presumed abort)")


def _done(decision: Decision, view: View) -> Step | None:
    """Whether a decision is needed no more. A commit was stored after its branches were prepared, so one that is not listed is done."""
    xid = Xid(0, decision.gtrid, b"")
    if decision.outcome is Outcome.ROLLBACK:
        old = view.now_ms - decision.at_ms > ROLLBACK_KEPT_S * 1000
        return Step(Action.FORGET, "", xid, "rolled back long ago") if old else None
    if not decision.resources:
        return None  # then any resource may still have a branch of it
    for resource in decision.resources:
        if resource not in view.branches or any(each.gtrid == decision.gtrid for each in view.branches[resource]):
            return None
    return Step(Action.FORGET, "", xid, f"committed in {', '.join(decision.resources)}")


class Recoverer:
    """Carries plans out. Any number of them may be at work on the same branches."""

    def __init__(
        self,
        manager: str,
        log: DecisionLog,
        resources: Collection[Resource[object]],
        *,
        by: str,
        patient: bool,
        answer_within_s: float | None = None,
    ) -> None:
        """``by`` stands in the decisions it makes; for ``patient`` see ``plan``.

        ``answer_within_s``: a resource that lists its branches, or finishes one, later than that counts as away, and is asked nothing
        more before it has answered. None waits for each.
        """
        self._manager = manager
        self._log = log
        self._resources = {resource.name: resource for resource in resources}
        self._by = by
        self._patient = patient
        self._answer_within_s = answer_within_s
        self._asked: dict[str, Future[Any]] = {}

    def look(self, live: Callable[[], Collection[bytes]] = tuple, *, patient: bool | None = None) -> Pass:
        """What would be done now. ``live`` gives what this process is at work on itself. Raises Unavailable without the log."""
        found = Pass()
        at_work = set(live())
        before = self._log.read()
        branches: dict[str, Sequence[Xid]] = {}
        for name, resource in self._resources.items():
            try:
                branches[name] = self._ask(name, resource.recover)
            except Exception as error:  # one resource's, whatever it is, keeps no branch of another from being finished
                found.unreachable[name] = said_of(error)
        at_work.update(live())  # one that began since may be among the branches
        view = View(branches, before, self._log.read(), at_work, now_ms())
        found.steps = plan(self._manager, view, patient=self._patient if patient is None else patient)
        found.heuristics = list(view.after.heuristics.values())
        return found

    def run(self, live: Callable[[], Collection[bytes]] = tuple, *, patient: bool | None = None) -> Pass:
        """One pass. Raises Unavailable without the log; a resource that does not answer is in the result."""
        done = self.look(live, patient=patient)
        crash.point("xa.recover.before")
        for step in done.steps:
            try:
                self._take(step)
                crash.point("xa.recover.step")
            except Exception as error:
                done.failed[step] = said_of(error)
                _log.warning("recovery: %s %s: %s", step.action, step.xid, said_of(error))
        return done

    def _ask(self, resource: str, question: Callable[[], T]) -> T:
        """Its answer. One that comes late is not used: the log was read too long before, and what it has done is seen by the next pass."""
        if self._answer_within_s is None:
            return question()
        if (last := self._asked.get(resource)) is not None and not last.done():
            raise ResourceFailed("no answer yet to the last question")
        answer = in_background(question, "bascule-xa-ask")
        self._asked[resource] = answer
        if not wait([answer], self._answer_within_s).done:
            raise ResourceFailed(f"no answer within {self._answer_within_s:g} s")
        return answer.result()

    def _take(self, step: Step) -> None:
        if step.action is Action.FORGET:
            self._log.forget([step.xid.gtrid])
        elif step.action is not Action.WAIT:
            outcome = Outcome(step.action)
            if outcome is Outcome.ROLLBACK:
                outcome = self._log.decide(Decision(step.xid.gtrid, outcome, (), now_ms(), self._by)).outcome
                crash.point("xa.recover.decided")
            _log.info("recovery: %s %s in %s: %s", outcome, step.xid, step.resource, step.why)
            self._ask(step.resource, partial(finish, self._resources[step.resource], step.xid, outcome, self._log))

    def finish_now(self, xid: Xid, outcome: Outcome, *, who: str = "operator", only: str = "") -> Outcome:
        """Somebody's word on a transaction's branches in all resources; what stands in the log already goes before it.

        With ``only`` the branch in one resource is finished now, and recovery finishes the rest. Returns what was done.
        Raises XaError when a branch cannot be finished; recovery goes on with it.
        """
        # All of them: nobody knows which are prepared, and a commit that is forgotten too early is rolled back in the rest.
        stands = self._log.decide(Decision(xid.gtrid, outcome, tuple(self._resources), now_ms(), f"{who}, {self._by}")).outcome
        for resource in [self._resources[only]] if only else self._resources.values():
            for each in resource.recover():
                if each.gtrid == xid.gtrid:
                    finish(resource, each, stands, self._log)
        return stands

    def forget(self, xid: Xid) -> None:
        """The operator has seen to a heuristic outcome. Raises UnknownXid where none is recorded."""
        if xid not in self._log.read().heuristics:
            raise UnknownXid(f"no heuristic outcome is recorded for {xid}")
        if (resource := self._resources.get(xid.bqual.decode())) is not None:
            try:
                resource.forget(xid)
            except UnknownXid:
                _log.debug("%s knows nothing of %s any more", resource.name, xid)
        self._log.forget_heuristic(xid)


def finish(resource: Resource[object], xid: Xid, outcome: Outcome, log: DecisionLog) -> Heuristic | None:
    """Tells a branch the outcome; one that is gone was told before. A heuristic outcome is recorded. Raises XaError to be asked again."""
    try:
        if outcome is Outcome.COMMIT:
            resource.commit(xid)
        else:
            resource.rollback(xid)
    except UnknownXid:
        return None
    except BranchHeuristic as error:
        heuristic = Heuristic(xid, error.xa_code, outcome, str(error), now_ms())
        _log.error("%s should %s and did not: %s", xid, outcome, error)
        log.record(heuristic)
        return heuristic
    return None


def split(heuristic: Heuristic) -> bool:
    """Whether an outcome from outside differs, or may differ, from what was decided."""
    return heuristic.code is not {Outcome.COMMIT: Code.XA_HEURCOM, Outcome.ROLLBACK: Code.XA_HEURRB}[heuristic.wanted]


def said_of(error: Exception) -> str:
    """What it says; of one that is none of ours, also what it is: many a driver's says nothing."""
    return str(error) if isinstance(error, BasculeError) else f"{type(error).__name__}: {error}"


def now_ms() -> int:
    """Milliseconds since the epoch."""
    return time.time_ns() // 1_000_000
