"""A divert that joins its group while one of the two catches up slowly, without Spark: the driver looks after all other pipelines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from bascule.core.errors import Unavailable
from bascule.pipelines import driver as module
from bascule.pipelines import joining, queries
from bascule.pipelines.spec import EARLIEST, StartPosition
from bascule.pipelines.tasks import DivertTask
from bascule.writer.position import COMMON, group_pipeline
from tests.scenarios import sparkless
from tests.scenarios.sparkless import Bridge, Context, Running
from tests.support.system import wait_for

OTHER = group_pipeline("other")


class Slow:
    """A catch-up that waits until the test lets it go on, or until its job is cancelled."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.go_on, self.cancelled = threading.Event(), threading.Event()
        self.calls = 0
        patch.setattr(module, "carry_up_to", self._carry)
        patch.setattr(Context, "cancelJobsWithTag", lambda *_: self.cancelled.set())
        patch.setattr(joining, "JOIN_WAIT_S", 0.0)

    def _carry(self, *what: Any) -> None:
        self.calls += 1
        while not self.go_on.wait(0.01):
            if self.cancelled.is_set():
                raise Unavailable("the job was cancelled")
        sparkless.carry_up_to(*what)


@contextmanager
def joining_driver(bridge: Bridge) -> Iterator[Running]:
    """Return a driver of which a divert is seven records behind its group, and joins it."""
    bridge.journal.start_epoch()
    bridge.send(*map(str, range(6)))
    past = bridge.divert("past", start=StartPosition(EARLIEST))
    with bridge.running(bridge.divert("now"), past, bridge.divert("other", group="other")) as running:
        bridge.send("6")
        running.batch(COMMON)
        running.driver.poll()
        yield running


def all_joined(running: Running) -> bool:
    running.driver._join_due_s.clear()
    running.driver.poll()
    return list(running.driver.queries) == [COMMON, OTHER]


def joined(running: Running) -> bool:
    running.driver.poll()
    return "divert:past" not in running.driver.queries


def test_driver_restarts_other_groups_while_a_divert_catches_up(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    with joining_driver(bridge) as running:
        assert running.driver._joins.busy
        running.query(OTHER).fail(Unavailable("lost a connection"))
        running.driver.poll()
        assert running.driver.queries[OTHER].restarts == 1
        assert running.query(OTHER).active, "it was restarted"
        assert running.driver._joins.busy
        slow.go_on.set()
        wait_for(lambda: joined(running), "the join")
        assert slow.calls == 1
        running.batch()
    assert bridge.carried("past") == [str(number) for number in range(7)]
    assert bridge.carried("now") == bridge.carried("other") == ["6"]


def test_catch_up_that_takes_too_long_is_given_up_and_tried_again_when_the_two_are_nearer(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(monkeypatch)
    monkeypatch.setattr(joining, "JOIN_S", 0.0)
    monkeypatch.setattr(joining, "NEAREST", 1)
    with joining_driver(bridge) as running:
        wait_for(lambda: running.driver.poll() is None and not running.driver._joins.busy, "the attempt to be given up")
        assert slow.cancelled.is_set()
        running.driver.poll()
        queries = running.driver.queries
        assert all(queries[name].running.job_group == "group" for name in (COMMON, "divert:past")), "both carry again"
        running.driver._join_due_s.clear()  # the pause is over
        running.driver.poll()
        assert slow.calls == 1, "the two are as far apart as before"
        slow.go_on.set()
        monkeypatch.setattr(joining, "JOIN_S", 30.0)
        running.batch("divert:past")
        running.driver._join_due_s.clear()
        wait_for(lambda: joined(running), "the join")
    assert bridge.carried("past") == [str(number) for number in range(7)]


def test_distance_has_a_floor_and_is_that_of_before_after_a_catch_up_in_time(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch)
    monkeypatch.setattr(joining, "JOIN_S", 0.0)
    with joining_driver(bridge) as running:
        joins = running.driver._joins

        def attempt_ends() -> bool:
            running.driver.poll()
            return not joins.busy

        wait_for(attempt_ends, "the attempt to be given up")
        assert joins.distance("past", 20_000) == joining.NEAREST == 100
        slow.go_on.set()
        monkeypatch.setattr(joining, "JOIN_S", 30.0)
        running.driver._join_due_s.clear()
        wait_for(lambda: joined(running), "the join, although the two are as far apart as before")
        assert joins.distance("past", 20_000) == 20_000


def test_catch_up_with_a_transformation_carries_its_batch_until_it_is_told_to_stop(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, ranges = list[Any](), list[Any]()

    class Batch:
        def __init__(self, task: DivertTask, pool: str, in_pool: object, look: Any) -> None:
            batches.append((task, pool, look))

        def __call__(self, rows: object) -> None:
            ranges.append(rows)

    monkeypatch.setattr(module, "sql_session", lambda _: None)
    monkeypatch.setattr(module, "cloned_session", lambda _: None)
    monkeypatch.setattr(module, "kafka_range", lambda _session, _pipelines, _topic, _partition, start, end: (start, end))
    monkeypatch.setattr(module, "journal_rows", lambda rows: rows)
    monkeypatch.setattr(module, "TransformingBatch", Batch)
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("plain")) as running:
        key = running.driver._positions.key_of(COMMON)
        position = replace(running.driver._positions.read(key), offset=3, leader_epoch=5)
        divert = bridge.divert("upper", select=("upper(text) AS value",))
        task = replace(running.driver._divert_task(key, position), diverts=(divert,))
        told = object()
        running.driver._catch_up("divert:upper", task, position, 7, told)  # type: ignore[arg-type]
    ((carried, pool, look),) = batches
    assert ranges == [(3, 7)]
    assert (carried.start, carried.leader_epoch, pool) == (3, None, "divert:upper")
    assert look is told


def test_divert_does_not_join_while_its_task_has_not_ended(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    stop = sparkless.Job.stop

    def stop_late(job: sparkless.Job) -> None:
        assert may_end.wait(30)
        stop(job)

    with monkeypatch.context() as patch:
        patch.setattr(queries, "STOP_WAIT_S", 0.0)
        patch.setattr(sparkless.Job, "stop", stop_late)
        with joining_driver(bridge) as running:
            assert not running.driver._joins.busy
            running.query(OTHER).fail(Unavailable("lost a connection"))
            running.driver.poll()
            assert running.query(OTHER).active, "the other group is looked after"
            assert all(running.driver.queries[name].ending for name in (COMMON, "divert:past"))
            may_end.set()
            wait_for(lambda: running.driver.poll() or all(running.query(name) for name in (COMMON, "divert:past")), "both to run again")
            patch.undo()
            wait_for(lambda: all_joined(running), "the join")
            running.batch()
    assert bridge.carried("past") == [str(number) for number in range(7)]


@pytest.mark.parametrize("held", ["divert:past", "divert:now"])
def test_divert_is_held_while_it_or_its_group_catches_up(bridge: Bridge, monkeypatch: pytest.MonkeyPatch, held: str) -> None:
    slow = Slow(monkeypatch)
    with joining_driver(bridge) as running:
        wait_for(lambda: running.driver._holds.hold(held), "the divert to be held")
        assert slow.cancelled.is_set()
        running.driver.poll()
        assert not running.driver._joins.busy
        assert running.driver.queries[held].idle
        slow.go_on.set()
        running.driver._holds.release(held)
        assert not running.driver.queries[held].idle
        wait_for(lambda: all_joined(running), "all to join")
        running.batch()
    assert bridge.carried("past") == [str(number) for number in range(7)]
    assert bridge.carried("now") == ["6"]
