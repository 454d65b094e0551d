"""Django's ORM in transactions, here with SQLite. ``scenarios/test_xa_django.py`` has the same for PostgreSQL."""

from __future__ import annotations

import asyncio
import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("django")

from asgiref.sync import sync_to_async
from django.db import DatabaseError, IntegrityError, connections, transaction
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from bascule.core.errors import InvalidInput
from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import Propagation, TransactionInDoubt, TransactionManager, TransactionRolledBack, TransactionTimedOut
from bascule.xa.aio import AsyncTransactionManager
from bascule.xa.django import django_resource
from bascule.xa.errors import OutOfOrder, ResourceFailed
from bascule.xa.log import Decision
from bascule.xa.xid import Xid
from tests.support.django_orm import Payment, database, items
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS


@pytest.fixture
def alias(tmp_path: Path) -> Iterator[str]:
    with database("shop", ENGINE="django.db.backends.sqlite3", NAME=tmp_path / "shop.sqlite3", CONN_MAX_AGE=None) as alias:
        yield alias


@pytest.fixture
def shop(alias: str) -> Any:
    return django_resource("db", alias)


@pytest.fixture
def broker() -> ModelResource:
    return ModelResource("broker")


@pytest.fixture
def manager(shop: Any, broker: ModelResource) -> Iterator[TransactionManager]:
    with TransactionManager("shop", ModelLog(), [broker, shop]) as manager:
        yield manager


def pay(item: str) -> None:
    Payment.objects.using("shop").create(item=item)


def own_connection() -> Any:
    """Return Django's connection of this thread, and check that its state is that outside of a transaction."""
    connection = connections["shop"]
    assert connection.get_autocommit()
    assert not connection.in_atomic_block
    assert not connection.needs_rollback
    assert connection.savepoint_ids == connection.atomic_blocks == connection.run_on_commit == []
    return connection


def leave_thread() -> None:
    """Close the connection of this thread, which other tests may use with another database of the same name."""
    connections["shop"].close()
    del connections["shop"]


# -- objects that take part in the transaction


def test_django_orm_objects_are_part_of_the_transaction(manager: TransactionManager, broker: ModelResource) -> None:
    raw = own_connection().connection

    @manager.transactional()
    def work(item: str, *, fails: bool = False) -> None:
        pay(item)
        manager.enlist(broker).append(item)
        assert Payment.objects.using("shop").filter(item=item).exists()
        assert item not in items("shop")
        if fails:
            raise LookupError

    work("one")
    with pytest.raises(LookupError):
        work("two", fails=True)
    work("three")
    assert items("shop") == broker.durable.committed == ["one", "three"]
    assert own_connection().connection is raw  # all work used one session


def test_transaction_without_statement_starts_no_database_branch(
    manager: TransactionManager, shop: Any, broker: ModelResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shop, "start", lambda *_, **__: pytest.fail("a branch has begun"))
    with manager.begin():
        manager.enlist(broker).append("one")
    assert broker.durable.committed == ["one"]


def test_django_handle_is_connection_of_alias(manager: TransactionManager, shop: Any) -> None:
    with manager.begin() as running:
        assert running.enlist(shop) is connections["shop"]
        with running.enlist(shop).cursor() as cursor:
            cursor.execute("INSERT INTO django_payments (item) VALUES ('one')")
        assert items("shop") == []
    assert items("shop") == ["one"]
    own_connection()


def test_atomic_block_in_transaction_is_savepoint(manager: TransactionManager) -> None:
    with manager.begin():
        pay("one")
        with suppress(IntegrityError), transaction.atomic(using="shop"):
            pay("undone")
            pay("one")
        with transaction.atomic(using="shop"):
            pay("two")
        assert items("shop") == []
    assert items("shop") == ["one", "two"]
    own_connection()


