"""A broker in memory with AMQP clients: its real connections, the real protocol engine, and no network in between."""

from __future__ import annotations

import asyncio
import functools
import math
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from bascule.amqp.connection import Connection
from bascule.amqp.events import Event, Transferred
from bascule.amqp.limits import HANDSHAKE_TIMEOUT_S, ConnectionLimits
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.amqp.partials import PartialBudget
from bascule.amqp.performatives import Role, Source, Target
from bascule.amqp.sasl import AnonymousClient, AnonymousServer, SaslClient, SaslServer
from bascule.amqp.session import Session
from bascule.amqp.types import Symbol
from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.engine import Engine
from bascule.core.errors import BasculeError
from bascule.core.permissions import AllowAll, Permissions
from bascule.server.audit import AuditTrail
from bascule.server.client_turns import ClientTurns, ConnectionOutput
from bascule.server.connection import ClientConnection
from bascule.server.containers import ContainerIds
from bascule.server.handshakes import Handshake, HandshakeLimits, Handshakes, no_tls
from bascule.server.interruptions import Interruptions
from bascule.server.listener_tls import TlsPeer
from bascule.server.logins import LoginChecks
from bascule.server.memory import PeerCaches
from bascule.server.pieces import DELIVERIES_PER_PIECE, FRAMES_PER_PIECE_BYTES, INPUT_STEPS_PER_PIECE
from bascule.server.usage import Usage, UsageLimits
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes

if TYPE_CHECKING:
    from bascule.tracing.spans import Tracing

E = TypeVar("E", bound=Event)
UNLIMITED = UsageLimits()
QUEUE, TOPIC = (Symbol("queue"),), (Symbol("topic"),)


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine as a test, on its own loop, since connections have timers."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        asyncio.run(test(**fixtures))

    return run


class Served:
    """The part of a node that a connection uses, with a broker in memory."""

    def __init__(self, broker: BrokerInMemory | None = None, *, idle_timeout_s: float = 60.0, usage: UsageLimits = UNLIMITED) -> None:
        self.broker = broker or BrokerInMemory()
        self.idle_timeout_s = idle_timeout_s
        self.container_id = "bascule"
        self.failover: list[dict[str, Any]] = []
        self.reason = ""
        self.validated_user = "off"
        self.max_message_bytes = 64 << 20
        self.congested = False
        self.up = True
        self.epoch_errors: list[BasculeError] = []
        self.contained: list[tuple[ErrorKind, Exception]] = []
        self.errors = ErrorContainment(lambda kind, error, _: self.contained.append((kind, error)))
        self.interruptions = Interruptions()
        self.amqp_limits = ConnectionLimits(
            input_steps_per_piece=INPUT_STEPS_PER_PIECE,
            deliveries_per_piece=DELIVERIES_PER_PIECE,
            frames_per_piece_bytes=FRAMES_PER_PIECE_BYTES,
        )
        self.client_turns = ClientTurns(turn_s=math.inf, slice_s=math.inf)  # a test may do all its work in one turn
        self.logins = LoginChecks()
        self.usage = Usage(usage)
        self.usage.room.account = lambda: self.engine.memory
        self.handshakes = Handshakes(HandshakeLimits(0, 0, HANDSHAKE_TIMEOUT_S), no_tls, lambda handshake: self.connection())
        self.partials = PartialBudget()
        self.peer_caches = PeerCaches(lambda: self.engine)
        self.permissions: Permissions = AllowAll()
        self.audit = self.handshakes.audit = AuditTrail()
        self.tracing: Tracing | None = None
        self.connections: dict[ClientConnection, None] = {}
        self.container_ids = ContainerIds()
        self.output = ConnectionOutput(turn_s=math.inf)  # a test may write all output in one turn
        self.held_back: dict[ClientConnection, None] = {}

    @property
    def engine(self) -> Engine:
        return self.broker.engine

    def sasl(self, tls: TlsPeer, peer: str) -> SaslServer:
        return SaslServer({"ANONYMOUS": AnonymousServer})

    def awake(self) -> bool:
        return self.up

    def end_epoch(self, error: BasculeError) -> None:
        self.epoch_errors.append(error)
        self.up = False

    def dispatch(self) -> None:
        if self.up:
            self.engine.dispatch()
        self.send_output()

    def send_output(self) -> None:
        self.output.write()

    def connection(self) -> ClientConnection:
        """Return a connection for a socket or a Wire."""
        node: Any = self
        peer = ("127.0.0.1", 5672)
        sock: Any = None
        return ClientConnection(node, Handshake(self.handshakes, sock, peer))

    def fill(self, address: str, count: int, body: Any = "x", **options: Any) -> None:
        """Send messages, and store them."""
        for number in range(count):
            self.broker.send(address, message_bytes(body), Sender(), number, **options)
        self.broker.settle()

    def settle(self, *clients: Client) -> None:
        """Store all appended records, and carry the output to the clients."""
        while True:
            said = [client.run() for client in clients]
            self.broker.settle()
            self.send_output()
            if not any(said) and not any(client.wire.written for client in clients):
                return


