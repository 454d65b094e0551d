"""The operations of the guide's table with Qpid JMS, by users who each lack one permission.

``tests.support.permission_matrix`` has the operations. ``tests/unit/server/test_permission_matrix.py`` carries all of them out with the
Python client; here some represent the others, which are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from bascule.client import Context, Queue, connect
from bascule.core.permissions import Permission
from bascule.core.xid import Xid
from bascule.embedded.kafka import EmbeddedKafka
from bascule.xa.jms import TYPE, JmsResource
from bascule.xa.resource import Vote
from bascule.xa.xid import branch, new_gtrid
from tests.support.permission_matrix import (
    ALL,
    ANSWER,
    BRANCH_REQUESTS,
    DEAD_LETTERS,
    NOTHING,
    ROLES,
    RULE,
    USERS,
    BranchRequest,
    Operation,
    cells,
    destination,
    lacking,
    refused_users,
)
from tests.support.qpid import Connection, JmsError, QpidPeer, Session
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
    "consume from a temporary queue of another client", "consume dead letters",
}  # fmt: skip


def _cells() -> Iterator[object]:
    for operation, exists in cells():
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
    guarded: System, connected: Callable[[str], Connection], owner: Context, operation: Operation, exists: bool
) -> None:
    wanted = refused_users(operation, exists)
    refused: dict[str, str] = {}
    for user in sorted(wanted | {ALL, NOTHING, Permission.VIEW}):  # VIEW stands for permissions that the operation does not need
        if operation.place == "dead letters" and not exists and guarded.queue(DEAD_LETTERS) is not None:  # all users share the queue
            guarded.act("queues/delete", name=DEAD_LETTERS, force=True)
        with destination(operation, operation.name_for(user, exists), owner, exists) as name, closing(connected(user).session()) as session:
            try:
                operation.java(session, name)
            except JmsError as error:
                refused[user] = f"{error.name}: {error}"
    assert set(refused) == wanted
    assert [error for error in refused.values() if operation.refusal not in error] == []
    if not operation.never:
        assert [error for error in refused.values() if "JMSSecurity" not in error] == []


def prepared(system: System) -> Xid:
    """Return the branch of a new transaction, which the user ALL has prepared."""
    xid = branch(new_gtrid("matrix", 0), "jms")
    with closing(JmsResource("jms", system.url, user=ALL, password=ALL)) as resource:
        resource.start(xid, timeout_s=60).send(Queue("bills"), "bill")
        resource.end(xid, success=True)
        assert resource.prepare(xid) is Vote.YES
    return xid


def refusal(session: Session, request: BranchRequest, xid: Xid) -> str:
    """Return why a user may not carry out a request about a branch, "" if the user may."""
    try:
        answers = session.temporary_queue()
        consumer, producer = session.consumer(answers.address), session.producer("queue:$management")
    except JmsError as error:
        return f"{error.name}: {error}"
    fields = {"formatId": xid.format_id, "gtrid": xid.gtrid.hex(), "bqual": xid.bqual.hex()}
    producer.send(None, properties={"type": TYPE, "operation": request.operation, **fields}, reply_to=answers.address)
    answer = consumer.receive()
    assert answer is not None
    if request.operation == "recover":
        return "" if ":".join(map(str, fields.values())) in str(answer.body) else "not listed"
    said = str(answer.properties["statusDescription"])
    return said if "permission" in said else ""  # also for the owner: "nobody has ended the branch"


@pytest.mark.parametrize(
    "asked", [pytest.param(each, id=each.name, marks=() if each.ends else pytest.mark.slow) for each in BRANCH_REQUESTS]
)
def test_java_client_asks_the_management_node_what_the_table_says_and_nothing_else(
    guarded: System, connected: Callable[[str], Connection], asked: BranchRequest
) -> None:
    wanted = lacking(ANSWER | {Permission.MANAGE} | asked.others) - {ALL}
    refused: set[str] = set()
    xid = prepared(guarded)
    for user in sorted(wanted | {Permission.VIEW}):
        with closing(connected(user).session()) as session:
            if refusal(session, asked, xid):
                refused.add(user)
        listed = {each["xid"] for each in guarded.ask("list/branches")["entries"] if each["state"] == "prepared"}
        if user in wanted:
            assert str(xid) in listed, f"{user} has ended the branch"
        elif asked.ends:
            assert str(xid) not in listed
    assert refused == wanted
