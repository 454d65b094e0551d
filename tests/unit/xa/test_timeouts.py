"""Timeouts that are no times, failed threads of a manager, and transactions that run in another process."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from bascule.adapter.inbound.spec import ActivationSpec
from bascule.core.errors import InvalidInput, Unavailable
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionFinding, TransactionManager
from bascule.xa import reaper as reaping
from bascule.xa.aio import AsyncTransactionManager
from bascule.xa.blocking import now_ms
from bascule.xa.errors import ResourceFailed
from bascule.xa.reaper import Reaper
from bascule.xa.transaction import LONGEST_TIMEOUT_S
from bascule.xa.two_phase import TransactionStatus
from bascule.xa.xid import new_gtrid
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for

WAIT_S = 20.0 * SLOWNESS
#: Not times that a transaction can take.
WRONG_S = (math.inf, -math.inf, math.nan, -1.0, 1e300, LONGEST_TIMEOUT_S + 1.0)


@pytest.fixture
def one() -> ModelResource:
    return ModelResource("one")


@pytest.fixture
def manager(one: ModelResource) -> Iterator[TransactionManager]:
    with TransactionManager("shop", ModelLog(), [one]) as manager:
        yield manager


@pytest.mark.parametrize("timeout_s", WRONG_S)
@pytest.mark.parametrize(
    "call",
    [
        lambda manager, timeout_s: manager.begin(timeout_s),
        lambda manager, timeout_s: manager.transactional(timeout_s=timeout_s),
        lambda manager, timeout_s: AsyncTransactionManager(manager).transactional(timeout_s=timeout_s),
        lambda _, timeout_s: TransactionManager("other", ModelLog(), [], timeout_s=timeout_s),
    ],
    ids=["begin", "transactional", "async transactional", "manager"],
)
def test_invalid_timeout_of_transaction_is_refused(
    manager: TransactionManager, call: Callable[[TransactionManager, float], object], timeout_s: float
) -> None:
    with pytest.raises(InvalidInput, match=r"timeout_s=.*; expected 0 to 2147483 seconds"):
        call(manager, timeout_s)
    assert manager.active == 0
    manager.begin().rollback()


def test_longest_timeout_is_accepted(manager: TransactionManager) -> None:
    manager.begin(LONGEST_TIMEOUT_S).rollback()


@pytest.mark.parametrize("name", ["recovery_interval_s", "finish_within_s"])
@pytest.mark.parametrize("seconds", [math.nan, -1.0])
def test_invalid_wait_time_of_manager_is_refused(name: str, seconds: float) -> None:
    arguments: dict[str, Any] = {name: seconds}
    with pytest.raises(InvalidInput, match=f"{name}={seconds}"):
        TransactionManager("shop", ModelLog(), [], **arguments)


def test_commit_may_wait_without_limit_until_all_resources_have_committed() -> None:
    away = threading.Event()

    def watch(point: str) -> None:
        if point == "two.commit.before" and not away.is_set():
            away.set()
            raise ResourceFailed("away")

    one, two = ModelResource("one", watch=watch), ModelResource("two", watch=watch)
    with TransactionManager("shop", ModelLog(), [one, two], finish_within_s=math.inf, recovery_interval_s=math.inf) as manager:
        with manager.begin() as transaction:
            for resource in (one, two):
                transaction.enlist(resource).append("work")
        assert (one.durable.committed, two.durable.committed, transaction.unfinished) == (["work"], ["work"], {})
        assert manager.begin().rollback() is None


def test_wait_for_the_end_of_a_commit_refuses_invalid_times(manager: TransactionManager, one: ModelResource) -> None:
    with manager.begin() as transaction:
        transaction.enlist(one).append("work")
    with pytest.raises(InvalidInput, match="timeout_s=nan"):
        transaction.wait_finished(math.nan)
    assert transaction.wait_finished(math.inf)


def test_endpoint_of_transacted_records_refuses_timeout_longer_than_a_transaction() -> None:
    """Each record would be retried without end, because its transaction cannot begin."""
    xa: Any = type("Xa", (), {"log": type("Log", (), {"group": "shop"})})
    with pytest.raises(InvalidInput, match="delivery_timeout_s=inf"):
        ActivationSpec(topics=("orders",), group="shop", transacted=xa, delivery_timeout_s=math.inf)
    ActivationSpec(topics=("orders",), group="shop", delivery_timeout_s=math.inf)


# -- threads of a manager


def test_very_long_timeout_does_not_stop_timeouts_of_other_transactions(
    manager: TransactionManager, one: ModelResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reaping, "GRACE_S", 0.0)
    endless = manager.begin(timeout_s=LONGEST_TIMEOUT_S)
    manager._reaper.watch(b"beyond any wait", time.monotonic() + 10 * threading.TIMEOUT_MAX, lambda: None)
    abandoned = manager.begin(timeout_s=0.05)
    abandoned.enlist(one).append("kept")
    wait_for(lambda: abandoned.status is TransactionStatus.ROLLED_BACK, "the timeout")
    manager.begin().rollback()
    endless.rollback()


def test_failed_reaper_is_not_forgotten_when_recovery_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = threading.Event()

    def fail(_: Reaper) -> None:
        assert failing.wait(WAIT_S)
        raise RuntimeError("injected")

    monkeypatch.setattr(Reaper, "run", fail)
    log = ModelLog()
    with TransactionManager("shop", log, [], recovery_interval_s=0.01) as manager:
        failing.set()
        wait_for(lambda: manager._failures, "the thread to fail")
        passes = threading.Semaphore(0)
        monkeypatch.setattr(log, "_watch", lambda point: passes.release() if point == "log.read.after" else None)
        for _ in range(6):
            assert passes.acquire(timeout=WAIT_S)
        with pytest.raises(Unavailable, match=r"ends timed-out transactions failed: .*injected"):
            manager.begin()
    monkeypatch.undo()
    with manager:
        manager.begin().rollback()


def test_reaper_tries_again_if_no_thread_can_be_started(
    manager: TransactionManager, one: ModelResource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process may have too many threads for a moment."""
    monkeypatch.setattr(reaping, "GRACE_S", 0.0)
    attempts: list[int] = []

    def start(self: threading.Thread) -> None:
        if self.name == "bascule-xa-expire" and len(attempts) < 2:
            attempts.append(1)
            raise RuntimeError("can't start new thread")
        started(self)

    started = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", start)
    abandoned = manager.begin(0.0)
    wait_for(lambda: abandoned.status is TransactionStatus.ROLLED_BACK, "the timeout")
    assert len(attempts) == 2
    manager.begin().rollback()


# -- transactions of other processes


def test_transaction_of_other_process_is_running_until_its_deadline(one: ModelResource) -> None:
    log = ModelLog()
    with TransactionManager("shop", log, [one], shared=True) as elsewhere, elsewhere.begin() as transaction:
        transaction.enlist(one)
        here = TransactionManager("shop", log, [one], shared=True)
        assert here.outcome(transaction.id).finding is TransactionFinding.RUNNING
        transaction.rollback()
    assert elsewhere.outcome(transaction.id).finding is TransactionFinding.ROLLED_BACK


def test_unknown_transaction_is_not_found_after_its_deadline(manager: TransactionManager) -> None:
    past, future = (new_gtrid("shop", now_ms() + ms).decode() for ms in (-1, 60_000))
    assert manager.outcome(past).finding is TransactionFinding.NOT_FOUND
    assert manager.outcome(future).finding is TransactionFinding.RUNNING
    begun_s = time.monotonic()
    soon = new_gtrid("shop", now_ms() + 200).decode()
    wait_for(lambda: manager.outcome(soon).finding is TransactionFinding.NOT_FOUND, "the deadline")
    assert time.monotonic() - begun_s >= 0.15
