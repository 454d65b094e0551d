"""Container ids of connected clients. For JMS clients these are the client ids."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.server.connection import ClientConnection


class ContainerIds:
    """The open connections by container id. The cost of a new connection does not depend on their number."""

    def __init__(self) -> None:
        self._connections: dict[str, dict[ClientConnection, None]] = {}
        self._leaving: Counter[str] = Counter()  # clients that have gone, of which not all links are released yet
        self.nobody_leaves = asyncio.Event()
        self.nobody_leaves.set()

    def opened(self, connection: ClientConnection, container: str) -> bool:
        """Record a connection that opens under an id. Return whether another open connection has the id."""
        connections = self._connections.setdefault(container, {})
        while connections and (oldest := next(iter(connections))).amqp.closed:
            del connections[oldest]
        taken = bool(connections)
        connections[connection] = None
        return taken

    def lost(self, connection: ClientConnection, container: str) -> None:
        """Forget a connection, which may never have opened."""
        connections = self._connections.get(container, {})
        connections.pop(connection, None)
        if not connections:
            self._connections.pop(container, None)

    def leaves(self, container: str) -> None:
        """Note that a client has gone. The broker releases the links and messages of the client, until ``left``."""
        self._leaving[container] += 1
        self.nobody_leaves.clear()

    def left(self, container: str) -> None:
        """Nothing is held for a client that has gone."""
        self._leaving[container] -= 1
        if not self._leaving[container]:
            del self._leaving[container]
        if not self._leaving:
            self.nobody_leaves.set()

    def is_leaving(self, container: str) -> bool:
        """Return whether a client with this id has gone and something is still held for it, for example a subscription."""
        return container in self._leaving
