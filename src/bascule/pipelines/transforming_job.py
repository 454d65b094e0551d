"""A pipeline with transformations that is carried by a resident task and waiting tasks, and by a batch where these fail."""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from pyspark.sql import SparkSession

from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.pipelines.exchange import NotTransformed
from bascule.pipelines.failures import crossing, described, error_from_spark
from bascule.pipelines.jobs import CANCEL_S, STOP_TIMEOUT_S, ResidentJob, ResidentTasks, StopFlag
from bascule.pipelines.pools import InPool
from bascule.pipelines.spark import cloned_session, journal_rows, kafka_range
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.tasks import DivertTask
from bascule.pipelines.transforming import TransformingBatch
from bascule.pipelines.transforming_task import FIRST_MESSAGES, TransformingTask
from bascule.pipelines.waiting import BATCHES, new_job, sunk, waiting_frame
from bascule.threads.background import in_background

log = get_log(__name__)

#: Waiting tasks of a divert: while Spark prepares one for its next batch, the other one waits for messages.
TURNS: Final = 2
#: Interval, in seconds, at which waiting tasks that have ended are started again.
LOOK_S: Final = 0.1
#: How long a resident task may take to end after a waiting task has failed on its messages, in seconds. Both failures count as one.
SETTLE_S: Final = 2.0
#: Pause, in seconds, before waiting tasks that have failed by themselves are started again. It doubles with each failure of FAILURES_S.
PAUSE_S: Final = 1.0
#: After a batch that failed, the first batch has this part of the messages of the first batch before.
SMALLER: Final = 4
#: After this many failures within this time, in seconds, the pipeline is carried in micro-batches until its driver ends.
FAILURES_MAX: Final = 5
FAILURES_S: Final = 300.0


