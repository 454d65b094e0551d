"""Heuristic outcomes of each kind: errors of the application, reports of other processes, metrics, and how an operator forgets one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from bascule.core.errors import InvalidInput
from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.xa import HeuristicOutcome, TransactionFinding, TransactionManager, TransactionRolledBack
from bascule.xa.errors import BranchHeuristic, Code, ResourceFailed, TransactionInDoubt, UnknownXid
from bascule.xa.log import Decision, Heuristic, LogState, Outcome
from bascule.xa.metrics import TransactionCollector
from bascule.xa.xid import branch, new_gtrid
from tests.support.system import wait_for

KINDS = {Code.XA_HEURCOM: "commit", Code.XA_HEURRB: "rollback", Code.XA_HEURMIX: "mixed", Code.XA_HEURHAZ: "hazard"}
FINDINGS = {Outcome.COMMIT: TransactionFinding.COMMITTED, Outcome.ROLLBACK: TransactionFinding.ROLLED_BACK}
AGREES = {Outcome.COMMIT: Code.XA_HEURCOM, Outcome.ROLLBACK: Code.XA_HEURRB}
by_code = pytest.mark.parametrize("code", list(KINDS), ids=lambda code: code.name)
by_outcome = pytest.mark.parametrize("outcome", list(Outcome))


class Shop:
    """Two resources and a log that survive their processes. ``at`` has actions of an operator at points."""

    def __init__(self) -> None:
        self.one, self.two, self.log = DurableBranches(), DurableBranches(), LogState()
        self.at: dict[str, Callable[[], object]] = {}

    def manager(self) -> TransactionManager:
        """Return the manager of a new process."""
        resources = [ModelResource("one", self.one, watch=self._watch), ModelResource("two", self.two, watch=self._watch)]
        return TransactionManager("shop", ModelLog(self.log, watch=self._watch), resources, recovery_interval_s=0.05)

    def _watch(self, point: str) -> None:
        if point in self.at:
            self.at.pop(point)()

    def force_one(self, code: Code) -> None:
        """End the prepared branch in the first resource, which remembers the heuristic outcome."""
        ModelResource("one", self.one).force(next(iter(self.one.prepared)), code)

    def by_hand(self, outcome: Outcome) -> None:
        """End the prepared branch in the first resource, which does not remember that an operator did it."""
        ModelResource("one", self.one).end_by_hand(next(iter(self.one.prepared)), outcome)


def raising(error: Exception) -> Callable[[], object]:
    def act() -> None:
        raise error

    return act


def work(manager: TransactionManager, *names: str) -> str:
    """Commit work in resources, and return the id of the transaction."""
    with manager.begin() as transaction:
        for name in names or ("one", "two"):
            transaction.enlist(manager.resources[name]).append(name)
    return transaction.id


def commit_beside_operator(shop: Shop, manager: TransactionManager, outcome: Outcome, code: Code) -> str:
    """Commit a transaction that ends by ``outcome`` while an operator forces one branch, and check the error."""
    if outcome is Outcome.COMMIT:
        shop.at["log.decide.after"] = lambda: shop.force_one(code)
        if code is AGREES[outcome]:
            return work(manager)
    else:
        shop.at["one.prepare.after"] = lambda: shop.force_one(code)
        shop.at["two.prepare.before"] = raising(ResourceFailed("away"))
        if code is AGREES[outcome]:
            with pytest.raises(TransactionRolledBack) as rolled_back:
                work(manager)
            return rolled_back.value.transaction_id
    with pytest.raises(HeuristicOutcome, match=r"except for: .* was finished by hand") as raised:
        work(manager)
    assert [branch.rpartition(":")[2] for branch in raised.value.branches] == ["one"]
    return raised.value.transaction_id


@pytest.fixture
def shop() -> Shop:
    return Shop()


@by_code
@by_outcome
def test_heuristic_outcome_against_decision_is_raised_and_agreeing_outcome_is_only_recorded(
    shop: Shop, outcome: Outcome, code: Code
) -> None:
    with shop.manager() as manager:
        id = commit_beside_operator(shop, manager, outcome, code)
        (heuristic,) = shop.log.heuristics.values()
        assert (heuristic.xid, heuristic.code, heuristic.wanted) == (branch(id.encode(), "one"), code, outcome)
        assert manager.outcome(id).finding is FINDINGS[outcome]
    assert shop.two.committed == (["two"] if outcome is Outcome.COMMIT else [])


@by_code
@by_outcome
def test_other_process_reports_decision_from_heuristic_record_after_log_forgot_it(shop: Shop, outcome: Outcome, code: Code) -> None:
    with shop.manager() as manager:
        id = commit_beside_operator(shop, manager, outcome, code)
    assert shop.log.decisions == {}
    found = shop.manager().outcome(id)
    assert (found.finding, [each.code for each in found.heuristics]) == (FINDINGS[outcome], [code])


@pytest.mark.parametrize("wanted", list(Outcome))
def test_other_process_reports_decision_when_resource_does_not_remember_forced_branch(shop: Shop, wanted: Outcome) -> None:
    contrary = Outcome.ROLLBACK if wanted is Outcome.COMMIT else Outcome.COMMIT
    shop.at["log.decide.after" if wanted is Outcome.COMMIT else "one.prepare.after"] = lambda: shop.by_hand(contrary)
    if wanted is Outcome.ROLLBACK:
        shop.at["two.prepare.before"] = raising(ResourceFailed("away"))
    with shop.manager() as manager, pytest.raises(HeuristicOutcome) as raised:
        work(manager)
    found = shop.manager().outcome(raised.value.transaction_id)
    assert (found.finding, [each.code for each in found.heuristics]) == (FINDINGS[wanted], [AGREES[contrary]])


@by_code
def test_heuristic_answer_to_one_phase_commit_is_raised_if_it_differs(shop: Shop, code: Code) -> None:
    shop.at["one.commit.before"] = raising(BranchHeuristic("by hand", code))
    with shop.manager() as manager:
        if code is Code.XA_HEURCOM:
            id = work(manager, "one")
        else:
            with pytest.raises(HeuristicOutcome) as raised:
                work(manager, "one")
            id = raised.value.transaction_id
    assert shop.manager().outcome(id).finding is TransactionFinding.COMMITTED
    assert [(each.code, each.wanted) for each in shop.log.heuristics.values()] == [(code, Outcome.COMMIT)]


@by_code
@by_outcome
def test_recovery_records_forced_outcomes_of_branches_of_dead_process(shop: Shop, outcome: Outcome, code: Code) -> None:
    gtrid = new_gtrid("shop", 0)
    shop.one.prepared[branch(gtrid, "one")], shop.two.prepared[branch(gtrid, "two")] = ["one"], ["two"]
    shop.force_one(code)
    if outcome is Outcome.COMMIT:
        shop.log.add(Decision(gtrid, outcome, ("one", "two"), 0, "host/1"))
    with shop.manager() as manager:
        wait_for(lambda: not shop.two.prepared, "the end of the other branch")
        assert [(each.code, each.wanted) for each in shop.log.heuristics.values()] == [(code, outcome)]
        assert manager.outcome(gtrid.decode()).finding is FINDINGS[outcome]


@by_code
@by_outcome
def test_heuristic_outcome_is_counted_by_kind_and_transaction_is_not_in_doubt(shop: Shop, outcome: Outcome, code: Code) -> None:
    registry = CollectorRegistry()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"bascule_xa_{name}", {"manager": "shop", **labels})

    with shop.manager() as manager:
        registry.register(TransactionCollector(manager))
        commit_beside_operator(shop, manager, outcome, code)
        wait_for(lambda: value("heuristics", kind=KINDS[code]) == 1, "the outcome")
        assert [value("heuristics", kind=kind) for kind in KINDS.values() if kind != KINDS[code]] == [0, 0, 0]
        wait_for(lambda: value("in_doubt") == value("in_doubt_oldest_seconds") == 0, "a pass that has begun after it")
        assert shop.log.heuristics
        (xid,) = shop.log.heuristics
        manager.recoverer().forget(xid)
        assert (shop.log.heuristics, shop.one.heuristic) == ({}, {})
        wait_for(lambda: value("heuristics", kind=KINDS[code]) == 0, "nothing")


def test_heuristic_record_is_kept_when_resource_does_not_answer_forget(shop: Shop) -> None:
    with shop.manager() as manager:
        commit_beside_operator(shop, manager, Outcome.COMMIT, Code.XA_HEURRB)
        (xid,) = shop.log.heuristics
        shop.at["one.forget.before"] = raising(ResourceFailed("away"))
        with pytest.raises(ResourceFailed):
            manager.recoverer().forget(xid)
        assert list(shop.log.heuristics) == list(shop.one.heuristic) == [xid]
        manager.recoverer().forget(xid)
        with pytest.raises(UnknownXid):
            manager.recoverer().forget(xid)


def test_forget_of_heuristic_outcome_of_other_manager_or_log_is_refused() -> None:
    """This manager cannot tell the resource, which would report the heuristic outcome again to the manager of the branch."""
    log = LogState(log_id="aaaaaaaa")
    theirs, elsewhere = branch(new_gtrid("store", 0), "one"), branch(new_gtrid("shop", 0, "bbbbbbbb"), "one")
    for xid in (theirs, elsewhere):
        log.add(Heuristic(xid, Code.XA_HEURRB, Outcome.COMMIT, "by hand", 0))
    manager = TransactionManager("shop", ModelLog(log), [ModelResource("one")])
    with pytest.raises(InvalidInput, match="does not belong to transaction manager 'shop'"):
        manager.recoverer().forget(theirs)
    with pytest.raises(InvalidInput, match="was begun with decision log bbbbbbbb"):
        manager.recoverer().forget(elsewhere)
    assert len(log.heuristics) == 2


def test_report_shows_heuristic_outcome_of_transaction_in_doubt(shop: Shop) -> None:
    shop.at["log.decide.after"] = raising(ResourceFailed("no answer"))
    with shop.manager() as manager:
        shop.at["one.commit.before"] = lambda: shop.force_one(Code.XA_HEURMIX)
        with pytest.raises(TransactionInDoubt) as raised:
            work(manager)
        wait_for(lambda: bool(shop.log.heuristics), "the recovery")
        found = manager.outcome(raised.value.transaction_id)
        assert (found.finding, [each.code for each in found.heuristics]) == (TransactionFinding.COMMITTED, [Code.XA_HEURMIX])
