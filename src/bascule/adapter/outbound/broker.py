"""Outgoing connections to a JMS broker: contexts with the API of ``bascule.client``, in the current transaction or outside of one.

bind("jms/orders", JmsConnectionFactory(broker, manager))
with lookup("jms/orders").connect() as context:
    order = context.consumer(Queue("orders")).receive(1)
    context.send(Queue("confirmations"), "...")
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Final

from bascule.adapter.outbound.async_contexts import AsyncPooledContext, AsyncTransactionContext
from bascule.adapter.outbound.contexts import PooledContext, PooledSession, TransactionContext
from bascule.adapter.outbound.pool import LeaseInfo, Pool, PoolLimits, Taker
from bascule.client import Acknowledge, AsyncContext, Context, IllegalState
from bascule.client.async_branch import AsyncBranchContext
from bascule.client.branch import BranchContext
from bascule.client.factory import Connecting
from bascule.core.errors import InvalidInput
from bascule.xa.aio import LoopParticipant, in_thread
from bascule.xa.forks import abandon, register_for_forks
from bascule.xa.jms import JmsResource
from bascule.xa.manager import TransactionManager
from bascule.xa.transaction import Transaction

#: The modes that an application may ask for: both equal a session outside of transactions, and a transaction acknowledges by itself
#: (Jakarta Messaging 3.1, section 12.3).
AUTOMATIC: Final = (Acknowledge.AUTO, Acknowledge.DUPS_OK)


class JmsConnectionFactory:
    """Creates contexts of one broker. Thread-safe; it opens nothing before the first context.

    In a transaction of the manager, a context is part of that transaction. Outside of transactions, it behaves as in a Jakarta EE
    container: each message is sent at once, and acknowledged when it is received.
    """

    def __init__(
        self, broker: JmsResource, manager: TransactionManager | None = None, *, limits: PoolLimits | None = None, name: str = "jms"
    ) -> None:
        """Use ``broker``, a resource of ``manager``. Without a manager, all contexts are outside of transactions.

        ``limits`` apply to contexts outside of transactions. ``name`` appears in error messages. Raises InvalidInput.
        """
        if manager is not None and manager.resources.get(broker.name) is not broker:
            raise InvalidInput(f"resource {broker.name!r} does not belong to transaction manager {manager.name!r}")
        self._broker = broker
        self._manager = manager
        self._name = name
        self._limits = replace(limits or PoolLimits(), validate_after_s=0.0)  # validating a session costs nothing
        self._pool = self._new_pool()
        register_for_forks(self)

    def connect(self, acknowledge: Acknowledge = Acknowledge.AUTO) -> Context:
        """Return a context: of the current transaction, or from the pool if there is none.

        A context must be used where it was taken: in that transaction, or outside of transactions. Other calls raise IllegalState. Raises
        PoolExhausted, PoolClosed, Unavailable; NoTransaction and TransactionTimedOut if the current transaction is over; the errors of
        ``enlist``; InvalidInput for an acknowledgement mode that is not automatic.
        """
        _check_mode(acknowledge)
        transaction = self._current()
        if transaction is None:
            return PooledContext(self._pool, self._pool.take(), partial(self._expect, None))
        branch = transaction.enlist(self._broker)
        if not isinstance(branch, BranchContext):
            raise IllegalState(f"transaction {transaction.id} uses the broker through asyncio; get its context with connect_async()")
        return TransactionContext(branch, partial(self._expect, transaction))

    def connect_async(self, acknowledge: Acknowledge = Acknowledge.AUTO) -> Connecting:
        """Return a context for asyncio, to use with ``async with`` or ``await``. See ``connect``."""
        return Connecting(partial(self._connect_async, acknowledge))

    async def _connect_async(self, acknowledge: Acknowledge) -> AsyncContext:
        _check_mode(acknowledge)
        loop, transaction = asyncio.get_running_loop(), self._current()
        if transaction is None:
            pool = self._pool
            return AsyncPooledContext(pool, await _lent(pool), loop, partial(self._expect, None))
        enlisted = LoopParticipant(self._broker, loop)
        branch = await in_thread(lambda: transaction.enlist_as(self._broker, enlisted))
        if not isinstance(branch, AsyncBranchContext):
            raise IllegalState(f"transaction {transaction.id} uses the broker through blocking calls; get its context with connect()")
        return AsyncTransactionContext(branch, partial(self._expect, transaction))

    def leases(self, longer_than_s: float = 0.0) -> list[LeaseInfo]:
        """Return the leak report: contexts outside of transactions that are in use for at least ``longer_than_s`` seconds."""
        return self._pool.leases(longer_than_s)

    def close(self) -> None:
        """Close the sessions outside of transactions; those in use when they are returned. The owner of the resource closes it."""
        self._pool.close()

    def after_fork(self) -> None:
        """See Forks."""
        abandon(self._pool)
        self._pool = self._new_pool()

    def _new_pool(self) -> Pool[PooledSession]:
        return Pool(self._name, lambda _: PooledSession(self._broker.context()), self._limits)

    def _current(self) -> Transaction | None:
        return None if self._manager is None else self._manager.entered

    def _expect(self, transaction: Transaction | None) -> None:
        """Raise IllegalState if the calling thread or task is not in this transaction (None: in any transaction)."""
        entered = self._current()
        if entered is transaction:
            return
        if transaction is None:
            raise IllegalState(
                "this context was taken outside of transactions, and a transaction is active; take a context within the transaction"
            )
        raise IllegalState(
            f"this context belongs to transaction {transaction.id}, which is not the current transaction of this thread or task"
        )


async def _lent(pool: Pool[PooledSession]) -> tuple[int, PooledSession]:
    """Take a session. If the task is cancelled meanwhile, return the session to the pool."""
    taker = Taker.here()
    taken: list[tuple[int, PooledSession]] = []
    try:
        await in_thread(lambda: taken.append(pool.take(taker)))
    except BaseException:
        for number, _ in taken:
            pool.give_back(number)
        raise
    return taken[0]


def _check_mode(acknowledge: Acknowledge) -> None:
    if acknowledge not in AUTOMATIC:
        raise InvalidInput(
            f"acknowledge={acknowledge} is not supported: messages are acknowledged by their transaction, or on receipt outside of "
            "transactions. Use contexts of bascule.client for other modes"
        )
