"""A broker as its administrator sees it: what the admin server tells, and the actions that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

from bascule.broker.administration import dead_letter
from bascule.broker.containment import ErrorKind
from bascule.broker.engine import Engine
from bascule.core.errors import Unavailable
from bascule.core.permissions import Permission
from bascule.server.actions import ADMINISTRATOR, act, queue_named
from bascule.server.status import (
    BrokerStatus,
    ConnectionStatus,
    QueueDetail,
    SubscriptionStatus,
    connection_status,
    queue_detail,
    status_of,
    subscription_status,
)

if TYPE_CHECKING:
    from bascule.server.node import Node


class Administrator:
    """The administrator of one broker process; see bascule.server.admin.Broker."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def authorize(self, permission: Permission, address: str) -> None:
        """Check a permission of the administrator. Raises Unauthorized."""
        self._node.permissions.authorize(ADMINISTRATOR, permission, address)

    def status(self) -> BrokerStatus:
        """How the broker stands now."""
        return status_of(self._node)

    def queue(self, name: str) -> QueueDetail:
        """One queue. Raises UnknownAddress, Unavailable."""
        return queue_detail(queue_named(self._engine(), name))

    def subscriptions(self) -> list[SubscriptionStatus]:
        """The subscriptions of topics."""
        engine = self._node.loaded_engine
        return [] if engine is None else [subscription_status(queue) for queue in engine.addresses.subscriptions.values()]

    def clients(self) -> list[ConnectionStatus]:
        """The client connections."""
        return [connection_status(connection) for connection in self._node.connections]

    def dead_letter_address(self, queue: str) -> str:
        """The address of a queue of dead letters, "" for the configured queue. Raises UnknownAddress, Unavailable."""
        return queue_named(self._engine(), self._dead_letters(queue)).address

    def dead_letters(self, queue: str, count: int) -> list[dict[str, Any]]:
        """The first ``count`` messages of a queue, "" for the configured queue. Raises UnknownAddress, Unavailable."""
        engine = self._engine()
        found = queue_named(engine, self._dead_letters(queue))
        return [dead_letter(engine, message) for message in islice(found.waiting(), count)]

    async def act(self, action: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one of ACTIONS. Raises BasculeError."""
        return await act(self._node, action, arguments)

    def contain(self, error: Exception, path: str) -> None:
        """Count and log an error that concerns one request only."""
        self._node.errors.contain(ErrorKind.REQUEST, error, path=path)

    def _dead_letters(self, queue: str) -> str:
        return queue or self._node.settings.broker.dead_letter_address

    def _engine(self) -> Engine:
        engine = self._node.loaded_engine
        if engine is None or not self._node.serving:
            raise Unavailable(self._node.trouble or "the broker is starting")
        return engine
