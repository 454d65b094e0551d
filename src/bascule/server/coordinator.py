"""The link to the transaction coordinator (AMQP 1.0 part 4), and clients that lose track of their messages there.

A transacted session of Qpid JMS (2.10 and 1.16) keeps its transaction over a failover, and can only roll it back. With what it was sent
ahead on the new connection it then goes wrong, whatever the broker:

* ``commit``, when the application has received something on the new connection: what waits in the client's buffer is released and
  stays in the buffer. It comes to the application twice, and the first time no acknowledgement is sent: that commit counts for nothing.
* ``rollback``, when it has received nothing there: the buffer is emptied and nothing released. Those messages come to nobody.
* An operation of the session was under way when the connection came back: the session has no transaction until that has ended, and what
  the application receives meanwhile is never settled.

A client whose connection ends forgets its buffer. So this broker ends the connection at the moment when the client goes wrong, while its
application still waits for the answer of ``commit`` or ``rollback``; ``failover:`` connects again at once, and all messages come once more.
The moment shows:

* A rollback by the application uses up or gives back the consumer's credit first; one for ``commit`` does not. For this to be sure, a
  consumer keeps one of its credits unused while its session is in its first transaction.
* A session that goes on declares its next transaction with the discharge; one that is closed does not.
* A session that was not interrupted attaches its coordinator before any consumer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from bascule.amqp.link import ReceiverLink
from bascule.amqp.performatives import ACCEPTED, Declared, Error, Rejected
from bascule.amqp.session import Session
from bascule.broker.errors import UnknownTransaction
from bascule.broker.transactions import Transaction
from bascule.core.errors import BasculeError
from bascule.server.interruptions import Past
from bascule.server.links import PRODUCER_CREDIT, ConsumerLink

if TYPE_CHECKING:
    from bascule.server.connection import ClientConnection


class CoordinatorLink:
    """A client's link to the transaction coordinator."""

    __slots__ = ("_declared", "_first", "_lost_track", "connection", "link")

    def __init__(self, connection: ClientConnection, link: ReceiverLink) -> None:
        self.connection = connection
        self.link = link
        self._declared: set[bytes] = set()  # a connection has a coordinator link for each of its sessions
        self._first: bytes | None = None if connection.past is Past.OTHER else b""  # transaction, b"" before it, None behind it
        self._lost_track = False  # the client, of messages that it has

    @property
    def in_first_transaction(self) -> bool:
        """Whether this is the transaction that an interruption may have fallen into."""
        return self._first is not None

    def declare(self, delivery_id: int) -> None:
        """Begin a transaction."""
        if self._lost_track:
            self.connection.begin_anew(self.link)
            return
        self._declared &= self.connection.transactions.keys()  # without those that have become branches
        transaction = self.connection.begin()
        self._declared.add(transaction.id)
        if self._first == b"":
            self._first = transaction.id
        self.link.settle(delivery_id, Declared(transaction.id))
        self.link.flow(PRODUCER_CREDIT)

    def discharge(self, delivery_id: int, txn_id: bytes, *, fail: bool) -> None:
        """Commit, or roll back. The answer to a commit comes when it is stored."""
        transaction = self.connection.transactions.pop(txn_id, None)
        self._declared.discard(txn_id)
        engine = self.connection.server.engine
        if self._first is not None and txn_id == self._first:
            self._lost_track = fail and transaction is not None and _loses_track(self.connection, self.link.session, transaction)
            self._first_is_over()
        if transaction is None:
            self._answer(delivery_id, UnknownTransaction(f"no transaction {txn_id.hex()} on this connection"))
        elif fail:
            engine.rollback(transaction)
            self._answer(delivery_id, None)
        else:
            engine.commit(transaction, lambda error: self._answer(delivery_id, error))

    def abandon(self) -> None:
        """The link is gone: what was begun on it is rolled back (AMQP 1.0 part 4, section 4.3)."""
        for txn_id in self._declared:
            transaction = self.connection.transactions.pop(txn_id, None)
            if transaction is not None:
                self.connection.server.engine.rollback(transaction)
        self._declared.clear()

    def _first_is_over(self) -> None:
        self._first = None
        for consumer in _consumers(self.connection, self.link.session):
            consumer.spend_all()

    def _answer(self, delivery_id: int, error: BasculeError | None) -> None:
        self.link.settle(delivery_id, ACCEPTED if error is None else Rejected(Error(error.condition, str(error))))
        self.connection.touch()


def in_first_transaction(connection: ClientConnection, session: Session) -> bool:
    """Whether a session is transacted, and in the transaction that an interruption may have fallen into."""
    contexts = (link.context for link in connection.links if link.session is session)
    return any(isinstance(context, CoordinatorLink) and context.in_first_transaction for context in contexts)


def comes_late(connection: ClientConnection, link: ReceiverLink) -> bool:
    """Whether a session that attaches its coordinator now was interrupted, and has lost track of messages it was given without one.

    One that has just been told to begin anew has not: its client repeats this attach, as often as it is told to.
    """
    if connection.past is Past.OTHER or link.name in connection.begun_anew:
        return False
    return any(each.consumer is not None and each.consumer.unacked for each in _consumers(connection, link.session))


def _loses_track(connection: ClientConnection, session: Session, transaction: Transaction) -> bool:
    """Whether a client that rolls its first transaction back has messages which it then releases and keeps, or keeps and forgets."""
    interrupted = connection.past is Past.INTERRUPTED
    worked = {consumer for consumer, _ in transaction.acks}
    for each in _consumers(connection, session):
        if each.consumer is None or not each.consumer.unacked:
            continue
        if each.consumer not in worked:
            if interrupted:
                return True
        elif each.has_credit or (interrupted and not each.gave_back):
            return True
    return False


def _consumers(connection: ClientConnection, session: Session) -> list[ConsumerLink]:
    return [link.context for link in connection.links if link.session is session and isinstance(link.context, ConsumerLink)]
