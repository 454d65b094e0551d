"""The metrics of a transaction manager, as Prometheus reads them."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from bascule.core.xa_codes import Code
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import HeuristicOutcome, TransactionInDoubt, TransactionManager
from bascule.xa.errors import BranchHeuristic, ResourceFailed
from bascule.xa.metrics import TransactionCollector, serve_metrics
from bascule.xa.two_phase import TransactionPhase
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for

WAIT_S = 20.0 * SLOWNESS
Value = Callable[..., float | None]


class Shop:
    """Two resources. ``at`` has the errors to raise at points."""

    def __init__(self) -> None:
        self.at: dict[str, Exception] = {}
        self.one, self.two = ModelResource("one", watch=self._watch), ModelResource("two", watch=self._watch)
        self.manager = TransactionManager("shop", ModelLog(watch=self._watch), [self.one, self.two], recovery_interval_s=0.05)
        self._registry = CollectorRegistry()
        self._registry.register(TransactionCollector(self.manager))

    def _watch(self, point: str) -> None:
        if point in self.at:
            raise self.at[point]

    def work(self) -> None:
        with self.manager.begin() as transaction:
            for resource in (self.one, self.two):
                transaction.enlist(resource).append("work")

    def value(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(f"bascule_xa_{name}", {"manager": "shop", **labels})


@pytest.fixture
def shop() -> Shop:
    return Shop()


def test_metrics_count_outcomes_phases_and_active_transactions(shop: Shop) -> None:
    with shop.manager:
        shop.work()
        with shop.manager.begin() as transaction:
            transaction.enlist(shop.one).append("undone")
            assert shop.value("active") == 1
            transaction.rollback()
        assert shop.value("active") == 0
        assert shop.value("transactions_total", outcome="committed") == 1
        assert shop.value("transactions_total", outcome="rolled_back") == 1
        assert {phase: shop.value("phase_seconds_count", phase=phase.value) for phase in TransactionPhase} == {
            TransactionPhase.PREPARE: 1,
            TransactionPhase.DECIDE: 1,
            TransactionPhase.COMMIT: 1,
            TransactionPhase.ROLLBACK: 1,
        }
        assert shop.value("phase_seconds_bucket", phase="commit", le="+Inf") == 1


def test_metrics_report_transactions_in_doubt_and_their_age_until_finished(shop: Shop) -> None:
    with shop.manager:
        shop.at["two.commit.before"] = ResourceFailed("away")
        shop.work()
        assert shop.value("in_doubt") == 1
        assert shop.value("transactions_total", outcome="committed") == 1
        wait_for(lambda: (shop.value("in_doubt_oldest_seconds") or 0) > 0.1, "an age")
        shop.at.clear()
        wait_for(lambda: shop.value("in_doubt") == 0, "the end of it")
        assert shop.value("in_doubt_oldest_seconds") == 0
        shop.at["log.decide.after"] = ResourceFailed("away")
        with pytest.raises(TransactionInDoubt):
            shop.work()
        shop.at.clear()
        assert shop.value("transactions_total", outcome="in_doubt") == 1
        wait_for(lambda: shop.value("in_doubt") == 0, "the end of it")


def test_metrics_count_heuristic_outcomes_by_kind_until_forget(shop: Shop) -> None:
    with shop.manager:
        shop.at["two.commit.before"] = BranchHeuristic("by hand", Code.XA_HEURMIX)
        with pytest.raises(HeuristicOutcome) as raised:
            shop.work()
        shop.at.clear()
        wait_for(lambda: shop.value("heuristics", kind="mixed") == 1, "the outcome")
        assert shop.value("heuristics", kind="commit") == 0
        recoverer = shop.manager.recoverer()
        (heuristic,) = recoverer.look().heuristics
        assert str(heuristic.xid) == raised.value.branches[0]
        recoverer.forget(heuristic.xid)
        wait_for(lambda: shop.value("heuristics", kind="mixed") == 0, "nothing")


def test_metrics_are_served(shop: Shop) -> None:
    with shop.manager:
        port = serve_metrics(shop.manager, 0)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S) as answer:
            text = answer.read().decode()
    assert 'bascule_xa_in_doubt{manager="shop"} 0.0' in text
    assert "\nprocess_cpu_seconds_total " in text
