"""AMQP over WebSocket: requests, messages of any shape, and the ends of connections."""

from __future__ import annotations

import asyncio
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from wsproto import ConnectionType, WSConnection
from wsproto.connection import Connection as WebSocketFrames
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    Pong,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason

from bascule.amqp.connection import Connection
from bascule.amqp.events import Transferred
from bascule.amqp.limits import ConnectionLimits
from bascule.amqp.performatives import Role, Source, Target
from bascule.amqp.sasl import AnonymousClient, SaslClient
from bascule.config import Settings
from bascule.server.connection import ClientConnection
from bascule.server.handshakes import HandshakeLimits
from bascule.server.listener import Listener, bind
from bascule.server.websocket import MESSAGE_BYTES_MAX, UNREAD_PONGS_BYTES, OriginRule, WebSocketConnection, WebSocketTransport
from tests.support.certificates import Authority
from tests.support.speed import SLOWNESS
from tests.unit.server.served import QUEUE
from tests.unit.server.test_handshakes import SOON_S, Guarded, run_async
from tests.unit.server.test_silent_clients import until

STRICT = OriginRule((), trusts_names=False)
LIMITS = HandshakeLimits(10, 10, 10 * SLOWNESS)


@asynccontextmanager
async def listening(
    rule: OriginRule = STRICT, tls: ssl.SSLContext | None = None, timeout_s: float = SOON_S
) -> AsyncIterator[tuple[Guarded, int]]:
    """Yield a broker in memory with a listener for WebSockets, and its port."""
    served = Guarded(LIMITS, tls)
    node: Any = served

    def serve(handshake: Any) -> asyncio.Protocol:
        return WebSocketConnection(handshake, rule, timeout_s, partial(ClientConnection, node), served.client_turns)

    listener = Listener(bind("127.0.0.1", 0), partial(served.handshakes.take, serve=serve), name="test", reserved=0)
    listener.start()
    try:
        yield served, listener.port
    finally:
        for writer in Peer.opened_writers:
            writer.close()
        Peer.opened_writers.clear()
        listener.close()
        served.handshakes.abort_all()
        for connection in list(served.connections):
            connection.end(None)


class Peer:
    """A client's WebSocket. ``listening`` closes it."""

    opened_writers: ClassVar[list[asyncio.StreamWriter]] = []

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.opened_writers.append(writer)
        self.websocket = WSConnection(ConnectionType.CLIENT)
        self.events: list[Event] = []

    @classmethod
    async def to(cls, port: int, *, tls: ssl.SSLContext | None = None) -> Peer:
        options: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": "localhost"}
        return cls(*await asyncio.open_connection("127.0.0.1", port, **options))

    @classmethod
    async def opened(cls, port: int, *, tls: ssl.SSLContext | None = None) -> Peer:
        peer = await cls.to(port, tls=tls)
        peer.say(Request(host=f"127.0.0.1:{port}", target="/any/path", subprotocols=["mqtt", "amqp"]))
        accepted = await peer.heard(AcceptConnection)
        assert accepted.subprotocol == "amqp"
        return peer

    def say(self, event: Event) -> None:
        self.writer.write(self.websocket.send(event))

    async def more(self) -> bool:
        """Read once. Return False at the end of the connection."""
        async with asyncio.timeout(SOON_S):
            data = await self.reader.read(1 << 20)
        self.websocket.receive_data(data or None)
        self.events += self.websocket.events()
        return bool(data)

    async def heard(self, kind: type[Any]) -> Any:
        """Return the first event of a kind, and forget the events up to it."""
        while not (found := [event for event in self.events if isinstance(event, kind)]):
            if not await self.more():
                raise AssertionError(f"no {kind.__name__} before the end; there are {self.events}")
        del self.events[: self.events.index(found[0]) + 1]
        return found[0]

    async def answer(self, request: bytes) -> bytes:
        """Send bytes, and return all bytes of the answer."""
        self.writer.write(request)
        async with asyncio.timeout(SOON_S):
            return await self.reader.read()


