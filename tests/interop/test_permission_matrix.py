"""The operations of the guide's table with Qpid JMS, by users who each lack one permission.

``tests.support.permission_matrix`` has the operations. ``tests/unit/server/test_permission_matrix.py`` carries all of them out with the
Python client; here some represent the others, which are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from bascule.client import Context, connect
from bascule.core.permissions import Permission
from bascule.embedded.kafka import EmbeddedKafka
from tests.support.permission_matrix import ALL, NOTHING, ROLES, RULE, USERS, Operation, cells, destination, refused_users
from tests.support.qpid import Connection, JmsError, QpidPeer
from tests.support.system import System

CONFIG = "\n".join(
    [
        "[broker]",
        "allow_anonymous = true",
        "[broker.users]",
        *(f'{user} = "{user}"' for user in USERS),
        "[broker.roles]",
        *(f"{role} = {users}" for role, users in ROLES.items()),
        "[[permission]]",
        *(f"{key} = {value!r}" for key, value in RULE.items()),
    ]
)
#: An attach of each kind, a message that names its destination, and the end of a subscription: on destinations that do not exist, since
#: that needs most permissions.
REPRESENTATIVE = {
    "send to a queue by a producer without a destination", "browse a queue", "share a subscription",
    "make a durable subscription and unsubscribe", "make a temporary queue and consume from it",
    "consume from a temporary queue of another client",
}  # fmt: skip


def _cells() -> Iterator[object]:
    for operation, exists in cells():
        if operation.place == "dead letters" and not exists:
            continue  # all users share the queue
        quick = operation.name in REPRESENTATIVE and (not exists or operation.new is None)
        name = f"{operation.name}, {'exists' if exists else 'new'}"
        yield pytest.param(operation, exists, id=name, marks=() if quick else pytest.mark.slow)


@pytest.fixture(scope="module")
def guarded(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("matrix"), prefix="matrix", config=CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def connected(guarded: System, qpid_peer: QpidPeer) -> Iterator[Callable[[str], Connection]]:
    """Return the connection of the Java client of a user: to log in takes longer than an operation."""
    connections: dict[str, Connection] = {}
    with ExitStack() as opened:

        def of(user: str) -> Connection:
            if user not in connections:
                made = qpid_peer.connect(guarded.url, user=user, password=user, client_id=f"java.{user}")
                connections[user] = opened.enter_context(closing(made))
            return connections[user]

        yield of


@pytest.fixture(scope="module")
def owner(guarded: System) -> Iterator[Context]:
    """A client with all permissions, which makes destinations."""
    with connect(guarded.url, user=ALL, password=ALL) as context:
        yield context


@pytest.mark.parametrize(("operation", "exists"), list(_cells()))
def test_java_client_may_do_what_the_table_says_and_nothing_else(
    connected: Callable[[str], Connection], owner: Context, operation: Operation, exists: bool
) -> None:
    wanted = refused_users(operation, exists)
    refused: dict[str, str] = {}
    for user in sorted(wanted | {ALL, NOTHING, Permission.VIEW}):  # VIEW stands for permissions that the operation does not need
        with destination(operation, operation.name_for(user, exists), owner, exists) as name, closing(connected(user).session()) as session:
            try:
                operation.java(session, name)
            except JmsError as error:
                refused[user] = f"{error.name}: {error}"
    assert set(refused) == wanted
    assert [error for error in refused.values() if operation.refusal not in error] == []
    if not operation.never:
        assert [error for error in refused.values() if "JMSSecurity" not in error] == []
