"""Reads the debug lines of clients that wait for their next transaction: nobody else calls such a client, and its lines stay in memory."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import Final, Protocol
from weakref import WeakSet

from bascule.threads.background import in_background

#: Interval, in seconds. A client that waits writes two lines at each refresh of its metadata.
LINES_S: Final = 30.0


class Chatty(Protocol):
    """A client that writes lines."""

    def read_lines(self) -> None:
        """Handle the lines that have come. Called from another thread than the client's user."""
        ...


class WaitingClients:
    """Reads the lines of its clients at an interval, in one thread that ends with the last client. Keeps no client alive."""

    def __init__(self, interval_s: float = LINES_S) -> None:
        """``interval_s`` is the time between two looks at the clients, in seconds."""
        self._interval_s = interval_s
        self._clients: WeakSet[Chatty] = WeakSet()
        self._lock = threading.Lock()
        self._runs = False

    def add(self, client: Chatty) -> None:
        """Read the lines of a client until its user has dropped it, or ``remove`` is called."""
        with self._lock:
            self._clients.add(client)
            if not self._runs:
                self._runs = True
                in_background(self._read, "bascule-client-lines")

    def remove(self, client: Chatty) -> None:
        """Leave a client alone from now on."""
        with self._lock:
            self._clients.discard(client)

    def _read(self) -> None:
        while self._any():
            time.sleep(self._interval_s)
            clients = self._there()
            while clients:
                with suppress(Exception):  # the next call of the user reports an error of the client
                    clients.pop().read_lines()

    def _any(self) -> bool:
        with self._lock:
            self._runs = bool(self._clients)
            return self._runs

    def _there(self) -> list[Chatty]:
        with self._lock:
            return list(self._clients)
