"""What is known of one transaction, for an application that was told "in doubt" and for an operator."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from bascule.xa.log import Decision, Heuristic, Outcome
from bascule.xa.plan import Action, RecoveryView, Step


class Finding(enum.StrEnum):
    """What became of a transaction, as far as log and resources say."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    #: A process is at work on it, or may be until its deadline.
    AT_WORK = "at work"
    #: Branches are prepared and nothing is decided: recovery will roll them back, unless their process commits first.
    UNDECIDED = "undecided"
    #: Neither log nor resources have anything of it, and this process does not remember it: it was rolled back, or it was committed and its
    #: decision is forgotten.
    NOTHING_LEFT = "nothing is left of it"


@dataclass(frozen=True, slots=True)
class BranchReport:
    """One branch. ``prepared`` is None if its resource does not answer; ``action`` is what recovery would do, ``why`` the reason."""

    resource: str
    prepared: bool | None
    action: Action | None
    why: str


@dataclass(frozen=True, slots=True)
class TransactionReport:
    """One transaction. ``decision`` is what the log has of it."""

    id: str
    finding: Finding
    decision: Decision | None
    branches: tuple[BranchReport, ...]
    heuristics: tuple[Heuristic, ...]


def report(gtrid: bytes, view: RecoveryView, steps: Collection[Step], unreachable: Mapping[str, str]) -> TransactionReport:
    """Return what a look at log and resources says about a transaction; ``steps`` is the plan for all transactions."""
    decision = view.after.decisions.get(gtrid)
    listed = {name: any(xid.gtrid == gtrid for xid in xids) for name, xids in view.branches.items()}
    planned = {step.resource: step for step in steps if step.xid.gtrid == gtrid and step.resource}
    concerned = set(planned) | {name for name, prepared in listed.items() if prepared} | set(decision.resources if decision else ())
    branches = tuple(_branch(name, listed, planned.get(name), unreachable) for name in sorted(concerned | set(unreachable)))
    heuristics = tuple(each for xid, each in view.after.heuristics.items() if xid.gtrid == gtrid)
    return TransactionReport(gtrid.decode("latin-1"), _finding(gtrid, decision, view, planned.values()), decision, branches, heuristics)


def _branch(name: str, listed: Mapping[str, bool], step: Step | None, unreachable: Mapping[str, str]) -> BranchReport:
    if name in unreachable:
        return BranchReport(name, None, None, f"does not answer: {unreachable[name]}")
    if name not in listed:
        return BranchReport(name, None, None, "the manager does not have this resource")
    return BranchReport(name, listed[name], None if step is None else step.action, "" if step is None else step.why)


def _finding(gtrid: bytes, decision: Decision | None, view: RecoveryView, steps: Collection[Step]) -> Finding:
    if decision is not None:
        return Finding.COMMITTED if decision.outcome is Outcome.COMMIT else Finding.ROLLED_BACK
    if gtrid in view.live or any(step.action is Action.WAIT for step in steps):
        return Finding.AT_WORK
    return Finding.UNDECIDED if steps else Finding.NOTHING_LEFT
