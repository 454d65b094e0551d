"""Actions of an administrator on a running broker. Each takes named arguments, and answers when its effect is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from bascule.amqp.errors import CONNECTION_FORCED, AmqpError
from bascule.broker import administration, branches
from bascule.broker.administration import Choice, Progress
from bascule.broker.engine import Engine
from bascule.broker.errors import UnknownAddress
from bascule.broker.queue import BrokerQueue
from bascule.broker.subscription_names import NAME_DELIMITER, subscription_queue
from bascule.config.address import check_address
from bascule.core.destination import ADDRESS_MAX, Routing
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.permissions import MANAGEMENT_ADDRESS, Permission
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.server.admin_access import AdminRole, Principal
from bascule.server.browsing import chosen_messages, selector_of
from bascule.server.sending_messages import send

if TYPE_CHECKING:
    from bascule.server.node import Node

Answer = dict[str, Any]
#: Pause between two checks whether the journal has room for more of a long action.
PAUSE_S = 0.01
#: Connections that are closed in one turn of the event loop: any number of clients may use one client id.
CLOSES_PER_TURN: Final = 20
CLOSED = AmqpError(CONNECTION_FORCED, "closed by an administrator")


#: Prefixes of the name of a queue, and of the queue of a subscription.
QUEUE: Final = "queue://"
SUBSCRIPTION: Final = "subscription://"
#: Types of arguments, in errors.
TYPE_NAMES: Final[Mapping[type, str]] = {bool: "true or false", str: "a string", int: "an integer", dict: "an object"}
#: Permissions on addresses.
Needs = list[tuple[Permission, str]]


class AdminAction(NamedTuple):
    """An action: ``run(node, principal, **arguments)`` carries it out, ``needs(node, **arguments)`` returns the permissions for it.

    ``optional`` gives the types and the default values of optional arguments.
    """

    run: Callable[..., Awaitable[Answer]]
    needs: Callable[..., Needs]
    role: AdminRole
    required: tuple[str, ...] = ()
    optional: Mapping[str, Any] = {}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return all arguments. Raises InvalidInput for an argument that is missing, unknown or of another type."""
        known = {**dict.fromkeys(self.required, ""), **self.optional}
        for name, value in given.items():
            if name not in known:
                raise InvalidInput(f"unknown argument {name[:60]!r}; known are {', '.join(known)}")
            if type(value) is not type(known[name]):
                raise InvalidInput(f"{name} must be {TYPE_NAMES[type(known[name])]}")
            if isinstance(value, str) and not is_unicode(value):
                raise InvalidInput(f"{name} {value[:60]!r} contains half of a surrogate pair, which is not a character")
        if missing := [name for name in self.required if not given.get(name)]:
            raise InvalidInput(f"{missing[0]} must be given")
        return {**known, **given}


