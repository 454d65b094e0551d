"""The contract of a resource: the calls, their order, and what each answer promises. In prose: docs/reference/xa.md.

A resource is a whole resource manager (a database, a Kafka cluster, a broker), and takes calls for many branches from many threads.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import Final, NoReturn, Protocol, TypeVar, runtime_checkable

from bascule.core.states import Transitions
from bascule.xa.errors import BranchRolledBack, Code, DuplicateXid, OutOfOrder, UnknownXid, XaError
from bascule.xa.log import Decision, Outcome
from bascule.xa.xid import Xid

Handle_co = TypeVar("Handle_co", covariant=True)


class Vote(enum.Enum):
    """The answer to ``prepare``."""

    #: XA_OK: the branch will commit whenever it is told to, also after a crash, by any later process.
    YES = "yes"
    #: XA_RDONLY: there was nothing to commit; the branch is gone.
    READ_ONLY = "read-only"


class CommitPriority(enum.IntEnum):
    """The order in which branches are told to commit: the smallest number first, equal numbers in the order of enlisting.

    A reader of a message must find the row that the message refers to: databases commit first, then Kafka, then the broker. A resource
    without ``priority`` commits with the databases.
    """

    DATABASE = 100
    KAFKA = 200
    JMS = 300
    #: The receipt of a record that began the transaction: when it commits, the next record of its partition may be delivered.
    RECEIPT = 400


def priority_of(resource: object) -> int:
    """Return the ``priority`` of a resource, or the default."""
    return int(getattr(resource, "priority", CommitPriority.DATABASE))


class Resource(Protocol[Handle_co]):
    """A participant in transactions. Each call may raise ResourceFailed: its effect is then unknown, and it may be repeated.

    Any process may call ``commit``, ``rollback`` and ``forget`` of a prepared branch, repeatedly and concurrently: one call has the effect,
    the others return or raise UnknownXid.
    """

    @property
    def name(self) -> str:
        """The branch qualifier of its branches: unique in a manager, and the same after every restart."""

    def start(self, xid: Xid, *, timeout_s: float) -> Handle_co:
        """Begin a branch and return its handle. After ``timeout_s`` seconds the resource may roll the branch back.

        Raises DuplicateXid, XaError. If the call raises, no branch has begun, and the manager rolls nothing back.
        """

    def end(self, xid: Xid, *, success: bool) -> None:
        """End the work of the branch. After ``success=False`` the branch can only be rolled back.

        Raises BranchRolledBack if the branch can only be rolled back, for example because a call of the application is still within the
        branch (XA_RBPROTO).
        """

    def prepare(self, xid: Xid) -> Vote:
        """Prepare the branch and return the vote. Raises BranchRolledBack to vote no; the branch no longer exists after that."""

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """Commit a prepared branch, or with ``one_phase`` a branch that was ended and not prepared.

        Raises BranchRolledBack (one-phase only), BranchHeuristic, RetryLater, UnknownXid.
        """

    def rollback(self, xid: Xid) -> None:
        """Roll the branch back in any state. Raises BranchHeuristic, RetryLater, UnknownXid."""

    def recover(self) -> Sequence[Xid]:
        """Return the branches of all managers that are prepared, or finished heuristically and not forgotten."""

    def forget(self, xid: Xid) -> None:
        """Forget the heuristic outcome of a branch. Raises UnknownXid."""


@runtime_checkable
class TellsOutcome(Protocol):
    """A resource that can tell how a branch has ended, after any crash, even if it no longer lists the branch.

    The decision log keeps the token of each prepared branch. Recovery uses it when the resource answers UnknownXid to a commit: the branch
    was committed before, or somebody has rolled it back. If the resource no longer knows, the outcome is a heuristic hazard. Without a
    token, a branch that the resource does not know counts as committed.
    """

    def token(self, xid: Xid) -> str:
        """Return the token that identifies a prepared branch of this process for ``outcome``, or ""."""

    def outcome(self, xid: Xid, token: str) -> Outcome | None:
        """Return how the branch has ended, or None if the resource does not know. Raises RetryLater, ResourceFailed."""


@runtime_checkable
class Decides(Protocol):
    """A database that has its own table of decisions, for transactions in which its branch cannot be prepared.

    When the branches of all others are prepared, its commit is the decision: it writes the decision in the same local transaction as the
    work. At most one resource of a transaction can do this.
    """

    @property
    def decides(self) -> bool | None:
        """Whether branches cannot be prepared; None while that is unknown. It is known once a branch has started."""

    def commit_deciding(self, xid: Xid, decision: Decision) -> None:
        """Commit a branch that was ended and not prepared, together with the decision.

        Raises BranchRolledBack, also if another decision was stored before; ResourceError if it is rolled back; ResourceFailed if it is in
        doubt.
        """

    def decide(self, decision: Decision) -> Decision:
        """Store a decision without a branch, and return the one that counts: the first that was stored. Raises XaError."""

    def decisions(self, manager: str) -> Sequence[Decision]:
        """Return the decisions of a manager's transactions. Raises XaError."""

    def forget_decisions(self, gtrids: Iterable[bytes]) -> None:
        """Delete decisions that nobody needs any more, at some time. Never raises."""


