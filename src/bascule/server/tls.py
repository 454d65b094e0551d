"""TLS of clients on this machine, and the checks of files with certificates."""

from __future__ import annotations

import ssl
from pathlib import Path

from bascule.core.errors import InvalidInput


def client_context(certificate: Path, where: str) -> ssl.SSLContext:
    """Return a context for a client on this machine. It trusts the certificate in the listener's own settings, whatever name it has.

    ``where`` is the listener's table in the file. Raises InvalidInput.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    trust(context, certificate, f"{where}.certificate")
    return context


def authorities_context(file: Path, where: str) -> ssl.SSLContext:
    """Return a context for a client that trusts the authorities in a PEM file alone. ``where`` names its option. Raises InvalidInput."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust(context, file, where)
    return context


def trust(context: ssl.SSLContext, file: Path, key: str) -> None:
    """Trust the certificates in a PEM file. ``key`` is its setting. Raises InvalidInput."""
    check_readable(file, key)
    try:
        context.load_verify_locations(file)
    except OSError as error:
        raise InvalidInput(f"{key}: {file} cannot be used: {reason_of(error)}") from error


def check_readable(file: Path, key: str) -> None:
    """Check that a file can be read, since OpenSSL does not name a missing file. Raises InvalidInput."""
    try:
        file.open("rb").close()
    except OSError as error:
        raise InvalidInput(f"{key}: {file}: {error.strerror}") from error


def reason_of(error: Exception) -> str:
    """Return the reason of an error of the module ``ssl`` in words."""
    return str(getattr(error, "reason", None) or error).replace("_", " ").lower()
