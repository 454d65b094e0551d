"""The handle of a database that decides with its own commit: the application cannot end the transaction with it. Here with SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bascule.xa import TransactionManager
from bascule.xa.errors import OutOfOrder
from bascule.xa.xid import may_be_in_database, new_gtrid
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
