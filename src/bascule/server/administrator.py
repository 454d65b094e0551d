"""The broker for its administrator: what the admin server reports, and the actions that it accepts."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bascule.broker.administration import dead_letter
from bascule.broker.branches import listed
from bascule.broker.containment import ErrorKind
from bascule.broker.engine import Engine
from bascule.broker.order import FRONT, place_of
from bascule.broker.sending import move_steps
from bascule.broker.turns import TURN_STEPS
from bascule.core.errors import Unavailable
from bascule.server.actions import act, queue_named
from bascule.server.admin_access import Principal
from bascule.server.in_turns import in_turns
from bascule.server.json_pieces import LongList
from bascule.server.looks import LOOKS
from bascule.server.status import (
    BrokerRole,
    BrokerStatus,
    branch_status,
    connection_status,
    consumer_status,
    queue_detail,
    queue_status,
    status_of,
    subscription_status,
    user_status,
)

if TYPE_CHECKING:
    from bascule.broker.queue import BrokerQueue
    from bascule.server.connection import ClientConnection
    from bascule.server.node import Node

#: Cost of describing a connection, as a multiple of that of a queue: it may have thousands of links.
CONNECTION_COST: Final = 100
#: Dead letters that one turn of the event loop describes; their bodies are read.
MESSAGES_PER_TURN: Final = 50


class Administrator:
    """The administrator's view of one broker process; see bascule.server.admin.AdministeredBroker."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def trouble(self) -> str:
        """Return why the broker does not serve, "" if it serves."""
        node = self._node
        return "" if node.serving else node.trouble or "waiting"

    def role(self) -> BrokerRole | None:
        """Return the role of the broker; None if it is not ready."""
        return self._node.role

    async def status(self) -> BrokerStatus:
        """Return the current status of the broker."""
        node, engine = self._node, self._node.loaded_engine
        queues = [] if engine is None else await in_turns(queue_status, engine.addresses.queues.values())
        branches = [] if engine is None else await in_turns(branch_status, listed(engine))
        return status_of(node, queues, branches, await in_turns(partial(user_status, engine), node.usage.users.values()))

    async def status_page(self) -> dict[str, Any]:
        """Return the current status of the broker for an answer, which describes the lists."""
        node, engine = self._node, self._node.loaded_engine
        return {
            **status_of(node, [], [], []), "queues": await self.queues(),
            "branches": LongList(branch_status, () if engine is None else listed(engine)),
            "users": LongList(partial(user_status, engine), node.usage.users.values()),
        }  # fmt: skip

    async def queues(self) -> LongList[BrokerQueue]:
        """Return the queues."""
        engine = self._node.loaded_engine
        return LongList(queue_status, () if engine is None else engine.addresses.queues.values())

    async def queue(self, name: str) -> dict[str, Any]:
        """Return one queue. Raises UnknownAddress, Unavailable."""
        queue = queue_named(self._engine(), name)
        return {**queue_detail(queue), "consumer_list": LongList(consumer_status, queue.consumers)}

    async def subscriptions(self) -> LongList[BrokerQueue]:
        """Return the subscriptions of topics."""
        engine = self._node.loaded_engine
        return LongList(subscription_status, () if engine is None else engine.addresses.subscriptions.values())

    async def clients(self) -> LongList[ClientConnection]:
        """Return the client connections."""
        return LongList(connection_status, self._node.connections, CONNECTION_COST)

    async def dead_letters(self, queue: str, count: int) -> list[dict[str, Any]]:
        """Return the first ``count`` messages of a queue, "" for the configured queue. Raises UnknownAddress, Unavailable.

        The configured queue does not exist before the first dead letter.
        """
        engine = self._engine()
        configured = self._node.settings.broker.dead_letter_address
        if queue in ("", configured) and configured not in engine.addresses.anycast:
            return []
        found, place = queue_named(engine, queue or configured), FRONT
        described: list[dict[str, Any]] = []
        while len(described) < count and (waiting := found.after(place, min(MESSAGES_PER_TURN, count - len(described)))):
            left = TURN_STEPS
            for message in waiting:
                place = place_of(message)
                left -= move_steps(message) + engine.bodies.read_steps(message)
                described.append(dead_letter(engine, message))
                if left <= 0:
                    break
            await asyncio.sleep(0)
        return described

    async def look(self, name: str, parameters: Mapping[str, str]) -> object:
        """Answer one of LOOKS. Raises BasculeError."""
        return await LOOKS[name].answer(self._node, parameters)

    async def act(self, principal: Principal, action: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out one of ACTIONS. Raises BasculeError."""
        return await act(self._node, principal, action, arguments)

    def contain(self, error: Exception, path: str) -> None:
        """Count and log an error that concerns one request only."""
        self._node.errors.contain(ErrorKind.REQUEST, error, path=path)

    def _engine(self) -> Engine:
        engine = self._node.loaded_engine
        if engine is None or not self._node.serving:
            raise Unavailable(self._node.trouble or "the broker is starting")
        return engine
