"""The log of errors that end nothing: contained errors, and errors of the event loop that nobody has awaited."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any, Final

from bascule.broker.containment import ErrorKind
from bascule.core.log import get_log

log = get_log(__name__)

#: Maximum number of contained errors that are logged in one second: a peer that causes them must not fill the disk. All are counted.
LINES_PER_S: Final = 20


class ErrorLog:
    """The log of contained errors: see bascule.broker.containment."""

    def __init__(self) -> None:
        self._second = 0
        self._written = self._left_out = 0

    def write(self, kind: ErrorKind, error: Exception, fields: dict[str, object]) -> None:
        """Write an error with its traceback, unless there were many in this second."""
        second = int(time.monotonic())
        if second != self._second:
            if self._left_out:
                log.error("contained errors not logged", count=self._left_out)
            self._second, self._written, self._left_out = second, 0, 0
        if self._written >= LINES_PER_S:
            self._left_out += 1
            return
        self._written += 1
        log.error(
            "error contained",
            kind=kind,
            error=f"{error!r:.500}",
            **{name: f"{value!s:.200}" for name, value in fields.items()},
            exc_info=error,
        )


class UncaughtErrorHandler:
    """The exception handler of an event loop."""

    def __init__(self) -> None:
        #: Number of errors by the name of the failed object.
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """Return the number of errors."""
        return self.counts.total()

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle the errors of ``loop`` that no other code handles."""
        loop.set_exception_handler(self._handle)

    def _handle(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        name = _name_of(context)
        self.counts[name] += 1
        log.error(
            "uncaught asyncio error", source=name, count=self.counts[name], what=context["message"], exc_info=context.get("exception")
        )


def _name_of(context: dict[str, Any]) -> str:
    """Return the coroutine of a task, or asyncio's type name of a callback or future, without addresses in memory."""
    task = context.get("task") or context.get("future")
    if isinstance(task, asyncio.Task):
        coroutine = task.get_coro()
        return getattr(coroutine, "__qualname__", task.get_name())
    for key in ("handle", "protocol", "transport", "future"):
        if context.get(key) is not None:
            return type(context[key]).__name__
    return "event loop"
