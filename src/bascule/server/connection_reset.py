"""Reset of the connection of a client that no longer tracks its prefetched messages.

A transacted session of Qpid JMS (2.10 and 1.16) keeps its transaction over a failover, and can only roll it back. Its prefetched messages
on the new connection are then handled wrongly, with any broker:

* ``commit``, if the application has received a message on the new connection: the messages in the client's buffer are released and
  stay in the buffer. The application receives them twice, and the first time no acknowledgement is sent, so that commit has no effect.
* ``rollback``, if it has received none there: the buffer is emptied and nothing is released. Nobody receives those messages.
* An operation of the session was running when the connection came back: the session has no transaction until the operation has ended, and
  messages that the application receives meanwhile are never settled.

A client whose connection ends forgets its buffer. Therefore the broker ends the connection at the moment when the client goes wrong, while
its application still waits for the answer of ``commit`` or ``rollback``; ``failover:`` reconnects at once, and the messages are
redelivered. The broker recognises the moment by these signs:

* ``rollback`` first uses up or returns the credit of all consumers of its session; ``commit`` does not. To make remaining credit a certain
  sign, a consumer keeps one of its credits unused while its session is in its first transaction. No remaining credit proves nothing.
* A session that continues declares its next transaction with the discharge; one that is closed does not.
* A session that was not interrupted attaches its coordinator before any consumer.

The other sessions of the connection are interrupted with it, and must not go wrong in turn: see :class:`ConnectionReset`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from bascule.amqp.errors import ILLEGAL_STATE, AmqpError
from bascule.amqp.link import Link
from bascule.amqp.session import Session
from bascule.broker.transactions import LocalTransaction
from bascule.core.log import get_log
from bascule.server.links import ConsumerLink

if TYPE_CHECKING:
    from bascule.server.client import Client

_log = get_log(__name__)

#: How long the other sessions of a connection may take to end their transactions. The time doubles with each reset of the connection, so
#: that it becomes long enough.
FINISH_S: Final = 5.0
#: Interval of the check whether they have ended: a timeout may also roll back what they hold.
LOOK_S: Final = 1.0
#: After this many resets since one interruption, the broker ends the consumers of the session instead, which the application notices.
#: Resets do not help an application that begins each transaction at once with a send: the client accepts the send while it is not
#: connected, so each connection begins in doubt again.
RESETS_MAX: Final = 5
LOST = AmqpError(
    ILLEGAL_STATE, "the client has lost track of the messages that it received before a rollback; close and recreate the consumer"
)


class ConnectionReset:
    """The pending reset of a connection. It waits until no other session is in the middle of a transaction.

    A session that is cut off in its transaction would go wrong itself. A session that waits for the answer of its commit does not: the
    client reports correctly that the transaction is rolled back, and begins with an empty buffer. Therefore commits are held until all
    transactions that have begun wait for their commit.
    """

    def __init__(self, client: Client, resets: int) -> None:
        """Begin a reset. ``resets`` is the number of resets of this client's connection since one interruption."""
        self._client = client
        self._waiting: set[str] = set()
        self._held: set[bytes] = set()
        self._loop = asyncio.get_running_loop()
        self._until_s = self._loop.time() + FINISH_S * 2**resets
        self._next = self._loop.call_later(LOOK_S, self._look)

    def hold(self, coordinator: Link, txn_id: bytes = b"") -> None:
        """Hold the answer of a session that ends this transaction, or that has none."""
        self._waiting.add(coordinator.name)
        self._held.add(txn_id)
        self._check()

    def drop(self) -> None:
        """Cancel the reset, because the connection has ended."""
        self._next.cancel()

    def _look(self) -> None:
        self._next = self._loop.call_later(LOOK_S, self._look)
        self._check()

    def _check(self) -> None:
        """End the connection if no other session is in a transaction. Earlier requests are stored and answered first."""
        open_ = self._client.transactions.values()
        idle = all(each.id in self._held or not (each.acks or each.drafts) for each in open_)
        if idle or self._loop.time() >= self._until_s:
            self._client.engine.journaling.tell(self._client.close_for_reset, frozenset(self._waiting))


def reset_connection(client: Client, coordinator: Link) -> bool:
    """Reset the connection of a session that went wrong. Return False after RESETS_MAX resets: its consumers are then ended."""
    resets = client.history.resets if client.history is not None else 0
    if resets < RESETS_MAX:
        if client.reset is None:
            client.reset = ConnectionReset(client, resets)
        client.reset.hold(coordinator)
        return True
    _log.warning("consumers ended", peer=client.peer, container=client.container, reason=LOST, resets=RESETS_MAX)
    for each in consumers_of(client, coordinator.session):
        client.end_link(each.link, LOST)
    return False


def attached_late(client: Client, link: Link) -> bool:
    """Return True if a session that attaches its coordinator now was interrupted, and no longer tracks messages that it got without one.

    A session that waited for an answer when its connection was ended is no such case: its client repeats the attach by itself.
    """
    if client.history is None or link.name in client.history.waited:
        return False
    return any(each.consumer is not None and each.consumer.unacked for each in consumers_of(client, link.session))


def rollback_loses_messages(client: Client, session: Session, transaction: LocalTransaction, *, interrupted: bool) -> bool:
    """Return True if the client would lose messages by rolling back a session's first transaction.

    It loses messages that it releases and keeps in its buffer, or that it keeps and forgets. ``interrupted``: the session may have been
    interrupted. If it is false, only certain signs count.
    """
    worked = {consumer for consumer, _ in transaction.acks}
    for each in consumers_of(client, session):
        if each.consumer is None or not each.consumer.unacked:
            continue
        if each.consumer in worked:
            if each.has_credit or (interrupted and not each.gave_back):
                return True
        elif interrupted and not each.has_credit:
            return True
    return False


def consumers_of(client: Client, session: Session) -> list[ConsumerLink]:
    """Return the consumers of a session."""
    return [link.context for link in client.links.of(session) if isinstance(link.context, ConsumerLink)]