class AmqpPeer:
    """An AMQP client over a WebSocket, which cuts its bytes into messages as a test wants."""

    def __init__(self, served: Guarded, peer: Peer, cut: Callable[[bytes], list[BytesMessage]]) -> None:
        self.served, self.peer, self._cut = served, peer, cut
        self.amqp = Connection(Role.CLIENT, container_id="client", sasl=SaslClient([AnonymousClient()]))
        self.events: list[Any] = []
        self.sizes: list[int] = []

    async def until(self, condition: Callable[[], Any]) -> Any:
        while not (found := condition()):
            for message in self._cut(self.amqp.data_to_send()):
                self.peer.say(message)
            await self.peer.writer.drain()
            # What the broker has stored is answered in its next turn.
            answer = asyncio.ensure_future(self.peer.heard(BytesMessage))
            while not answer.done():
                self.served.broker.settle()
                self.served.send_output()
                await asyncio.wait([answer], timeout=0.01)
            self.sizes.append(len(answer.result().data))
            self.events += self.amqp.receive(bytes(answer.result().data), time.monotonic())
        return found


def whole(data: bytes) -> list[BytesMessage]:
    return [BytesMessage(data)] if data else []


def bytewise(data: bytes) -> list[BytesMessage]:
    """Messages of one byte each, as far as they are few, and empty messages between them."""
    few = data[:2000]
    return [BytesMessage(data[at : at + 1]) for at in range(len(few))] + [BytesMessage(b"")] + whole(data[len(few) :])


def fragments(data: bytes) -> list[BytesMessage]:
    """Return one message in fragments of 7 bytes."""
    if not data:
        return []
    parts = [BytesMessage(data[at : at + 7], message_finished=False) for at in range(0, min(len(data), 7000), 7)]
    return [*parts, BytesMessage(data[7 * len(parts) :], message_finished=True)]


@pytest.mark.parametrize("cut", [whole, bytewise, fragments])
@run_async
async def test_amqp_frames_are_independent_of_messages_and_fragments(cut: Callable[[bytes], list[BytesMessage]]) -> None:
    body = b"".join(number.to_bytes(4, "big") for number in range(20_000))
    async with listening() as (served, port):
        client = AmqpPeer(served, await Peer.opened(port), cut)
        client.amqp.open()
        await client.until(lambda: client.amqp.remote_open.container_id)
        session = client.amqp.begin()
        sender = session.attach_sender("s", Source(), Target("q", capabilities=QUEUE))
        receiver = session.attach_receiver("r", Source("q", capabilities=QUEUE), Target())
        await client.until(lambda: sender.credit > 0 and receiver.remote.name == "r")
        sender.send(b"\x00\x53\x75\xb0" + len(body).to_bytes(4, "big") + body)
        receiver.flow(1)
        (message,) = await client.until(lambda: [event for event in client.events if isinstance(event, Transferred)])
        assert body in message.payload
        assert max(client.sizes) <= MESSAGE_BYTES_MAX
        client.amqp.close()
        await client.until(lambda: client.amqp.closed)
        closed = await client.peer.heard(CloseConnection)
        assert closed.code == CloseReason.NORMAL_CLOSURE
        client.peer.say(closed.response())
        assert not await client.peer.more()
        assert not served.connections


