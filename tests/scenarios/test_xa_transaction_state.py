"""Branches in PostgreSQL whose transaction has ended or failed without an error of the driver, or that have no transaction number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from bascule.embedded.postgres import EmbeddedPostgres
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa.database import DatabaseResource, DbapiResource
from bascule.xa.postgres import PostgresResource
from bascule.xa.sqlalchemy import SqlAlchemyResource
from bascule.xa.transaction import Transaction


@pytest.fixture
def table(postgres: EmbeddedPostgres, name: str) -> Iterator[str]:
    table = name.replace(".", "_")
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table} (item text UNIQUE)")
        yield table
        connection.execute(f"DROP TABLE {table}")


@pytest.fixture(params=["psycopg", "sqlalchemy"])
def resource(request: pytest.FixtureRequest, postgres: EmbeddedPostgres) -> Iterator[DatabaseResource[Any]]:
    if request.param == "psycopg":
        resource = PostgresResource("db", postgres.conninfo)
        yield resource
        resource.close()
    else:
        engine = sa.create_engine(postgres.url)
        yield SqlAlchemyResource("db", engine)
        engine.dispose()


def insert(connection: Any, table: str, item: str) -> None:
    connection.execute(f"INSERT INTO {table} VALUES ('{item}')")


def items(postgres: EmbeddedPostgres, table: str) -> list[str]:
    with psycopg.connect(postgres.conninfo) as connection:
        return [row[0] for row in connection.execute(f"SELECT item FROM {table} ORDER BY item")]


@pytest.mark.parametrize("alone", [False, True], ids=["two-phase", "alone"])
@pytest.mark.parametrize(
    ("ending", "commits"), [("ROLLBACK", False), ("COMMIT", True), ("COMMIT AND CHAIN", True), ("ROLLBACK; BEGIN", False)]
)
def test_dbapi_resource_notices_that_a_statement_has_ended_the_transaction(
    postgres: EmbeddedPostgres, table: str, ending: str, commits: bool, alone: bool
) -> None:
    resource, broker = DbapiResource("db", lambda: psycopg.connect(postgres.conninfo)), ModelResource("broker")
    with TransactionManager("ended", ModelLog(), [resource, *([] if alone else [broker])]) as manager:
        transaction = manager.begin()
        if not alone:
            transaction.enlist(broker).append("message")
        handle = transaction.enlist(resource)
        insert(handle, table, "before")
        handle.execute(ending)
        insert(handle, table, "after")
        with pytest.raises(TransactionRolledBack, match="has failed, or the application has ended it"):
            transaction.commit()
        assert items(postgres, table) == (["before"] if commits else [])
        with manager.begin() as transaction:
            handle = transaction.enlist(resource)
            handle.execute("SAVEPOINT s")
            insert(handle, table, "undone")
            handle.execute("ROLLBACK TO SAVEPOINT s")
            insert(handle, table, "next")
            if not alone:
                transaction.enlist(broker).append("message")
    assert items(postgres, table) == (["before", "next"] if commits else ["next"])
    assert broker.durable.committed == ([] if alone else ["message"])


def test_dbapi_resource_does_not_prepare_a_transaction_that_has_failed(postgres: EmbeddedPostgres, table: str) -> None:
    """PREPARE TRANSACTION of a failed transaction rolls it back and reports success."""
    resource, broker = DbapiResource("db", lambda: psycopg.connect(postgres.conninfo)), ModelResource("broker")
    with TransactionManager("failed", ModelLog(), [resource, broker]) as manager:
        transaction = manager.begin()
        transaction.enlist(broker).append("message")
        handle = transaction.enlist(resource)
        insert(handle, table, "one")
        with pytest.raises(psycopg.errors.UniqueViolation):
            insert(handle, table, "one")
        with pytest.raises(TransactionRolledBack, match="current transaction is aborted"):
            transaction.commit()
    assert (items(postgres, table), broker.durable.committed) == ([], [])


def test_branch_that_may_have_written_on_a_foreign_server_only_is_prepared(
    resource: DatabaseResource[Any], postgres: EmbeddedPostgres, table: str
) -> None:
    """Such a branch has no transaction number. As a read-only branch it would be rolled back, and reported as committed.

    The notification takes the place of the foreign table here: PostgreSQL prepares neither.
    """
    broker = ModelResource("broker")

    def run(transaction: Transaction, statement: str) -> None:
        transaction.enlist(broker).append(statement)
        handle = transaction.enlist(resource)
        handle.execute(sa.text(statement) if hasattr(handle, "get_bind") else statement)

    with (
        psycopg.connect(postgres.conninfo, autocommit=True) as admin,
        TransactionManager("foreign", ModelLog(), [resource, broker]) as manager,
    ):
        admin.execute(f"CREATE FOREIGN DATA WRAPPER {table}_w")
        admin.execute(f"CREATE SERVER {table}_s FOREIGN DATA WRAPPER {table}_w")
        try:
            writing = manager.begin()
            run(writing, f"NOTIFY {table}")
            with pytest.raises(TransactionRolledBack, match="cannot PREPARE"):
                writing.commit()
            with manager.begin() as reading:
                run(reading, "SELECT 1")
        finally:
            admin.execute(f"DROP FOREIGN DATA WRAPPER {table}_w CASCADE")
    assert broker.durable.committed == ["SELECT 1"]
    assert resource.recover() == []
