"""The contexts of a JmsConnectionFactory: within a transaction, or from a pool outside of one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from bascule.adapter.outbound.pool import Pool
from bascule.adapter.outbound.temporary import TemporaryDestinations
from bascule.client import Context, Destination, Message, Queue, TemporaryQueue, TemporaryTopic
from bascule.client.branch import BranchContext
from bascule.client.links import ConsumerState, Subscription
from bascule.client.managed import ManagedConsumer, ManagedContext
from bascule.client.message import Body, SendOptions
from bascule.client.sends import SendCompletion
from bascule.core.errors import BasculeError

CLOSED: Final = "the context is closed"
POOLED: Final = "this context is from a pool and has no transactions; begin and end transactions with a transaction manager"
#: Raises IllegalState where a context cannot be used.
Elsewhere = Callable[[], None]


class PooledSession:
    """A session of the pool, outside of transactions. Its messages are acknowledged as they are received."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def validate(self) -> None:
        """Raise what has ended the session, or its connection. Asks nobody."""
        self.context._call(self.context._session.check)

    def close(self) -> None:
        """Close the session. The end of its connection closes a broken one."""
        with suppress(BasculeError):
            self.context.close()


class PooledContext(ManagedContext):
    """A context outside of transactions. ``close`` gives its session back, without the consumers and temporary destinations it has made."""

    _refusal = POOLED

    def __init__(self, pool: Pool[PooledSession], lent: tuple[int, PooledSession], elsewhere: Elsewhere) -> None:
        """``lent`` is from the pool."""
        self._number, session = lent
        super().__init__(session.context)
        self._pool = pool
        self._elsewhere = elsewhere
        self._made: list[ConsumerState] = []
        self._closing = threading.Lock()  # never released
        self._temporary = TemporaryDestinations(self._thread)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for what was sent, close what the context has made, and give its session back. A second time it does nothing."""
        if not self._closing.acquire(blocking=False):
            return  # one thread gives it back, also if another one closes the context at the same time
        sound = False
        try:
            if self._end(CLOSED):  # else another thread is within a call, and the session goes with the context
                self._leave(self._until(timeout_s))
                sound = True
        finally:
            self._pool.give_back(self._number, broken=not sound)

    def _leave(self, until_s: float) -> None:
        for state in self._made:
            self._thread.run(self._session.close_consumer(state, until_s))
        self._thread.run(self._session.flush(until_s))
        self._thread.run(self._temporary.deleting(until_s))

    def _check(self) -> None:
        super()._check()
        self._elsewhere()

    def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> ManagedConsumer:
        consumer = super()._consumer(wanted, name, prefetch, timeout_s)
        self._made = [*(state for state in self._made if not state.closing), consumer.state]
        return consumer

    def temporary_queue(self, *, timeout_s: float | None = None) -> TemporaryQueue:
        """A queue that goes with this context."""
        return self._temporary.add(super().temporary_queue(timeout_s=timeout_s))

    def temporary_topic(self, *, timeout_s: float | None = None) -> TemporaryTopic:
        """A topic that goes with this context."""
        return self._temporary.add(super().temporary_topic(timeout_s=timeout_s))


class TransactionContext(BranchContext):
    """A context within a transaction: one more hold of the transaction's branch."""

    def __init__(self, branch: BranchContext, temporary: TemporaryDestinations, elsewhere: Elsewhere) -> None:
        """``branch`` is what the transaction has enlisted; ``temporary`` goes with the transaction."""
        super().__init__(branch._workplace)
        self._branch = branch
        self._in_use = branch._in_use  # one thread at a time is at work in the branch, by whichever context
        self._temporary = temporary
        self._elsewhere = elsewhere

    def close(self, *, timeout_s: float | None = None) -> None:  # noqa: ARG002 - there is nothing to wait for
        """Take no more calls. What was sent and received is the transaction's, and is committed or rolled back with it."""
        self._end(CLOSED)

    def _check(self) -> None:
        super()._check()
        self._branch._check()
        self._elsewhere()

    def _keeps(self, wanted: Subscription) -> bool:
        """See BranchContext."""
        return super()._keeps(wanted) and outlives_transaction(wanted)

    def _send(
        self, destination: Destination, content: Message | Body, options: SendOptions, timeout_s: float | None, completion: SendCompletion
    ) -> Message:
        self._temporary.check_reply_to(content)
        return super()._send(destination, content, options, timeout_s, completion)

    def temporary_queue(self, *, timeout_s: float | None = None) -> TemporaryQueue:
        """A queue that goes with the transaction."""
        return self._temporary.add(super().temporary_queue(timeout_s=timeout_s))

    def temporary_topic(self, *, timeout_s: float | None = None) -> TemporaryTopic:
        """A topic that goes with the transaction."""
        return self._temporary.add(super().temporary_topic(timeout_s=timeout_s))


def outlives_transaction(wanted: Subscription) -> bool:
    """Return whether a consumer is kept for later transactions: that of a queue is.

    A subscription whose consumer was kept would gather messages for nobody, and be closed to others.
    """
    return isinstance(wanted.destination, Queue) and not isinstance(wanted.destination, TemporaryQueue)
