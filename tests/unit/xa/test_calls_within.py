"""The manager rolls back a transaction if a call of the application is still running in one of its branches at the commit.

Otherwise chance would decide whether the branch contains the work of the call, or the next branch of the same session does.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.events import Attached, Flowed, Transferred
from bascule.amqp.link import SenderLink
from bascule.client import Queue
from bascule.client.errors import IllegalState
from bascule.core.errors import BasculeError
from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import TransactionManager, TransactionRolledBack, local_database
from bascule.xa.aio import AsyncTransactionManager
from bascule.xa.errors import BranchRolledBack, Code, OutOfOrder
from bascule.xa.jms import JmsResource
from bascule.xa.kafka import KafkaResource
from bascule.xa.local_database import LocalDatabaseResource
from bascule.xa.two_phase import TransactionStatus
from bascule.xa.xid import branch, new_gtrid
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.support.speed import SLOWNESS
from tests.unit.client.server import obliging, server

WAIT_S = 30.0 * SLOWNESS
ORDERS = Queue("orders")


class Door:
    """Blocks a call until the test releases it."""

    def __init__(self) -> None:
        self.within, self.released = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.within.set()
        assert self.released.wait(WAIT_S)


def check_commit_is_refused(transaction: Any, door: Door, other: ModelResource) -> None:
    """Check that a commit during the call is refused and rolls back all branches."""
    assert door.within.wait(WAIT_S)
    with pytest.raises(TransactionRolledBack, match="still using") as raised:
        transaction.commit()
    assert isinstance(raised.value.cause, BranchRolledBack)
    assert raised.value.cause.xa_code is Code.XA_RBPROTO
    assert transaction.status is TransactionStatus.ROLLED_BACK
    assert other.durable.committed == []
    assert other.recover() == []


# -- the broker --------------------------------------------------------------------------------------------------------


class ServerWithoutMessages:
    """A server that sends no messages and records the ones it receives. It sets ``asked`` when a consumer waits for a message."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.received: SimpleQueue[bytes] = SimpleQueue()

    def __call__(self, connection: Connection, event: Any) -> None:
        if isinstance(event, Flowed) and isinstance(event.link, SenderLink):
            if event.link.drain:
                event.link.drained()
            elif event.link.credit:
                self.asked.set()
            return
        if isinstance(event, Transferred) and event.txn_id is not None:
            self.received.put(event.payload)
        obliging(connection, event)


def shop(*resources: Any) -> TransactionManager:
    return TransactionManager("shop", ModelLog(), resources, recovery_interval_s=WAIT_S)


def test_commit_is_refused_while_thread_waits_for_message_in_transaction() -> None:
    quiet, other = ServerWithoutMessages(), ModelResource("other")
    with server(quiet) as url, closing(JmsResource("broker", url, client_id="shop", timeout_s=5)) as broker, shop(other) as manager:
        manager.resources["broker"] = broker  # added after the first recovery, which this server cannot answer
        transaction = manager.begin()
        handle = transaction.enlist(broker)
        transaction.enlist(other).append("work")
        handle.send(ORDERS, "bill")
        consumer = handle.consumer(ORDERS)
        receiving = in_background(lambda: consumer.receive(WAIT_S), "receives")
        door = Door()
        assert quiet.asked.wait(WAIT_S)
        door.within.set()
        check_commit_is_refused(transaction, door, other)
        assert receiving.result(WAIT_S) is None, "a receive on a closed context returns None"
        assert broker._idle == [], "the call may have left something in the session"


def test_branch_ended_during_call_of_application_can_only_be_rolled_back() -> None:
    door, xid = Door(), branch(new_gtrid("shop", 0), "broker")

    def call(handle: Any) -> None:
        with handle._one_thread():
            door.wait()

    with server(obliging) as url, closing(JmsResource("broker", url, client_id="shop", timeout_s=5)) as broker:
        handle = broker.start(xid, timeout_s=5)
        calling = in_background(lambda: call(handle), "calls")
        assert door.within.wait(WAIT_S)
        with pytest.raises(BranchRolledBack) as raised:
            broker.end(xid, success=True)
        assert raised.value.xa_code is Code.XA_RBPROTO
        door.released.set()
        calling.result(WAIT_S)
        for refused in (lambda: broker.prepare(xid), lambda: broker.commit(xid, one_phase=True)):
            with pytest.raises(OutOfOrder):
                refused()
        broker.rollback(xid)
        assert len(broker._idle) == 1, "the call has ended, so the session can be reused"


