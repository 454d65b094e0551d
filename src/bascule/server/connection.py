"""One client connection: a socket on one side, the AMQP engine in the middle, the broker engine on the other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from bascule.amqp import events
from bascule.amqp.connection import Connection
from bascule.amqp.errors import CONNECTION_FORCED, INTERNAL_ERROR, AmqpError, amqp_error
from bascule.amqp.performatives import Role
from bascule.amqp.sasl import SaslServer
from bascule.amqp.states import ConnectionState
from bascule.amqp.types import Symbol
from bascule.broker.containment import ErrorKind
from bascule.broker.errors import ResourceLimit
from bascule.broker.turns import AfterStored, Retry
from bascule.core.errors import BasculeError, Scope, check_answerable
from bascule.core.log import get_log
from bascule.server.attach import attach, detached
from bascule.server.client import Client
from bascule.server.containers import ContainerHolder
from bascule.server.coordinator import CoordinatorLink
from bascule.server.handshakes import Handshake
from bascule.server.links import WRITE_BUFFER_BYTES, ConsumerLink
from bascule.server.listener_tls import tls_peer
from bascule.server.open_properties import CAPABILITIES, SOLE_CONNECTION, open_properties
from bascule.server.ownership import check_sole_connection
from bascule.server.pieces import OPENING_PIECE_BYTES
from bascule.server.tokens import TOKEN_EXPIRED
from bascule.server.traced_transfers import transfers_of
from bascule.server.usage import UserUsage

if TYPE_CHECKING:
    from bascule.server.node import Node

log = get_log(__name__)

#: Bytes of unread answers to a client after which the broker reads no more from it.
UNREAD_ANSWERS_BYTES = 1 << 20
#: Enum member of the hot path as a global: an attribute lookup on the class costs as much as a call.
_ENDED = ConnectionState.ENDED
#: Time for one client in a turn of the event loop, besides the last piece: a client may send 256 KiB of attaches.
TURN_S = 0.01
#: Longest interval between checks of heartbeats and idle time.
TICK_S = 10.0


class ClientConnection(asyncio.Protocol):
    """A connection that turns AMQP events into broker commands. Output is written once per turn of the loop."""

    def __init__(self, server: Node, handshake: Handshake) -> None:
        self.server = server
        self._handshake = handshake
        self.sasl: SaslServer
        self.amqp: Connection  # set once there is a transport, which may authenticate the client
        self.peer = handshake.peer
        #: Notes that there may be output.
        self.touch: Callable[[], None] = partial(server.output.touch, self)
        self.client = Client(server, self)
        self._transfers = transfers_of(self.client, server.errors)
        self._unread_answers_bytes = 0  # bytes written while the client does not read
        self._unhandled = b""  # input that waits for another turn, or for the outcome of the login
        #: Retries a message for which a queue makes room, or a planned commit; does nothing if only the turn's time was used up.
        self._waiting: Retry | None = None
        self._behind_waiting: Iterator[events.Event] = iter(())  # events behind the waiting one
        self._turn_end_s = 0.0
        self._handling = False
        self.behind = False  # continues in the next turn
        self._stuck = False  # the client does not read
        self._sending = False  # more output follows in another turn
        self._transport: asyncio.Transport | None = None
        self._tick: asyncio.TimerHandle | None = None
        self._usage: UserUsage | None = None  # the usage of its user, once the connection is counted
        self._login: asyncio.Task[None] | None = None  # the check that the client waits for

    # -- the socket --------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle a new connection."""
        self._transport = self._handshake.transport = cast(asyncio.Transport, transport)  # asyncio declares a BaseTransport
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        server = self.server
        self.sasl = server.sasl(tls_peer(transport, self._handshake.may_log), self.peer)
        self.amqp = Connection(
            Role.SERVER, container_id=server.container_id, sasl=self.sasl, idle_timeout_s=server.idle_timeout_s, require_sasl=True,
            started_s=self._handshake.begun_s, limits=server.amqp_limits, in_steps=True,
        )  # fmt: skip
        self.amqp.context, self.amqp.partials = self, server.partials
        server.connections[self] = None
        self.client.links.on_full, self.client.links.on_room = self._transport.pause_reading, self.read_on
        self._ticking()

    def data_received(self, data: bytes) -> None:
        """Handle received frames: at once, or in the next turn if clients have used their time in this one."""
        self._unhandled = self._unhandled + data if self._unhandled else data
        if self.behind:
            return
        if not self.server.client_turns.run(self.handle_some) and self._transport is not None and not self.client.lost:
            self._go_on_later(self._transport)

    def handle_some(self) -> None:
        """Handle received data as far as the time of one turn allows, and the rest in the next turns. Nothing is read meanwhile."""
        transport, amqp, data, position = self._transport, self.amqp, self._unhandled, 0
        if transport is None or self.client.lost or not self.server.awake():
            return
        self._unhandled = b""
        now_s = time.monotonic()
        self._turn_end_s = now_s + TURN_S
        while amqp.login_check is None and not self.client.lost:
            if self._waiting is not None:
                self._handle(self._retry)
            elif amqp.unfinished is not None:
                self._handle(amqp.go_on)
            elif position < len(data):
                end = len(data) if amqp.state is ConnectionState.OPENED else position + OPENING_PIECE_BYTES
                self._handle(amqp.receive, data[position:end], now_s)
                position = end
            else:
                break
            if self._waiting is not None or (now_s := time.monotonic()) > self._turn_end_s:
                break
        self._unhandled = data[position:]
        if amqp.has_output:
            self.touch()
        self.server.dispatch()
        if self.amqp.login_check is not None:
            self._check_login(self.amqp.login_check)
        if self.client.lost:
            return
        was_behind = self.behind
        self.behind = self._login is None and bool(self._unhandled or self._waiting is not None or amqp.unfinished is not None)
        if self.server.congested:
            transport.pause_reading()
            self.server.held_back[self] = None
        if self.behind:
            self._go_on_later(transport)
        elif was_behind:
            self.read_on()

    def _go_on_later(self, transport: asyncio.Transport) -> None:
        self.behind = True
        transport.pause_reading()
        later = partial(self.client.engine.journaling.tell, self.later) if isinstance(self._waiting, AfterStored) else self.later
        later(self.handle_some)

    def _handle(self, take: Callable[..., Iterable[events.Event]], *arguments: Any) -> None:
        """Pass something to the AMQP engine, and handle the events that it returns."""
        self._handling = True
        try:
            remaining = iter(take(*arguments))
            for event in remaining:
                waiting = None
                if self.client.ended:
                    pass
                elif isinstance(event, events.Transferred):  # most events are messages and their outcomes
                    waiting = self._transfers.take(event)
                elif isinstance(event, events.Dispositioned):
                    self.client.dispositions.take(event)
                else:
                    waiting = HANDLERS[type(event)](self, event)
                if waiting is None and time.monotonic() > self._turn_end_s:  # 4 KiB may be 40 messages, each for thousands of subscriptions
                    waiting = _next_turn
                if waiting is not None:
                    self._waiting, self._behind_waiting = waiting, remaining
                    break
        except Exception as error:
            self._failed(error)
        self._handling = False

    def _retry(self) -> Iterator[events.Event]:
        """Try the waiting message or commit again. Return the events behind it if it no longer waits."""
        if self._waiting is not None and not self.client.ended:
            self._waiting = self._waiting()
            if self._waiting is not None:
                return iter(())
        self._waiting = None
        return self._behind_waiting

    def _check_login(self, check: Callable[[], bool]) -> None:
        """Check a password off the event loop; nothing is read from the client meanwhile."""
        if self._login is None and self._transport is not None:
            self._transport.pause_reading()
            self._login = asyncio.get_running_loop().create_task(self._checked(check), name="login")

    async def _checked(self, check: Callable[[], bool]) -> None:
        proven = await self.server.logins.check(check, self.sasl.claimed_user, self._handshake.address)
        if not self.client.lost:
            self._login = None
            self._handle(self.amqp.login_checked, proven)
            self.handle_some()
            self.read_on()

    def _failed(self, error: Exception) -> None:
        """End what the scope of the error says. A fault of the broker in one connection must not affect the others."""
        if not isinstance(error, BasculeError):
            self._contain(error)
            self.end(AmqpError(INTERNAL_ERROR, "the broker failed to handle a frame; see the broker's log"))
            return
        log.exception("frame not handled", peer=self.peer, container=self.client.container)
        if error.scope >= Scope.EPOCH:
            self.server.end_epoch(error)
        else:
            self.end(AmqpError(error.condition, str(error)))

    def _contain(self, error: Exception) -> None:
        self.server.errors.contain(ErrorKind.CONNECTION, error, peer=self.peer, container=self.client.container)

    def _broken(self, error: Exception) -> None:
        """Abort the connection without an answer, because no answer can be made."""
        self._contain(error)
        if self._transport is not None:
            self.client.lost = True
            self._transport.abort()

    def read_on(self) -> None:
        """Resume reading, if the broker has room and the client reads its answers."""
        if self._transport is not None and not self.client.lost and self._unread_answers_bytes <= UNREAD_ANSWERS_BYTES and not self.unread:
            self._transport.resume_reading()

    @property
    def unread(self) -> bool:
        """Return True if the broker does not read: received data or a login is not handled yet, or it has no room or too many attaches."""
        behind = bool(self._unhandled) or self._waiting is not None or self.amqp.unfinished is not None or self.client.links.full
        return behind or self._login is not None or self in self.server.held_back

    def send_output(self) -> None:
        """Write the output of the AMQP engine. An error concerns only this connection."""
        client, amqp, transport = self.client, self.amqp, self._transport
        if client.leaving:
            return  # who is told that its connection has ended finds nothing of it any more: its subscriptions are free
        try:
            data = amqp.data_to_send(take_more=not self._stuck)
            given_bytes, client.given_bytes = client.given_bytes, 0
            if transport is None or client.lost:
                return
            if data:
                transport.write(data)
                if self._stuck:
                    self._unread_answers_bytes += len(data)
                    if self._unread_answers_bytes > UNREAD_ANSWERS_BYTES:
                        transport.pause_reading()
            if amqp.outgoing.kept_bytes > WRITE_BUFFER_BYTES:
                client.full = True  # not all frames of large messages are written
            if amqp.outgoing.sessions:
                self._send_more_later()
            if given_bytes > WRITE_BUFFER_BYTES or (client.full and not self._stuck):
                asyncio.get_running_loop().call_soon(self._give_more)  # after the transport has tried to write
            unheard = self._handling or (self._waiting is not None and not client.ended)
            if amqp.state is _ENDED and not unheard and not transport.is_closing():
                transport.close()
                self._later(amqp.limits.close_timeout_s, transport.abort)  # of a client that does not read, which would keep it for ever
        except Exception as error:
            self._broken(error)

    def _send_more_later(self) -> None:
        if self.amqp.outgoing.sessions and not self._stuck and not self._sending:
            self._sending = True
            self.later(self._send_more)

    def _send_more(self) -> None:
        """Write the next piece of messages that take many frames."""
        self._sending = False
        if self.client.lost or self._stuck or not self.server.awake():
            return
        try:
            for flowed in self.amqp.send_more():
                self._flowed(flowed)
        except Exception as error:
            self._broken(error)
            return
        self.touch()
        self.server.dispatch()

    def pause_writing(self) -> None:
        """Stop writing, because the client does not read."""
        self._stuck = self.client.full = True

    def resume_writing(self) -> None:
        """Resume writing, because the client reads again."""
        self._stuck = False
        self._unread_answers_bytes = 0
        self.read_on()
        self._send_more_later()
        self._give_more()

    def _give_more(self) -> None:
        """Resume consumers once their messages are written, unless too much output waits for the client's window."""
        if not self._stuck and not self.client.lost and self.amqp.outgoing.kept_bytes <= WRITE_BUFFER_BYTES:
            self.client.wake_all()

    def eof_received(self) -> None:
        """Abort the connection after a time: a client that sends nothing more, and does not read, would keep it for ever."""
        self._later(self.amqp.limits.close_timeout_s, self._handshake.abort)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        """Release everything after the connection has ended."""
        self.client.lost = True
        self._handshake.end()
        if self._usage is not None:
            self._usage = None
            self.server.usage.disconnect(self.client.user, self._handshake.address, self.sasl.token_roles)
        if self._login is not None:
            self._login.cancel()
        if self._tick is not None:
            self._tick.cancel()
        self.server.connections.pop(self, None)
        self.server.container_ids.lost(self)
        self.server.output.forget(self)
        self.client.release(failed=not self.amqp.closed)
        self.server.client_turns.in_slices(self._end_sessions(), self.server.dispatch)
        self.server.peer_caches.client_gone()
        self.server.dispatch()

    def _end_sessions(self) -> Iterator[None]:
        for session in [*self.amqp.sessions.values(), *self.amqp.ended_sessions]:
            session.on_connection_end()
            session.forget_deliveries()
            yield

    @property
    def unread_bytes(self) -> int:
        """Return the bytes that are kept until the client reads, because its socket is full or its window is closed."""
        return self.amqp.outgoing.kept_bytes + self._buffered_bytes

    @property
    def unsent_bytes(self) -> int:
        """Return the bytes of these that have not left; the number shrinks while the client reads."""
        return self.amqp.outgoing.unwritten_bytes + self._buffered_bytes

    @property
    def _buffered_bytes(self) -> int:
        return 0 if self._transport is None else self._transport.get_write_buffer_size()

    def drop(self, error: AmqpError) -> None:
        """Abort the connection of a client that does not read, and keep nothing for it."""
        self.close(error)
        if self._transport is not None:
            self._transport.abort()

    def end(self, error: AmqpError | None) -> None:
        """End the connection, with ``close`` if possible."""
        try:
            if error is not None:
                self.client.close_coordinators(error)
            self.close(error)
        except Exception as failure:
            self._broken(failure)

    def close(self, error: AmqpError | None) -> None:
        """Close the connection from the broker's side."""
        if error is not None:
            self.client.interrupted()
        self.client.ended = True
        self.server.container_ids.lost(self)  # the client may take long to answer
        self.amqp.close(error)
        self.client.release()
        self.send_output()

    def later(self, action: Callable[[], None]) -> None:
        """Call ``action`` in another turn of the event loop."""
        self.server.client_turns.later(action)

    def _ticking(self) -> None:
        if self.client.lost or self._transport is None or self._transport.is_closing():
            return
        try:
            self._look_at_time()
        except Exception as error:
            self._broken(error)

    def _look_at_time(self) -> None:
        now_s = time.monotonic()
        if (left_s := self.client.login_left_s) <= 0:
            self.end(TOKEN_EXPIRED)
        deadline_s = self.amqp.tick(now_s, unread=self.unread)
        self._later(min(TICK_S, max(deadline_s - now_s, 0.05), max(left_s, 0.05)), partial(self.server.client_turns.soon, self._ticking))
        if self.amqp.closed:
            # The socket may take long to end: other clients get the messages of this client at once.
            self.client.log_end(self.amqp.error)
            self.client.release(failed=True)
            self.server.dispatch()
        self.send_output()

    def _later(self, delay_s: float, do: Callable[[], None]) -> None:
        """Schedule an action, in place of the previous scheduled one."""
        if self._tick is not None:
            self._tick.cancel()
        self._tick = asyncio.get_running_loop().call_later(delay_s, do)

    # -- events ------------------------------------------------------------------------------------------------------

    def _opened(self, event: events.Opened) -> Retry | None:
        client = self.client
        if self.server.container_ids.is_leaving(event.open.container_id):  # this client comes back: it finds its subscriptions free
            return partial(self._opened, event)
        client.container = event.open.container_id
        client.logged_in(self.sasl)
        properties = open_properties(self.server.failover)
        holder = ContainerHolder(client.user, SOLE_CONNECTION in event.open.desired_capabilities)
        others = self.server.container_ids.opened(self, client.container, holder)
        try:
            if self.server.reason:
                raise AmqpError(CONNECTION_FORCED, self.server.reason)
            if holder.sole:
                check_sole_connection(client, self.server.engine, others)
            usage = self._usage = self.server.usage.connect(client.user, self._handshake.address, self.sasl.token_roles)
        except (AmqpError, ResourceLimit) as error:
            log.debug("connection refused", peer=self.peer, container=client.container, reason=error)
            self._refuse(properties, amqp_error(error))
        else:
            self._handshake.end()
            self.amqp.open(offered_capabilities=CAPABILITIES, properties=properties)
            client.opened(event.open.properties, usage)
        self._ticking()  # the open frame says how often the client wants to hear from the broker
        return None

    def _refuse(self, properties: dict[Any, Any], error: AmqpError) -> None:
        """Open and close the connection. A client that knows the property reports no connection in between (Qpid JMS)."""
        self.server.container_ids.lost(self)  # the client may take long to answer
        self.client.refused(error)
        properties[Symbol("amqp:connection-establishment-failed")] = True
        self.amqp.open(offered_capabilities=CAPABILITIES, properties=properties)
        self.amqp.close(error)

    def _begun(self, event: events.SessionBegun) -> None:
        self.client.begin_session(event.session)

    def _attached(self, event: events.Attached) -> None:
        link = event.link
        if link.session not in self.client.sessions:
            self.client.refuse_link(link)
            return
        try:
            self.client.links.tally.check()
            self.client.links[link] = None
            attach(self.client, link)
        except BasculeError as error:
            check_answerable(error)
            self.client.links.pop(link, None)
            detached(self.client, link, closed=False)  # deletes what was created for it, for example a temporary queue
            link.refuse(amqp_error(error))

    def _detached(self, event: events.Detached) -> None:
        self.client.links.pop(event.link, None)
        detached(self.client, event.link, closed=event.closed, orderly=event.error is None)

    def _session_ended(self, event: events.SessionEnded) -> None:
        self.client.end_session(event.session, orderly=event.error is None)

    def _closed(self, event: events.ConnectionClosed) -> None:
        if event.error is not None:
            self.client.log_end(event.error)
        if not event.by_peer:
            self.client.interrupted()
        self.client.release(orderly=event.by_peer and event.error is None)

    def _discarded(self, event: events.TransferDiscarded) -> None:
        self._transfers.discarded(event)

    def _flowed(self, event: events.Flowed) -> None:
        context = event.link.context
        if isinstance(context, ConsumerLink):
            context.granted()
        self.client.wake(event.link)

    def _declared(self, event: events.DeclareReceived) -> None:
        if isinstance(event.link.context, CoordinatorLink):
            event.link.context.declare(event.delivery_id)

    def _discharged(self, event: events.Discharged) -> Retry | None:
        if isinstance(coordinator := event.link.context, CoordinatorLink):
            if not event.fail and not coordinator.plan_commit(event.txn_id):
                return partial(self._discharged, event)
            coordinator.discharge(event.delivery_id, event.txn_id, fail=event.fail)
        return None


def _next_turn() -> None:
    """Do nothing: the event is handled, and the events behind it wait for the next turn."""


#: Handlers of all events except messages and outcomes. Each returns None, or what to call in the next turn if its event must wait.
HANDLERS: dict[type, Callable[[ClientConnection, Any], Retry | None]] = {
    events.Opened: ClientConnection._opened,
    events.SessionBegun: ClientConnection._begun,
    events.SessionEnded: ClientConnection._session_ended,
    events.Attached: ClientConnection._attached,
    events.Detached: ClientConnection._detached,
    events.ConnectionClosed: ClientConnection._closed,
    events.TransferDiscarded: ClientConnection._discarded,
    events.Flowed: ClientConnection._flowed,
    events.DeclareReceived: ClientConnection._declared,
    events.Discharged: ClientConnection._discharged,
}
