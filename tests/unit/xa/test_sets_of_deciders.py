"""The databases of a manager change, or are many, while its transactions are in doubt."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bascule.xa import TransactionFinding, TransactionManager
from bascule.xa.local_database import LocalDatabaseResource
from bascule.xa.log import Decision, Outcome
from bascule.xa.plan import Action
from bascule.xa.resource import Resource
from bascule.xa.xid import branch, new_gtrid
from tests.unit.xa.deciding_shop import Shop


class Preparing(LocalDatabaseResource):
    """A database with a table of decisions that can prepare, so it never decides, as a PostgreSQL may be."""

    decides = False


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def opener(path: Path) -> Callable[[], sqlite3.Connection]:
    return lambda: sqlite3.connect(path, check_same_thread=False)


@pytest.mark.parametrize(("preparing", "deciding"), [(7, 3), (8, 3), (9, 2), (0, 11)])
def test_undecided_transaction_of_a_manager_with_many_databases_is_rolled_back(
    shop: Shop, tmp_path: Path, preparing: int, deciding: int
) -> None:
    resources: list[Resource[Any]] = [
        *(Preparing(f"prepares-{number}", opener(tmp_path / f"p{number}")) for number in range(preparing)),
        *(LocalDatabaseResource(f"decides-{number}", opener(tmp_path / f"d{number}")) for number in range(deciding - 1)),
        *shop.process(),
    ]
    with TransactionManager("shop", shop.log, resources) as manager:
        shop.durable.prepared[branch(manager.begin(timeout_s=0).gtrid, "broker")] = ["message"]
        assert [step.action for step in manager.recoverer().run().steps] == [Action.ROLLBACK]
    assert shop.durable.prepared == {}


def test_rollback_in_the_log_is_carried_out_after_a_deciding_database_was_removed(shop: Shop, tmp_path: Path) -> None:
    """A pass has stored it in each database and in the log, and could not tell the broker."""
    removed = LocalDatabaseResource("removed", opener(tmp_path / "removed"))
    removed.check()
    xid = branch(new_gtrid("shop", 0, "aaaaaaaa", deciders=["database", "removed"]), "broker")
    shop.durable.prepared[xid] = ["message"]
    rollback = Decision(xid.gtrid, Outcome.ROLLBACK, ("broker",), 1, "a recoverer")
    removed.decide(rollback)
    shop.database.decide(rollback)
    shop.log.decide(rollback)
    with TransactionManager("shop", shop.log, shop.process()) as manager:
        assert manager.recoverer().run().failed == {}
        assert shop.durable.prepared == {}
        shop.durable.prepared[xid] = ["message"]
        assert manager.recoverer().finish_now(xid, Outcome.ROLLBACK) is Outcome.ROLLBACK


def test_transaction_of_a_process_with_one_more_database_is_left_alone_and_reported_only_after_its_deadline(shop: Shop) -> None:
    def undecidable(deadline_ms: int) -> bool:
        xid = branch(new_gtrid("shop", deadline_ms, "aaaaaaaa", deciders=["added", "database"]), "broker")
        shop.durable.prepared = {xid: ["message"]}
        with TransactionManager("shop", shop.log, shop.process(), shared=True) as manager:
            done = manager.recoverer().run()
            assert [step.action for step in done.steps] == [Action.WAIT]
            assert manager.outcome(str(xid)).finding is TransactionFinding.NOT_KNOWN
        return bool(done.undecidable)

    assert not undecidable(int(time.time() * 1_000) + 60_000)
    assert undecidable(0)
