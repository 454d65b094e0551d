"""Which pipelines of a driver get waiting tasks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Final

from pyspark.sql import SparkSession

from bascule.core.log import get_log
from bascule.pipelines.planning import Plans
from bascule.pipelines.spark import has_local_slots
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.pipelines.tasks import DivertTask
from bascule.pipelines.transformation import NotPlanned
from bascule.pipelines.waiting_plans import Obstacle, why_not

log = get_log(__name__)

#: Diverts of a driver that have waiting tasks. Each holds two slots of Spark, and four processes or more, for as long as it runs.
WAITING_DIVERTS_MAX: Final = 16
#: Time, in seconds, after which a transformation that could not be planned is planned again.
PLAN_PAUSE_S: Final = 60.0


class WaitingChoice:
    """Decides whether waiting tasks carry the transformations of a pipeline, each time it starts. Otherwise micro-batches do."""

    def __init__(
        self, pipelines: PipelinesSpec, session: Callable[[], SparkSession], stopped: Callable[[str], bool],
        why: Callable[[SparkSession, DivertSpec], Obstacle | None] = why_not,
    ) -> None:  # fmt: skip
        """``session`` returns a Spark session for one plan, and ``stopped`` whether a pipeline has stopped for good.

        ``why`` returns why waiting tasks cannot run the transformation of a divert.
        """
        self._pipelines, self._stopped = pipelines, stopped
        self._given_up: set[str] = set()
        # What is known of a divert holds for later starts: its function is not called again, because it may take long or fail at times.
        self._able: set[DivertSpec] = set()
        #: Reasons, and the times of the monotonic clock at which Spark may plan these transformations again.
        self._unable: dict[DivertSpec, tuple[str, float]] = {}
        self._plans = Plans(session, why)
        #: Diverts that were allowed to wait when their pipeline last started.
        self._allowed: dict[str, int] = {}

    def give_up(self, pipeline: str) -> None:
        """Let a pipeline stay in micro-batches until the driver ends. May be called from any thread."""
        self._given_up.add(pipeline)

    def allows(self, pipeline: str, task: DivertTask) -> bool:
        """Return whether waiting tasks can run all transformations of a pipeline that starts now, and note that they do.

        Raises StillPlanning.
        """
        self._allowed.pop(pipeline, None)
        self._allowed = {name: count for name, count in self._allowed.items() if not self._stopped(name)}
        diverts = [divert for divert in task.diverts if divert.transformed]
        # On a cluster they would hold its slots, and messages would cross the network between workers. A trigger interval asks for fewer
        # and larger batches than waiting tasks carry.
        if not diverts or pipeline in self._given_up or not has_local_slots(self._pipelines) or self._pipelines.trigger_interval_ms:
            return False
        if sum(self._allowed.values()) + len(diverts) > WAITING_DIVERTS_MAX:
            log.info("pipeline stays in micro-batches", pipeline=pipeline, reason=f"more than {WAITING_DIVERTS_MAX} diverts would wait")
            return False
        for divert in diverts:
            if (reason := self._reason(divert)) is not None:
                log.info("divert stays in micro-batches", divert=divert.name, reason=reason)
                return False
        self._allowed[pipeline] = len(diverts)
        return True

    def drop(self, pipeline: str) -> None:
        """Forget a pipeline that does not run: others may use its share."""
        self._allowed.pop(pipeline, None)

    def _reason(self, divert: DivertSpec) -> str | None:
        """Return why the transformation of a divert cannot wait now. Raises StillPlanning."""
        if divert in self._able:
            return None
        reason, again_s = self._unable.get(divert, ("", 0.0))
        if time.monotonic() < again_s:
            return reason
        try:
            obstacle = self._plans.result(divert)
        except NotPlanned as error:  # a later start takes its answer
            return str(error)
        if obstacle is None:
            self._able.add(divert)
            return None
        self._unable[divert] = obstacle.reason, math.inf if obstacle.lasting else time.monotonic() + PLAN_PAUSE_S
        return obstacle.reason
