"""A manager that closes deletes the rows of its finished decisions. Here the database is SQLite."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from bascule.xa import TransactionManager
from tests.unit.xa.deciding_shop import Shop


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_manager_that_closes_deletes_rows_of_finished_transactions(shop: Shop) -> None:
    """Another process would keep them for a day of its life, and confirm them each time it starts."""
    for _ in range(3):
        with TransactionManager("shop", shop.log, shop.process()) as manager, manager.begin() as transaction:
            broker, database = (manager.resources[name] for name in ("broker", "database"))
            transaction.enlist(broker).append("message")
            transaction.enlist(database).execute(f"INSERT INTO payments VALUES ('{transaction.id}')")
    assert len(shop.rows()) == 3
    assert shop.decisions() == []


def test_manager_closes_while_its_database_is_away(shop: Shop, caplog: pytest.LogCaptureFixture) -> None:
    resources = shop.process()
    with TransactionManager("shop", shop.log, resources) as manager, manager.begin() as transaction:
        transaction.enlist(resources[1]).append("message")
        transaction.enlist(resources[0]).execute("INSERT INTO payments VALUES ('row')")
        shop.at["broker.commit.after"] = lambda: setattr(shop, "away", sqlite3.OperationalError("unable to open database file"))
    assert "could not delete decisions" in caplog.text
    assert len(shop.decisions()) == 1
