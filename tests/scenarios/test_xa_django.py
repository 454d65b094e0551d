"""Django's ORM in transactions over PostgreSQL, prepared or with the decision in the database. All rules: ``unit/xa/test_django.py``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from threading import Event
from typing import Any

import psycopg
import pytest

pytest.importorskip("django")

from django.db import DatabaseError, IntegrityError, connections, transaction

from bascule.client import Queue, connect
from bascule.core.crash import ARMED_VARIABLE
from bascule.embedded.postgres import HOST, USER, EmbeddedPostgres
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import FileLog, TransactionManager, TransactionRolledBack, TransactionTimedOut
from bascule.xa.django import django_resource
from tests.scenarios.django_victim import resources
from tests.support.client import all_in
from tests.support.django_orm import Payment, database, items
from tests.support.speed import SLOWNESS
from tests.support.system import PYTHON_FAILOVER, System

ROOT = Path(__file__).parents[2]
PROCESS_S = 120.0
POOL_MAX = 3
#: Whether branches are prepared, where the process is killed, whether the transaction is committed.
SHORT = [
    (True, "xa.prepare.after:2", False),
    (True, "xa.decide.after:1", True),
    (False, "xa.decide.before:1", False),
    (False, "xa.decide.after:1", True),
]
POINTS = [
    *SHORT,
    (True, "xa.prepare.after:1", False),
    (True, "xa.decide.before:1", False),
    (True, "xa.finish.after:1", True),
    (True, "xa.forget.before:1", True),
    (False, "xa.prepare.after:1", False),
    (False, "xa.finish.after:1", True),
]
KINDS: dict[str, dict[str, Any]] = {
    "kept open": {"CONN_MAX_AGE": None},
    "pool": {"OPTIONS": {"pool": {"min_size": 1, "max_size": POOL_MAX, "timeout": 10}}},
    "server-side binding": {"OPTIONS": {"server_side_binding": True, "isolation_level": psycopg.IsolationLevel.REPEATABLE_READ}},
}


def described(postgres: EmbeddedPostgres, **more: Any) -> dict[str, Any]:
    return {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": USER, "HOST": HOST, "PORT": postgres.port, **more}


@pytest.fixture(params=KINDS)
def alias(request: pytest.FixtureRequest, postgres: EmbeddedPostgres) -> Iterator[str]:
    with database("shop", **described(postgres, **KINDS[request.param])) as alias:
        yield alias


@pytest.fixture(params=[True, False], ids=["two-phase", "deciding"])
def shop(request: pytest.FixtureRequest, alias: str) -> Any:
    return django_resource("db", alias, prepared=request.param)


@pytest.fixture
def broker() -> ModelResource:
    return ModelResource("broker")


@pytest.fixture
def manager(shop: Any, broker: ModelResource) -> Iterator[TransactionManager]:
    with TransactionManager("django", ModelLog(), [broker, shop]) as manager:
        yield manager


def pay(item: str) -> Payment:
    created: Payment = Payment.objects.using("shop").create(item=item)
    return created


def own() -> Any:
    """Return Django's connection of this thread, in the state that Django expects outside of a transaction."""
    connection = connections["shop"]
    assert connection.get_autocommit()
    assert connection.connection.autocommit
    assert not connection.in_atomic_block
    return connection


def test_django_objects_in_postgresql_are_part_of_the_transaction(manager: TransactionManager, broker: ModelResource) -> None:
    session = own().connection.info.backend_pid
    seen: list[Any] = []

    @manager.transactional()
    def work(item: str, *, fails: bool = False) -> None:
        manager.enlist(broker).append(item)
        payment = pay(item)
        transaction.on_commit(lambda: seen.append((item, own().alias)), using="shop")
        with suppress(IntegrityError), transaction.atomic(using="shop"):
            pay(item)
        locked = Payment.objects.using("shop").select_for_update().get(pk=payment.pk)
        assert [each.item for each in Payment.objects.using("shop").filter(pk=locked.pk).iterator()] == [item]
        assert item not in items("shop")
        if fails:
            raise LookupError

    work("one")
    with pytest.raises(LookupError):
        work("two", fails=True)
    with manager.begin():
        assert Payment.objects.using("shop").count() == 1
    work("three")
    assert items("shop") == broker.durable.committed == ["one", "three"]
    assert seen == [("one", "shop"), ("three", "shop")]
    assert own().connection.info.backend_pid == session
    assert [xid for xid in manager.resources["db"].recover() if xid.gtrid.startswith(b"django/")] == []