def is_unicode(text: str) -> bool:
    r"""Return True if a text can be encoded: JSON may contain halves of surrogate pairs, such as ``\ud800``."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


async def act(node: Node, principal: Principal, name: str, given: Mapping[str, Any]) -> Answer:
    """Carry out an action of an administrator. Raises Unauthorized, InvalidInput, UnknownAddress, ResourceLimit, Unavailable."""
    action = ACTIONS[name]
    arguments = action.arguments(given)
    if not node.serving:
        raise Unavailable(node.trouble or "the broker is starting")
    for permission, address in action.needs(node, **arguments):
        principal.authorize(permission, address)
    return await action.run(node, principal, **arguments)


def queue_named(engine: Engine, name: str) -> BrokerQueue:
    """Return a queue, or the queue of a subscription. Raises UnknownAddress."""
    queue = _found(engine, name)
    if queue is None:
        raise UnknownAddress(f"there is no queue {name!r}")
    return queue


def _found_subscription(engine: Engine, name: str) -> BrokerQueue | None:
    subscriptions = engine.addresses.subscriptions
    return subscriptions.get(name.removeprefix(SUBSCRIPTION)) or subscriptions.get(name)


def _found(engine: Engine, name: str) -> BrokerQueue | None:
    """Return a queue, or the queue of a subscription; None if there is none.

    Clients choose both names, so a queue may have the name of a subscription's queue. ``QUEUE`` and ``SUBSCRIPTION`` before a name say
    which one is meant.
    """
    queues, subscriptions = engine.addresses.anycast, engine.addresses.subscriptions
    for prefix, meant in ((QUEUE, queues), (SUBSCRIPTION, subscriptions)):
        if name.startswith(prefix) and (queue := meant.get(name.removeprefix(prefix))) is not None:
            return queue
    return queues.get(name) or subscriptions.get(name)


def _check_new(argument: str, name: str) -> None:
    """Check that a queue can have a name. Raises InvalidInput."""
    try:
        check_address(name)
    except ValueError as error:
        raise InvalidInput(f"{argument}: {error}") from None
    if len(name) > ADDRESS_MAX:
        raise InvalidInput(f"{argument} {name[:60]!r} has {len(name)} characters; at most {ADDRESS_MAX} are allowed")


async def _create(node: Node, by: Principal, name: str) -> Answer:
    _check_new("name", name)
    with node.audit.changing(by.name, by.peer):
        administration.create(node.engine, name)
    await _stored(node, node.engine)
    return {"created": name}


async def _subscribe(
    node: Node, by: Principal, name: str, topic: str, client_id: str, selector: str, no_local: bool, shared: bool, user: str
) -> Answer:
    _check_new("topic", topic)
    if NAME_DELIMITER in name:
        raise InvalidInput(f"name {name[:60]!r} contains {NAME_DELIMITER!r}, which a name of a subscription cannot contain")
    if not client_id and (no_local or not shared):
        raise InvalidInput("client_id is missing: only a shared subscription without no_local can do without")
    wanted = selector_of(selector)
    queue = subscription_queue(client_id or None, name, durable=True)
    with node.audit.changing(by.name, by.peer):
        administration.subscribe(
            node.engine, queue, topic, name, selector="" if wanted is None else wanted.text, no_local=client_id if no_local else "",
            shared=shared, user=user,
        )  # fmt: skip
    await _stored(node, node.engine)
    return {"created": queue}


async def _delete(node: Node, by: Principal, name: str, force: bool) -> Answer:
    queue = queue_named(node.engine, name)
    if queue.subscription:
        raise InvalidInput(f"{name!r} is the queue of a subscription; delete the subscription instead")
    return await _delete_queue(node, by, queue, force)


async def _unsubscribe(node: Node, by: Principal, name: str, force: bool) -> Answer:
    queue = _found_subscription(node.engine, name)
    if queue is None:
        raise UnknownAddress(f"there is no subscription {name!r}")
    return await _delete_queue(node, by, queue, force or not queue.consumers)


async def _delete_queue(node: Node, by: Principal, queue: BrokerQueue, force: bool) -> Answer:
    messages = queue.held_messages
    with node.audit.changing(by.name, by.peer):
        administration.delete(node.engine, queue, force=force)
    await _stored(node, node.engine)
    return {"deleted": queue.name, "messages": messages}


async def _purge(node: Node, by: Principal, name: str, selector: str, ids: str) -> Answer:
    def begin(engine: Engine) -> Iterator[Progress]:
        return administration.purge(engine, queue_named(engine, name), _choice(engine, selector, ids))

    progress = await _go_through(node, by, begin)
    return {"purged": progress.done, **({"left": progress.left} if ids else {})}


async def _move(node: Node, by: Principal, name: str, to: str, selector: str, ids: str) -> Answer:
    if to not in node.engine.addresses.anycast:
        _check_new("to", to)

    def begin(engine: Engine) -> Iterator[Progress]:
        return administration.move(engine, queue_named(engine, name), to, _choice(engine, selector, ids))

    progress = await _go_through(node, by, begin)
    return {"moved": progress.done, "left": progress.left}


async def _return(node: Node, principal: Principal, queue: str, selector: str, ids: str) -> Answer:
    configured = node.settings.broker.dead_letter_address
    name = queue or configured
    if name == configured and name not in node.engine.addresses.anycast:
        return {"returned": 0, "left": {}}  # no message was a dead letter yet

    def check(origin: BrokerQueue) -> None:
        principal.authorize(Permission.SEND, origin.address)

    def begin(engine: Engine) -> Iterator[Progress]:
        return administration.return_dead_letters(engine, queue_named(engine, name), _choice(engine, selector, ids), check)

    progress = await _go_through(node, principal, begin)
    return {"returned": progress.done, "left": progress.left}


async def _send(node: Node, sender: Principal, to: str, topic: bool, **arguments: Any) -> Answer:
    if topic or to not in node.engine.addresses.anycast:
        _check_new("to", to)
    return {"sent": await send(node, sender, {"to": to, "topic": topic, **arguments})}


async def _close(node: Node, _by: Principal, id: str) -> Answer:  # the name of the argument in the request
    found = [connection for connection in node.connections if id in (connection.peer, connection.client.container)]
    if not found:
        raise UnknownAddress(f"there is no connection with the address or client id {id!r}")
    for number, connection in enumerate(found, 1):
        if not connection.client.lost:
            connection.close(CLOSED)
        if not number % CLOSES_PER_TURN:
            await asyncio.sleep(0)
    node.dispatch()
    return {"closed": len(found)}


async def _force(node: Node, _by: Principal, xid: str, ending: Ending) -> Answer:
    """End a prepared branch without its manager. The broker reports this to the manager until the branch is forgotten."""
    engine, parsed = node.engine, Xid.parse(xid)
    plan = branches.plan_end(engine, parsed, ending)
    try:
        while plan is not None and not plan.ready():
            await asyncio.sleep(0)
            if node.loaded_engine is not engine or not node.serving:
                raise Unavailable(f"interrupted before any change: {node.trouble or 'the broker reloaded the journal'}")
        branches.end(engine, parsed, ending, _nothing, plan=plan)
    finally:
        if plan is not None:
            plan.close()
    await _stored(node, engine)
    return {"forced": xid}


async def _forget(node: Node, _by: Principal, xid: str) -> Answer:
    branches.forget(node.engine, Xid.parse(xid), _nothing)
    await _stored(node, node.engine)
    return {"forgotten": xid}


async def _reset_ingress(node: Node, _by: Principal) -> Answer:
    if node.tail is None:
        raise Unavailable("the broker is starting")
    await node.tail.reset()
    await _stored(node, node.engine)
    return {"reset": node.settings.journal_topics.ingress}


def _nothing() -> None:
    """Return no further values; the caller waits only for the journal."""


def _choice(engine: Engine, selector: str, ids: str) -> Choice:
    """Return which messages an action concerns. Raises InvalidInput."""
    if not ids:
        return selector_of(selector)
    if selector.strip():
        raise InvalidInput("give either selector or ids, not both")
    return chosen_messages(engine, ids)


def _attributed(node: Node, by: Principal, begin: Callable[[Engine], Iterator[Progress]]) -> Iterator[Progress]:
    """Yield the steps of an action. The audit attributes the queues that each step changes to the administrator."""
    with node.audit.changing(by.name, by.peer):
        steps = begin(node.engine)
    while True:
        with node.audit.changing(by.name, by.peer):
            progress = next(steps, None)
        if progress is None:
            return
        yield progress


async def _go_through(node: Node, by: Principal, begin: Callable[[Engine], Iterator[Progress]]) -> Progress:
    """Run step by step, so that clients are served in between. Raises Unavailable if the epoch ends before the last step."""
    engine = node.engine
    progress = Progress()
    for progress in _attributed(node, by, begin):  # the last progress counts
        node.dispatch()
        await asyncio.sleep(0)
        while node.loaded_engine is engine and node.serving and node.congested:
            await asyncio.sleep(PAUSE_S)
        if node.loaded_engine is not engine or not node.serving:
            raise Unavailable(f"interrupted after up to {progress.done} messages: {node.trouble or 'the broker reloaded the journal'}")
    await _stored(node, engine)
    return progress


async def _stored(node: Node, engine: Engine) -> None:
    """Wait until the decision is in the journal. Raises Unavailable."""
    stored = asyncio.Event()
    engine.journaling.tell(stored.set)
    node.dispatch()
    timeout_s = node.settings.journal.append_timeout_s
    try:
        await asyncio.wait_for(stored.wait(), timeout_s)
    except TimeoutError:
        raise Unavailable(f"Kafka has not stored the decision within {timeout_s:g} s; check later whether it took effect") from None


def _address(engine: Engine, name: str) -> str:
    """Return the address of a queue or subscription. If none exists, return the name, which is the address of a queue."""
    queue = _found(engine, name)
    return name if queue is None else queue.address


def _to_create(_node: Node, name: str) -> Needs:
    return [(Permission.CREATE_ADDRESS, name), (Permission.CREATE_DURABLE_QUEUE, name)]


def _to_subscribe(node: Node, topic: str, **_: Any) -> Needs:
    creates = [] if node.engine.addresses.knows(topic, Routing.MULTICAST) else [(Permission.CREATE_ADDRESS, topic)]
    return [*creates, (Permission.CREATE_DURABLE_QUEUE, topic)]


def _to_delete(node: Node, name: str, **_: Any) -> Needs:
    queue = _found(node.engine, name)
    if queue is None or queue.subscription:
        return []  # the action reports this
    return [(Permission.to_delete(durable=queue.durable), queue.address), (Permission.DELETE_ADDRESS, queue.address)]


def _to_unsubscribe(node: Node, name: str, **_: Any) -> Needs:
    queue = _found_subscription(node.engine, name)
    return [] if queue is None else [(Permission.to_delete(durable=queue.durable), queue.address)]


def _to_edit(node: Node, name: str, **_: Any) -> Needs:
    return [(Permission.EDIT, _address(node.engine, name))]


def _to_move(node: Node, name: str, to: str, **_: Any) -> Needs:
    creates = [] if node.engine.addresses.knows(to, Routing.ANYCAST) else _to_create(node, to)
    return [*_to_edit(node, name), (Permission.SEND, to), *creates]


def _to_send(node: Node, to: str, topic: bool, **_: Any) -> Needs:
    known = topic or node.engine.addresses.knows(to, Routing.ANYCAST)
    return [(Permission.SEND, to), *([] if known else _to_create(node, to))]


def _to_return(node: Node, queue: str, **_: Any) -> Needs:
    return _to_edit(node, queue or node.settings.broker.dead_letter_address)


def _to_manage(_node: Node, **_: Any) -> Needs:
    return [(Permission.MANAGE, MANAGEMENT_ADDRESS)]


#: Actions by path of the request.
ACTIONS: dict[str, AdminAction] = {
    "queues/create": AdminAction(_create, _to_create, AdminRole.EDIT, ("name",)),
    "queues/delete": AdminAction(_delete, _to_delete, AdminRole.EDIT, ("name",), {"force": False}),
    "queues/purge": AdminAction(_purge, _to_edit, AdminRole.EDIT, ("name",), {"selector": "", "ids": ""}),
    "queues/move": AdminAction(_move, _to_move, AdminRole.EDIT, ("name", "to"), {"selector": "", "ids": ""}),
    "dead-letters/return": AdminAction(_return, _to_return, AdminRole.EDIT, (), {"queue": "", "selector": "", "ids": ""}),
    "messages/send": AdminAction(
        _send,
        _to_send,
        AdminRole.EDIT,
        ("to",),
        {
            "topic": False,
            "kind": "text",
            "body": "",
            "properties": {},
            "correlation_id": "",
            "reply_to": "",
            "type": "",
            "group_id": "",
            "priority": 4,
            "ttl_ms": 0,
            "delay_ms": 0,
            "persistent": True,
        },
    ),
    "subscriptions/create": AdminAction(
        _subscribe,
        _to_subscribe,
        AdminRole.EDIT,
        ("name", "topic"),
        {"client_id": "", "selector": "", "no_local": False, "shared": False, "user": ""},
    ),
    "subscriptions/delete": AdminAction(_unsubscribe, _to_unsubscribe, AdminRole.EDIT, ("name",), {"force": False}),
    "connections/close": AdminAction(_close, _to_manage, AdminRole.MANAGE, ("id",)),
    "branches/commit": AdminAction(partial(_force, ending=Ending.FORCED_COMMIT), _to_manage, AdminRole.MANAGE, ("xid",)),
    "branches/rollback": AdminAction(partial(_force, ending=Ending.FORCED_ROLLBACK), _to_manage, AdminRole.MANAGE, ("xid",)),
    "branches/forget": AdminAction(_forget, _to_manage, AdminRole.MANAGE, ("xid",)),
    "ingress/reset": AdminAction(_reset_ingress, _to_manage, AdminRole.MANAGE),
}

#: Actions whose arguments have content of messages.
CONTENT_ACTIONS: Final = frozenset({"messages/send"})