@runtime_checkable
class DeletesLater(Protocol):
    """A resource that deletes forgotten decisions some time after ``forget_decisions``."""

    def delete_forgotten(self) -> None:
        """Delete them now: the manager closes, and its process may end. Never raises."""


@runtime_checkable
class Checks(Protocol):
    """A resource that checks, when its manager opens, whether it can take part in transactions over several resources."""

    def check(self) -> None:
        """Raise Unavailable or InvalidInput, with the remedy, if it cannot, or XaError if that is unknown now."""


class BranchState(enum.Enum):
    """The state of a branch (XA specification, section 7.3)."""

    NONE = "no branch"
    ACTIVE = "active"
    IDLE = "ended"
    FAILED = "ended, marked for rollback"
    PREPARED = "prepared"
    HEURISTIC = "finished heuristically"


class Call(enum.Enum):
    """A call whose order is checked."""

    START = "start"
    END = "end"
    END_FAILED = "end with success=False"
    PREPARE = "prepare"
    COMMIT = "commit"
    COMMIT_ONE_PHASE = "commit in one phase"
    ROLLBACK = "rollback"
    FORGET = "forget"


#: The legal orders: (state, call) -> the state after success. ``refusal`` has the errors of all others.
NEXT: Final = Transitions[BranchState, Call](
    "branch",
    {
        (BranchState.NONE, Call.START): BranchState.ACTIVE,
        (BranchState.ACTIVE, Call.END): BranchState.IDLE,
        (BranchState.ACTIVE, Call.END_FAILED): BranchState.FAILED,
        (BranchState.ACTIVE, Call.ROLLBACK): BranchState.NONE,
        (BranchState.IDLE, Call.PREPARE): BranchState.PREPARED,
        (BranchState.IDLE, Call.COMMIT_ONE_PHASE): BranchState.NONE,
        (BranchState.IDLE, Call.ROLLBACK): BranchState.NONE,
        (BranchState.FAILED, Call.ROLLBACK): BranchState.NONE,
        (BranchState.PREPARED, Call.COMMIT): BranchState.NONE,
        (BranchState.PREPARED, Call.ROLLBACK): BranchState.NONE,
        (BranchState.HEURISTIC, Call.FORGET): BranchState.NONE,
    },
)


def beside_a_call(xid: Xid) -> BranchRolledBack:
    """Return the error of ``end`` for a branch while another thread or task is still within a call.

    The work of that call might or might not be part of the branch. The code XA_RBPROTO marks the branch for rollback (XA specification,
    chapter 5, xa_end).
    """
    text = f"the application is still using branch {xid}; end or cancel its call before the transaction ends"
    return BranchRolledBack(text, Code.XA_RBPROTO)


def refuse_ending(name: str, *_arguments: object, **_options: object) -> NoReturn:
    """Raise OutOfOrder for a method that would end the database transaction of a branch."""
    raise OutOfOrder(f"cannot call {name} within a transaction: it would end the transaction, which only the transaction manager does")


def refusal(state: BranchState, call: Call, xid: Xid) -> XaError:
    """Return the error for a call that is not legal in a state."""
    if state is BranchState.NONE:
        return UnknownXid(f"{call.value}: branch {xid} does not exist")
    if call is Call.START:
        return DuplicateXid(f"start: branch {xid} is {state.value}")
    return OutOfOrder(f"{call.value}: branch {xid} is {state.value}")
