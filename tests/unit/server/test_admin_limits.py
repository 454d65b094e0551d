"""The admin server and hostile peers: slow ones, many, and requests made to break its parsers."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

import h11
import pytest
import uvloop

from bascule.server import admin_http, handshakes
from bascule.server.admin import AdminServer
from bascule.server.handshakes import HandshakeLimits
from tests.support.speed import SLOWNESS
from tests.unit.server.test_admin import Broker, get, post, served

SOON_S = 20.0 * SLOWNESS
ACTION = "/queues/purge"


def on_its_loop(ask: Callable[[int], Awaitable[None]], broker: Broker | None = None) -> None:
    async def run() -> None:
        server = AdminServer(broker or Broker(), host="127.0.0.1", port=0)
        server.start()
        try:
            await ask(server.port)
        finally:
            await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Return all that the server sends until it ends the connection."""
    received = b""
    with suppress(ConnectionError):
        async with asyncio.timeout(SOON_S):
            while data := await reader.read(65536):
                received += data
    return received


REQUEST_BEGUN = f"POST {ACTION} HTTP/1.1\r\nHost: localhost\r\n".encode()


@pytest.mark.parametrize(
    "request_start",
    [
        b"",
        b"GET /livez HT",
        REQUEST_BEGUN,
        REQUEST_BEGUN + b"Content-Length: 100\r\n\r\n{",
    ],
    ids=["nothing", "half-a-line", "half-a-head", "half-a-body"],
)
def test_an_incomplete_request_is_closed_after_the_timeout(request_start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_http, "REQUEST_TIMEOUT_S", 0.5)

    async def ask(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request_start)
        assert await until_closed(reader) == b""
        writer.close()

    on_its_loop(ask)


def test_a_peer_that_sends_headers_slowly_is_closed_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_http, "REQUEST_TIMEOUT_S", 0.5)

    async def ask(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)

        async def dribble() -> None:
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n")
            while True:
                writer.write(b"X: y\r\n")
                await asyncio.sleep(0.05)

        task = asyncio.create_task(dribble())
        await until_closed(reader)
        task.cancel()
        writer.close()

    on_its_loop(ask)


def test_a_peer_that_does_not_read_its_answer_is_closed_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_http, "REQUEST_TIMEOUT_S", 0.5)
    broker = Broker()
    broker.now |= {"reason": "x" * (32 << 20)}

    async def run() -> None:
        server = AdminServer(broker, host="127.0.0.1", port=0)
        server.start()
        connections = server._server.server_state.connections
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(b"GET /status HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(SOON_S):
                while not connections:
                    await asyncio.sleep(0.01)
                while connections:
                    await asyncio.sleep(0.01)
        await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


STYLE = b"GET /console/style.css HTTP/1.1\r\nHost: localhost\r\n"  # an answer of some KiB for everybody


@pytest.mark.parametrize("last", [b"", b"Connection: close\r\n"], ids=["one-more-request", "connection-close"])
def test_a_peer_that_sends_requests_and_reads_no_answer_is_closed_after_the_timeout(last: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server = AdminServer(Broker(), host="127.0.0.1", port=0)
        server.start()
        loop, state, asked = asyncio.get_running_loop(), server._server.server_state, 0

        async def fill(full: Callable[[Any], bool]) -> None:
            nonlocal asked
            while not any(map(full, state.connections)):
                await loop.sock_sendall(sock, STYLE + b"\r\n")
                asked += 1
                while state.total_requests < asked:
                    await asyncio.sleep(0)

        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.setblocking(False)
            async with asyncio.timeout(SOON_S):
                await fill(lambda connection: connection.transport.get_write_buffer_size() > 0)
                monkeypatch.setattr(admin_http, "REQUEST_TIMEOUT_S", 1.0)
                if not last:
                    await fill(lambda connection: connection.flow.write_paused)
                assert state.connections
                await loop.sock_sendall(sock, STYLE + last + b"\r\n")
                while state.connections:
                    await asyncio.sleep(0.01)
        assert state.total_requests == asked + bool(last)
        await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


def test_a_page_behind_another_request_in_the_same_piece_may_take_longer_than_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_http, "REQUEST_TIMEOUT_S", 0.2)

    class Slow(Broker):
        async def look(self, name: str, parameters: Mapping[str, str]) -> object:
            await asyncio.sleep(0.6)  # the time of the page
            return await super().look(name, parameters)

    async def ask(port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        requests = [f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n" for path in ("/livez", "/messages/life?id=a")]
        writer.write("".join(requests).encode())
        assert (await until_closed(reader)).count(b"HTTP/1.1 200") == 2
        writer.close()

    on_its_loop(ask, Slow())


def test_silent_peers_do_not_block_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "GRACE_S", 0.2)
    monkeypatch.setattr(admin_http, "LIMITS", HandshakeLimits(10, 5, SOON_S))

    async def ask(port: int) -> None:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(30)]
        assert await asyncio.to_thread(get, port, "/livez") == (200, "ok\n")
        for _, writer in silent:
            writer.close()

    on_its_loop(ask)


def test_idle_connections_do_not_block_other_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "GRACE_S", 0.2)
    monkeypatch.setattr(admin_http, "LIMITS", HandshakeLimits(10, 5, SOON_S))

    async def ask(port: int) -> None:
        idle = []
        for _ in range(30):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(SOON_S):
                assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            idle.append(writer)
        assert await asyncio.to_thread(get, port, "/livez") == (200, "ok\n")
        for writer in idle:
            writer.close()

    on_its_loop(ask)


