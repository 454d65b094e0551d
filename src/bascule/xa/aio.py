"""The asyncio interface of a transaction manager: no part of a transaction blocks the event loop.

The work of a branch runs in the tasks of the application. Both phases, the decision log and the recovery run in threads, with the code of
blocking programs.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import weakref
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, ParamSpec, Protocol, Self, TypeVar, runtime_checkable

from bascule.threads.loops import in_own_thread, on_loop
from bascule.xa.blocking import BlockingParticipant
from bascule.xa.callables import refuse_generator
from bascule.xa.manager import TransactionManager
from bascule.xa.propagation import Propagation, TransactionUse
from bascule.xa.recovery_protocol import Pass
from bascule.xa.report import TransactionReport
from bascule.xa.resource import Resource
from bascule.xa.retries import Attempts
from bascule.xa.transaction import Transaction, checked_timeout_s
from bascule.xa.two_phase import TransactionStatus
from bascule.xa.xid import Xid

T = TypeVar("T")
_P = ParamSpec("_P")
#: The result of a hook: nothing, or an awaitable.
Hooked = Awaitable[object] | object


async def in_thread(work: Callable[[], T]) -> T:
    """Run work in a thread of its own. A cancellation is raised when the work has ended."""
    return await in_own_thread(work, "bascule-xa-async")


@runtime_checkable
class WorksOnLoop(Protocol):
    """A resource that has a separate handle for the tasks of an event loop. Other threads run the phases, as for Resource."""

    def start_on_loop(self, xid: Xid, *, timeout_s: float, loop: asyncio.AbstractEventLoop) -> Any:
        """Do the same as ``start`` of Resource, for an application on this loop.

        Another thread calls this while a task of the loop awaits it.
        """


class LoopParticipant(BlockingParticipant):
    """A resource whose handle is for the tasks of an event loop, if it has such a handle."""

    def __init__(self, resource: Resource[Any], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(resource)
        self._loop = loop

    async def start(self, xid: Xid, *, timeout_s: float) -> Any:
        """See Participant."""
        resource = self._resource
        if isinstance(resource, WorksOnLoop):
            return resource.start_on_loop(xid, timeout_s=timeout_s, loop=self._loop)
        return await super().start(xid, timeout_s=timeout_s)


class AsyncTransaction:
    """A transaction from ``AsyncTransactionManager.begin``. It ends with its ``async with`` block, or by ``commit`` or ``rollback``.

    Use it in tasks of one event loop. See Transaction for errors. If a task that waits for ``enlist``, ``commit`` or ``rollback`` is
    cancelled, the CancelledError is raised when the call has ended; ``status`` has the outcome, and an error of the call is the cause of
    the CancelledError.
    """

    def __init__(self, transaction: Transaction) -> None:
        self.blocking = transaction
        self.id = transaction.id
        self.gtrid = transaction.gtrid
        self._loop = asyncio.get_running_loop()

    @property
    def status(self) -> TransactionStatus:
        """The state of the transaction."""
        return self.blocking.status

    @property
    def unfinished(self) -> dict[str, str]:
        """See Transaction."""
        return self.blocking.unfinished

    async def enlist(self, resource: Resource[Any]) -> Any:
        """Enlist a resource, and return the handle to work with, which is the same for every call.

        A resource that has no handle for asyncio returns its blocking handle.
        """
        return await in_thread(lambda: self.blocking.enlist_as(resource, LoopParticipant(resource, self._loop)))

    async def set_rollback_only(self) -> None:
        """Mark the transaction for rollback."""
        await in_thread(self.blocking.set_rollback_only)

    def before_completion(self, hook: Callable[[], Hooked]) -> None:
        """Call ``hook`` on the event loop, and await its result, before the first phase of a commit. An error rolls back."""
        self.blocking.before_completion(lambda: on_loop(self._loop, lambda: _awaited(hook)))

    def after_completion(self, hook: Callable[[TransactionStatus], Hooked]) -> None:
        """Call ``hook`` on the event loop with the status, and await its result, after the end of the transaction."""
        self.blocking.after_completion(lambda status: on_loop(self._loop, lambda: _awaited(functools.partial(hook, status))))

    async def commit(self) -> None:
        """Run both phases. Raises TransactionRolledBack (TransactionTimedOut), TransactionInDoubt, HeuristicOutcome, OutOfOrder."""
        await in_thread(self.blocking.commit)

    async def rollback(self) -> None:
        """Roll back all branches. Raises HeuristicOutcome, OutOfOrder."""
        await in_thread(self.blocking.rollback)

    async def __aenter__(self) -> Self:
        """Make this the current transaction of the task. If that raises, the transaction is rolled back."""
        try:
            self.blocking.enter()
        except BaseException:
            await self.rollback()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Commit, or roll back if an exception passes. A transaction that ended within the block stays as it is."""
        try:
            await in_thread(lambda: self.blocking.finish(failed=kind is not None))
        finally:
            self.blocking.leave()