def test_error_not_undone_by_an_atomic_block_rolls_back_all_resources(manager: TransactionManager, broker: ModelResource) -> None:
    def work() -> None:
        with manager.begin():
            manager.enlist(broker).append("one")
            pay("one")
            with pytest.raises(IntegrityError):
                pay("one")

    for _ in range(POOL_MAX + 1):  # none keeps a connection of the pool
        with pytest.raises(TransactionRolledBack, match="duplicate key"):
            work()
    assert items("shop") == broker.durable.committed == []
    own()


def test_session_terminated_by_the_server_is_replaced(manager: TransactionManager, broker: ModelResource) -> None:
    def end(connection: Any) -> None:
        other = connections.create_connection("shop")
        other.ensure_connection()
        pid = connection.connection.info.backend_pid
        assert other.connection.execute("SELECT pg_terminate_backend(%s, 20000)", (pid,)).fetchone() == (True,)
        other.close()

    def within() -> None:
        with manager.begin():
            manager.enlist(broker).append("undone")
            pay("undone")
            end(connections["shop"])

    own()
    end(connections["shop"])
    with manager.begin():  # the session broke while it was idle
        pay("one")
    with pytest.raises(TransactionRolledBack):
        within()
    assert connections["shop"].connection is None
    with manager.begin():
        pay("two")
    pay("three")
    own()
    assert items("shop") == ["one", "two", "three"]
    assert broker.durable.committed == []


def test_statements_after_the_transaction_timeout_are_refused(manager: TransactionManager, broker: ModelResource) -> None:
    def work() -> None:
        over = Event()
        with manager.begin(timeout_s=1.0 * SLOWNESS) as running:  # time for the first payment on a busy machine
            pay("one")
            cursor = connections["shop"].cursor()
            running.after_completion(lambda _: over.set())
            assert over.wait(PROCESS_S)
            for use in (lambda: pay("two"), lambda: cursor.execute("INSERT INTO django_payments (item) VALUES ('three')")):
                with pytest.raises(DatabaseError):
                    use()

    with pytest.raises(TransactionTimedOut):
        work()
    pay("four")
    own()
    assert items("shop") == ["four"]


def kill_at(points: list[tuple[bool, str, bool]], system: System, postgres: EmbeddedPostgres, name: str, directory: Path) -> None:
    settings, log, url = described(postgres), directory / "django.xalog", PYTHON_FAILOVER.format(system.url)
    committed = []
    with database("shop", **settings):
        for prepared, point, commits in points:
            item = f"{'two-phase' if prepared else 'deciding'} {point}"
            victim = [sys.executable, "-m", "tests.scenarios.django_victim", json.dumps([settings, url, name, str(log), prepared, item])]
            killed = subprocess.run(victim, env=os.environ | {ARMED_VARIABLE: point}, cwd=ROOT, timeout=PROCESS_S, check=False)
            assert killed.returncode == -signal.SIGKILL
            broker, shop = resources(url, prepared=prepared)
            with closing(broker), TransactionManager("django", FileLog(log), [broker, shop]):
                committed += [item] if commits else []
                assert items("shop") == committed
        with connect(system.url) as context:
            assert list(all_in(context, Queue(name), len(committed))) == committed


def test_next_process_finishes_transactions_of_an_application_killed_at_selected_points(
    system: System, postgres: EmbeddedPostgres, name: str, tmp_path: Path
) -> None:
    kill_at(SHORT, system, postgres, name, tmp_path)


@pytest.mark.slow
def test_next_process_finishes_transactions_of_an_application_killed_at_every_point(
    system: System, postgres: EmbeddedPostgres, name: str, tmp_path: Path
) -> None:
    kill_at(POINTS, system, postgres, name, tmp_path)
