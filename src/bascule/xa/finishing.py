"""The second phase of one branch, without IO: the transaction and the recovery tell a branch its outcome in the same way."""

from __future__ import annotations

import enum
from collections.abc import Collection

from bascule.core.log import get_log
from bascule.xa.effects import Clock, Decisions, Participant
from bascule.xa.errors import BranchHeuristic, BranchRolledBack, Code, UnknownXid
from bascule.xa.log import Heuristic, Outcome
from bascule.xa.xid import Xid

_log = get_log("bascule.xa")

_CONTRARY = {Outcome.COMMIT: Code.XA_HEURCOM, Outcome.ROLLBACK: Code.XA_HEURRB}


class FinishingViolation(enum.StrEnum):
    """Rules of the second phase that a test breaks."""

    #: A branch that ended against the decision is neither recorded nor reported.
    HEURISTIC_DROPPED = "finishing-heuristic-dropped"
    #: A branch that the resource no longer knows counts as ended as decided, although the resource can tell its outcome.
    UNKNOWN_IS_DONE = "finishing-unknown-is-done"
    #: A branch whose resource answers XA_RB* to the commit counts as committed.
    ROLLED_BACK_IS_DONE = "finishing-rolled-back-is-done"


async def finish(
    participant: Participant,
    xid: Xid,
    outcome: Outcome,
    log: Decisions,
    clock: Clock,
    *,
    token: str = "",
    presumed: bool = False,
    violations: Collection[enum.StrEnum] = frozenset(),
) -> Heuristic | None:
    """Tell a branch its outcome. Return and record the heuristic outcome of a branch that has ended without its manager.

    ``presumed``: ROLLBACK counts only because recovery has found no decision. A branch that has been committed and is no longer listed then
    ended with a COMMIT that was stored, carried out and forgotten after the branch was listed.

    A branch that the resource does not know has been told before, unless the resource says otherwise, for which it needs ``token``. If the
    resource has forgotten the outcome of a branch with a token, a COMMIT is a heuristic hazard. Raises XaError, and Unavailable if the log
    does not answer; the branch then has to be told again.
    """
    try:
        if outcome is Outcome.COMMIT:
            await participant.commit(xid)
        else:
            await participant.rollback(xid)
    except UnknownXid:
        if not token or FinishingViolation.UNKNOWN_IS_DONE in violations:
            return None
        found = await participant.outcome(xid, token)
        if found is outcome or (found is None and outcome is Outcome.ROLLBACK):
            return None
        code, text = (
            (Code.XA_HEURHAZ, f"the outcome of branch {xid} is unknown: {participant.name} no longer knows its transaction")
            if found is None
            else (_CONTRARY[found], f"branch {xid} was finished heuristically, by {found}")
        )
        heuristic = Heuristic(xid, code, outcome, text, clock.now_ms())
    except BranchRolledBack as error:
        if outcome is Outcome.ROLLBACK or FinishingViolation.ROLLED_BACK_IS_DONE in violations:
            return None
        heuristic = Heuristic(xid, Code.XA_HEURRB, outcome, str(error), clock.now_ms())
    except BranchHeuristic as error:
        if presumed and error.xa_code is Code.XA_HEURCOM and xid not in await participant.recover():
            return None
        heuristic = Heuristic(xid, error.xa_code, outcome, str(error), clock.now_ms())
    else:
        return None
    if FinishingViolation.HEURISTIC_DROPPED in violations:
        return None
    _log.error("branch outcome contradicts the decision", xid=xid, decision=outcome, reason=heuristic.text)
    await log.record(heuristic)
    return heuristic


def split(heuristic: Heuristic) -> bool:
    """Return True if a heuristic outcome differs, or may differ, from the decision."""
    return heuristic.code is not _CONTRARY[heuristic.wanted]
