"""MariaDB as the database that decides: its commit is the decision of the transaction, also if its processes and sessions die."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("pymysql", reason="the driver of the development packages (make setup) is missing")

import pymysql
import sqlalchemy as sa
from sqlalchemy.orm import Session

from bascule.core.errors import InvalidInput
from bascule.embedded.jars import JarUnavailable
from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa.decision_table import TABLE
from bascule.xa.errors import OutOfOrder, ResourceFailed
from bascule.xa.local_database import LocalDatabaseResource
from bascule.xa.log import Decision, Outcome
from bascule.xa.sqlalchemy_local import SqlAlchemyLocalResource
from bascule.xa.xid import new_gtrid
from tests.support.mariadb import DATABASE, HOST, MISSING, MariaDb, mariadb
from tests.support.system import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
WAIT_S = 30.0
Make = Callable[[], Any]


class Killed(GeneratorExit):
    """The process has ended here."""


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDb]:
    try:
        running = mariadb()
        with running as server:
            yield server
    except JarUnavailable as error:
        pytest.skip(f"MariaDB could not be fetched: {error}")


@pytest.fixture(params=["pymysql", "sqlalchemy", "django"])
def make(request: pytest.FixtureRequest, server: MariaDb) -> Iterator[Make]:
    """Makes the resource as each process would, with empty tables."""
    execute(server, f"DROP TABLE IF EXISTS payments, later, {TABLE}", "CREATE TABLE payments (item VARCHAR(64) UNIQUE, number INT)")
    if request.param == "pymysql":
        yield lambda: LocalDatabaseResource("database", server.connect, placeholder="%s")
        return
    if request.param == "sqlalchemy":
        engine = sa.create_engine(f"mariadb+pymysql://root@{HOST}:{server.port}/{DATABASE}")
        yield lambda: SqlAlchemyLocalResource("database", engine)
        engine.dispose()
        return
    pytest.importorskip("django")
    pymysql.install_as_MySQLdb()
    from django.db import connections

    from bascule.xa.django import django_resource
    from tests.support.django_orm import add

    add("maria", ENGINE="django.db.backends.mysql", NAME=DATABASE, USER="root", HOST=HOST, PORT=server.port)
    yield lambda: django_resource("database", "maria")
    connections["maria"].close()


def execute(server: MariaDb, *statements: str) -> list[Any]:
    with closing(server.connect()) as connection, connection.cursor() as cursor:
        for statement in statements:
            cursor.execute(statement)
        connection.commit()
        return [row[0] for row in cursor.fetchall()]


def run(handle: Any, statement: str) -> None:
    if isinstance(handle, Session):
        handle.execute(sa.text(statement))
        return
    with handle.cursor() as cursor:
        cursor.execute(statement)


def pay(manager: TransactionManager, database: Any, broker: ModelResource, *items: str) -> None:
    with manager.begin() as transaction:
        transaction.enlist(broker).append("message")
        for item in items:
            run(transaction.enlist(database), f"INSERT INTO payments VALUES ('{item}', 0)")


def test_decision_in_mariadb_commits_or_rolls_back_all_and_keeps_no_row(make: Make, server: MariaDb) -> None:
    database, broker, log = make(), ModelResource("broker"), ModelLog()
    with TransactionManager("shop", log, [broker, database]) as manager:
        pay(manager, database, broker, "one")
        with pytest.raises(Exception, match="Duplicate entry"):  # of the driver, or of Django
            pay(manager, database, broker, "one")
        with manager.begin() as alone:
            run(alone.enlist(database), "INSERT INTO payments VALUES ('alone', 0)")
    assert execute(server, "SELECT item FROM payments ORDER BY item") == ["alone", "one"]
    assert broker.durable.committed == ["message"]
    assert log.durable.decisions == {}
    database.decisions("shop")
    assert execute(server, f"SELECT gtrid FROM {TABLE}") == []


@pytest.mark.parametrize(("point", "committed"), [("broker.prepare.after", False), ("broker.commit.before", True)])
@pytest.mark.parametrize("restarts", [False, True], ids=["server stays", "server is killed, too"])
def test_recovery_after_a_kill_follows_the_decision_in_mariadb(
    make: Make, server: MariaDb, point: str, committed: bool, restarts: bool
) -> None:
    durable, log = DurableBranches(), ModelLog()

    def kill(reached: str) -> None:
        if reached == point:
            raise Killed

    database, broker = make(), ModelResource("broker", durable, watch=kill)
    manager = TransactionManager("shop", log, [broker, database])
    manager.open()
    with pytest.raises(Killed):
        pay(manager, database, broker, "one")
    if restarts:
        server.kill()
        server.start()
    for work in database._work.values():
        work.close(reusable=False)  # as the end of the process would
    manager.close()
    with TransactionManager("shop", log, [ModelResource("broker", durable), make()]):
        assert durable.prepared == {}
    assert execute(server, "SELECT item FROM payments") == (["one"] if committed else [])
    assert durable.committed == (["message"] if committed else [])


def test_slow_application_cannot_commit_after_recovery_has_decided_rollback(make: Make, server: MariaDb) -> None:
    durable, log, recoverer = DurableBranches(), ModelLog(), make()

    def recover(reached: str) -> None:
        if reached == "broker.prepare.after":
            manager.recoverer().run(patient=False)

    database, broker = make(), ModelResource("broker", durable, watch=recover)
    with TransactionManager("shop", log, [broker, database]) as manager, pytest.raises(TransactionRolledBack):
        pay(manager, database, broker, "one")
    assert [each.outcome for each in recoverer.decisions("shop")] == [Outcome.ROLLBACK]
    assert (execute(server, "SELECT item FROM payments"), durable.committed, durable.prepared) == ([], [], {})


def test_recoverer_waits_for_a_running_commit_and_follows_its_outcome(server: MariaDb) -> None:
    execute(server, f"DROP TABLE IF EXISTS {TABLE}")
    database, other = (LocalDatabaseResource("database", server.connect, placeholder="%s") for _ in range(2))
    database.check()
    decision = Decision(new_gtrid("shop", 0, "aaaaaaaa", deciders=["database"]), Outcome.COMMIT, ("database",), 0, "application")
    with closing(server.connect()) as application:
        database._table.insert(application, decision)
        asking = in_background(lambda: other.decide(replace(decision, outcome=Outcome.ROLLBACK)), "asks")
        waiting = f"SELECT 1 FROM information_schema.processlist WHERE info LIKE 'INSERT INTO %{TABLE}%'"
        wait_for(lambda: execute(server, waiting) == [1], "the recoverer to wait", WAIT_S)
        assert other.decisions("shop") == []  # which does not wait
        application.commit()
    assert asking.result(WAIT_S).outcome is Outcome.COMMIT


@pytest.mark.parametrize("alone", [True, False], ids=["in one phase", "with a decision"])
def test_transaction_that_goes_on_after_a_deadlock_does_not_commit_its_rest(make: Make, server: MariaDb, alone: bool) -> None:
    execute(server, "INSERT INTO payments VALUES ('a', 0), ('b', 0)")
    database, broker = make(), ModelResource("broker")
    blocked: list[Future[None]] = []
    update = "UPDATE payments SET number = number + 1 WHERE item = '{}'"

    def work(other: Any) -> None:
        with manager.begin() as transaction:
            handle = transaction.enlist(database)
            if not alone:
                transaction.enlist(broker).append("message")
            run(handle, update.format("a"))
            blocked.append(in_background(lambda: run(other, update.format("a")), "blocks"))
            locked = "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
            wait_for(lambda: execute(server, locked) == [1], "the other to wait", WAIT_S)
            with suppress(Exception):  # a deadlock: MariaDB has rolled back the whole transaction
                run(handle, update.format("b"))
            with suppress(Exception):  # Django refuses it
                run(handle, "INSERT INTO payments VALUES ('the rest', 0)")

    with TransactionManager("shop", ModelLog(), [broker, database]) as manager, closing(server.connect()) as other:
        run(other, "INSERT INTO payments SELECT CONCAT('x', seq), 0 FROM seq_1_to_200")  # the smaller transaction is the victim
        run(other, update.format("b"))
        with pytest.raises(TransactionRolledBack):
            work(other)
        blocked[0].result(WAIT_S)
    assert execute(server, "SELECT item FROM payments WHERE number > 0 OR item = 'the rest'") == []
    assert broker.durable.committed == []


def test_transaction_with_a_statement_that_commits_implicitly_is_not_reported_committed(make: Make, server: MariaDb) -> None:
    database, broker = make(), ModelResource("broker")

    def work() -> None:
        with manager.begin() as transaction:
            transaction.enlist(broker).append("message")
            run(transaction.enlist(database), "CREATE TABLE later (item INT)")
            run(transaction.enlist(database), "INSERT INTO payments VALUES ('one', 0)")

    with (
        TransactionManager("shop", ModelLog(), [broker, database]) as manager,
        pytest.raises(TransactionRolledBack, match="committed it implicitly"),
    ):
        work()
    assert (execute(server, "SELECT item FROM payments"), broker.durable.committed) == ([], [])


def test_decision_is_found_although_the_application_selects_another_database(make: Make, server: MariaDb) -> None:
    execute(server, "DROP DATABASE IF EXISTS tenant", "CREATE DATABASE tenant", f"CREATE TABLE tenant.{TABLE} (gtrid TEXT, decision TEXT)")
    database, broker = make(), ModelResource("broker")
    with TransactionManager("shop", ModelLog(), [broker, database]) as manager, manager.begin() as transaction:
        transaction.enlist(broker).append("message")
        run(transaction.enlist(database), "USE tenant")
        run(transaction.enlist(database), f"INSERT INTO {DATABASE}.payments VALUES ('one', 0)")
    assert (execute(server, "SELECT item FROM payments"), broker.durable.committed) == (["one"], ["message"])
    assert execute(server, f"SELECT count(*) FROM tenant.{TABLE}") == [0]


def test_unanswered_commit_is_asked_about_when_the_server_is_back(server: MariaDb) -> None:
    execute(server, f"DROP TABLE IF EXISTS payments, {TABLE}", "CREATE TABLE payments (item VARCHAR(64) UNIQUE, number INT)")
    durable, log = DurableBranches(), ModelLog()
    database, broker = LocalDatabaseResource("database", server.connect, placeholder="%s"), ModelResource("broker", durable)
    database.check()
    with TransactionManager("shop", log, [broker, database]) as manager:
        transaction = manager.begin()
        transaction.enlist(broker).append("message")
        run(transaction.enlist(database), "INSERT INTO payments VALUES ('one', 0)")
        server.kill()
        with pytest.raises(TransactionRolledBack):  # the decision was not written before the server died
            transaction.commit()
        with pytest.raises(ResourceFailed):
            database.decisions("shop")
        server.start()
        manager.recoverer().run(patient=False)
    assert (execute(server, "SELECT item FROM payments"), durable.committed, durable.prepared) == ([], [], {})


def test_table_of_an_engine_without_transactions_is_refused(server: MariaDb) -> None:
    execute(server, f"DROP TABLE IF EXISTS {TABLE}", f"CREATE TABLE {TABLE} (gtrid VARCHAR(64) PRIMARY KEY, decision TEXT) ENGINE=MyISAM")
    with pytest.raises(InvalidInput, match="survive a rollback"):
        LocalDatabaseResource("database", server.connect, placeholder="%s").check()
    execute(server, f"DROP TABLE {TABLE}")


@pytest.mark.parametrize("commits", ["begin", "autocommit", "commit"])
def test_no_method_of_the_driver_commits_the_branch_from_within(commits: str, server: MariaDb) -> None:
    execute(server, f"DROP TABLE IF EXISTS payments, {TABLE}", "CREATE TABLE payments (item VARCHAR(64) UNIQUE, number INT)")
    database, broker = LocalDatabaseResource("database", server.connect, placeholder="%s"), ModelResource("broker")
    with TransactionManager("shop", ModelLog(), [broker, database]) as manager:
        transaction = manager.begin()
        transaction.enlist(broker).append("message")
        with transaction.enlist(database).cursor() as cursor:
            cursor.execute("INSERT INTO payments VALUES ('one', 0)")
            with pytest.raises(OutOfOrder):
                getattr(cursor.connection, commits)(*[True] * (commits == "autocommit"))
        transaction.rollback()
    assert (execute(server, "SELECT item FROM payments"), broker.durable.committed) == ([], [])
