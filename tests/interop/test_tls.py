"""TLS of a broker and its admin server, seen by a scanner, by somebody between client and broker, and by clients with certificates."""

from __future__ import annotations

import http.client
import json
import select
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from bascule.client import Queue, connect
from bascule.config.users_file import User, changing
from bascule.core.defaults import OWNER_TOKEN_FILE
from bascule.core.errors import BasculeError
from bascule.embedded.kafka import EmbeddedKafka
from tests.interop.conftest import Connect
from tests.support.certificates import Authority, Certificate, java_options
from tests.support.qpid import JmsError
from tests.support.signer import BOTH_PURPOSES, DAY, Signer
from tests.support.system import System, wait_for
from tests.support.tls_scan import (
    HTTP_REQUEST,
    PROTOCOLS,
    SASL_HEADER,
    TIMEOUT_S,
    Scanned,
    allow,
    connected,
    old_ciphers,
    openssl,
    protocols,
    trusting,
    weak_client,
)

SUBJECT = "CN={},OU=sales,O=Acme"
RULE = "RULE:CN=(.*?),OU=sales,O=Acme/acme.$1/L"


class Secured(System):
    """A broker with TLS for AMQP and for its admin server, and with certificates of its clients."""

    def __init__(self, bootstrap: str, directory: Path) -> None:
        self.directory = directory
        self.server_authority = Authority(directory)  # has a trust store for Java
        self.signer = Signer(directory, "clients")
        self.own = self.server_authority.issue("server")
        with changing(directory / "users") as draft:
            for name in ("acme.ann", "acme.gone", "acme.java"):
                draft.content = draft.content.with_user(User(name, {}, ("sales",)))
            draft.content = draft.content.with_user(User.of("bob", "hush", ("sales",)))
        listener = f"""
            certificate = "{self.own.certificate}"
            key = "{self.own.key}"
            client_ca = "{self.signer.certificate}"
            user_from = "distinguished_name"
            user_rules = ["{RULE}"]
            only_known_users = true
        """
        config = f"""
            [broker]
            users_file = "{directory / "users"}"
            [broker.tls]{listener}
            [admin]
            view = ["sales"]
            [admin.tls]{listener}
        """
        super().__init__(bootstrap, directory, prefix="tls", config=config)

    def client(self, name: str, **more: Any) -> Certificate:
        """Issue a certificate for a client."""
        return self.signer.issue(name, subject=SUBJECT.format(name), names=(), **more)

    def java_url(self, client: Certificate | None = None, options: str = "") -> str:
        return f"amqps://127.0.0.1:{self.port}?{java_options(self.server_authority.trust_store, client)}{options}"

    def python_url(self) -> str:
        return f"amqps://localhost:{self.port}"

    def trusting(self, client: Certificate | None = None) -> ssl.SSLContext:
        context = trusting(self.server_authority.certificate)
        if client is not None:
            context.load_cert_chain(client.certificate, client.key)
        return context

    def https(self, path: str, client: Certificate | None = None, *, owner: bool = False) -> tuple[int, Any]:
        """Return status and answer of the admin server."""
        headers = {"authorization": f"Bearer {(self.data_dir / OWNER_TOKEN_FILE).read_text()}"} if owner else {}
        connection = http.client.HTTPSConnection("localhost", self.admin_port, context=self.trusting(client), timeout=TIMEOUT_S)
        with closing(connection):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    def scanned(self, listener: str) -> Scanned:
        return Scanned(self.port) if listener == "amqp" else Scanned(self.admin_port, HTTP_REQUEST)

    def _get(self, path: str, timeout_s: float) -> Any:
        return json.loads(self.https(f"/{path}", owner=True)[1])


