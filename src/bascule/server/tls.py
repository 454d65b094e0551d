"""TLS of the listeners: contexts from the settings, and the names in clients' certificates."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from bascule.config.tls import BrokerTls, Tls
from bascule.core.errors import InvalidInput


def server_context(tls: Tls, where: str) -> ssl.SSLContext | None:
    """Return the TLS context of a listener; None if it has no certificate. ``where`` is its table in the file. Raises InvalidInput."""
    if tls.certificate is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    key = tls.key or tls.certificate
    _readable(tls.certificate, f"{where}.certificate")
    _readable(key, f"{where}.key")
    # Without a password OpenSSL would ask for one on the terminal.
    password = tls.key_password.get_secret_value() if tls.key_password else ""
    try:
        context.load_cert_chain(tls.certificate, key, password=lambda: password)
    except (ssl.SSLError, ValueError) as error:
        raise InvalidInput(f"{where}: certificate {tls.certificate} with key {key} cannot be used: {_reason(error)}") from error
    return context


def amqp_tls(tls: BrokerTls) -> ssl.SSLContext | None:
    """Return the TLS context of the AMQP listener, with the authority for clients' certificates. Raises InvalidInput."""
    context = server_context(tls, "broker.tls")
    if context is not None and tls.client_ca is not None:
        _trust(context, tls.client_ca, "broker.tls.client_ca")
        context.verify_mode = ssl.CERT_REQUIRED if tls.client_certificate == "required" else ssl.CERT_OPTIONAL
    return context


def certified_name(transport: asyncio.BaseTransport) -> str | None:
    """Return the common name in the certificate that a client has presented and the TLS layer has verified; None if there is none."""
    ssl_object = transport.get_extra_info("ssl_object")
    certificate = ssl_object.getpeercert() if ssl_object is not None else None
    names = [value for part in (certificate or {}).get("subject", ()) for key, value in part if key == "commonName"]
    return str(names[-1]) if names else None


def client_context(certificate: Path, where: str) -> ssl.SSLContext:
    """Return a context for a client on this machine. It trusts the certificate in the listener's own settings, whatever name it has.

    ``where`` is the listener's table in the file. Raises InvalidInput.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    _trust(context, certificate, f"{where}.certificate")
    return context


def _trust(context: ssl.SSLContext, file: Path, key: str) -> None:
    _readable(file, key)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError as error:
        raise InvalidInput(f"{key}: {file} cannot be used: {_reason(error)}") from error


def _readable(file: Path, key: str) -> None:
    """Check that a file can be read, since OpenSSL does not name a missing file. Raises InvalidInput."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise InvalidInput(f"{key}: {file}: {error.strerror}") from error


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error).replace("_", " ").lower()
