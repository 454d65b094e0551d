"""A look at a TLS listener as a scanner has it: protocols, cipher suites, compression, renegotiation, client certificates."""

from __future__ import annotations

import socket
import ssl
import subprocess
import warnings
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.certificates import Certificate
from tests.support.speed import SLOWNESS

TIMEOUT_S: Final = 60.0 * SLOWNESS
#: Everything that OpenSSL has, however weak.
EVERYTHING: Final = "ALL:COMPLEMENTOFALL:@SECLEVEL=0"
PROTOCOLS: Final = (ssl.TLSVersion.TLSv1, ssl.TLSVersion.TLSv1_1, ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
#: The start of an AMQP connection that wants SASL.
SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"
HTTP_REQUEST: Final = b"GET /livez HTTP/1.1\r\nHost: localhost\r\n\r\n"


class Scanned(NamedTuple):
    """A listener, and what a client says that gets an answer."""

    port: int
    say: bytes = SASL_HEADER


class Seen(NamedTuple):
    """What a client has seen of an accepted connection."""

    protocol: str
    cipher: str
    compression: str | None
    certificate: bytes | None  # none of an anonymous suite


def weak_client(first: ssl.TLSVersion = PROTOCOLS[0], last: ssl.TLSVersion = PROTOCOLS[-1], ciphers: str = EVERYTHING) -> ssl.SSLContext:
    """Return a client that accepts everything that OpenSSL has, and any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_ciphers(ciphers)
    allow(context, first, last)
    context.options &= ~ssl.OP_NO_COMPRESSION
    return context


def allow(context: ssl.SSLContext, first: ssl.TLSVersion, last: ssl.TLSVersion) -> None:
    """Let a context speak protocols that Python warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version, context.maximum_version = first, last


def connected(listener: Scanned, context: ssl.SSLContext, name: str | None = None, certificate: Certificate | None = None) -> Seen | None:
    """Return what a client sees; None if the listener refuses it before it answers."""
    if certificate is not None:
        context.load_cert_chain(certificate.certificate, certificate.key)
    try:
        with (
            socket.create_connection(("127.0.0.1", listener.port), TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=name) as tls,
        ):
            tls.sendall(listener.say)
            if not tls.recv(1):  # TLS 1.3 refuses a client certificate after the client's side of the handshake
                return None
            cipher = tls.cipher()
            assert cipher is not None
            return Seen(tls.version() or "", cipher[0], tls.compression(), tls.getpeercert(binary_form=True))
    except (ssl.SSLError, ConnectionError):
        return None


def protocols(listener: Scanned) -> set[str]:
    """Return the protocols that a listener accepts."""
    seen = (connected(listener, weak_client(each, each)) for each in PROTOCOLS)
    return {each.protocol for each in seen if each is not None}


def old_ciphers(listener: Scanned) -> set[str]:
    """Return the cipher suites of TLS 1.2 that a listener accepts, each tried alone."""
    offered = [each["name"] for each in weak_client().get_ciphers() if each["protocol"] != "TLSv1.3"]
    clients = (weak_client(ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2, f"{each}:@SECLEVEL=0") for each in offered)
    return {each.cipher for client in clients if (each := connected(listener, client)) is not None}


def openssl(listener: Scanned, *options: str, say: str = "") -> str:
    """Return what ``openssl s_client`` reports of a connection in which it reads ``say``."""
    command = ("openssl", "s_client", "-connect", f"127.0.0.1:{listener.port}", *options)
    done = subprocess.run(
        command, input=say, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S, check=False
    )  # fmt: skip
    return done.stdout


def trusting(authority: Path) -> ssl.SSLContext:
    """Return a client as applications have it."""
    return ssl.create_default_context(cafile=authority)
