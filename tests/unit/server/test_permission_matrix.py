"""Every operation on destinations of every kind, by users who each lack one permission: the Python client, ``$management`` and HTTP.

``tests.support.permission_matrix`` has the operations with their permissions, from which the guide's tables are made. The broker is whole,
on Kafka in memory. ``tests/interop/test_permission_matrix.py`` carries out the operations with Qpid JMS.
"""

from __future__ import annotations

import asyncio
import base64
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from itertools import product
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import pytest

from bascule.broker.branches import listed
from bascule.client import ConnectionFactory, Context, Queue, Topic
from bascule.core.errors import BasculeError
from bascule.core.xid import Xid
from bascule.server.actions import act
from bascule.server.admin_access import LOCAL, AdminRole
from bascule.xa.jms import JmsResource
from tests.support import permissions_page
from tests.support.kafka_in_memory import KafkaInMemory
from tests.support.permission_matrix import (
    ALL,
    ANSWER,
    BRANCH_REQUESTS,
    DEAD_LETTERS,
    HTTP_CALLS,
    HTTP_STATUSES,
    OPERATIONS,
    ROLES,
    RULE,
    USERS,
    BranchRequest,
    HttpCall,
    Operation,
    P,
    cells,
    destination,
    lacking,
    refused_users,
)
from tests.unit.server.broker_process import SOON_S, Broker, called, kafka, serving
from tests.unit.server.served import run_async
from tests.unit.server.test_openapi import Answer, request
from tests.unit.server.test_owned_branches import prepared, resource_of

__all__ = ["kafka"]
#: Roles of the admin server have users of their own.
GUARDED: dict[str, Any] = {
    "broker": {
        "users": {user: user[0] for user in (*USERS, "looks", "edits", "manages")},
        "roles": {**ROLES, **{f"who-{user}": [user] for user in ("looks", "edits", "manages")}},
        "allow_anonymous": True,
    },
    "permission": [RULE],
    "admin": {"view": ["who-looks"], "edit": ["who-edits"], "manage": ["who-manages"]},
}


def connected(broker: Broker, user: str, client_id: str = "") -> Context:
    """Return a connection of a user, with a client id of its own by default."""
    url = f"amqp://127.0.0.1:{broker.ready[-1]}"
    return ConnectionFactory(url, timeout_s=SOON_S, user=user, password=user[0], client_id=client_id or f"of.{user}").connect()


