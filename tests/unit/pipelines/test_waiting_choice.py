"""Which pipelines of a driver get waiting tasks."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.pipelines import waiting_choice
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.pipelines.tasks import DivertTask
from bascule.pipelines.waiting_choice import WaitingChoice
from bascule.writer.claims import Claim

REASONS = {"reads": "it reads a file"}


def choice(master: str = "local[2]", trigger_interval_ms: int = 0) -> WaitingChoice:
    session: Any = None
    pipelines = PipelinesSpec("bridge", {}, master=master, trigger_interval_ms=trigger_interval_ms)
    return WaitingChoice(pipelines, lambda: session, lambda _, divert: REASONS.get(divert.name))


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
    planned: list[str] = []
    session: Any = None

    def reason(_: Any, divert: DivertSpec) -> str | None:
        planned.append(divert.name)
        return "no database" if planned == ["one"] else None

    found = WaitingChoice(PipelinesSpec("bridge", {}, master="local"), lambda: session, reason)
    assert not found.allows("diverts", task("one"))
    assert found.allows("diverts", task("one"))
    assert found.allows("diverts", task("one", "two"))
    assert planned == ["one", "one", "two"]


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
