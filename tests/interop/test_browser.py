"""rhea in a page of a real Chromium: AMQP over the WebSocket of the browser, with login, permissions, TLS and the origin of the page."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from cryptography.x509 import load_pem_x509_certificate

from bascule.client import ConnectionFactory, Message, Queue
from tests.support.certificates import Authority
from tests.support.chromium import SCRIPTS, fetched, run_script
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import SOON_S, Broker, called, kafka, serving
from tests.unit.server.served import run_async

__all__ = ["kafka"]

SHOP = {name: ["shop"] for name in ("send", "consume", "createAddress", "createDurableQueue")}
USERS = {"users": {"ann": "hush", "bob": "hush"}, "roles": {"shop": ["ann", "bob"]}}
PAGE = b'<!doctype html><title>shop</title><script src="/rhea.js"></script><script src="/exchange.js"></script>'


@contextmanager
def page_server() -> Iterator[str]:
    """Serve the page with rhea, and yield its origin."""
    served = {
        "/": (PAGE, "text/html"),
        "/rhea.js": ((fetched() / "node_modules" / "rhea" / "dist" / "rhea.min.js").read_bytes(), "text/javascript"),
        "/exchange.js": ((SCRIPTS / "rhea-page.js").read_bytes(), "text/javascript"),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body, kind = served.get(self.path, (b"", ""))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind or "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, name="pages", daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


class Exchanges:
    """What pages exchange with a broker."""

    def __init__(self, broker: Broker, directory: Path, scheme: str = "ws", trusted_key: str = "") -> None:
        """``trusted_key`` is the key of a server that the browser trusts: base64 of its SHA-256 hash."""
        self._directory = directory
        self._broker = broker
        self._url = f"{scheme}://127.0.0.1:{broker.life._websocket_port}"
        self._trusted_key = trusted_key

    def exchange(self, *, password: str = "hush", send: str = "", receive: str = "") -> dict[str, str]:
        return {"url": self._url, "user": "ann", "password": password, "send": send, "receive": receive, "text": "from a page"}

    async def run(self, *visits: tuple[str, dict[str, str]]) -> list[dict[str, Any]]:
        """Run one exchange after the other, each in a page of an origin, and return the results."""
        wanted = json.dumps([{"page": f"{origin}/", "exchanges": [each]} for origin, each in visits])
        env = {"VISITS": wanted, "ADMIN": "http://127.0.0.1", "TRUSTED_KEY": self._trusted_key}
        output = await called(run_script, "rhea.mjs", self._directory, env)
        return [results[0] for results in json.loads(output)]

    async def over_tcp(self, queue: str, text: str = "") -> Message | None:
        """Send a text to a queue by a client over TCP; without a text, return the next message of the queue."""

        def run() -> Message | None:
            url = f"amqp://127.0.0.1:{self._broker.ready[-1]}"
            with ConnectionFactory(url, user="bob", password="hush", timeout_s=SOON_S).connect() as context:
                if text:
                    context.send(Queue(queue), text)
                    return None
                with context.consumer(Queue(queue)) as consumer:
                    return consumer.receive(SOON_S)

        return await called(run)


@run_async
async def test_rhea_in_a_browser_sends_and_receives_with_login_permission_and_origin(
    kafka: KafkaInMemory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="bascule")
    with page_server() as shop, page_server() as foreign:
        listener = {**USERS, "websocket": {"port": 0, "origins": [shop]}}
        async with serving(kafka, tmp_path / "broker", broker=listener, permission=[{"match": "orders.#", **SHOP}]) as broker:
            browser = Exchanges(broker, tmp_path)
            await browser.over_tcp("orders.in", "from the office")
            sent, both, secret_sent, secret_read, wrong, refused = await browser.run(
                (shop, browser.exchange(send="orders.out")),
                (shop, browser.exchange(send="orders.out", receive="orders.in")),
                (shop, browser.exchange(send="salaries")),
                (shop, browser.exchange(receive="salaries")),
                (shop, browser.exchange(password="guess", send="orders.out")),
                (foreign, browser.exchange(send="orders.out")),
            )
            message = await browser.over_tcp("orders.out")
    assert sent == {"delivered": "accepted"}
    assert both == {"delivered": "accepted", "received": "from the office"}
    assert message is not None
    assert (message.body, message.properties["from"], message.properties["number"]) == ("from a page", "browser", 7)
    for result, event in ((secret_sent, "sender_error"), (secret_read, "receiver_error")):
        assert (result["refused"], result["condition"]) == (event, "amqp:unauthorized-access")
        assert "ann" in result["description"]
    assert (wrong["refused"], wrong["condition"]) == ("connection_error", "amqp:unauthorized-access")
    assert refused["refused"] == "disconnected"
    (told,) = [line for line in caplog.messages if line.startswith("WebSocket refused, its page is not in broker.websocket.origins")]
    assert told.endswith(f"origin={foreign}")


@run_async
async def test_rhea_in_a_browser_uses_websocket_with_tls_if_the_browser_trusts_the_certificate(
    kafka: KafkaInMemory, tmp_path: Path
) -> None:
    server = Authority(tmp_path).issue("server")
    key = load_pem_x509_certificate(server.certificate.read_bytes()).public_key()
    hashed = hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).digest()
    with page_server() as shop:
        listener = {
            **USERS, "websocket": {"port": 0, "origins": [shop]}, "tls": {"certificate": str(server.certificate), "key": str(server.key)},
        }  # fmt: skip
        async with serving(kafka, tmp_path / "broker", broker=listener, permission=[{"match": "orders.#", **SHOP}]) as broker:
            for directory in ("trusting", "wary", "plain"):
                (tmp_path / directory).mkdir()
            trusting = Exchanges(broker, tmp_path / "trusting", "wss", base64.b64encode(hashed).decode())
            sent, received, secret = await trusting.run(
                (shop, trusting.exchange(send="orders.out")),
                (shop, trusting.exchange(receive="orders.out")),
                (shop, trusting.exchange(send="salaries")),
            )
            wary = Exchanges(broker, tmp_path / "wary", "wss")
            plain = Exchanges(broker, tmp_path / "plain", "ws")
            ((untrusted,), (unprotected,)) = (
                await wary.run((shop, wary.exchange(send="orders.out"))), await plain.run((shop, plain.exchange(send="orders.out"))),
            )  # fmt: skip
    assert (sent, received) == ({"delivered": "accepted"}, {"received": "from a page"})
    assert (secret["refused"], secret["condition"]) == ("sender_error", "amqp:unauthorized-access")
    assert untrusted["refused"] == unprotected["refused"] == "disconnected"
