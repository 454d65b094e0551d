"""The states of the branches that one process has begun, for resources that check the order of calls."""

from __future__ import annotations

from bascule.xa.resource import NEXT, BranchState, Call, refusal
from bascule.xa.xid import Xid


class BranchStates:
    """The states by Xid. Thread-safe: each call is one operation on a dictionary."""

    def __init__(self) -> None:
        self._states: dict[Xid, BranchState] = {}

    def check(self, xid: Xid, call: Call) -> BranchState:
        """Return the state that the call leads to. Raises DuplicateXid, OutOfOrder, UnknownXid."""
        state = self.state(xid)
        if (after := NEXT.get((state, call))) is None:
            raise refusal(state, call, xid)
        return after

    def state(self, xid: Xid) -> BranchState:
        """Return the state of a branch."""
        return self._states.get(xid, BranchState.NONE)

    def move(self, xid: Xid, state: BranchState) -> None:
        """Set the state of a branch."""
        if state is BranchState.NONE:
            self._states.pop(xid, None)
        else:
            self._states[xid] = state