class TransformingJob:
    """A running query (``jobs.Running``). A batch that the waiting tasks do not transform is carried by a Spark job of its own."""

    def __init__(
        self, session: SparkSession, name: str, task: DivertTask, pools: tuple[str, str], in_pool: InPool, give_up: Callable[[], None]
    ) -> None:
        """Start the tasks. ``pools`` are those of resident tasks and of other workers; ``give_up`` makes the next start one in batches."""
        self._task, self._name = task, name
        # Users' functions may name views. Those of another query are in another session, and threads of this query take turns.
        self._session, self._planning = cloned_session(session), threading.Lock()
        self._pools, self._in_pool, self._give_up = pools, in_pool, give_up
        self._tag = f"bascule-{uuid.uuid4().hex}"
        self._over = StopFlag()
        self._failures_s: list[float] = []
        self._first = FIRST_MESSAGES
        self._resident: ResidentJob | None = None
        self._ended = in_background(self._run, name)

    @property
    def job_group(self) -> str:
        """Return the group of the resident task's job."""
        resident = self._resident
        return self._tag if resident is None else resident.job_group

    @property
    def active(self) -> bool:
        """Return True until the query has ended."""
        return not self._ended.done()

    def failure(self) -> BaseException | None:
        """Return the error with which the query has ended."""
        return self._ended.exception(0)

    def stop(self) -> None:
        """End all tasks, and wait until Spark has ended them."""
        self._over.set()
        deadline_s = time.monotonic() + 2 * STOP_TIMEOUT_S
        while self.active and time.monotonic() < deadline_s:
            self._session.sparkContext.cancelJobsWithTag(self._tag)
            with suppress(TimeoutError):
                self._ended.exception(CANCEL_S)

    def _run(self) -> None:
        directory = tempfile.mkdtemp(prefix="bascule-")
        self._session.sparkContext.addJobTag(self._tag)
        try:
            while not self._over.is_set():
                try:
                    self._carry(str(Path(directory) / "task"))
                except NotTransformed as error:
                    if self._over.is_set():
                        return
                    self._failed(error)
                    if error.end:
                        # It may have been too slow for a batch of this size. Batches grow while they are fast.
                        self._first = max(1, self._first // SMALLER)
                        self._carry_batch(error.start, error.end)
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _failed(self, error: BaseException) -> None:
        """Note a failure. Raises Unavailable after too many of them."""
        now_s = time.monotonic()
        self._failures_s = [each for each in self._failures_s if now_s - each < FAILURES_S] + [now_s]
        log.warning("waiting task failed", pipeline=self._name, error=described(error))
        if len(self._failures_s) > FAILURES_MAX:
            self._give_up()
            raise Unavailable(f"waiting tasks failed {len(self._failures_s)} times; the pipeline continues in micro-batches") from error

    def _carry(self, path: str) -> None:
        """Run resident and waiting tasks until ``stop``, or until the resident task fails: this raises its error."""
        context = self._session.sparkContext
        tasks = ResidentTasks([TransformingTask(self._task, path, self._first)], self._task.pipelines.kafka, committed=False)
        with self._in_pool(self._pools[0]):
            self._resident = resident = ResidentJob(context, self._name, tasks)
        names = [divert for divert in self._task.diverts if divert.transformed]
        waiting: list[tuple[DivertSpec, Future[None]]] = []
        tag = f"bascule-{uuid.uuid4().hex}"
        try:
            # They take turns, so of equal length they would end together, and no task would wait until Spark has planned the next ones.
            waiting += [(divert, self._waiting(divert, path, tag, BATCHES // turn)) for divert in names for turn in range(1, TURNS + 1)]
            while resident.active and not self._over.wait(LOOK_S):
                for place in self._to_start(resident, [job for _, job in waiting]):
                    divert = waiting[place][0]
                    waiting[place] = divert, self._waiting(divert, path, tag)
        finally:
            resident.stop()
            deadline_s = time.monotonic() + STOP_TIMEOUT_S
            while not all(job.done() for _, job in waiting) and time.monotonic() < deadline_s:
                context.cancelJobsWithTag(tag)
                time.sleep(CANCEL_S)
        if not self._over.is_set() and (failure := resident.failure()) is not None:
            raise error_from_spark(failure) or failure

    def _to_start(self, resident: ResidentJob, jobs: Sequence[Future[None]]) -> list[int]:
        """Return the places of the waiting tasks to start again: those that have ended, after a pause if one of them has failed.

        Raises Unavailable after too many failures.
        """
        done = [place for place, job in enumerate(jobs) if job.done()]
        if (error := next((error for place in done if (error := jobs[place].exception()) is not None), None)) is None:
            return done
        if self._ends(resident, SETTLE_S):
            return []
        self._failed(error)
        if self._ends(resident, PAUSE_S * 2 ** (len(self._failures_s) - 1)):
            return []
        # One event may end several tasks, for example all that have workers of one pool: it counts as one failure.
        return [place for place, job in enumerate(jobs) if job.done()]

    def _ends(self, resident: ResidentJob, within_s: float) -> bool:
        """Return whether the resident task or the query ends within this time, in seconds."""
        deadline_s = time.monotonic() + within_s
        while resident.active and time.monotonic() < deadline_s and not self._over.wait(LOOK_S):
            pass
        return not resident.active or self._over.is_set()

    def _waiting(self, divert: DivertSpec, path: str, tag: str, count: int = BATCHES) -> Future[None]:
        def run() -> None:
            job = new_job()
            self._session.sparkContext.addJobTag(tag)
            with self._planning, self._in_pool(self._pools[1]):
                records = sunk(waiting_frame(self._session, divert, path, job, crossing, count), divert, path, job, crossing)
            records.write.format("noop").mode("overwrite").save()

        return in_background(run, f"{self._name}-waiting")

    def _carry_batch(self, start: int, end: int) -> None:
        """Carry these records of the journal in one batch, which finds the messages on which a transformation fails."""
        task = self._task
        log.info("carrying batch without waiting tasks", pipeline=self._name, first=start, last=end - 1)
        read = kafka_range(self._session, task.pipelines, task.claim.topic, task.claim.partition, start, end)
        batch = TransformingBatch(
            replace(task, start=start, leader_epoch=None), self._name.rpartition("-")[0], self._in_pool, self._over.look
        )
        batch(journal_rows(read))
