"""The contexts of a JmsConnectionFactory: in a transaction, or from a pool outside of transactions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from bascule.adapter.outbound.pool import Pool
from bascule.client import Context, Queue, TemporaryQueue, TemporaryTopic
from bascule.client.branch import BranchContext
from bascule.client.links import ConsumerState, Subscription
from bascule.client.managed import ManagedConsumer, ManagedContext
from bascule.client.temporary import TemporaryDestinations
from bascule.core.errors import BasculeError

CLOSED: Final = "the context is closed"
POOLED: Final = "this context is from a pool and has no transactions; begin and end transactions with a transaction manager"
#: Raises IllegalState if the current transaction is not the one of the context.
CheckTransaction = Callable[[], None]


class PooledSession:
    """A session of the pool, outside of transactions. Messages are acknowledged as they are received."""

    def __init__(self, context: Context) -> None:
        self.context = context

    def validate(self) -> None:
        """Raise the error that has ended the session or its connection. Sends no request."""
        self.context._call(self.context._session.check)

    def close(self) -> None:
        """Close the session. If it is broken, the end of its connection closes it."""
        with suppress(BasculeError):
            self.context.close()


class PooledContext(ManagedContext):
    """A context outside of transactions. ``close`` returns its session to the pool, and closes the consumers and temporary destinations."""

    _refusal = POOLED

    def __init__(self, pool: Pool[PooledSession], lent: tuple[int, PooledSession], check_transaction: CheckTransaction) -> None:
        """``lent`` is a session from the pool."""
        self._number, session = lent
        super().__init__(session.context)
        self._pool = pool
        self._check_transaction = check_transaction
        self._made: list[ConsumerState] = []
        self._closing = threading.Lock()  # never released
        self._temporary = TemporaryDestinations(self._thread)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Wait for sends, close what the context has created, and return its session to the pool. A second call does nothing."""
        if not self._closing.acquire(blocking=False):
            return  # only one thread returns the session, even if several close the context at once
        sound = False
        try:
            if self._end(CLOSED):  # otherwise another thread is within a call, and the session ends with the context
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
        self._check_transaction()

    def _consumer(self, wanted: Subscription, name: str | None, prefetch: int | None, timeout_s: float | None) -> ManagedConsumer:
        consumer = super()._consumer(wanted, name, prefetch, timeout_s)
        self._made = [*(state for state in self._made if not state.closing), consumer.state]
        return consumer

    def temporary_queue(self, *, timeout_s: float | None = None) -> TemporaryQueue:
        """Return a temporary queue that ends with this context."""
        return self._temporary.add(super().temporary_queue(timeout_s=timeout_s))

    def temporary_topic(self, *, timeout_s: float | None = None) -> TemporaryTopic:
        """Return a temporary topic that ends with this context."""
        return self._temporary.add(super().temporary_topic(timeout_s=timeout_s))


class TransactionContext(BranchContext):
    """A context in a transaction. All contexts of a transaction share its branch."""

    def __init__(self, branch: BranchContext, check_transaction: CheckTransaction) -> None:
        """``branch`` is the enlisted branch of the transaction."""
        super().__init__(branch._workplace, branch._temporary)
        self._branch = branch
        self._in_use = branch._in_use  # one thread at a time works in the branch, through any of its contexts
        self._check_transaction = check_transaction

    def close(self, *, timeout_s: float | None = None) -> None:  # noqa: ARG002 - there is nothing to wait for
        """Take no more calls. Messages sent and received belong to the transaction, and commit or roll back with it."""
        self._end(CLOSED)

    def _check(self) -> None:
        super()._check()
        self._branch._check()
        self._check_transaction()

    def _keeps(self, wanted: Subscription) -> bool:
        """See BranchContext."""
        return super()._keeps(wanted) and outlives_transaction(wanted)


def outlives_transaction(wanted: Subscription) -> bool:
    """Return True if a consumer is kept for later transactions, as those of queues are.

    If the consumer of a subscription were kept, the subscription would collect messages for nobody and be closed to others.
    """
    return isinstance(wanted.destination, Queue) and not isinstance(wanted.destination, TemporaryQueue)
