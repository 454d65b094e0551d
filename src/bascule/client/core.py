"""A client connection without IO, across reconnects: the current protocol engine, and the sessions, which survive it.

A driver (pump.py) connects a socket to the core. It calls ``begin`` for a new socket, ``receive`` with the bytes read and ``lost`` when the
socket is closed, and it writes ``data_to_send``. The connection has ended for good once ``error`` is set.
"""

from __future__ import annotations

import itertools
import secrets
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from bascule.amqp import events
from bascule.amqp.bearer import OauthBearerClient
from bascule.amqp.connection import Connection
from bascule.amqp.performatives import Open, Role
from bascule.amqp.sasl import AnonymousClient, AuthenticationFailed, ClientMechanism, ExternalClient, PlainClient, SaslClient
from bascule.amqp.scram import ScramClient
from bascule.amqp.types import Symbol
from bascule.amqp.verifiers import DIGESTS
from bascule.client.destination import Destination
from bascule.client.errors import ConnectionLost, IllegalState, InvalidClientId, SecurityDenied, TimedOut, of_connection
from bascule.client.links import PendingSend
from bascule.client.operation import Operation, Wait
from bascule.client.session import ClientSession
from bascule.client.session_links import Acknowledge
from bascule.client.token_supply import Token
from bascule.client.url import Endpoint
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.log import get_log

log = get_log(__name__)

#: Close the connection after this silence of the broker, in seconds; brokers send heartbeats at half of the announced timeout.
IDLE_TIMEOUT_S: Final = 60.0
NONCE_BYTES: Final = 18
DESIRED: Final = ("ANONYMOUS-RELAY", "DELAYED_DELIVERY", "SHARED-SUBS")
#: Advice to an application that requires channel binding.
NO_BINDING: Final = "require_channel_binding needs TLS, user and password, and a broker that offers SCRAM with channel binding (-PLUS)"
_ESTABLISHMENT_FAILED: Final = Symbol("amqp:connection-establishment-failed")
_FAILOVER_LIST: Final = Symbol("failover-server-list")


@dataclass(frozen=True, slots=True)
class ConnectionSettings:
    """The settings of a connection. Times are in seconds."""

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: Token | None = field(default=None, repr=False)
    client_id: str | None = None
    prefetch: int = 1000
    timeout_s: float = 30.0
    user_id: str | None = None  # JMSXUserID of the messages that the connection sends
    reconnects: bool = False
    own_tls: bool = False  # a TLS context was given, which may hold a certificate
    require_channel_binding: bool = False


def _mechanisms(settings: ConnectionSettings, token: str | None, end_point: bytes | None) -> list[ClientMechanism]:
    """Return the SASL mechanisms, safest first. The client uses the first one that the server offers."""
    if settings.require_channel_binding and (token is not None or not settings.user or end_point is None):
        return []
    if token is not None:
        return [OauthBearerClient(settings.user or "", token), PlainClient(settings.user or "", token)]
    if settings.user:
        password = settings.password or ""
        nonce = secrets.token_hex(NONCE_BYTES)
        plus = () if end_point is None else (True,)
        scram: list[ClientMechanism] = [
            ScramClient(settings.user, password, nonce, name, end_point, plus=each) for each in (*plus, False) for name in DIGESTS
        ]
        if settings.require_channel_binding:
            return [*scram[: len(DIGESTS)]]
        return [*scram, PlainClient(settings.user, password)]
    return [ExternalClient(), AnonymousClient()] if settings.own_tls else [AnonymousClient()]


