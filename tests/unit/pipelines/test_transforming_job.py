"""A query with waiting tasks: what it does when a task fails, is stopped or ends. Spark is a model that runs nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.errors import PySparkException

from bascule.core.errors import Unavailable
from bascule.pipelines import transforming, transforming_job
from bascule.pipelines.exchange import NotTransformed
from bascule.pipelines.failures import CarriedError, encoded
from bascule.pipelines.jobs import ResidentTasks
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.pipelines.tasks import DivertTask
from bascule.pipelines.transforming import SparkBatch, TransformingBatch
from bascule.pipelines.transforming_job import FAILURES_MAX, TURNS, TransformingJob
from bascule.pipelines.transforming_task import FIRST_MESSAGES
from bascule.pipelines.waiting import BATCHES
from bascule.writer.claims import Claim
from tests.support.system import wait_for

UPPER = DivertSpec("upper", "orders", "out", select=("upper(text) AS value",))
LOWER, LENGTH = replace(UPPER, name="lower"), replace(UPPER, name="length")


class Spark:
    """As much of Spark as the query needs. Its jobs run until the test ends them, or until they are cancelled."""

    def __init__(self) -> None:
        self.sparkContext = self
        self.tag = threading.local()
        self.lock = threading.Lock()
        self.residents: list[Resident] = []
        self.waiting: list[Job] = []
        self.batches: list[Batch] = []
        self.pools: list[str] = []
        self.batch_error: Exception | None = None

    def addJobTag(self, tag: str) -> None:
        self.tag.name = tag

    def cancelJobsWithTag(self, tag: str) -> None:
        with self.lock:
            jobs = [*self.waiting, *self.batches]
        for job in jobs:
            if job.tag == tag:
                job.end(RuntimeError("cancelled"))

    @contextmanager
    def in_pool(self, pool: str) -> Iterator[None]:
        self.pools.append(pool)
        yield


class Job:
    """A job that was started by the thread that waits for it."""

    def __init__(self, spark: Spark, path: str = "", count: int = 0) -> None:
        self.tag, self.path, self.count = spark.tag.name, path, count
        self.ended: Future[None] = Future()

    def end(self, error: Exception | None = None) -> None:
        with suppress(Exception):  # it has ended
            self.ended.set_exception(error) if error is not None else self.ended.set_result(None)

    def save(self) -> None:
        self.ended.result(30)


class Resident:
    """A resident task's job (``jobs.ResidentJob``)."""

    job_group = "group"

    def __init__(self, tasks: ResidentTasks) -> None:
        task: Any = tasks.tasks[0]
        self.first: int = task.first
        self.runs, self.stopped = True, False
        self.error: Exception | None = None
        self.looks = 0

    @property
    def active(self) -> bool:
        self.looks += 1
        return self.runs

    def failure(self) -> Exception | None:
        return self.error

    def stop(self) -> None:
        self.runs, self.stopped = False, True

    def fail(self, error: Any) -> None:
        self.error = CarriedError(encoded(error)) if isinstance(error, NotTransformed) else error
        self.runs = False


class Batch(Job):
    """A batch without waiting tasks."""

    def __init__(self, spark: Spark, task: DivertTask, pool: str, in_pool: Any, look: Callable[[], None]) -> None:
        super().__init__(spark)
        self.spark, self.task, self.pool, self.look = spark, task, pool, look
        self.looked: Exception | None = None

    def __call__(self, frame: tuple[int, int]) -> None:
        self.frame = frame
        with self.spark.lock:
            self.spark.batches.append(self)
        try:
            self.save()
        except RuntimeError:  # cancelled: as the search for a faulty message does
            try:
                self.look()
            except Unavailable as error:
                self.looked = error
                raise