class AsyncTransactionManager:
    """A transaction manager for asyncio. It shares name, log, recovery and current transaction with the blocking one.

    shop = AsyncTransactionManager(TransactionManager("shop", FileLog(Path("shop.xalog")), [database, broker]))

    async with shop, shop.begin(timeout_s=10) as transaction:
        connection = await transaction.enlist(database)
        await connection.execute("INSERT INTO payments ...")
    """

    def __init__(self, manager: TransactionManager) -> None:
        """Use ``manager``, which threads can use at the same time. ``bascule xa`` takes the blocking manager."""
        self.blocking = manager
        self._begun: weakref.WeakValueDictionary[bytes, AsyncTransaction] = weakref.WeakValueDictionary()

    async def open(self) -> Pass:
        """See TransactionManager."""
        return await in_thread(self.blocking.open)

    async def close(self) -> None:
        """See TransactionManager."""
        await in_thread(self.blocking.close)

    async def __aenter__(self) -> Self:
        """Open the manager."""
        await self.open()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Close the manager."""
        await self.close()

    def begin(self, timeout_s: float | None = None) -> AsyncTransaction:
        """Begin a transaction. Use it with ``async with``, which makes it the current transaction of the task, or end it explicitly."""
        transaction = AsyncTransaction(self.blocking.begin(timeout_s))
        self._begun[transaction.gtrid] = transaction
        return transaction

    @property
    def current(self) -> AsyncTransaction:
        """The transaction of this task, or of the task that has started it. Raises NoTransaction."""
        transaction = self.blocking.current
        if (known := self._begun.get(transaction.gtrid)) is None:
            known = self._begun[transaction.gtrid] = AsyncTransaction(transaction)
        return known

    async def enlist(self, resource: Resource[Any]) -> Any:
        """Do the same as ``enlist`` of the current transaction."""
        return await self.current.enlist(resource)

    @contextmanager
    def suspended(self) -> Iterator[AsyncTransaction]:
        """Suspend the current transaction within the block, so that another can begin."""
        transaction = self.current
        with self.blocking.suspended():
            yield transaction

    async def outcome(self, transaction_id: str) -> TransactionReport:
        """See TransactionManager."""
        return await in_thread(lambda: self.blocking.outcome(transaction_id))

    def transactional(
        self,
        *,
        attempts: int = 1,
        timeout_s: float | None = None,
        retry_on: tuple[type[Exception], ...] = (),
        propagation: Propagation = Propagation.REQUIRED,
    ) -> Callable[[Callable[_P, Awaitable[T]]], Callable[_P, Awaitable[T]]]:
        """Do the same as ``transactional`` of TransactionManager, for coroutine functions."""
        if timeout_s is not None:
            checked_timeout_s(timeout_s)

        def decorate(function: Callable[_P, Awaitable[T]]) -> Callable[_P, Awaitable[T]]:
            refuse_generator(function)

            @functools.wraps(function)
            async def call(*args: _P.args, **kwargs: _P.kwargs) -> T:
                use = self.blocking.use_of(propagation)
                if use is TransactionUse.JOINED:
                    return await self._joined(function(*args, **kwargs))
                if use is TransactionUse.OUTSIDE:
                    with self.blocking.aside():
                        return await function(*args, **kwargs)
                tried = Attempts(function, attempts, retry_on)
                while True:
                    transaction: AsyncTransaction | None = None
                    try:
                        with self.blocking.aside():
                            async with self.begin(timeout_s) as transaction:
                                return await function(*args, **kwargs)
                    except Exception as error:
                        if not tried.retries(error, transaction):
                            raise
                    await asyncio.sleep(tried.pause_s)

            return call

        return decorate

    async def _joined(self, call: Awaitable[T]) -> T:
        transaction = self.current
        try:
            return await call
        except BaseException:
            await in_thread(transaction.blocking.give_up)
            raise


async def _awaited(hook: Callable[[], Hooked]) -> None:
    returned = hook()
    if inspect.isawaitable(returned):
        await returned
