"""Clients without a login, and slow ones, do not keep others out of the admin server."""

from __future__ import annotations

import asyncio
import base64

import pytest

from bascule.server import admin, admin_http, handshakes
from bascule.server.admin import AdminServer
from bascule.server.admin_access import AdminAccess, AdminRole
from bascule.server.status import BrokerStatus
from tests.unit.server.test_admin import Broker
from tests.unit.server.test_admin_limits import SOON_S, on_its_loop, until_closed


class Waiting(Broker):
    """A broker whose figures take for ever."""

    async def status(self) -> BrokerStatus:
        await asyncio.Event().wait()
        raise AssertionError


async def asked(port: int, path: str, token: str = "") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    login = f"Authorization: Bearer {token}\r\n" if token else ""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n{login}\r\n".encode())
    return reader, writer


@pytest.mark.parametrize("path", ["/metrics", "/queues"], ids=["public-page", "check-of-the-password"])
def test_client_with_a_login_comes_in_while_others_hold_all_connections_without_one(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the page of those takes long, or the check of their credentials."""
    monkeypatch.setattr(handshakes, "GRACE_S", 0.2)
    monkeypatch.setattr(admin_http, "CONNECTIONS_MAX", 8)

    async def check(_user: str, _password: str, _address: str) -> bool:
        await asyncio.Event().wait()
        return False

    tokens = {"t": ("secret", AdminRole.VIEW)}
    access = AdminAccess(restricted=True, tokens=tokens, check=check, public_metrics=True)

    async def run() -> None:
        server = AdminServer(Waiting(), host="127.0.0.1", port=0, access=access)
        server.start()
        login = f"Basic {base64.b64encode(b'ann:wrong').decode()}"
        held = []
        async with asyncio.timeout(SOON_S):
            for _ in range(3 * admin_http.CONNECTIONS_MAX):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {login}\r\n\r\n".encode())
                held.append((reader, writer))
            held.append(await asked(server.port, "/openapi.json", "secret"))
            assert (await held[-1][0].readline()).startswith(b"HTTP/1.1 200")
        for _, writer in held:
            writer.close()
        await server.stop()

    asyncio.run(run())


def test_connections_with_a_login_and_young_ones_are_not_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handshakes, "GRACE_S", 0.0)
    monkeypatch.setattr(admin_http, "CONNECTIONS_MAX", 2)
    access = AdminAccess(restricted=True, tokens={"t": ("secret", AdminRole.VIEW)}, public_metrics=True)

    async def run() -> None:
        server = AdminServer(Waiting(), host="127.0.0.1", port=0, access=access)
        server.start()
        async with asyncio.timeout(SOON_S):
            reader, writer = await asked(server.port, "/overview", "secret")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200")
            first, last = await asked(server.port, "/livez"), await asked(server.port, "/livez")
            assert (await last[0].readline()).startswith(b"HTTP/1.1 200")
            await until_closed(first[0])
            assert not reader.at_eof()
            monkeypatch.setattr(handshakes, "GRACE_S", SOON_S)
            (kept,) = (each for each in server._server.server_state.connections if not each._proven)  # type: ignore[union-attr]
            assert not admin_http.displace_oldest([kept])  # type: ignore[list-item]  # all are of our class
        for each in (writer, first[1], last[1]):
            each.close()
        await server.stop()

    asyncio.run(run())


@pytest.mark.parametrize(("public", "ended"), [(False, "answered"), (True, "cancelled")], ids=["with-login", "public-page"])
def test_answer_to_a_displaced_connection_is_cancelled_unless_it_has_proven_its_login(public: bool, ended: str) -> None:
    """A login may be proven between the choice of the connection and its end."""
    access = AdminAccess(restricted=True, tokens={"t": ("secret", AdminRole.VIEW)}, public_metrics=public)

    async def run() -> None:
        begun, go_on, ends = asyncio.Event(), asyncio.Event(), list[str]()

        class Noting(Broker):
            async def status(self) -> BrokerStatus:
                begun.set()
                try:
                    await go_on.wait()
                except asyncio.CancelledError:
                    ends.append("cancelled")
                    raise
                ends.append("answered")
                return await super().status()

        server = AdminServer(Noting(), host="127.0.0.1", port=0, access=access)
        server.start()
        async with asyncio.timeout(SOON_S):
            reader, writer = await asked(server.port, "/metrics", "secret")
            await begun.wait()
            (connection,) = server._server.server_state.connections
            assert isinstance(connection, admin_http.AdminConnection)
            assert connection._proven is not public
            connection.displace()
            await until_closed(reader)
            go_on.set()
            while not ends:
                await asyncio.sleep(0)
        assert ends == [ended]
        writer.close()
        await server.stop()

    asyncio.run(run())


def test_request_for_metrics_is_refused_if_slow_readers_hold_all_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "STREAM_WAIT_S", 0.2)
    monkeypatch.setattr(admin, "STREAMS_AT_ONCE", 1)

    async def ask(port: int) -> None:
        async with asyncio.timeout(SOON_S):
            _, first = await asked(port, "/metrics")
            reader, second = await asked(port, "/metrics")
            assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        first.close()
        second.close()

    on_its_loop(ask, Waiting())
