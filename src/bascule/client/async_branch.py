"""Asyncio contexts of a transaction manager. The connection has its own thread, as for BranchContext."""

from __future__ import annotations

from bascule.client.aio import AsyncContext
from bascule.client.async_managed import AsyncManagedConsumer, AsyncManagedContext, LentRunner
from bascule.client.branch import BranchContext, BranchSession
from bascule.client.destination import Destination, TemporaryQueue, TemporaryTopic
from bascule.client.links import ConsumerState, Subscription
from bascule.client.managed import refused
from bascule.client.message import Body, Message, SendOptions
from bascule.client.sends import SendCompletion
from bascule.client.temporary import TemporaryDestinations


class AsyncBranchContext(AsyncManagedContext):
    """The context of an application within a branch, for asyncio.

    The transaction begins with the first message and ends with the branch.
    """

    _refusal = BranchContext._refusal

    def __init__(self, workplace: BranchSession, temporary: TemporaryDestinations, runner: LentRunner) -> None:
        """Contexts are created by a resource, for one branch, whose end deletes ``temporary``, and one event loop."""
        super().__init__(runner, workplace.context)
        self._workplace = workplace
        self._temporary = temporary

    close = refused(AsyncContext.close)

    async def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> AsyncBranchConsumer:
        """See BranchContext._consumer."""
        with self._at_work():
            if not self._keeps(wanted):
                own = (await super()._consumer(wanted, name, prefetch, timeout_s)).state
                self._workplace.passing.append(own)
                return AsyncBranchConsumer(self, own)
            kept = self._workplace.consumers
            state = kept.pop((wanted, name), None)
            if state is None or state.error is not None or state.closing:
                state = (await super()._consumer(wanted, name, prefetch, timeout_s)).state
            kept[wanted, name] = state
            state.prefetch = prefetch or 0
            self._runner.call(lambda: self._session.resume(state))
            return AsyncBranchConsumer(self, state)

    def _keeps(self, wanted: Subscription) -> bool:
        """See BranchContext._keeps."""
        return not wanted.browse and wanted.destination not in self._temporary

    async def _send(
        self, destination: Destination, content: Message | Body, options: SendOptions, timeout_s: float | None, completion: SendCompletion
    ) -> Message:
        self._temporary.check_reply_to(content)
        return await super()._send(destination, content, options, timeout_s, completion)

    async def temporary_queue(self, *, timeout_s: float | None = None) -> TemporaryQueue:
        """Return a temporary queue that ends with the transaction."""
        return self._temporary.add(await super().temporary_queue(timeout_s=timeout_s))

    async def temporary_topic(self, *, timeout_s: float | None = None) -> TemporaryTopic:
        """Return a temporary topic that ends with the transaction."""
        return self._temporary.add(await super().temporary_topic(timeout_s=timeout_s))


class AsyncBranchConsumer(AsyncManagedConsumer):
    """A consumer that stays open for the next branch after ``close``, if its context keeps it."""

    def __init__(self, context: AsyncBranchContext, state: ConsumerState) -> None:
        """Consumers are created by the context."""
        super().__init__(context, state)
        self._kept = context._keeps(state.subscription)

    async def close(self, *, timeout_s: float | None = None) -> None:
        """Close the consumer, unless it is kept; a kept consumer is closed with the resource."""
        if not self._kept:
            await super().close(timeout_s=timeout_s)
