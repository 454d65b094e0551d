"""An attempt that one thread makes for all: threads that have waited for a failed attempt do not repeat it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from bascule.core.errors import Unavailable

T = TypeVar("T")


class JointTry:
    """One attempt at a time. If each of N threads made its own attempt of 20 s, the last one would wait for N times 20 s."""

    def __init__(self, turn: AbstractContextManager[Any] | None = None) -> None:
        """``turn`` is the lock of the attempts; other code may hold it, too."""
        self._turn = threading.Lock() if turn is None else turn
        self._failures = 0
        self._failure: Unavailable | None = None

    def __call__(self, attempt: Callable[[], T]) -> T:
        """Return the result of ``attempt``, which first checks whether there is anything to do. Raises the error of ``attempt``.

        Raises Unavailable also if the attempt of another thread failed with it while this thread waited.
        """
        failures = self._failures
        with self._turn:
            if self._failure is not None and self._failures > failures:
                # Raise a copy: one exception raised by several threads would collect the tracebacks of all.
                raise type(self._failure)(*self._failure.args)
            try:
                return attempt()
            except Unavailable as error:
                self._failure, self._failures = error, self._failures + 1
                raise
