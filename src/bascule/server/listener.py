"""A listening socket of the broker. Its accept loop survives failures of connections and a shortage of file descriptors."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from bascule.core.log import get_log
from bascule.server import descriptors

log = get_log(__name__)

#: Connections that the kernel keeps ready; more have to try again.
BACKLOG: Final = 1024
#: Connections accepted in one turn of the event loop, so that existing connections continue in between.
ACCEPTS_PER_TURN: Final = 16
#: Pause before the next try if the kernel, or the receiver of connections, had no room.
PAUSE_S: Final = 0.05
#: A shortage is logged when it begins; it has ended when no connection was refused for this time.
SHORTAGE_OVER_S: Final = 60.0
#: The process, the system, or the kernel's memory has no room for another socket.
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})

#: Takes an accepted connection from an address. Returns False if there is no room for it yet; the listener then keeps it.
Take = Callable[[socket.socket, tuple[Any, ...]], bool]


def bind(host: str, port: int) -> list[socket.socket]:
    """Return a socket for each address of a host, bound and not listening. Raises OSError."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sock = socket.socket(family, kind, protocol)
            except OSError:
                continue  # the system has no IPv6, for example
            bound.append(sock)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address[0], bound[0].getsockname()[1] if port == 0 and len(bound) > 1 else port, *address[2:]))
    except OSError:
        for sock in bound:
            sock.close()
        raise
    if not bound:
        raise OSError(errno.EADDRNOTAVAIL, os.strerror(errno.EADDRNOTAVAIL))
    return bound


def refuse(sock: socket.socket) -> None:
    """Reset a connection at once; the kernel keeps nothing of it."""
    with suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


class Listener:
    """Accepts connections on bound sockets, from ``start`` to ``close``.

    A connection that would use one of the ``reserved`` descriptors is refused. If there are no descriptors, a spare one serves to refuse
    connections, because a connection that waits in the kernel looks successful to its client.
    """

    def __init__(self, sockets: Sequence[socket.socket], take: Take, *, name: str, reserved: int) -> None:
        self.sockets = sockets
        self.refused = 0  # because descriptors were short
        self._take = take
        self._name = name
        self._reserved = reserved
        self._loop = asyncio.get_running_loop()
        self._spare: int | None = None
        self._refused_s = float("-inf")
        self._kept: tuple[socket.socket, tuple[Any, ...]] | None = None  # accepted, but there is no room for it yet
        self._retry: asyncio.TimerHandle | None = None
        self._serving = False

    @property
    def port(self) -> int:
        """Return the port of the first socket."""
        return int(self.sockets[0].getsockname()[1])

    def start(self) -> None:
        """Accept connections; a second call has no effect. Raises OSError."""
        if self._serving:
            return
        self._serving = True
        self._hold_spare()
        for sock in self.sockets:
            sock.setblocking(False)
            sock.listen(BACKLOG)
        self._watch()

    def close(self) -> None:
        """Stop accepting, and free the ports."""
        self._unwatch()
        self._serving = False
        kept, self._kept = self._kept, None
        if kept is not None:
            refuse(kept[0])
        for sock in self.sockets:
            sock.close()
        if self._spare is not None:
            os.close(self._spare)
            self._spare = None

    def room(self) -> None:
        """Admit a connection that waited for room."""
        if self._retry is not None:
            self._retry.cancel()
            self._go_on()

    async def wait_closed(self) -> None:
        """Return at once (as ``asyncio.Server``)."""

    def _watch(self) -> None:
        for sock in self.sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def _unwatch(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        elif self._serving:
            for sock in self.sockets:
                self._loop.remove_reader(sock)

    def _pause(self) -> None:
        """Accept nothing for a moment: polling the sockets, which stay readable, would use the processor."""
        self._unwatch()
        self._retry = self._loop.call_later(PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._retry = None
        self._watch()
        kept, self._kept = self._kept, None
        if kept is not None:
            self._offer(*kept)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_ROOM and not self._refuse_by_spare(listening, error):
                    self._pause()
                    return
                continue  # or the peer left while it waited
            if not self._offer(sock, address):
                return

    def _offer(self, sock: socket.socket, address: tuple[Any, ...]) -> bool:
        """Return whether the listener may accept the next connection."""
        if sock.fileno() >= descriptors.left_by(self._reserved):
            refuse(sock)
            self._short("the remaining descriptors are reserved")
            return True
        if self._take(sock, address):
            return True
        self._kept = sock, address
        self._pause()
        return False

    def _refuse_by_spare(self, listening: socket.socket, error: OSError) -> bool:
        """Use the spare descriptor to refuse one connection; return False if that is not possible."""
        self._short(error.strerror)
        if self._spare is None:
            self._hold_spare()
            return False
        os.close(self._spare)
        self._spare = None
        with suppress(OSError):
            sock, _ = listening.accept()
            refuse(sock)
        self._hold_spare()
        return self._spare is not None

    def _hold_spare(self) -> None:
        with suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)

    def _short(self, reason: str | None) -> None:
        """Count a refused connection, and log one line for each shortage."""
        self.refused += 1
        now_s = time.monotonic()
        if now_s - self._refused_s > SHORTAGE_OVER_S:
            log.error("connections refused, too few file descriptors", listener=self._name, limit=descriptors.limit(), reason=reason)
        self._refused_s = now_s
