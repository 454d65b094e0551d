"""An application that ends the database transaction of its branch by a statement: no way to use PostgreSQL reports a commit."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

pytest.importorskip("django")

from django.db import connections

from bascule.embedded.postgres import HOST, USER, EmbeddedPostgres
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa.aio import AsyncTransactionManager
from bascule.xa.decision_table import CREATE, TABLE
from bascule.xa.django import django_resource
from bascule.xa.postgres import PostgresResource
from bascule.xa.sqlalchemy import SqlAlchemyResource
from tests.support.django_orm import database
from tests.support.postgres import items

#: The statements, and whether they commit the work before them.
ENDINGS = [
    ("ROLLBACK", False),
    ("ABORT", False),
    ("ROLLBACK AND CHAIN", False),
    ("SELECT 1; ROLLBACK", False),
    ("COMMIT", True),
    ("END", True),
    ("COMMIT AND CHAIN", True),
]
Run = Callable[[Any, list[str]], None]
USES = ["psycopg", "psycopg on a loop", "sqlalchemy", "sqlalchemy on a loop", "django"]
MODES = ["two-phase", "deciding", "alone"]


def in_thread(manager: TransactionManager, resource: Any, broker: ModelResource | None, statements: list[str]) -> None:
    with manager.begin() as transaction:
        if broker is not None:
            transaction.enlist(broker).append("message")
        handle = transaction.enlist(resource)
        for each in statements:
            handle.execute(sa.text(each) if hasattr(handle, "get_bind") else each)


def on_loop(manager: TransactionManager, resource: Any, broker: ModelResource | None, statements: list[str]) -> None:
    async def main() -> None:
        async with AsyncTransactionManager(manager).begin() as transaction:
            if broker is not None:
                (await transaction.enlist(broker)).append("message")
            handle = await transaction.enlist(resource)
            for each in statements:
                await handle.execute(each if isinstance(handle, psycopg.AsyncConnection) else sa.text(each))

    asyncio.run(main())


def with_django(manager: TransactionManager, resource: Any, broker: ModelResource | None, statements: list[str]) -> None:
    with manager.begin() as transaction:
        if broker is not None:
            transaction.enlist(broker).append("message")
        for each in statements:
            with connections["shop"].cursor() as cursor:
                cursor.execute(each)


@pytest.fixture(params=USES)
def use(request: pytest.FixtureRequest, postgres: EmbeddedPostgres) -> Iterator[tuple[Any, Any]]:
    """Return how to make a resource and how to work with it."""
    kind: str = request.param
    work = on_loop if "loop" in kind else with_django if kind == "django" else in_thread
    if kind == "django":
        described = {"ENGINE": "django.db.backends.postgresql", "NAME": "postgres", "USER": USER, "HOST": HOST, "PORT": postgres.port}
        with database("shop", **described) as alias:
            yield lambda prepared: django_resource("db", alias, prepared=prepared), work
    elif "sqlalchemy" in kind:
        engine = sa.create_engine(postgres.url)
        yield lambda prepared: SqlAlchemyResource("db", engine, prepared=prepared), work
        engine.dispose()
    else:
        made: list[PostgresResource] = []

        def make(prepared: bool) -> PostgresResource:
            made.append(PostgresResource("db", postgres.conninfo, prepared=prepared))
            return made[-1]

        yield make, work
        for each in made:
            each.close()


@pytest.mark.parametrize("mode", MODES)
def test_transaction_is_rolled_back_if_a_statement_of_the_application_has_ended_its_database_transaction(
    postgres: EmbeddedPostgres, use: tuple[Any, Any], table: str, mode: str
) -> None:
    make, work = use
    resource = make(mode == "two-phase")
    broker = None if mode == "alone" else ModelResource("broker")
    expected: list[str] = []
    with TransactionManager("replaced", ModelLog(), [resource, *([broker] if broker else [])]) as manager:
        for number, (ending, commits) in enumerate(ENDINGS):
            before, after = f"{number} before", f"{number} after"
            with pytest.raises(TransactionRolledBack, match="the application has ended the database transaction"):
                work(
                    manager,
                    resource,
                    broker,
                    [f"INSERT INTO {table} VALUES ('{before}')", ending, f"INSERT INTO {table} VALUES ('{after}')"],
                )
            expected += [before] if commits else []
            assert items(postgres, table) == expected
            with pytest.raises(TransactionRolledBack, match="the application has ended the database transaction"):
                work(manager, resource, broker, [f"INSERT INTO {table} VALUES ('{after}')", "ROLLBACK"])
            assert items(postgres, table) == expected
        work(
            manager,
            resource,
            broker,
            [f"SAVEPOINT s; INSERT INTO {table} VALUES ('x'); ROLLBACK TO SAVEPOINT s; INSERT INTO {table} VALUES ('y')"],
        )
        assert items(postgres, table) == [*expected, "y"]
    assert broker is None or broker.durable.committed == ["message"]


def test_certain_rollback_is_reported_although_the_database_does_not_answer_afterwards(postgres: EmbeddedPostgres, table: str) -> None:
    role = f"{table}_role"
    with psycopg.connect(postgres.conninfo, autocommit=True) as admin:
        admin.execute(f"CREATE ROLE {role} LOGIN; GRANT CREATE ON SCHEMA public TO {role}; GRANT INSERT ON {table} TO {role}")
        admin.execute(CREATE.format(TABLE) + f"; GRANT SELECT, INSERT, DELETE ON {TABLE} TO {role}")
        resource, broker = PostgresResource("db", f"{postgres.conninfo} user={role}", prepared=False), ModelResource("broker")
        try:
            with TransactionManager("replaced", ModelLog(), [resource, broker]) as manager:
                transaction = manager.begin()
                transaction.enlist(broker).append("message")
                for statement in ("ROLLBACK", f"INSERT INTO {table} VALUES ('after')"):
                    transaction.enlist(resource).execute(statement)
                admin.execute(f"ALTER ROLE {role} NOLOGIN")
                with pytest.raises(TransactionRolledBack, match="the application has ended the database transaction"):
                    transaction.commit()
                admin.execute(f"ALTER ROLE {role} LOGIN")
        finally:
            resource.close()
            admin.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")
    assert items(postgres, table) == []
    assert broker.durable.committed == []
