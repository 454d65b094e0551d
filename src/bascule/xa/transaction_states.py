"""The states of a transaction, their events, and the phases of its end."""

from __future__ import annotations

import enum
from typing import Final

from bascule.core.states import Transitions


class TransactionStatus(enum.Enum):
    """The state of a transaction, as in Jakarta Transactions."""

    ACTIVE = "active"
    MARKED_ROLLBACK = "marked for rollback"
    PREPARING = "preparing"
    PREPARED = "prepared"
    COMMITTING = "committing"
    ROLLING_BACK = "rolling back"
    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    IN_DOUBT = "in doubt"


class TransactionEvent(enum.Enum):
    """An event that changes the state of a transaction."""

    MARK = "marked for rollback"
    COMMIT = "commit is called"
    ROLLBACK = "rollback is called"
    REFUSED = "a branch does not prepare, or the timeout has expired"
    NOTHING_LEFT = "no branch is prepared: read-only, or committed in one phase"
    ALL_PREPARED = "all branches are prepared"
    COMMIT_STANDS = "the log answers COMMIT"
    ROLLBACK_STANDS = "the log answers ROLLBACK"
    UNANSWERED = "the log, or a commit in one phase, does not answer"
    TOLD = "each branch has the outcome, or is left to recovery"


class TransactionPhase(enum.StrEnum):
    """A timed phase at the end of a transaction."""

    #: Or the commit, if one resource commits in one phase.
    PREPARE = "prepare"
    DECIDE = "decide"
    COMMIT = "commit"
    ROLLBACK = "rollback"


#: The states of a transaction. Other events are refused.
TRANSITIONS: Final = Transitions(
    "XA transaction",
    {
        (TransactionStatus.ACTIVE, TransactionEvent.MARK): TransactionStatus.MARKED_ROLLBACK,
        (TransactionStatus.MARKED_ROLLBACK, TransactionEvent.MARK): TransactionStatus.MARKED_ROLLBACK,
        (TransactionStatus.ACTIVE, TransactionEvent.COMMIT): TransactionStatus.PREPARING,
        (TransactionStatus.MARKED_ROLLBACK, TransactionEvent.COMMIT): TransactionStatus.ROLLING_BACK,
        (TransactionStatus.ACTIVE, TransactionEvent.ROLLBACK): TransactionStatus.ROLLING_BACK,
        (TransactionStatus.MARKED_ROLLBACK, TransactionEvent.ROLLBACK): TransactionStatus.ROLLING_BACK,
        (TransactionStatus.PREPARING, TransactionEvent.REFUSED): TransactionStatus.ROLLING_BACK,
        (TransactionStatus.PREPARING, TransactionEvent.NOTHING_LEFT): TransactionStatus.COMMITTED,
        (TransactionStatus.PREPARING, TransactionEvent.UNANSWERED): TransactionStatus.IN_DOUBT,
        (TransactionStatus.PREPARING, TransactionEvent.ALL_PREPARED): TransactionStatus.PREPARED,
        (TransactionStatus.PREPARED, TransactionEvent.COMMIT_STANDS): TransactionStatus.COMMITTING,
        (TransactionStatus.PREPARED, TransactionEvent.ROLLBACK_STANDS): TransactionStatus.ROLLING_BACK,
        (TransactionStatus.PREPARED, TransactionEvent.UNANSWERED): TransactionStatus.IN_DOUBT,
        (TransactionStatus.COMMITTING, TransactionEvent.TOLD): TransactionStatus.COMMITTED,
        (TransactionStatus.ROLLING_BACK, TransactionEvent.TOLD): TransactionStatus.ROLLED_BACK,
    },
)
#: The final states.
ENDED = frozenset({TransactionStatus.COMMITTED, TransactionStatus.ROLLED_BACK, TransactionStatus.IN_DOUBT})
#: The event of an end that is interrupted in a state: a stored outcome counts, anything else is in doubt and left to recovery.
BEGUN: Final = {
    TransactionStatus.PREPARING: TransactionEvent.UNANSWERED,
    TransactionStatus.PREPARED: TransactionEvent.UNANSWERED,
    TransactionStatus.COMMITTING: TransactionEvent.TOLD,
    TransactionStatus.ROLLING_BACK: TransactionEvent.TOLD,
}
