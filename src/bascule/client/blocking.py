"""A blocking AMQP client: one connection, one session, senders and receivers; one thread.

Every call that waits has a time limit and pumps the connection while it waits; nothing happens between calls (so a client that
is idle for longer than its peer's idle timeout is closed by it). Messages are encoded AMQP, as bascule.jms.message makes them.
"""

from __future__ import annotations

import socket
import time
import urllib.parse
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Self, TypeVar

from bascule.amqp.connection import Connection
from bascule.amqp.errors import CONNECTION_FORCED, AmqpError
from bascule.amqp.events import (
    AttachConfirmed,
    ConnectionClosed,
    Detached,
    Dispositioned,
    Event,
    Opened,
    SessionBegun,
    SessionEnded,
    Transferred,
)
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.amqp.performatives import ACCEPTED, RELEASED, Rejected, Role, SenderSettleMode, Source, Target
from bascule.amqp.sasl import AnonymousClient, PlainClient, SaslClient
from bascule.amqp.types import Described, Symbol, ULong
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError, InvalidInput, Unavailable

PORT = 5672
TIMEOUT_S = 30.0
RECEIVE_BYTES = 1 << 16
#: A socket takes no endless timeout.
READ_S_MAX = 60.0
#: Messages on their way to the broker, unanswered: enough to hide a round trip, little to send again.
SEND_WINDOW = 500
CAPABILITY = {Routing.ANYCAST: Symbol("queue"), Routing.MULTICAST: Symbol("topic")}
SELECTOR_DESCRIPTOR = ULong(0x0000468C00000004)
OUTCOMES = tuple(Symbol(f"amqp:{name}:list") for name in ("accepted", "rejected", "released", "modified"))

L = TypeVar("L", "Sender", "Receiver")


class TimedOut(Unavailable):
    """The broker did not answer in time."""


class ConnectionLost(Unavailable):
    """The connection ended; what was sent and not answered may or may not have been taken."""


class Refused(InvalidInput):
    """The broker said no."""


class Address(NamedTuple):
    """Where a broker is, and as whom to connect."""

    host: str
    port: int
    user: str | None = None
    password: str | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """Of ``amqp://[USER:PASSWORD@]HOST[:PORT]``. Raises InvalidInput."""
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port or PORT
        except ValueError as error:
            raise InvalidInput(f"{url!r}: {error}") from error
        if parts.scheme != "amqp" or not parts.hostname or parts.path.strip("/"):
            raise InvalidInput("a broker is given as amqp://[USER:PASSWORD@]HOST[:PORT]")
        user, password = (urllib.parse.unquote(part) if part else None for part in (parts.username, parts.password))
        return cls(parts.hostname, port, user, password)


class Delivery(NamedTuple):
    """A message received: encoded, and the number to settle it by."""

    number: int
    data: bytes


