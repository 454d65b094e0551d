"""What the admin server shows besides the full status: parts of long lists, messages, and what a console needs."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from bascule.broker.branches import listed
from bascule.broker.engine import Engine
from bascule.broker.errors import UnknownAddress
from bascule.broker.send_times import BOUNDS_S, SendTimes
from bascule.config.load import masked_values
from bascule.core.destination import ADDRESS_MAX
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.permissions import Permission
from bascule.server import browsing
from bascule.server.actions import queue_named
from bascule.server.admin_access import AdminRole
from bascule.server.definitions import definitions
from bascule.server.in_turns import ENTRIES_PER_TURN, beside, in_turns
from bascule.server.json_pieces import LongList
from bascule.server.links import ConsumerLink, ProducerLink
from bascule.server.listing import ListColumns, PartRequest, check_known, part_of
from bascule.server.message_life import message_life
from bascule.server.status import (
    branch_status,
    connection_status,
    queue_status,
    status_of,
    subscription_status,
)

if TYPE_CHECKING:
    from bascule.broker.queue import BrokerQueue
    from bascule.config.permission import PermissionRule
    from bascule.server.node import Node

T = TypeVar("T")
Parameters = Mapping[str, str]
#: Connections that one turn of the event loop describes; each may have thousands of links.
CONNECTIONS_PER_TURN: Final = 5
#: Cost of describing a rule of the settings, as a multiple of that of a queue.
RULE_COST: Final = 5
#: Links of a connection that an answer describes.
LINKS_SHOWN_MAX: Final = 1_000


class Look(NamedTuple):
    """A question to the broker: ``answer(node, parameters)`` returns JSON, or bytes.

    ``content``: it shows content of messages, or what happened to one. ``long``: it takes seconds beside the event loop, and limits itself.
    """

    answer: Callable[[Node, Parameters], Awaitable[object]]
    role: AdminRole = AdminRole.VIEW
    content: bool = False
    long: bool = False


# -- lists -------------------------------------------------------------------------------------------------------------

QUEUE_COLUMNS: Final = ListColumns(
    ("name", "address", "routing", "messages", "bytes", "delivering", "delayed", "consumers"), ("name", "address"),
    {
        "name": "name", "address": "address", "routing": "routing.name", "messages": "waiting_count", "bytes": "held_bytes",
        "delivering": "delivering_count",
    },
)  # fmt: skip
TOPIC_COLUMNS: Final = ListColumns(("name", "subscriptions", "messages", "consumers"), ("name",))
SUBSCRIPTION_COLUMNS: Final = ListColumns(
    ("name", "topic", "messages", "delivering", "consumers", "unused_since_ms"), ("name", "topic", "selector"),
    {
        "name": "name", "topic": "address", "messages": "waiting_count", "delivering": "delivering_count", "selector": "selector_text",
        "unused_since_ms": "unused_since_ms",
    },
)  # fmt: skip
CONNECTION_COLUMNS: Final = ListColumns(
    ("id", "client_id", "user", "mechanism", "producers", "consumers", "transactions"), ("id", "client_id", "user")
)
BRANCH_COLUMNS: Final = ListColumns(("xid", "state", "since_ms", "sent", "received", "bytes", "user"), ("xid", "user"))


async def _part(
    node: Node, describe: Callable[[T], Mapping[str, Any]], entries: Iterable[T], request: PartRequest, columns: ListColumns,
    per_turn: int = ENTRIES_PER_TURN,
) -> object:  # fmt: skip
    serving = node.serving
    return {**await part_of(describe, entries, request, columns, per_turn), "serving": serving}


async def _queues(node: Node, parameters: Parameters) -> object:
    request = PartRequest.of(parameters, QUEUE_COLUMNS)
    return await _part(node, queue_status, _all_queues(node), request, QUEUE_COLUMNS)


async def _subscriptions(node: Node, parameters: Parameters) -> object:
    request = PartRequest.of(parameters, SUBSCRIPTION_COLUMNS)
    engine = node.loaded_engine
    found = () if engine is None else engine.addresses.subscriptions.values()
    return await _part(node, subscription_status, found, request, SUBSCRIPTION_COLUMNS)


async def _topics(node: Node, parameters: Parameters) -> object:
    """Return the topics that have subscriptions, or are in the settings."""
    request = PartRequest.of(parameters, TOPIC_COLUMNS)
    engine = node.loaded_engine
    topics: dict[str, dict[str, Any]] = {}

    def add(name: str) -> dict[str, Any]:
        return topics.setdefault(name, {"name": name, "subscriptions": 0, "messages": 0, "consumers": 0})

    def count(queue: BrokerQueue) -> None:
        topic = add(queue.address)
        topic["subscriptions"] += 1
        topic["messages"] += queue.waiting_count
        topic["consumers"] += len(queue.consumers)

    for each in node.settings.topic:
        add(each.name)
    if engine is not None:
        await in_turns(count, engine.addresses.subscriptions.values())
    return await _part(node, dict, topics.values(), request, TOPIC_COLUMNS)


async def _connections(node: Node, parameters: Parameters) -> object:
    request = PartRequest.of(parameters, CONNECTION_COLUMNS)
    return await _part(node, connection_status, node.connections, request, CONNECTION_COLUMNS, CONNECTIONS_PER_TURN)


async def _branches(node: Node, parameters: Parameters) -> object:
    request = PartRequest.of(parameters, BRANCH_COLUMNS)
    engine = node.loaded_engine
    return await _part(node, branch_status, () if engine is None else listed(engine), request, BRANCH_COLUMNS)


async def _links(node: Node, parameters: Parameters) -> object:
    """Return the producers and consumers of one connection."""
    check_known(parameters, ("id",))
    name = parameters.get("id", "")
    if not name:
        raise InvalidInput("id must be given: the address and port of the client")
    found = next((each for each in node.connections if each.peer == name), None)
    if found is None:
        raise UnknownAddress(f"there is no connection with the address {name!r:.100}")
    contexts = [link.context for link in found.client.links]
    shown = [_link(each) for each in contexts[:LINKS_SHOWN_MAX] if isinstance(each, ProducerLink | ConsumerLink)]
    return {**connection_status(found), "links": shown, "cut": len(contexts) > LINKS_SHOWN_MAX}


def _link(link: ProducerLink | ConsumerLink) -> dict[str, Any]:
    if isinstance(link, ProducerLink):
        return {"role": "producer", "address": link.address or "", "queue": "", "selector": "", "unsettled": 0, "credit": link.link.credit}
    consumer = link.consumer
    if consumer is None:
        return {"role": "browser", "address": "", "queue": "", "selector": "", "unsettled": 0, "credit": link.credit}
    return {
        "role": "consumer", "address": consumer.queue.address, "queue": consumer.queue.name, "selector": consumer.selector_text,
        "unsettled": len(consumer.unacked), "credit": link.credit,
    }  # fmt: skip


def _all_queues(node: Node) -> Iterable[BrokerQueue]:
    engine = node.loaded_engine
    return () if engine is None else engine.addresses.queues.values()


# -- the whole broker --------------------------------------------------------------------------------------------------


async def overview(node: Node, parameters: Parameters) -> object:
    """Return the status without the lists, and sums over all queues."""
    check_known(parameters, ())
    sums = dict.fromkeys(("messages", "bytes", "delivering", "delayed", "consumers"), 0)

    def add(queue: BrokerQueue) -> None:
        sums["messages"] += queue.waiting_count
        sums["bytes"] += queue.held_bytes
        sums["delivering"] += queue.delivering_count
        sums["delayed"] += len(queue.delayed)
        sums["consumers"] += len(queue.consumers)

    await in_turns(add, _all_queues(node))
    status: dict[str, Any] = dict(status_of(node, [], [], []))
    for name in ("queues", "branches", "users"):
        del status[name]
    dead_letters = _depth(node.loaded_engine, node.settings.broker.dead_letter_address)
    return {
        **status, "sums": sums, "sends": _sends(node.send_times),
        "dead_letters": dead_letters, "dead_letter_address": node.settings.broker.dead_letter_address,
        "expiry_address": node.settings.broker.expiry_address, "time_ms": time.time_ns() // 1_000_000,
    }  # fmt: skip


def _sends(times: SendTimes) -> dict[str, Any]:
    return {"count": times.count, "seconds": times.sum_s, "bounds_s": BOUNDS_S, "counts": times.counts}


def _depth(engine: Engine | None, name: str) -> int:
    queue = None if engine is None else engine.addresses.anycast.get(name)
    return 0 if queue is None else queue.held_messages


async def _settings(node: Node, parameters: Parameters) -> object:
    check_known(parameters, ())
    values = await beside(partial(masked_values, node.settings))
    return [{"setting": name, "value": value} for name, value in values]


async def _permissions(node: Node, parameters: Parameters) -> object:
    """Return the rules, and the decision for a user, a permission and an address if they are given."""
    check_known(parameters, ("user", "permission", "address"))
    answer = {
        "rules": LongList(_rule, node.settings.permission, RULE_COST),
        "permissions": [str(each) for each in Permission],
        "decision": None,
    }
    if not parameters:
        return answer
    user, word, address = (parameters.get(name, "") for name in ("user", "permission", "address"))
    if word not in list(Permission):
        raise InvalidInput(f"permission {word!r:.60} must be one of {', '.join(Permission)}")
    if not address or len(address) > ADDRESS_MAX:
        raise InvalidInput(f"address must have 1 to {ADDRESS_MAX} characters")
    return {**answer, "decision": node.permissions.now.decide(user, Permission(word), address)._asdict()}


def _rule(rule: PermissionRule) -> dict[str, Any]:
    roles = {name: value for name, value in rule.model_dump(by_alias=True).items() if name != "match" and value}
    return {"match": rule.match, "roles": roles}


# -- messages ----------------------------------------------------------------------------------------------------------


def _of_queue(answer: Callable[[Node, BrokerQueue, Parameters], Awaitable[object]]) -> Callable[[Node, Parameters], Awaitable[object]]:
    """Return a look at the queue that the parameter ``queue`` names, "" for the dead-letter address."""

    async def look(node: Node, parameters: Parameters) -> object:
        if not node.serving:
            raise Unavailable(node.trouble or "the broker is starting")
        name = parameters.get("queue", "") or node.settings.broker.dead_letter_address
        return await answer(node, queue_named(node.engine, name), parameters)

    return look


async def _messages(node: Node, parameters: Parameters) -> object:
    """Return a page of messages. The dead-letter queue has none before the first dead letter, which creates it."""
    configured = node.settings.broker.dead_letter_address
    if node.serving and parameters.get("queue", "") in ("", configured) and configured not in node.engine.addresses.anycast:
        return {"queue": configured, "messages": [], "next": "", "looked_at": 0}
    return await _messages_of_queue(node, parameters)


_messages_of_queue: Final = _of_queue(browsing.messages)

#: Looks by path of the request.
LOOKS: Final[dict[str, Look]] = {
    "overview": Look(overview),
    "definitions": Look(definitions),
    "list/queues": Look(_queues),
    "list/topics": Look(_topics),
    "list/subscriptions": Look(_subscriptions),
    "list/connections": Look(_connections),
    "list/branches": Look(_branches),
    "connections/links": Look(_links),
    "settings": Look(_settings, AdminRole.MANAGE),
    "permissions": Look(_permissions, AdminRole.MANAGE),
    "messages": Look(_messages, AdminRole.EDIT, content=True),
    "messages/show": Look(_of_queue(browsing.message_in_detail), AdminRole.EDIT, content=True),
    "messages/body": Look(_of_queue(browsing.message_body), AdminRole.EDIT, content=True),
    "messages/life": Look(message_life, AdminRole.EDIT, content=True, long=True),
}
