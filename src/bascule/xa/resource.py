"""The contract of a resource: which calls, in which order, and what each answer promises. In prose: docs/reference/xa.md.

A resource is a whole resource manager (a database, a Kafka cluster, a broker), and takes calls for many branches from many threads.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Sequence
from typing import Protocol, TypeVar

from bascule.xa.errors import DuplicateXid, OutOfOrder, UnknownXid, XaError
from bascule.xa.xid import Xid

Handle_co = TypeVar("Handle_co", covariant=True)


class Vote(enum.Enum):
    """The answer to ``prepare``."""

    #: XA_OK: the branch will commit whenever it is told to, also after a crash, by any later process.
    YES = "yes"
    #: XA_RDONLY: there was nothing to commit; the branch is gone.
    READ_ONLY = "read-only"


class Resource(Protocol[Handle_co]):
    """What takes part in transactions. Each call may raise ResourceFailed; then its effect is not known, and it may be repeated.

    ``commit``, ``rollback`` and ``forget`` of a prepared branch may be called by any process, again and again and by several at once:
    one has the effect, the others return or raise UnknownXid.
    """

    @property
    def name(self) -> str:
        """The branch qualifier of its branches: unique in a manager, and the same after every restart."""

    def start(self, xid: Xid, *, timeout_s: float) -> Handle_co:
        """Begins a branch, and gives what the application works with. After ``timeout_s`` the resource may roll it back.

        Raises DuplicateXid. Whatever it raises, it has begun nothing: nobody rolls that back.
        """

    def end(self, xid: Xid, *, success: bool) -> None:
        """No more work comes for the branch. After ``success=False`` it can only be rolled back. Raises BranchRolledBack."""

    def prepare(self, xid: Xid) -> Vote:
        """Promises to commit. Raises BranchRolledBack to vote no: then the branch is gone."""

    def commit(self, xid: Xid, *, one_phase: bool = False) -> None:
        """Commits a prepared branch; with ``one_phase`` one that was ended and not prepared.

        Raises BranchRolledBack (one-phase only), BranchHeuristic, RetryLater, UnknownXid.
        """

    def rollback(self, xid: Xid) -> None:
        """Undoes the branch, whatever its state. Raises BranchHeuristic, RetryLater, UnknownXid."""

    def recover(self) -> Sequence[Xid]:
        """The branches that are prepared (or finished heuristically and not forgotten), of whichever manager they are."""

    def forget(self, xid: Xid) -> None:
        """Drops what is remembered of a heuristic outcome. Raises UnknownXid."""


class State(enum.Enum):
    """Of a branch (XA specification, section 7.3)."""

    NONE = "no branch"
    ACTIVE = "active"
    IDLE = "ended"
    FAILED = "ended, to be rolled back"
    PREPARED = "prepared"
    HEURISTIC = "finished heuristically"


class Call(enum.Enum):
    """A call, as far as its legality goes."""

    START = "start"
    END = "end"
    END_FAILED = "end with success=False"
    PREPARE = "prepare"
    COMMIT = "commit"
    COMMIT_ONE_PHASE = "commit in one phase"
    ROLLBACK = "rollback"
    FORGET = "forget"


#: The legal orders: (state, call) -> the state after success. What is not here is refused, by ``refusal``.
NEXT: dict[tuple[State, Call], State] = {
    (State.NONE, Call.START): State.ACTIVE,
    (State.ACTIVE, Call.END): State.IDLE,
    (State.ACTIVE, Call.END_FAILED): State.FAILED,
    (State.ACTIVE, Call.ROLLBACK): State.NONE,
    (State.IDLE, Call.PREPARE): State.PREPARED,
    (State.IDLE, Call.COMMIT_ONE_PHASE): State.NONE,
    (State.IDLE, Call.ROLLBACK): State.NONE,
    (State.FAILED, Call.ROLLBACK): State.NONE,
    (State.PREPARED, Call.COMMIT): State.NONE,
    (State.PREPARED, Call.ROLLBACK): State.NONE,
    (State.HEURISTIC, Call.FORGET): State.NONE,
}


def refusal(state: State, call: Call, xid: Xid) -> XaError:
    """The error for a call that is not legal in a state."""
    if state is State.NONE:
        return UnknownXid(f"{call.value}: there is no branch {xid}")
    if call is Call.START:
        return DuplicateXid(f"start: branch {xid} is {state.value}")
    return OutOfOrder(f"{call.value}: branch {xid} is {state.value}")


class Branches:
    """The states of the branches that one process has begun, for resources that check their callers. Safe for threads."""

    def __init__(self) -> None:
        self._states: dict[Xid, State] = {}
        self._lock = threading.Lock()

    def check(self, xid: Xid, call: Call) -> State:
        """The state that the call leads to. Raises DuplicateXid, OutOfOrder, UnknownXid."""
        state = self.state(xid)
        if (after := NEXT.get((state, call))) is None:
            raise refusal(state, call, xid)
        return after

    def state(self, xid: Xid) -> State:
        """Where the branch is."""
        with self._lock:
            return self._states.get(xid, State.NONE)

    def move(self, xid: Xid, state: State) -> None:
        """It is there now."""
        with self._lock:
            if state is State.NONE:
                self._states.pop(xid, None)
            else:
                self._states[xid] = state