@run_async
async def test_connection_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate = authority.issue("broker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    async with listening(tls=context) as (served, port):
        client = AmqpPeer(served, await Peer.opened(port, tls=ssl.create_default_context(cafile=authority.certificate)), whole)
        client.amqp.open()
        await client.until(lambda: client.amqp.remote_open.container_id)


def request(*headers: str, method: str = "GET") -> bytes:
    lines = [
        f"{method} / HTTP/1.1",
        "Host: 127.0.0.1",
        "Upgrade: websocket",
        "Connection: Upgrade",
        "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==",
    ]
    return "\r\n".join([*lines, *headers, "", ""]).encode()


VERSION, AMQP = "Sec-WebSocket-Version: 13", "Sec-WebSocket-Protocol: amqp"


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (request(VERSION), b"HTTP/1.1 400 .*'amqp' must be offered in Sec-WebSocket-Protocol"),
        (request(VERSION, "Sec-WebSocket-Protocol: mqtt"), b"HTTP/1.1 400 .*must be offered"),
        (request(VERSION, AMQP, method="POST"), b"HTTP/1.1 400 .*Request method must be GET"),
        (request("Sec-WebSocket-Version: 8", AMQP), b"HTTP/1.1 426 .*(?i:sec-websocket-version: 13)"),
        (request(VERSION, AMQP, "Origin: https://evil.example"), b"HTTP/1.1 403 .*pages of https://evil.example may not connect"),
        (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 400 "),
        (b"AMQP\x03\x01\x00\x00", b""),
        (b"\x16\x03\x01\r\n\r\n", b"HTTP/1.1 400 "),
        (request(VERSION, AMQP, "X: " + "x" * 100_000)[:-4], b"HTTP/1.1 400 "),  # without an end
        (request(VERSION, AMQP, *["X:"] * 10_000), b"HTTP/1.1 400 "),
    ],
)
@run_async
async def test_request_that_is_not_valid_is_refused_with_the_reason(sent: bytes, answer: bytes) -> None:
    async with listening(timeout_s=1.0) as (served, port):
        peer = await Peer.to(port)
        assert re.match(answer, await peer.answer(sent), re.DOTALL)
        assert not served.connections
        assert not len(served.handshakes)


@run_async
async def test_peer_without_a_request_is_closed_after_the_timeout() -> None:
    async with listening(timeout_s=0.2) as (served, port):
        peer = await Peer.to(port)
        peer.writer.write(b"GET / HTTP/1.1\r\n")
        async with asyncio.timeout(SOON_S):
            assert await peer.reader.read() == b""
        assert not len(served.handshakes)


@run_async
async def test_text_and_broken_frames_close_the_connection_with_their_code() -> None:
    unmasked = b"\x82\x01x"
    async with listening() as (served, port):
        for said, code in ((TextMessage("AMQP"), CloseReason.UNSUPPORTED_DATA), (unmasked, CloseReason.PROTOCOL_ERROR)):
            peer = await Peer.opened(port)
            if isinstance(said, bytes):
                peer.writer.write(said)
            else:
                peer.say(said)
            closed = await peer.heard(CloseConnection)
            assert closed.code == code
            assert not await peer.more()
        assert not served.connections


@run_async
async def test_ping_is_answered_and_close_is_returned_with_its_code() -> None:
    async with listening() as (served, port):
        peer = await Peer.opened(port)
        peer.say(Ping(b"1"))
        pong = await peer.heard(Pong)
        assert bytes(pong.payload) == b"1"
        peer.say(CloseConnection(CloseReason.GOING_AWAY))
        closed = await peer.heard(CloseConnection)
        assert closed.code == CloseReason.GOING_AWAY
        assert not await peer.more()
        assert not served.connections


class Stuck:
    """A transport whose peer reads nothing."""

    def __init__(self) -> None:
        self.unread = 0
        self.reading = True
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.unread += len(data)

    def get_write_buffer_size(self) -> int:
        return self.unread

    def close(self) -> None:
        pass

    def is_closing(self) -> bool:
        return self.aborted

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def abort(self) -> None:
        self.aborted = True

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def accepted(stuck: Any, served: Guarded) -> WebSocketConnection:
    """Return a WebSocket on a transport."""
    node: Any = served
    serve = partial(ClientConnection, node)
    connection = WebSocketConnection(served.connection()._handshake, STRICT, SOON_S, serve, served.client_turns)
    connection.connection_made(stuck)
    connection.data_received(request(VERSION, AMQP))
    return connection


@run_async
async def test_pings_of_a_peer_that_does_not_read_take_no_memory() -> None:
    stuck = Stuck()
    connection = accepted(stuck, Guarded(LIMITS))
    ping = b"\x89\xfd" + bytes(4) + b"p" * 125
    for _ in range(100):
        connection.data_received(ping * 100)
        await until(lambda: stuck.reading)
    assert UNREAD_PONGS_BYTES < stuck.unread < UNREAD_PONGS_BYTES + 1000
    connection.connection_lost(None)


