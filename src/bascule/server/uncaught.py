"""Errors that nobody has awaited, of tasks, futures and callbacks of the broker's event loop: logged with a name and a count."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from bascule.core.log import get_log

log = get_log(__name__)


class UncaughtErrorHandler:
    """The exception handler of an event loop."""

    def __init__(self) -> None:
        #: How many there were, by the name of what has failed.
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        """How many there were."""
        return self.counts.total()

    def install(self, loop: asyncio.AbstractEventLoop) -> None:
        """Handle what ``loop`` cannot deliver to anybody."""
        loop.set_exception_handler(self._handle)

    def _handle(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        name = _name_of(context)
        self.counts[name] += 1
        log.error(
            "uncaught asyncio error", source=name, count=self.counts[name], what=context["message"], exc_info=context.get("exception")
        )


def _name_of(context: dict[str, Any]) -> str:
    """Of a task its name and coroutine, of a callback or a future what asyncio calls it, without addresses in memory."""
    task = context.get("task") or context.get("future")
    if isinstance(task, asyncio.Task):
        coroutine = task.get_coro()
        return getattr(coroutine, "__qualname__", task.get_name())
    for key in ("handle", "protocol", "transport", "future"):
        if context.get(key) is not None:
            return type(context[key]).__name__
    return "event loop"
