"""Spark jobs whose tasks live as long as their query: each task reads its source itself, until the job is cancelled."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from pyspark import SparkContext, TaskContext

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Gather, Place, SourceStart, Taken
from bascule.kafka.source import KafkaSource
from bascule.pipelines.failures import FAILURES, crossing, described, error_from_spark
from bascule.threads.background import in_background

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bascule.pipelines.tasks import OpenSource

#: How long a cancelled job may take to end, in seconds. After it, its tasks are left to Spark: they can write nothing more, because the
#: next owner of their positions fences them.
STOP_TIMEOUT_S: Final = 10.0
#: Interval, in seconds, at which the driver cancels a job until it has ended.
CANCEL_S: Final = 0.2
#: How long a task that carries up to an offset waits for the next record before it, in seconds. The driver does nothing else meanwhile.
BOUNDED_WAIT_S: Final = 30.0
#: In a worker, the process that forked it: it has imported this module. The daemon may have ended before the worker looks at its parent.
_IMPORTED_IN: Final = os.getpid()
#: The pool of workers of all resident tasks of a local Spark.
RESIDENT: Final = "resident"
#: The local property under which Spark's status tracker finds a job.
_JOB_GROUP: Final = "spark.jobGroup.id"


class Resident(Protocol):
    """A task that reads its source itself."""

    def run(self, open_source: OpenSource) -> None:
        """Carry records until the job is cancelled."""
        ...


@dataclass(frozen=True, slots=True)
class ResidentTasks:
    """The tasks of one query: Spark gives each to a worker by its number. Pickled for the workers."""

    tasks: Sequence[Resident]
    kafka: Mapping[str, object]
    committed: bool

    def __call__(self, _partition: Iterator[int]) -> Iterator[int]:
        """Run the task of this partition of the job."""
        context = TaskContext.get()
        self.tasks[context.partitionId() if context else 0].run(self.opened)
        yield from ()

    @contextmanager
    def opened(self, start: Mapping[Place, SourceStart], gather: Gather) -> Iterator[Iterator[Taken]]:
        """Open source partitions at these starts."""
        with closing(KafkaSource(self.kafka, start, committed=self.committed, gather=gather)) as source:
            yield supervised(source)


@dataclass(frozen=True, slots=True)
class BoundedTask:
    """A task that carries the records of one source partition up to an offset, and ends. Pickled for a worker."""

    task: Resident
    kafka: Mapping[str, object]
    end: int

    def __call__(self, _partition: Iterator[int]) -> Iterator[int]:
        """Run the task."""
        self.task.run(self.opened)
        yield from ()

    @contextmanager
    def opened(self, start: Mapping[Place, SourceStart], gather: Gather) -> Iterator[Iterator[Taken]]:
        """Open the source partition at this start."""
        with closing(KafkaSource(self.kafka, start, committed=False, gather=gather)) as source:
            yield bounded(supervised(source), self.end)


def bounded(source: Iterable[Taken], end: int) -> Iterator[Taken]:
    """Yield the records of one partition before the offset ``end``. Stop when the source has reached it.

    Raises Unavailable if no record comes for BOUNDED_WAIT_S: Kafka does not answer, or the partition ends before ``end``.
    """
    since_s = time.monotonic()
    for taken in source:
        if taken.records:
            since_s = time.monotonic()
        elif time.monotonic() - since_s > BOUNDED_WAIT_S and not any(at >= end for at in taken.ends.values()):
            raise Unavailable(f"the records before offset {end} could not be read within {BOUNDED_WAIT_S:.0f} s")
        records = [record for record in taken.records if record.offset < end]
        yield taken._replace(records=records)
        reached = [record.offset + 1 for record in taken.records[-1:]] + list(taken.ends.values())
        if max(reached, default=0) >= end:
            return


def carry_up_to(context: SparkContext, task: Resident, kafka: Mapping[str, object], end: int, pool: AbstractContextManager[None]) -> None:
    """Carry the records of a task's source partition before the offset ``end``, by a worker of a pool. Return when the task has ended.

    Raises the errors of the task, and Unavailable if Spark cannot run it.
    """
    try:
        with pool:
            rdd = context.parallelize(range(1), 1).mapPartitions(crossing(BoundedTask(task, kafka, end)))
            rdd.id()  # takes the variables of the pool
        rdd.collect()
    except FAILURES as error:
        raise error_from_spark(error) or Unavailable(described(error)) from None


def spark_watch() -> Callable[[], None]:
    """Return what raises Unavailable once Spark has ended.

    A Python worker of Spark ends with Spark because it reads from a socket, or by SIGHUP. A resident task reads no socket, and SIGHUP is
    ignored in what `nohup` has started. The worker's parent process ends with Spark in any case.
    """
    parent = os.getppid() if os.getpid() == _IMPORTED_IN else _IMPORTED_IN

    def look() -> None:
        if os.getppid() != parent:
            raise Unavailable("Spark has ended, and this task ends with it")

    return look


def supervised(source: Iterable[Taken]) -> Iterator[Taken]:
    """Yield what a source yields, while Spark lives. Raises Unavailable once Spark has ended."""
    look = spark_watch()
    for taken in source:
        look()
        yield taken


class ResidentJob:
    """A job of resident tasks that was started. It ends with an error, or when it is stopped."""

    def __init__(self, context: SparkContext, name: str, tasks: ResidentTasks) -> None:
        """Start the job under a tag of its own, so that ``stop`` cancels this job only.

        It is a job on an RDD: Spark SQL would load its planner and compile code before the first task, which takes seconds.
        """
        self._context = context
        self._tag = tag = f"bascule-{uuid.uuid4().hex}"  # a name of a pipeline may contain characters that a tag may not contain
        count = len(tasks.tasks)
        rdd = context.parallelize(range(count), count).mapPartitions(crossing(tasks))
        rdd.id()  # takes the variables of the pipeline's worker pool now: in the other thread they may be those of the next pipeline

        def run() -> None:
            context.addJobTag(tag)
            context.setLocalProperty(_JOB_GROUP, tag)
            rdd.collect()

        self._ended = in_background(run, name)

    @property
    def job_group(self) -> str:
        """Return the group of the job in Spark's status tracker."""
        return self._tag

    @property
    def active(self) -> bool:
        """Return True while the tasks run."""
        return not self._ended.done()

    def failure(self) -> BaseException | None:
        """Return the error with which the job has ended."""
        return self._ended.exception(0)

    def stop(self) -> None:
        """Cancel the job, and wait until Spark has ended it. Spark does not know a job yet whose thread has just started."""
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        while self.active and time.monotonic() < deadline_s:
            self._context.cancelJobsWithTag(self._tag)
            with suppress(TimeoutError):
                self._ended.exception(CANCEL_S)


