"""Connections that have not logged in yet: a bounded number of them, for a bounded time, whoever opens them.

A peer before its login costs a socket, a small buffer and one of the places counted here. Where no place is free, the connection that has
had its place for the longest gives it up, but only after ``GRACE_S``: a client that means it is done long before. Until then the new
connection waits unread, and the listener accepts no more. So a burst of clients is served one after the other, and peers that connect and
stay silent delay others by some moments at most.
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

log = get_log(__name__)

#: A login takes some milliseconds, over a slow network or a busy machine some hundred.
GRACE_S: Final = 1.0
#: A TLS client that does not answer the end of its connection keeps its socket for so long.
TLS_SHUTDOWN_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class HandshakeLimits:
    """How many connections may be on the way to their login at once, and for how long. 0: no bound."""

    connections_max: int
    per_address_max: int
    timeout_s: float


class Handshake:
    """The place of one connection among those that have not logged in."""

    __slots__ = ("_handshakes", "_socket", "address", "begun_s", "peer", "transport")

    def __init__(self, handshakes: Handshakes, sock: socket.socket, peer: tuple[Any, ...]) -> None:
        self.address = str(peer[0])
        self.peer = ":".join(map(str, peer[:2]))
        self.begun_s = time.monotonic()
        self.transport: asyncio.WriteTransport | None = None  # once there is one: after the TLS handshake
        self._handshakes = handshakes
        self._socket = sock

    def end(self) -> None:
        """Give the place back: the client has logged in, or its connection is lost. Again: nothing happens."""
        self._handshakes.ended(self)

    def begin_again(self) -> None:
        """Take a place again: nobody is known on this connection any more."""
        self.begun_s = time.monotonic()
        self._handshakes.begun(self)

    def abort(self) -> None:
        """End the connection, wherever its handshake stands."""
        self.end()
        if self.transport is not None:
            self.transport.abort()
        else:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


class Handshakes:
    """All connections of one listener that have not logged in, and those that begin."""

    def __init__(self, limits: HandshakeLimits, tls: ssl.SSLContext | None, serve: Callable[[Handshake], asyncio.Protocol]) -> None:
        """``serve`` makes the protocol of a connection; it ends the handshake."""
        self.aborted = 0  # for want of places
        self.on_room: Callable[[], None] = lambda: None  # called when a place is free again
        self._limits = limits
        self._tls = tls
        self._serve = serve
        self._all: dict[Handshake, None] = {}  # the oldest first
        self._by_address: dict[str, dict[Handshake, None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._all)

    def take(self, sock: socket.socket, peer: tuple[Any, ...]) -> bool:
        """Begin the handshake of an accepted connection, False while there is no place for it."""
        limits, of_address = self._limits, self._by_address.get(str(peer[0]), {})
        if not _room(of_address, limits.per_address_max) and not self._make_room(of_address):
            return False
        if not _room(self._all, limits.connections_max) and not self._make_room(self._all):
            return False
        handshake = Handshake(self, sock, peer)
        self.begun(handshake)
        task = asyncio.get_running_loop().create_task(self._connect(handshake, sock), name="handshake")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return True

    def begun(self, handshake: Handshake) -> None:
        """One has taken a place."""
        self._all[handshake] = None
        self._by_address.setdefault(handshake.address, {})[handshake] = None

    def ended(self, handshake: Handshake) -> None:
        """One has given its place back."""
        if handshake not in self._all:
            return
        del self._all[handshake]
        of_address = self._by_address[handshake.address]
        del of_address[handshake]
        if not of_address:
            del self._by_address[handshake.address]
        self.on_room()

    def abort_all(self) -> None:
        """The broker takes no more clients."""
        for handshake in list(self._all):
            handshake.abort()
        for task in self._tasks:
            task.cancel()

    async def _connect(self, handshake: Handshake, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        tls: dict[str, Any] = {}
        if self._tls is not None:
            timeout_s = self._limits.timeout_s
            tls = {"ssl": self._tls, "ssl_handshake_timeout": timeout_s, "ssl_shutdown_timeout": TLS_SHUTDOWN_S}
        try:
            sock.setblocking(False)
            await loop.connect_accepted_socket(lambda: self._serve(handshake), sock, **tls)
        except OSError as error:  # of TLS, too
            log.debug("connection lost during handshake", peer=handshake.peer, reason=error)
        finally:
            if handshake.transport is None:  # nobody serves it
                handshake.end()
                sock.close()

    def _make_room(self, handshakes: dict[Handshake, None]) -> bool:
        """End the oldest of them, False where it is too young."""
        oldest = next(iter(handshakes))
        if time.monotonic() - oldest.begun_s < GRACE_S:
            return False
        self.aborted += 1
        log.debug("connection closed before login to admit a waiting connection", peer=oldest.peer)
        oldest.abort()
        return True


def _room(taken: dict[Handshake, None], most: int) -> bool:
    return not most or len(taken) < most
