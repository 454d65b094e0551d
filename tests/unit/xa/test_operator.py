"""Commits by an operator: refused if they could split the transaction."""

from __future__ import annotations

import pytest

from bascule.core.errors import InvalidInput
from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.xa.blocking import now_ms
from bascule.xa.errors import ResourceFailed
from bascule.xa.log import Decision, LogState, Outcome
from bascule.xa.recovery import Recoverer
from bascule.xa.xid import branch, new_gtrid


def recoverer(log: ModelLog, *resources: ModelResource) -> Recoverer:
    return Recoverer("shop", log, resources, by="test", patient=True)


@pytest.mark.parametrize(
    ("left_s", "prepared", "silent", "reason"),
    [
        (60, ("one", "two"), "", "its process may still be working on it for"),
        (0, ("one",), "", "no prepared branch in two"),
        (0, (), "", "no prepared branch in one, two"),
        (0, ("one",), "two", "no answer from two"),
    ],
    ids=["at work", "one is not prepared", "none is prepared", "one is silent"],
)
def test_operator_commit_that_may_split_the_transaction_is_refused_unless_allowed(
    left_s: int, prepared: tuple[str, ...], silent: str, reason: str
) -> None:
    gtrid = new_gtrid("shop", now_ms() + 1000 * left_s)
    stores = {name: DurableBranches({branch(gtrid, name): ["work"]} if name in prepared else {}) for name in ("one", "two")}
    away = silent

    def watch(point: str) -> None:
        if away and point.startswith(away):
            raise ResourceFailed("no route")

    log = ModelLog()
    operator = recoverer(log, *(ModelResource(name, store, watch=watch) for name, store in stores.items()))
    with pytest.raises(InvalidInput, match=reason) as refused:
        operator.finish_now(branch(gtrid, "one"), Outcome.COMMIT)
    assert "--allow-split" in str(refused.value)
    assert log.durable.decisions == {}
    assert {name for name, store in stores.items() if store.prepared} == set(prepared)
    away = ""
    assert operator.finish_now(branch(gtrid, "one"), Outcome.COMMIT, allow_split=True) is Outcome.COMMIT
    assert {name for name, store in stores.items() if store.committed} == set(prepared)


def test_operator_commit_of_a_decided_transaction_is_applied_before_its_deadline() -> None:
    gtrid = new_gtrid("shop", now_ms() + 60_000)
    store = DurableBranches({branch(gtrid, "one"): ["work"]})
    log = ModelLog(LogState({gtrid: Decision(gtrid, Outcome.COMMIT, ("one",), 0, "application")}))
    found = recoverer(log, ModelResource("one", store), ModelResource("two"))
    assert found.finish_now(branch(gtrid, "one"), Outcome.COMMIT) is Outcome.COMMIT
    assert store.committed == ["work"]
