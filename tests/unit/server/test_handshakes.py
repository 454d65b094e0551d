"""Connections before their login: their number, time and cost; and a broker that is short of file descriptors."""

from __future__ import annotations

import asyncio
import functools
import logging
import multiprocessing
import resource
import socket
import ssl
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from typing import Any

import pytest
import uvloop

from bascule.amqp.composite import encode_composite
from bascule.amqp.connection import Connection
from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, UNAUTHORIZED_ACCESS
from bascule.amqp.frames import AMQP_HEADER, SASL_FRAME, SASL_HEADER, frame
from bascule.amqp.limits import PRE_OPEN_BYTES_MAX, SASL_FRAME_SIZE_BYTES_MAX, ConnectionLimits
from bascule.amqp.performatives import Open, Role, SaslInit
from bascule.amqp.sasl import AnonymousClient, AnonymousServer, PlainClient, PlainServer, SaslClient, SaslServer
from bascule.server import handshakes, listener
from bascule.server.connection import ClientConnection
from bascule.server.handshakes import HandshakeLimits, Handshakes
from bascule.server.listener import Listener
from tests.support.certificates import Authority
from tests.support.speed import SLOWNESS
from tests.unit.server.served import Served

SOON_S = 20.0 * SLOWNESS


def run_async(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a coroutine as a test, on the loop that the broker uses."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(**fixtures))

    return run


class Guarded(Served):
    """A broker in memory that listens, and knows one user."""

    def __init__(self, limits: HandshakeLimits, tls: ssl.SSLContext | None = None) -> None:
        super().__init__()
        self.amqp_limits = ConnectionLimits(handshake_timeout_s=limits.timeout_s)
        node: Any = self
        self.handshakes = Handshakes(limits, lambda: tls, partial(ClientConnection, node))
        self.may_login = threading.Event()
        self.may_login.set()

    def sasl(self, certified: str | None, peer: str) -> SaslServer:
        return SaslServer({"PLAIN": lambda: PlainServer(self.knows), "ANONYMOUS": AnonymousServer})

    def knows(self, user: str, password: str) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        assert self.may_login.wait(SOON_S)
        return (user, password) == ("ann", "hush")


@asynccontextmanager
async def listening(served: Guarded, reserved: int = 0) -> AsyncIterator[Listener]:
    found = Listener(listener.bind("127.0.0.1", 0), served.handshakes.take, name="test", reserved=reserved)
    served.handshakes.on_room = found.room
    found.start()
    try:
        yield found
    finally:
        found.close()
        served.handshakes.abort_all()


class Raw:
    """A socket and its AMQP engine, as slow as the test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *mechanisms: Any) -> None:
        self.reader, self.writer = reader, writer
        self.amqp = Connection(Role.CLIENT, container_id="raw", sasl=SaslClient(mechanisms or [AnonymousClient()]))
        self.amqp.open()

    @classmethod
    async def to(cls, port: int, *mechanisms: Any, tls: ssl.SSLContext | None = None) -> Raw:
        options: dict[str, Any] = {} if tls is None else {"ssl": tls, "server_hostname": "localhost"}
        return cls(*await asyncio.open_connection("127.0.0.1", port, **options), *mechanisms)

    async def opened(self) -> Connection:
        """Return the engine, once its open is answered or the connection has ended."""
        async with asyncio.timeout(SOON_S):
            while not self.amqp.remote_open.container_id and not self.amqp.closed:
                self.writer.write(self.amqp.data_to_send())
                data = await self.reader.read(65536)
                if not data:
                    break
                self.amqp.receive(data, time.monotonic())
        return self.amqp

    async def ended(self) -> None:
        """Return when the broker has ended the connection. Raises TimeoutError."""
        with suppress(ConnectionError):
            async with asyncio.timeout(SOON_S):
                while await self.reader.read(65536):
                    pass

    def close(self) -> None:
        self.writer.close()


@run_async
async def test_silent_peer_is_closed_after_the_timeout() -> None:
    served = Guarded(HandshakeLimits(0, 0, 0.3))
    async with listening(served) as found:
        silent = await Raw.to(found.port)
        await silent.ended()
        assert not len(served.handshakes)
        silent.close()


@run_async
async def test_slow_peer_is_closed_after_the_timeout() -> None:
    served = Guarded(HandshakeLimits(0, 0, 0.5))
    async with listening(served) as found:
        slow = await Raw.to(found.port)

        async def dribble() -> None:
            for byte in SASL_HEADER + frame(0, encode_composite(SaslInit("ANONYMOUS", b"x" * 1000)), SASL_FRAME):
                slow.writer.write(bytes([byte]))
                await asyncio.sleep(0.05)

        task = asyncio.create_task(dribble())
        await slow.ended()
        task.cancel()
        slow.close()


@run_async
async def test_peer_that_stops_in_its_tls_handshake_is_closed_after_the_timeout(authority: Authority) -> None:
    certificate = authority.issue("broker")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    served = Guarded(HandshakeLimits(0, 0, 0.5), context)
    async with listening(served) as found:
        silent = await Raw.to(found.port)
        silent.writer.write(b"\x16\x03\x01")  # the beginning of a handshake
        while not len(served.handshakes):
            await asyncio.sleep(0)
        await silent.ended()
        assert not len(served.handshakes)
        silent.close()


@pytest.mark.parametrize("limits", [HandshakeLimits(5, 0, SOON_S), HandshakeLimits(0, 5, SOON_S)], ids=["in-total", "of-one-address"])
@run_async
async def test_client_logs_in_while_silent_peers_hold_all_places(limits: HandshakeLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "GRACE_S", 0.2)
    served = Guarded(limits)
    async with listening(served) as found:
        silent = [await Raw.to(found.port) for _ in range(20)]
        client = await Raw.to(found.port)
        assert (await client.opened()).remote_open.container_id == "bascule"
        assert len(served.handshakes) <= 5
        assert served.handshakes.aborted >= 1
        for each in (client, *silent):
            each.close()


@run_async
async def test_more_concurrent_clients_than_places_all_log_in() -> None:
    served = Guarded(HandshakeLimits(10, 5, SOON_S))
    async with listening(served) as found:
        clients = await asyncio.gather(*(Raw.to(found.port) for _ in range(100)))
        opened = await asyncio.gather(*(client.opened() for client in clients))
        assert [each.remote_open.container_id for each in opened] == ["bascule"] * 100
        assert served.handshakes.aborted == 0
        for client in clients:
            client.close()


@run_async
async def test_a_long_check_of_a_password_delays_no_other_client() -> None:
    served = Guarded(HandshakeLimits(0, 0, SOON_S))
    served.may_login.clear()
    async with listening(served) as found:
        waiting = [await Raw.to(found.port, PlainClient("ann", password)) for password in ("hush", "wrong")]
        logins = [asyncio.create_task(each.opened()) for each in waiting]
        other = await Raw.to(found.port)
        assert (await other.opened()).remote_open.container_id == "bascule"
        assert not any(login.done() for login in logins)
        served.may_login.set()
        known, unknown = [await login for login in logins]
        assert known.remote_open.container_id == "bascule"
        assert unknown.error is not None
        assert unknown.error.condition == UNAUTHORIZED_ACCESS
        for each in (other, *waiting):
            each.close()


def pending() -> Connection:
    """Return a server's connection that waits for the check of a password."""
    offered = SaslServer({"PLAIN": lambda: PlainServer(lambda user, password: password == "hush")})
    connection = Connection(Role.SERVER, container_id="server", sasl=offered, require_sasl=True)
    connection.receive(SASL_HEADER + frame(0, encode_composite(SaslInit("PLAIN", b"\0ann\0hush")), SASL_FRAME), 0.0)
    return connection


@pytest.mark.parametrize("proven", [True, False])
def test_frames_behind_a_password_count_only_if_the_password_is_valid(proven: bool) -> None:
    connection = pending()
    assert connection.receive(AMQP_HEADER, 0.0) == []
    assert connection.receive(frame(0, encode_composite(Open("early"))), 0.0) == []
    events = connection.login_checked(proven)
    assert [type(event).__name__ for event in events] == (["Opened"] if proven else ["ConnectionClosed"])
    assert connection.user == ("ann" if proven else None)


def test_the_size_of_frames_behind_a_password_is_limited() -> None:
    connection = pending()
    for _ in range(PRE_OPEN_BYTES_MAX // 1000):
        connection.receive(bytes(1000), 0.0)
    assert not connection.closed
    connection.receive(bytes(2000), 0.0)
    assert connection.closed
    assert connection.error is not None
    assert connection.error.condition == RESOURCE_LIMIT_EXCEEDED


def test_too_large_sasl_frame_closes_connection() -> None:
    connection = Connection(Role.SERVER, container_id="server", sasl=SaslServer({"ANONYMOUS": AnonymousServer}), require_sasl=True)
    connection.receive(SASL_HEADER + frame(0, bytes(SASL_FRAME_SIZE_BYTES_MAX), SASL_FRAME)[:8], 0.0)
    assert connection.closed


@contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Return the number of descriptors that this process can still open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as probe:
        resource.setrlimit(resource.RLIMIT_NOFILE, (probe.fileno() + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("reserved", [0, 10], ids=["none-left", "the-rest-reserved"])
def test_new_clients_are_refused_without_descriptors_and_others_continue(reserved: int) -> None:
    # In a separate process, since other code in the test process would fail to open files.
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        notes = process.submit(without_descriptors, reserved).result()
    assert len([note for note in notes if "connections refused" in note]) == 1


def without_descriptors(reserved: int) -> list[str]:
    """Serve clients until this process can open no descriptors. Return the log."""
    notes: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve_without_descriptors(reserved))
    return notes


async def serve_without_descriptors(reserved: int) -> None:
    served, loop = Guarded(HandshakeLimits(0, 0, SOON_S)), asyncio.get_running_loop()
    async with listening(served, reserved) as found:
        there = await Raw.to(found.port)
        await there.opened()
        # Created before the limit: these sockets are in the same process as the broker.
        sockets = [socket.socket() for _ in range(30)]
        last = socket.socket()
        with descriptors_left(15):
            for sock in sockets:
                sock.connect(("127.0.0.1", found.port))
            refused = [sock for sock in sockets if await loop.run_in_executor(None, got_nothing, sock)]
            assert len(refused) >= 15
            assert found.refused >= 15
            session = there.amqp.begin()
            there.writer.write(there.amqp.data_to_send())
            there.amqp.receive(await there.reader.read(65536), time.monotonic())
            assert session.remote_channel is not None
            for _ in range(reserved // 2):  # not all: the test process opens some itself
                sockets.append(socket.socket())  # for the broker
        for sock in sockets:
            sock.close()
        last.connect(("127.0.0.1", found.port))
        last.sendall(SASL_HEADER)
        last.settimeout(SOON_S)
        assert (await loop.run_in_executor(None, last.recv, 8)) == SASL_HEADER
        last.close()
        there.close()


def got_nothing(sock: socket.socket) -> bool:
    """Return True if the broker refuses this connection; an accepted one answers the header."""
    sock.settimeout(SOON_S)
    try:
        sock.sendall(SASL_HEADER)
        return sock.recv(8) == b""
    except ConnectionError:
        return True
