"""The socket of a service manager, as systemd offers it to a service of ``Type=notify``."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


class NotifySocket:
    """A datagram socket that keeps the messages of a service. ``environ`` has the variables of the service."""

    def __init__(self, path: Path, watchdog_s: float = 0.0) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self.environ = {"NOTIFY_SOCKET": str(path)}
        if watchdog_s:
            self.environ["WATCHDOG_USEC"] = str(int(watchdog_s * 1e6))

    def message(self, timeout_s: float) -> list[str]:
        """Return the lines of the next message. Raises TimeoutError."""
        self._socket.settimeout(timeout_s)
        return self._socket.recv(65536).decode().splitlines()

    def messages(self) -> list[list[str]]:
        """Return the messages that have arrived."""
        found: list[list[str]] = []
        with suppress(BlockingIOError):
            self._socket.setblocking(False)
            while True:
                found.append(self._socket.recv(65536).decode().splitlines())
        return found

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


@contextmanager
def notify_socket(path: Path, watchdog_s: float = 0.0) -> Iterator[NotifySocket]:
    """Yield a socket at a path."""
    made = NotifySocket(path, watchdog_s)
    try:
        yield made
    finally:
        made.close()
