"""The asyncio versions of ``contexts``."""

from __future__ import annotations

import asyncio
from functools import partial

from bascule.adapter.outbound.contexts import CLOSED, POOLED, CheckTransaction, PooledSession, outlives_transaction
from bascule.adapter.outbound.pool import Pool
from bascule.client import IllegalState, TemporaryQueue, TemporaryTopic
from bascule.client.async_branch import AsyncBranchContext
from bascule.client.async_managed import AsyncManagedConsumer, AsyncManagedContext, LentRunner
from bascule.client.links import ConsumerState, Subscription
from bascule.client.temporary import TemporaryDestinations
from bascule.threads.background import in_background


class AsyncPooledContext(AsyncManagedContext):
    """The asyncio version of PooledContext."""

    _refusal = POOLED

    def __init__(
        self,
        pool: Pool[PooledSession],
        lent: tuple[int, PooledSession],
        loop: asyncio.AbstractEventLoop,
        check_transaction: CheckTransaction,
    ) -> None:
        """``lent`` is a session from the pool."""
        self._number, session = lent
        super().__init__(LentRunner(session.context._thread, loop), session.context)
        self._pool = pool
        self._check_transaction = check_transaction
        self._made: list[ConsumerState] = []
        self._temporary = TemporaryDestinations(session.context._thread)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for sends, close what the context has created, and return its session to the pool. A second call does nothing."""
        if self._runner.over:
            return
        sound = False
        try:
            if self._end(CLOSED):  # otherwise a task is within a call, and the session ends with the context
                await self._leave(self._until(timeout_s))
                sound = True
        finally:
            give_back = partial(self._pool.give_back, self._number, broken=not sound)
            if sound:
                give_back()
            else:
                in_background(give_back, "bascule-context-close")

    async def _leave(self, until_s: float) -> None:
        for state in self._made:
            await self._runner.complete(self._session.close_consumer(state, until_s))
        await self._runner.complete(self._session.flush(until_s))
        await self._runner.complete(self._temporary.deleting(until_s))

    def _check(self) -> None:
        super()._check()
        self._check_transaction()

    async def _consumer(
        self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None
    ) -> AsyncManagedConsumer:
        consumer = await super()._consumer(wanted, name, prefetch, timeout_s)
        self._made = [*(state for state in self._made if not state.closing), consumer.state]
        return consumer

    async def temporary_queue(self, *, timeout_s: float | None = None) -> TemporaryQueue:
        """Return a temporary queue that ends with this context."""
        return self._temporary.add(await super().temporary_queue(timeout_s=timeout_s))

    async def temporary_topic(self, *, timeout_s: float | None = None) -> TemporaryTopic:
        """Return a temporary topic that ends with this context."""
        return self._temporary.add(await super().temporary_topic(timeout_s=timeout_s))


class AsyncTransactionContext(AsyncBranchContext):
    """The asyncio version of TransactionContext."""

    def __init__(self, branch: AsyncBranchContext, check_transaction: CheckTransaction) -> None:
        """``branch`` is the enlisted branch of the transaction."""
        super().__init__(branch._workplace, branch._temporary, branch._runner)
        self._closed = ""
        self._check_transaction = check_transaction

    async def close(self, *, timeout_s: float | None = None) -> None:  # noqa: ARG002 - there is nothing to wait for
        """Take no more calls. Messages sent and received belong to the transaction, and commit or roll back with it."""
        self._closed = CLOSED

    def _check(self) -> None:
        if self._closed:
            raise IllegalState(self._closed)
        super()._check()
        self._check_transaction()

    def _keeps(self, wanted: Subscription) -> bool:
        """See BranchContext."""
        return super()._keeps(wanted) and outlives_transaction(wanted)