class Case:
    """A query, started."""

    def __init__(self, spark: Spark, *diverts: DivertSpec) -> None:
        self.spark = spark
        self.given_up = 0
        self.diverts = diverts or (UPPER,)
        names = tuple(divert.name for divert in self.diverts)
        task = DivertTask(
            PipelinesSpec("bridge", {}), Claim("diverts/journal/0", "journal", "id", 0, "me", names), self.diverts, leader_epoch=5
        )
        session: Any = spark
        self.job = TransformingJob(session, "group:a-b-7", task, ("resident", "rows"), spark.in_pool, self._give_up)

    def _give_up(self) -> None:
        self.given_up += 1

    def resident(self, number: int) -> Resident:
        """Return a resident job, counted from 1, when it runs with its waiting tasks."""
        wait_for(lambda: len(self.spark.residents) >= number and self.waiting(), "the tasks to run")
        return self.spark.residents[number - 1]

    def waiting(self) -> list[Job]:
        """Return the waiting tasks that run now, or none before all of them do."""
        with self.spark.lock:
            found = [job for job in self.spark.waiting if not job.ended.done()]
        return found if len(found) == TURNS * len(self.diverts) else []

    def batch(self, number: int) -> Batch:
        wait_for(lambda: len(self.spark.batches) >= number, "a batch")
        return self.spark.batches[number - 1]


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Spark:
    found = Spark()

    def resident(_context: Any, _name: str, tasks: ResidentTasks) -> Resident:
        found.residents.append(Resident(tasks))
        return found.residents[-1]

    def frame(_session: Any, _divert: Any, path: str, _job: str, _passed: Any, count: int) -> Any:
        job = Job(found, path, count)
        with found.lock:
            found.waiting.append(job)
        return job

    def written(job: Job, *_: Any) -> Any:
        chain = SimpleNamespace(format=lambda _: chain, mode=lambda _: chain, save=job.save)
        return SimpleNamespace(write=chain)

    monkeypatch.setattr(transforming_job, "ResidentJob", resident)
    monkeypatch.setattr(transforming_job, "cloned_session", lambda session: session)
    monkeypatch.setattr(transforming_job, "waiting_frame", frame)
    monkeypatch.setattr(transforming_job, "sunk", written)
    monkeypatch.setattr(transforming_job, "kafka_range", lambda _session, _pipelines, _topic, _partition, start, end: (start, end))
    monkeypatch.setattr(transforming_job, "journal_rows", lambda frame: frame)
    monkeypatch.setattr(transforming_job, "TransformingBatch", lambda *given: Batch(found, *given))
    monkeypatch.setattr(transforming_job, "LOOK_S", 0.005)
    monkeypatch.setattr(transforming_job, "SETTLE_S", 0.05)
    monkeypatch.setattr(transforming_job, "CANCEL_S", 0.005)
    monkeypatch.setattr(transforming_job, "PAUSE_S", 0.001)
    return found


@pytest.fixture
def case(spark: Spark) -> Iterator[Case]:
    found = Case(spark)
    yield found
    found.job.stop()
    assert not found.job.active


