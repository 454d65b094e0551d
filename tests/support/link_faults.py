"""A proxy that turns loopback into a bad network: slow, cut into pieces, broken in the middle of a frame, silent.

with BadLink(broker_port) as link:
    client = connect(f"failover:({link.url})")
    link.fault(FAULTS["black hole"])
    ...
    link.heal()
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from tests.support.proxy import RECEIVE_BYTES, Relay


class Break(StrEnum):
    """How a connection ends, if it does."""

    NONE = "none"
    RESET = "reset"  # both ends get RST
    HALF_OPEN = "half-open"  # the client is gone, and the server is not told
    BLACK_HOLE = "black hole"  # both ends stay, and no more bytes arrive
    MID_FRAME = "mid-frame"  # both ends are told after half of the next bytes


@dataclass(frozen=True, slots=True)
class Fault:
    """The treatment of bytes, in both directions. Zero is no limit."""

    latency_s: float = 0
    jitter_s: float = 0
    bytes_per_s: int = 0
    slice_bytes: int = 0
    end: Break = Break.NONE


WELL: Final = Fault()
#: Each kind of fault by name.
FAULTS: Final[Mapping[str, Fault]] = {
    "latency": Fault(latency_s=0.05),
    "jitter": Fault(jitter_s=0.1),
    "rate": Fault(bytes_per_s=20_000),
    "one-byte slices": Fault(slice_bytes=1),
    **{each.value: Fault(end=each) for each in Break if each is not Break.NONE},
}
#: Size of a piece on a slow link: small enough for an even flow.
RATE_SLICE_BYTES = 512
#: Linger with no time, so that closing sends RST.
_RESET: Final = struct.pack("ii", 1, 0)


@dataclass(slots=True)
class _Connection:
    client: socket.socket
    server: socket.socket
    end: Break = Break.NONE


class BadLink(Relay):
    """A proxy with faults. ``met`` counts the pieces that a fault has affected."""

    def __init__(self, target_port: int, *, seed: int = 0) -> None:
        """Connect clients to ``target_port`` on 127.0.0.1."""
        self._fault = WELL
        self._random = random.Random(seed)
        self._ghosts: set[socket.socket] = set()
        self.met = 0
        super().__init__(target_port)

    def fault(self, fault: Fault) -> None:
        """Apply a fault to open and new connections. A break happens with the next bytes."""
        self._fault = fault

    def heal(self) -> None:
        """Remove the fault for new connections. Connections with missing bytes end."""
        self._fault = WELL
        with self._lock:
            ghosts, self._ghosts = self._ghosts, set()
        self._end(*ghosts)

    def cut(self) -> None:
        """End every connection."""
        super().cut()
        self.heal()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        connection = _Connection(client, server)
        for source, sink in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(connection, source, sink), name="bad-link", daemon=True).start()

    def _pump(self, connection: _Connection, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(RECEIVE_BYTES):
                fault = self._fault
                self.met += fault is not WELL
                if connection.end is not Break.NONE:
                    continue  # a silent connection stays silent
                if fault.end is Break.NONE:
                    self._send(data, sink, fault)
                else:
                    self._break(connection, fault.end, data, sink)
        if connection.end is Break.NONE:
            self._end(connection.client, connection.server)

    def _send(self, data: bytes, sink: socket.socket, fault: Fault) -> None:
        size = fault.slice_bytes or (RATE_SLICE_BYTES if fault.bytes_per_s else len(data))
        time.sleep(fault.latency_s + self._random.uniform(0, fault.jitter_s))
        for start in range(0, len(data), size):
            piece = data[start : start + size]
            sink.sendall(piece)
            if fault.bytes_per_s:
                time.sleep(len(piece) / fault.bytes_per_s)

    def _break(self, connection: _Connection, end: Break, data: bytes, sink: socket.socket) -> None:
        connection.end = end
        client, server = connection.client, connection.server
        match end:
            case Break.RESET:
                self._reset(client, server)
            case Break.HALF_OPEN:
                self._reset(client)
                self._keep(server)
            case Break.BLACK_HOLE:
                self._keep(client, server)
            case _:
                sink.sendall(data[: len(data) // 2])
                self._end(client, server)

    def _keep(self, *sockets: socket.socket) -> None:
        """Keep sockets open and silent until the fault is removed."""
        with self._lock:
            self._ghosts |= set(sockets)

    def _reset(self, *sockets: socket.socket) -> None:
        with self._lock:
            self._sockets -= set(sockets)
        for each in sockets:
            with suppress(OSError):
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                each.shutdown(socket.SHUT_RD)  # tells the peer nothing, and wakes the reading thread
            each.close()