class CatchUp:
    """Work that brings the position of one query to that of another. Meanwhile it is the running part (``Running``) of both."""

    def __init__(self, context: SparkContext, name: str, work: Callable[[Callable[[], None]], None], within_s: float) -> None:
        """Begin ``work``, which may run jobs of Spark for ``within_s`` seconds. Its argument is ``look``."""
        self._context, self._name = context, name
        self._tag = tag = f"bascule-{uuid.uuid4().hex}"
        self._until_s = time.monotonic() + within_s  # after ``stop``, until when the work may end
        self.stopped = self.overdue = False

        def run() -> None:
            context.addJobTag(tag)
            context.setLocalProperty(_JOB_GROUP, tag)
            work(self.look)

        self._ended = in_background(run, f"{name}-catch-up")

    @property
    def job_group(self) -> str:
        """Return the group of its jobs in Spark's status tracker."""
        return self._tag

    @property
    def active(self) -> bool:
        """Return True: the caller decides what follows the work."""
        return True

    def failure(self) -> BaseException | None:
        """Return the error with which the work has ended."""
        return self._ended.exception(0)

    def look(self) -> None:
        """Raise Unavailable once the work is told to stop: its jobs are cancelled then, and no message is at fault for that."""
        if self.stopped:
            raise Unavailable("the catch-up was told to stop")

    def ended(self, timeout_s: float) -> bool:
        """Return whether the work has ended, at the latest after ``timeout_s``. When its time is over, stop it in the background.

        Work that has not ended STOP_TIMEOUT_S after it was stopped counts as ended.
        """
        with suppress(TimeoutError):
            self._ended.exception(timeout_s)
        if self._ended.done():
            return True
        if time.monotonic() < self._until_s:
            return False
        if not self.stopped:
            self.overdue = True
            self._tell()
            in_background(self._cancel, f"{self._name}-catch-up-stop")
            return False
        return True

    def stop(self) -> None:
        """Cancel the jobs, and wait until the work has ended, or for STOP_TIMEOUT_S. May be called from several threads."""
        self._tell()
        self._cancel()

    def _tell(self) -> None:
        if not self.stopped and not self._ended.done():
            self.stopped, self._until_s = True, time.monotonic() + STOP_TIMEOUT_S

    def _cancel(self) -> None:
        while not self._ended.done() and time.monotonic() < self._until_s:
            self._context.cancelJobsWithTag(self._tag)
            with suppress(TimeoutError):
                self._ended.exception(CANCEL_S)


class StopFlag(threading.Event):
    """Is set when a query is told to stop. Its jobs are cancelled then, and no message is at fault for that."""

    def look(self) -> None:
        """Raise Unavailable once the query is told to stop."""
        if self.is_set():
            raise Unavailable("the query was told to stop")


class Running(Protocol):
    """A query that was started."""

    @property
    def job_group(self) -> str:
        """Return the group of the query's jobs in Spark's status tracker."""
        ...

    @property
    def active(self) -> bool:
        """Return True until the query has ended."""
        ...

    def failure(self) -> BaseException | None:
        """Return the error of a query that has ended, if Spark has one."""
        ...

    def stop(self) -> None:
        """End the query."""
        ...


#: Starts a query under a name, with a directory for its checkpoint, and returns it.
Startable = Callable[[str, str], Running]
