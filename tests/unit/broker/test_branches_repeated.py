"""Repeated and contradicting requests for prepared branches, and their answers."""

from __future__ import annotations

import pytest

from bascule.broker import branches
from bascule.broker import snapshot as snapshots
from bascule.broker.errors import BranchBusy, BranchExists, UnknownBranch
from bascule.core.errors import TransactionRolledBack
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from tests.unit.broker.branch_work import OTHER, XID, Work, work
from tests.unit.broker.conftest import Bench

__all__ = ["work"]  # fixtures


@pytest.mark.parametrize("ending", [Ending.COMMITTED, Ending.ROLLED_BACK])
@pytest.mark.parametrize("crash", [False, True])
def test_a_repeated_end_is_answered_with_the_outcome_of_the_branch(work: Work, ending: Ending, crash: bool) -> None:
    work.prepared()
    work.end(ending)
    work.bench.broker.settle()
    if crash:
        work.bench.broker.take_snapshot()
        work.bench.broker.settle()
        work.bench.crash()
    with pytest.raises(UnknownBranch) as caught:
        work.end(ending)
    assert caught.value.ending is ending
    assert work.answers == [True, ending]


def test_two_concurrent_commits_are_both_answered_when_the_first_is_stored(work: Work) -> None:
    work.prepared()
    work.end(Ending.COMMITTED)
    work.end(Ending.COMMITTED)
    with pytest.raises(BranchBusy):
        work.end(Ending.ROLLED_BACK)
    work.bench.broker.flush()
    assert work.answers == [True]
    work.bench.broker.settle()
    assert work.answers == [True, Ending.COMMITTED, Ending.COMMITTED]
    assert work.where() == ([], ["bill"])


def test_a_prepare_that_arrives_after_its_rollback_fails(work: Work) -> None:
    with pytest.raises(UnknownBranch) as caught:
        work.end(Ending.ROLLED_BACK)
    assert caught.value.ending is None
    with pytest.raises(TransactionRolledBack, match="rolled back"):
        work.prepare()
    assert work.bench.got(work.fresh()) == ["order"]


def test_repeated_prepare_is_answered_without_transaction(work: Work) -> None:
    work.prepared()
    branches.prepare(work.bench.engine, None, XID, "client", work.answers.append)
    assert work.answers == [True, True]
    with pytest.raises(TransactionRolledBack, match="ended with its connection"):
        branches.prepare(work.bench.engine, None, OTHER, "client", work.answers.append)
    with pytest.raises(TransactionRolledBack):  # the late first request
        branches.prepare(work.bench.engine, work.bench.engine.begin(b"2"), OTHER, "client", work.answers.append)


def test_prepare_of_second_transaction_with_same_xid_is_refused(work: Work) -> None:
    work.prepared()
    second = work.bench.engine.begin(b"2")
    work.bench.put("second", to="out", transaction=second)
    with pytest.raises(TransactionRolledBack) as caught:
        branches.prepare(work.bench.engine, second, XID, "client", work.answers.append)
    assert caught.value.condition == BranchExists.condition
    assert work.bench.engine.transactions == {}


def test_one_phase_commit_is_remembered_after_crash(work: Work) -> None:
    branches.commit_one_phase(work.bench.engine, work.transaction, XID, work.answers.append)
    work.bench.broker.settle()
    assert work.answers == [None]
    work.bench.crash()
    assert work.where() == ([], ["bill"])
    with pytest.raises(UnknownBranch) as caught:
        work.end(Ending.ROLLED_BACK)
    assert caught.value.ending is Ending.COMMITTED


def test_a_request_about_a_one_phase_commit_that_is_being_stored_is_answered_busy(work: Work) -> None:
    branches.commit_one_phase(work.bench.engine, work.transaction, XID, work.answers.append)
    with pytest.raises(BranchBusy):
        work.end(Ending.ROLLED_BACK)
    work.bench.broker.take_snapshot()
    assert not snapshots.decode(next(iter(work.bench.broker.snapshots.values()))).branches
    work.bench.broker.settle()
    with pytest.raises(UnknownBranch) as caught:
        work.end(Ending.ROLLED_BACK)
    assert caught.value.ending is Ending.COMMITTED


