"""Metrics of many queues with long names: the answer is made in pieces, and slow peers keep little memory."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress

import pytest
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from bascule.broker.send_times import SendTimes
from bascule.server import answer_places, exposition, pieces_answer
from bascule.server.admin import STREAMS_AT_ONCE, AdminServer
from bascule.server.admin_access import AdminAccess, AdminRole
from bascule.server.status import UserStatus
from bascule.server.status_metrics import SLICE, SendTimesCollector, StatusCollector
from tests.support.speed import SLOWNESS
from tests.unit.server.test_admin import QUEUE, Broker, get, served

SOON_S = 20.0 * SLOWNESS
REQUEST = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n"


def broker_of(queues: int, name_length: int) -> Broker:
    broker = Broker()
    names = [f"{number:05}".ljust(name_length, "n") for number in range(queues)]
    broker.now["queues"] = [{**QUEUE, "name": name, "address": name} for name in names]
    return broker


@pytest.mark.parametrize("queues", [0, 1, SLICE, SLICE + 1, 3 * SLICE])
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_pieces_are_the_text_of_all_metrics(queues: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "PIECE_BYTES", piece)
    broker = broker_of(queues, 8)
    broker.now["users"] = [
        UserStatus(user=f'"\\{n}\n', connections=1, sessions=1, links=1, transactions=0, queues=0, durable_subscriptions=0)
        for n in range(2)
    ]
    status, times = StatusCollector(broker.now), SendTimesCollector(SendTimes())
    registry = CollectorRegistry(auto_describe=False)
    registry.register(status)
    registry.register(times)
    pieces = list(exposition.exposition([*status.slices(), *times.collect()]))
    assert b"".join(pieces) == generate_latest(registry)
    assert (len(pieces) > 10) == (piece == 1)


def test_answer_about_many_queues_with_long_names_takes_little_memory() -> None:
    broker = broker_of(1_000, 1_000)

    async def ask(port: int) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(REQUEST.replace(b"localhost", b"localhost\r\nConnection: close"))
        size = 0
        async with asyncio.timeout(SOON_S):
            while data := await reader.read(1 << 16):
                size += len(data)
        writer.close()
        return size

    async def run() -> tuple[int, int]:
        server = AdminServer(broker, host="127.0.0.1", port=0)
        server.start()
        await ask(server.port)  # fills caches
        tracemalloc.start()
        try:
            size = await ask(server.port)
            return size, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            await server.stop()

    size, peak = asyncio.run(run())
    assert size > 10_000_000
    assert peak < 5_000_000


def test_slow_readers_are_few_and_end_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = broker_of(4_000, 1_000)
    asked = 0
    status = broker.status

    async def counted() -> object:
        nonlocal asked
        asked += 1
        return await status()

    monkeypatch.setattr(broker, "status", counted)
    monkeypatch.setattr(pieces_answer, "ANSWER_TIMEOUT_S", 1.0)

    async def run() -> None:
        server = AdminServer(broker, host="127.0.0.1", port=0)
        server.start()
        connections = server._server.server_state.connections
        peers = [socket.socket() for _ in range(STREAMS_AT_ONCE + 2)]
        for peer in peers:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.setblocking(False)
            await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", server.port))
            await asyncio.get_running_loop().sock_sendall(peer, REQUEST)
        async with asyncio.timeout(SOON_S):
            while asked < STREAMS_AT_ONCE:
                await asyncio.sleep(0.01)
            most = asked
            while asked == most:
                assert len(connections) <= len(peers)
                await asyncio.sleep(0.01)
            assert most == STREAMS_AT_ONCE, "the others wait until one has ended"
            while connections:
                await asyncio.sleep(0.01)
        for peer in peers:
            peer.close()
        assert asked == len(peers)
        await server.stop()

    asyncio.run(run())
    assert broker.contained == []


@pytest.mark.parametrize("path", ["/metrics", "/queues"])
def test_peer_that_has_no_answer_gets_the_place_of_one_that_reads_slowly_and_has_several(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answer_places, "SLOW_AFTER_S", 0.3)
    tokens = {name: (f"secret-{name}", AdminRole.VIEW) for name in ("slow", "prometheus")}
    access = AdminAccess(restricted=True, tokens=tokens, public_metrics=True, insecure=True)
    broker = broker_of(4_000, 1_000)

    def request(name: str) -> bytes:
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer secret-{name}\r\n\r\n".encode()

    async def run() -> None:
        server = AdminServer(broker, host="127.0.0.1", port=0, access=access)
        server.start()
        loop = asyncio.get_running_loop()
        peers = [socket.socket() for _ in range(2 * STREAMS_AT_ONCE)]
        for peer in peers:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.setblocking(False)
            await loop.sock_connect(peer, ("127.0.0.1", server.port))
            await loop.sock_sendall(peer, request("slow"))
        async with asyncio.timeout(SOON_S):
            # Metrics are public here, so the address counts; the others have a login.
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port, local_addr=("127.0.0.2", 0))
            writer.write(request("prometheus"))
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()
        for peer in peers:
            peer.close()
        await server.stop()

    asyncio.run(run())
    assert broker.contained == []


class Broken(Collector):
    """A collector with a defect."""

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("good", "a metric", value=1)
        raise ZeroDivisionError


@pytest.mark.parametrize("begun", [False, True])
def test_error_of_a_collector_is_contained_and_the_answer_is_an_error_or_not_complete(begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Broker()
    if begun:
        monkeypatch.setattr(exposition, "PIECE_BYTES", 1)

    async def run() -> bytes:
        server = AdminServer(broker, host="127.0.0.1", port=0, collectors=[Broken()])
        server.start()
        try:
            answers = []
            for _ in range(STREAMS_AT_ONCE + 1):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(REQUEST.replace(b"localhost", b"localhost\r\nConnection: close"))
                async with asyncio.timeout(SOON_S):
                    with suppress(ConnectionError):
                        while data := await reader.read(1 << 16):
                            answers.append(data)
                writer.close()
            return b"".join(answers)
        finally:
            await server.stop()

    answer = asyncio.run(run())
    assert b"\r\n0\r\n\r\n" not in answer
    assert (answer.count(b"HTTP/1.1 500"), b"bascule_serving 1.0" in answer) == (0 if begun else STREAMS_AT_ONCE + 1, begun)
    assert broker.contained == [("/metrics", "ZeroDivisionError()")] * (STREAMS_AT_ONCE + 1)


def test_head_gets_no_body() -> None:
    def ask(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as peer:
            peer.sendall(REQUEST.replace(b"GET", b"HEAD") + REQUEST.replace(b"localhost", b"localhost\r\nConnection: close"))
            received = b""
            while data := peer.recv(1 << 16):
                received += data
        assert received.count(b"HTTP/1.1 200") == 2
        assert received.count(b"# TYPE bascule_serving") == 1
        assert get(port, "/metrics")[0] == 200

    served(Broker(), ask)
