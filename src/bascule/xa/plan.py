"""The plan of recovery for branches and decisions that a crash has left: a pure function of what resources and log report.

``bascule xa recover --explain`` shows the plan and the reason for each step.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bascule.xa.log import DECISION_KEPT_S, Decision, LogState, Outcome
from bascule.xa.xid import (
    NO_LOG,
    Xid,
    branch,
    deadline_ms_of,
    lacks_decider,
    log_id_of_gtrid,
    manager_of,
    manager_of_gtrid,
    may_be_in_database,
)

#: The reason why recovery does not touch a branch.
REMOVED_DECIDER = (
    "the decision may be in a database that the manager does not have; add the resource of that database under the name that it had"
)


class PlanViolation(enum.StrEnum):
    """Rules of the plan that a test breaks."""

    #: Recovery finishes, and deletes, decisions of other managers that share the log.
    FOREIGN_DECISIONS_FORGOTTEN = "plan-foreign-decisions-forgotten"
    #: A branch that its resource does not list counts as committed.
    NOT_LISTED_IS_COMMITTED = "plan-not-listed-is-committed"
    #: A decision is deleted although one of its resources did not answer.
    UNREACHABLE_IS_COMMITTED = "plan-unreachable-is-committed"
    #: Transactions that this process is working on count as left behind.
    AT_WORK_IGNORED = "plan-at-work-ignored"
    #: A recoverer that has to wait for the deadline of a transaction does not wait.
    DEADLINE_IGNORED = "plan-deadline-ignored"
    #: Prepared branches of other managers are rolled back.
    FOREIGN_BRANCHES_ROLLED_BACK = "plan-foreign-branches-rolled-back"
    #: A ROLLBACK is deleted at once, before a slow application asks for COMMIT.
    ROLLBACK_FORGOTTEN_EARLY = "plan-rollback-forgotten-early"
    #: Branches and decisions of a manager of the same name that has another decision log count as the manager's own.
    OTHER_LOG_IGNORED = "plan-other-log-ignored"
    #: A listed branch counts as committed, although the second look has not found its decision.
    WAITING_IS_COMMITTED = "plan-waiting-is-committed"
    #: The answers of the databases that the manager has count, although another one that it had may have decided.
    REMOVED_DECIDER_IGNORED = "plan-removed-decider-ignored"


class Action(enum.StrEnum):
    """What recovery does with a branch or with a decision."""

    COMMIT = "commit"
    ROLLBACK = "rollback"
    #: The resource does not list the branch of a committed transaction. It is told to commit once more, and answers how the branch ended.
    CONFIRM = "confirm"
    WAIT = "wait"
    #: The branch has the manager's name, and another decision log has its decision. It is reported and not changed.
    FOREIGN = "foreign"
    #: Delete a decision: a COMMIT only if all steps of its transaction have succeeded.
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan.

    ``xid`` has no bqual if the step is about a decision; ``why`` is a sentence for the operator; for ``token`` see Decision.
    """

    action: Action
    resource: str
    xid: Xid
    why: str
    token: str = ""


@dataclass(frozen=True, slots=True)
class RecoveryView:
    """The input of a plan. ``before`` is the log before the resources were asked, ``after`` the log afterwards."""

    branches: Mapping[str, Sequence[Xid]]
    before: LogState
    after: LogState
    live: Collection[bytes]
    now_ms: int
    #: How long, in seconds of a monotonic clock, this process has known each decision that is kept for a time.
    known_s: Mapping[bytes, float] = field(default_factory=dict)
    #: Ids of decision logs that are permanently lost: the decisions of their transactions are in this log, or nowhere.
    lost_logs: Collection[str] = ()
    #: Transactions whose decision is in a database and not in the log.
    in_database: Collection[bytes] = ()
    #: Databases that may have decisions and do not answer.
    silent: Collection[str] = ()
    #: Of those in a database, the COMMITs that this process has carried out for another process, which may still ask about them.
    carried_out: Collection[bytes] = ()
    #: Databases of the manager that can decide.
    deciders: Collection[str] = ()
    #: ROLLBACKs that some of these databases have, and not all: a recoverer died while it asked them, or another one had decided COMMIT.
    partial: Mapping[bytes, Decision] = field(default_factory=dict)