def test_repeated_one_phase_commit_is_answered_without_transaction(work: Work) -> None:
    branches.commit_one_phase(work.bench.engine, work.transaction, XID, work.answers.append)
    work.bench.broker.settle()
    branches.commit_one_phase(work.bench.engine, None, XID, work.answers.append)
    assert work.answers == [None, None]
    with pytest.raises(TransactionRolledBack):
        branches.commit_one_phase(work.bench.engine, None, OTHER, work.answers.append)


def test_a_one_phase_commit_repeated_before_it_is_stored_is_answered_once_it_is_stored(work: Work) -> None:
    branches.commit_one_phase(work.bench.engine, work.transaction, XID, work.answers.append)
    work.bench.broker.flush()
    branches.commit_one_phase(work.bench.engine, None, XID, work.answers.append)
    assert work.answers == []
    work.bench.broker.settle()
    assert work.answers == [None, None]
    assert work.where() == ([], ["bill"])


@pytest.mark.parametrize("ending", [None, Ending.FORCED_ROLLBACK, Ending.COMMITTED])
def test_a_one_phase_commit_with_the_xid_of_another_branch_leaves_that_branch_alone(work: Work, ending: Ending | None) -> None:
    """``ending`` is the state of the other branch: prepared, ended by an administrator, or being stored as a one-phase commit."""
    engine = work.bench.engine
    second = engine.begin(b"2")
    work.bench.put("second", to="out", transaction=second)
    if ending is Ending.COMMITTED:
        branches.commit_one_phase(engine, work.transaction, XID, work.answers.append)
    else:
        work.prepared()
        if ending is not None:
            work.end(ending)
            work.bench.broker.settle()
    with pytest.raises(TransactionRolledBack) as caught:
        branches.commit_one_phase(engine, second, XID, work.answers.append)
    assert caught.value.condition == BranchExists.condition
    assert engine.transactions == {}
    work.bench.broker.settle()
    work.bench.crash()
    assert work.listed() == ([] if ending is Ending.COMMITTED else [XID])
    assert "second" not in work.where()[1]


@pytest.mark.parametrize("ending", [None, Ending.COMMITTED])
def test_a_prepared_branch_survives_a_request_that_names_a_transaction_that_is_gone(work: Work, ending: Ending | None) -> None:
    engine = work.prepared().bench.engine
    if ending is not None:
        work.end(ending)
        work.bench.broker.flush()  # the commit is not stored
    for ask in (
        lambda: branches.commit_one_phase(engine, None, XID, work.answers.append),
        *([lambda: branches.prepare(engine, None, XID, "client", work.answers.append)] if ending is not None else []),
    ):
        with pytest.raises(TransactionRolledBack) as caught:
            ask()
        assert caught.value.condition == BranchExists.condition
    work.bench.broker.take_snapshot()
    work.bench.broker.flush()
    work.bench.crash(stored=0 if ending is not None else len(work.bench.broker.in_flight))
    assert work.listed() == [XID]


def test_a_one_phase_commit_that_arrives_after_its_rollback_fails(work: Work) -> None:
    with pytest.raises(UnknownBranch):
        work.end(Ending.ROLLED_BACK)
    with pytest.raises(TransactionRolledBack):
        branches.commit_one_phase(work.bench.engine, work.transaction, XID, work.answers.append)
    work.bench.broker.settle()
    assert work.where()[1] == []


def commit_some(bench: Bench, *names: bytes) -> None:
    for name in names:
        bench.put("message", to="out", transaction=(transaction := bench.engine.begin(b"1")))
        branches.commit_one_phase(bench.engine, transaction, Xid(7, name, b""), lambda _: None)
        bench.broker.settle()


def asked_for_rollback(bench: Bench, name: bytes, since: int | None) -> UnknownBranch:
    with pytest.raises(UnknownBranch) as raised:
        branches.end(bench.engine, Xid(7, name, b""), Ending.ROLLED_BACK, lambda: None, since)
    return raised.value