def test_commit_is_refused_while_thread_creates_consumer_in_transaction() -> None:
    """Otherwise the session would keep the consumer, which requests messages that nobody receives."""
    door = Door()

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Attached) and isinstance(event.link, SenderLink) and event.link.source.address == "slow":
            door.within.set()
            return
        obliging(connection, event)

    other = ModelResource("other")
    with server(react) as url, closing(JmsResource("broker", url, client_id="shop", timeout_s=5)) as broker, shop(other) as manager:
        manager.resources["broker"] = broker  # added after the first recovery, which this server cannot answer
        transaction = manager.begin()
        handle = transaction.enlist(broker)
        transaction.enlist(other).append("work")
        making = in_background(lambda: handle.consumer(Queue("slow"), prefetch=100), "makes")
        check_commit_is_refused(transaction, door, other)
        assert isinstance(making.exception(WAIT_S), BasculeError)


def test_commit_is_refused_while_task_waits_for_message_in_transaction() -> None:
    quiet, other = ServerWithoutMessages(), ModelResource("other")

    async def main(url: str) -> None:
        with closing(JmsResource("broker", url, client_id="shop", timeout_s=5)) as broker:
            async with AsyncTransactionManager(shop(other)) as manager:
                manager.blocking.resources["broker"] = broker
                transaction = manager.begin()
                handle = await transaction.enlist(broker)
                (await transaction.enlist(other)).append("work")
                consumer = await handle.consumer(ORDERS)
                receiving = asyncio.create_task(consumer.receive(WAIT_S))
                await asyncio.to_thread(quiet.asked.wait, WAIT_S)
                with pytest.raises(TransactionRolledBack, match="still using"):
                    await transaction.commit()
                assert await receiving is None

    with server(quiet) as url:
        asyncio.run(main(url))
    assert other.durable.committed == []


def test_call_on_handle_after_end_of_branch_raises_illegal_state() -> None:
    xid = branch(new_gtrid("shop", 0), "broker")
    with server(obliging) as url, closing(JmsResource("broker", url, client_id="shop", timeout_s=5)) as broker:
        handle = broker.start(xid, timeout_s=5)
        consumer = handle.consumer(ORDERS)
        handle.send(ORDERS, "bill")
        broker.end(xid, success=True)
        for call in (lambda: handle.send(ORDERS, "late"), lambda: consumer.receive(0), lambda: handle.consumer(ORDERS)):
            with pytest.raises(IllegalState, match="the transaction has ended"):
                call()


# -- Kafka -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> KafkaInMemory:
    cluster = KafkaInMemory(monkeypatch)
    cluster.create("orders", 1)
    return cluster


@contextmanager
def sends_blocked(resource: KafkaResource, door: Door) -> Iterator[None]:
    """Block sends while they ask Kafka for the size limit of a topic."""
    room = resource._calls.room

    async def slow(record: Any) -> int:
        door.wait()
        return await room(record)

    resource._calls.room = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        door.released.set()


@pytest.mark.parametrize("alone", [True, False], ids=["in one phase", "in two phases"])
def test_commit_is_refused_while_thread_sends_to_kafka_in_transaction(kafka: KafkaInMemory, alone: bool) -> None:
    other, door = ModelResource("other"), Door()
    resource = KafkaResource("kafka", SETTINGS, prefix="xa", instance="one")
    with closing(resource), shop(resource, other) as manager:
        transaction = manager.begin()
        handle = transaction.enlist(resource)
        if not alone:
            transaction.enlist(other).append("work")
        handle.send("orders", b"first")
        with sends_blocked(resource, door):
            sending = in_background(lambda: handle.send("orders", b"second"), "sends")
            check_commit_is_refused(transaction, door, other)
        assert isinstance(sending.exception(WAIT_S), OutOfOrder), "the application gets an error"
        assert kafka.values("orders") == []
        with manager.begin() as following:
            following.enlist(resource).send("orders", b"third")
        assert kafka.values("orders") == [b"third"]


