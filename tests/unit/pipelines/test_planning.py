"""Transformations that fail or hang while Spark plans them, without Spark: a driver runs all other pipelines meanwhile."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bascule.pipelines import driver as module
from bascule.pipelines import planning
from bascule.pipelines.jobs import ResidentTasks
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.tasks import DivertTask
from bascule.pipelines.transformation import NotPlanned, NotRowLocal
from bascule.writer.position import COMMON, group_pipeline
from tests.scenarios.sparkless import Bridge, Context, Job
from tests.support.system import wait_for


def transforming_job(_session: object, name: str, task: DivertTask, *_: object) -> Job:
    return Job(Context(), name, ResidentTasks([task], task.pipelines.kafka, committed=False))


@pytest.fixture
def transforming(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drivers run transformations without Spark."""
    monkeypatch.setattr(module, "sql_session", lambda _: None)
    monkeypatch.setattr(module, "cloned_session", lambda _: None)
    monkeypatch.setattr(module, "TransformingJob", transforming_job)
    monkeypatch.setattr(module.WaitingChoice, "allows", lambda *_: True)


@pytest.mark.usefixtures("transforming")
def test_transformation_that_hangs_fails_or_is_refused_stops_and_delays_no_other_group(
    bridge: Bridge, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, asked = threading.Event(), list[str]()

    def check(divert: DivertSpec, _session: Any) -> None:
        asked.append(divert.name)
        if divert.name == "hangs":
            assert may_end.wait(60)
        if divert.name == "fails" and asked.count("fails") == 1:
            raise NotPlanned("no database")
        if divert.name == "exits":
            raise SystemExit(3)
        if divert.name == "wide":
            raise NotRowLocal("divert 'wide' is not row-local")

    monkeypatch.setattr(planning, "check", check)
    bridge.journal.start_epoch()
    names = ("hangs", "fails", "wide", "exits", "good")
    groups = [bridge.divert(name, group=name, select=("text AS value",)) for name in names]
    with bridge.running(bridge.divert("plain"), *groups) as running:
        queries = running.driver.queries
        hanging, failing, wide, exiting, good = (queries[group_pipeline(name)] for name in names)
        assert queries[COMMON].running is not None

        def others_run() -> bool:
            running.driver.poll()
            return good.running is not None and failing.running is not None and exiting.restarts > 0 and wide.stopped is not None

        wait_for(others_run, "the other groups")
        assert wide.stopped == "NotRowLocal: divert 'wide' is not row-local"
        assert (failing.restarts, failing.last_error) == (1, "NotPlanned: no database")
        assert exiting.last_error == "NotPlanned: divert 'exits': the transformation tried to end the process (SystemExit: 3)"
        assert (hanging.running, hanging.stopped, hanging.restarts) == (None, None, 0), "it is neither running nor at fault yet"
        monkeypatch.setattr(planning, "PLAN_S", 0.0)
        running.driver.poll()
        assert hanging.last_error == "NotPlanned: divert 'hangs': Spark has not planned the transformation within 0 s"
        assert hanging.stopped is None
        may_end.set()

        def runs() -> bool:
            running.driver.poll()
            return hanging.running is not None

        wait_for(runs, "the group whose transformation is planned at last")
        good.restart()
        assert good.running is not None
        assert sorted(name for name in asked if name != "exits") == ["fails", "fails", "good", "hangs", "wide"], (
            "each is checked once, and again only after a failure"
        )


@pytest.mark.usefixtures("transforming")
def test_divert_is_held_and_released_while_spark_plans_its_transformation(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    may_end = threading.Event()
    monkeypatch.setattr(planning, "check", lambda *_: may_end.wait(60))
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("slow", select=("text AS value",))) as running:
        holds = running.driver._holds
        wait_for(lambda: holds.hold("divert:slow"), "the divert to be held")
        assert running.driver.queries["divert:slow"].idle
        assert holds.release("divert:slow")
        may_end.set()

        def runs() -> bool:
            running.driver.poll()
            return any(query.running is not None for query in running.driver.queries.values())

        wait_for(runs, "the divert")
