"""Branches prepare in parallel, and branches of equal priority commit in parallel. The commit waits for all of them."""

from __future__ import annotations

import threading

import pytest

from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa import manager as managing
from bascule.xa.errors import ResourceFailed
from bascule.xa.resource import CommitPriority
from tests.support.speed import SLOWNESS

WAIT_S = 20.0 * SLOWNESS


class Rendezvous:
    """Blocks threads at the points until each point was reached."""

    def __init__(self, *points: str) -> None:
        self._points = points
        self._barrier = threading.Barrier(len(points))

    def __call__(self, point: str) -> None:
        if point in self._points:
            self._barrier.wait(WAIT_S)


def work(manager: TransactionManager, *resources: ModelResource) -> None:
    with manager.begin() as transaction:
        for resource in resources:
            transaction.enlist(resource).append("work")


@pytest.mark.parametrize("phase", ["prepare", "commit"])
def test_parallel_branches_run_prepare_and_commit_concurrently(phase: str) -> None:
    meeting = Rendezvous(f"one.{phase}.before", f"two.{phase}.before", f"three.{phase}.before")
    resources = [ModelResource(name, watch=meeting) for name in ("one", "two", "three")]
    with TransactionManager("shop", ModelLog(), resources, parallel=True) as manager:
        work(manager, *resources)
    assert [each.durable.committed for each in resources] == [["work"]] * 3


def test_parallel_commit_starts_after_all_prepares_and_decision_and_respects_priorities() -> None:
    seen: list[str] = []
    one, two, last = (ModelResource(name, watch=seen.append) for name in ("one", "two", "last"))
    last.priority = CommitPriority.JMS
    with TransactionManager("shop", ModelLog(watch=seen.append), [last, one, two], parallel=True) as manager:
        work(manager, last, one, two)
    names = ("one", "two", "last")
    decided = seen.index("log.decide.before")
    assert all(seen.index(f"{name}.prepare.after") < decided for name in names)
    assert all(seen.index(f"{name}.commit.before") > seen.index("log.decide.after") for name in names)
    assert max(seen.index(f"{name}.commit.after") for name in ("one", "two")) < seen.index("last.commit.before")


def test_parallel_rollback_waits_for_all_votes_after_one_no() -> None:
    meeting = Rendezvous("slow.prepare.before", "refusing.prepare.before")
    slow, refusing = ModelResource("slow", watch=meeting), ModelResource("refusing", watch=meeting)
    refusing.vote = "no"
    with TransactionManager("shop", ModelLog(), [slow, refusing], parallel=True) as manager, pytest.raises(TransactionRolledBack):
        work(manager, slow, refusing)
    assert slow.durable.committed == refusing.durable.committed == []
    assert slow.durable.prepared == {}


def test_commit_waits_until_recovery_has_finished_unavailable_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(managing, "FIRST_RETRY_S", 0.01)
    failures = [ResourceFailed("away"), ResourceFailed("still away")]

    def watch(point: str) -> None:
        if point == "two.commit.before" and failures:
            raise failures.pop()

    one, two = ModelResource("one"), ModelResource("two", watch=watch)
    with TransactionManager("shop", ModelLog(), [one, two], finish_within_s=WAIT_S) as manager:
        with manager.begin() as transaction:
            for resource in (one, two):
                transaction.enlist(resource).append("work")
        assert two.durable.committed == ["work"]
        assert transaction.unfinished == {}
        assert transaction.wait_finished(0)


def test_wait_for_unavailable_resource_ends_at_timeout() -> None:
    away = threading.Event()

    def watch(point: str) -> None:
        if point == "two.commit.before" and not away.is_set():
            raise ResourceFailed("away")

    one, two = ModelResource("one"), ModelResource("two", watch=watch)
    with TransactionManager("shop", ModelLog(), [one, two]) as manager:
        with manager.begin() as transaction:
            for resource in (one, two):
                transaction.enlist(resource).append("work")
        assert not transaction.wait_finished(0.01)
        assert list(transaction.unfinished) == ["two"]
        waiting = in_background(lambda: transaction.wait_finished(WAIT_S), "waits")
        away.set()
        manager.recover_soon()
        assert waiting.result(WAIT_S)
    assert two.durable.committed == ["work"]
