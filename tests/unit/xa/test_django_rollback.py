"""Django marks a transaction for rollback: ``set_rollback(True)``, ``atomic(savepoint=False)``. Here with SQLite."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

pytest.importorskip("django")

from django.db import connections, transaction

from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa.django import django_resource
from tests.support.django_orm import Payment, database, items


@pytest.fixture
def broker() -> ModelResource:
    return ModelResource("broker")


@pytest.fixture
def manager(tmp_path: Path, broker: ModelResource) -> Iterator[TransactionManager]:
    with (
        database("shop", ENGINE="django.db.backends.sqlite3", NAME=tmp_path / "shop.sqlite3", CONN_MAX_AGE=None) as alias,
        TransactionManager("shop", ModelLog(), [broker, django_resource("db", alias)]) as manager,
    ):
        yield manager


@pytest.mark.parametrize("statement", [True, False], ids=["after a statement", "without a statement"])
@pytest.mark.parametrize("mark", ["set_rollback", "atomic", "set_rollback in a hook"])
def test_transaction_that_django_has_marked_for_rollback_is_rolled_back(
    manager: TransactionManager, broker: ModelResource, mark: str, statement: bool
) -> None:
    """Django marks a transaction also if it has not sent a statement, and the transaction has no branch in the database."""

    def work() -> None:
        with manager.begin() as running:
            manager.enlist(broker).append("one")
            if statement:
                Payment.objects.using("shop").create(item="one")
            if mark == "set_rollback":
                transaction.set_rollback(True, using="shop")
                assert transaction.get_rollback(using="shop")
            elif mark == "atomic":
                with suppress(LookupError), transaction.atomic(using="shop", savepoint=False):
                    raise LookupError
            else:
                running.before_completion(lambda: transaction.set_rollback(True, using="shop"))

    with pytest.raises(TransactionRolledBack, match="the application marked the transaction for rollback"):
        work()
    assert items("shop") == broker.durable.committed == []
    assert connections["shop"].get_autocommit()
    assert not connections["shop"].needs_rollback


def test_transaction_whose_rollback_mark_the_application_has_removed_is_committed(
    manager: TransactionManager, broker: ModelResource
) -> None:
    with manager.begin():
        manager.enlist(broker).append("one")
        transaction.set_rollback(True, using="shop")
        transaction.set_rollback(False, using="shop")
        Payment.objects.using("shop").create(item="one")
    assert items("shop") == broker.durable.committed == ["one"]
