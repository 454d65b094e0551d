"""Container ids of connected clients. For JMS clients these are the client ids."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bascule.server.connection import ClientConnection


class ContainerIds:
    """The open connections by container id. The cost of a new connection does not depend on their number."""

    def __init__(self) -> None:
        self._connections: dict[str, dict[ClientConnection, None]] = {}

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