def test_database_error_outside_atomic_block_rolls_back_the_transaction(manager: TransactionManager, broker: ModelResource) -> None:
    def work() -> None:
        with manager.begin():
            manager.enlist(broker).append("one")
            pay("one")
            with pytest.raises(IntegrityError):
                pay("one")
            with pytest.raises(TransactionManagementError):
                pay("two")

    with pytest.raises(TransactionRolledBack, match="no atomic block rolled it back: UNIQUE"):
        work()
    assert items("shop") == broker.durable.committed == []
    own_connection()


@pytest.mark.parametrize("call", ["commit", "rollback"])
def test_django_commit_rollback_and_autocommit_are_refused_in_transaction(manager: TransactionManager, call: str) -> None:
    with manager.begin():
        pay("one")
        with pytest.raises(TransactionManagementError):
            getattr(connections["shop"], call)()
        with pytest.raises(TransactionManagementError):
            connections["shop"].set_autocommit(True)
        with pytest.raises(RuntimeError, match="durable"), transaction.atomic(using="shop", durable=True):
            pass
    assert items("shop") == ["one"]


def test_close_of_django_connection_in_transaction_rolls_back(manager: TransactionManager) -> None:
    def work() -> None:
        with manager.begin():
            pay("one")
            connections["shop"].close()
            with pytest.raises(TransactionManagementError):
                pay("two")

    with pytest.raises(TransactionRolledBack, match="closed Django's connection"):
        work()
    pay("three")
    assert items("shop") == ["three"]


def test_django_query_capture_works_in_transaction(manager: TransactionManager) -> None:
    with CaptureQueriesContext(connections["shop"]) as captured, manager.begin():
        pay("one")
    assert [query["sql"] for query in captured.captured_queries if "one" in query["sql"]] != []


def test_connection_retained_after_transaction_is_refused(manager: TransactionManager) -> None:
    with manager.begin():
        pay("one")
        connection = connections["shop"]
    with pytest.raises((DatabaseError, OutOfOrder)):
        connection.cursor()
    assert items("shop") == ["one"]


# -- refused uses


def test_transaction_in_atomic_block_is_refused(manager: TransactionManager) -> None:
    with transaction.atomic(using="shop"):
        with pytest.raises(OutOfOrder, match=r"Begin the transaction outside of the block \(with ATOMIC_REQUESTS"), manager.begin():
            pytest.fail("it has begun")
        pay("one")
    assert items("shop") == ["one"]
    own_connection()
    assert manager.active == 0


def test_transaction_on_django_connection_without_autocommit_is_refused(manager: TransactionManager) -> None:
    connections["shop"].set_autocommit(False)
    with pytest.raises(OutOfOrder, match="atomic block"), manager.begin():
        pytest.fail("it has begun")
    connections["shop"].set_autocommit(True)


def test_explicit_enlistment_in_transaction_of_other_context_is_refused(manager: TransactionManager, shop: Any) -> None:
    running = manager.begin()
    with pytest.raises(OutOfOrder, match="does not belong to the current transaction of this thread"):
        running.enlist(shop)
    running.rollback()


def test_django_connection_fetched_before_transaction_is_refused_in_transaction(manager: TransactionManager) -> None:
    before = connections["shop"]
    with manager.begin(), pytest.raises(OutOfOrder, match="fetched before"):
        before.cursor().execute("INSERT INTO django_payments (item) VALUES ('one')")
    assert items("shop") == []
    before.cursor().execute("INSERT INTO django_payments (item) VALUES ('two')")
    assert items("shop") == ["two"]


def test_django_connection_of_other_thread_is_refused_in_context_of_transaction(manager: TransactionManager) -> None:
    def in_other_thread(call: Callable[[], Any]) -> Any:
        def work() -> Any:
            try:
                return call()
            finally:
                leave_thread()

        return in_background(work, "test-other-thread").result(WAIT_S)

    with manager.begin():
        pay("one")
        context = contextvars.copy_context()
        with pytest.raises(OutOfOrder, match="belongs to another thread"):
            in_other_thread(lambda: context.run(pay, "two"))
        with manager.suspended():
            aside = contextvars.copy_context()
        in_other_thread(lambda: aside.run(Payment.objects.using("shop").count))
        in_other_thread(Payment.objects.using("shop").count)
    in_other_thread(lambda: context.run(pay, "three"))  # the transaction has ended
    assert items("shop") == ["one", "three"]


