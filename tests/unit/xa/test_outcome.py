"""The outcome that a manager reports for the id of a transaction."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from bascule.core.errors import InvalidInput, Unavailable
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionFinding, TransactionInDoubt, TransactionManager, TransactionRolledBack
from bascule.xa.blocking import now_ms
from bascule.xa.errors import Code, ResourceFailed
from bascule.xa.log import Decision, Heuristic, Outcome
from bascule.xa.plan import Action
from bascule.xa.xid import branch, new_gtrid
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS


class Shop:
    """A manager with two resources; calls at the points in ``down`` fail."""

    def __init__(self) -> None:
        self.down: dict[str, Exception] = {}
        self.log = ModelLog(watch=self._watch)
        self.one, self.two = ModelResource("one", watch=self._watch), ModelResource("two", watch=self._watch)
        self.manager = TransactionManager("shop", self.log, [self.one, self.two])

    def _watch(self, point: str) -> None:
        if point in self.down:
            raise self.down[point]

    def pay(self) -> str:
        with self.manager.begin() as transaction:
            for resource in (self.one, self.two):
                transaction.enlist(resource).append("work")
        return transaction.id


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        threading.Event().wait(0.01)


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_report_of_active_transaction_says_at_work(shop: Shop) -> None:
    with shop.manager, shop.manager.begin() as transaction:
        transaction.enlist(shop.one)
        assert shop.manager.outcome(transaction.id).finding is TransactionFinding.RUNNING
        transaction.rollback()
        assert shop.manager.outcome(transaction.id).finding is TransactionFinding.ROLLED_BACK


def test_report_of_commit_in_doubt_follows_decision_log_before_and_after_recovery(shop: Shop) -> None:
    with shop.manager:
        shop.down = {"log.decide.after": Unavailable("no answer"), "two.commit.before": ResourceFailed("away")}
        with pytest.raises(TransactionInDoubt) as raised:
            shop.pay()
        id = raised.value.transaction_id
        wait_until(lambda: bool(shop.one.durable.committed))
        report = shop.manager.outcome(id)
        assert report.finding is TransactionFinding.COMMITTED
        assert report.decision is not None
        assert [(each.resource, each.prepared, each.action) for each in report.branches] == [
            ("one", False, Action.CONFIRM),
            ("two", True, Action.COMMIT),
        ]
        shop.down = {}
        wait_until(lambda: not shop.log.durable.decisions)
        assert shop.manager.outcome(id).finding is TransactionFinding.COMMITTED  # although the log no longer has the decision
        assert shop.manager.outcome(f"1111577411:{id}:one").finding is TransactionFinding.COMMITTED


def test_report_agrees_with_outcome_told_to_application(shop: Shop) -> None:
    with shop.manager:
        assert shop.manager.outcome(shop.pay()).finding is TransactionFinding.COMMITTED
        shop.two.vote = "no"
        with pytest.raises(TransactionRolledBack) as raised:
            shop.pay()
        assert shop.manager.outcome(raised.value.transaction_id).finding is TransactionFinding.ROLLED_BACK


def test_branch_without_decision_is_reported_at_work_until_deadline_and_then_undecided(shop: Shop) -> None:
    old, young = new_gtrid("shop", 0), new_gtrid("shop", now_ms() + 60_000)
    for gtrid in (old, young):
        shop.one.durable.prepared[branch(gtrid, "one")] = ["work"]
    found = shop.manager.outcome(old.decode())
    assert (found.finding, found.branches[0].action) == (TransactionFinding.UNDECIDED, Action.ROLLBACK)
    assert shop.manager.outcome(young.decode()).finding is TransactionFinding.RUNNING
    assert len(shop.one.durable.prepared) == 2


def test_report_names_unreachable_and_missing_resources(shop: Shop) -> None:
    gtrid = new_gtrid("shop", 0)
    shop.log.decide(Decision(gtrid, Outcome.COMMIT, ("one", "stock"), 0, "host/1"))
    shop.down["one.recover.before"] = ResourceFailed("no route")
    found = shop.manager.outcome(gtrid.decode())
    assert {each.resource: (each.prepared, each.why) for each in found.branches} == {
        "one": (None, "does not answer: XAER_RMFAIL: no route"),
        "stock": (None, "the manager does not have this resource"),
    }


def test_outcome_is_not_known_while_resource_is_unreachable(shop: Shop) -> None:
    """The resource may have a prepared branch."""
    shop.down["one.recover.before"] = ResourceFailed("no route")
    assert shop.manager.outcome(new_gtrid("shop", 0).decode()).finding is TransactionFinding.NOT_KNOWN


def test_rolled_back_transaction_is_reported_while_resource_awaits_rollback(shop: Shop) -> None:
    with shop.manager:
        shop.down = {"two.prepare.before": ResourceFailed("away"), "one.rollback.before": ResourceFailed("away")}
        with pytest.raises(TransactionRolledBack) as raised:
            shop.pay()
        found = shop.manager.outcome(raised.value.transaction_id)
        assert (found.finding, [each.resource for each in found.branches]) == (TransactionFinding.ROLLED_BACK, ["one"])


def test_report_of_transaction_with_other_decision_log_is_refused(shop: Shop) -> None:
    gtrid = new_gtrid("shop", 0, "bbbbbbbb")
    shop.one.durable.prepared[branch(gtrid, "one")] = ["work"]
    with pytest.raises(InvalidInput, match="with decision log bbbbbbbb; this manager uses another log"):
        shop.manager.outcome(gtrid.decode())


def test_report_contains_heuristic_outcome(shop: Shop) -> None:
    gtrid = new_gtrid("shop", 0)
    heuristic = Heuristic(branch(gtrid, "one"), Code.XA_HEURRB, Outcome.COMMIT, "by hand", 0)
    shop.log.record(heuristic)
    assert shop.manager.outcome(gtrid.decode()).heuristics == (heuristic,)


def test_report_of_unknown_transaction_says_nothing_left(shop: Shop) -> None:
    assert shop.manager.outcome(new_gtrid("shop", 0).decode()).finding is TransactionFinding.NOT_FOUND


@pytest.mark.parametrize(
    "id", ["other/0199", new_gtrid("store", 0).decode(), "1:x:y", ""], ids=["short", "of-another-name", "of-another-form", "empty"]
)
def test_report_of_transaction_of_other_manager_is_refused(shop: Shop, id: str) -> None:
    with pytest.raises(InvalidInput, match="is not a transaction of manager 'shop'"):
        shop.manager.outcome(id)
