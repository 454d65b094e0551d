"""amqps: the client connects only to a broker with a trusted certificate."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from bascule.client import Queue, SecurityDenied, connect
from bascule.core.errors import Unavailable
from tests.unit.client.server import obliging, server


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """Return a file with a self-signed certificate for 127.0.0.1 and its key."""
    file = tmp_path / "broker.pem"
    subject = ("-subj", "/CN=broker", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "1")
    command = ("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", *subject)
    subprocess.run([*command, "-keyout", file, "-out", tmp_path / "certificate"], check=True, capture_output=True)
    file.write_text(file.read_text() + (tmp_path / "certificate").read_text())
    return file


def of_broker(certificate: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    return context


def test_client_sends_messages_to_trusted_broker_over_tls(certificate: Path) -> None:
    trusting = ssl.create_default_context(cafile=certificate)
    with server(obliging, tls=of_broker(certificate)) as url, connect(url, tls=trusting) as context:
        assert context.producer(Queue("q")).send_many(["x" * 100_000] * 20) == 20


def test_client_that_requires_channel_binding_logs_in_by_nothing_else(certificate: Path) -> None:
    trusting, login = ssl.create_default_context(cafile=certificate), {"user": "ann", "password": "hush"}
    for tls in (of_broker(certificate), None):
        with server(obliging, tls=tls) as url, pytest.raises(SecurityDenied, match="require_channel_binding needs TLS, user and password"):
            connect(url, tls=trusting, require_channel_binding=True, **login)
    with server(obliging, tls=of_broker(certificate)) as url, pytest.raises(SecurityDenied, match="no common SASL mechanism"):
        connect(url, tls=trusting, require_channel_binding=True)


def test_client_refuses_broker_with_untrusted_certificate(certificate: Path) -> None:
    with server(obliging, tls=of_broker(certificate)) as url, pytest.raises(Unavailable, match="certificate"):
        connect(url)
