"""Clients that reconnect after their connection broke, as far as a broker can know.

Qpid JMS does not report a reconnect: its ``failover:`` opens a connection like any other. What the client then does with the interrupted
transaction is described in :mod:`bascule.server.connection_reset`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from sys import getsizeof
from typing import Any, Final

#: The product name in the open frame of Qpid JMS.
PRODUCT: Final = "QpidJMS"
#: After a broker has begun to serve, every new client may have been a client of the previous broker for this time. It is longer than a
#: client of Qpid JMS waits between two tries (``failover.maxReconnectDelay``, 30 s).
RETURN_S: Final = 60.0
#: How long an interrupted client is remembered: a network may have to be repaired by hand.
REMEMBERED_S: Final = 3600.0
#: Maximum number of clients that are remembered, which is more than reconnect after one interruption.
REMEMBERED_MAX: Final = 10_000
#: Bytes of their names, and of the names of their coordinator links: a client may choose thousands of long names.
REMEMBERED_BYTES_MAX: Final = 16 << 20

#: A client: its user and its client id. Another user with the same client id is another client.
Client = tuple[str, str]


@dataclass(frozen=True, slots=True)
class ConnectionHistory:
    """The history of a connection of Qpid JMS."""

    #: When it was interrupted, by the clock of the broker; None if it most likely never was.
    interrupted_s: float | None = None
    #: Coordinator links of the sessions that waited for an answer at that time.
    waited: frozenset[str] = frozenset()
    #: How often the broker has reset the connection since.
    resets: int = 0


class Interruptions:
    """The clients that lost a connection to this broker, or may have lost one to another broker."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        """Begin without lost clients. ``clock_s`` returns seconds."""
        self._clock_s = clock_s
        self._serves_since_s = clock_s()
        self._lost: dict[Client, ConnectionHistory] = {}
        self._names_bytes = 0  # of the remembered clients

    def serving(self) -> None:
        """Note that the broker begins to serve."""
        self._serves_since_s = self._clock_s()

    def lost(self, user: str, container: str, history: ConnectionHistory, waited: frozenset[str] | None = None) -> None:
        """Note that a connection with this history has ended without a request of its client. ``waited`` is not None if it was reset."""
        told = ConnectionHistory(self._clock_s())
        if waited is not None:
            since_s = told.interrupted_s if history.interrupted_s is None else history.interrupted_s
            told = ConnectionHistory(since_s, waited, history.resets + 1)
        client = (user, container)
        self._forget(client)
        self._lost[client] = told
        self._names_bytes += _names_bytes(client, told)
        while len(self._lost) > REMEMBERED_MAX or self._names_bytes > REMEMBERED_BYTES_MAX:
            self._forget(next(iter(self._lost)))

    def _forget(self, client: Client) -> ConnectionHistory | None:
        history = self._lost.pop(client, None)
        if history is not None:
            self._names_bytes -= _names_bytes(client, history)
        return history

    def opened(self, user: str, container: str, properties: Mapping[Any, Any] | None) -> ConnectionHistory | None:
        """Return the history of a client that opens a connection; None if the client is not Qpid JMS."""
        if (properties or {}).get("product") != PRODUCT:
            return None
        now_s = self._clock_s()
        history = self._forget((user, container))
        if history is not None and history.interrupted_s is not None and now_s - history.interrupted_s < REMEMBERED_S:
            return history
        return ConnectionHistory(now_s if now_s - self._serves_since_s < RETURN_S else None)


def _names_bytes(client: Client, history: ConnectionHistory) -> int:
    return sum(map(getsizeof, (*client, *history.waited)))