def test_django_settings_without_autocommit_are_refused(tmp_path: Path) -> None:
    with (
        database("manual", ENGINE="django.db.backends.sqlite3", NAME=tmp_path / "manual", AUTOCOMMIT=False) as alias,
        pytest.raises(InvalidInput, match="AUTOCOMMIT"),
    ):
        django_resource("db", alias)


def test_django_database_without_prepare_is_named_in_error(alias: str) -> None:
    with pytest.raises(InvalidInput, match=r"DATABASES\['shop'\] is a SQLite database, which cannot prepare"):
        django_resource("db", alias, prepared=True)


def test_unsupported_django_database_is_refused(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(connections[alias]), "vendor", "oracle")
    with pytest.raises(InvalidInput, match="which is not supported; use one of postgresql, sqlite, mysql"):
        django_resource("db", alias)


def test_transactions_of_two_managers_on_one_django_connection_are_refused(manager: TransactionManager, alias: str) -> None:
    other = django_resource("other", alias)
    with TransactionManager("other", ModelLog(), [other]) as second, manager.begin():
        pay("one")
        with pytest.raises(OutOfOrder, match="another transaction manager"), second.begin():
            pytest.fail("it has begun")
        with second.aside():
            pay("two")
    assert items("shop") == ["one", "two"]


# -- on_commit


