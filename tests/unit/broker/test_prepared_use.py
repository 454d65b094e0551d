"""Prepared branches are counted by user: one user cannot use up the branches of the others."""

from __future__ import annotations

from itertools import count

import pytest

from bascule.broker import branches, prepared_use
from bascule.broker.errors import ResourceLimit
from bascule.broker.policy import Policy
from bascule.core.errors import TransactionRolledBack
from bascule.core.user_limits import UNLIMITED, LimitRule, LimitRules, UserResource
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from tests.unit.broker.conftest import Bench

FEW = LimitRules({UserResource.PREPARED_BRANCHES: 3}, [LimitRule(frozenset({"bank"}), frozenset(), {UserResource.PREPARED_BRANCHES: 5})])
NUMBERS = count()


@pytest.fixture
def policy() -> Policy:
    return Policy(user_limits=FEW)


def prepare(bench: Bench, user: str, number: int, content: str = "x") -> Xid:
    xid = Xid(1, f"{user} {number}".encode(), b"b")
    transaction = bench.engine.begin(xid.gtrid)
    bench.put(content, transaction=transaction)
    branches.prepare(bench.engine, transaction, xid, "client", lambda _: None, user)
    bench.broker.settle()
    return xid


def prepare_all(bench: Bench, user: str, content: str = "x") -> tuple[list[Xid], TransactionRolledBack]:
    """Prepare branches until one is refused. Return the others, and the refusal."""
    xids: list[Xid] = []
    refusal: TransactionRolledBack | None = None
    while refusal is None and len(xids) < 100:
        try:
            xids.append(prepare(bench, user, next(NUMBERS), content))
        except TransactionRolledBack as error:
            refusal = error
    assert refusal is not None
    assert refusal.condition == ResourceLimit.condition
    return xids, refusal


def used(bench: Bench) -> tuple[int, int, dict[str, int], dict[str, int]]:
    use = bench.engine.branches.use
    return use.count, use.size_bytes, dict(use.count_of), dict(use.bytes_of)


@pytest.mark.parametrize("snapshot", [False, True])
def test_branches_of_one_user_leave_room_for_others_also_after_a_restart(bench: Bench, snapshot: bool) -> None:
    xids, refusal = prepare_all(bench, "mallory")
    assert len(xids) == 3
    assert "3 branches of user 'mallory'" in str(refusal)
    assert "broker.max_prepared_branches_per_user" in str(refusal)
    prepare(bench, "alice", next(NUMBERS))
    before = used(bench)
    if snapshot:
        bench.broker.take_snapshot()
        bench.broker.settle()
    bench.crash()
    assert used(bench) == before
    assert len(prepare_all(bench, "mallory")[0]) == 0
    prepare(bench, "alice", next(NUMBERS))


def test_users_may_have_limits_of_their_own(bench: Bench) -> None:
    xids, refusal = prepare_all(bench, "bank")
    assert len(xids) == 5
    assert "max_prepared_branches in [[limit]] of user 'bank'" in str(refusal)


def test_clients_without_a_login_are_one_user(bench: Bench) -> None:
    assert "of user 'anonymous'" in str(prepare_all(bench, "")[1])


def test_an_ended_branch_counts_no_more(bench: Bench) -> None:
    xids, _ = prepare_all(bench, "mallory")
    for xid, ending in zip(xids, (Ending.COMMITTED, Ending.ROLLED_BACK, Ending.FORCED_ROLLBACK), strict=True):
        branches.end(bench.engine, xid, ending, lambda: None)
        bench.broker.settle()
    assert used(bench) == (0, 0, {}, {})
    bench.crash()
    assert used(bench) == (0, 0, {}, {})


@pytest.mark.interpreted
@pytest.mark.parametrize(("limit", "size", "unit"), [("PREPARED_MAX", 1, "branches"), ("PREPARED_BYTES_MAX", 2_000, "bytes")])
def test_a_user_has_all_branches_while_others_have_none(monkeypatch: pytest.MonkeyPatch, limit: str, size: int, unit: str) -> None:
    bench, most = Bench(Policy()), 20 * size
    monkeypatch.setattr(prepared_use, limit, most)
    xids, refusal = prepare_all(bench, "app", "x" * size)
    assert 17 <= len(xids) <= 20
    assert f"prepared branches may have {most} {unit}" in str(refusal)
    for _ in range(4):  # users with little have a spare quarter
        prepare(bench, "alice", next(NUMBERS), "x" * size)
    for xid in xids:
        branches.end(bench.engine, xid, Ending.ROLLED_BACK, lambda: None)
    bench.broker.settle()
    xids, refusal = prepare_all(bench, "app", "x" * size)
    assert 9 <= len(xids) <= 11
    text = f"the prepared branches of user 'app', while others have some and less than a quarter is free, may have {most // 2} {unit}"
    assert text in str(refusal)


def test_a_first_branch_is_taken_whatever_its_size() -> None:
    use = prepared_use.PreparedUse()
    assert use.refusal("ann", 1 << 40, 1 << 20, UNLIMITED) is None
