"""Which pipelines of a driver get waiting tasks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pyspark.sql import SparkSession

from bascule.core.log import get_log
from bascule.pipelines.spark import has_local_slots
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.pipelines.tasks import DivertTask
from bascule.pipelines.waiting_plans import why_not

log = get_log(__name__)

#: Diverts of a driver that have waiting tasks. Each holds two slots of Spark, and four processes or more, for as long as it runs.
WAITING_DIVERTS_MAX: Final = 16


class WaitingChoice:
    """Decides whether waiting tasks carry the transformations of a pipeline, each time it starts. Otherwise micro-batches do."""

    def __init__(
        self, pipelines: PipelinesSpec, session: Callable[[], SparkSession],
        reason: Callable[[SparkSession, DivertSpec], str | None] = why_not,
    ) -> None:  # fmt: skip
        """``reason`` returns why waiting tasks cannot run the transformation of a divert."""
        self._pipelines, self._session, self._reason = pipelines, session, reason
        self._given_up: set[str] = set()
        #: Diverts whose transformation can wait: their function is not called again, because it may take long or fail at times.
        self._able: set[DivertSpec] = set()
        #: Diverts that were allowed to wait when their pipeline last started.
        self._allowed: dict[str, int] = {}

    def give_up(self, pipeline: str) -> None:
        """Let a pipeline stay in micro-batches until the driver ends. May be called from any thread."""
        self._given_up.add(pipeline)

    def allows(self, pipeline: str, task: DivertTask) -> bool:
        """Return whether waiting tasks can run all transformations of a pipeline that starts now, and note that they do."""
        self._allowed.pop(pipeline, None)
        diverts = [divert for divert in task.diverts if divert.transformed]
        # On a cluster they would hold its slots, and messages would cross the network between workers. A trigger interval asks for fewer
        # and larger batches than waiting tasks carry.
        if not diverts or pipeline in self._given_up or not has_local_slots(self._pipelines) or self._pipelines.trigger_interval_ms:
            return False
        if sum(self._allowed.values()) + len(diverts) > WAITING_DIVERTS_MAX:
            log.info("pipeline stays in micro-batches", pipeline=pipeline, reason=f"more than {WAITING_DIVERTS_MAX} diverts would wait")
            return False
        for divert in diverts:
            if divert in self._able:
                continue
            if (why := self._reason(self._session(), divert)) is not None:
                log.info("divert stays in micro-batches", divert=divert.name, reason=why)
                return False
            self._able.add(divert)
        self._allowed[pipeline] = len(diverts)
        return True

    def drop(self, pipeline: str) -> None:
        """Forget a pipeline that does not run: others may use its share."""
        self._allowed.pop(pipeline, None)