def test_on_commit_callbacks_run_after_global_commit_outside_of_transaction(
    manager: TransactionManager, broker: ModelResource, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[Any] = []

    def fail() -> None:
        raise LookupError("callback")

    with manager.begin():
        transaction.on_commit(fail, using="shop")  # before the first statement
        pay("one")
        manager.enlist(broker).append("one")
        transaction.on_commit(lambda: seen.append((own_connection().alias, list(broker.durable.committed), items("shop"))), using="shop")
        transaction.on_commit(lambda: pay("two"), using="shop")
        with suppress(LookupError), transaction.atomic(using="shop"):
            transaction.on_commit(lambda: seen.append("undone"), using="shop")
            fail()
        assert seen == []
    assert seen == [("shop", ["one"], ["one"])]
    assert items("shop") == ["one", "two"]
    assert "on_commit callback failed" in caplog.text


def test_on_commit_callbacks_do_not_run_after_rollback_or_in_doubt(shop: Any) -> None:
    seen: list[str] = []

    def work(manager: TransactionManager, *parts: ModelResource) -> None:
        with manager.begin() as running:
            for part in parts:
                running.enlist(part).append("one")
            pay("one")
            transaction.on_commit(lambda: seen.append("called"), using="shop")

    unwilling = ModelResource("unwilling", vote="no")
    with TransactionManager("shop", ModelLog(), [unwilling, shop]) as manager, pytest.raises(TransactionRolledBack):
        work(manager, unwilling)
    own_connection()

    def unanswered(xid: Xid, _decision: Decision) -> None:
        shop._gone(xid, reusable=False)
        raise ResourceFailed("no answer")

    shop.commit_deciding = unanswered
    broker = ModelResource("broker")
    with TransactionManager("shop", ModelLog(), [broker, shop]) as manager, pytest.raises(TransactionInDoubt):
        work(manager, broker)
    assert seen == []
    own_connection()


# -- suspended, nested and ended transactions


def test_work_in_suspended_section_is_independent_of_transaction(manager: TransactionManager) -> None:
    @manager.transactional(propagation=Propagation.NOT_SUPPORTED)
    def outside() -> int:
        own_connection()
        return Payment.objects.using("shop").count()

    with suppress(LookupError), manager.begin():
        pay("one")
        assert outside() == 0
        assert Payment.objects.using("shop").count() == 1
        raise LookupError
    own_connection()
    assert items("shop") == []


def test_requires_new_function_commits_its_own_transaction(manager: TransactionManager) -> None:
    @manager.transactional(propagation=Propagation.REQUIRES_NEW)
    def audit(item: str) -> None:
        pay(item)

    def work() -> None:
        with manager.begin():
            audit("new")
            pay("undone")
            raise LookupError

    with pytest.raises(LookupError):
        work()
    own_connection()
    assert items("shop") == ["new"]


def test_work_after_commit_in_same_block_is_autonomous(manager: TransactionManager) -> None:
    with manager.begin() as running:
        pay("one")
        running.commit()
        own_connection()
        pay("two")
        assert items("shop") == ["one", "two"]
    own_connection()


def test_django_statements_after_timeout_are_refused_until_block_ends(manager: TransactionManager) -> None:
    def work() -> None:
        over = threading.Event()
        with manager.begin(timeout_s=1.0 * SLOWNESS) as running:  # time for the first payment on a busy machine
            pay("one")
            cursor = connections["shop"].cursor()
            running.after_completion(lambda _: over.set())
            assert over.wait(WAIT_S)
            with pytest.raises((DatabaseError, OutOfOrder)):
                pay("two")
            with pytest.raises((DatabaseError, OutOfOrder)):
                cursor.execute("INSERT INTO django_payments (item) VALUES ('three')")
            with manager.aside():
                own_connection()
            with pytest.raises((DatabaseError, OutOfOrder)):
                pay("four")

    with pytest.raises(TransactionTimedOut):
        work()
    own_connection()
    pay("five")
    assert items("shop") == ["five"]


# -- failures


def test_broken_idle_django_connection_is_replaced(manager: TransactionManager) -> None:
    own_connection().connection.close()
    with manager.begin():
        pay("one")
    assert items("shop") == ["one"]


def test_unreachable_django_database_fails_transaction_and_connection_stays_closed(
    manager: TransactionManager, alias: str, tmp_path: Path
) -> None:
    connections[alias].close()
    described = connections.settings[alias]
    name, described["NAME"] = described["NAME"], tmp_path / "missing" / "shop.sqlite3"
    with pytest.raises(TransactionRolledBack), manager.begin(), pytest.raises(ResourceFailed):
        pay("one")
    assert connections[alias].connection is None
    described["NAME"] = name
    pay("two")
    assert items(alias) == ["two"]
    own_connection()


def test_forked_child_in_transaction_gets_plain_django_connection(manager: TransactionManager) -> None:
    with manager.begin():
        pay("one")
        if (child := os.fork()) == 0:
            try:
                ended = 0 if own_connection().connection is not None and not own_connection().in_atomic_block else 1
            except BaseException:
                ended = 2
            os._exit(ended)
        assert os.waitpid(child, 0)[1] == 0
        pay("two")
    assert items("shop") == ["one", "two"]


# -- asyncio


def test_transaction_in_sync_to_async_function_includes_orm(manager: TransactionManager, broker: ModelResource) -> None:
    @manager.transactional()
    def work() -> None:
        pay("one")
        manager.enlist(broker).append("one")

    async def main() -> None:
        await sync_to_async(work)()
        await sync_to_async(leave_thread)()

    asyncio.run(main())
    assert items("shop") == broker.durable.committed == ["one"]


@pytest.mark.parametrize("begin", [lambda manager: manager.begin(), lambda manager: AsyncTransactionManager(manager).begin()])
def test_orm_use_in_transaction_of_task_is_refused(manager: TransactionManager, shop: Any, begin: Any) -> None:
    async def enlist(running: Any) -> None:
        await running.enlist(shop)

    async def work() -> None:
        async with begin(manager) as running:
            with pytest.raises(OutOfOrder, match="belongs to another thread"):
                await Payment.objects.using("shop").acreate(item="one")
            with pytest.raises(OutOfOrder, match="within one sync_to_async function"):
                await enlist(running)

    async def main() -> None:
        before = connections["shop"]
        with pytest.raises(TransactionRolledBack):
            await work()
        assert connections["shop"] is before
        await Payment.objects.using("shop").acreate(item="two")
        await sync_to_async(leave_thread)()

    asyncio.run(main())
    assert items("shop") == ["two"]
