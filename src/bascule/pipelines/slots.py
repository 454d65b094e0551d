"""Notices tasks for which a Spark cluster has no slot: Spark lets such tasks wait without an error, and their pipelines wait too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pyspark import SparkContext

from bascule.core.log import get_log

log = get_log(__name__)

#: How long a task may wait for a slot, in seconds, before the driver reports it. An executor of a cluster needs some seconds to start.
SLOT_WAIT_S: Final = 15.0


class WaitingStage(NamedTuple):
    """A stage of a pipeline some of whose tasks have no slot."""

    stage: int
    pipeline: str
    tasks: int
    waiting: int


def waiting_stages(context: SparkContext, pipelines: Mapping[str, str]) -> list[WaitingStage]:
    """Return the stages some of whose tasks have no slot. ``pipelines`` has the names of pipelines by the groups of their jobs."""
    tracker = context.statusTracker()
    active = set(tracker.getActiveStageIds())
    found = []
    for group, pipeline in pipelines.items():
        jobs = [job for each in tracker.getJobIdsForGroup(group) if (job := tracker.getJobInfo(each)) is not None]
        for stage in sorted(active.intersection(stage for job in jobs for stage in job.stageIds)):
            info = tracker.getStageInfo(stage)
            waiting = 0 if info is None else info.numTasks - info.numActiveTasks - info.numCompletedTasks
            if info is not None and waiting > 0:
                found.append(WaitingStage(stage, pipeline, info.numTasks, waiting))
    return found


@dataclass(slots=True)
class SlotWatch:
    """Reports each stage once whose tasks wait for a slot for SLOT_WAIT_S."""

    _since_s: dict[int, float] = field(default_factory=dict)
    _told: set[int] = field(default_factory=set)

    def look(self, found: Sequence[WaitingStage], now_s: float) -> None:
        """Take the stages that wait now, at a monotonic time in seconds."""
        self._since_s = {each.stage: self._since_s.get(each.stage, now_s) for each in found}
        self._told.intersection_update(self._since_s)
        for each in found:
            if each.stage not in self._told and now_s - self._since_s[each.stage] >= SLOT_WAIT_S:
                self._told.add(each.stage)
                log.warning("tasks wait for a slot of Spark", pipeline=each.pipeline, waiting=each.waiting, tasks=each.tasks)