def own_log(gtrid: bytes, log_id: str, lost_logs: Collection[str] = ()) -> bool:
    """Return True if a log has the decision of a transaction of its manager. Gtrids of earlier releases do not name the log."""
    named = log_id_of_gtrid(gtrid)
    return named in ("", log_id or NO_LOG) or named in lost_logs


def removed_decider(gtrid: bytes, deciders: Collection[str], violations: Collection[enum.StrEnum]) -> bool:
    """Return True if a database that is not among ``deciders`` may have the decision of a transaction: see ``lacks_decider``."""
    return lacks_decider(gtrid, deciders) and PlanViolation.REMOVED_DECIDER_IGNORED not in violations


def plan(manager: str, view: RecoveryView, *, patient: bool, violations: Collection[enum.StrEnum] = frozenset()) -> list[Step]:
    """Return the steps for the manager's own branches and decisions. Nothing with another manager's name is changed.

    ``patient`` leaves a transaction without a decision alone until its deadline: the process that began it may still work on it.
    """
    return list(_Planner(manager, view, patient, violations).steps())


def missing_resources(manager: str, view: RecoveryView, known: Collection[str]) -> dict[str, int]:
    """Return the resources that the manager does not have and that its transactions wait for, with the number of transactions.

    Decisions name a resource that was removed. Branches that the database or cluster still lists name a resource that was renamed.
    """
    waiting: dict[str, set[bytes]] = {}
    for decision in view.before.decisions.values():
        if decision.outcome is Outcome.COMMIT and manager_of_gtrid(decision.gtrid) == manager:
            for name in decision.resources:
                waiting.setdefault(name, set()).add(decision.gtrid)
    for xid in (xid for xids in view.branches.values() for xid in xids):
        if manager_of(xid) == manager and own_log(xid.gtrid, view.after.log_id, view.lost_logs):
            waiting.setdefault(xid.bqual.decode("latin-1"), set()).add(xid.gtrid)
    return {name: len(gtrids) for name, gtrids in sorted(waiting.items()) if name not in known}


def split_risks(gtrid: bytes, view: RecoveryView, unreachable: Collection[str]) -> list[str]:
    """Return the reasons why a COMMIT by hand could commit a part of a transaction that has no decision; none if all is prepared.

    A resource that lists no branch may have taken no part, or may have lost its work: the id of a transaction does not say which.
    """
    left_s = (deadline_ms_of(gtrid) - view.now_ms) / 1000
    absent = [name for name, xids in view.branches.items() if not any(xid.gtrid == gtrid for xid in xids)]
    risks = [f"its process may still be working on it for {left_s:.0f} s"] if left_s > 0 else []
    risks += [f"no prepared branch in {', '.join(absent)}"] if absent else []
    return risks + ([f"no answer from {', '.join(unreachable)}"] if unreachable else [])


