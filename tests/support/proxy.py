"""A byte proxy between client and broker. It can hold the broker's answers back, and cut every connection."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from typing import Self

HOST = "127.0.0.1"
RECEIVE_BYTES = 1 << 16
#: Interval of the checks whether answers may pass, or the proxy has ended.
LOOK_S = 0.05


class Relay:
    """A proxy on a free port of 127.0.0.1 that connects each client to ``target_port``. Subclasses decide which bytes pass."""

    def __init__(self, target_port: int) -> None:
        self._target = (HOST, target_port)
        self._listener = socket.create_server((HOST, 0))
        self.port: int = self._listener.getsockname()[1]
        self._sockets: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def __enter__(self) -> Self:
        """Return the proxy, which listens already."""
        return self

    def __exit__(self, *_: object) -> None:
        """Stop listening, and cut all connections."""
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread that accepts
        self._listener.close()
        self.cut()

    @property
    def url(self) -> str:
        """Return the URL for a JMS client."""
        return f"amqp://{HOST}:{self.port}"

    @property
    def bootstrap(self) -> str:
        """Return the address for a Kafka client."""
        return f"{HOST}:{self.port}"

    def cut(self) -> None:
        """End every connection. New ones pass freely."""
        with self._lock:
            sockets, self._sockets = self._sockets, set()
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        """Start the threads that carry a connection (``_begin``). They call ``_end`` at their end."""
        raise NotImplementedError

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                for each in (client, server):
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._sockets |= {client, server}
                self._carry(client, server)

    def _end(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._sockets -= set(sockets)
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()


class Proxy(Relay):
    """A proxy that can hold answers back, and cut. ``requests`` has every byte that was passed on from clients."""

    def __init__(self, port: int) -> None:
        """Connect clients to the broker's ``port``."""
        self._answers = threading.Event()
        self._answers.set()
        self.requests = bytearray()
        super().__init__(port)

    def hold_answers(self) -> None:
        """Let no more bytes of the broker reach a client."""
        self._answers.clear()

    def cut(self) -> None:
        """End every connection, with the answers held back on it. New ones pass freely."""
        super().cut()
        self._answers.set()

    def _goes_on(self, data: bytes) -> bool:
        """Return whether data of a client is passed on to the broker. If not, its connection ends."""
        return True

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        for pump in (self._carry_requests, self._carry_answers):
            threading.Thread(target=pump, args=(client, server), name="proxy", daemon=True).start()

    def _carry_requests(self, client: socket.socket, broker: socket.socket) -> None:
        with suppress(OSError):
            while (data := client.recv(RECEIVE_BYTES)) and self._goes_on(data):
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
