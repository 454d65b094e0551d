"""The handle of a database that decides with its own commit: the application cannot end the transaction with it. Here with SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bascule.core.errors import InvalidInput
from bascule.testing.xa import ModelLog
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa.errors import OutOfOrder
from bascule.xa.local_database import LocalDatabaseResource
from bascule.xa.xid import branch, may_be_in_database, new_gtrid
from tests.unit.xa.deciding_shop import BOTH, NEITHER, Shop


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_manager_alone_controls_commit_and_rollback_of_deciding_database(shop: Shop) -> None:
    with TransactionManager("shop", shop.log, [shop.broker, shop.database]) as manager:
        with manager.begin() as transaction:
            assert may_be_in_database(transaction.gtrid)
            transaction.enlist(shop.broker).append("message")
            handle = transaction.enlist(shop.database)
            handle.execute("INSERT INTO payments VALUES ('row')")
            assert handle.cursor().connection is handle
            for refused in (handle.commit, handle.rollback, handle.close):
                with pytest.raises(OutOfOrder):
                    refused()
        with pytest.raises(OutOfOrder, match="is over"):
            handle.execute("INSERT INTO payments VALUES ('late')")
    assert shop.where == BOTH
    assert not may_be_in_database(new_gtrid("shop", 0, "aaaaaaaa"))


class EndingCursor(sqlite3.Cursor):
    """A cursor with methods that end the transaction, as pyodbc has."""

    def commit(self) -> None:
        self.connection.commit()

    def rollback(self) -> None:
        self.connection.rollback()


@pytest.mark.parametrize(
    "ending",
    [
        lambda handle: handle.executescript("SELECT 1"),
        lambda handle: handle.cursor().executescript("SELECT 1"),
        lambda handle: handle.cursor(EndingCursor).commit(),
        lambda handle: handle.cursor(EndingCursor).rollback(),
    ],
    ids=["script on the connection", "script on a cursor", "commit on a cursor", "rollback on a cursor"],
)
def test_no_method_of_connection_or_cursor_ends_the_transaction(shop: Shop, ending: Callable[[Any], object]) -> None:
    with TransactionManager("shop", shop.log, [shop.broker, shop.database]) as manager:
        transaction = manager.begin()
        handle = transaction.enlist(shop.database)
        handle.execute("INSERT INTO payments VALUES ('row')")
        with pytest.raises(OutOfOrder, match="would end the transaction"):
            ending(handle)
        transaction.rollback()
    assert shop.where == NEITHER


class AutocommitConnection(sqlite3.Connection):
    """A connection as Python 3.12 opens it with ``autocommit=True``: commit and rollback do nothing."""

    def commit(self) -> None: ...

    def rollback(self) -> None: ...


class ServerAutocommitConnection(sqlite3.Connection):
    """A connection with autocommit as MySQL has it: a savepoint outside of a transaction does not last."""

    @property
    def in_transaction(self) -> bool:
        return True  # MySQL's drivers do not tell, so the resource sends no BEGIN

    def cursor(self, *_: Any) -> Any:
        return ServerAutocommitCursor(self)


class ServerAutocommitCursor(sqlite3.Cursor):
    def execute(self, sql: str, parameters: Any = ()) -> ServerAutocommitCursor:
        super().execute(sql, parameters)
        if sql.startswith("SAVEPOINT"):
            super().execute("COMMIT")
        return self


KINDS = [AutocommitConnection, ServerAutocommitConnection]


@pytest.mark.parametrize("kind", KINDS)
def test_first_transaction_on_single_database_with_autocommit_is_refused(shop: Shop, kind: type[sqlite3.Connection]) -> None:
    """The manager of a single resource does not check the resource when it opens, because it needs no table of decisions."""
    database = LocalDatabaseResource("database", lambda: sqlite3.connect(shop.path, factory=kind, isolation_level=None))

    def work() -> None:
        with manager.begin() as transaction:
            transaction.enlist(database).execute("INSERT INTO payments VALUES ('row')")

    with TransactionManager("alone", ModelLog(), [database]) as manager:
        for _ in range(2):
            with pytest.raises(InvalidInput, match="the connection has autocommit"):
                work()
    assert shop.rows() == []


def test_single_database_needs_no_table_of_decisions(tmp_path: Path) -> None:
    path = tmp_path / "alone.sqlite"
    database = LocalDatabaseResource("database", lambda: sqlite3.connect(path, isolation_level=None))
    with TransactionManager("alone", ModelLog(), [database]) as manager, manager.begin() as transaction:
        transaction.enlist(database).execute("CREATE TABLE payments (item TEXT)")
    with sqlite3.connect(path) as connection:
        assert [row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE name = 'payments'")] == ["payments"]


def test_database_that_was_away_when_the_manager_opened_is_checked_by_the_first_branch(shop: Shop) -> None:
    away = [True]

    def connect() -> sqlite3.Connection:
        if away:
            raise sqlite3.OperationalError("connection refused")
        return sqlite3.connect(shop.path, timeout=0.1, isolation_level=None)

    database = LocalDatabaseResource("database", connect)
    with TransactionManager("shop", shop.log, [shop.broker, database]) as manager:
        away.clear()
        transaction = manager.begin()
        with pytest.raises(InvalidInput, match="rows in table bascule_decisions survive a rollback"):
            transaction.enlist(database)
        transaction.rollback()


def test_connection_is_tried_out_again_after_an_outage(shop: Shop) -> None:
    kinds: list[type[sqlite3.Connection]] = [sqlite3.Connection]

    def connect() -> sqlite3.Connection:
        kind = kinds[-1]
        return sqlite3.connect(shop.path, timeout=0.1, factory=kind, isolation_level=None)

    database = LocalDatabaseResource("database", connect)
    with TransactionManager("alone", ModelLog(), [database]) as manager:
        with manager.begin() as transaction:
            transaction.enlist(database).execute("INSERT INTO payments VALUES ('row')")
        lost = manager.begin()
        lost.enlist(database)
        database._work[branch(lost.gtrid, "database")].raw.close()
        with pytest.raises(TransactionRolledBack):
            lost.commit()
        kinds.append(AutocommitConnection)
        after = manager.begin()
        with pytest.raises(InvalidInput, match="the connection has autocommit"):
            after.enlist(database)
        after.rollback()
    assert shop.rows() == ["row"]
