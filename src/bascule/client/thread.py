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
#: Maximum size of frames that are held. Larger ones are sent at once, so that the broker reads them while the application works.
HELD_BYTES_MAX: Final = 16 << 10


class ConnectionThread:
    """The thread of a connection: its event loop runs the pump of the core. Operations run on the threads of the application."""

    def __init__(self, core: Core, plan: Plan, tls: SSLContext | None) -> None:
        """Start the thread."""
        self.core = core
        self._lock = threading.RLock()
        #: Operations that wait, each on its own condition, so that a change wakes only those that can continue.
        self._waiting: dict[threading.Condition, Callable[[], bool]] = {}
        self._observers: set[Callable[[], None]] = set()
        self._pump = Pump(core, plan, tls, self._lock, self._notify)
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
        with self._lock:
            self._stopped = True
            self.core.fail(ConnectionLost(f"the connection thread failed: {error!r}"))
            self._notify()

    async def _run(self) -> None:
        try:
            self._task = asyncio.create_task(self._pump.run())
            await self._task
            await asyncio.Event().wait()  # completions are reported until ``stop``
        finally:
            with self._lock:
                self._stopped = True  # set before the loop is closed, because a closed loop accepts no calls

    def run(self, operation: Operation[T], *, holds: bool = False) -> T:
        """Run an operation on the calling thread.

        ``holds``: the last frames of the operation may wait for the next write to the socket, unless they are large.
        """
        with self._lock:
            try:
                wait = next(operation)
                while True:
                    self._stepped(waits=True)
                    wait = operation.send(self._wait(wait))
            except StopIteration as stop:
                result: T = stop.value
                return result
            finally:
                operation.close()
                self._stepped(held_bytes=HELD_BYTES_MAX if holds else 0)

    def _wait(self, wait: Wait) -> bool:
        """Wait, with the lock released. Return whether the condition is true."""
        changed, left_s = threading.Condition(self._lock), wait.until_s - self.core.clock()
        try:
            self._waiting[changed] = wait.condition
            return changed.wait_for(wait.condition, None if left_s == math.inf else max(left_s, 0.0))
        finally:
            self._waiting.pop(changed, None)

    def step(self, operation: Operation[Any], came: bool | None) -> Wait:
        """Run an operation to its next wait; ``came`` is the result of the previous wait. Raises StopIteration at its end."""
        with self._lock:
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

        with self._lock:
            self._observers.add(look)
            look()
        return lambda: self._ignore(look)

    def _ignore(self, observer: Callable[[], None]) -> None:
        with self._lock:
            self._observers.discard(observer)

    def _notify(self) -> None:
        """Wake the waiting operations whose condition has become true. Called within the lock."""
        for changed, condition in self._waiting.items():
            if condition():
                changed.notify()
        for observer in [*self._observers]:
            observer()

    def flush(self) -> None:
        """Write held frames."""
        with self._lock:
            self._stepped()

    def call(self, function: Callable[[], T]) -> T:
        """Call a function that does not wait."""
        with self._lock:
            try:
                return function()
            finally:
                self._stepped()

    def _stepped(self, *, waits: bool = False, held_bytes: int = 0) -> None:
        """Wake the waiting operations after a step of an operation, and write what is pending if it is more than ``held_bytes`` bytes.

        ``waits``: the calling thread waits next, so it writes itself, if possible. Otherwise the thread of the connection writes, together
        with the frames of the next steps.
        """
        self._notify()
        if not self.core.pending or self._flush_due or self._stopped or self.core.pends_at_most(held_bytes):
            return
        if not (waits and self._pump.write_now()):
            self._flush_due = True
            self._loop.call_soon_threadsafe(self._flush_now)

    def _flush_now(self) -> None:
        with self._lock:
            self._flush_due = False
        self._pump.flush()

    def stop(self) -> None:
        """End the thread and close its socket."""
        with self._lock:
            if self._stopped:
                return
            self._stopped = True
            self._loop.call_soon_threadsafe(self._cancel)
        if threading.current_thread() is not self._thread:
            self._thread.join(JOIN_TIMEOUT_S)

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
