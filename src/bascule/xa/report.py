"""A report on one transaction, for an application whose transaction is in doubt and for an operator."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from bascule.xa.log import Decision, Heuristic, Outcome
from bascule.xa.plan import Action, RecoveryView, Step
from bascule.xa.xid import deadline_ms_of, lacks_decider, may_be_in_database


class TransactionFinding(enum.StrEnum):
    """The state of a transaction according to log and resources."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    #: A process works on the transaction, or may do so until its deadline.
    RUNNING = "running"
    #: Branches are prepared and nothing is decided: recovery will roll them back, unless their process commits first.
    UNDECIDED = "undecided"
    #: The deadline has passed, neither the log nor a resource knows the transaction, and this process does not remember it: it was
    #: rolled back, or it was committed and its decision is forgotten.
    NOT_FOUND = "not found"
    #: Neither log nor resources that answer have anything of the transaction; a silent one may have the decision, or a branch.
    NOT_KNOWN = "not known"


@dataclass(frozen=True, slots=True)
class BranchReport:
    """One branch. ``prepared`` is None if its resource does not answer; ``action`` is what recovery would do, ``why`` the reason."""

    resource: str
    prepared: bool | None
    action: Action | None
    why: str


@dataclass(frozen=True, slots=True)
class TransactionReport:
    """One transaction. ``decision`` is the log's decision, ``heuristics`` are its branches that were finished from outside."""

    id: str
    finding: TransactionFinding
    decision: Decision | None
    branches: tuple[BranchReport, ...]
    heuristics: tuple[Heuristic, ...]


def report(gtrid: bytes, view: RecoveryView, steps: Collection[Step], unreachable: Mapping[str, str]) -> TransactionReport:
    """Return a report on a transaction from a view of log and resources. ``steps`` is the plan for all transactions."""
    decision = view.after.decisions.get(gtrid)
    listed = {name: any(xid.gtrid == gtrid for xid in xids) for name, xids in view.branches.items()}
    planned = {step.resource: step for step in steps if step.xid.gtrid == gtrid and step.resource}
    concerned = set(planned) | {name for name, prepared in listed.items() if prepared} | set(decision.resources if decision else ())
    branches = tuple(_branch(name, listed, planned.get(name), unreachable) for name in sorted(concerned | set(unreachable)))
    heuristics = tuple(each for xid, each in view.after.heuristics.items() if xid.gtrid == gtrid)
    finding = _finding(gtrid, decision, heuristics, view, planned.values())
    if finding is TransactionFinding.NOT_FOUND and unreachable:
        finding = TransactionFinding.NOT_KNOWN
    elif finding is TransactionFinding.NOT_FOUND and view.now_ms < deadline_ms_of(gtrid):
        finding = TransactionFinding.RUNNING  # perhaps in another process, without a prepared branch
    return TransactionReport(gtrid.decode("latin-1"), finding, decision, branches, heuristics)


def _branch(name: str, listed: Mapping[str, bool], step: Step | None, unreachable: Mapping[str, str]) -> BranchReport:
    if name in unreachable:
        return BranchReport(name, None, None, f"does not answer: {unreachable[name]}")
    if name not in listed:
        return BranchReport(name, None, None, "the manager does not have this resource")
    return BranchReport(name, listed[name], None if step is None else step.action, "" if step is None else step.why)


def _finding(
    gtrid: bytes, decision: Decision | None, heuristics: Collection[Heuristic], view: RecoveryView, steps: Collection[Step]
) -> TransactionFinding:
    # A heuristic outcome is kept longer than the decision, which it repeats. The log may never have had a ROLLBACK.
    outcomes = [each.wanted for each in heuristics] if decision is None else [decision.outcome]
    if outcomes:
        return TransactionFinding.COMMITTED if outcomes[0] is Outcome.COMMIT else TransactionFinding.ROLLED_BACK
    if gtrid in view.live:
        return TransactionFinding.RUNNING
    if lacks_decider(gtrid, view.deciders) or (view.silent and may_be_in_database(gtrid)):
        return TransactionFinding.NOT_KNOWN
    if any(step.action is Action.WAIT for step in steps):
        return TransactionFinding.RUNNING
    return TransactionFinding.UNDECIDED if steps else TransactionFinding.NOT_FOUND
