"""Reset the connection of a client that has lost track of its prefetched messages.

A transacted session of Qpid JMS (2.10 and 1.16) keeps its transaction over a failover, and can only roll it back. Its
prefetched messages on the new connection are then handled wrongly, with any broker:

* ``commit``, when the application has received something on the new connection: what waits in the client's buffer is released and
  stays in the buffer. It comes to the application twice, and the first time no acknowledgement is sent: that commit counts for nothing.
* ``rollback``, when it has received nothing there: the buffer is emptied and nothing released. Those messages come to nobody.
* An operation of the session was under way when the connection came back: the session has no transaction until that has ended, and what
  the application receives meanwhile is never settled.

A client whose connection ends forgets its buffer. So this broker ends the connection at the moment when the client goes wrong, while its
application still waits for the answer of ``commit`` or ``rollback``; ``failover:`` reconnects at once, and the messages are redelivered.
The broker recognises the moment:

* ``rollback`` uses up or gives back the credit of all consumers of its session first; ``commit`` does not. For credit that is left to say
  so for certain, a consumer keeps one of its credits unused while its session is in its first transaction. No credit left says nothing.
* A session that goes on declares its next transaction with the discharge; one that is closed does not.
* A session that was not interrupted attaches its coordinator before any consumer.

The other sessions of the connection are interrupted with it, and must not go wrong in their turn: see :class:`ConnectionReset`.
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

#: How long the other sessions of a connection may take to come to the end of their transactions; twice as long each time that the
#: connection is reset, so that it is long enough at last.
FINISH_S: Final = 5.0
#: Between two looks whether they have: what they hold may also be rolled back by time.
LOOK_S: Final = 1.0
#: A client whose connection was reset so often after one interruption is in doubt each time: its application begins its transactions
#: with a send, at once, which the client takes while it is not connected. The consumers of such a session are ended, as an application
#: notices.
RESETS_MAX: Final = 5
LOST = AmqpError(
    ILLEGAL_STATE, "the client has lost track of the messages that it received before a rollback; close and recreate the consumer"
)


class ConnectionReset:
    """The reset of a connection for a session that has lost track; it waits until no other session is in the middle of a transaction.

    A session that is cut off in its transaction would lose track itself. One that waits for the answer of its commit does not: the client
    tells it truthfully that it is rolled back, and begins with nothing. So who commits now is kept waiting, until all do that have begun.
    """

    def __init__(self, client: Client, resets: int) -> None:
        """``resets`` counts how often the broker has reset this client's connection since one interruption."""
        self._client = client
        self._waiting: set[str] = set()
        self._held: set[bytes] = set()
        self._loop = asyncio.get_running_loop()
        self._until_s = self._loop.time() + FINISH_S * 2**resets
        self._next = self._loop.call_later(LOOK_S, self._look)

    def hold(self, coordinator: Link, txn_id: bytes = b"") -> None:
        """A session waits: for the end of this transaction, or with none."""
        self._waiting.add(coordinator.name)
        self._held.add(txn_id)
        self._check()

    def drop(self) -> None:
        """The connection has ended."""
        self._next.cancel()

    def _look(self) -> None:
        self._next = self._loop.call_later(LOOK_S, self._look)
        self._check()

    def _check(self) -> None:
        """End the connection if nobody is in the middle of anything. What was asked for before is stored and answered first."""
        open_ = self._client.transactions.values()
        idle = all(each.id in self._held or not (each.acks or each.drafts) for each in open_)
        if idle or self._loop.time() >= self._until_s:
            self._client.engine.journaling.tell(self._client.close_for_reset, frozenset(self._waiting))


def reset_connection(client: Client, coordinator: Link) -> bool:
    """Reset the connection of a session that has lost track. Return False after RESETS_MAX: its consumers are ended then."""
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
    """Whether a session that attaches its coordinator now was interrupted, and has lost track of messages it was given without one.

    One that waited for an answer when its connection was ended has not: its client repeats the attach by itself.
    """
    if client.history is None or link.name in client.history.waited:
        return False
    return any(each.consumer is not None and each.consumer.unacked for each in consumers_of(client, link.session))


def rollback_loses_messages(client: Client, session: Session, transaction: LocalTransaction, *, interrupted: bool) -> bool:
    """Whether a client that rolls a session's first transaction back has messages which it then releases and keeps, or keeps and forgets.

    ``interrupted``: its session may have been. Without it, only what is certain counts.
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
    """The consumers of a session."""
    return [link.context for link in client.links.of(session) if isinstance(link.context, ConsumerLink)]
