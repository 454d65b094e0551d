"""The link to the transaction coordinator (AMQP 1.0 part 4)."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Final

from bascule.amqp.errors import AmqpError, amqp_error
from bascule.amqp.link import ReceiverLink
from bascule.amqp.performatives import ACCEPTED, Declared, Error, Rejected
from bascule.amqp.session import Session
from bascule.broker.errors import ResourceLimit, UnknownTransaction
from bascule.broker.transactions import LocalTransaction
from bascule.core.errors import BasculeError
from bascule.server.connection_reset import consumers_of, reset_connection, rollback_loses_messages
from bascule.server.links import PRODUCER_CREDIT, PRODUCER_CREDIT_LOW

if TYPE_CHECKING:
    from bascule.server.client import Client

#: A link that keeps fewer transactions than this does not look for the ones that are branches by now.
KEPT_MIN: Final = 16
#: A session of a reconnected client exists again after this time; a session that begins later is new.
RECOVERED_S = 5.0


class CoordinatorLink:
    """A client's link to the transaction coordinator."""

    __slots__ = (
        "_answered", "_asked", "_begun", "_declared", "_declared_max", "_first", "_interrupted", "_reset_due", "_waits", "client", "link",
    )  # fmt: skip

    def __init__(self, client: Client, link: ReceiverLink) -> None:
        self.client = client
        self.link = link
        self._declared: dict[bytes, LocalTransaction] = {}  # transactions by id; a connection may have a coordinator link for each session
        self._asked = self._answered = 0  # commits
        # A declare that is answered behind a commit: delivery id, transaction, and the number of commits before it.
        self._begun: tuple[int, bytes, int] | None = None
        self._declared_max = KEPT_MIN  # number of kept transactions at which those that are branches are dropped
        # The id of the transaction that an interruption may have affected: b"" before it, None after it.
        self._first: bytes | None = None
        if client.history is not None:
            self._first = b""
            client.first_transactions += 1
        soon = time.monotonic() - client.opened_s < RECOVERED_S
        self._interrupted = soon and client.history is not None and client.history.interrupted_s is not None
        self._reset_due = False  # the client is about to be reset
        self._waits = False  # waits for the end of its connection

    @property
    def in_first_transaction(self) -> bool:
        """Return whether an interruption may have occurred in the current transaction."""
        return self._first is not None

    def close(self, error: AmqpError) -> None:
        """Detach the link with this error before the broker closes the connection, if the first declare may be in flight.

        Qpid JMS (2.10, 1.16) that recovers from a break waits for the answer to that declare until ``jms.requestTimeout``, even if the
        connection has ended, and does not reconnect before. A detach ends the wait.
        """
        if self._first == b"":
            self.link.detach(error)

    def declare(self, delivery_id: int) -> None:
        """Begin a transaction.

        Qpid JMS sends the declare of the next transaction with each commit, and waits for both answers: they share a write to the socket.
        """
        if self._reset_due:
            self._reset_due = False
            self._waits = reset_connection(self.client, self.link)
        if self._waits:
            return
        if len(self._declared) >= self._declared_max:
            self._forget_branches()
        try:
            transaction = self.client.begin()
        except ResourceLimit as error:
            self._answer(delivery_id, error)
        else:
            self._declared[transaction.id] = transaction
            if self._first == b"":
                self._first = transaction.id
            if self._asked > self._answered and self._begun is None:
                self._begun = delivery_id, transaction.id, self._asked
            else:
                self.link.settle(delivery_id, Declared(transaction.id))
        self._renew_credit()

    def _renew_credit(self) -> None:
        if self.link.credit < PRODUCER_CREDIT_LOW:
            self.link.flow(PRODUCER_CREDIT)

    def _forget_branches(self) -> None:
        """Forget the transactions that have become branches. The next look comes after the number has doubled: it reads all of them."""
        open_transactions = self.client.transactions.held
        self._declared = {txn_id: declared for txn_id, declared in self._declared.items() if txn_id in open_transactions}
        self._declared_max = max(KEPT_MIN, 2 * len(self._declared))

    def plan_commit(self, txn_id: bytes) -> bool:
        """Plan the commit of a large transaction of this link. Return True once ``discharge`` may be called in this turn."""
        transaction = self.client.transactions.get(txn_id) if txn_id in self._declared and self.client.reset is None else None
        return transaction is None or transaction.suspended or self.client.engine.plan_commit(transaction)

    def discharge(self, delivery_id: int, txn_id: bytes, *, fail: bool) -> None:
        """Commit or roll back a transaction. A commit is answered when it is stored.

        A transaction belongs to the link that has declared it, and the end of the link rolls it back (AMQP 1.0 part 4, section 4.1).
        Another link, even of the same session, does not know its id. A transaction that a request has turned into a branch, or has rolled
        back, may be discharged with the matching outcome: Qpid JMS discharges every transaction. A suspended transaction that is discharged
        as a commit stays with the connection, for a later request.
        """
        self._renew_credit()
        if txn_id not in self._declared:
            self._answer(delivery_id, UnknownTransaction(f"there is no transaction {txn_id.hex():.64} on this link"))
            return
        if self.client.reset is not None:
            self._waits = True
            self.client.reset.hold(self.link, txn_id)
            return
        declared = self._declared.pop(txn_id)
        leaves = declared.suspended and not fail
        transaction = None if leaves else self.client.transactions.pop(txn_id, None)
        engine = self.client.engine
        if self._first is not None and txn_id == self._first:
            session = self.link.session
            self._reset_due = (
                fail
                and transaction is not None
                and rollback_loses_messages(self.client, session, transaction, interrupted=self._interrupted)
            )
            self._first_is_over()
            for consumer in consumers_of(self.client, session):
                consumer.spend_all()
        if leaves or (transaction is None and declared.handed_over is not fail):
            engine.journaling.tell(self._answer, delivery_id, None)  # a request to the management node has ended it with the same outcome
        elif transaction is None:
            self._answer(delivery_id, UnknownTransaction(f"transaction {txn_id.hex()} has already ended with the opposite outcome"))
        elif fail:
            engine.rollback(transaction)
            self._answer(delivery_id, None)
        else:
            self._asked += 1
            engine.commit(transaction, partial(self._committed, delivery_id))

    def _committed(self, delivery_id: int, error: BasculeError | None) -> None:
        self._answered += 1
        self._answer(delivery_id, error)
        if self._begun is not None and self._answered >= self._begun[2]:
            (declare, txn_id, _), self._begun = self._begun, None
            self.link.settle(declare, Declared(txn_id))

    def abandon(self) -> None:
        """Roll back the transactions of a detached link (AMQP 1.0 part 4, section 4.1)."""
        popped = [self.client.transactions.pop(txn_id, None) for txn_id in self._declared]
        self._declared.clear()
        self.client.engine.rollback_all([transaction for transaction in popped if transaction is not None])
        self._first_is_over()

    def _first_is_over(self) -> None:
        if self._first is not None:
            self._first = None
            self.client.first_transactions -= 1

    def _answer(self, delivery_id: int, error: BasculeError | None) -> None:
        told = None if error is None else amqp_error(error)
        self.link.settle(delivery_id, ACCEPTED if told is None else Rejected(Error(told.condition, told.description)))
        self.client.touch()


def in_first_transaction(client: Client, session: Session) -> bool:
    """Return whether a session is transacted, and an interruption may have occurred in its current transaction."""
    contexts = (link.context for link in client.links.of(session))
    return any(isinstance(context, CoordinatorLink) and context.in_first_transaction for context in contexts)