def test_resident_task_runs_with_waiting_tasks_of_different_length_and_all_end_with_the_query(case: Case) -> None:
    resident = case.resident(1)
    waiting = case.waiting()
    assert sorted(job.count for job in waiting) == [BATCHES // 2, BATCHES]
    assert case.job.active
    assert case.spark.pools == ["resident", "rows", "rows"]
    directory = Path(waiting[0].path).parent
    assert directory.is_dir()
    case.job.stop()
    assert resident.stopped
    assert all(job.ended.done() for job in waiting)
    assert not directory.exists()
    assert case.job.failure() is None


def test_waiting_task_that_ends_is_started_again(case: Case) -> None:
    case.resident(1)
    case.waiting()[0].end()
    wait_for(lambda: len(case.spark.waiting) == TURNS + 1 and case.waiting(), "another task")
    assert len(case.spark.residents) == 1
    assert case.spark.waiting[-1].count == BATCHES


def test_failed_batch_is_carried_without_waiting_tasks_and_then_all_tasks_run_again(case: Case) -> None:
    case.resident(1).fail(NotTransformed("it failed", 3, 7))
    batch = case.batch(1)
    assert (batch.frame, batch.pool, batch.task.start) == ((3, 7), "group:a-b", 3)
    assert not any(not job.ended.done() for job in case.spark.waiting), "its slots are free meanwhile"
    assert len(case.spark.residents) == 1
    batch.end()
    case.resident(2)
    assert case.given_up == 0


def test_batch_is_carried_although_the_partition_has_a_new_leader_since_the_query_began(case: Case) -> None:
    """A batch reads its records itself, from the leader of now."""
    case.resident(1).fail(NotTransformed("it failed", 3, 7))
    assert (case.batch(1).task.start, case.batch(1).task.leader_epoch) == (3, None)


def test_first_batch_becomes_smaller_with_each_failure_so_that_a_slow_transformation_can_answer(case: Case) -> None:
    for number in range(1, FAILURES_MAX + 1):
        case.resident(number).fail(NotTransformed("no answer", number, number + 1))
        case.batch(number).end()
    case.resident(FAILURES_MAX + 1)
    assert [resident.first for resident in case.spark.residents] == [FIRST_MESSAGES, 25, 6, 1, 1, 1]


def test_failure_without_records_carries_no_batch(case: Case) -> None:
    case.resident(1).fail(NotTransformed("the socket cannot be used"))
    case.resident(2)
    assert case.spark.batches == []
    assert case.spark.residents[1].first == FIRST_MESSAGES


def test_failure_of_a_waiting_task_and_of_the_resident_task_that_waits_for_it_count_once(
    spark: Spark, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transforming_job, "SETTLE_S", 30.0)
    case = Case(spark)
    for number in range(1, FAILURES_MAX + 1):
        resident = case.resident(number)
        case.waiting()[0].end(RuntimeError("a bad message"))
        looks = resident.looks
        wait_for(lambda before=looks, of=resident: of.looks > before + 10, "the query to notice the first failure")
        resident.fail(NotTransformed("it failed", number, number + 1))
        case.batch(number).end()
    case.resident(FAILURES_MAX + 1)
    assert case.given_up == 0
    case.job.stop()


def test_query_ends_after_too_many_failures_and_the_next_one_is_to_carry_batches(case: Case) -> None:
    for number in range(1, FAILURES_MAX + 2):
        case.resident(number).fail(NotTransformed("the socket cannot be used"))
    wait_for(lambda: not case.job.active, "the query to end")
    assert isinstance(case.job.failure(), Unavailable)
    assert case.given_up == 1


def test_waiting_tasks_that_fail_by_themselves_end_the_query_after_too_many_failures(case: Case) -> None:
    resident = case.resident(1)
    while case.job.active:
        with case.spark.lock:
            running = [job for job in case.spark.waiting if not job.ended.done()]
        for job in running:
            job.end(RuntimeError("no worker"))
    assert isinstance(case.job.failure(), Unavailable)
    assert resident.stopped
    assert case.given_up == 1


def test_all_waiting_tasks_that_end_together_count_as_one_failure(spark: Spark) -> None:
    case = Case(spark, UPPER, LOWER, LENGTH)
    resident = case.resident(1)
    for job in case.waiting():
        job.end(RuntimeError("the workers were killed"))
    wait_for(lambda: not case.job.active or (len(spark.waiting) > 3 * TURNS and case.waiting()), "other tasks")
    assert case.job.active
    assert case.given_up == 0
    assert spark.residents == [resident]
    case.job.stop()


def test_pause_doubles_while_failures_follow_each_other_and_ends_with_the_query(spark: Spark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforming_job, "PAUSE_S", 1.0)
    pauses: list[float] = []
    case = Case(spark)
    ends = case.job._ends

    def noted(resident: Any, within_s: float) -> bool:
        pauses.append(within_s)
        return ends(resident, 600.0 if len(pauses) == 8 else 0.0)

    monkeypatch.setattr(case.job, "_ends", noted)
    for number in range(1, 5):
        case.resident(1)
        case.waiting()[0].end(RuntimeError("no worker"))
        wait_for(lambda expected=2 * number: len(pauses) == expected, "a pause")
    assert pauses[1::2] == [1.0, 2.0, 4.0, 8.0]
    case.job.stop()
    assert not case.job.active


def test_resident_task_that_ends_in_the_pause_is_not_waited_for(spark: Spark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transforming_job, "PAUSE_S", 600.0)
    case = Case(spark)
    case.resident(1)
    case.waiting()[0].end(RuntimeError("no worker"))
    wait_for(lambda: case.job._failures_s, "the failure")
    spark.residents[0].fail(NotTransformed("no waiting task was ready", 3, 7))
    case.batch(1).end()
    case.resident(2)
    case.job.stop()


def test_other_error_of_the_resident_task_ends_the_query(case: Case) -> None:
    case.resident(1).fail(Unavailable("no Kafka"))
    wait_for(lambda: not case.job.active, "the query to end")
    assert str(case.job.failure()) == "no Kafka"
    assert case.given_up == 0


def test_stop_within_a_batch_blames_no_message(case: Case) -> None:
    case.resident(1).fail(NotTransformed("it failed", 3, 7))
    batch = case.batch(1)
    case.job.stop()
    assert isinstance(batch.looked, Unavailable), "its search for faulty messages ends before it judges one"
    assert not case.job.active


def test_search_for_a_faulty_message_ends_with_the_query_and_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    frame: Any = SimpleNamespace()
    task = DivertTask(PipelinesSpec("bridge", {}), Claim("diverts/journal/0", "journal", "id", 0, "me", ("upper",)), (UPPER,))

    def look() -> None:
        if told.is_set():
            raise Unavailable("the query was told to stop")

    def run(_: Any) -> None:
        told.set()  # and Spark cancels the job
        raise PySparkException("Job 3 cancelled")

    monkeypatch.setattr(transforming, "_run", run)
    monkeypatch.setattr(transforming, "transformed", lambda *_: frame)
    monkeypatch.setattr(SparkBatch, "_rows_of", lambda *_: frame)
    batch = SparkBatch(frame, TransformingBatch(task, "pool", lambda _: nullcontext(), look))
    with pytest.raises(Unavailable):
        batch.fault(UPPER, [(1, 0)])
    with pytest.raises(Unavailable):
        batch.carry(task)