def test_requests_of_one_address_do_not_get_it_more_connections_than_its_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "GRACE_S", 0.5)
    monkeypatch.setattr(admin_http, "KEEP_ALIVE_S", 60)
    monkeypatch.setattr(admin_http, "LIMITS", HandshakeLimits(10, 5, SOON_S))

    async def run() -> None:
        server = AdminServer(Broker(), host="127.0.0.1", port=0)
        server.start()
        writers: list[asyncio.StreamWriter] = []

        async def ask() -> None:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writers.append(writer)
            writer.write(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")

        try:
            async with asyncio.timeout(SOON_S):
                await asyncio.gather(*(ask() for _ in range(30)))
                while len(server._server.server_state.connections) > 5:
                    await asyncio.sleep(0.01)
        finally:
            for writer in writers:
                writer.close()
            await server.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run())


BODIES = {
    "nested-lists": "[" * 30_000,
    "nested-lists-closed": "[" * 30_000 + "]" * 30_000,
    "nested-objects": '{"name":' * 10_000,
    "a-long-number": '{"name": ' + "1" * 5_000 + "}",
    "half-a-surrogate-pair": '{"name": "\\ud800"}',
    "half-a-surrogate-pair-in-a-list": '{"name": [{"a": "\\ud800"}]}',
    "half-a-surrogate-pair-as-a-name-in-an-object": '{"name": {"\\ud800": 1}}',
    "half-a-surrogate-pair-as-a-name": '{"\\ud800": "q"}',
    "no-number": '{"name": NaN}',
    "no-utf-8": "\udcff",
    "a-list": "[]",
    "text": '"name"',
    "a-lot": json.dumps({"name": "x" * 70_000}),
    "nul": '{"name": "\\u0000"}' + "\0",
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_body_that_is_no_object_of_arguments_is_answered_with_400(body: str) -> None:
    broker = Broker()

    def ask(port: int) -> None:
        code, answer = raw_post(port, body.encode(errors="surrogateescape"))
        assert code == 400, answer
        assert answer["error"]

    served(broker, ask)
    assert broker.acted == []


def raw_post(port: int, body: bytes) -> tuple[int, Any]:
    with socket.create_connection(("127.0.0.1", port), SOON_S) as sock:
        sock.sendall(REQUEST_BEGUN + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        received = b""
        with suppress(ConnectionError):
            while data := sock.recv(65536):
                received += data
    head, _, answer = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(answer)


QUERIES = {
    "count-of-many-digits": ("/dead-letters?count=" + "9" * 5_000, 400),
    "count-in-other-digits": ("/dead-letters?count=%D9%A1", 400),
    "count-of-none": ("/dead-letters?count=%C2%B2", 400),
    "count-below-1": ("/dead-letters?count=0", 400),
    "name-with-a-surrogate": ("/queues?name=%ED%A0%80", 404),
    "name-that-is-no-percent-encoding": ("/queues?name=%zz%f", 404),
    "name-of-nul": ("/queues?name=%00", 404),
    "many-names": ("/queues?" + "&".join(["name=x"] * 1_000), 404),
    "path-with-a-surrogate": ("/%ED%A0%80", 404),
    "path-that-is-no-percent-encoding": ("/%zz", 404),
}


@pytest.mark.parametrize(("path", "code"), QUERIES.values(), ids=QUERIES)
def test_an_invalid_query_is_answered_with_a_client_error(path: str, code: int) -> None:
    def ask(port: int) -> None:
        assert get(port, path)[0] == code

    served(Broker(), ask)


def answer_to(request: bytes) -> bytes:
    """Return the server's answer to a peer that sends ``request`` at once, and then nothing."""
    answer = b""

    def ask(port: int) -> None:
        nonlocal answer
        with socket.create_connection(("127.0.0.1", port), SOON_S) as sock:
            sock.sendall(request)
            sock.shutdown(socket.SHUT_WR)
            while data := sock.recv(65536):
                answer += data

    served(Broker(), ask)
    return answer


def test_chunked_request_body_is_refused_and_not_parsed_further(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    parse = h11.Connection.receive_data
    monkeypatch.setattr(h11.Connection, "receive_data", lambda self, data: parsed.append(len(data)) or parse(self, data))
    answer = answer_to(REQUEST_BEGUN + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n \r\n" * 12_000 + b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 411")
    assert max(parsed) <= admin_http.PIECE_BYTES
    assert sum(parsed) < 10 * admin_http.PIECE_BYTES


def test_pipelined_admin_requests_are_answered_in_order() -> None:
    count = 2 * admin_http.PIECE_BYTES // len(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert answer_to(b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n" * count).count(b"HTTP/1.1 200") == count


def test_request_longer_than_read_buffer_piece_is_answered() -> None:
    body = b'{"name": "' + b"x" * 60_000 + b'"}'
    assert answer_to(REQUEST_BEGUN + b"Content-Length: %d\r\n\r\n" % len(body) + body).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("rest", [b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\nx\r\n"], ids=["cut-off", "no-chunk"])
def test_a_peer_that_aborts_its_request_causes_no_log_line(rest: bytes, caplog: pytest.LogCaptureFixture) -> None:
    answer_to(REQUEST_BEGUN + rest)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


def test_a_duplicate_name_in_the_arguments_is_refused() -> None:
    body = b'{"name": "q", "name": "r"}'
    answer = answer_to(REQUEST_BEGUN + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"twice" in answer


def test_a_path_with_a_trailing_slash_is_not_found_and_not_redirected() -> None:
    answer = answer_to(b"GET /status/ HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 404")


def test_a_path_with_a_line_break_at_its_end_is_not_found(caplog: pytest.LogCaptureFixture) -> None:
    def ask(port: int) -> None:
        for path in ("/livez", "/status", "/queues", "/overview", "/console/"):
            assert get(port, f"{path}%0a") == (404, '{"error":"there is no such path"}')
        assert post(port, f"{ACTION}%0a", '{"name": "q"}')[0] == 404

    broker = Broker()
    served(broker, ask)
    assert broker.acted == []
    assert caplog.records == []


def test_peer_that_resets_its_connection_during_the_answer_causes_no_log_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_connected(_: object) -> None:
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))

    monkeypatch.setattr(asyncio.selector_events._SelectorSocketTransport, "write_eof", not_connected)

    async def run() -> None:
        server = AdminServer(Broker(), host="127.0.0.1", port=0)
        server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(REQUEST_BEGUN + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{")
        assert b"411" in await until_closed(reader)
        writer.close()
        await server.stop()

    asyncio.run(run())
    assert caplog.records == []


def test_request_with_too_long_head_is_refused() -> None:
    def ask(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), SOON_S) as sock, suppress(ConnectionError):
            sock.sendall(b"GET /livez?" + b"x" * admin_http.HEADERS_BYTES_MAX)
            assert sock.recv(1000).startswith(b"HTTP/1.1 400")
        assert post(port, ACTION, '{"name": "q"}')[0] == 200

    served(Broker(), ask)


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_client_that_leaves_ends_its_search(reset: bool) -> None:
    class Searching(Broker):
        def __init__(self) -> None:
            super().__init__()
            self.begun, self.cancelled = asyncio.Event(), asyncio.Event()

        async def look(self, name: str, parameters: Mapping[str, str]) -> object:
            self.begun.set()
            try:
                return await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise

    broker = Searching()

    async def ask(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /messages/life?id=a HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(SOON_S):
            await broker.begun.wait()
            if reset:
                writer.transport.abort()
            else:
                writer.close()
            await broker.cancelled.wait()

    on_its_loop(ask, broker)


def test_client_that_waits_gets_the_answer_of_its_search() -> None:
    async def ask(port: int) -> None:
        code, text = await asyncio.to_thread(get, port, "/messages/life?id=a")
        assert (code, json.loads(text)["parameters"]) == (200, {"id": "a"})

    on_its_loop(ask)
