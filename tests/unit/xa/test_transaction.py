"""Transactions as an application sees them: outcomes, the current transaction, timeouts, and outcomes that resources get later."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bascule.core.errors import InvalidInput, Unavailable
from bascule.testing.xa import Checked, ModelLog, ModelResource
from bascule.xa import (
    HeuristicOutcome,
    Transaction,
    TransactionInDoubt,
    TransactionManager,
    TransactionRolledBack,
    TransactionTimedOut,
    retries,
)
from bascule.xa import manager as module
from bascule.xa.blocking import now_ms
from bascule.xa.errors import BranchRolledBack, Code, NoTransaction, OutOfOrder, ResourceError, ResourceFailed, UnknownXid
from bascule.xa.file_log import FileLog
from bascule.xa.log import Outcome
from bascule.xa.plan import Action
from bascule.xa.two_phase import TransactionStatus
from bascule.xa.xid import branch, deadline_ms_of, new_gtrid
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS


class Down:
    """Watches models; the calls listed in ``calls`` fail."""

    def __init__(self) -> None:
        self.calls: dict[str, Exception] = {}
        self.seen: list[str] = []

    def __call__(self, point: str) -> None:
        self.seen.append(point)
        if point in self.calls:
            raise self.calls[point]


@pytest.fixture
def down() -> Down:
    return Down()


@pytest.fixture
def one(down: Down) -> ModelResource:
    return ModelResource("one", watch=down)


@pytest.fixture
def two(down: Down) -> ModelResource:
    return ModelResource("two", watch=down)


@pytest.fixture
def log(down: Down) -> ModelLog:
    return ModelLog(watch=down)


@pytest.fixture
def manager(log: ModelLog, one: ModelResource, two: ModelResource) -> Iterator[TransactionManager]:
    with TransactionManager("shop", log, [one, two]) as manager:
        yield manager


def spend(transaction: Transaction, *resources: ModelResource, then: Callable[[], None] = lambda: None) -> None:
    with transaction:
        for resource in resources:
            transaction.enlist(resource).append("a" if resource.name == "one" else "b")
        then()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.01)


def test_work_in_with_block_is_committed_in_all_resources(manager: TransactionManager, one: ModelResource, two: ModelResource) -> None:
    with manager.begin() as transaction:
        transaction.enlist(one).append("a")
        manager.enlist(two).append("b")
        manager.enlist(one).append("c")
    assert transaction.status is TransactionStatus.COMMITTED
    assert (one.durable.committed, two.durable.committed) == (["a", "c"], ["b"])


def test_gtrid_contains_deadline_of_transaction(manager: TransactionManager) -> None:
    before_ms = now_ms()
    with manager.begin(timeout_s=40) as transaction:
        assert before_ms + 40_000 <= deadline_ms_of(transaction.gtrid) <= now_ms() + 40_000


def test_exception_in_with_block_rolls_back_and_propagates(manager: TransactionManager, one: ModelResource, two: ModelResource) -> None:
    def fail() -> None:
        raise KeyError("mine")

    transaction = manager.begin()
    with pytest.raises(KeyError, match="mine"):
        spend(transaction, one, two, then=fail)
    assert transaction.status is TransactionStatus.ROLLED_BACK
    assert one.durable.committed == two.durable.committed == []


def test_no_vote_of_resource_rolls_back_all_resources_with_reason(
    manager: TransactionManager, one: ModelResource, two: ModelResource
) -> None:
    two.vote = "no"
    with pytest.raises(TransactionRolledBack, match="XA_RBROLLBACK: two votes no"):
        spend(manager.begin(), one, two)
    assert one.durable.prepared == {}
    assert one.durable.committed == []


def test_single_resource_commits_in_one_phase_without_log(manager: TransactionManager, one: ModelResource, down: Down) -> None:
    with manager.begin() as transaction:
        transaction.enlist(one).append("a")
    assert "one.prepare.before" not in down.seen
    assert "log.decide.before" not in down.seen
    assert one.durable.committed == ["a"]


def test_last_resource_after_read_only_votes_commits_in_one_phase(
    manager: TransactionManager, one: ModelResource, two: ModelResource, down: Down
) -> None:
    one.vote = "read-only"
    with manager.begin() as transaction:
        transaction.enlist(one)
        transaction.enlist(two).append("b")
    assert "two.prepare.before" not in down.seen
    assert "log.decide.before" not in down.seen
    assert two.durable.committed == ["b"]


def test_rollback_writes_no_log_entry(manager: TransactionManager, one: ModelResource, two: ModelResource, down: Down) -> None:
    transaction = manager.begin()
    transaction.enlist(one)
    transaction.enlist(two)
    transaction.rollback()
    assert "log.decide.before" not in down.seen


def test_ended_transaction_refuses_further_calls(manager: TransactionManager, one: ModelResource) -> None:
    with manager.begin() as transaction:
        pass
    for call in (transaction.commit, transaction.rollback, transaction.set_rollback_only, lambda: transaction.enlist(one)):
        with pytest.raises(OutOfOrder, match="is committed"):
            call()


def test_transaction_marked_for_rollback_does_not_commit(manager: TransactionManager, one: ModelResource) -> None:
    transaction = manager.begin()
    with pytest.raises(TransactionRolledBack, match="marked"):
        spend(transaction, one, then=transaction.set_rollback_only)
    assert one.durable.committed == []


def test_transaction_beyond_timeout_rolls_back(manager: TransactionManager, one: ModelResource, two: ModelResource) -> None:
    transaction = manager.begin(timeout_s=60)
    transaction.enlist(one).append("a")
    transaction._protocol._deadline_s = time.monotonic()
    with pytest.raises(TransactionTimedOut, match="longer than 60 s"):
        transaction.enlist(two)
    with pytest.raises(TransactionRolledBack):
        transaction.commit()
    late = manager.begin(timeout_s=0)
    with pytest.raises(TransactionTimedOut):
        late.enlist(one)
    assert one.durable.committed == []


def test_failed_start_of_branch_rolls_transaction_back(
    manager: TransactionManager, one: ModelResource, two: ModelResource, down: Down
) -> None:
    down.calls["two.start.before"] = ResourceFailed("down")
    transaction = manager.begin()
    with pytest.raises(ResourceFailed):
        spend(transaction, one, two)
    assert transaction.status is TransactionStatus.ROLLED_BACK
    assert one.durable.committed == []


def test_commit_reaches_unavailable_resource_through_recovery(
    manager: TransactionManager, one: ModelResource, two: ModelResource, down: Down, log: ModelLog
) -> None:
    down.calls["two.commit.before"] = ResourceFailed("down")
    with manager.begin() as transaction:
        transaction.enlist(one).append("a")
        transaction.enlist(two).append("b")
    assert transaction.status is TransactionStatus.COMMITTED
    assert transaction.unfinished == {"two": "XAER_RMFAIL: down"}
    assert two.durable.committed == []
    down.calls.clear()
    wait_until(lambda: not (log.durable.decisions))
    assert two.durable.committed == ["b"]
    assert log.durable.decisions == {}


@pytest.mark.parametrize(("point", "committed"), [("log.decide.before", []), ("log.decide.after", ["a"])])
def test_decision_in_doubt_is_reported_and_resolved_when_log_is_back(
    manager: TransactionManager, one: ModelResource, two: ModelResource, down: Down, point: str, committed: list[str]
) -> None:
    down.calls[point] = Unavailable("the disk")
    transaction = manager.begin()
    with pytest.raises(TransactionInDoubt, match="is prepared, and the decision may or may not be stored: the disk"):
        spend(transaction, one, two)
    assert transaction.status is TransactionStatus.IN_DOUBT
    down.calls.clear()
    wait_until(lambda: not (one.durable.prepared or two.durable.prepared))
    assert one.durable.committed == committed
    assert bool(two.durable.committed) is bool(committed)


def test_recovery_ignores_active_transactions_of_same_process(down: Down, one: ModelResource, two: ModelResource, log: ModelLog) -> None:
    def two_passes(point: str) -> None:
        down(point)
        if point == "two.prepare.before":
            passes = down.seen.count("one.recover.after")
            wait_until(lambda: down.seen.count("one.recover.after") > passes + 1)
            assert one.durable.prepared

    two._watch = two_passes
    with TransactionManager("shop", log, [one, two], recovery_interval_s=0.01) as manager:
        spend(manager.begin(), one, two)
    assert (one.durable.committed, two.durable.committed) == (["a"], ["b"])


@pytest.mark.parametrize("call", ["recover", "rollback"])
def test_hanging_resource_blocks_neither_recovery_of_others_nor_close(
    log: ModelLog, one: ModelResource, two: ModelResource, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    hangs, released = threading.Event(), threading.Event()

    def hang(point: str) -> None:
        if point == f"one.{call}.before":
            hangs.set()
            assert released.wait(2 * WAIT_S)

    monkeypatch.setattr(module, "ANSWER_WITHIN_S", 0.1)
    try:
        with TransactionManager("shop", log, [one, two], recovery_interval_s=0.01):
            one._watch = hang
            one.durable.prepared[branch(new_gtrid("shop", 0), "one")] = ["a"]
            two.durable.prepared[branch(new_gtrid("shop", 0), "two")] = ["b"]
            assert hangs.wait(WAIT_S)
            wait_until(lambda: not two.durable.prepared)
        assert one.durable.prepared
    finally:
        released.set()
    wait_until(lambda: call == "recover" or not one.durable.prepared)


def test_driver_exception_stops_neither_recovery_nor_other_resources(
    log: ModelLog, one: ModelResource, two: ModelResource, down: Down
) -> None:
    """A driver may raise any exception, and the recovery thread must not end because of it."""
    with TransactionManager("shop", log, [one, two], recovery_interval_s=0.02) as manager:
        down.calls = {"two.commit.before": ResourceFailed("down"), "one.recover.before": ConnectionResetError("a driver's own")}
        spend(manager.begin(), one, two)
        passes = down.seen.count("one.recover.before")
        wait_until(lambda: down.seen.count("one.recover.before") > passes + 1)
        down.calls["two.commit.before"] = ConnectionResetError("a driver's own")
        tries = down.seen.count("two.commit.before")
        wait_until(lambda: down.seen.count("two.commit.before") > tries + 1)
        del down.calls["two.commit.before"]
        wait_until(lambda: two.durable.committed == ["b"])
        assert manager.recoverer().look().unreachable == {"one": "ConnectionResetError: a driver's own"}


def test_manager_closes_and_reopens_while_recovery_thread_hangs(
    log: ModelLog, one: ModelResource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    hangs, released = threading.Event(), threading.Event()

    def hang(point: str) -> None:
        if point == "log.read.before" and not released.is_set() and threading.current_thread() is not threading.main_thread():
            hangs.set()
            assert released.wait(2 * WAIT_S)

    monkeypatch.setattr(module, "CLOSE_WITHIN_S", 0.1)
    log._watch = hang
    manager = TransactionManager("shop", log, [one], recovery_interval_s=0.01)
    with manager:
        assert hangs.wait(WAIT_S)
        recovery = manager._thread
    assert recovery is not None
    assert "recovery thread still running after close" in caplog.text
    with manager:
        released.set()
        recovery.join(WAIT_S)
        assert not recovery.is_alive()  # although the manager was opened again


def test_one_phase_commit_is_in_doubt_after_lost_answer_and_rolled_back_after_refusal(
    manager: TransactionManager, one: ModelResource, down: Down
) -> None:
    down.calls["one.commit.after"] = ResourceFailed("gone")
    with pytest.raises(TransactionInDoubt), manager.begin() as transaction:
        transaction.enlist(one)
    down.calls["one.commit.after"] = UnknownXid("forgotten")
    with pytest.raises(TransactionInDoubt), manager.begin() as transaction:
        transaction.enlist(one)
    down.calls["one.commit.after"] = ResourceError("no")
    with pytest.raises(TransactionRolledBack), manager.begin() as transaction:
        transaction.enlist(one)


@pytest.mark.parametrize(("code", "split"), [("XA_HEURCOM", False), ("XA_HEURRB", True), ("XA_HEURMIX", True), ("XA_HEURHAZ", True)])
def test_heuristic_outcome_is_recorded_and_raised_if_it_differs_from_decision(
    manager: TransactionManager, one: ModelResource, two: ModelResource, down: Down, log: ModelLog, code: str, split: bool
) -> None:
    def force(point: str) -> None:
        if point == "log.decide.after":
            two.force(next(iter(two.durable.prepared)), Code[code])

    log._watch = force
    transaction = manager.begin()
    transaction.enlist(one).append("a")
    transaction.enlist(two).append("b")
    if split:
        with pytest.raises(HeuristicOutcome) as raised:
            transaction.commit()
        assert raised.value.branches[0].endswith(":two")
        assert raised.value.transaction_id == transaction.id
    else:
        transaction.commit()
    assert one.durable.committed == ["a"]
    (xid,) = log.durable.heuristics
    assert log.durable.heuristics[xid].wanted is Outcome.COMMIT
    steps = manager.recoverer().look().steps
    assert [step.action for step in steps] == [Action.WAIT]  # recovery waits for the operator
    manager.recoverer().forget(xid)
    assert log.durable.heuristics == two.durable.heuristic == {}
    assert manager.recoverer().look().steps == []


def test_resource_of_other_manager_is_refused_at_enlist(manager: TransactionManager, one: ModelResource) -> None:
    with manager.begin() as transaction:
        for stranger in (ModelResource("stranger"), ModelResource("one")):
            with pytest.raises(InvalidInput, match="does not belong to the transaction manager"):
                transaction.enlist(stranger)
        transaction.enlist(one)
        with pytest.raises(InvalidInput):
            transaction.enlist(ModelResource("one"))


def test_each_thread_has_one_current_transaction(manager: TransactionManager, one: ModelResource) -> None:
    with pytest.raises(NoTransaction):
        manager.enlist(one)
    seen = []

    def other() -> None:
        with pytest.raises(NoTransaction):
            seen.append(manager.current)
        with manager.begin() as mine:
            seen.append(manager.current is mine)

    with manager.begin() as transaction:
        assert manager.current is transaction
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with pytest.raises(OutOfOrder, match="do not nest"), manager.begin():
            pass
        with manager.suspended() as aside:
            assert aside is transaction
            with manager.begin() as inner:
                assert manager.current is inner
        assert manager.current is transaction
    assert seen == [True]


def test_each_task_has_its_own_transaction(manager: TransactionManager, one: ModelResource, two: ModelResource) -> None:
    @manager.transactional()
    async def work(number: int) -> None:
        manager.enlist(one).append(f"a{number}")
        await asyncio.sleep(0)
        manager.enlist(two).append(f"b{number}")

    async def main() -> None:
        await asyncio.gather(*(work(number) for number in range(10)))

    asyncio.run(main())
    assert sorted(one.durable.committed) == sorted(f"a{number}" for number in range(10))
    assert sorted(two.durable.committed) == sorted(f"b{number}" for number in range(10))


def test_transactional_function_is_retried_after_rollback(
    manager: TransactionManager, one: ModelResource, two: ModelResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_PAUSE_S", 0.0)
    attempts = []

    @manager.transactional(attempts=3)
    def work() -> str:
        attempts.append(1)
        manager.enlist(one).append("a")
        manager.enlist(two).append("b")
        two.vote = "yes" if len(attempts) == 3 else "no"
        return "done"

    assert work() == "done"
    assert len(attempts) == 3
    assert one.durable.committed == ["a"]


def test_transactional_function_stops_after_attempts_and_is_not_retried_in_doubt(
    manager: TransactionManager, one: ModelResource, down: Down, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_PAUSE_S", 0.0)
    attempts = []

    @manager.transactional(attempts=3)
    def work(error: Exception | None) -> None:
        attempts.append(1)
        manager.enlist(one)
        if error is not None:
            raise error

    with pytest.raises(BranchRolledBack):
        work(BranchRolledBack("as a database would"))
    assert len(attempts) == 3
    with pytest.raises(KeyError):
        work(KeyError("mine"))
    assert len(attempts) == 4
    down.calls["one.commit.after"] = ResourceFailed("gone")
    with pytest.raises(TransactionInDoubt):
        work(None)
    assert len(attempts) == 5


def test_manager_begins_transactions_only_while_open(log: ModelLog, one: ModelResource) -> None:
    manager = TransactionManager("shop", log, [one])
    with pytest.raises(OutOfOrder, match="not open"):
        manager.begin()
    with manager:
        with pytest.raises(OutOfOrder, match="is already open"):
            manager.open()
        with manager.begin():
            pass
    with pytest.raises(OutOfOrder):
        manager.begin()


def test_manager_with_removed_log_begins_no_transactions(tmp_path: Path, one: ModelResource, two: ModelResource) -> None:
    path = tmp_path / "shop.xalog"
    with TransactionManager("shop", FileLog(path), [one, two]) as manager:
        spend(manager.begin(), one, two)
        data = path.read_bytes()
        path.unlink()
        with pytest.raises(TransactionInDoubt, match="was removed"):
            spend(manager.begin(), one, two)
        wait_until(lambda: bool(manager._failures))
        with pytest.raises(Unavailable, match=r"decision log is damaged: .* was removed"):
            manager.begin()
        assert len(one.durable.prepared) == len(two.durable.prepared) == 1
        path.write_bytes(data)
        manager.recover_soon()
        wait_until(lambda: not one.durable.prepared)
    assert (one.durable.committed, two.durable.committed) == (["a"], ["b"])


@pytest.mark.parametrize("name", ["", "a/b", "x" * 32, "ü"])
def test_manager_name_that_does_not_fit_into_xid_is_refused(log: ModelLog, name: str) -> None:
    with pytest.raises(InvalidInput, match="is not a valid name"):
        TransactionManager(name, log, [])


def test_two_resources_with_same_name_are_refused(log: ModelLog) -> None:
    with pytest.raises(InvalidInput, match="names of resources must be unique"):
        TransactionManager("shop", log, [ModelResource("one"), ModelResource("one")])


def test_manager_calls_resources_in_legal_order(log: ModelLog, one: ModelResource, two: ModelResource) -> None:
    first, second = Checked(one), Checked(two)
    with TransactionManager("shop", log, [first, second]) as manager:
        for ending, status in (("commit", TransactionStatus.COMMITTED), ("rollback", TransactionStatus.ROLLED_BACK)):
            transaction = manager.begin()
            transaction.enlist(first)
            transaction.enlist(second)
            getattr(transaction, ending)()
            assert (transaction.status, transaction.unfinished) == (status, {}), "a resource has refused a call"
