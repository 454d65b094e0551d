"""Definitions for an export: the queues and durable subscriptions that the broker holds besides its settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import bascule
from bascule.broker.queue import BrokerQueue
from bascule.broker.subscription_names import owner_of
from bascule.core.destination import Routing
from bascule.server.answers import HeldQueue, HeldSubscription
from bascule.server.in_turns import in_turns
from bascule.server.json_pieces import LongList
from bascule.server.listing import check_known

if TYPE_CHECKING:
    from bascule.server.node import Node

#: The name and the version of the format. A program must refuse a version that it does not know.
FORMAT: Final = "bascule-definitions"
VERSION: Final = 1


async def definitions(node: Node, parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the durable queues and subscriptions: see DefinitionsAnswer. Those that end with a client are left out."""
    check_known(parameters, ())
    queues: list[BrokerQueue] = []
    subscriptions: list[BrokerQueue] = []

    def add(queue: BrokerQueue) -> None:
        if queue.durable:
            (queues if queue.routing is Routing.ANYCAST else subscriptions).append(queue)

    engine = node.loaded_engine
    await in_turns(add, () if engine is None else engine.addresses.queues.values())
    return {
        "format": FORMAT, "version": VERSION, "broker": bascule.__version__,
        "queues": LongList(_queue, queues), "subscriptions": LongList(_subscription, subscriptions),
    }  # fmt: skip


def _queue(queue: BrokerQueue) -> HeldQueue:
    return HeldQueue(name=queue.name, auto_created=queue.auto_created, user=queue.user)


def _subscription(queue: BrokerQueue) -> HeldSubscription:
    return HeldSubscription(
        name=queue.subscription, topic=queue.address, client_id=owner_of(queue.name, queue.subscription) or "",
        selector=queue.selector_text, no_local=bool(queue.no_local_container), shared=queue.shared, user=queue.user,
    )  # fmt: skip
