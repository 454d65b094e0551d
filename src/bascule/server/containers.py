"""Container ids of connected clients. For JMS clients these are the client ids."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bascule.server.connection import ClientConnection


class ContainerHolder(NamedTuple):
    """Who holds a container id: connections of a user, which have asked to be the ``sole`` ones with it or not."""

    user: str
    sole: bool


class ContainerIds:
    """The open connections by container id. The cost of a new connection does not depend on their number."""

    def __init__(self) -> None:
        self._connections: dict[str, dict[ContainerHolder, dict[ClientConnection, None]]] = {}
        self._held: dict[ClientConnection, tuple[str, ContainerHolder]] = {}
        self._leaving: Counter[str] = Counter()  # clients that have gone, of which not all links are released yet
        self.nobody_leaves = asyncio.Event()
        self.nobody_leaves.set()

    def opened(self, connection: ClientConnection, container: str, holder: ContainerHolder) -> list[ContainerHolder]:
        """Record a connection that opens under an id. Return who holds the id by other open connections."""
        holders = self._connections.setdefault(container, {})
        for other, connections in list(holders.items()):
            while connections and (oldest := next(iter(connections))).amqp.closed:
                del connections[oldest], self._held[oldest]
            if not connections:
                del holders[other]
        others = list(holders)
        holders.setdefault(holder, {})[connection] = None
        self._held[connection] = container, holder
        return others

    def lost(self, connection: ClientConnection) -> None:
        """Forget a connection, which may never have opened."""
        container, holder = self._held.pop(connection, ("", None))
        if holder is None:
            return
        holders = self._connections[container]
        del holders[holder][connection]
        if not holders[holder]:
            del holders[holder]
        if not holders:
            del self._connections[container]

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