class Core:
    """One connection of an application."""

    def __init__(self, settings: ConnectionSettings, clock: Callable[[], float]) -> None:
        """``clock`` returns monotonic seconds."""
        self.settings = settings
        self.clock = clock
        self.token: str | None = None  # for the next connection
        # The broker detects duplicates by this id and the message id, so the container id stays the same across reconnects.
        self.container_id = settings.client_id or f"bascule-{uuid.uuid4()}"
        self.amqp: Connection | None = None
        self._endpoint: Endpoint  # of the current connection, or the last one
        self._restored = False  # all sessions have sent their begin on the current connection
        self.up = False
        self.ever_up = False
        self.generation = 0  # number of connections opened so far
        self.closing = False
        self.congested = False  # the socket's write buffer is full
        self.error: BasculeError | None = None
        self.reason: BasculeError = Unavailable("no broker has answered yet; check the host, the port and whether the broker runs")
        self.offered: frozenset[str] = frozenset()
        self.completed: deque[PendingSend] = deque()
        self.other_endpoints: list[Endpoint] = []
        self.own = ClientSession(self, Acknowledge.AUTO)  # owns the temporary destinations, which belong to the connection
        self.sessions: list[ClientSession] = []
        self._message_ids = (f"ID:{prefix}:{number}" for prefix in (uuid.uuid4(),) for number in itertools.count(1))
        self._link_names = itertools.count(1)

    def message_id(self) -> str:
        """Return a unique JMSMessageID."""
        return next(self._message_ids)

    def link_name(self, what: str) -> str:
        """Return a unique link name, which the link keeps across reconnects."""
        return f"{what}-{next(self._link_names)}-{self.container_id}"

    # --- called by the driver ----------------------------------------------------------------------------------------------------

    def begin(self, endpoint: Endpoint, end_point: bytes | None = None) -> None:
        """Start the protocol on a new socket. ``end_point`` is the channel binding of the broker's certificate, if it has one."""
        settings, self._endpoint = self.settings, endpoint
        none_fits = NO_BINDING if settings.require_channel_binding else None
        sasl = SaslClient(_mechanisms(settings, self.token, end_point), endpoint.host, none_fits)
        self.amqp = Connection(Role.CLIENT, container_id=self.container_id, sasl=sasl, idle_timeout_s=IDLE_TIMEOUT_S)
        sole = ("sole-connection-for-container",) if settings.client_id else ()
        self.amqp.open(
            hostname=endpoint.host,
            desired_capabilities=tuple(Symbol(name) for name in (*sole, *DESIRED)),
            properties={Symbol("product"): "bascule.client"},
        )

    def receive(self, data: bytes, now_s: float) -> None:
        """Handle received bytes. After the end of the connection, their events are ignored."""
        if self.amqp is not None:
            for event in self.amqp.receive(data, now_s):
                if self.error is None:
                    _HANDLERS.get(type(event), Core._nothing)(self, event)

    @property
    def opened(self) -> bool:
        """Whether sessions may begin and links attach. False after a close, even while the socket is still open."""
        return self._restored and self.amqp is not None and not self.amqp.closed

    def data_to_send(self) -> bytes:
        """Return the bytes to write."""
        return b"" if self.amqp is None else self.amqp.data_to_send()

    @property
    def pending(self) -> bool:
        """Whether the driver has bytes to write or outcomes to report."""
        amqp = self.amqp
        return bool(self.completed or (amqp is not None and (amqp.out or amqp.unflushed)))

    def pends_at_most(self, size_bytes: int) -> bool:
        """Return whether nothing but frames of at most ``size_bytes`` bytes in total waits to be written. Acknowledgements do not count."""
        return size_bytes > 0 and not self.completed and self.amqp is not None and sum(map(len, self.amqp.out)) <= size_bytes

    def tick(self, now_s: float) -> float:
        """Send heartbeats and check timeouts at ``now_s``; return the time of the next call at the latest, in monotonic seconds."""
        if self.amqp is None:
            return float("inf")
        due_s = self.amqp.tick(now_s)
        if self.amqp.closed:
            self.reason = self._cut(str(self.amqp.error or "the broker did not answer within the idle timeout"))
        return due_s

    def congestion(self, congested: bool) -> None:
        """Record whether the socket's write buffer is full; resume sending when it is not."""
        self.congested = congested
        if not congested:
            for session in self.sessions:
                session.pump()

    def _cut(self, why: str) -> ConnectionLost:
        """Return the error for a connection that was not ended by a close of the broker; if it never was open, name the usual causes."""
        if self.up:
            return ConnectionLost(why)
        return ConnectionLost(
            f"{self._endpoint}: {why}, before the AMQP connection was open; check that this is the AMQP port of a broker, and that the "
            "URL begins with amqps:// if the port uses TLS"
        )

    def lost(self, why: str | None = None) -> None:
        """Handle the loss of the socket; ``why`` is None if the protocol has ended before and its reason is known."""
        if self.amqp is None:
            return
        self.reason = self.reason if why is None else self._cut(why)
        was_up, self.amqp, self._restored, self.up, self.congested = self.up, None, False, False, False
        for session in (self.own, *self.sessions):
            session.lost()
        if self.closing:
            self.fail(IllegalState("the connection is closed"))
        elif not self.settings.reconnects:
            self.fail(self.reason)
        elif was_up and self.error is None:
            log.warning("connection lost, reconnecting", reason=self.reason)

    def fail(self, error: BasculeError) -> None:
        """End the connection for good. A connected broker gets a close, and takes back the messages that were not acknowledged."""
        if self.error is None:
            if self.amqp is not None:
                self.amqp.close()
            self.error, self.up = error, False
            for session in (self.own, *self.sessions):
                session.failed(error)

    # --- called by sessions ------------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise the error that ended the connection."""
        if self.error is not None:
            # Raise a copy: one exception raised by several threads would collect the tracebacks of all.
            raise type(self.error)(*self.error.args)

    def until(self, condition: Callable[[], bool], what: str, until_s: float) -> Operation[None]:
        """Wait until ``condition()`` is true.

        ``what`` names the operation in the error. Raises TimedOut, and the error that ended the connection.
        """
        while not condition():
            self.check()
            if not (yield Wait(lambda: condition() or self.error is not None, until_s)):
                why = "" if self.up else f" (not connected: {self.reason})"
                raise TimedOut(f"{what}: no answer from the broker before the timeout{why}")

    def connected(self, until_s: float) -> Operation[None]:
        """Wait until the broker has accepted the connection."""
        yield from self.until(lambda: self.up, "connect", until_s)

    def open_session(self, mode: Acknowledge, until_s: float) -> Operation[ClientSession]:
        """Open a session. If it cannot begin, it is removed."""
        self.check()
        session = ClientSession(self, mode)
        if self.opened:
            session.restore()
        self.sessions.append(session)
        try:
            yield from self.until(lambda: session.begun or session.error is not None, "begin a session", until_s)
            session.check()
        except BaseException:
            session.leave()
            raise
        return session

    def shut(self) -> None:
        """Close the connection, with an orderly close if a broker is connected."""
        self.closing = True
        self.fail(IllegalState("the connection is closed"))

    def gone(self, until_s: float) -> Operation[None]:
        """Wait until the broker has answered the close, or until ``until_s``."""
        yield Wait(lambda: self.amqp is None or self.amqp.closed, until_s)

    def named(self, destination: Destination) -> None:
        """Attach the consumers of a temporary destination that has got its name."""
        for session in self.sessions:
            session.attach_waiting(destination)

    # --- events from the broker --------------------------------------------------------------------------------------------------

    def _opened(self, event: events.Opened) -> None:
        opened: Open = event.open
        self.offered = frozenset(map(str, opened.offered_capabilities))
        properties = opened.properties or {}
        if properties.get(_ESTABLISHMENT_FAILED):
            return  # a close with the reason follows
        for other in properties.get(_FAILOVER_LIST) or ():
            host, port, scheme = (other.get(Symbol(name)) for name in ("network-host", "port", "scheme"))
            if isinstance(host, str) and isinstance(port, int):
                tls = self._endpoint.tls if scheme is None else str(scheme) == "amqps"
                self.other_endpoints.append(Endpoint(host, port, tls))
        for session in (self.own, *self.sessions):
            session.restore()
        self._restored = True

    def _begun(self, event: events.SessionBegun) -> None:
        session: ClientSession = event.session.context
        session.begun = True
        if session is self.own:
            self.up = self.ever_up = True
            self.generation += 1

    def _confirmed(self, event: events.AttachConfirmed) -> None:
        event.link.context.confirmed()

    def _detached(self, event: events.Detached) -> None:
        event.link.context.detached(event.error)

    def _flowed(self, event: events.Flowed) -> None:
        event.link.context.flowed()

    def _transferred(self, event: events.Transferred) -> None:
        event.link.context.arrived(event)

    def _dispositioned(self, event: events.Dispositioned) -> None:
        if event.state is None and not event.settled:
            return
        for delivery in event.deliveries:
            delivery.context.answered(event.state)
            if not event.settled:
                event.session.settle_outgoing(delivery.delivery_id)

    def _session_ended(self, event: events.SessionEnded) -> None:
        event.session.context.ended(of_connection(event.error) if event.error else ConnectionLost("the broker ended the session"))

    def _closed(self, event: events.ConnectionClosed) -> None:
        if self.closing:
            return
        error = event.error
        by_us = not event.by_peer and error is not None and not isinstance(error, AuthenticationFailed)
        self.reason = self._cut(str(error)) if by_us else of_connection(error)
        # Do not try other brokers: they would refuse as well. A client id in use may be held by our own lost connection, so then
        # reconnect.
        # The end of a token closes a connection that was up; a fresh one opens the next.
        renewed = callable(self.settings.token) and self.up
        if (isinstance(self.reason, SecurityDenied) and not renewed) or (isinstance(self.reason, InvalidClientId) and not self.ever_up):
            self.fail(self.reason)

    def _nothing(self, event: Any) -> None:
        """Ignore an event."""


_HANDLERS: Final[dict[type[events.Event], Callable[[Core, Any], None]]] = {
    events.Opened: Core._opened,
    events.SessionBegun: Core._begun,
    events.SessionEnded: Core._session_ended,
    events.AttachConfirmed: Core._confirmed,
    events.Detached: Core._detached,
    events.Flowed: Core._flowed,
    events.Transferred: Core._transferred,
    events.Dispositioned: Core._dispositioned,
    events.ConnectionClosed: Core._closed,
}
