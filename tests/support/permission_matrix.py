"""Every operation of a client on a destination, and the permissions that it needs: the data of the tables of docs/guides/permissions.md.

``tests/unit/server/test_permission_matrix.py`` carries out each of them with the Python client, as users who each lack one permission, and
``tests/interop/test_permission_matrix.py`` with Qpid JMS. ``tests.support.permissions_page`` writes the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from bascule.client import Context, Queue, Topic
from bascule.core.permissions import Permission
from bascule.core.xid import Xid
from bascule.xa.jms import JmsResource

if TYPE_CHECKING:
    from tests.support.qpid import Session

P = Permission
ALL: Final = "all"
#: Each of the other users lacks the permission of its name, and "nothing" all of them.
NOTHING: Final = "nothing"
USERS: Final = (ALL, NOTHING, *(permission.value for permission in Permission))
#: The user of clients without a login has all permissions.
ROLES: Final[Mapping[str, list[str]]] = {
    f"has-{permission.value}": ["anonymous", *(user for user in USERS if user not in (NOTHING, permission.value))]
    for permission in Permission
}
#: The table [[permission]] for all addresses.
RULE: Final[Mapping[str, Any]] = {"match": "#", **{permission.value: [f"has-{permission.value}"] for permission in Permission}}
DEAD_LETTERS: Final = "DLQ"
ONLY_ITS_OWN: Final = "only its own connection may consume from temporary destination"

QUEUE: Final = frozenset({P.CREATE_ADDRESS, P.CREATE_DURABLE_QUEUE})
TOPIC: Final = frozenset({P.CREATE_ADDRESS})
TEMPORARY: Final = frozenset({P.CREATE_ADDRESS, P.CREATE_NON_DURABLE_QUEUE, P.SEND})
#: A temporary destination of which the client also consumes, for example for the answers to requests.
ANSWER: Final = TEMPORARY | {P.CONSUME}
#: The destination of an operation: a queue and a topic with a name of its own, a topic with wildcards, the queue of dead letters, a
#: temporary queue of another client, or none that exists before.
Place = Literal["named", "wildcards", "dead letters", "of another client", "none"]


class Operation(NamedTuple):
    """What a client does with a destination, and the permissions that this needs.

    ``new`` are those that it needs in addition if the destination does not exist; None if this cannot be. If there is an error ``never``,
    everybody gets it.
    """

    name: str
    java: Callable[[Session, str], Any]
    python: Callable[[Context, str], Any]
    needs: frozenset[Permission]
    new: frozenset[Permission] | None
    place: Place = "named"
    never: str = ""

    @property
    def refusal(self) -> str:
        """Return the text of a refusal."""
        return self.never or "has no permission"

    def name_for(self, user: str, exists: bool) -> str:
        """Return the name of a destination of its own for each user."""
        return f"{re.sub(r'[^a-z]', '-', self.name)}.{user}.{exists}"


def _make_and_end(session: Session, topic: str) -> None:
    session.consumer(f"topic:{topic}", name=topic, durable=True).close()
    session.unsubscribe(topic)


def _make_and_end_in_python(context: Context, topic: str) -> None:
    context.durable_consumer(Topic(topic), topic).close()
    context.unsubscribe(topic)


def _make_and_change(session: Session, topic: str) -> None:
    session.consumer(f"topic:{topic}", name=topic, durable=True).close()
    session.consumer(f"topic:{topic}", name=topic, durable=True, selector="n = 1").close()


def _make_and_change_in_python(context: Context, topic: str) -> None:
    context.durable_consumer(Topic(topic), topic).close()
    context.durable_consumer(Topic(topic), topic, selector="n = 1").close()


OPERATIONS: Final = (
    Operation(
        "send to a queue",
        lambda session, name: session.producer(f"queue:{name}").send("x"),
        lambda context, name: context.send(Queue(name), "x"),
        frozenset({P.SEND}), QUEUE,
    ),
    Operation(
        "send to a queue by a producer without a destination",
        lambda session, name: session.producer().send("x", to=f"queue:{name}"),
        lambda context, name: context.producer().send("x", to=Queue(name)),
        frozenset({P.SEND}), QUEUE,
    ),
    Operation(
        "send to a topic",
        lambda session, name: session.producer(f"topic:{name}").send("x"),
        lambda context, name: context.send(Topic(name), "x"),
        frozenset({P.SEND}), TOPIC,
    ),
    Operation(
        "send to a topic by a producer without a destination",
        lambda session, name: session.producer().send("x", to=f"topic:{name}"),
        lambda context, name: context.producer().send("x", to=Topic(name)),
        frozenset({P.SEND}), TOPIC,
    ),
    Operation(
        "consume from a queue",
        lambda session, name: session.consumer(f"queue:{name}").close(),
        lambda context, name: context.consumer(Queue(name)).close(),
        frozenset({P.CONSUME}), QUEUE,
    ),
    Operation(
        "browse a queue",
        lambda session, name: session.browse(f"queue:{name}"),
        lambda context, name: list(context.browse(Queue(name))),
        frozenset({P.BROWSE}), QUEUE,
    ),
    Operation(
        "subscribe to a topic",
        lambda session, name: session.consumer(f"topic:{name}").close(),
        lambda context, name: context.consumer(Topic(name)).close(),
        frozenset({P.CONSUME, P.CREATE_NON_DURABLE_QUEUE}), TOPIC,
    ),
    Operation(
        "share a subscription",
        lambda session, name: session.consumer(f"topic:{name}", name=name, shared=True).close(),
        lambda context, name: context.shared_consumer(Topic(name), name).close(),
        frozenset({P.CONSUME, P.CREATE_NON_DURABLE_QUEUE}), TOPIC,
    ),
    Operation(
        "make a durable subscription",
        lambda session, name: session.consumer(f"topic:{name}", name=name, durable=True).close(),
        lambda context, name: context.durable_consumer(Topic(name), name).close(),
        frozenset({P.CONSUME, P.CREATE_DURABLE_QUEUE}), TOPIC,
    ),
    Operation(
        "share a durable subscription",
        lambda session, name: session.consumer(f"topic:{name}", name=name, durable=True, shared=True).close(),
        lambda context, name: context.shared_durable_consumer(Topic(name), name).close(),
        frozenset({P.CONSUME, P.CREATE_DURABLE_QUEUE}), TOPIC,
    ),
    Operation(
        "make a durable subscription and unsubscribe",
        _make_and_end,
        _make_and_end_in_python,
        frozenset({P.CONSUME, P.CREATE_DURABLE_QUEUE, P.DELETE_DURABLE_QUEUE}), TOPIC,
    ),
    Operation(
        "make a durable subscription and change its selector",
        _make_and_change,
        _make_and_change_in_python,
        frozenset({P.CONSUME, P.CREATE_DURABLE_QUEUE, P.DELETE_DURABLE_QUEUE}), TOPIC,
    ),
    Operation(
        "subscribe to a topic with wildcards",
        lambda session, name: session.consumer(f"topic:{name}").close(),
        lambda context, name: context.consumer(Topic(name)).close(),
        frozenset({P.CONSUME, P.CREATE_NON_DURABLE_QUEUE}), TOPIC, "wildcards",
    ),
    Operation(
        "share a subscription with wildcards",
        lambda session, name: session.consumer(f"topic:{name}", name=name, shared=True).close(),
        lambda context, name: context.shared_consumer(Topic(name), name).close(),
        frozenset({P.CONSUME, P.CREATE_NON_DURABLE_QUEUE}), TOPIC, "wildcards",
    ),
    Operation(
        "make a durable subscription with wildcards",
        lambda session, name: session.consumer(f"topic:{name}", name=name, durable=True).close(),
        lambda context, name: context.durable_consumer(Topic(name), name).close(),
        frozenset({P.CONSUME, P.CREATE_DURABLE_QUEUE}), TOPIC, "wildcards",
    ),
    Operation(
        "share a durable subscription with wildcards",
        lambda session, name: session.consumer(f"topic:{name}", name=name, durable=True, shared=True).close(),
        lambda context, name: context.shared_durable_consumer(Topic(name), name).close(),
        frozenset({P.CONSUME, P.CREATE_DURABLE_QUEUE}), TOPIC, "wildcards",
    ),
    Operation(
        "consume dead letters",
        lambda session, name: session.consumer(f"queue:{name}").close(),
        lambda context, name: context.consumer(Queue(name)).close(),
        frozenset({P.CONSUME}), QUEUE, "dead letters",
    ),
    Operation(
        "browse dead letters",
        lambda session, name: session.browse(f"queue:{name}"),
        lambda context, name: list(context.browse(Queue(name))),
        frozenset({P.BROWSE}), QUEUE, "dead letters",
    ),
    Operation(
        "send to the queue of dead letters",
        lambda session, name: session.producer(f"queue:{name}").send("x"),
        lambda context, name: context.send(Queue(name), "x"),
        frozenset({P.SEND}), QUEUE, "dead letters",
    ),
    Operation(
        "send to a temporary queue of another client",
        lambda session, name: session.producer(f"queue:{name}").send("x"),
        lambda context, name: context.send(Queue(name), "x"),
        frozenset({P.SEND}), None, "of another client",
    ),
    Operation(
        "send to a temporary queue of another client by a producer without a destination",
        lambda session, name: session.producer().send("x", to=f"queue:{name}"),
        lambda context, name: context.producer().send("x", to=Queue(name)),
        frozenset({P.SEND}), None, "of another client",
    ),
    Operation(
        "consume from a temporary queue of another client",
        lambda session, name: session.consumer(f"queue:{name}").close(),
        lambda context, name: context.consumer(Queue(name)).close(),
        frozenset(), None, "of another client", ONLY_ITS_OWN,
    ),
    Operation(
        "browse a temporary queue of another client",
        lambda session, name: session.browse(f"queue:{name}"),
        lambda context, name: list(context.browse(Queue(name))),
        frozenset(), None, "of another client", ONLY_ITS_OWN,
    ),
    Operation(
        "make a temporary queue",
        lambda session, _: session.temporary_queue(),
        lambda context, _: context.temporary_queue(),
        TEMPORARY, None, "none",
    ),
    Operation(
        "make a temporary queue and consume from it",
        lambda session, _: session.consumer(session.temporary_queue().address),
        lambda context, _: context.consumer(context.temporary_queue()).close(),
        ANSWER, None, "none",
    ),
    Operation(
        "make a temporary topic",
        lambda session, _: session.temporary_topic(),
        lambda context, _: context.temporary_topic(),
        frozenset({P.CREATE_ADDRESS, P.SEND}), None, "none",
    ),
    Operation(
        "make a temporary topic and subscribe to it",
        lambda session, _: session.consumer(session.temporary_topic().address),
        lambda context, _: context.consumer(context.temporary_topic()).close(),
        ANSWER, None, "none",
    ),
    Operation(
        "send requests to `$management`, for XA transactions",
        lambda session, _: session.producer("queue:$management"),
        lambda context, _: context.producer(Queue("$management")).send("x"),
        frozenset({P.MANAGE}), None, "none",
    ),
)  # fmt: skip


class BranchRequest(NamedTuple):
    """A request to ``$management`` about a prepared branch. It needs ``manage`` there, ``ANSWER``, and ``others`` if the branch belongs to
    another user. ``operation`` is the property of the request. ``ends``: the branch is gone afterwards.
    """

    name: str
    operation: str
    does: Callable[[JmsResource, Xid], Any]
    others: frozenset[Permission]
    ends: bool = False


RECOVER: Final = frozenset({P.RECOVER})
BRANCH_REQUESTS: Final = (
    BranchRequest("list branches", "recover", lambda resource, _: list(resource.recover()), RECOVER),
    BranchRequest("commit a branch", "commit", lambda resource, xid: resource.commit(xid), RECOVER, ends=True),
    BranchRequest("roll a branch back", "rollback", lambda resource, xid: resource.rollback(xid), RECOVER, ends=True),
    BranchRequest("forget a branch", "forget", lambda resource, xid: resource.forget(xid), RECOVER),
)


class HttpCall(NamedTuple):
    """A request to the admin server about an object, and its status by the kind of the object for somebody who has the role.

    NAME stands for the object in the target and in the arguments.
    """

    method: str
    target: str
    arguments: Mapping[str, Any]
    statuses: Mapping[str, int]

    @property
    def path(self) -> str:
        """Return the path without a query."""
        return self.target.partition("?")[0]


def _queues(default: int, **others: int) -> Mapping[str, int]:
    """Return a status for each kind of destination; ``others`` have their own."""
    kinds = ("queue", "subscription", "temporary_queue", "dead_letters", "topic", "none")
    return {kind: others.get(kind, default) for kind in kinds}


_HELD: Final = _queues(200, topic=404, none=404)
_BRANCHES: Final = {"branch": 200, "unknown_branch": 404}
#: Every request that names an object.
HTTP_CALLS: Final = (
    HttpCall("GET", "/queues?name=NAME", {}, _HELD),
    HttpCall("GET", "/messages?queue=NAME", {}, _HELD),
    HttpCall("GET", "/messages/show?queue=NAME&id=0", {}, _queues(400, topic=404, none=404)),
    HttpCall("GET", "/messages/body?queue=NAME&id=0", {}, _queues(400, topic=404, none=404)),
    HttpCall("GET", "/messages/life?id=NAME", {}, {"none": 200}),
    HttpCall("GET", "/dead-letters?queue=NAME", {}, _HELD),
    HttpCall("GET", "/connections/links?id=NAME", {}, {"address": 200, "none": 404}),
    HttpCall("GET", "/permissions?user=NAME&permission=send&address=q", {}, {"user": 200, "none": 200}),
    HttpCall("POST", "/queues/create", {"name": "NAME"}, _queues(400, topic=200, subscription=200, none=200)),
    HttpCall("POST", "/queues/delete", {"name": "NAME", "force": True}, _queues(200, subscription=400, topic=404, none=404)),
    HttpCall("POST", "/queues/purge", {"name": "NAME"}, _HELD),
    HttpCall("POST", "/queues/move", {"name": "NAME", "to": "elsewhere"}, _HELD),
    HttpCall("POST", "/queues/move", {"name": "source", "to": "NAME"}, _queues(200)),
    HttpCall("POST", "/dead-letters/return", {"queue": "NAME"}, _HELD),
    HttpCall("POST", "/messages/send", {"to": "NAME"}, _queues(200)),
    HttpCall("POST", "/messages/send", {"to": "NAME", "topic": True}, _queues(200)),
    HttpCall("POST", "/subscriptions/create", {"name": "made", "topic": "NAME", "client_id": "desk"}, _queues(200)),
    HttpCall("POST", "/subscriptions/delete", {"name": "NAME"}, _queues(404, subscription=200)),
    HttpCall("POST", "/connections/close", {"id": "NAME"}, {"connection": 200, "none": 404}),
    HttpCall("POST", "/branches/commit", {"xid": "NAME"}, _BRANCHES),
    HttpCall("POST", "/branches/rollback", {"xid": "NAME"}, _BRANCHES),
    HttpCall("POST", "/branches/forget", {"xid": "NAME"}, {"branch": 404, "unknown_branch": 404}),
)
#: Requests that name no object have one status: ``GET`` answers 200, and this action refuses, since the topic was not recreated.
HTTP_STATUSES: Final = {"/ingress/reset": 400}


def cells() -> Iterator[tuple[Operation, bool]]:
    """Yield each operation on a destination that exists, and on one that does not."""
    for operation in OPERATIONS:
        yield operation, True
        if operation.new is not None:
            yield operation, False


@contextmanager
def destination(operation: Operation, name: str, owner: Context, exists: bool) -> Iterator[str]:
    """Yield the name of the destination of an operation. ``owner`` makes it if it should exist."""
    with ExitStack() as opened:
        match operation.place:
            case "wildcards":
                name = f"{name}.*"
            case "dead letters":
                name = DEAD_LETTERS
            case "of another client":
                name = owner.temporary_queue().name
        if exists and operation.new is not None:
            opened.enter_context(closing(owner.consumer(Topic(name))))
            if operation.place != "wildcards":
                owner.send(Queue(name), "x")
        yield name


def refused_users(operation: Operation, exists: bool) -> set[str]:
    """Return the users who may not carry out an operation."""
    if operation.never:
        return set(USERS)
    return lacking(operation.needs if exists else operation.needs | (operation.new or frozenset()))


def lacking(needed: frozenset[Permission]) -> set[str]:
    """Return the users who lack one of some permissions."""
    return {NOTHING, *(permission.value for permission in needed)}
