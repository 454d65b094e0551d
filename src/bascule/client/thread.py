"""The connection thread of the blocking API, and how operations run on the application's threads."""

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
#: Timeout of joining a thread that has nothing more to do.
JOIN_TIMEOUT_S: Final = 10.0


class ConnectionThread:
    """The thread of a connection: its event loop runs the pump of the core. Operations run on the threads of the application."""

    def __init__(self, core: Core, plan: Plan, tls: SSLContext | None) -> None:
        """Start the thread."""
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
        """Fail the connection after an error of the thread: every operation raises ConnectionLost from now on."""
        with self._changed:
            self._stopped = True
            self.core.fail(ConnectionLost(f"the connection thread failed: {error!r}"))
            self._notify()

    async def _run(self) -> None:
        try:
            self._task = asyncio.create_task(self._pump.run())
            await self._task
            await asyncio.Event().wait()  # completions are reported until ``stop``
        finally:
            with self._changed:
                self._stopped = True  # set before the loop is closed, because a closed loop accepts no calls

    def run(self, operation: Operation[T]) -> T:
        """Run an operation on the calling thread."""
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
        """Run an operation to its next wait; ``came`` is the result of the previous wait. Raises StopIteration at its end."""
        with self._changed:
            try:
                return next(operation) if came is None else operation.send(came)
            finally:
                self._stepped()

    def observe(self, wait: Wait, came: Callable[[], object]) -> Callable[[], None]:
        """Call ``came`` as soon as the condition is true, on any thread. Return a function that cancels this.

        ``came`` schedules a call on another event loop. If that loop is closed, the observer is removed.
        """

        def look() -> None:
            if wait.condition():
                try:
                    came()
                except RuntimeError:  # that loop is closed; the thread that made the condition true must continue
                    self._observers.discard(look)

        with self._changed:
            self._observers.add(look)
            look()
        return lambda: self._ignore(look)

    def _ignore(self, observer: Callable[[], None]) -> None:
        with self._changed:
            self._observers.discard(observer)

    def _notify(self) -> None:
        """Wake the waiting operations whose condition may have become true. Called within the lock."""
        self._changed.notify_all()
        for observer in [*self._observers]:
            observer()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function that does not wait."""
        with self._changed:
            try:
                return function()
            finally:
                self._stepped()

    def _stepped(self) -> None:
        """Schedule pending writes and wake the waiting operations after a step of an operation."""
        self._notify()
        if self.core.pending and not self._flush_due and not self._stopped:
            self._flush_due = True
            self._loop.call_soon_threadsafe(self._flush_now)

    def _flush_now(self) -> None:
        with self._changed:
            self._flush_due = False
        self._pump.flush()

    def stop(self) -> None:
        """End the thread and close its socket."""
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