class Matrix:
    """A broker, and a connection of the Python client for each user. ``owner`` makes the destinations that exist before."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self._loop = asyncio.get_running_loop()

    def carry_out(self, operation: Operation, contexts: Mapping[str, Context], owner: Context, exists: bool) -> dict[str, str]:
        """Return the errors of the users who cannot carry out an operation."""
        errors: dict[str, str] = {}
        for user, context in contexts.items():
            name = operation.name_for(user, exists)
            if operation.place == "dead letters" and not exists and DEAD_LETTERS in self.broker.node.engine.addresses:
                self.act("queues/delete", name=DEAD_LETTERS, force=True)
            with destination(operation, name, owner, exists) as name:
                try:
                    operation.python(context, name)
                except BasculeError as error:
                    errors[user] = str(error)
                if user in errors and not exists and user != P.DELETE_DURABLE_QUEUE:
                    assert name not in self.broker.node.engine.addresses, f"{user} has made a destination: {operation.name}"
        return errors

    def act(self, action: str, **arguments: Any) -> None:
        """Act as the administrator."""
        asyncio.run_coroutine_threadsafe(act(self.broker.node, LOCAL, action, arguments), self._loop).result(SOON_S)


@run_async
async def test_python_client_may_do_what_the_table_says_and_nothing_else(kafka: KafkaInMemory, tmp_path: Path) -> None:
    wanted = {(operation.name, exists): refused_users(operation, exists) for operation, exists in cells()}
    found: dict[tuple[str, bool], set[str]] = {}
    other_errors: list[str] = []

    def use(matrix: Matrix) -> None:
        with ExitStack() as opened:
            contexts = {user: opened.enter_context(connected(matrix.broker, user)) for user in USERS}
            owner = opened.enter_context(connected(matrix.broker, ALL, "owner"))
            for operation, exists in cells():
                errors = matrix.carry_out(operation, contexts, owner, exists)
                found[operation.name, exists] = set(errors)
                other_errors.extend(error for error in errors.values() if operation.refusal not in error)

    async with serving(kafka, tmp_path, **GUARDED) as broker:
        await called(use, Matrix(broker))
    assert found == wanted
    assert other_errors == []


SUBSCRIBE: Final[Mapping[str, Callable[[Context, str], AbstractContextManager[object]]]] = {
    "subscriber": lambda context, name: context.consumer(Topic(name)),
    "shared": lambda context, name: context.shared_consumer(Topic(name), name),
    "durable": lambda context, name: context.durable_consumer(Topic(name), f"own {name}"),
    "durable and shared": lambda context, name: context.shared_durable_consumer(Topic(name), name),
}
#: Patterns, and whether they match an address that only the user "all" may consume.
PATTERNS: Final = {
    "news.*": True,
    "news.#": True,
    "*.secret": True,
    "#": True,
    "news.secret.#": True,
    "news.open.*": False,
    "sport.#": False,
}
SECRET: Final = {"match": "news.secret", P.CONSUME.value: ["only-all"]}


@run_async
async def test_subscriber_with_wildcards_needs_the_permission_on_each_matching_address(kafka: KafkaInMemory, tmp_path: Path) -> None:
    roles = {**ROLES, "only-all": [ALL]}
    found: set[tuple[str, str, bool]] = set()

    def use(broker: Broker) -> None:
        with connected(broker, P.VIEW) as context:  # a permission that clients do not need
            for (kind, subscribe), pattern in product(SUBSCRIBE.items(), PATTERNS):
                try:
                    subscribe(context, pattern).__exit__(None, None, None)
                except BasculeError as error:
                    found.add((kind, pattern, "has no permission 'consume'" in str(error)))

    async with serving(kafka, tmp_path, broker={**GUARDED["broker"], "roles": roles}, permission=[RULE, SECRET]) as broker:
        await called(use, broker)
    assert found == {(kind, pattern, True) for kind in SUBSCRIBE for pattern, refused in PATTERNS.items() if refused}


# -- $management -------------------------------------------------------------------------------------------------------

UNKNOWN: Final = Xid(7, b"unknown", b"b")


def refusal(resource: JmsResource, request: BranchRequest, xid: Xid) -> str:
    """Return why a user may not carry out a request about a branch, "" if the user may."""
    try:
        answer = request.does(resource, xid)
    except BasculeError as error:  # also for the owner: "there is no such branch", "nobody has ended the branch"
        return str(error) if "permission" in str(error) else ""
    return "not listed" if isinstance(answer, list) and xid not in answer else ""


def with_resources(broker: Broker, users: Iterable[str], use: Callable[[Broker, Mapping[str, JmsResource]], None]) -> None:
    """Open a connection for the requests of each user."""
    with ExitStack() as opened:
        use(broker, {user: opened.enter_context(closing(resource_of(broker, user))) for user in users})


@pytest.mark.parametrize("owner", [None, ALL], ids=["of nobody", "of another user"])
@run_async
async def test_requests_about_a_branch_need_what_the_table_says(kafka: KafkaInMemory, tmp_path: Path, owner: str | None) -> None:
    wanted = {
        request.name: lacking(ANSWER | {P.MANAGE} | (request.others if owner else frozenset())) - {ALL} for request in BRANCH_REQUESTS
    }
    found: dict[str, set[str]] = {}

    def use(broker: Broker, resources: Mapping[str, JmsResource]) -> None:
        xid = prepared(broker, owner)
        for asked in BRANCH_REQUESTS:
            refused = found[asked.name] = set()
            for user, resource in resources.items():
                if refusal(resource, asked, xid):
                    refused.add(user)
                    assert xid in {each.xid for each in listed(broker.node.engine)}, f"{user} has ended a branch: {asked.name}"
                elif asked.ends:
                    assert not list(listed(broker.node.engine))
                    xid = prepared(broker, owner)

    async with serving(kafka, tmp_path, **GUARDED) as broker:
        await called(with_resources, broker, [user for user in USERS if user != owner], use)
    assert found == wanted


@run_async
async def test_request_about_an_unknown_branch_needs_the_same_permissions_and_tells_nothing_of_others(
    kafka: KafkaInMemory, tmp_path: Path
) -> None:
    found: dict[str, set[str]] = {}

    def use(broker: Broker, resources: Mapping[str, JmsResource]) -> None:
        for asked in BRANCH_REQUESTS[1:]:
            found[asked.name] = {user for user, resource in resources.items() if refusal(resource, asked, UNKNOWN)}

    async with serving(kafka, tmp_path, **GUARDED) as broker:
        await called(with_resources, broker, USERS, use)
    assert found == {request.name: lacking(ANSWER | {P.MANAGE}) for request in BRANCH_REQUESTS[1:]}


# -- HTTP --------------------------------------------------------------------------------------------------------------

#: Users, and the roles of the admin server that the users have. "" stands for a request without a login.
ADMINISTRATORS: Final = {"": 0, ALL: 0, "looks": AdminRole.VIEW, "edits": AdminRole.EDIT, "manages": AdminRole.MANAGE}
ROLE_WORDS: Final = {"none": 0, **{role.word: role for role in AdminRole}}


class AdminObjects:
    """The objects of requests to the admin server. ``restored`` makes what is missing, and deletes what requests have made."""

    def __init__(self, matrix: Matrix, owner: Context) -> None:
        self._matrix = matrix
        self._node = matrix.broker.node
        self._owner = owner
        self._idle = ""
        self._opened: list[Context] = []
        self._temporary = ""

    def restored(self) -> dict[str, str]:
        """Return the names of the objects by their kinds."""
        book, act = self._node.engine.addresses, self._matrix.act
        if book.anycast.get(self._temporary) is None:
            self._temporary = self._owner.temporary_queue().name
        kept = {"stock", "source", DEAD_LETTERS}
        for name in set(book.anycast) - {*kept, "bills", self._temporary}:
            act("queues/delete", name=name, force=True)
        for name in [name for name, queue in book.subscriptions.items() if queue.durable and name != "desk.kept"]:
            act("subscriptions/delete", name=name, force=True)
        if "desk.kept" not in book.subscriptions:
            act("subscriptions/create", name="kept", topic="news", client_id="desk")
        for name in kept:
            if name not in book.anycast or not book.anycast[name].held_messages:
                self._owner.send(Queue(name), "x")
        alive = [each for each in self._node.connections if not each.client.ended]
        if self._idle not in {each.client.container for each in alive}:
            self._idle = f"idle-{len(self._opened)}"
            self._opened.append(connected(self._matrix.broker, ALL, self._idle))
        address = next(each.peer for each in alive if each.client.container == "owner")
        return {
            "queue": "stock", "subscription": "desk.kept", "temporary_queue": self._temporary, "dead_letters": DEAD_LETTERS,
            "topic": "news", "none": "none", "connection": self._idle, "address": address, "user": ALL,
            "branch": self._branch(), "unknown_branch": str(UNKNOWN),
        }  # fmt: skip

    def _branch(self) -> str:
        found = list(listed(self._node.engine))
        for each in found:
            if each.ending is not None:
                self._matrix.act("branches/forget", xid=str(each.xid))
        return next((str(each.xid) for each in found if each.ending is None), "") or str(prepared(self._matrix.broker, ALL))

    def state(self) -> object:
        """Return what requests could change."""
        queues = {queue.name: queue.held_messages for queue in self._node.engine.addresses.queues.values()}
        idle = any(each.client.container == self._idle and not each.client.ended for each in self._node.connections)
        return queues, list(listed(self._node.engine)), idle

    def close(self) -> None:
        """Close the connections that were objects."""
        for each in self._opened:
            each.close()


def sent(port: int, call: HttpCall, name: str, user: str) -> Answer:
    """Return the answer to a request."""
    headers = {} if not user else {"authorization": "Basic " + base64.b64encode(f"{user}:{user[0]}".encode()).decode()}
    body = {key: name if value == "NAME" else value for key, value in call.arguments.items()} if call.method == "POST" else None
    return request(port, call.method, call.target.replace("NAME", quote(name)), body, **headers)


def documented_roles() -> dict[tuple[str, str], int]:
    """Return the role for each method and path that the guide's table names."""
    rows = permissions_page.tables()[permissions_page.GUIDES / "operations.md"][permissions_page.PATH_HEAD]
    found = [re.fullmatch(r"\| `(\w+) (\S+)` \| `?(\w+)`? \|", row) for row in rows]
    return {(match[1], match[2]): ROLE_WORDS[match[3]] for match in found if match is not None}


