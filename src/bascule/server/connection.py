"""One client connection: a socket on one side, the AMQP engine in the middle, the broker engine on the other."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import bascule
from bascule.amqp import events
from bascule.amqp.connection import Connection
from bascule.amqp.errors import CONNECTION_FORCED, INTERNAL_ERROR, INVALID_FIELD, NOT_ALLOWED, AmqpError
from bascule.amqp.link import Link
from bascule.amqp.performatives import Accepted, Modified, Rejected, Released, Role
from bascule.amqp.session import Session
from bascule.amqp.types import Symbol
from bascule.broker.engine import Engine
from bascule.broker.errors import QueueFull, UnknownTransaction
from bascule.broker.message import Message
from bascule.broker.queue import Consumer, Queue
from bascule.broker.transactions import Transaction
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.jms.sections import scan
from bascule.server import management
from bascule.server.attach import attach, detached, place_of_message, routing_at
from bascule.server.coordinator import CoordinatorLink
from bascule.server.interruptions import Past
from bascule.server.links import PRODUCER_CREDIT_LOW, BrowserLink, ConsumerLink, ProducerLink
from bascule.server.lost_track import BeginAnew
from bascule.server.tls import certified_name

if TYPE_CHECKING:
    from bascule.server.node import Node

log = logging.getLogger(__name__)

#: What waits in a socket's buffer before its consumers count as slow: they get nothing more until it has drained. A turn of the loop
#: gives a connection no more than that either.
WRITE_BUFFER_BYTES = 1 << 20
#: What a client that does not read may be answered before it is not read from either.
UNREAD_ANSWERS_BYTES = 1 << 20
CAPABILITIES = ("sole-connection-for-container", "ANONYMOUS-RELAY", "DELAYED_DELIVERY", "SHARED-SUBS")
#: How often heartbeats and idle time are looked at, at least.
TICK_S = 10.0

_transaction_ids = itertools.count(1)


class ClientConnection(asyncio.Protocol):
    """Turns AMQP events into broker commands; what the broker answers goes out once per turn of the loop."""

    def __init__(self, server: Node) -> None:
        self.server = server
        self.amqp: Connection  # once there is a transport: it may say who the client is
        self.container = ""
        self.opened_s = 0.0
        self.past: Past | None = None  # of a client that may have come back
        self.anew: BeginAnew | None = None
        self.first_transactions = 0  # of sessions that may have been interrupted
        self.ended = False  # by us
        self.peer = ""
        self.full = False  # what it has been given is to be written before its consumers get more
        self.lost = False
        self.links: dict[Link, None] = {}
        self.temporary: dict[Link, str] = {}  # temporary destinations, by the link that keeps them
        self.unsubscribing: dict[Link, Queue] = {}
        self.transactions: dict[bytes, Transaction] = {}
        self._given_bytes = 0  # to consumers, since the last write
        self._unread_answers_bytes = 0  # written while the client does not read
        self._stuck = False  # the client does not read
        self._transport: asyncio.Transport | None = None
        self._tick: asyncio.TimerHandle | None = None

    # -- the socket --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is there."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)  # type: ignore[attr-defined]
        self.peer = ":".join(map(str, transport.get_extra_info("peername")[:2]))
        server = self.server
        self.amqp = Connection(
            Role.SERVER, container_id=server.container_id, sasl=server.sasl(certified_name(transport)),
            idle_timeout_s=server.idle_timeout_s, require_sasl=True,
        )  # fmt: skip
        server.connections[self] = None
        self._ticking()

    def data_received(self, data: bytes) -> None:
        """Take frames in."""
        if not self.server.awake():
            return
        try:
            for event in self.amqp.receive(data, time.monotonic()):
                if not self.ended:
                    HANDLERS[type(event)](self, event)
        except Exception:
            # A fault of ours in one connection must not reach the others.
            log.exception("connection %s (%s)", self.peer, self.container)
            self.close(AmqpError(INTERNAL_ERROR, "the broker failed to handle a frame; its log says more"))
        self.touch()
        self.server.dispatch()
        if self.server.congested and self._transport is not None and not self.lost:
            self._transport.pause_reading()
            self.server.held_back[self] = None

    def read_on(self) -> None:
        """The broker has room again, or the client reads again: more is read where both are so."""
        unread = self._unread_answers_bytes > UNREAD_ANSWERS_BYTES
        if self._transport is not None and not self.lost and not unread and self not in self.server.held_back:
            self._transport.resume_reading()

    def touch(self) -> None:
        """There may be output."""
        self.server.touched[self] = None

    def send_output(self) -> None:
        """Write what the engine has to say."""
        data = self.amqp.data_to_send()
        given_bytes, self._given_bytes = self._given_bytes, 0
        if self._transport is not None and not self.lost:
            if data:
                self._transport.write(data)
                if self._stuck:
                    self._unread_answers_bytes += len(data)
                    if self._unread_answers_bytes > UNREAD_ANSWERS_BYTES:
                        self._transport.pause_reading()
            if given_bytes > WRITE_BUFFER_BYTES:
                asyncio.get_running_loop().call_soon(self._give_more)  # when the write has been tried
            if self.amqp.closed and not self._transport.is_closing():
                self._transport.close()
                # One that does not read would keep the socket, and with it what is yet to be written, for ever.
                self._later(self.amqp.limits.close_timeout_s, self._transport.abort)

    def pause_writing(self) -> None:
        """The client does not read."""
        self._stuck = self.full = True

    def resume_writing(self) -> None:
        """It reads again."""
        self._stuck = False
        self._unread_answers_bytes = 0
        self.read_on()
        self._give_more()

    def given(self, size_bytes: int) -> None:
        """A consumer has been given a message."""
        self._given_bytes += size_bytes
        if self._given_bytes > WRITE_BUFFER_BYTES:
            self.full = True

    def _give_more(self) -> None:
        """What had been given is written."""
        if not self._stuck and not self.lost:
            self.full = False
            for link in self.links:
                self.wake(link)
            self.server.dispatch()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """The client is gone, with or without a word."""
        self.lost = True
        if self._tick is not None:
            self._tick.cancel()
        self.server.connections.pop(self, None)
        self.server.touched.pop(self, None)
        self.release(failed=not self.amqp.closed)
        self.server.dispatch()

    def close(self, error: AmqpError | None) -> None:
        """End the connection from our side."""
        if error is not None:
            self._interrupted()
        self.ended = True
        self.amqp.close(error)
        self.release()
        self.send_output()

    def begin_anew(self, waiting: frozenset[str]) -> None:
        """The client has lost track of what it was sent (bascule.server.lost_track): it shall connect again, with nothing in its hands.

        ``waiting`` are coordinator links whose sessions expect an answer.
        """
        if self.past is not None and not self.lost and not self.ended:
            log.info("connection %s (%s): %s", self.peer, self.container, BEGIN_ANEW)
            unheard = self.past.waited - {link.name for link in self.links}
            self.close(BEGIN_ANEW)
            self.server.interruptions.lost(self.container, self.past, waiting | unheard)
            asyncio.get_running_loop().call_soon(self.server.dispatch)  # others may have what it held

    def end_link(self, link: Link, error: AmqpError) -> None:
        """End one link from our side."""
        self.links.pop(link, None)
        detached(self, link, closed=True)
        link.detach(error)
        self.touch()

    def _interrupted(self) -> None:
        if self.past is not None and not self.ended:
            self.server.interruptions.lost(self.container, self.past)

    def _ticking(self) -> None:
        now_s = time.monotonic()
        deadline_s = self.amqp.tick(now_s)
        self._later(min(TICK_S, max(deadline_s - now_s, 0.05)), self._ticking)
        if self.amqp.closed:
            # Its socket may take long to end, where it ends at all: others get at once what this client held.
            log.info("connection %s (%s): %s", self.peer, self.container, self.amqp.error)
            self.release(failed=True)
            self.server.dispatch()
        self.send_output()

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        """In place of what was to happen next by time."""
        if self._tick is not None:
            self._tick.cancel()
        self._tick = asyncio.get_running_loop().call_later(delay_s, do)

    def release(self, *, failed: bool = False) -> None:
        """Give everything back that the client held. ``failed``: it went without a word, perhaps for what it was given."""
        if failed:
            self._interrupted()
        if self.anew is not None:
            self.anew.drop()
            self.anew = None
        for link in list(self.links):
            if failed and isinstance(link.context, ConsumerLink):
                link.context.fail_oldest()
            detached(self, link, closed=False)
        self.links.clear()
        self.roll_back_all()

    # -- transactions ------------------------------------------------------------------------------------------------

    def begin(self) -> Transaction:
        """A new transaction of this connection.

        No later broker gives its name again: a client with ``failover:`` may repeat a request about it to the next one.
        """
        engine = self.server.engine
        transaction = engine.begin(b"%x.%x" % (engine.journaling.epoch, next(_transaction_ids)))
        self.transactions[transaction.id] = transaction
        return transaction

    def roll_back_all(self) -> None:
        """The connection is gone: so is what was open."""
        for transaction in self.transactions.values():
            self.server.engine.rollback(transaction)
        self.transactions.clear()

    # -- events ------------------------------------------------------------------------------------------------------

    def _opened(self, event: events.Opened) -> None:
        self.container = event.open.container_id
        properties: dict[Any, Any] = {
            Symbol("product"): "Bascule", Symbol("version"): bascule.__version__, Symbol("platform"): "Python",
        }  # fmt: skip
        if self.server.failover:
            # By symbols: under a string the Java client finds nothing.
            offered = [{Symbol(field): value for field, value in other.items()} for other in self.server.failover]
            properties[Symbol("failover-server-list")] = offered
        taken = any(other.container == self.container and other is not self and not other.amqp.closed for other in self.server.connections)
        if taken and "sole-connection-for-container" in event.open.desired_capabilities:
            properties[Symbol("amqp:connection-establishment-failed")] = True
            self.amqp.open(offered_capabilities=CAPABILITIES, properties=properties)
            info = {Symbol("invalid-field"): Symbol("container-id")}
            self.amqp.close(AmqpError(INVALID_FIELD, f"client id {self.container!r} is connected already", info))
            return
        self.amqp.open(offered_capabilities=CAPABILITIES, properties=properties)
        if self.server.reason:
            self.amqp.close(AmqpError(CONNECTION_FORCED, self.server.reason))
        else:
            self.opened_s = time.monotonic()
            self.past = self.server.interruptions.opened(self.container, event.open.properties)
        self._ticking()  # the client has said how often it wants to hear of us

    def _attached(self, event: events.Attached) -> None:
        link = event.link
        try:
            self.links[link] = None
            attach(self, link)
        except BasculeError as error:
            self.links.pop(link, None)
            link.context = None
            link.refuse(error if isinstance(error, AmqpError) else AmqpError(error.condition, str(error)))

    def _detached(self, event: events.Detached) -> None:
        self.links.pop(event.link, None)
        detached(self, event.link, closed=event.closed, orderly=event.error is None)

    def _session_ended(self, event: events.SessionEnded) -> None:
        for link in [link for link in self.links if link.session is event.session]:
            del self.links[link]
            detached(self, link, closed=False)

    def _closed(self, event: events.ConnectionClosed) -> None:
        if event.error is not None:
            log.info("connection %s (%s): %s", self.peer, self.container, event.error)
        if not event.by_peer:
            self._interrupted()
        self.release()

    def _transferred(self, event: events.Transferred) -> None:
        producer = event.link.context
        if not isinstance(producer, ProducerLink):
            return
        token = None if event.settled else (event.delivery_id, event.txn_id)
        try:
            facts = scan(event.payload)
            transaction = None if event.txn_id is None else self._transaction(event.txn_id)
            address, routing = producer.address, producer.routing
            if address is None or routing is None:
                place = place_of_message(facts.to, event.payload)
                address, routing = place.address, routing_at(self, place)
                self._check_relay(address, routing)
            if address == management.ADDRESS and transaction is not None:
                raise AmqpError(NOT_ALLOWED, f"a request to {address} is no part of a transaction")
        except BasculeError as error:
            producer.refused(token, error)
        else:
            if address == management.ADDRESS:
                self._requested(producer, event.payload, token)
            else:
                self.server.engine.send(address, routing, event.payload, facts, self.container, producer, token, transaction)
        if event.link.credit < PRODUCER_CREDIT_LOW:
            producer.top_up()

    def _check_relay(self, address: str, routing: Routing) -> None:
        """A producer that names each message's address cannot be held up by credit. Raises UnknownAddress, QueueFull."""
        engine = self.server.engine
        if routing is Routing.MULTICAST:
            engine.check_topic(address)
        if not engine.share_of_room(address, routing, 1):
            raise QueueFull(f"{address!r} is full")

    def _requested(self, producer: ProducerLink, body: bytes, token: Any) -> None:
        """A request to the management node: taken at once, and answered when it is done."""
        try:
            management.request(self, body)
        except BasculeError as error:
            producer.refused(token, error)
        else:
            producer.accepted(token)

    def _transaction(self, txn_id: bytes) -> Transaction:
        transaction = self.transactions.get(txn_id)
        if transaction is None:
            raise UnknownTransaction(f"no transaction {txn_id.hex()} on this connection")
        return transaction

    def _dispositioned(self, event: events.Dispositioned) -> None:
        state = event.state
        if state is None and not event.settled:
            return
        settle = OUTCOMES.get(type(state), _return_failed)
        if event.txn_id is not None:
            transaction = self.transactions.get(event.txn_id)
            if transaction is None:
                settle = _return_failed
            elif isinstance(state, Accepted):
                settle = partial(_accept_in, transaction)
                if self.first_transactions:
                    for link in {link for link, _, _ in event.deliveries}:
                        link.context.taken()
        for link, delivery_id, (consumer, message) in event.deliveries:
            settle(self.server.engine, consumer, message, state)
            if not event.settled:
                self.server.engine.journaling.then(self._settled, event.session, link, delivery_id, event.state)

    def _settled(self, session: Session, link: Link, delivery_id: int, state: Any) -> None:
        if link in self.links:
            session.settle_outgoing(delivery_id, state)
            self.touch()

    def _flowed(self, event: events.Flowed) -> None:
        context = event.link.context
        if isinstance(context, ConsumerLink):
            context.granted()
        self.wake(event.link)

    def wake(self, link: Link) -> None:
        """The link's credit has changed, or the client reads again: it is sent what waits for it, or told of more credit."""
        context = link.context
        if isinstance(context, ConsumerLink) and context.consumer is not None:
            self.server.engine.wake(context.consumer.queue)
        elif isinstance(context, BrowserLink):
            context.pump()
        elif isinstance(context, ProducerLink):
            context.top_up()

    def _declared(self, event: events.Declared) -> None:
        if isinstance(event.link.context, CoordinatorLink):
            event.link.context.declare(event.delivery_id)

    def _discharged(self, event: events.Discharged) -> None:
        if isinstance(event.link.context, CoordinatorLink):
            event.link.context.discharge(event.delivery_id, event.txn_id, fail=event.fail)

    def _nothing(self, event: object) -> None:
        """Nothing to do."""