@run_async
async def test_other_clients_have_their_turns_between_thousands_of_small_frames() -> None:
    stuck, pings = Stuck(), 30_000
    connection = accepted(stuck, Guarded(LIMITS))
    before = stuck.unread
    connection.data_received((b"\x89\x80" + bytes(4)) * pings)
    assert not stuck.reading
    assert stuck.unread < before + 2 * pings
    await until(lambda: stuck.reading)
    assert stuck.unread == before + 2 * pings
    connection.connection_lost(None)


@run_async
async def test_client_of_which_nothing_is_read_stays_unread_after_a_turn_of_small_frames() -> None:
    stuck, served = Stuck(), Guarded(LIMITS)
    connection = accepted(stuck, served)
    (client,) = served.connections
    assert client._transport is not None
    client._transport.pause_reading()
    connection.data_received((b"\x89\x80" + bytes(4)) * 30_000)
    await until(lambda: not connection.behind)
    assert not stuck.reading
    client._transport.resume_reading()
    assert stuck.reading
    connection.connection_lost(None)


@pytest.mark.parametrize("said", [TextMessage("AMQP"), CloseConnection(CloseReason.NORMAL_CLOSURE), None], ids=["text", "close", "end"])
@run_async
async def test_client_that_ends_and_does_not_read_is_aborted(said: Event | None) -> None:
    stuck, served = Stuck(), Guarded(LIMITS)
    served.amqp_limits = ConnectionLimits(close_timeout_s=0.1, handshake_timeout_s=3600.0)
    connection = accepted(stuck, served)
    if said is None:
        connection.eof_received()
    else:
        connection.data_received(WebSocketFrames(ConnectionType.CLIENT).send(said))
    await until(lambda: stuck.aborted)
    connection.connection_lost(None)


def test_output_is_cut_into_messages_that_each_client_accepts() -> None:
    stuck: Any = Stuck()
    server = WSConnection(ConnectionType.SERVER)
    server.receive_data(request(VERSION, AMQP))
    list(server.events())
    server.send(AcceptConnection(subprotocol="amqp"))
    transport = WebSocketTransport(stuck, server, stuck)
    transport.write(b"x" * (2 * MESSAGE_BYTES_MAX + 1))
    assert stuck.unread == 2 * (MESSAGE_BYTES_MAX + 4) + 1 + 2


@pytest.mark.parametrize(
    ("origin", "host", "origins", "trusts_names", "expected"),
    [
        (None, "broker:5673", (), False, True),
        ("http://127.0.0.1:5673", "127.0.0.1:5673", (), False, True),  # Qpid JMS
        ("http://localhost:5673", "localhost:5673", (), False, True),
        ("http://[::1]:5673", "[::1]:5673", (), False, True),
        ("http://broker:5673", "broker:5673", (), True, True),
        ("http://rebound.example:5673", "rebound.example:5673", (), False, False),
        ("https://evil.example", "broker:5673", (), True, False),
        ("http://127.0.0.1:8080", "127.0.0.1:5673", (), False, False),  # another server of the machine
        ("null", "127.0.0.1:5673", (), True, False),
        ("http://[", "127.0.0.1:5673", (), True, False),
        ("", "", (), True, True),
        ("https://Shop.example", "broker:5673", ("https://shop.example",), False, True),
        ("https://shop.example.evil", "broker:5673", ("https://shop.example",), False, False),
        ("https://evil.example", "broker:5673", ("*",), False, True),
    ],
)
def test_pages_that_may_connect(origin: str | None, host: str, origins: tuple[str, ...], trusts_names: bool, expected: bool) -> None:
    assert OriginRule(origins, trusts_names=trusts_names).allows(origin, host) is expected


@pytest.mark.parametrize("origin", ["shop.example", "https://shop.example/", "https://", "https://shop.example/page", "*.example"])
def test_origin_that_is_none_is_refused(origin: str) -> None:
    with pytest.raises(ValueError, match="is not an origin"):
        Settings(broker={"websocket": {"origins": [origin]}})  # type: ignore[arg-type]
