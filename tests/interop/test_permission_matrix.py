"""Every operation of JMS, on destinations that exist and that do not, by users who each lack one permission, with both clients.

``OPERATIONS`` is the table of the guide: a user is refused if, and only if, the user lacks a permission that the table names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bascule.client import Context, Queue, Topic, connect
from bascule.core.errors import BasculeError
from bascule.core.permissions import Permission
from bascule.embedded.kafka import EmbeddedKafka
from tests.support.qpid import Connection, JmsError, QpidPeer, Session
from tests.support.system import System

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "permissions.md"
ALL = "all"
#: Each of the others lacks the permission of its name, and "nothing" all of them.
NOTHING = "nothing"
USERS = (ALL, NOTHING, *(permission.value for permission in Permission))
CONFIG = "\n".join(
    [
        "[broker.users]",
        *(f'{user} = "{user}"' for user in USERS),
        "[broker.roles]",
        *(f"has-{permission.value} = {[user for user in USERS if user not in (NOTHING, permission.value)]}" for permission in Permission),
        "[[permission]]",
        'match = "#"',
        *(f'{permission.value} = ["has-{permission.value}"]' for permission in Permission),
    ]
)
P = Permission
QUEUE = {P.CREATE_ADDRESS, P.CREATE_DURABLE_QUEUE}
TOPIC = {P.CREATE_ADDRESS}
TEMPORARY = {P.CREATE_ADDRESS, P.CREATE_NON_DURABLE_QUEUE, P.SEND}


class Operation(NamedTuple):
    """What a client does with the destination ``name``, and the permissions that this needs.

    ``new`` are those that it needs in addition if the destination does not exist. None: it always makes a destination of its own.
    """

    name: str
    java: Callable[[Session, str], Any]
    python: Callable[[Context, str], Any]
    needs: set[Permission]
    new: set[Permission] | None


def made_and_ended(session: Session, topic: str) -> None:
    session.consumer(f"topic:{topic}", name=topic, durable=True).close()
    session.unsubscribe(topic)


def made_and_ended_in_python(context: Context, topic: str) -> None:
    context.durable_consumer(Topic(topic), topic).close()
    context.unsubscribe(topic)


OPERATIONS = [
    Operation(
        "send to a queue",
        lambda session, name: session.producer(f"queue:{name}").send("x"),
        lambda context, name: context.send(Queue(name), "x"),
        {P.SEND}, QUEUE,
    ),
    Operation(
        "send to a queue by a producer without a destination",
        lambda session, name: session.producer().send("x", to=f"queue:{name}"),
        lambda context, name: context.producer().send("x", to=Queue(name)),
        {P.SEND}, QUEUE,
    ),
    Operation(
        "send to a topic",
        lambda session, name: session.producer(f"topic:{name}").send("x"),
        lambda context, name: context.send(Topic(name), "x"),
        {P.SEND}, TOPIC,
    ),
    Operation(
        "send to a topic by a producer without a destination",
        lambda session, name: session.producer().send("x", to=f"topic:{name}"),
        lambda context, name: context.producer().send("x", to=Topic(name)),
        {P.SEND}, TOPIC,
    ),
    Operation(
        "consume from a queue",
        lambda session, name: session.consumer(f"queue:{name}").close(),
        lambda context, name: context.consumer(Queue(name)).close(),
        {P.CONSUME}, QUEUE,
    ),
    Operation(
        "browse a queue",
        lambda session, name: session.browse(f"queue:{name}"),
        lambda context, name: list(context.browse(Queue(name))),
        {P.BROWSE}, QUEUE,
    ),
    Operation(
        "subscribe to a topic",
        lambda session, name: session.consumer(f"topic:{name}").close(),
        lambda context, name: context.consumer(Topic(name)).close(),
        {P.CONSUME, P.CREATE_NON_DURABLE_QUEUE}, TOPIC,
    ),
    Operation(
        "share a subscription",
        lambda session, name: session.consumer(f"topic:{name}", name=name, shared=True).close(),
        lambda context, name: context.shared_consumer(Topic(name), name).close(),
        {P.CONSUME, P.CREATE_NON_DURABLE_QUEUE}, TOPIC,
    ),
    Operation(
        "make a durable subscription",
        lambda session, name: session.consumer(f"topic:{name}", name=name, durable=True).close(),
        lambda context, name: context.durable_consumer(Topic(name), name).close(),
        {P.CONSUME, P.CREATE_DURABLE_QUEUE}, TOPIC,
    ),
    Operation(
        "share a durable subscription",
        lambda session, name: session.consumer(f"topic:{name}", name=name, durable=True, shared=True).close(),
        lambda context, name: context.shared_durable_consumer(Topic(name), name).close(),
        {P.CONSUME, P.CREATE_DURABLE_QUEUE}, TOPIC,
    ),
    Operation(
        "make a durable subscription and unsubscribe",
        made_and_ended,
        made_and_ended_in_python,
        {P.CONSUME, P.CREATE_DURABLE_QUEUE, P.DELETE_DURABLE_QUEUE}, TOPIC,
    ),
    Operation(
        "make a temporary queue",
        lambda session, _: session.temporary_queue(),
        lambda context, _: context.temporary_queue(),
        TEMPORARY, None,
    ),
    Operation(
        "make a temporary queue and consume from it",
        lambda session, _: session.consumer(session.temporary_queue().address),
        lambda context, _: context.consumer(context.temporary_queue()).close(),
        {*TEMPORARY, P.CONSUME}, None,
    ),
    Operation(
        "make a temporary topic",
        lambda session, _: session.temporary_topic(),
        lambda context, _: context.temporary_topic(),
        {P.CREATE_ADDRESS, P.SEND}, None,
    ),
    Operation(
        "send requests to `$management`, for XA transactions",
        lambda session, _: session.producer("queue:$management"),
        lambda context, _: context.producer(Queue("$management")).send("x"),
        {P.MANAGE}, None,
    ),
]  # fmt: skip


def cells() -> Iterator[tuple[Operation, bool]]:
    for operation in OPERATIONS:
        yield operation, True
        if operation.new is not None:
            yield operation, False


CELLS = pytest.mark.parametrize(("operation", "exists"), list(cells()), ids=lambda each: getattr(each, "name", "exists" if each else "new"))


def expected(operation: Operation, exists: bool) -> set[str]:
    """Return the users that are refused."""
    needs = operation.needs if exists else operation.needs | (operation.new or set())
    return {NOTHING, *(permission.value for permission in needs)}


@pytest.fixture(scope="module")
def guarded(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("matrix"), prefix="matrix", config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def java_connections(guarded: System, qpid_peer: QpidPeer) -> Iterator[dict[str, Connection]]:
    """A connection of the Java client for each user: to log in takes longer than an operation."""
    with ExitStack() as opened:
        yield {
            user: opened.enter_context(closing(qpid_peer.connect(guarded.url, user=user, password=user, client_id=f"java.{user}")))
            for user in USERS
        }


@pytest.fixture(scope="module")
def contexts(guarded: System) -> Iterator[dict[str, Context]]:
    """A connection of the Python client for each user."""
    with ExitStack() as opened:
        yield {
            user: opened.enter_context(closing(connect(guarded.url, user=user, password=user, client_id=f"python.{user}")))
            for user in USERS
        }


@contextmanager
def there(context: Context, name: str) -> Iterator[None]:
    """Make a queue and a topic."""
    context.send(Queue(name), "x")
    with closing(context.consumer(Topic(name))):
        yield


@CELLS
def test_java_client_may_do_what_the_table_says_and_nothing_else(
    java_connections: dict[str, Connection], contexts: dict[str, Context], operation: Operation, exists: bool
) -> None:
    refused: dict[str, str] = {}
    for user, connection in java_connections.items():
        name = f"java.{re.sub(r'[^a-z]', '-', operation.name)}.{user}.{exists}"
        with (
            there(contexts[ALL], name) if exists and operation.new is not None else nullcontext(),
            closing(connection.session()) as session,
        ):
            try:
                operation.java(session, name)
            except JmsError as error:
                refused[user] = f"{error.name}: {error}"
    assert set(refused) == expected(operation, exists)
    assert [error for error in refused.values() if "JMSSecurity" not in error or "has no permission" not in error] == []


@CELLS
def test_python_client_may_do_what_the_table_says_and_nothing_else(
    contexts: dict[str, Context], operation: Operation, exists: bool
) -> None:
    refused: dict[str, str] = {}
    for user, context in contexts.items():
        name = f"python.{re.sub(r'[^a-z]', '-', operation.name)}.{user}.{exists}"
        with there(contexts[ALL], name) if exists and operation.new is not None else nullcontext():
            try:
                operation.python(context, name)
            except BasculeError as error:
                refused[user] = str(error)
    assert set(refused) == expected(operation, exists)
    assert [error for error in refused.values() if "has no permission" not in error] == []


def words(permissions: set[Permission]) -> str:
    return ", ".join(f"`{each.value}`" for each in Permission if each in permissions)


def test_table_of_the_guide_is_that_of_the_operations() -> None:
    rows = [
        f"| {operation.name} | {words(operation.needs)} | {words(operation.new - operation.needs) if operation.new else ''} |".replace(
            "|  |", "| |"
        )
        for operation in OPERATIONS
    ]
    found = re.findall(r"^\| [a-z].*\|$", GUIDE.read_text().partition("| to do this |")[2].partition("\n\n")[0], re.MULTILINE)
    assert found == rows
