"""Waits in a transaction manager: each wait ends, and reports the state that is known at its end."""

from __future__ import annotations

import threading

import pytest

from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import HeuristicOutcome, TransactionManager, TransactionTimedOut
from bascule.xa import manager as managing
from bascule.xa.errors import Code, OutOfOrder, ResourceFailed
from bascule.xa.log import Heuristic, Outcome
from bascule.xa.two_phase import TransactionStatus
from bascule.xa.xid import Xid
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS


class StallingLock:
    """The lock of a transaction. A thread that finds it held and does not wait is delayed here, like a thread that is not scheduled."""

    def __init__(self) -> None:
        self.came, self.released = threading.Event(), threading.Event()
        self._lock = threading.RLock()

    def acquire(self, *, blocking: bool = True) -> bool:
        if self._lock.acquire(blocking=blocking):
            return True
        self.came.set()
        assert self.released.wait(WAIT_S)
        return False

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class OperatorRollsBack:
    """``two`` is unreachable at its commit, and an operator rolls its branch back in one of three ways."""

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


# -- resources that recovery finishes


@pytest.mark.parametrize("how", ["the resource can tell it", "the resource remembers it", "another recoverer has recorded it"])
def test_waiting_commit_raises_heuristic_after_rollback_by_operator(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managing, "FIRST_RETRY_S", 0.01)
    one, operator = ModelResource("one"), OperatorRollsBack(how)
    with TransactionManager("shop", operator.log, [one, operator.two], finish_within_s=WAIT_S) as manager:
        transaction = manager.begin()
        for resource in (one, operator.two):
            transaction.enlist(resource).append("work")
        with pytest.raises(HeuristicOutcome, match=r"is committed, except for: .*two") as raised:
            transaction.commit()
        with pytest.raises(HeuristicOutcome):
            transaction.wait_finished(0)
    assert [Xid.parse(each).bqual for each in raised.value.branches] == [b"two"]
    assert raised.value.transaction_id == transaction.id
    assert transaction.status is TransactionStatus.COMMITTED
    assert (one.durable.committed, operator.two.durable.committed) == (["work"], [])


def test_heuristic_outcome_is_raised_although_other_resource_stays_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
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
        manager.close()  # close waits for the end of the recovery pass
        with pytest.raises(HeuristicOutcome, match="two"):
            transaction.wait_finished(0)
        assert set(transaction.unfinished) == {"one", "two"}


# -- hooks of a transaction


def test_after_completion_hooks_run_in_committing_thread_and_not_in_reaper() -> None:
    committing, begun, lock, called = threading.Event(), threading.Event(), StallingLock(), []

    def watch(point: str) -> None:
        if point == "one.commit.before":
            committing.set()
            assert begun.wait(WAIT_S)
            assert lock.came.wait(WAIT_S)

    def first(_: TransactionStatus) -> None:
        lock.released.set()
        expiring.result(WAIT_S)  # the reaper has finished
        called.append(("first", threading.get_ident()))

    one = ModelResource("one", watch=watch)
    with TransactionManager("shop", ModelLog(), [one]) as manager:
        transaction = manager.begin()
        transaction._lock = lock  # type: ignore[assignment]
        transaction.enlist(one).append("work")
        transaction.after_completion(first)
        transaction.after_completion(lambda _: called.append(("second", threading.get_ident())))

        def commit() -> int:
            transaction.commit()
            return threading.get_ident()

        ending = in_background(commit, "commits")
        assert committing.wait(WAIT_S)
        expiring = in_background(transaction.expire, "expires")
        begun.set()
        thread = ending.result(WAIT_S)
    assert called == [("first", thread), ("second", thread)]


def test_all_after_completion_hooks_run_when_one_is_interrupted() -> None:
    def interrupt(_: TransactionStatus) -> None:
        raise KeyboardInterrupt

    called: list[TransactionStatus] = []
    with TransactionManager("shop", ModelLog(), []) as manager:
        transaction = manager.begin()
        transaction.after_completion(interrupt)
        transaction.after_completion(called.append)
        with pytest.raises(KeyboardInterrupt):
            transaction.commit()
    assert called == [TransactionStatus.COMMITTED]


def test_hook_registered_too_late_is_refused() -> None:
    called: list[str] = []
    with TransactionManager("shop", ModelLog(), []) as manager:
        transaction = manager.begin()

        def after(_: TransactionStatus) -> None:
            transaction.after_completion(lambda _: called.append("by a hook"))  # the manager still calls this hook
            with pytest.raises(OutOfOrder, match="is committed"):
                transaction.before_completion(lambda: called.append("never"))

        transaction.after_completion(after)
        transaction.commit()
        with pytest.raises(OutOfOrder, match="is committed"):
            transaction.after_completion(lambda _: called.append("never"))
        assert called == ["by a hook"]

        expired = manager.begin(timeout_s=0.0)
        expired.expire()
        for register in (expired.before_completion, expired.after_completion):
            with pytest.raises(TransactionTimedOut):
                register(lambda *_: called.append("never"))
    assert called == ["by a hook"]
