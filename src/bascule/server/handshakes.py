"""Connections before their login: a limited number, each for a limited time.

A peer before its login costs a socket, a small buffer and one of the places counted here. If no place is free, the oldest connection
loses its place, but only after ``GRACE_S``, by which time an honest client has logged in. Until then the new connection waits unread,
and the listener accepts no more. So a burst of clients is served one after the other, and silent peers delay other clients only for
moments.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from bascule.core.log import get_log
from bascule.server.audit import NO_AUDIT, TLS, AuditTrail

log = get_log(__name__)

#: A login takes a few milliseconds; over a slow network, or on a busy machine, a few hundred.
GRACE_S: Final = 1.0
#: How long a TLS client that does not answer the end of its connection keeps its socket.
TLS_SHUTDOWN_S: Final = 1.0

#: Errors of OpenSSL about the certificate of a client, with the reason; "" if the error has one itself.
_CERTIFICATE_ERRORS: Final = {"CERTIFICATE_VERIFY_FAILED": "", "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client has sent no certificate"}

#: Returns the TLS context for a new connection; None without TLS.
TlsContext = Callable[[], ssl.SSLContext | None]


def no_tls() -> None:
    """Return the TLS context of a listener without TLS."""


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """The limits on the number and time of connections that are logging in. 0: no limit."""

    connections_max: int
    per_address_max: int
    timeout_s: float


class Handshake:
    """The place of one connection among those that have not logged in."""

    __slots__ = ("_handshakes", "_socket", "accepted_s", "address", "begun_s", "peer", "transport")

    def __init__(self, handshakes: Handshakes, sock: socket.socket, peer: tuple[Any, ...]) -> None:
        self.address = str(peer[0])
        self.peer = ":".join(map(str, peer[:2]))
        self.accepted_s = self.begun_s = time.monotonic()
        self.transport: asyncio.WriteTransport | None = None  # set after the TLS handshake
        self._handshakes = handshakes
        self._socket = sock

    def end(self) -> None:
        """Give the place back after a login or a lost connection. A second call has no effect."""
        self._handshakes.ended(self)

    def refused(self, mechanism: str, reason: str) -> bool:
        """Write to the audit that the client is refused before its login. Return whether a line in the log may say so, too."""
        return self._handshakes.audit.login_refused(self.peer, "", mechanism, reason)

    def may_log(self) -> bool:
        """Return whether the log may have a line about the client before its login."""
        return self._handshakes.audit.may_log(self.peer)

    def begin_again(self) -> bool:
        """Take a place again, because the connection waits for its peer again. Return False if its address has too many places."""
        return self._handshakes.begun_again(self)

    def abort(self) -> None:
        """Abort the connection in any state of its handshake."""
        self.end()
        if self.transport is not None:
            self.transport.abort()
        else:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


#: Makes the protocol of a connection.
Serve = Callable[[Handshake], asyncio.Protocol]


class Handshakes:
    """All connections of one listener before their login."""

    def __init__(self, limits: HandshakeLimits, tls: TlsContext, serve: Serve) -> None:
        """Begin without connections.

        ``tls`` returns the context for a new connection. ``serve`` makes the protocol of a connection; the protocol ends the handshake.
        """
        self.aborted = 0  # because no place was free
        self.on_room: Callable[[], None] = lambda: None  # called when a place is free again
        self.audit: AuditTrail = NO_AUDIT  # for clients that are refused before their login
        self.limits = limits
        self._tls = tls
        self._serve = serve
        self._all: dict[Handshake, None] = {}  # oldest first
        self._by_address: dict[str, dict[Handshake, None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._all)

    @property
    def connecting(self) -> int:
        """Return the number of connections that no protocol serves yet, for example because of their TLS handshake."""
        return sum(each.transport is None for each in self._all)

    def displace_connecting(self) -> bool:
        """Abort the oldest connection that no protocol serves yet. Return False if there is none, or if it is too young."""
        oldest = next((each for each in self._all if each.transport is None), None)
        return oldest is not None and self._make_room({oldest: None})

    def take(self, sock: socket.socket, peer: tuple[Any, ...], serve: Serve | None = None) -> bool:
        """Begin the handshake of an accepted connection. Return False if no place is free.

        ``serve`` makes its protocol, if not the usual one.
        """
        limits, of_address = self.limits, self._by_address.get(str(peer[0]), {})
        if not _room(of_address, limits.per_address_max) and not self._make_room(of_address):
            return False
        if not _room(self._all, limits.connections_max) and not self._make_room(self._all):
            return False
        handshake = Handshake(self, sock, peer)
        self.begun(handshake)
        task = asyncio.get_running_loop().create_task(self._connect(handshake, sock, serve or self._serve), name="handshake")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def begun(self, handshake: Handshake) -> None:
        """Count a handshake that has begun."""
        self._all[handshake] = None
        self._by_address.setdefault(handshake.address, {})[handshake] = None

    def begun_again(self, handshake: Handshake) -> bool:
        """Count a connection that waits for its peer again; it has a place even if none is free. Return whether one was free."""
        most = self.limits.per_address_max
        if handshake not in self._all:
            handshake.begun_s = time.monotonic()
            self.begun(handshake)
            if most and len(self._by_address[handshake.address]) > most:
                self._make_room(self._by_address[handshake.address])
        return not most or len(self._by_address[handshake.address]) <= most

    def ended(self, handshake: Handshake) -> None:
        """Count a handshake that has ended."""
        if handshake not in self._all:
            return
        del self._all[handshake]
        of_address = self._by_address[handshake.address]
        del of_address[handshake]
        if not of_address:
            del self._by_address[handshake.address]
        self.on_room()

    def abort_all(self) -> None:
        """Abort all handshakes; the broker accepts no more clients."""
        for handshake in list(self._all):
            handshake.abort()
        for task in self._tasks:
            task.cancel()

    async def _connect(self, handshake: Handshake, sock: socket.socket, serve: Serve) -> None:
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        context = self._tls()
        if context is not None:
            timeout_s = self.limits.timeout_s
            tls = {"ssl": context, "ssl_handshake_timeout": timeout_s, "ssl_shutdown_timeout": TLS_SHUTDOWN_S}
        try:
            sock.setblocking(False)
            await loop.connect_accepted_socket(lambda: serve(handshake), sock, **tls)
        except OSError as error:  # also TLS errors
            log.debug("connection lost during handshake", peer=handshake.peer, reason=error)
            if isinstance(error, ssl.SSLError) and (known := _CERTIFICATE_ERRORS.get(error.reason)) is not None:
                reason = known or f"client certificate: {getattr(error, 'verify_message', error.reason)}"
                if handshake.refused(TLS, reason):
                    log.info("client certificate refused", peer=handshake.peer, reason=reason)
        finally:
            if handshake.transport is None:  # no protocol serves it
                handshake.end()
                sock.close()

    def _make_room(self, handshakes: dict[Handshake, None]) -> bool:
        """Abort the oldest handshake. Return False if it is too young."""
        oldest = next(iter(handshakes))
        if time.monotonic() - oldest.begun_s < GRACE_S:
            return False
        self.aborted += 1
        log.debug("connection closed before login to admit a waiting connection", peer=oldest.peer)
        oldest.abort()
        return True


def _room(taken: dict[Handshake, None], most: int) -> bool:
    return not most or len(taken) < most
