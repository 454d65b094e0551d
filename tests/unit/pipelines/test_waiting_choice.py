"""Which pipelines of a driver get waiting tasks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from bascule.pipelines import planning, waiting_choice
from bascule.pipelines.planning import StillPlanning
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.pipelines.tasks import DivertTask
from bascule.pipelines.waiting_choice import WaitingChoice
from bascule.pipelines.waiting_plans import Obstacle
from bascule.writer.claims import Claim
from tests.support.system import wait_for

READS = Obstacle("it reads a file", lasting=True)
UNPLANNED = Obstacle("no database", lasting=False)
OBSTACLES = {"reads": READS}


class PatientChoice(WaitingChoice):
    """Waits until Spark has planned a transformation, as a query does."""

    def allows(self, pipeline: str, task: DivertTask) -> bool:
        while True:
            try:
                return super().allows(pipeline, task)
            except StillPlanning as error:
                wait_for(error.over, "the plan")


def choice(master: str = "local[2]", trigger_interval_ms: int = 0, stopped: Callable[[str], bool] = lambda _: False) -> PatientChoice:
    session: Any = None
    pipelines = PipelinesSpec("bridge", {}, master=master, trigger_interval_ms=trigger_interval_ms)
    return PatientChoice(pipelines, lambda: session, stopped, lambda _, divert: OBSTACLES.get(divert.name))


class Plans:
    """Spark's plans of transformations, as a model: the first ones have these obstacles."""

    def __init__(self, *obstacles: Obstacle) -> None:
        self.made: list[str] = []
        self.threads: set[str] = set()
        self.may_end = threading.Event()
        self.may_end.set()
        self._obstacles = [*obstacles]
        session: Any = None
        self.choice = PatientChoice(PipelinesSpec("bridge", {}, master="local"), lambda: session, lambda _: False, self._obstacle)

    def _obstacle(self, _: Any, divert: DivertSpec) -> Obstacle | None:
        self.made.append(divert.name)
        self.threads.add(threading.current_thread().name)
        assert self.may_end.wait(30)
        return self._obstacles.pop(0) if self._obstacles else None


def task(*names: str, plain: bool = False) -> DivertTask:
    diverts = [DivertSpec(name, "#", select=() if plain else ("text AS value",)) for name in names]
    return DivertTask(PipelinesSpec("bridge", {}), Claim("diverts/journal/0", "journal", "id", 0, "me", names), tuple(diverts))


@pytest.mark.parametrize(
    ("master", "may"),
    [("local", True), ("local[*]", True), ("local[2,3]", False), ("local-cluster[1,2,1024]", False), ("spark://host:7077", False)],
)
def test_tasks_wait_only_where_spark_has_slots_for_them(master: str, may: bool) -> None:
    assert choice(master).allows("diverts", task("one")) is may


def test_one_transformation_that_cannot_wait_keeps_its_whole_pipeline_in_micro_batches() -> None:
    found = choice()
    assert not found.allows("diverts", task("one", "reads"))
    assert found.allows("group:a", task("one"))
    assert not found.allows("group:b", task("one", plain=True))


def test_trigger_interval_keeps_all_pipelines_in_micro_batches() -> None:
    assert not choice(trigger_interval_ms=500).allows("diverts", task("one"))


def test_transformation_that_can_wait_is_not_planned_again() -> None:
    plans = Plans()
    assert plans.choice.allows("diverts", task("one"))
    assert plans.choice.allows("diverts", task("one", "two"))
    assert plans.made == ["one", "two"]
    assert threading.current_thread().name not in plans.threads, "a function of the user that hangs would stop the driver"


def test_transformation_whose_plan_cannot_wait_is_not_planned_again() -> None:
    plans = Plans(READS)
    assert not plans.choice.allows("diverts", task("reads"))
    assert not plans.choice.allows("diverts", task("reads"))
    assert plans.made == ["reads"]


def test_transformation_that_could_not_be_planned_is_planned_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = Plans(UNPLANNED, UNPLANNED)
    assert not plans.choice.allows("diverts", task("one"))
    assert not plans.choice.allows("diverts", task("one"))
    assert plans.made == ["one"], "not at each of several starts in quick succession"
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + waiting_choice.PLAN_PAUSE_S)
    assert not plans.choice.allows("diverts", task("one"))
    assert plans.made == ["one", "one"]


def test_driver_does_not_wait_for_a_plan_that_hangs_and_takes_its_answer_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "PLAN_S", 0.01)
    plans = Plans()
    plans.may_end.clear()
    assert not plans.choice.allows("diverts", task("one"))
    assert not plans.choice.allows("diverts", task("one"))
    assert not plans.choice.allows("diverts", task("one"))
    plans.may_end.set()
    wait_for(lambda: plans.choice.allows("diverts", task("one")), "the answer")
    assert plans.made == ["one"]


def test_pipeline_that_was_given_up_stays_in_micro_batches() -> None:
    found = choice()
    assert found.allows("diverts", task("one"))
    found.give_up("diverts")
    assert not found.allows("diverts", task("one"))
    assert found.allows("group:a", task("one"))


def test_number_of_diverts_that_wait_is_limited_and_a_pipeline_counts_as_it_last_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_choice, "WAITING_DIVERTS_MAX", 3)
    found = choice()
    assert found.allows("diverts", task("one", "two"))
    assert not found.allows("group:a", task("three", "four"))
    assert found.allows("diverts", task("one", "two", "three")), "it replaces its earlier start"
    assert not found.allows("group:a", task("four"))
    found.drop("diverts")
    assert found.allows("group:a", task("four", "five"))
    found.give_up("group:a")
    assert not found.allows("group:a", task("four", "five"))
    assert found.allows("diverts", task("one", "two", "three"))


def test_pipeline_that_has_stopped_for_good_leaves_its_share_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting_choice, "WAITING_DIVERTS_MAX", 3)
    found = choice(stopped=(stopped := set[str]()).__contains__)
    assert found.allows("diverts", task("one", "two"))
    assert not found.allows("group:a", task("three", "four"))
    stopped.add("diverts")
    assert found.allows("group:a", task("three", "four"))
    stopped.clear()
    assert not found.allows("diverts", task("one", "two")), "it was retried, and has no share any more"