@pytest.fixture(scope="module")
def secured(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with Secured(kafka.bootstrap, tmp_path_factory.mktemp("tls")) as running:
        yield running


@pytest.fixture(scope="module", params=["amqp", "admin"])
def listener(request: pytest.FixtureRequest, secured: Secured) -> Scanned:
    return secured.scanned(request.param)


@contextmanager
def permissive(secured: Secured) -> Iterator[Scanned]:
    """Serve TLS that accepts everything, to show that the scanner would find it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secured.own.certificate, secured.own.key)
    context.set_ciphers("ALL:@SECLEVEL=0")
    allow(context, PROTOCOLS[0], PROTOCOLS[-1])

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                plain, _ = listening.accept()
                with suppress(OSError), context.wrap_socket(plain, server_side=True) as tls:
                    tls.sendall(tls.recv(len(SASL_HEADER)))

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve, args=(listening,))
        thread.start()
        try:
            yield Scanned(listening.getsockname()[1])
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(TIMEOUT_S)


def test_scanner_finds_tls_1_2_and_1_3_only(listener: Scanned, secured: Secured) -> None:
    assert protocols(listener) == {"TLSv1.2", "TLSv1.3"}
    with permissive(secured) as other:
        assert {"TLSv1", "TLSv1.1"} <= protocols(other), "the scanner would not find old protocols"


def test_scanner_finds_cipher_suites_with_forward_secrecy_and_authenticated_encryption_only(listener: Scanned, secured: Secured) -> None:
    found = old_ciphers(listener)
    assert found
    assert all(each.startswith("ECDHE-") and ("GCM" in each or "POLY1305" in each) for each in found), found
    with permissive(secured) as other:
        assert not all("GCM" in each or "POLY1305" in each for each in old_ciphers(other)), "the scanner would not find weak suites"


def test_scanner_finds_neither_compression_nor_renegotiation(listener: Scanned) -> None:
    seen = connected(listener, weak_client(ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2))
    assert seen is not None
    assert seen.compression is None
    report = openssl(listener, "-tls1_2", "-comp", "-legacy_renegotiation", say="R\n")
    assert "Compression: NONE" in report
    assert "Secure Renegotiation IS supported" in report  # protects the first handshake; see RFC 5746
    _, asked, after = report.partition("RENEGOTIATING")
    assert asked
    assert "no renegotiation" in after


@pytest.mark.parametrize("name", [None, "localhost", "other.example", "x" * 60 + ".example"])
def test_each_server_name_gets_the_certificate_of_the_settings(name: str | None, listener: Scanned, secured: Secured) -> None:
    seen = connected(listener, weak_client(), name)
    assert seen is not None
    assert seen.certificate == ssl.PEM_cert_to_DER_cert(secured.own.certificate.read_text())


@pytest.mark.parametrize("protocol", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_scanner_connects_without_or_with_a_valid_certificate_only(
    protocol: ssl.TLSVersion, listener: Scanned, secured: Secured, tmp_path: Path
) -> None:
    server_only = BOTH_PURPOSES[:1]
    certificates: dict[str, tuple[Certificate | None, bool]] = {
        "none": (None, True),
        "valid": (secured.client("valid"), True),
        "of no user": (secured.client("nobody"), True),
        "expired": (secured.client("expired", begins=-2 * DAY, lasts=-DAY), False),
        "not yet valid": (secured.client("early", begins=DAY), False),
        "for servers": (secured.client("server-only", purposes=server_only), False),
        "of another authority with the same name": (Signer(tmp_path, "clients").issue("stranger"), False),
        "of the server": (secured.own, False),
    }
    found = {what: connected(listener, weak_client(protocol, protocol), None, each) is not None for what, (each, _) in certificates.items()}
    assert found == {what: accepted for what, (_, accepted) in certificates.items()}


def test_connection_without_tls_gets_no_answer_of_amqp_or_http(listener: Scanned) -> None:
    for begin in (SASL_HEADER, HTTP_REQUEST):
        with socket.create_connection(("127.0.0.1", listener.port), TIMEOUT_S) as plain:
            plain.sendall(begin)
            with suppress(ConnectionError):
                assert not plain.recv(100).startswith((b"AMQP", b"HTTP"))


@pytest.mark.parametrize("options", ["", "&transport.enabledProtocols=TLSv1.2", "&transport.enabledProtocols=TLSv1.3"])
def test_java_client_logs_in_by_the_distinguished_name_of_its_certificate(
    options: str, secured: Secured, connect_to: Connect, queue: str
) -> None:
    connection = connect_to(secured.java_url(secured.client("java"), options))
    connection.session().producer(queue).send("kept")
    assert connection.session().consumer(queue).receive().body == "kept"
    wait_for(lambda: secured.logins() == [("acme.java", "EXTERNAL")], "the Java client alone")


@pytest.mark.parametrize("name", ["nobody", "expired"])
def test_java_client_with_an_expired_certificate_or_of_an_unknown_user_is_refused(name: str, secured: Secured, connect_to: Connect) -> None:
    certificate = secured.client(name, begins=-2 * DAY, lasts=-DAY) if name == "expired" else secured.client(name)
    with pytest.raises(JmsError):
        connect_to(secured.java_url(certificate, "&jms.connectTimeout=20000"))


def test_java_client_uses_scram_without_channel_binding(secured: Secured, connect_to: Connect) -> None:
    connect_to(secured.java_url(), user="bob", password="hush")
    wait_for(lambda: secured.logins() == [("bob", "SCRAM-SHA-512")], "the Java client alone")


@pytest.mark.parametrize("protocol", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_python_client_binds_its_login_to_the_connection(protocol: ssl.TLSVersion, secured: Secured) -> None:
    tls = secured.trusting()
    tls.maximum_version = protocol
    with connect(secured.python_url(), tls=tls, user="bob", password="hush", require_channel_binding=True):
        wait_for(lambda: secured.logins() == [("bob", "SCRAM-SHA-512-PLUS")], "the Python client alone")


def test_login_is_refused_if_somebody_between_ends_tls_with_a_trusted_certificate(
    secured: Secured, monkeypatch: pytest.MonkeyPatch
) -> None:
    with relay(secured, secured.server_authority.issue("between")) as port:
        url = f"amqps://localhost:{port}"
        with pytest.raises(BasculeError, match="the server refused SCRAM-SHA-512-PLUS"):
            connect(url, tls=secured.trusting(), user="bob", password="hush")
        with pytest.raises(BasculeError, match="somebody between client and server ends TLS"):
            connect(url, tls=secured.trusting(), user="bob", password="hush", require_channel_binding=True)
        monkeypatch.setattr("bascule.client.pump.server_end_point", lambda _: None)
        with connect(url, tls=secured.trusting(), user="bob", password="hush"):  # a client without channel binding sees nothing
            pass


@contextmanager
def relay(secured: Secured, certificate: Certificate) -> Iterator[int]:
    """Pass on what clients say, over TLS connections of the relay's own to the broker."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    threads: list[threading.Thread] = []
    connections: list[socket.socket] = []

    def pass_on(front: ssl.SSLSocket, back: ssl.SSLSocket) -> None:
        # One thread for both directions: OpenSSL does not allow two threads to use a connection at once.
        with suppress(OSError):
            while True:
                for source, target in ((front, back), (back, front)):
                    source.settimeout(0)
                    with suppress(ssl.SSLWantReadError):
                        data = source.recv(1 << 16)
                        target.settimeout(TIMEOUT_S)
                        target.sendall(data)
                        if not data:
                            raise ConnectionError("one side has closed the connection")
                if not front.pending() and not back.pending():
                    select.select([front, back], [], [])
        for each in (front, back):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def serve(listening: socket.socket) -> None:
        with suppress(OSError):
            while True:
                plain, _ = listening.accept()
                front = context.wrap_socket(plain, server_side=True)
                back = secured.trusting().wrap_socket(socket.create_connection(("127.0.0.1", secured.port)), server_hostname="localhost")
                connections.extend((front, back))
                threads.append(threading.Thread(target=pass_on, args=(front, back)))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threads.append(threading.Thread(target=serve, args=(listening,)))
        threads[0].start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            for each in connections:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for thread in threads:
                thread.join(TIMEOUT_S)
            for each in connections:
                each.close()


def test_admin_server_knows_the_user_of_a_certificate(secured: Secured) -> None:
    assert secured.https("/status")[0] == 401
    assert secured.https("/status", secured.client("ann"))[0] == 200
    assert secured.https("/dead-letters", secured.client("ann"))[0] == 403
    assert secured.https("/status", secured.client("nobody"))[0] == 401


def test_removed_user_loses_the_connections_of_its_certificate(secured: Secured, connect_to: Connect, queue: str) -> None:
    gone, stays = secured.client("gone"), connect_to(secured.java_url(secured.client("ann")))
    lost = connect_to(secured.java_url(gone))
    with changing(secured.directory / "users") as draft:
        draft.content = draft.content.without("acme.gone")
    assert "user 'acme.gone' was removed" in str(lost.events(count=1))
    stays.session().producer(queue).send("x")
    with pytest.raises(JmsError):
        connect_to(secured.java_url(gone, "&jms.connectTimeout=20000"))


def test_new_connections_use_a_renewed_certificate_and_existing_ones_continue(secured: Secured, connect_to: Connect, queue: str) -> None:
    java = connect_to(secured.java_url(), user="bob", password="hush")
    python = connect(secured.python_url(), tls=secured.trusting(), user="bob", password="hush")
    renewed = secured.server_authority.issue("renewed")
    loaded = secured.broker.said().count("certificates loaded again")
    secured.own.key.write_bytes(b"")
    wait_for(lambda: 'bascule_tls_last_reload_successful{listener="broker"} 0.0' in secured.https("/metrics", owner=True)[1], "the metric")
    assert "certificates not loaded again, the certificates before stay" in secured.broker.said()
    with connect(secured.python_url(), tls=secured.trusting(), user="bob", password="hush"):
        pass
    secured.own.certificate.write_bytes(renewed.certificate.read_bytes())
    secured.own.key.write_bytes(renewed.key.read_bytes())
    wait_for(lambda: secured.broker.said().count("certificates loaded again") == loaded + 2, "both listeners to load the files")
    for listener in ("amqp", "admin"):
        seen = connected(secured.scanned(listener), weak_client())
        assert seen is not None
        assert seen.certificate == ssl.PEM_cert_to_DER_cert(renewed.certificate.read_text())
    with connect(secured.python_url(), tls=secured.trusting(), user="bob", password="hush"):
        wait_for(lambda: secured.logins().count(("bob", "SCRAM-SHA-512-PLUS")) == 2, "a login that is bound to the new certificate")
    with python:
        python.send(Queue(queue.removeprefix("queue:")), "x")
    java.session().producer(queue).send("x")


def test_scanner_has_caused_no_error_in_the_broker(secured: Secured) -> None:
    """Must be the last test of this module."""
    said = secured.broker.said()
    assert "Traceback" not in said
    assert "uncaught asyncio error" not in said
    assert "error contained" not in said
