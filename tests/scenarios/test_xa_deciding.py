"""PostgreSQL without prepared transactions, its default: its commit is the decision of the transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from bascule.core.errors import Unavailable
from bascule.embedded.postgres import HOST, USER, EmbeddedPostgres
from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa.decision_table import TABLE
from bascule.xa.errors import ResourceError
from bascule.xa.log import Decision, LogState, Outcome
from bascule.xa.postgres import PostgresResource
from bascule.xa.report import TransactionFinding
from bascule.xa.sqlalchemy import SqlAlchemyResource
from bascule.xa.xid import Xid, new_gtrid
from tests.support.postgres import temporary_postgres
from tests.support.system import wait_for

WAIT_S = 20.0
Make = Callable[[], Any]


class Killed(GeneratorExit):
    """Raised in place of the end of the process."""


@pytest.fixture(scope="module")
def plain() -> Iterator[EmbeddedPostgres]:
    """Start a PostgreSQL with the default setting."""
    with temporary_postgres(prepared_max=0) as running:
        with psycopg.connect(running.conninfo) as connection:
            connection.execute("CREATE TABLE payments (item text UNIQUE DEFERRABLE INITIALLY DEFERRED)")
        yield running


@pytest.fixture(params=["psycopg", "sqlalchemy", "django"])
def make(request: pytest.FixtureRequest, plain: EmbeddedPostgres) -> Iterator[Make]:
    """Create the resource as each process would."""
    made: list[Callable[[], None]] = []
    if request.param == "django":
        pytest.importorskip("django")
        from django.db import connections

        from bascule.xa.django import django_resource
        from tests.support.django_orm import add

        add("plain", ENGINE="django.db.backends.postgresql", NAME="postgres", USER=USER, HOST=HOST, PORT=plain.port)
        made.append(lambda: connections["plain"].close())

    def make() -> Any:
        if request.param == "django":
            return django_resource("db", "plain")
        if request.param == "psycopg":
            resource = PostgresResource("db", plain.conninfo)
            made.append(resource.close)
            return resource
        engine = sa.create_engine(plain.url)
        made.append(engine.dispose)
        return SqlAlchemyResource("db", engine)

    with psycopg.connect(plain.conninfo) as connection:
        connection.execute("TRUNCATE payments")
        connection.execute(f"DROP TABLE IF EXISTS {TABLE}")
    yield make
    for close in made:
        close()


def insert(handle: Any, item: str) -> None:
    run(handle, f"INSERT INTO payments VALUES ('{item}')")


def run(handle: Any, statement: str) -> None:
    if hasattr(handle, "ensure_connection"):
        handle = handle.cursor()
    handle.execute(sa.text(statement) if hasattr(handle, "get_bind") else statement)


def select(plain: EmbeddedPostgres, query: str) -> list[str]:
    with psycopg.connect(plain.conninfo) as connection:
        return [row[0] for row in connection.execute(query)]


def pay(manager: TransactionManager, database: Any, broker: ModelResource, *items: str) -> None:
    with manager.begin() as transaction:
        transaction.enlist(broker).append("message")
        for item in items:
            insert(transaction.enlist(database), item)


def test_deciding_database_needs_no_prepared_transactions_and_keeps_no_decision_row(make: Make, plain: EmbeddedPostgres) -> None:
    database, broker, log = make(), ModelResource("broker"), ModelLog()
    with TransactionManager("shop", log, [broker, database]) as manager:
        pay(manager, database, broker, "one")
        with pytest.raises(TransactionRolledBack, match="XA_RBINTEGRITY"):
            pay(manager, database, broker, "one")
    assert select(plain, "SELECT item FROM payments") == ["one"]
    assert broker.durable.committed == ["message"]
    assert log.durable.decisions == {}
    database.decisions("shop")
    assert select(plain, f"SELECT gtrid FROM {TABLE}") == []


def test_decision_waits_for_the_disk_although_synchronous_commit_is_off(make: Make, plain: EmbeddedPostgres) -> None:
    """A crash of the server would lose the decision after the others have obeyed it."""
    with psycopg.connect(plain.conninfo, autocommit=True) as connection:
        connection.execute("ALTER ROLE postgres SET synchronous_commit = off")
        connection.execute("CREATE TABLE at_commit (setting text)")
        connection.execute(
            "CREATE FUNCTION note_setting() RETURNS trigger LANGUAGE plpgsql AS "
            "$$BEGIN INSERT INTO at_commit VALUES (current_setting('synchronous_commit')); RETURN NULL; END$$"
        )
        try:
            database, broker = make(), ModelResource("broker")
            with TransactionManager("shop", ModelLog(), [broker, database]) as manager:
                deferred = f"CREATE CONSTRAINT TRIGGER noted AFTER INSERT ON {TABLE} DEFERRABLE INITIALLY DEFERRED FOR EACH ROW"
                connection.execute(f"{deferred} EXECUTE FUNCTION note_setting()")
                pay(manager, database, broker, "one")
                database.decide(Decision(new_gtrid("shop", 0, deciders=["database"]), Outcome.ROLLBACK, (), 0, "recovery"))
            assert connection.execute("SELECT setting FROM at_commit").fetchall() == [("on",), ("on",)]
        finally:
            connection.execute("ALTER ROLE postgres RESET synchronous_commit")
            connection.execute("DROP FUNCTION note_setting CASCADE")
            connection.execute("DROP TABLE at_commit")


@pytest.mark.parametrize(("point", "committed"), [("broker.prepare.after", False), ("broker.commit.before", True)])
def test_recovery_after_application_kill_follows_the_decision_in_the_database(
    make: Make, plain: EmbeddedPostgres, point: str, committed: bool
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
    for work in database._work.values():
        work.close(reusable=False)  # as the end of the process would
    manager.close()
    again = ModelResource("broker", durable)
    with TransactionManager("shop", log, [again, make()]):
        assert durable.prepared == {}
    assert select(plain, "SELECT item FROM payments") == (["one"] if committed else [])
    assert durable.committed == (["message"] if committed else [])


def test_recoverer_waits_for_a_running_commit_and_follows_its_outcome(make: Make, plain: EmbeddedPostgres, slow_commit: str) -> None:
    database, other, log = make(), make(), ModelLog()
    durable = DurableBranches()
    broker = ModelResource("broker", durable)
    decisions: list[Decision] = []
    decide = database.commit_deciding

    def remember(xid: Xid, decision: Decision) -> None:
        decisions.append(decision)
        decide(xid, decision)

    database.commit_deciding = remember
    with psycopg.connect(plain.conninfo) as holder, TransactionManager("shop", log, [broker, database]) as manager:
        holder.execute(slow_commit)

        def recover_meanwhile() -> Decision:
            wait_for(lambda: waiting(plain) == ["1"], "the commit waits")
            # The row is written and not committed: a recoverer that asks for ROLLBACK waits for it.
            recovered = in_background(lambda: other.decide(replace(decisions[0], outcome=Outcome.ROLLBACK)), "test-recoverer")
            wait_for(lambda: waiting(plain) == ["2"], "the recoverer waits")
            assert not recovered.done()
            holder.rollback()
            stands: Decision = recovered.result(WAIT_S)
            return stands

        followed = in_background(recover_meanwhile, "test-order")
        pay(manager, database, broker, "one")
        assert followed.result(WAIT_S).outcome is Outcome.COMMIT
    assert durable.committed == ["message"]


def waiting(plain: EmbeddedPostgres) -> list[str]:
    """How many sessions wait for a lock."""
    return select(plain, "SELECT count(*)::text FROM pg_locks WHERE NOT granted")


@pytest.fixture
def slow_commit(plain: EmbeddedPostgres) -> Iterator[str]:
    """Makes commits of payments wait for a lock. The statement takes the lock until the end of its transaction."""
    lock = "pg_advisory_xact_lock(1)"
    with psycopg.connect(plain.conninfo, autocommit=True) as connection:
        connection.execute(
            f"CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM {lock}; RETURN NULL; END';"
            "CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON payments INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION wait()"
        )
        yield f"SELECT {lock}"
        connection.execute("DROP FUNCTION wait() CASCADE")


def test_decision_is_found_although_the_application_selects_another_schema(make: Make, plain: EmbeddedPostgres) -> None:
    """Applications with a schema for each tenant do so. The setting outlives the transaction in a pooled session."""
    with psycopg.connect(plain.conninfo) as connection:
        connection.execute("DROP SCHEMA IF EXISTS tenant CASCADE; CREATE SCHEMA tenant")
        connection.execute(f"CREATE TABLE tenant.{TABLE} (gtrid text, decision text)")
    seen: list[list[str]] = []

    def look(point: str) -> None:
        if point == "broker.commit.before":
            seen.append(select(plain, f"SELECT gtrid FROM public.{TABLE}"))

    database, broker = make(), ModelResource("broker", watch=look)
    with TransactionManager("shop", ModelLog(LogState(log_id="aaaaaaaa")), [broker, database]) as manager:
        with manager.begin() as transaction:
            transaction.enlist(broker).append("message")
            handle = transaction.enlist(database)
            run(handle, "SET search_path TO tenant")
            run(handle, "INSERT INTO public.payments VALUES ('one')")
        assert seen == [[transaction.id]]
        decision = Decision(new_gtrid("shop", 0, "aaaaaaaa", deciders=["database"]), Outcome.ROLLBACK, (), 0, "recoverer")
        assert database.decide(decision) == decision
        assert database.decisions("shop") == [decision]
    assert select(plain, f"SELECT gtrid FROM tenant.{TABLE}") == [decision.gtrid.decode()]  # a process may find this table
    with psycopg.connect(plain.conninfo) as connection:
        connection.execute("DROP SCHEMA tenant CASCADE")
    assert (select(plain, "SELECT item FROM payments"), broker.durable.committed) == (["one"], ["message"])


def working_in(plain: EmbeddedPostgres, schema: str) -> str:
    """Create a schema of user ``shop``, and return the connection string of a process that works in it."""
    with psycopg.connect(plain.conninfo, autocommit=True) as connection:
        connection.execute("DO $$BEGIN CREATE ROLE shop LOGIN; EXCEPTION WHEN duplicate_object THEN NULL; END$$")
        connection.execute(f"CREATE SCHEMA {schema} AUTHORIZATION shop; GRANT ALL ON payments TO shop")
    return f"host={HOST} port={plain.port} user=shop dbname=postgres options='-c search_path={schema},public'"


@pytest.fixture
def schemas(plain: EmbeddedPostgres) -> Iterator[tuple[str, str]]:
    """Return the connection strings of two processes whose tables of decisions are in different schemas."""
    with psycopg.connect(plain.conninfo, autocommit=True) as connection:
        connection.execute(f"TRUNCATE payments; DROP TABLE IF EXISTS {TABLE}")
    yield working_in(plain, "first"), working_in(plain, "second")
    with psycopg.connect(plain.conninfo, autocommit=True) as connection:
        connection.execute("DROP SCHEMA first CASCADE; DROP SCHEMA second CASCADE")


def killed_after_the_decision(conninfo: str, durable: DurableBranches, log: ModelLog) -> None:
    def kill(reached: str) -> None:
        if reached == "broker.commit.before":
            raise Killed

    database, broker = PostgresResource("db", conninfo), ModelResource("broker", durable, watch=kill)
    manager = TransactionManager("shop", log, [broker, database])
    manager.open()
    with pytest.raises(Killed):
        pay(manager, database, broker, "one")
    manager.close()
    database.close()


def test_decision_in_another_schema_is_found_by_a_process_with_another_search_path(
    plain: EmbeddedPostgres, schemas: tuple[str, str]
) -> None:
    """A new release of the application works in a new schema, with a new table of decisions."""
    (first, second), durable, log = schemas, DurableBranches(), ModelLog()
    killed_after_the_decision(first, durable, log)
    database = PostgresResource("db", second)
    with TransactionManager("shop", log, [ModelResource("broker", durable), database]):
        assert (durable.committed, durable.prepared) == (["message"], {})
        asked = Decision(new_gtrid("shop", 0, "aaaaaaaa", deciders=["db"]), Outcome.ROLLBACK, (), 0, "recoverer")
        earlier = PostgresResource("db", first)
        assert database.decide(asked) == asked
        commit = replace(asked, outcome=Outcome.COMMIT)
        assert earlier.decide(commit) == asked, "a process of the earlier release could still commit"
        assert database.decisions("shop")[-1] == asked
        with psycopg.connect(plain.conninfo) as connection:  # a recoverer died before it had stored the ROLLBACK in all tables
            connection.execute(f"DELETE FROM first.{TABLE} WHERE gtrid = %s", (asked.gtrid.decode(),))
        assert asked not in database.decisions("shop")
    database.close()
    assert select(plain, "SELECT item FROM payments") == ["one"]


def test_nothing_is_rolled_back_by_a_role_that_may_not_use_the_table_of_decisions(
    plain: EmbeddedPostgres, schemas: tuple[str, str]
) -> None:
    """An operator runs the recovery as another user, who does not find the table of the application."""
    durable, log = DurableBranches(), ModelLog()
    killed_after_the_decision(schemas[0], durable, log)
    (xid,) = durable.prepared
    broker, foreign, own = ModelResource("broker", durable), PostgresResource("db", plain.conninfo), PostgresResource("db", schemas[0])
    recoverer = TransactionManager("shop", log, [broker, foreign]).recoverer()
    assert 'may not use "first".bascule_decisions' in recoverer.run().unreachable["db"]
    assert recoverer.report(xid.gtrid).finding is TransactionFinding.NOT_KNOWN
    with pytest.raises(ResourceError, match="connect as the role whose process decides"):
        recoverer.finish_now(xid, Outcome.ROLLBACK)
    assert list(durable.prepared) == [xid]
    TransactionManager("shop", log, [broker, own]).recoverer().run()
    assert (durable.committed, durable.prepared) == (["message"], {})
    for each in (foreign, own):
        each.close()


def test_error_for_disabled_prepared_transactions_names_the_server_setting(plain: EmbeddedPostgres) -> None:
    resource = PostgresResource("db", plain.conninfo, prepared=True)
    with pytest.raises(Unavailable, match="max_prepared_transactions = 0"):
        TransactionManager("shop", ModelLog(), [resource, ModelResource("broker")]).open()