def test_commit_is_refused_while_thread_of_cancelled_send_is_still_running(kafka: KafkaInMemory) -> None:
    other, door = ModelResource("other"), Door()
    resource = KafkaResource("kafka", SETTINGS, prefix="xa", instance="one")

    async def main() -> None:
        async with AsyncTransactionManager(shop(resource, other)) as manager:
            transaction = manager.begin()
            handle = await transaction.enlist(resource)
            await handle.send("orders", b"first")
            with sends_blocked(resource, door):
                sending = asyncio.create_task(handle.send("orders", b"second"))
                await asyncio.to_thread(door.within.wait, WAIT_S)
                sending.cancel()
                with pytest.raises(TransactionRolledBack, match="still using"):
                    await transaction.commit()
            with pytest.raises(asyncio.CancelledError) as cancelled:
                await sending
            assert isinstance(cancelled.value.__cause__, OutOfOrder), "the record is not part of any transaction"

    with closing(resource):
        asyncio.run(main())
    assert kafka.values("orders") == []


# -- databases ---------------------------------------------------------------------------------------------------------


class Sqlite:
    """A database in a file. Its SQL function ``door`` waits until the test releases it."""

    def __init__(self, path: Path) -> None:
        self.path, self.door = path, Door()
        with sqlite3.connect(path) as connection:
            connection.execute("CREATE TABLE payments (item)")
        self.resource = LocalDatabaseResource("database", self.connect)

    def connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self.path, timeout=WAIT_S, check_same_thread=False)
        connection.create_function("door", 0, self.door.wait)
        return connection

    def rows(self) -> list[str]:
        with closing(sqlite3.connect(self.path)) as connection:
            return [row[0] for row in connection.execute("SELECT item FROM payments ORDER BY item")]


@pytest.mark.parametrize("alone", [True, False], ids=["in one phase", "as the decision"])
@pytest.mark.parametrize("call", ["connection", "cursor"])
@pytest.mark.parametrize("statement", ["INSERT INTO payments SELECT 'second' WHERE door() IS NULL", "SELECT door()"])
def test_commit_is_refused_while_thread_executes_statement_in_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alone: bool, call: str, statement: str
) -> None:
    monkeypatch.setattr(local_database, "INTERRUPT_WITHIN_S", 0.01)
    sqlite, other = Sqlite(tmp_path / "shop.sqlite"), ModelResource("other")
    with shop(sqlite.resource, other) as manager:
        transaction = manager.begin()
        handle = transaction.enlist(sqlite.resource)
        if not alone:
            transaction.enlist(other).append("work")
        handle.execute("INSERT INTO payments VALUES ('first')")
        at = handle if call == "connection" else handle.cursor()
        working = in_background(lambda: at.execute(statement), "works")
        check_commit_is_refused(transaction, sqlite.door, other)
        sqlite.door.released.set()
        assert isinstance(working.exception(WAIT_S), sqlite3.Error | OutOfOrder)
        assert sqlite.rows() == []
        with pytest.raises(OutOfOrder):
            at.execute("INSERT INTO payments VALUES ('late')")
        with manager.begin() as following:
            following.enlist(sqlite.resource).execute("INSERT INTO payments VALUES ('third')")
        assert sqlite.rows() == ["third"]


def test_cursor_of_handle_behaves_like_driver_cursor(tmp_path: Path) -> None:
    sqlite = Sqlite(tmp_path / "shop.sqlite")
    with shop(sqlite.resource) as manager, manager.begin() as transaction:
        handle = transaction.enlist(sqlite.resource)
        with closing(handle.cursor()) as cursor:
            cursor.executemany("INSERT INTO payments VALUES (?)", [("a",), ("b",), ("c",)])
            assert cursor.rowcount == 3
            cursor.arraysize = 2
            assert cursor.execute("SELECT item FROM payments ORDER BY item").fetchmany() == [("a",), ("b",)]
            assert [column[0] for column in cursor.description] == ["item"]
        assert [row[0] for row in handle.execute("SELECT item FROM payments ORDER BY item")] == ["a", "b", "c"]
    assert sqlite.rows() == ["a", "b", "c"]


