"""The states of the branches that one process has begun, for resources that check the order of their callers' calls."""

from __future__ import annotations

from bascule.xa.resource import NEXT, BranchState, Call, refusal
from bascule.xa.xid import Xid


class BranchStates:
    """Safe for threads: each call is one operation on a dictionary."""

    def __init__(self) -> None:
        self._states: dict[Xid, BranchState] = {}

    def check(self, xid: Xid, call: Call) -> BranchState:
        """The state that the call leads to. Raises DuplicateXid, OutOfOrder, UnknownXid."""
        state = self.state(xid)
        if (after := NEXT.get((state, call))) is None:
            raise refusal(state, call, xid)
        return after

    def state(self, xid: Xid) -> BranchState:
        """Where the branch is."""
        return self._states.get(xid, BranchState.NONE)

    def move(self, xid: Xid, state: BranchState) -> None:
        """It is there now."""
        if state is BranchState.NONE:
            self._states.pop(xid, None)
        else:
            self._states[xid] = state
