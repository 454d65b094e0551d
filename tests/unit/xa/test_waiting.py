"""Who waits in a transaction manager: each wait has an end, and tells what is known by then."""

from __future__ import annotations

import threading

import pytest

from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import HeuristicOutcome, TransactionManager
from bascule.xa import manager as managing
from bascule.xa.errors import Code, ResourceFailed
from bascule.xa.log import Heuristic, Outcome
from bascule.xa.two_phase import TransactionStatus
from bascule.xa.xid import Xid

WAIT_S = 20.0


class OperatorRollsBack:
    """Is away when ``two`` is to commit, and meanwhile an operator rolls the branch back, in one of three ways."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.two = ModelResource("two", watch=self)
        self.log = ModelLog()
        self.done = threading.Event()

    def __call__(self, point: str) -> None:
        if point != "two.commit.before" or self.done.is_set():
            return
        self.done.set()
        (xid,) = self.two.durable.prepared
        if self.how == "the resource remembers it":
            self.two.force(xid, Code.XA_HEURRB)
        else:
            self.two.end_by_hand(xid, Outcome.ROLLBACK)
        if self.how == "another recoverer has recorded it":
            self.log.record(Heuristic(xid, Code.XA_HEURRB, Outcome.COMMIT, f"{xid} was rolled back, another process has found", 1))
        raise ResourceFailed("away")


# -- for resources that recovery tells


@pytest.mark.parametrize("how", ["the resource can tell it", "the resource remembers it", "another recoverer has recorded it"])
def test_commit_that_waits_for_a_resource_is_told_that_an_operator_has_rolled_it_back(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managing, "FIRST_RETRY_S", 0.01)
    one, operator = ModelResource("one"), OperatorRollsBack(how)
    with TransactionManager("shop", operator.log, [one, operator.two], finish_within_s=WAIT_S) as manager:
        transaction = manager.begin()
        for resource in (one, operator.two):
            transaction.enlist(resource).append("work")
        with pytest.raises(HeuristicOutcome, match=r"is committed, except for: .*two") as told:
            transaction.commit()
        with pytest.raises(HeuristicOutcome):
            transaction.wait_finished(0)
    assert [Xid.parse(each).bqual for each in told.value.branches] == [b"two"]
    assert told.value.transaction_id == transaction.id
    assert transaction.status is TransactionStatus.COMMITTED
    assert (one.durable.committed, operator.two.durable.committed) == (["work"], [])


def test_commit_is_told_of_the_heuristic_outcome_though_another_resource_stays_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managing, "FIRST_RETRY_S", 0.01)
    recorded = threading.Event()

    def away(point: str) -> None:
        if point == "one.commit.before":
            raise ResourceFailed("away")
        if point == "log.record.after":
            recorded.set()

    one, operator = ModelResource("one", watch=away), OperatorRollsBack("the resource remembers it")
    operator.log = ModelLog(watch=away)
    with TransactionManager("shop", operator.log, [one, operator.two]) as manager:
        transaction = manager.begin()
        for resource in (one, operator.two):
            transaction.enlist(resource).append("work")
        transaction.commit()
        assert set(transaction.unfinished) == {"one", "two"}
        assert recorded.wait(WAIT_S)
        manager.close()  # returns when the pass has ended
        with pytest.raises(HeuristicOutcome, match="two"):
            transaction.wait_finished(0)
        assert set(transaction.unfinished) == {"one", "two"}
