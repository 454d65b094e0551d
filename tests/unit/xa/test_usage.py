"""Uses of transactions: nested functions, tasks, cancellation, forks, and transactions that the application never ends."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import FileLog, Propagation, Transaction, TransactionManager, TransactionRolledBack, TransactionTimedOut, retries
from bascule.xa import reaper as reaping
from bascule.xa.errors import BranchRolledBack, NoTransaction, OutOfOrder, ResourceFailed
from bascule.xa.forks import register_for_forks
from bascule.xa.two_phase import TransactionStatus
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for

#: These tests fork a process with threads on purpose.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
WAIT_S = 20.0 * SLOWNESS
TIMES_OUT_S = 1.0 * SLOWNESS  # much more than the work needs that precedes a timeout


class Gate:
    """Blocks a thread at a point until the test opens the gate."""

    def __init__(self, point: str) -> None:
        self.point = point
        self.reached, self.opened = threading.Event(), threading.Event()
        self.error: Exception | None = None

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.reached.set()
            assert self.opened.wait(WAIT_S)
            if self.error is not None:
                raise self.error


@pytest.fixture
def one() -> ModelResource:
    return ModelResource("one")


@pytest.fixture
def manager(one: ModelResource) -> Iterator[TransactionManager]:
    with TransactionManager("shop", ModelLog(), [one]) as manager:
        yield manager


def wait_until(condition: Callable[[], bool]) -> None:
    wait_for(condition, "the condition", WAIT_S / SLOWNESS)


# -- tasks


def test_task_started_in_transaction_can_begin_its_own_transaction(manager: TransactionManager, one: ModelResource) -> None:
    seen: list[bool] = []

    async def child(over: asyncio.Event) -> None:
        seen.append(manager.current.id == parent_id[0])  # the child has the parent's transaction until it begins its own
        async with manager.begin() as transaction:
            seen.append(manager.current is transaction)
            transaction.enlist(one).append("while the parent is at work")
        await over.wait()
        with pytest.raises(NoTransaction):
            manager.current  # noqa: B018 - it raises
        async with manager.begin():
            manager.enlist(one).append("when the parent is over")

    parent_id: list[str] = []

    async def main() -> None:
        over = asyncio.Event()
        async with manager.begin() as parent:
            parent_id.append(parent.id)
            task = asyncio.create_task(child(over))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            with pytest.raises(OutOfOrder, match="do not nest"):
                async with manager.begin():
                    pass
            manager.enlist(one).append("parent")
        over.set()
        await task

    asyncio.run(main())
    assert seen == [True, True]
    assert sorted(one.durable.committed) == ["parent", "when the parent is over", "while the parent is at work"]


@pytest.mark.parametrize("fails", [False, True])
def test_cancellation_is_raised_after_commit_has_ended_with_async_with(fails: bool) -> None:
    gate = Gate("one.commit.before")
    gate.error = ResourceFailed("gone") if fails else None
    one = ModelResource("one", watch=gate)
    transactions: list[Transaction] = []

    async def work(manager: TransactionManager) -> None:
        async with manager.begin() as transaction:
            transactions.append(transaction)
            transaction.enlist(one).append("work")

    async def main() -> BaseException | None:
        with TransactionManager("shop", ModelLog(), [one]) as manager:
            task = asyncio.create_task(work(manager))
            await asyncio.to_thread(gate.reached.wait, WAIT_S)
            for _ in range(3):
                task.cancel()
                await asyncio.sleep(0)
                assert not task.done()
            gate.opened.set()
            with pytest.raises(asyncio.CancelledError) as raised:
                await task
            return raised.value.__cause__

    cause = asyncio.run(main())
    assert transactions[0].status is (TransactionStatus.IN_DOUBT if fails else TransactionStatus.COMMITTED)
    assert ("in one" in str(cause)) if fails else (cause is None)
    assert one.durable.committed == ([] if fails else ["work"])


# -- propagation


@pytest.mark.parametrize(
    ("propagation", "inside", "outside"),
    [
        (Propagation.REQUIRED, "caller's", "new"),
        (Propagation.REQUIRES_NEW, "new", "new"),
        (Propagation.MANDATORY, "caller's", NoTransaction),
        (Propagation.SUPPORTS, "caller's", "none"),
        (Propagation.NOT_SUPPORTED, "none", "none"),
        (Propagation.NEVER, OutOfOrder, "none"),
    ],
)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_function_runs_in_transaction_that_propagation_requires(
    manager: TransactionManager, propagation: Propagation, inside: Any, outside: Any, asynchronous: bool
) -> None:
    def seen() -> Transaction | None:
        try:
            return manager.current
        except NoTransaction:
            return None

    plain = manager.transactional(propagation=propagation)(seen)

    @manager.transactional(propagation=propagation)
    async def in_task() -> Transaction | None:
        return seen()

    def call(caller: Transaction | None) -> str:
        found = asyncio.run(in_task()) if asynchronous else plain()
        return "none" if found is None else "caller's" if found is caller else "new"

    def check(wanted: Any, caller: Transaction | None) -> None:
        if isinstance(wanted, str):
            assert call(caller) == wanted
        else:
            with pytest.raises(wanted):
                call(caller)
        assert seen() is caller

    check(outside, None)
    with manager.begin() as caller:
        check(inside, caller)
    assert caller.status is TransactionStatus.COMMITTED


def test_nested_transactional_function_joins_transaction_of_caller(manager: TransactionManager, one: ModelResource) -> None:
    @manager.transactional()
    def inner() -> None:
        manager.enlist(one).append("inner")

    @manager.transactional()
    def outer() -> None:
        inner()
        manager.enlist(one).append("outer")
        assert one.durable.committed == []

    outer()
    assert one.durable.committed == ["inner", "outer"]


def test_caller_cannot_commit_after_failure_in_joined_function(manager: TransactionManager, one: ModelResource) -> None:
    @manager.transactional(attempts=5)
    def inner() -> None:
        attempts.append(1)
        manager.enlist(one).append("half")
        raise TransactionRolledBack("as if by a resource")

    def outer() -> None:
        with manager.begin(), suppress(TransactionRolledBack):
            inner()

    attempts: list[int] = []
    with pytest.raises(TransactionRolledBack, match="marked for rollback"):
        outer()
    assert (attempts, one.durable.committed) == ([1], [])


# -- hooks


def test_hooks_run_before_and_after_completion(manager: TransactionManager, one: ModelResource) -> None:
    seen: list[object] = []
    with manager.begin() as transaction:
        transaction.before_completion(lambda: transaction.enlist(one).append("late"))
        transaction.before_completion(lambda: seen.append(manager.current is transaction))
        transaction.after_completion(seen.append)
        transaction.after_completion(lambda _: 1 / 0)  # the manager logs the error
        transaction.after_completion(seen.append)
    assert seen == [True, TransactionStatus.COMMITTED, TransactionStatus.COMMITTED]
    assert one.durable.committed == ["late"]


def test_failed_before_completion_hook_rolls_back(manager: TransactionManager, one: ModelResource) -> None:
    def fail() -> None:
        raise ValueError("mine")

    seen: list[object] = []
    transaction = manager.begin()
    transaction.enlist(one).append("work")
    transaction.before_completion(fail)
    transaction.after_completion(seen.append)
    with pytest.raises(TransactionRolledBack, match="a before_completion hook failed: mine"):
        transaction.commit()
    assert (one.durable.committed, seen) == ([], [TransactionStatus.ROLLED_BACK])


def test_interrupt_in_before_completion_hook_rolls_back_and_propagates(manager: TransactionManager, one: ModelResource) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    transaction = manager.begin()
    transaction.enlist(one).append("work")
    transaction.before_completion(interrupt)
    with pytest.raises(KeyboardInterrupt):
        transaction.commit()
    assert (transaction.status, one.durable.committed) == (TransactionStatus.ROLLED_BACK, [])


# -- abandoned transactions


def test_abandoned_transaction_is_rolled_back_after_timeout(
    manager: TransactionManager, one: ModelResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaping, "GRACE_S", 0.0)
    abandoned = manager.begin(timeout_s=TIMES_OUT_S)
    abandoned.enlist(one).append("kept")
    wait_until(lambda: abandoned.status is TransactionStatus.ROLLED_BACK)
    assert one._active == {}
    wait_until(lambda: not manager._live)


def test_application_that_returns_after_timeout_gets_transaction_timed_out(
    manager: TransactionManager, one: ModelResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaping, "GRACE_S", 0.0)

    def work(error: Exception | None) -> None:
        with manager.begin(timeout_s=TIMES_OUT_S) as transaction:
            transaction.enlist(one).append("work")
            wait_until(lambda: transaction.status is TransactionStatus.ROLLED_BACK)
            with pytest.raises(TransactionTimedOut):
                transaction.enlist(one)
            with pytest.raises(TransactionTimedOut):
                transaction.commit()
            transaction.rollback()
            if error is not None:
                raise error

    with pytest.raises(TransactionTimedOut):
        work(None)
    with pytest.raises(KeyError):
        work(KeyError("mine"))
    assert one.durable.committed == []


def test_running_commit_beyond_timeout_is_not_rolled_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reaping, "GRACE_S", 0.01)
    gate = Gate("one.commit.before")
    one = ModelResource("one", watch=gate)
    with TransactionManager("shop", ModelLog(), [one]) as manager:
        transaction = manager.begin(timeout_s=TIMES_OUT_S)
        transaction.enlist(one).append("work")
        thread = threading.Thread(target=transaction.commit)
        thread.start()
        assert gate.reached.wait(WAIT_S)
        wait_until(lambda: time.monotonic() > transaction.deadline_s + 0.1)
        gate.opened.set()
        thread.join(WAIT_S)
    assert transaction.status is TransactionStatus.COMMITTED


def test_refused_nested_begin_registers_no_transaction(manager: TransactionManager) -> None:
    with manager.begin() as transaction:
        with pytest.raises(OutOfOrder, match="do not nest"), manager.begin():
            pass
        assert list(manager._live) == [transaction.gtrid]


def test_transactional_coroutine_is_retried_after_rollback_and_stops_after_attempts(
    manager: TransactionManager, one: ModelResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "RETRY_PAUSE_S", 0.0)
    attempts: list[int] = []

    @manager.transactional(attempts=3)
    async def work(succeeds_at: int) -> str:
        attempts.append(1)
        manager.enlist(one).append(f"attempt {len(attempts)}")
        if len(attempts) < succeeds_at:
            raise BranchRolledBack("as a database would")
        return "done"

    assert asyncio.run(work(2)) == "done"
    assert one.durable.committed == ["attempt 2"]
    attempts.clear()
    with pytest.raises(BranchRolledBack):
        asyncio.run(work(4))
    assert len(attempts) == 3
    assert one.durable.committed == ["attempt 2"]


def test_unopened_manager_can_be_closed_and_then_opened(one: ModelResource) -> None:
    manager = TransactionManager("shop", ModelLog(), [one])
    manager.close()
    with manager, manager.begin() as transaction:
        transaction.enlist(one).append("a")
    assert one.durable.committed == ["a"]


def test_ended_transaction_does_not_expire(manager: TransactionManager, one: ModelResource) -> None:
    with manager.begin() as transaction:
        transaction.enlist(one).append("a")
    transaction.expire()
    assert transaction.status is TransactionStatus.COMMITTED
    with pytest.raises(OutOfOrder):  # not an error about its timeout
        transaction.enlist(one)


# -- fork


class Forked:
    """A forked child process that runs ``work``. ``result`` returns the value that ``work`` returned."""

    def __init__(self, work: Callable[[], object]) -> None:
        context = multiprocessing.get_context("fork")
        self._answers = context.Queue()

        def run() -> None:
            try:
                self._answers.put(work())
            except BaseException as error:
                self._answers.put(repr(error))

        self.process = context.Process(target=run)
        self.process.start()

    def result(self) -> object:
        answer = self._answers.get(timeout=WAIT_S)
        self.process.join(WAIT_S)
        assert self.process.exitcode == 0
        return answer


def test_forked_child_opens_manager_for_itself_and_parent_continues(tmp_path: Path) -> None:
    one, two = ModelResource("one"), ModelResource("two")
    manager = TransactionManager("shop", FileLog(tmp_path / "shop.xalog"), [one, two])

    def pay() -> int:
        with manager.begin(timeout_s=WAIT_S) as transaction:
            for resource in (one, two):
                transaction.enlist(resource).append("paid")
        return len(two.durable.committed)

    def child() -> object:
        try:
            manager.begin()
        except OutOfOrder as error:
            closed = str(error)
        with manager:
            return closed, pay(), f"/{os.getpid()}." in manager._by

    with manager:
        assert pay() == 1
        closed, paid, by = Forked(child).result()  # type: ignore[misc]
        assert "is not open" in closed
        assert (paid, by) == (2, True)
        assert pay() == 2


def test_forked_child_does_not_wait_for_lock_held_by_thread_of_parent() -> None:
    gate = Gate("one.prepare.before")
    one, two = ModelResource("one", watch=gate), ModelResource("two")
    with TransactionManager("shop", ModelLog(), [one, two]) as manager:
        transaction = manager.begin()
        for resource in (one, two):
            transaction.enlist(resource).append("parent")
        committing = in_background(transaction.commit, "commits")
        assert gate.reached.wait(WAIT_S)

        def child() -> object:
            result = []
            for call in (transaction.commit, transaction.rollback, transaction.set_rollback_only, lambda: transaction.enlist(one)):
                try:
                    call()
                except OutOfOrder as error:
                    result.append("which forked this process" in str(error))
            return result

        try:
            assert Forked(child).result() == [True] * 4
        finally:
            gate.opened.set()
        committing.result(WAIT_S)
    assert one.durable.committed == two.durable.committed == ["parent"]


def test_forked_child_cannot_end_transaction_of_parent(manager: TransactionManager, one: ModelResource) -> None:
    with manager.begin() as transaction:
        transaction.enlist(one).append("parent")

        def child() -> object:
            result = []
            for call in (transaction.commit, transaction.rollback, lambda: transaction.enlist(one), lambda: manager.current):
                try:
                    call()
                    result.append("done")
                except (OutOfOrder, NoTransaction) as error:
                    result.append(type(error).__name__)
            try:
                transaction.__exit__(None, None, None)
            except OutOfOrder:
                result.append("refused")
            return result

        assert Forked(child).result() == ["OutOfOrder"] * 3 + ["NoTransaction", "refused"]
    assert one.durable.committed == ["parent"]


class Refusing:
    forgets = 0

    def after_fork(self) -> None:
        self.forgets += 1
        raise OSError("refused")


def test_forked_child_resets_every_registered_object_although_some_fail() -> None:
    parts = [Refusing() for _ in range(3)]
    for each in parts:
        register_for_forks(each)
    assert Forked(lambda: [each.forgets for each in parts]).result() == [1, 1, 1]


def test_fork_during_decision_does_not_keep_log_locked_in_child(tmp_path: Path) -> None:
    """The child inherits the locked file, which would stay locked until the child ends."""
    log, forked = FileLog(tmp_path / "shop.xalog"), []
    log.read()
    release = multiprocessing.get_context("fork").Event()
    catch_up = log._catch_up

    def fork_there() -> None:
        catch_up()
        if not forked:
            forked.append(Forked(lambda: release.wait(WAIT_S)))

    log._catch_up = fork_there  # type: ignore[method-assign]
    log.read()
    assert FileLog(tmp_path / "shop.xalog").read().log_id == log.read().log_id
    release.set()
    assert forked[0].result() is True