def _accept(engine: Engine, consumer: Consumer, message: Message, state: Any) -> None:  # noqa: ARG001
    engine.acknowledge(consumer, message)


def _accept_in(transaction: Transaction, engine: Engine, consumer: Consumer, message: Message, state: Any) -> None:  # noqa: ARG001
    engine.acknowledge_in(transaction, consumer, message)


def _reject(engine: Engine, consumer: Consumer, message: Message, state: Any) -> None:  # noqa: ARG001
    engine.reject(consumer, message)


def _release(engine: Engine, consumer: Consumer, message: Message, state: Any) -> None:  # noqa: ARG001
    engine.give_back(consumer, message, failed=False)


def _modify(engine: Engine, consumer: Consumer, message: Message, state: Modified) -> None:
    if state.undeliverable_here:
        engine.reject(consumer, message)
    else:
        engine.give_back(consumer, message, failed=bool(state.delivery_failed))


def _return_failed(engine: Engine, consumer: Consumer, message: Message, state: Any) -> None:  # noqa: ARG001
    """Settled without an outcome: the source's default outcome, which for JMS clients is modified with a failed delivery."""
    engine.give_back(consumer, message, failed=True)


OUTCOMES: dict[type, Callable[[Engine, Consumer, Message, Any], None]] = {
    Accepted: _accept,
    Rejected: _reject,
    Released: _release,
    Modified: _modify,
}

HANDLERS: dict[type, Callable[[ClientConnection, Any], None]] = {
    events.Opened: ClientConnection._opened,
    events.SessionBegun: ClientConnection._nothing,
    events.SessionEnded: ClientConnection._session_ended,
    events.Attached: ClientConnection._attached,
    events.Detached: ClientConnection._detached,
    events.ConnectionClosed: ClientConnection._closed,
    events.Transferred: ClientConnection._transferred,
    events.Dispositioned: ClientConnection._dispositioned,
    events.Flowed: ClientConnection._flowed,
    events.Declared: ClientConnection._declared,
    events.Discharged: ClientConnection._discharged,
}
#: What clients are told when the broker goes: a failover client turns to another one.
GOING_DOWN = AmqpError(CONNECTION_FORCED, "the broker is going down")
#: What a client is told that has lost track of its messages.
BEGIN_ANEW = AmqpError(
    CONNECTION_FORCED, "a transaction that a lost connection fell into is over: connect again, for what was sent ahead comes again"
)
