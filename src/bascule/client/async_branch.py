"""A context of a transaction manager for tasks of an event loop. The connection has a thread of its own, as that of BranchContext."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from bascule.client.aio import AsyncConsumer, AsyncContext
from bascule.client.branch import BranchSession
from bascule.client.core import Core
from bascule.client.errors import IllegalState
from bascule.client.links import Subscription
from bascule.client.message import Message
from bascule.client.operation import Operation, Wait
from bascule.client.thread import ConnectionThread

T = TypeVar("T")


class BranchRunner:
    """Runs the operations of one branch in the tasks of a loop, on a connection that is pumped by its own thread."""

    def __init__(self, thread: ConnectionThread, loop: asyncio.AbstractEventLoop) -> None:
        """Nothing is started."""
        self._thread = thread
        self._loop = loop
        self._at_work = 0
        self._over = False

    @property
    def core(self) -> Core:
        """The connection."""
        return self._thread.core

    async def run(self, operation: Operation[T]) -> T:
        """Run an operation in this task. Raises IllegalState when the branch is over, or on another event loop."""
        if asyncio.get_running_loop() is not self._loop:
            raise IllegalState("this context belongs to another event loop")
        self._at_work += 1  # before the look whether it is over: ``end`` looks the other way round
        try:
            self.check()
            return await self._run(operation)
        finally:
            self._at_work -= 1

    async def _run(self, operation: Operation[T]) -> T:
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

    def call(self, function: Callable[[], T]) -> T:
        """Call what waits for nothing. Raises IllegalState when the branch is over."""
        self.check()
        return self._thread.call(function)

    def check(self) -> None:
        """Raise IllegalState when the branch is over."""
        if self._over:
            raise IllegalState("the transaction is over: enlist the resource in the next one")

    def end(self) -> bool:
        """The branch is over for the application. Return whether no task is within an operation."""
        self._over = True
        return self._at_work == 0

    async def stop(self) -> None:
        """The connection stays."""


class AsyncBranchContext(AsyncContext):
    """What the tasks of an application work with in a branch. The transaction begins with the first message and ends with the branch."""

    def __init__(self, workplace: BranchSession, loop: asyncio.AbstractEventLoop) -> None:
        """Made by a resource, for one branch and the tasks of one loop."""
        self._runner = BranchRunner(workplace.context._thread, loop)
        super().__init__(self._runner, workplace.context._session, None)
        self._workplace = workplace

    def end_branch(self) -> bool:
        """The branch is over for the application. Return whether no task is within a call of the context."""
        return self._runner.end()

    async def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> AsyncBranchConsumer:
        """Kept for the next branches. Without a word about it nothing is asked for ahead."""
        self._runner.check()
        if wanted.browse:
            return AsyncBranchConsumer(self, (await super()._consumer(wanted, name, prefetch, timeout_s)).state)
        kept = self._workplace.consumers
        state = kept.pop((wanted, name), None)
        if state is None or state.error is not None or state.closing:
            state = (await super()._consumer(wanted, name, prefetch or 0, timeout_s)).state
        kept[wanted, name] = state
        state.prefetch = prefetch or 0
        self._runner.call(lambda: self._session.resume(state))
        return AsyncBranchConsumer(self, state)

    def _managed(self, *_: Any, **__: Any) -> NoReturn:
        raise IllegalState("this context is part of a transaction over several resources: its manager begins and ends what there is to")

    commit = rollback = transaction = close = start = stop = create_context = _managed


class AsyncBranchConsumer(AsyncConsumer):
    """A consumer that stays when it is closed, for the next branch."""

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Close a browser; other consumers go with the resource."""
        if self.state.subscription.browse:
            await super().close(timeout_s=timeout_s)

    @property
    def listener(self) -> Callable[[Message], Any] | None:
        """There is none: a message is received where the transaction is at work."""
        return None

    @listener.setter
    def listener(self, listener: Callable[[Message], Any] | None) -> None:
        if listener is not None:
            raise IllegalState("a listener has no part in a transaction over several resources: receive() there")