@pytest.mark.parametrize("crash", [False, True])
def test_commit_that_the_broker_may_have_forgotten_is_never_reported_as_rolled_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, crash: bool
) -> None:
    monkeypatch.setattr(branches, "ENDED_MAX", 2)
    before = bench.engine.journaling.confirmed_sequence
    commit_some(bench, b"a", b"b", b"c")
    if crash:
        bench.crash()
    for _ in range(2):
        assert asked_for_rollback(bench, b"a", before).forgotten
        assert asked_for_rollback(bench, b"a", None).forgotten
        with pytest.raises(UnknownBranch) as raised:
            branches.commit_one_phase(bench.engine, None, Xid(7, b"a", b""), lambda _: None, before)
        assert raised.value.forgotten
    assert asked_for_rollback(bench, b"c", before).ending is Ending.COMMITTED


def test_commit_that_did_not_arrive_is_rolled_back_although_older_ones_are_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "ENDED_MAX", 2)
    commit_some(bench, b"a", b"b", b"c")
    since = bench.engine.journaling.confirmed_sequence
    commit_some(bench, b"d")
    error = asked_for_rollback(bench, b"lost", since)
    assert (error.forgotten, error.ending) == (False, None)
    with pytest.raises(TransactionRolledBack):
        branches.commit_one_phase(bench.engine, None, Xid(7, b"other", b""), lambda _: None, since)


def test_branch_refused_while_in_doubt_cannot_be_prepared_or_committed_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "ENDED_MAX", 1)
    commit_some(bench, b"a", b"b")
    asked_for_rollback(bench, b"late", None)
    for _ in range(2):
        bench.put("message", to="out", transaction=(transaction := bench.engine.begin(b"1")))
        with pytest.raises(TransactionRolledBack):
            branches.commit_one_phase(bench.engine, transaction, Xid(7, b"late", b""), lambda _: None)


def test_snapshot_records_that_commits_were_forgotten(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(branches, "ENDED_MAX", 2)
    commit_some(bench, b"a", b"b", b"c")
    bench.broker.take_snapshot()
    bench.broker.settle()
    bench.crash()
    assert asked_for_rollback(bench, b"a", None).forgotten
    since = bench.engine.journaling.confirmed_sequence
    commit_some(bench, b"d")
    assert not asked_for_rollback(bench, b"lost", since).forgotten


@pytest.mark.parametrize("forgotten_before", [False, True])
@pytest.mark.parametrize("sends_since", [False, True])
def test_commit_after_forgotten_refusal_is_rolled_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, forgotten_before: bool, sends_since: bool
) -> None:
    monkeypatch.setattr(branches, "ENDED_MAX", 2)
    since = bench.engine.journaling.confirmed_sequence if sends_since else None
    late = bench.engine.begin(b"late")
    bench.put("message", to="out", transaction=late)
    if forgotten_before:
        commit_some(bench, b"a", b"b", b"c")
    asked_for_rollback(bench, b"late", since)
    commit_some(bench, b"d", b"e", b"f")
    for each in (b"x", b"y", b"z"):
        asked_for_rollback(bench, each, None)
    with pytest.raises(TransactionRolledBack):
        branches.commit_one_phase(bench.engine, late, Xid(7, b"late", b""), lambda _: None, since)
    bench.engine.journaling.after_barrier(lambda: None)  # like each answer about an unknown branch
    bench.broker.settle()
    now = bench.engine.journaling.confirmed_sequence
    bench.put("message", to="out", transaction=(young := bench.engine.begin(b"young")))
    branches.commit_one_phase(bench.engine, young, Xid(7, b"young", b""), lambda _: None, now if sends_since else None)
    bench.broker.settle()
    assert bench.engine.branches.ended[Xid(7, b"young", b"")] is Ending.COMMITTED


def test_commit_of_a_young_transaction_is_carried_out_whatever_older_position_its_client_knows(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is never older than its transaction. The last answer that a client has got may be hours old."""
    monkeypatch.setattr(branches, "ENDED_MAX", 2)
    since = bench.engine.journaling.confirmed_sequence
    asked_for_rollback(bench, b"lost", since)
    commit_some(bench, b"a", b"b", b"c")
    bench.put("message", to="out", transaction=(young := bench.engine.begin(b"young")))
    branches.commit_one_phase(bench.engine, young, Xid(7, b"young", b""), lambda _: None, since)
    bench.broker.settle()
    assert bench.engine.branches.ended[Xid(7, b"young", b"")] is Ending.COMMITTED
