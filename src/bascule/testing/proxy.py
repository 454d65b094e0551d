"""A byte proxy between client and broker: it can hold the broker's answers back, and cut every connection."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self

RECEIVE_BYTES = 1 << 16
#: Between two looks whether answers may pass, or the proxy has ended.
LOOK_S = 0.05


class Proxy:
    """Listens on a free port of 127.0.0.1. ``requests`` has every byte that clients sent on."""

    def __init__(self, port: int) -> None:
        """``port`` is the broker's; it is connected to for each client that comes."""
        self._target = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._answers = threading.Event()
        self._answers.set()
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        self.requests = bytearray()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def __enter__(self) -> Self:
        """The proxy, which listens already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Listen no more, and cut what there is."""
        self._listener.close()
        self._answers.set()
        self.cut()

    @property
    def url(self) -> str:
        """For a client."""
        return f"amqp://127.0.0.1:{self._listener.getsockname()[1]}"

    def hold_answers(self) -> None:
        """From now on nothing that the broker says reaches a client."""
        self._answers.clear()

    def cut(self) -> None:
        """End every connection, with what is held back on it; new ones pass freely."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._answers.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    broker = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                with self._lock:
                    self._sockets |= {client, broker}
                for pump in (self._carry_requests, self._carry_answers):
                    threading.Thread(target=pump, args=(client, broker), name="proxy", daemon=True).start()

    def _carry_requests(self, client: socket.socket, broker: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(RECEIVE_BYTES):
                self.requests += data
                broker.sendall(data)
        self._end(client, broker)

    def _carry_answers(self, client: socket.socket, broker: socket.socket) -> None:
        with suppress(OSError):
            while data := broker.recv(RECEIVE_BYTES):
                while not self._answers.wait(LOOK_S):
                    pass
                with self._lock:
                    if client not in self._sockets:
                        break
                client.sendall(data)
        self._end(client, broker)

    def _end(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._sockets -= set(sockets)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
