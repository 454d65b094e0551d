"""Something that one thread at a time tries, and that all wait for: those who have waited for a try that failed do not try again."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from bascule.core.errors import Unavailable

T = TypeVar("T")


class JointTry:
    """One try at a time. If each of N threads tried in its turn what takes 20 s to fail, the last one would wait for N times 20 s."""

    def __init__(self, turn: AbstractContextManager[Any] | None = None) -> None:
        """``turn`` is the lock of those who try; others may have it, too."""
        self._turn = threading.Lock() if turn is None else turn
        self._failures = 0
        self._failure: Unavailable | None = None

    def __call__(self, attempt: Callable[[], T]) -> T:
        """Return what ``attempt`` returns, which looks first whether there is anything to try. Raises what it raises.

        Raises Unavailable also if another thread's try has failed so while this one waited for its turn.
        """
        failures = self._failures
        with self._turn:
            if self._failure is not None and self._failures > failures:
                # A copy: one exception object that several threads raise would gather the tracebacks of all.
                raise type(self._failure)(*self._failure.args)
            try:
                return attempt()
            except Unavailable as error:
                self._failure, self._failures = error, self._failures + 1
                raise
