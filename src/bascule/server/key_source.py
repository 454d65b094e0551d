"""Sources of key sets: a file, or a provider of OpenID Connect. Reading blocks."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
import urllib.parse
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Protocol

from bascule.config.oidc import Oidc, check_url
from bascule.core.errors import InvalidInput, Unavailable

#: Time for one answer of the provider, which sends a few KiB.
FETCH_S: Final = 5.0
#: Bytes of a key set, or of the description of a provider. Large providers have some 10 KiB.
DOCUMENT_SIZE_BYTES_MAX: Final = 256 * 1024


class KeySourceUnavailable(Unavailable):
    """The key set could not be read."""


class KeySource(Protocol):
    """Has the key set."""

    def read(self) -> dict[str, Any]:
        """Return the key set. The call may block. Raises KeySourceUnavailable."""

    def cut(self) -> None:
        """End a call of ``read`` that takes too long; called on another thread."""


def key_source(oidc: Oidc) -> KeySource:
    """Return the source that the settings name. Raises InvalidInput for a file that cannot be used."""
    if oidc.jwks_file is not None:
        return FileSource(oidc.jwks_file)
    try:
        tls = ssl.create_default_context(cafile=oidc.ca_file)
    except OSError as error:
        raise InvalidInput(f"broker.oidc.ca_file: {oidc.ca_file}: {error.strerror or error}") from error
    return ProviderSource(oidc, tls)


class FileSource:
    """A file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def cut(self) -> None:
        """Do nothing: a file answers."""

    def read(self) -> dict[str, Any]:
        """Return the content of the file. Raises KeySourceUnavailable."""
        try:
            with self._file.open("rb") as file:
                data = file.read(DOCUMENT_SIZE_BYTES_MAX + 1)
        except OSError as error:
            raise KeySourceUnavailable(f"{self._file}: {error.strerror}") from error
        return _document(data, str(self._file))


class ProviderSource:
    """The URL of a key set, or the provider that publishes this URL."""

    def __init__(self, oidc: Oidc, tls: ssl.SSLContext) -> None:
        self._oidc = oidc
        self._tls = tls
        self._connection: http.client.HTTPConnection | None = None

    def cut(self) -> None:
        """Shut the socket of a request that takes too long: its own timeout begins again with each byte."""
        sock = None if self._connection is None else self._connection.sock
        if sock is not None:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def read(self) -> dict[str, Any]:
        """Fetch the key set. Raises KeySourceUnavailable."""
        return self._fetch(self._oidc.jwks_url or self._discovered())

    def _discovered(self) -> str:
        """Return the URL of the key set that the provider publishes (OpenID Connect Discovery 1.0, section 4.3)."""
        url = self._oidc.configuration_url
        found = self._fetch(url)
        if found.get("issuer") != self._oidc.issuer:
            raise KeySourceUnavailable(f"{url}: its issuer is not broker.oidc.issuer, {self._oidc.issuer!r}")
        keys_url = found.get("jwks_uri")
        try:
            return check_url(keys_url if isinstance(keys_url, str) else "")
        except ValueError as error:
            raise KeySourceUnavailable(f"{url}: jwks_uri {error}") from None

    def _fetch(self, url: str) -> dict[str, Any]:
        """Get a JSON document. Redirects are refused: they would lead to a server that the settings do not name."""
        parts = urllib.parse.urlsplit(url)
        target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
        host, port = parts.hostname or "", parts.port
        connection = (
            http.client.HTTPSConnection(host, port, timeout=FETCH_S, context=self._tls)
            if parts.scheme == "https"
            else http.client.HTTPConnection(host, port, timeout=FETCH_S)
        )
        self._connection = connection
        try:
            connection.request("GET", target, headers={"Accept": "application/json", "User-Agent": "bascule"})
            answer = connection.getresponse()
            data = answer.read(DOCUMENT_SIZE_BYTES_MAX + 1)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise KeySourceUnavailable(f"{url}: {_reason(error)}") from error
        finally:
            self._connection = None
            connection.close()
        if answer.status != http.HTTPStatus.OK:
            raise KeySourceUnavailable(f"{url}: status {answer.status} instead of 200; redirects are not followed")
        return _document(data, url)


def _document(data: bytes, where: str) -> dict[str, Any]:
    if len(data) > DOCUMENT_SIZE_BYTES_MAX:
        raise KeySourceUnavailable(f"{where}: more than {DOCUMENT_SIZE_BYTES_MAX} bytes")
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise KeySourceUnavailable(f"{where}: not a JSON object")
    return found


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError | http.client.IncompleteRead | http.client.RemoteDisconnected):
        return f"no complete answer within {FETCH_S:g} s"
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the certificate cannot be verified: {error.verify_message}; set broker.oidc.ca_file"
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
