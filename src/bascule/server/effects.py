"""Effects that several protocols of the broker share, performed by asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from bascule.core.effects import Severity
from bascule.core.log import EventLog, get_log
from bascule.threads.background import in_background
from bascule.threads.clock import elapsed_s

log = get_log(__name__)

T = TypeVar("T")


def write_note(log: EventLog, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
    """Write a note of a protocol to the log."""
    fields = {"detail": detail} if detail else {}
    if severity >= Severity.ERROR:
        log.error(event, exc_info=error, **fields)
    elif severity >= Severity.WARNING:
        log.warning(event, exc_info=error, **fields)
    else:
        log.info(event, **fields)


class FutureWaiter(Generic[T]):
    """A value that is set later: see bascule.core.effects.Waiter."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._future: asyncio.Future[T] = loop.create_future()
        self._future.add_done_callback(_seen)

    def keep(self, value: T) -> None:
        """Set the value."""
        if not self._future.done():
            self._future.set_result(value)

    def fail(self, error: Exception) -> None:
        """Set the error instead of a value."""
        if not self._future.done():
            self._future.set_exception(error)

    async def wait(self, timeout_s: float) -> T:
        """Return the value. Raises the error, or TimeoutError."""
        if self._future.done():  # wait_for would wait for a turn of the loop, and miss a cancellation in it
            return self._future.result()
        return await asyncio.wait_for(self._future, timeout_s)


def _seen(future: asyncio.Future[Any]) -> None:
    """Retrieve the error, since asyncio complains about an error that nobody retrieves."""
    if not future.cancelled():
        future.exception()


class LoopEffects:
    """Time, timers, concurrent protocols, and blocking calls off the loop."""

    def __init__(self, name: str) -> None:
        """Bind the effects to the running loop. ``name`` is the name of the threads for blocking calls."""
        self._loop = asyncio.get_running_loop()
        self._name = name
        self._tasks: set[asyncio.Task[None]] = set()  # the loop itself keeps no references to them

    #: The clock continues while the machine is suspended. Not a method that calls it, because it is read several times for a message.
    now_s = staticmethod(elapsed_s)

    def soon(self, action: Callable[[], None]) -> object:
        """Run an action in the next turn of the loop."""
        return self._loop.call_soon(action)

    def after(self, delay_s: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        """Run an action after a delay."""
        return self._loop.call_later(delay_s, action)

    def spawn(self, protocol: Coroutine[Any, Any, None]) -> None:
        """Run a protocol concurrently."""
        task = self._loop.create_task(protocol)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def waiter(self) -> FutureWaiter[Any]:
        """Return a value that is set later."""
        return FutureWaiter(self._loop)

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        """Write to the log."""
        write_note(log, severity, event, detail, error)

    async def off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a blocking function in another thread. Raises what the function raises."""
        return await asyncio.wrap_future(in_background(partial(function, *arguments), self._name))

    def cancel_spawned(self) -> None:
        """Cancel the protocols that still run."""
        for task in self._tasks:
            task.cancel()