class BufferedCursor:
    """A cursor that is iterable but not an iterator, and a context manager, like the cursor of mysqlclient."""

    def __init__(self, raw: sqlite3.Cursor) -> None:
        self._raw = raw
        self.closed = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def __enter__(self) -> BufferedCursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._raw.fetchall())

    def close(self) -> None:
        self.closed = True
        self._raw.close()


class ConnectionWithBufferedCursors:
    """A connection with buffered cursors that has the error classes of its driver as attributes."""

    IntegrityError = sqlite3.IntegrityError

    def __init__(self, path: Path) -> None:
        self._raw = sqlite3.connect(path, check_same_thread=False)
        self.cursors: list[BufferedCursor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def cursor(self) -> BufferedCursor:
        self.cursors.append(BufferedCursor(self._raw.cursor()))
        return self.cursors[-1]


def test_handle_supports_driver_with_own_cursor_class(tmp_path: Path) -> None:
    sqlite = Sqlite(tmp_path / "shop.sqlite")
    opened: list[ConnectionWithBufferedCursors] = []

    def connect() -> ConnectionWithBufferedCursors:
        opened.append(ConnectionWithBufferedCursors(sqlite.path))
        return opened[-1]

    resource = LocalDatabaseResource("other-driver", connect)
    with shop(resource) as manager, manager.begin() as transaction:
        handle = transaction.enlist(resource)
        with handle.cursor() as cursor:
            cursor.execute("CREATE UNIQUE INDEX once ON payments (item)")
            cursor.executemany("INSERT INTO payments VALUES (?)", [("a",), ("b",)])
            cursor.execute("SELECT item FROM payments ORDER BY item")
            assert [item for (item,) in cursor] == ["a", "b"]
            try:
                cursor.execute("INSERT INTO payments VALUES ('a')")
            except handle.IntegrityError:
                cursor.execute("INSERT INTO payments VALUES ('c')")
        assert opened[-1].cursors[-1].closed
    assert sqlite.rows() == ["a", "b", "c"]


def test_statement_error_is_not_hidden_by_cursor_close_after_end_of_branch(tmp_path: Path) -> None:
    sqlite, xid = Sqlite(tmp_path / "shop.sqlite"), branch(new_gtrid("shop", 0), "database")
    handle = sqlite.resource.start(xid, timeout_s=WAIT_S)

    def work() -> None:
        with handle.cursor() as cursor:
            try:
                cursor.execute("SELECT * FROM nowhere")
            finally:
                sqlite.resource.end(xid, success=False)
                sqlite.resource.rollback(xid)

    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        work()


def test_commit_is_refused_while_thread_executes_django_statement_in_transaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("django")
    from django.db import DatabaseError, connections

    from bascule.xa.django import django_resource
    from tests.support.django_orm import Payment, database, items

    monkeypatch.setattr(local_database, "INTERRUPT_WITHIN_S", 0.01)
    other, door = ModelResource("other"), Door()

    def commit() -> None:
        try:
            check_commit_is_refused(running, door, other)
        finally:
            door.released.set()

    with (
        database("shop", ENGINE="django.db.backends.sqlite3", NAME=tmp_path / "shop.sqlite3", CONN_MAX_AGE=None) as alias,
        shop(django_resource("db", alias), other) as manager,
    ):
        with manager.begin() as running:
            manager.enlist(other).append("work")
            Payment.objects.using(alias).create(item="first")
            connections[alias].connection.create_function("door", 0, door.wait)
            committing = in_background(commit, "commits")
            with pytest.raises((DatabaseError, OutOfOrder)):
                connections[alias].cursor().execute("SELECT door()")
            committing.result(WAIT_S)
        Payment.objects.using(alias).create(item="second")
        assert items(alias) == ["second"]
