"""Ends transactions whose time is over: their application may never return, and they hold locks."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

from bascule.core.log import get_log

#: After the deadline, an application has this time, in seconds, to notice it in a call of its own.
GRACE_S = 1.0

_log = get_log("bascule.xa")


class Reaper:
    """Calls ``expire`` of each watched transaction after its deadline, and again every ``GRACE_S`` seconds until it is dropped."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._due_s: dict[bytes, float] = {}
        self._expire: dict[bytes, Callable[[], object]] = {}
        self._wakes_s = math.inf
        self._closed = False

    def watch(self, gtrid: bytes, deadline_s: float, expire: Callable[[], object]) -> None:
        """Call ``expire``, which must not block, after the deadline on the monotonic clock."""
        due_s = deadline_s + GRACE_S
        with self._changed:
            self._due_s[gtrid], self._expire[gtrid] = due_s, expire
            if due_s < self._wakes_s:
                self._changed.notify()

    def drop(self, gtrid: bytes) -> None:
        """Stop watching a transaction that is over."""
        with self._changed:
            self._due_s.pop(gtrid, None)
            self._expire.pop(gtrid, None)

    def close(self) -> None:
        """End ``run``."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def run(self) -> None:
        """Run until ``close``."""
        with self._changed:
            while not self._closed:
                now_s = time.monotonic()
                for gtrid in [gtrid for gtrid, due_s in self._due_s.items() if due_s <= now_s]:
                    self._due_s[gtrid] = now_s + GRACE_S
                    try:
                        self._expire[gtrid]()
                    except Exception as error:  # for example, no thread can be started now
                        _log.warning("could not end timed-out transaction, will retry", transaction=gtrid.decode(), error=error)
                self._wakes_s = min(self._due_s.values(), default=math.inf)
                self._changed.wait(min(self._wakes_s - now_s, threading.TIMEOUT_MAX))