class Wire:
    """A transport that keeps the broker's output until the client takes it."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.reading = True
        self.closing = False
        self.aborted = False

    def set_write_buffer_limits(self, high: int) -> None:
        pass

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 5672) if name == "peername" else None

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return sum(map(len, self.written))

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True

    def abort(self) -> None:
        self.closing = self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Client:
    """A client's protocol engine on its own wire, open, with one session."""

    def __init__(
        self, served: Served, container: str = "client", limits: ConnectionLimits | None = None, *, product: str | None = None,
        begins: bool = True, pipelined: str | None = None, sasl: SaslClient | None = None,
    ) -> None:  # fmt: skip
        """Connect. ``begins``: begin a session; ``pipelined``: attach a consumer to this queue before the broker has answered."""
        self.served = served
        self.wire = Wire()
        self.connection = served.connection()
        wire: Any = self.wire
        self.connection.connection_made(wire)
        self.amqp = Connection(Role.CLIENT, container_id=container, sasl=sasl or SaslClient([AnonymousClient()]), limits=limits)
        self.amqp.open(properties=None if product is None else {Symbol("product"): product})
        self.events: list[Event] = []
        if pipelined is not None:
            self.amqp.begin().attach_receiver("pipelined", Source(pipelined, capabilities=QUEUE), Target())
        self.run()
        if begins:
            self.session: Session = self.amqp.begin()
            self.run()

    def say(self) -> bool:
        """Pass the client's output to the broker. Return whether there was any."""
        data = self.amqp.data_to_send()
        if data:
            self.connection.data_received(data)
            while self.connection.behind:
                self.connection.handle_some()
        return bool(data)

    def listen(self) -> bool:
        """Pass the broker's output to the client. Return whether there was any."""
        data = b"".join(self.wire.written)
        self.wire.written.clear()
        self.events += self.amqp.receive(data, time.monotonic()) if data else []
        return bool(data)

    def run(self) -> bool:
        """Pass output in both directions until there is none."""
        self.connection.send_output()
        moved = False
        while self.say() | self.listen():
            moved = True
        return moved

    def consumer(self, address: str, credit: int = 0, *, name: str = "consumer", capabilities: Any = QUEUE, **source: Any) -> ReceiverLink:
        link = self.session.attach_receiver(name, Source(address, capabilities=capabilities, **source), Target())
        self.served.settle(self)
        if credit:
            link.flow(credit)
            self.served.settle(self)
        return link

    def producer(self, address: str, *, name: str = "producer", capabilities: Any = QUEUE) -> SenderLink:
        link = self.session.attach_sender(name, Source(), Target(address, capabilities=capabilities))
        self.served.settle(self)
        return link

    def events_of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    def received(self, link: ReceiverLink) -> int:
        return sum(event.link is link for event in self.events_of(Transferred))
