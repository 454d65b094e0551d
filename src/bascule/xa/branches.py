"""The states of the branches that one process has begun, for resources that check the order of their callers' calls."""

from __future__ import annotations

import threading

from bascule.xa.resource import NEXT, Call, State, refusal
from bascule.xa.xid import Xid


class Branches:
    """Safe for threads."""

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
