"""Lines of the audit about clients that are refused before SASL: by their certificate, and by the web page that they run in."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from bascule.embedded.process import free_port
from bascule.server.refusal_limits import LINES_AT_ONCE, LINES_PER_S
from tests.support.certificates import Certificate
from tests.support.kafka_in_memory import KafkaInMemory
from tests.support.signer import Signer
from tests.unit.server.broker_process import SOON_S, called, kafka, serving, until
from tests.unit.server.served import run_async
from tests.unit.server.test_audit import lines
from tests.unit.server.test_websocket import AMQP, VERSION, request

__all__ = ["kafka"]
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    return Signer(tmp_path_factory.mktemp("signer"))


def shake_hands(signer: Signer, port: int, certificate: Certificate | None) -> None:
    """Connect with a certificate, and wait until the broker has ended the connection or answered."""
    context = ssl.create_default_context(cafile=signer.certificate)
    if certificate is not None:
        context.load_cert_chain(certificate.certificate, certificate.key)
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), SOON_S) as plain:  # noqa: SIM117
        with context.wrap_socket(plain, server_hostname="localhost") as tls:
            tls.sendall(b"AMQP\x03\x01\x00\x00")
            tls.recv(8)


@pytest.mark.parametrize(
    ("listener", "client", "reason"),
    [
        ("amqp", "expired", "certificate has expired"),
        ("amqp", "stranger", "unable to get local issuer certificate"),
        ("amqp", "", "the client has sent no certificate"),
        ("websocket", "expired", "certificate has expired"),
        ("admin", "expired", "certificate has expired"),  # a certificate is never required there
    ],
)
@run_async
async def test_refused_certificate_is_a_line(
    kafka: KafkaInMemory, signer: Signer, tmp_path: Path, listener: str, client: str, reason: str
) -> None:
    server, file, port = signer.issue("localhost"), tmp_path / "audit.jsonl", free_port()
    of_client = {
        "expired": signer.issue("expired", begins=-2 * DAY, lasts=-DAY), "stranger": Signer(tmp_path, "other").issue("stranger"), "": None
    }[client]  # fmt: skip
    tls = {"certificate": server.certificate, "key": server.key, "client_ca": signer.certificate}
    admin_port = free_port()
    settings: dict[str, Any] = {
        "broker": {"tls": {**tls, "client_certificate": "required"}, "websocket": {"port": port}},
        "admin": {"port": admin_port, "tls": tls},
    }
    async with serving(kafka, tmp_path / "data", audit={"file": file}, **settings) as broker:
        ports = {"amqp": broker.ready[-1], "websocket": port, "admin": admin_port}
        await called(shake_hands, signer, ports[listener], of_client)
        await until(lambda: lines(file), "the line of the refusal")
        (line,) = lines(file)
    assert (line["action"], line["allowed"], line["mechanism"], line["who"]) == ("login", False, "TLS", "")
    assert reason in line["result"]
    assert line["from"].startswith("127.0.0.1:")


@run_async
async def test_refused_web_page_is_a_line(kafka: KafkaInMemory, tmp_path: Path) -> None:
    file, port = tmp_path / "audit.jsonl", free_port()
    async with serving(kafka, tmp_path / "data", audit={"file": file}, broker={"websocket": {"port": port}}):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(request(VERSION, AMQP, "Origin: http://evil.example"))
        assert b"403" in await asyncio.wait_for(reader.readline(), SOON_S)
        writer.close()
        (line,) = lines(file)
    assert (line["action"], line["allowed"], line["mechanism"]) == ("login", False, "WebSocket")
    assert "http://evil.example" in line["result"]


#: Refusals in the tests of their limit; many of them take less than a second.
REFUSALS = 60


async def answered(port: int, data: bytes) -> None:
    """Send data, and wait for the end of the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with suppress(OSError):  # the broker may reset the connection
        writer.write(data)
        await asyncio.wait_for(reader.read(), SOON_S)
    writer.close()


def wrong_login(port: int) -> bytes:
    """Return a login with a mechanism that the broker does not know: no password is checked, so nothing delays it."""
    name = b"\xa3\x04NONE"
    body = b"\x00\x53\x41\xc0" + bytes([len(name) + 1, 1]) + name
    return b"AMQP\x03\x01\x00\x00" + (len(body) + 8).to_bytes(4, "big") + b"\x02\x01\x00\x00" + body


def foreign_page(port: int) -> bytes:
    return request(VERSION, AMQP, "Origin: http://" + "e" * 900)


def without_login(port: int) -> bytes:
    return f"GET /status HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\nconnection: close\r\n\r\n".encode()


def foreign_host(port: int) -> bytes:
    return b"GET /status HTTP/1.1\r\nhost: evil.example\r\nconnection: close\r\n\r\n"


def no_amqp(port: int) -> bytes:
    return b"GET / HTTP/1.1\r\n\r\n"


@pytest.mark.parametrize(
    ("listener", "data", "action"),
    [
        ("amqp", wrong_login, "login"),
        ("amqp", no_amqp, ""),
        ("websocket", foreign_page, "login"),
        ("admin", without_login, "administration"),
        ("admin", foreign_host, "administration"),
    ],
)
@run_async
async def test_peer_without_a_login_causes_a_limited_number_of_lines(
    kafka: KafkaInMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture, listener: str, data: Callable[[int], bytes], action: str
) -> None:
    file, port, admin_port = tmp_path / "audit.jsonl", free_port(), free_port()
    settings: dict[str, Any] = {"broker": {"users": {"ann": "a"}, "websocket": {"port": port}}, "admin": {"port": admin_port}}
    caplog.set_level("INFO", logger="bascule.server")
    async with serving(kafka, tmp_path / "data", audit={"file": file}, **settings) as broker:
        target = {"amqp": broker.ready[-1], "websocket": port, "admin": admin_port}[listener]
        begin_s = time.monotonic()
        for _ in range(REFUSALS):
            await answered(target, data(target))
        took_s = time.monotonic() - begin_s
    most = LINES_AT_ONCE + took_s * LINES_PER_S + 2  # each second of a slow machine allows another one; one more has the rest
    found = lines(file) if file.exists() else []
    logged = [each for each in caplog.messages if "peer=127.0.0.1" in each]
    assert len(logged) <= most
    assert len(found) <= most
    if action:
        assert {each["action"] for each in found} == {action}
        of_refusals = [each for each in found if each["result"] != "refused before login"]
        assert len(of_refusals) + sum(each.get("unwritten", 0) for each in found) == REFUSALS
        assert found[-1]["unwritten"] > 0
    if listener != "admin":  # the log has no lines about requests
        assert "refusals before login not logged" in caplog.text
