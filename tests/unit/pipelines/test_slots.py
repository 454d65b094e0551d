"""Tasks for which Spark has no slot are reported once."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from bascule.pipelines.slots import SLOT_WAIT_S, SlotWatch, WaitingStage, waiting_stages


class Tracker:
    """Stages by id: the number of tasks, of running tasks and of completed tasks; None if Spark has forgotten the stage. Each has a job."""

    def __init__(self, stages: dict[int, tuple[int, int, int] | None]) -> None:
        self.stages = stages

    def getActiveStageIds(self) -> Sequence[int]:
        return list(self.stages)

    def getJobIdsForGroup(self, group: str) -> Sequence[int]:
        return [stage for stage in self.stages if group == f"run-{stage % 2}"]

    def getJobInfo(self, job: int) -> Any:
        return SimpleNamespace(stageIds=[job, 99]) if self.stages[job] is not None else None

    def getStageInfo(self, stage: int) -> Any:
        counts = self.stages[stage]
        if counts is None:
            return None
        tasks, active, completed = counts
        return SimpleNamespace(numTasks=tasks, numActiveTasks=active, numCompletedTasks=completed)


def test_stages_with_tasks_that_neither_run_nor_have_ended_wait() -> None:
    tracker = Tracker({1: (1, 1, 0), 2: (1, 0, 0), 3: (4, 1, 1), 4: None, 5: (2, 0, 2)})
    context: Any = SimpleNamespace(statusTracker=lambda: tracker)
    pipelines = {"run-0": "diverts", "run-1": "group:g"}
    assert waiting_stages(context, pipelines) == [WaitingStage(2, "diverts", 1, 1), WaitingStage(3, "group:g", 4, 2)]


def test_task_without_slot_is_reported_once_after_some_time(caplog: pytest.LogCaptureFixture) -> None:
    watch, waiting = SlotWatch(), [WaitingStage(2, "group:g", 1, 1)]
    watch.look(waiting, 100.0)
    watch.look(waiting, 100.0 + SLOT_WAIT_S - 1)
    assert caplog.messages == []
    for later in (0, 10, 20):
        watch.look(waiting, 100.0 + SLOT_WAIT_S + later)
    assert caplog.messages == ["tasks wait for a slot of Spark pipeline=group:g waiting=1 tasks=1"]


def test_task_that_waits_again_is_reported_again(caplog: pytest.LogCaptureFixture) -> None:
    watch, waiting = SlotWatch(), [WaitingStage(2, "group:g", 1, 1)]
    for start in (0.0, 1000.0):
        watch.look(waiting, start)
        watch.look(waiting, start + SLOT_WAIT_S)
        watch.look([], start + SLOT_WAIT_S + 1)
    watch.look(waiting, 2000.0)
    assert len(caplog.messages) == 2
