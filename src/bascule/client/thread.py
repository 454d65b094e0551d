"""The blocking face's shell: a connection's own thread, and how operations run on the application's."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from contextlib import suppress
from ssl import SSLContext
from typing import Any, Final, TypeVar

from bascule.client.core import Core
from bascule.client.errors import ConnectionLost
from bascule.client.operation import Operation, Wait
from bascule.client.pump import Pump
from bascule.client.url import Plan
from bascule.threads.lasting import lasting_thread

T = TypeVar("T")
#: For threads of ours to end once they have nothing to do.
JOIN_TIMEOUT_S: Final = 10.0


class ConnectionThread:
    """A connection's own thread: an event loop that pumps the core. Operations run on the threads of the application."""

    def __init__(self, core: Core, plan: Plan, tls: SSLContext | None) -> None:
        """Start it."""
        self.core = core
        self._changed = threading.Condition()
        self._observers: set[Callable[[], None]] = set()
        self._pump = Pump(core, plan, tls, self._changed, self._notify)
        self._flush_due = False
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._stopped = False
        self._thread = lasting_thread(self._serve, f"bascule-{core.container_id}", on_failure=self._failed)
        self._thread.start()

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner, suppress(asyncio.CancelledError):
            runner.run(self._run())

    def _failed(self, error: BaseException) -> None:
        """Nobody serves the socket any more: every operation of the connection raises ConnectionLost from now on."""
        with self._changed:
            self._stopped = True
            self.core.fail(ConnectionLost(f"the thread of the connection failed: {error!r}"))
            self._notify()

    async def _run(self) -> None:
        try:
            self._task = asyncio.create_task(self._pump.run())
            await self._task
            await asyncio.Event().wait()  # completions are still to be reported, until ``stop``
        finally:
            with self._changed:
                self._stopped = True  # before the loop is closed: it takes no call then

    def run(self, operation: Operation[T]) -> T:
        """Run an operation on this thread."""
        with self._changed:
            try:
                wait = next(operation)
                while True:
                    self._stepped()
                    left_s = wait.until_s - self.core.clock()
                    came = self._changed.wait_for(wait.condition, None if left_s == math.inf else max(left_s, 0.0))
                    wait = operation.send(came)
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                operation.close()
                self._stepped()

    def step(self, operation: Operation[Any], came: bool | None) -> Wait:
        """Run an operation up to its next wait; ``came`` is the answer to the last one. Raises StopIteration at its end."""
        with self._changed:
            try:
                return next(operation) if came is None else operation.send(came)
            finally:
                self._stepped()

    def observe(self, wait: Wait, came: Callable[[], object]) -> Callable[[], None]:
        """Call ``came``, in any thread, as soon as the condition is true. Returns what ends that.

        ``came`` calls an event loop that is not this connection's. If that loop is closed, nobody waits in it any more.
        """

        def look() -> None:
            if wait.condition():
                try:
                    came()
                except RuntimeError:  # the loop is closed; whoever has made the condition true goes on
                    self._observers.discard(look)

        with self._changed:
            self._observers.add(look)
            look()
        return lambda: self._ignore(look)

    def _ignore(self, observer: Callable[[], None]) -> None:
        with self._changed:
            self._observers.discard(observer)

    def _notify(self) -> None:
        """Something may have come true that an operation waits for. Within the lock."""
        self._changed.notify_all()
        for observer in [*self._observers]:
            observer()

    def call(self, function: Callable[[], T]) -> T:
        """Call what waits for nothing."""
        with self._changed:
            try:
                return function()
            finally:
                self._stepped()

    def _stepped(self) -> None:
        """Something was done: have what is due written, and wake who waits for it."""
        self._notify()
        if self.core.pending and not self._flush_due and not self._stopped:
            self._flush_due = True
            self._loop.call_soon_threadsafe(self._flush_now)

    def _flush_now(self) -> None:
        with self._changed:
            self._flush_due = False
        self._pump.flush()

    def stop(self) -> None:
        """End the thread, and the socket with it."""
        with self._changed:
            if self._stopped:
                return
            self._stopped = True
            self._loop.call_soon_threadsafe(self._cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