@dataclass(frozen=True, slots=True)
class _Planner:
    manager: str
    view: RecoveryView
    patient: bool
    violations: Collection[enum.StrEnum]

    def steps(self) -> Iterator[Step]:
        for resource, xids in self.view.branches.items():
            for xid in xids:
                if self._own_branch(resource, xid) and (step := self._of_branch(resource, xid)) is not None:
                    yield step
        for decision in {**self.view.partial, **self.view.before.decisions}.values():
            if self._own_decision(decision) and not self._at_work(decision.gtrid):
                yield from self._of_decision(decision)

    def _own_branch(self, resource: str, xid: Xid) -> bool:
        if xid.bqual.decode("latin-1") != resource:
            return False
        maker = manager_of(xid)
        return maker == self.manager or (maker is not None and PlanViolation.FOREIGN_BRANCHES_ROLLED_BACK in self.violations)

    def _own_decision(self, decision: Decision) -> bool:
        own = manager_of_gtrid(decision.gtrid) == self.manager and self._own_log(decision.gtrid)
        return own or PlanViolation.FOREIGN_DECISIONS_FORGOTTEN in self.violations

    def _own_log(self, gtrid: bytes) -> bool:
        own = own_log(gtrid, self.view.after.log_id, self.view.lost_logs)
        return own or PlanViolation.OTHER_LOG_IGNORED in self.violations

    def _at_work(self, gtrid: bytes) -> bool:
        return gtrid in self.view.live and PlanViolation.AT_WORK_IGNORED not in self.violations

    def _of_branch(self, resource: str, xid: Xid) -> Step | None:
        if self._at_work(xid.gtrid):
            return None
        if not self._own_log(xid.gtrid):
            other, own = log_id_of_gtrid(xid.gtrid), self.view.after.log_id or "a log without an id"
            why = f"a manager of this name began the branch with decision log {other}; this manager uses {own}"
            return Step(Action.FOREIGN, resource, xid, why)
        if xid in self.view.after.heuristics:
            return Step(
                Action.WAIT, resource, xid, "the branch was finished heuristically; an operator must check the data, then forget the branch"
            )
        if (decision := self.view.after.decisions.get(xid.gtrid)) is not None:
            return Step(
                Action(decision.outcome), resource, xid, f"the log says {decision.outcome}, by {decision.by}", decision.token(resource)
            )
        left_s = (deadline_ms_of(xid.gtrid) - self.view.now_ms) / 1000
        in_time = self.patient and left_s > 0 and PlanViolation.DEADLINE_IGNORED not in self.violations
        # An answer of the others proves nothing. Before its deadline, a process that has another set of databases may still work on it.
        if not in_time and removed_decider(xid.gtrid, self.view.deciders, self.violations):
            return Step(Action.WAIT, resource, xid, REMOVED_DECIDER)
        if self.view.silent and may_be_in_database(xid.gtrid):
            return Step(Action.WAIT, resource, xid, f"the decision may be in {', '.join(self.view.silent)}, which does not answer")
        if in_time:
            return Step(Action.WAIT, resource, xid, f"no decision yet; the process of the transaction has {left_s:.0f} s left to decide")
        return Step(Action.ROLLBACK, resource, xid, "the log has no decision, so the transaction was not committed (presumed abort)")

    def _of_decision(self, decision: Decision) -> Iterator[Step]:
        """Yield the steps for a decision.

        It is needed until each of its resources has confirmed the end of its branch; being unlisted proves nothing.
        """
        whole = Xid(0, decision.gtrid, b"")
        if decision.outcome is Outcome.ROLLBACK or decision.gtrid in self.view.carried_out:
            # Not by the time in the entry: the clock of its writer may differ.
            early = PlanViolation.ROLLBACK_FORGOTTEN_EARLY in self.violations
            if early or self.view.known_s.get(decision.gtrid, 0.0) > DECISION_KEPT_S:
                yield Step(
                    Action.FORGET, "", whole, f"the {decision.outcome} decision has been kept for {DECISION_KEPT_S / 3600:.0f} hours"
                )
            return
        if not decision.resources:
            return  # any resource may still have a branch of it
        needed = False
        for resource in decision.resources:
            xid = branch(decision.gtrid, resource)
            if resource not in self.view.branches:
                needed = needed or PlanViolation.UNREACHABLE_IS_COMMITTED not in self.violations
            elif xid in self.view.branches[resource]:  # not just one of its transaction: two resources may be one database
                needed = needed or not self._is_committed(resource, xid)
            elif xid not in self.view.after.heuristics and PlanViolation.NOT_LISTED_IS_COMMITTED not in self.violations:
                why = f"the log says commit, by {decision.by}; {resource} does not list the branch and must confirm the commit"
                yield Step(Action.CONFIRM, resource, xid, why, decision.token(resource))
        if not needed:
            yield Step(Action.FORGET, "", whole, f"committed in {', '.join(decision.resources)}")

    def _is_committed(self, resource: str, xid: Xid) -> bool:
        """Whether this plan commits a listed branch. It waits if the database with the decision has not answered the second look."""
        if PlanViolation.WAITING_IS_COMMITTED in self.violations:
            return xid not in self.view.after.heuristics
        step = self._of_branch(resource, xid)
        return step is not None and step.action is Action.COMMIT