def http_cells() -> Iterator[tuple[HttpCall, str, int]]:
    """Yield each request, the kind of its object, and its status for somebody with the role for it."""
    for call in HTTP_CALLS:
        for kind, status in call.statuses.items():
            yield call, kind, status
    named = {call.path for call in HTTP_CALLS if call.path not in ("/queues", "/messages/life", "/dead-letters")}
    for method, path in documented_roles():
        if path not in named:
            status = 400 if path == "/messages/life" else HTTP_STATUSES.get(path, 200)
            yield HttpCall(method, path, {}, {"": status}), "", status


@run_async
async def test_requests_to_the_admin_server_need_the_role_of_the_table_and_a_refusal_tells_and_changes_nothing(
    kafka: KafkaInMemory, tmp_path: Path
) -> None:
    wanted: dict[tuple[str, str, str], tuple[int, bool]] = {}
    found: dict[tuple[str, str, str], tuple[int, bool]] = {}
    told: dict[tuple[str, str], set[bytes]] = {}

    def use(matrix: Matrix) -> None:
        assert matrix.broker.node.admin is not None
        port, roles = matrix.broker.node.admin.port, documented_roles()
        with connected(matrix.broker, ALL, "owner") as owner, closing(AdminObjects(matrix, owner)) as objects:
            for call, kind, status in http_cells():
                role = roles[call.method, call.path]
                for user, own in ADMINISTRATORS.items():
                    name, before = objects.restored().get(kind, ""), objects.state()
                    answer = sent(port, call, name, user)
                    key, allowed = (f"{call.method} {call.target} {dict(call.arguments)}", kind, user), own >= role
                    found[key] = answer.status, allowed or objects.state() == before
                    wanted[key] = status if allowed else 403 if user else 401, True
                    if not allowed:
                        told.setdefault((call.path, user), set()).add(answer.body)

    async with serving(kafka, tmp_path, **GUARDED) as broker:
        await called(use, Matrix(broker))
    assert found == wanted
    assert {key: bodies for key, bodies in told.items() if len(bodies) != 1} == {}, "a refusal depends on what exists"


# -- the guides --------------------------------------------------------------------------------------------------------


def test_tables_of_the_guides_are_those_of_the_data() -> None:
    different = [path.name for path, text in permissions_page.pages() if path.read_text() != text]
    assert different == [], "run `python -m tests.support.permissions_page`"


def test_every_permission_of_a_client_is_in_the_table() -> None:
    of_operations = {permission for operation in OPERATIONS for permission in operation.needs | (operation.new or frozenset())}
    of_branches = {permission for each in BRANCH_REQUESTS for permission in each.others}
    for_administrators = {P.VIEW, P.EDIT, P.DELETE_ADDRESS, P.DELETE_NON_DURABLE_QUEUE}
    assert of_operations | of_branches == set(P) - for_administrators
