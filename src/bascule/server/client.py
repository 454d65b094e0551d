"""The server side of one client: its engine, identity and permissions, and the links and transactions that it holds.

Links, attach, coordinator and management use only this class of a client. The connection behind it transports bytes.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

from bascule.amqp.errors import CONNECTION_FORCED, DETACH_FORCED, AmqpError
from bascule.amqp.link import Link
from bascule.amqp.sasl import SaslServer
from bascule.amqp.session import Session
from bascule.broker.containment import ErrorKind
from bascule.broker.errors import QueueFull, ResourceLimit, UnknownTransaction
from bascule.broker.policy import Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.transactions import LocalTransaction
from bascule.core.destination import Routing
from bascule.core.log import get_log
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission, Unauthorized
from bascule.server.allowance import UNLIMITED_SENDING
from bascule.server.attach import detached
from bascule.server.client_links import ClientLinks
from bascule.server.connection_room import UserRoom
from bascule.server.coordinator import CoordinatorLink
from bascule.server.interruptions import ConnectionHistory
from bascule.server.links import WRITE_BUFFER_BYTES, BrowserLink, ConsumerLink, ProducerLink
from bascule.server.traced_links import dispositions_of
from bascule.server.usage import Holdings, UserUsage
from bascule.server.user_ids import UserIdRule

if TYPE_CHECKING:
    from bascule.broker.engine import Engine
    from bascule.server.connection_reset import ConnectionReset
    from bascule.server.management import Request
    from bascule.server.node import Node

_log = get_log(__name__)

#: The SASL mechanism of clients without a login.
ANONYMOUS: Final = "ANONYMOUS"

#: Lifetime of a session beyond its user's limit, if it attaches no link.
REFUSED_SESSION_S = 1.0
#: The client receives this error when the broker resets its connection because of an interrupted transaction.
CONNECTION_RESET = AmqpError(
    CONNECTION_FORCED, "connection closed to reset an interrupted transaction; reconnect, prefetched messages will be redelivered"
)
#: Why a message was refused that arrived on an ended link.
LINK_ENDED = AmqpError(DETACH_FORCED, "the link has ended")

_transaction_ids = itertools.count(1)


class ClientTransport(Protocol):
    """The connection of a client, as its server side sees it."""

    peer: str

    def touch(self) -> None:
        """Note that there may be output."""

    def send_output(self) -> None:
        """Write the output."""

    def close(self, error: AmqpError | None) -> None:
        """End the connection with an error for the client."""

    def later(self, action: Callable[[], None]) -> None:
        """Call ``action`` in the next turn of the event loop."""


class Client:
    """One client of one broker.

    ``engine`` is the engine of the epoch in which the client opened its connection; it does not outlive that epoch.
    """

    def __init__(self, server: Node, wire: ClientTransport) -> None:
        self._server = server
        self.permissions = server.permissions
        self.audit = server.audit
        self.tracing = server.tracing
        self._wire = wire
        self.engine: Engine = server.engine
        self.touch = wire.touch
        self.user = ""
        self.login = ""  # the user; "" if the client has connected without a login
        self.mechanism = ""  # SASL mechanism of the login
        self.user_ids: UserIdRule | None = None  # for the messages of the client
        self.login_until_s = math.inf  # end of the login, in seconds since 1970
        self.container = ""
        self.opened_s = 0.0  # by the monotonic clock
        self._usage: UserUsage | None = None  # of the client's user, once the connection is open
        self.room: UserRoom | None = None  # the memory of this user's connections
        self.sending = UNLIMITED_SENDING
        self.history: ConnectionHistory | None = None  # of a client that may have reconnected
        self.reset: ConnectionReset | None = None
        self.first_transactions = 0  # number of transactions that may have been interrupted
        self.lost = False  # the socket is closed
        self.ended = False  # the broker has ended the connection
        self.leaving = False  # the client has left, and its links are being released in slices
        self.full = False  # consumers wait until the socket has taken their messages
        self.given_bytes = 0  # bytes for consumers since the last write
        self.sessions: Holdings[Session, None] = Holdings()
        self._refused_sessions: dict[Session, AmqpError] = {}
        self.links = ClientLinks()
        self.temporary: dict[Link, str] = {}  # temporary destinations, by the link that keeps them
        self.unsubscribing: dict[Link, BrokerQueue] = {}
        self.transactions: Holdings[bytes, LocalTransaction] = Holdings()
        self.dispositions = dispositions_of(self)
        self.management_request: Request | None = None  # the request that is being planned
        self._gone = False  # the client gets no more messages
        self._waking = self._wake_again = False  # all links, in slices

    def logged_in(self, sasl: SaslServer) -> None:
        """Note who the client is. A token gives roles, and has an end."""
        self.user, self.mechanism = sasl.user or "", sasl.mechanism
        self.login = "" if self.mechanism == ANONYMOUS else self.user
        self.user_ids = UserIdRule.of(self._server.validated_user, self.login)
        if sasl.identity is not None:
            self.permissions = self.permissions.with_roles(sasl.identity.roles)
            self.login_until_s = sasl.identity.until_s

    @property
    def login_left_s(self) -> float:
        """Return the seconds until the end of the client's token; infinite without a token, and once the connection has ended."""
        return math.inf if self.ended else self.login_until_s - time.time()

    def opened(self, properties: Mapping[Any, Any] | None, usage: UserUsage) -> None:
        """Note that the client has opened its connection, with the properties of its open frame.

        Sessions, links and transactions of the client count towards ``usage``.
        """
        self.sessions.tally, self.links.tally, self.transactions.tally = usage.sessions, usage.links, usage.transactions
        self._usage, self.sending, self.room = usage, usage.sending, usage.room
        self.engine = self._server.engine
        self.opened_s = time.monotonic()
        self.history = self._server.interruptions.opened(self.user, self.container, properties)
        self._record("login", self.container, mechanism=self.mechanism)

    def refused(self, error: AmqpError) -> None:
        """Note that the connection is refused after the login. Everything that the client has sent behind its open is ignored."""
        self.ended = True
        self._record("login", self.container, allowed=False, result=error.description, mechanism=self.mechanism)

    def log_end(self, error: AmqpError | None) -> None:
        """Log why the connection ends; before its login, unless there were many such lines about its address."""
        if self.opened_s or self.audit.may_log(self.peer):
            _log.info("connection closed", peer=self.peer, container=self.container, error=error)

    def _record(self, action: str, on: str, **fields: Any) -> None:
        self.audit.record(action, on, who=self.user, peer=self.peer, **fields)

    # -- the broker, as this client sees it --------------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """Return the owner's settings."""
        return self.engine.policy

    @property
    def peer(self) -> str:
        """Return HOST:PORT of the client."""
        return self._wire.peer

    @property
    def broker_id(self) -> str:
        """Return the container id of the broker."""
        return self._server.container_id

    @property
    def max_message_bytes(self) -> int:
        """Return the size in bytes of the largest message that the client may send."""
        of_user, of_broker = 0 if self._usage is None else self._usage.message_bytes_max, self._server.max_message_bytes
        return min(of_user, of_broker) if of_user else of_broker

    def authorize(self, permission: Permission, address: str) -> None:
        """Check a permission of the client's user on an address. Raises Unauthorized, AuditUnavailable."""
        self.audit.check()
        try:
            self.permissions.authorize(self.user, permission, address)
        except Unauthorized as error:
            self._record(permission.value, address, allowed=False, result=str(error))
            raise

    def changing(self) -> AbstractContextManager[None]:
        """Return a context in which the client creates and deletes queues, for the audit."""
        return self.audit.changing(self.user, self.peer)

    def unsubscribed(self, queue: BrokerQueue) -> None:
        """Delete a durable subscription for the client."""
        self._record("unsubscribe", queue.name)
        with self.changing():
            self.engine.delete_queue(queue)

    def authorize_sending(self, address: str, routing: Routing) -> None:
        """Check the permissions to send to an address, and to create it if it does not exist. Raises Unauthorized."""
        self.authorize(Permission.SEND, address)
        self.authorize_creation(address, routing)

    def authorize_creation(self, address: str, routing: Routing) -> None:
        """Check the permissions to create an address and its queue, if they do not exist. Raises Unauthorized."""
        if self.engine.addresses.knows(address, routing):
            return
        self.authorize(Permission.CREATE_ADDRESS, address)
        if routing is Routing.ANYCAST:
            self.authorize(Permission.CREATE_DURABLE_QUEUE, address)

    def check_relay(self, address: str, routing: Routing) -> None:
        """Check a message of an anonymous producer, which credit cannot stop because each message names its own address.

        Raises Unauthorized, UnknownAddress, QueueFull, ResourceLimit.
        """
        if address == MANAGEMENT_ADDRESS:
            self.authorize(Permission.MANAGE, address)
            return
        self.authorize_sending(address, routing)
        engine = self.engine
        if routing is Routing.MULTICAST:
            engine.check_topic(address)
        elif address not in engine.addresses.anycast:
            with self.changing():
                engine.queue(address, self.user)
        if not engine.room.exists(address, routing):
            raise QueueFull(f"{address!r} is full")

    def check_creation(self, address: str) -> None:
        """Create the queue of a producer again, if it was deleted after the producer attached.

        Raises Unauthorized, ResourceLimit.
        """
        if address != MANAGEMENT_ADDRESS:
            self.authorize_creation(address, Routing.ANYCAST)
            with self.changing():
                self.engine.queue(address, self.user)

    # -- output ------------------------------------------------------------------------------------------------------

    def send_output(self) -> None:
        """Write the output for the client."""
        self._wire.send_output()

    def given(self, size_bytes: int) -> None:
        """Note that a consumer of the client got a message of this size."""
        if not self.given_bytes:  # the first one since the last write
            self.touch()
        self.given_bytes += size_bytes
        if self.given_bytes > WRITE_BUFFER_BYTES:
            self.full = True

    def wake(self, link: Link) -> None:
        """Send waiting messages to a link, or grant it credit, because its credit has changed or the client reads again."""
        context = link.context
        if isinstance(context, ConsumerLink) and context.consumer is not None:
            self.engine.wake(context.consumer.queue, context.consumer)
        elif isinstance(context, BrowserLink):
            context.pump()
        elif isinstance(context, ProducerLink):
            context.top_up()

    def wake_all(self) -> None:
        """Resume all links after the output for the client was written, in slices, because there may be thousands."""
        if self._gone:
            return
        self.full, self._wake_again = False, True
        if not self._waking:
            self._waking = True
            self._server.client_turns.in_slices(self._wake_links(), self._server.dispatch)
        self._server.dispatch()

    def _wake_links(self) -> Iterator[None]:
        while self._wake_again and not self._gone:
            self._wake_again = False
            for link in list(self.links):
                self._server.errors.run(ErrorKind.LINK, self.wake, link)
                yield
        self._waking = False

    def end_link(self, link: Link, error: AmqpError) -> None:
        """End one link from the broker's side, with an error."""
        self.links.pop(link, None)
        detached(self, link, closed=True)
        link.detach(error)
        self.touch()

    # -- sessions and transactions -----------------------------------------------------------------------------------

    def drop_request(self) -> None:
        """Drop the management request that is being planned, if any."""
        request, self.management_request = self.management_request, None
        if request is not None:
            request.drop()

    def begin_session(self, session: Session) -> None:
        """Note that a session begins. A session beyond the user's limit ends with its first attach, or soon.

        It does not end at once: Qpid JMS waits for ever for a link of a session whose end directly follows its begin.
        """
        try:
            self.sessions.tally.check()
        except ResourceLimit as error:
            self._refused_sessions[session] = AmqpError(error.condition, str(error))
            asyncio.get_running_loop().call_later(REFUSED_SESSION_S, self._end_refused, session)
        else:
            self.sessions[session] = None

    def refuse_link(self, link: Link) -> None:
        """Refuse an attach on a session that was refused, or that has ended."""
        refusal = self._refused_sessions.get(link.session)
        if refusal is not None:
            link.refuse(refusal)
            self._wire.later(partial(self._end_refused, link.session))

    def _end_refused(self, session: Session) -> None:
        refusal = self._refused_sessions.pop(session, None)
        if refusal is not None and not self.lost:
            session.end(refusal)
            self.send_output()

    def begin(self) -> LocalTransaction:
        """Begin a transaction of this connection. Raises ResourceLimit.

        No later broker uses the same transaction id: a client with ``failover:`` may repeat a request about it to the next broker.
        """
        self.transactions.tally.check()
        transaction = self.engine.begin(b"%x.%x" % (self.engine.journaling.epoch, next(_transaction_ids)), self.user)
        self.transactions[transaction.id] = transaction
        return transaction

    def transaction(self, txn_id: bytes) -> LocalTransaction:
        """Return the open transaction with this id. Raises UnknownTransaction."""
        transaction = self.transactions.held.get(txn_id)
        if transaction is None:
            raise UnknownTransaction(f"there is no transaction {txn_id.hex()} on this connection")
        return transaction

    def lose_message(self, txn_id: bytes | None, error: AmqpError | None = None) -> None:
        """Note that a message arrived on an ended link, or ended its link. The message gets no outcome.

        Its transaction, if any, can only be rolled back.
        """
        transaction = None if txn_id is None else self.transactions.get(txn_id)
        if transaction is not None:
            self.engine.message_refused(transaction, error or LINK_ENDED)

    # -- the end -----------------------------------------------------------------------------------------------------

    def end_session(self, session: Session, *, orderly: bool = False) -> None:
        """Release a session that has ended, with its links. ``orderly``: the client has ended it without an error."""
        tells = orderly and self._tells(session)
        self.sessions.pop(session, None)
        self._refused_sessions.pop(session, None)
        for link in self.links.of(session):
            del self.links[link]
            self._server.errors.run(ErrorKind.LINK, self._release_link, link, False, tells)
        self.dispositions.end_range()  # after the messages of the range have returned with their link

    def release(self, *, failed: bool = False, orderly: bool = False) -> None:
        """Take back everything that the client holds: in slices, because it may have thousands of links. ``leaving`` is set until then.

        ``failed``: the connection broke, perhaps because of a delivered message. ``orderly``: the client closed it without an error.
        """
        if failed:
            self.interrupted()
        if self.reset is not None:
            self.reset.drop()
            self.reset = None
        if self._gone:
            return
        self._gone = self.full = self.leaving = True
        self.sessions.uncount()
        self.links.uncount()
        self.transactions.uncount()
        self._server.container_ids.leaves(self.container)
        self.drop_request()
        self._refused_sessions.clear()
        telling = {session for session in self.sessions if self._tells(session)} if orderly else set()
        self._server.client_turns.in_slices(self._release_all(failed, telling), self._server.dispatch, awaited=True)

    def _release_all(self, failed: bool, telling: set[Session]) -> Iterator[None]:
        """Release links and transactions one by one. Until all messages are back, their queues deliver none: one would overtake others.

        ``telling``: sessions that have ended in order.
        """
        returned = self.engine.return_range()
        try:
            for queue in self._queues():
                returned.hold(queue)
            yield
            for link in list(self.links):
                del self.links[link]
                self._server.errors.run(ErrorKind.LINK, self._release_link, link, failed, link.session in telling)
                yield
            self.dispositions.end_range()
            self.sessions.clear()
            for name in list(self.transactions):
                self._server.errors.run(ErrorKind.COMMIT, self.engine.rollback, self.transactions.pop(name))
                yield
        finally:
            returned.end()
            self.leaving = False
            self._server.container_ids.left(self.container)
            self.touch()

    def _queues(self) -> Iterator[BrokerQueue]:
        """Yield the queues of the messages that the client holds."""
        for link in self.links:
            if isinstance(link.context, ConsumerLink) and link.context.consumer is not None and link.context.consumer.unacked:
                yield link.context.consumer.queue
        for transaction in self.transactions.values():
            yield from transaction.queues

    def _release_link(self, link: Link, failed: bool, told: bool) -> None:
        context = link.context
        if failed and isinstance(context, ConsumerLink):
            context.fail_oldest()
        detached(self, link, closed=False, orderly=told and not (isinstance(context, ConsumerLink) and context.selective))

    def _tells(self, session: Session) -> bool:
        """Return True if the client settles all messages that its application has seen before it ends a session.

        Qpid JMS does so in every mode of JMS: an unacknowledged message is modified with a failed delivery, or is part of a transaction
        that is rolled back. There are two exceptions: a session whose transaction was interrupted and not ended, and Qpid's own mode of
        individual acknowledgement (see ConsumerLink.selective). For other clients the result is False.
        """
        if self.history is None or session not in self.sessions:
            return False
        contexts = (link.context for link in self.links.of(session))
        return not any(isinstance(each, CoordinatorLink) and each.in_first_transaction for each in contexts)

    def close_coordinators(self, error: AmqpError) -> None:
        """Close the coordinator links before the connection ends with an error: see CoordinatorLink.close."""
        for link in self.links:
            if isinstance(link.context, CoordinatorLink):
                link.context.close(error)

    def interrupted(self) -> None:
        """Note that the connection ends without a request of the client."""
        if self.history is not None and not self.ended:
            self._server.interruptions.lost(self.user, self.container, self.history)

    def close_for_reset(self, waiting: frozenset[str]) -> None:
        """Close the connection of a client that no longer tracks its messages (bascule.server.connection_reset), so that it reconnects.

        ``waiting`` are coordinator links whose sessions wait for an answer.
        """
        history = self.history
        if history is None or self.lost or self.ended:
            return
        _log.info("connection reset", peer=self.peer, container=self.container, reason=CONNECTION_RESET)
        unheard = history.waited - {link.name for link in self.links}
        self._wire.close(CONNECTION_RESET)
        self._server.interruptions.lost(self.user, self.container, history, waiting | unheard)
        self._wire.later(self._server.dispatch)  # other clients may get the messages that this client held