class Client:
    """A connection to a broker."""

    def __init__(self, address: Address, *, container_id: str | None = None, timeout_s: float = TIMEOUT_S) -> None:
        """Connect and open. Raises Unavailable, Refused, TimedOut."""
        self.timeout_s = timeout_s
        self._error: BasculeError | None = None
        try:
            self._socket = socket.create_connection((address.host, address.port), timeout=timeout_s)
        except OSError as error:
            raise Unavailable(f"no broker at {address.host}:{address.port}: {error.strerror or error}") from error
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        mechanism = PlainClient(address.user, address.password or "") if address.user else AnonymousClient()
        self._connection = Connection(
            Role.CLIENT,
            container_id=container_id or f"bascule-{uuid.uuid4()}",
            sasl=SaslClient([mechanism], address.host),
            idle_timeout_s=None,  # nobody listens between calls; what waits has a time limit of its own
        )
        self._opened = self._begun = False
        try:
            self._connection.open(hostname=address.host)
            self._session = self._connection.begin()
            self._until(lambda: self._opened and self._begun)
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> Self:
        """The connection."""
        return self

    def __exit__(self, *_error: object) -> None:
        """Close."""
        self.close()

    def sender(self, address: str, routing: Routing = Routing.ANYCAST) -> Sender:
        """A producer on a destination. Raises Refused, ConnectionLost, TimedOut."""
        link = self._session.attach_sender(
            f"sender-{uuid.uuid4()}",
            Source(address=address, outcomes=OUTCOMES),
            Target(address=address, capabilities=(CAPABILITY[routing],)),
            snd_settle_mode=SenderSettleMode.UNSETTLED,
        )
        return self._attached(Sender(self, link))

    def receiver(self, address: str, routing: Routing = Routing.ANYCAST, *, selector: str = "", browse: bool = False) -> Receiver:
        """A consumer of a destination, or a browser of a queue. Raises Refused, ConnectionLost, TimedOut."""
        filters = {Symbol("jms-selector"): Described(SELECTOR_DESCRIPTOR, selector)} if selector else None
        source = Source(
            address=address,
            capabilities=(CAPABILITY[routing],),
            filter=filters,
            outcomes=OUTCOMES,
            distribution_mode="copy" if browse else None,
        )
        mode = SenderSettleMode.SETTLED if browse else SenderSettleMode.UNSETTLED
        link = self._session.attach_receiver(f"receiver-{uuid.uuid4()}", source, Target(), snd_settle_mode=mode)
        return self._attached(Receiver(self, link))

    def close(self) -> None:
        """Close in order if the broker still answers; never raises because of it."""
        try:
            if self._error is None:
                self._connection.close()
                self._until(lambda: self._error is not None)
        except BasculeError:
            pass
        finally:
            self._socket.close()

    def _attached(self, end: L) -> L:
        end.link.context = end
        self._until(lambda: end.attached)
        return end

    def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Pump until the condition holds. Raises TimedOut, ConnectionLost, Refused."""
        if not self._pump_until(condition, self.timeout_s if timeout_s is None else timeout_s):
            raise TimedOut(f"no answer from the broker within {self.timeout_s:g} s")

    def _pump_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while True:
            self._flush()
            if condition():
                return True
            if self._error is not None:
                raise self._error
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                return False
            now_s = time.monotonic()
            due_s = self._connection.tick(now_s)
            if self._connection.closed:
                self._fail(ConnectionLost(f"connection given up: {self._connection.error}"))
            else:
                self._read(min(remaining_s, READ_S_MAX, max(0.001, due_s - now_s)))

    def _flush(self) -> None:
        data = self._connection.data_to_send()
        if data:
            self._socket.settimeout(self.timeout_s)
            try:
                self._socket.sendall(data)
            except OSError as error:
                self._fail(ConnectionLost(f"connection lost: {error}"))

    def _read(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(RECEIVE_BYTES)
        except TimeoutError:
            return
        except OSError as error:
            self._fail(ConnectionLost(f"connection lost: {error}"))
            return
        if not data:
            self._fail(ConnectionLost("the broker closed the connection"))
            return
        for event in self._connection.receive(data, time.monotonic()):
            self._take(event)

    def _take(self, event: Event) -> None:
        match event:
            case Transferred():
                event.link.context.arrived.append(Delivery(event.delivery_id, event.payload))
            case Dispositioned():
                for delivery in event.deliveries:
                    delivery.link.context.answered(event.state)
            case AttachConfirmed():
                # A null terminus of the peer's is a refusal: Detached follows, with the reason (AMQP 1.0 part 2, section 2.6.3).
                event.link.context.attached = (event.link.source if event.link.RECEIVER else event.link.target) is not None
            case Opened():
                self._opened = True
            case SessionBegun():
                self._begun = True
            case Detached() | SessionEnded():
                self._fail(Refused(str(event.error)) if event.error else ConnectionLost("the broker closed the link"))
            case ConnectionClosed(error=None):
                self._fail(ConnectionLost("the connection is closed"))
            case ConnectionClosed(error=AmqpError() as error):
                self._fail((ConnectionLost if error.condition == CONNECTION_FORCED else Refused)(str(error)))
            case _:
                pass  # a flow: credit is looked at where it is needed

    def _fail(self, error: BasculeError) -> None:
        """The first error is the reason of those that follow."""
        self._error = self._error or error


class Sender:
    """A producer. Messages are sent ahead of their answers, up to a window."""

    def __init__(self, client: Client, link: SenderLink) -> None:
        """Made by Client.sender."""
        self.link = link
        self.attached = False
        self.accepted = 0
        self._client = client
        self._unanswered = 0
        self._refusal: Refused | None = None

    def send(self, data: bytes) -> None:
        """Send an encoded message; returns before it is answered (see ``flush``). Raises Refused, ConnectionLost, TimedOut."""
        self._client._until(lambda: self._refusal is not None or (self.link.credit > 0 and self._unanswered < SEND_WINDOW))
        self._check()
        self._unanswered += 1
        self.link.send(data)

    def flush(self) -> None:
        """Return when the broker has accepted everything sent. Raises Refused, ConnectionLost, TimedOut."""
        self._client._until(lambda: not self._unanswered)
        self._check()

    def answered(self, state: Any) -> None:
        """The broker's outcome of a message."""
        self._unanswered -= 1
        if state == ACCEPTED:
            self.accepted += 1
        elif isinstance(state, Rejected) and state.error is not None:
            self._refusal = Refused(f"message refused: {state.error.exception()}")
        else:
            self._refusal = Refused(f"message not taken: {type(state).__name__.lower()}")

    def _check(self) -> None:
        if self._refusal is not None:
            raise self._refusal


class Receiver:
    """A consumer, or a browser, that asks for messages as they are wanted."""

    def __init__(self, client: Client, link: ReceiverLink) -> None:
        """Made by Client.receiver."""
        self.link = link
        self.attached = False
        self.arrived: deque[Delivery] = deque()
        self._client = client

    def receive(self, timeout_s: float, *, ahead: int = 1) -> Delivery | None:
        """The next message, or None when none came in time; up to ``ahead`` are asked for at once. Raises ConnectionLost, Refused."""
        if len(self.arrived) + self.link.credit <= ahead // 2:
            self.link.flow(ahead - len(self.arrived))
        return self.arrived.popleft() if self._client._pump_until(lambda: bool(self.arrived), timeout_s) else None

    def drain(self, ahead: int) -> Iterator[Delivery]:
        """Every message that is there now, ``ahead`` at a time. Raises ConnectionLost, Refused, TimedOut."""
        while True:
            self.link.flow(ahead, drain=True)
            self._client._until(lambda: self.link.credit == 0)
            if not self.arrived:
                return
            while self.arrived:
                yield self.arrived.popleft()

    def accept(self, delivery: Delivery) -> None:
        """The message is done with. Sent with the next call that waits, at the latest by ``close``."""
        self.link.settle(delivery.number, ACCEPTED)

    def release(self, delivery: Delivery) -> None:
        """The message goes back as if never received."""
        self.link.settle(delivery.number, RELEASED)
