"""Asyncio contexts lent by a transaction manager or a pool: see ``managed``. The connection has its own thread."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from bascule.client.aio import AsyncConsumer, AsyncContext
from bascule.client.blocking import Context
from bascule.client.core import Core
from bascule.client.destination import Destination
from bascule.client.errors import IllegalState
from bascule.client.links import ConsumerState, Subscription
from bascule.client.managed import ManagedContext, refuse_listener, refused
from bascule.client.message import Body, Message, SendOptions
from bascule.client.operation import Operation, Wait
from bascule.client.sends import OnDone, SendCompletion
from bascule.client.thread import ConnectionThread
from bascule.core.errors import BasculeError

T = TypeVar("T")


class LentRunner:
    """Runs the operations of one context in the tasks of an event loop, on a connection with its own thread."""

    def __init__(self, thread: ConnectionThread, loop: asyncio.AbstractEventLoop) -> None:
        """Store the arguments; start nothing."""
        self._thread = thread
        self._loop = loop
        self._at_work = 0
        self._over = ""

    @property
    def core(self) -> Core:
        """The connection."""
        return self._thread.core

    @property
    def over(self) -> bool:
        """Whether the context has ended."""
        return bool(self._over)

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation in this task. Raises IllegalState if the context has ended or belongs to another event loop."""
        with self.working():
            return await self.complete(operation)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Guard a call of the context. Raises IllegalState as ``run`` does."""
        if asyncio.get_running_loop() is not self._loop:
            raise IllegalState("the context belongs to another event loop; use it on the loop that created it")
        self._at_work += 1  # increment before the check; ``end`` sets its mark before it reads the count
        try:
            self.check()
            yield
        finally:
            self._at_work -= 1

    async def complete(self, operation: Operation[T]) -> T:
        """Run an operation in this task, even if the context has ended."""
        try:
            wait = self._thread.step(operation, None)
            while True:
                wait = self._thread.step(operation, await self._wait(wait))
        except StopIteration as stop:
            result: T = stop.value
            return result
        finally:
            self._thread.call(operation.close)

    async def _wait(self, wait: Wait) -> bool:
        future: asyncio.Future[bool] = self._loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(True)

        ignore = self._thread.observe(wait, lambda: self._loop.call_soon_threadsafe(wake))
        left_s = wait.until_s - self.core.clock()
        try:
            async with asyncio.timeout(None if left_s == math.inf else max(left_s, 0.0)):
                return await future
        except TimeoutError:
            return self._thread.call(wait.condition)
        finally:
            ignore()

    def here(self, on_done: OnDone) -> OnDone:
        """Return a callback for the connection's thread that calls ``on_done`` on the event loop, unless the loop is closed."""

        def done(message: Message, error: BasculeError | None) -> None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(on_done, message, error)

        return done

    def call(self, function: Callable[[], T]) -> T:
        """Call a function that does not wait. Raises IllegalState as ``run`` does."""
        with self.working():
            return self._thread.call(function)

    def check(self) -> None:
        """Raise IllegalState if the context has ended."""
        if self._over:
            raise IllegalState(self._over)

    def end(self, why: str) -> bool:
        """End the context; its calls raise IllegalState with the text ``why``. Return whether no task is within an operation."""
        self._over = self._over or why
        return self._at_work == 0

    async def stop(self) -> None:
        """Keep the connection open."""


class AsyncManagedContext(AsyncContext):
    """A context that uses the session of another context for a time. Its consumers prefetch nothing unless ``prefetch`` is given."""

    _refusal = ManagedContext._refusal

    def __init__(self, runner: LentRunner, of: Context) -> None:
        """``of`` is the context that owns the session and outlives this one."""
        super().__init__(runner, of._session, None)
        self._runner = runner

    def start(self) -> None:
        """Do nothing: delivery is never stopped, because ``stop`` is refused."""
        self._check()

    create_context = refused(AsyncContext.create_context)
    commit = refused(AsyncContext.commit)
    rollback = refused(AsyncContext.rollback)
    transaction = refused(AsyncContext.transaction)
    stop = refused(AsyncContext.stop)

    def acknowledge(self) -> None:
        """Do nothing: a message is acknowledged when it is received, or by the transaction."""
        self._check()

    def _check(self) -> None:
        """Raise IllegalState if the context has ended."""
        self._runner.check()

    def _end(self, why: str) -> bool:
        """End the context; its calls raise IllegalState with the text ``why``. Return whether no task is within a call."""
        return self._runner.end(why)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Guard a call of a task. Raises IllegalState if the context has ended or belongs to another event loop."""
        with self._runner.working():
            self._check()
            yield

    async def _run(self, operation: Operation[T]) -> T:
        with self._at_work():
            return await self._runner.complete(operation)

    async def _send(
        self, destination: Destination, content: Message | Body, options: SendOptions, timeout_s: float | None, completion: SendCompletion
    ) -> Message:
        if completion.on_done is not None:
            completion = completion._replace(on_done=self._runner.here(completion.on_done))
        return await super()._send(destination, content, options, timeout_s, completion)

    async def _consumer(
        self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None
    ) -> AsyncManagedConsumer:
        return AsyncManagedConsumer(self, (await super()._consumer(wanted, name, prefetch or 0, timeout_s)).state)


class AsyncManagedConsumer(AsyncConsumer):
    """A consumer of an AsyncManagedContext. It cannot have a listener."""

    def __init__(self, context: AsyncManagedContext, state: ConsumerState) -> None:
        """Consumers are created by the context."""
        super().__init__(context, state)
        self._managed = context

    @property
    def prefetch(self) -> int:
        """The number of messages to prefetch; with 0, each receive requests one message."""
        return self.state.prefetch

    @prefetch.setter
    def prefetch(self, count: int) -> None:
        self._managed._check()
        self.state.prefetch = count

    @property
    def listener(self) -> Callable[[Message], Any] | None:
        """Always None: the application receives messages where it does its work."""
        return None

    @listener.setter
    def listener(self, listener: Callable[[Message], Any] | None) -> None:
        refuse_listener(listener)
