"""Jobs of resident tasks, with a context that runs them in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import KafkaRecord, Taken
from bascule.pipelines import jobs
from bascule.pipelines.failures import CarriedError, error_from_spark
from bascule.pipelines.jobs import CatchUp, ResidentJob, ResidentTasks
from bascule.pipelines.spark import LOCAL_SLOTS, cores, master_url
from bascule.pipelines.spec import PipelinesSpec
from tests.support.system import wait_for

#: No process has this id. The id of a living process would not do: the one after the parent's can be that of the process of this test.
NO_PROCESS = -1


class Task:
    """A task that runs until it is cancelled, or fails."""

    def __init__(self, cancelled: threading.Event, error: Exception | None = None) -> None:
        self.ran = 0
        self._cancelled, self._error = cancelled, error

    def run(self, open_source: Any) -> None:
        assert open_source is not None
        self.ran += 1
        if self._error is not None:
            raise self._error
        assert self._cancelled.wait(30)


class Context:
    """As much of Spark as a job needs. It runs the first task only."""

    def __init__(self) -> None:
        self.cancelled = threading.Event()
        self.tags: list[str] = []
        self.names: dict[str, str] = {}
        self.asked: list[tuple[range, int]] = []
        self.deaf = 0  # cancellations that it does not hear

    def parallelize(self, numbers: range, partitions: int) -> Context:
        self.asked.append((numbers, partitions))
        return self

    def mapPartitions(self, run: Callable[[Any], Iterator[Any]]) -> Context:
        self._run = run
        return self

    def id(self) -> int:
        return 1

    def collect(self) -> None:
        assert list(self._run(iter(()))) == []

    def setLocalProperty(self, name: str, value: str) -> None:
        self.names[name] = value

    def addJobTag(self, tag: str) -> None:
        self.tags.append(tag)

    def cancelJobsWithTag(self, tag: str) -> None:
        if self.deaf:
            self.deaf -= 1
        elif tag in self.tags:
            self.cancelled.set()


def job(context: Any, *tasks: Task) -> ResidentJob:
    return ResidentJob(context, "diverts-1", ResidentTasks(tasks, {}, committed=False))


def test_job_has_a_partition_for_each_task_and_runs_until_it_is_cancelled() -> None:
    context = Context()
    tasks = [Task(context.cancelled), Task(context.cancelled)]
    running = job(context, *tasks)
    assert running.active
    running.stop()
    assert not running.active
    assert running.failure() is None
    assert context.asked == [(range(2), 2)]
    assert context.names == {"spark.jobGroup.id": running.job_group}
    assert [task.ran for task in tasks] == [1, 0]


def test_error_of_a_task_ends_the_job_and_reaches_the_driver() -> None:
    context = Context()
    running = job(context, Task(context.cancelled, Unavailable("no Kafka")))
    assert running._ended.exception(30) is running.failure()
    assert not running.active
    failure = running.failure()
    assert isinstance(failure, CarriedError)
    assert isinstance(error_from_spark(failure), Unavailable)


def test_job_that_spark_does_not_know_yet_is_cancelled_when_it_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "CANCEL_S", 0.01)
    context = Context()
    context.deaf = 3
    running = job(context, Task(context.cancelled))
    running.stop()
    assert not running.active
    assert context.deaf == 0


def test_stop_waits_for_a_limited_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "STOP_TIMEOUT_S", 0.01)
    context = Context()
    goes_on = threading.Event()
    running = job(context, Task(goes_on))
    running.stop()
    assert running.active
    goes_on.set()
    assert running._ended.exception(30) is None


def test_task_ends_when_the_process_that_started_its_worker_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter((7, 7, 1))
    monkeypatch.setattr(jobs.os, "getppid", lambda: next(parents))
    found = jobs.supervised([Taken([]), Taken([])])
    assert next(found) == Taken([])
    with pytest.raises(Unavailable, match="Spark has ended"):
        next(found)


def test_task_ends_although_the_daemon_that_forked_its_worker_ended_before_the_task_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "_IMPORTED_IN", NO_PROCESS)
    with pytest.raises(Unavailable, match="Spark has ended"):
        next(jobs.supervised([Taken([])]))


@pytest.mark.parametrize(("end", "yielded"), [(1, [[0]]), (3, [[0, 1], [2]]), (4, [[0, 1], [2, 3]]), (6, [[0, 1], [2, 3], [], []])])
def test_bounded_source_stops_before_its_end_offset_or_where_no_record_is_left_before_it(end: int, yielded: list[list[int]]) -> None:
    place = ("journal", 0)

    def records(*offsets: int) -> list[KafkaRecord]:
        return [KafkaRecord(*place, offset, None, b"", (), 0) for offset in offsets]

    def source() -> Iterator[Taken]:
        yield Taken(records(0, 1))
        yield Taken(records(2, 3), [place])
        yield Taken([], [place])
        yield Taken([], [], {place: 6})  # the records at 4 and 5 are gone
        pytest.fail("it reads on")

    assert [[record.offset for record in taken.records] for taken in jobs.bounded(source(), end)] == yielded


def test_bounded_source_gives_up_if_no_record_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the driver would wait for ever, and hear no signal."""
    now_s = [0.0]
    monkeypatch.setattr(jobs, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    def source() -> Iterator[Taken]:
        record = KafkaRecord("journal", 0, 0, None, b"", (), 0)
        for pause_s, records in ((20, []), (20, [record]), (30, []), (1, [])):
            now_s[0] += pause_s
            yield Taken(records)
        pytest.fail("it reads on")

    with pytest.raises(Unavailable, match="before offset 7 could not be read within 30 s"):
        list(jobs.bounded(source(), 7))
    assert now_s == [71]


def test_error_of_a_task_that_catches_up_reaches_the_driver() -> None:
    context: Any = Context()
    with pytest.raises(CarriedError) as raised:  # the model of Spark runs the task in this process
        jobs.carry_up_to(context, Task(context.cancelled, Unavailable("no Kafka")), {}, 7, nullcontext())
    assert isinstance(error_from_spark(raised.value), Unavailable)
    assert context.asked == [(range(1), 1)]


@pytest.mark.parametrize("overdue", [False, True])
def test_catch_up_that_is_stopped_tells_its_work_so_before_its_jobs_are_cancelled(overdue: bool) -> None:
    """Otherwise the work would look for the message on which the cancelled job failed, and find one."""
    context, looked, begun = Context(), list[str](), threading.Event()

    def work(look: Callable[[], None]) -> None:
        look()
        begun.set()
        assert context.cancelled.wait(30)
        try:
            look()
        except Unavailable as error:
            looked.append(str(error))
            raise

    spark: Any = context
    catch_up = CatchUp(spark, "common", work, 0.0 if overdue else 30.0)
    assert begun.wait(30)
    if overdue:
        wait_for(lambda: catch_up.ended(0.01), "the work to end")
    else:
        catch_up.stop()
    assert catch_up.stopped
    assert catch_up.overdue == overdue
    assert isinstance(catch_up.failure(), Unavailable)
    assert looked == ["the catch-up was told to stop"]


def test_catch_up_that_does_not_end_in_time_is_given_up_and_the_driver_does_not_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "STOP_TIMEOUT_S", 30.0)
    monkeypatch.setattr(jobs, "CANCEL_S", 0.01)
    context: Any = Context()
    context.deaf = 1_000_000
    goes_on = threading.Event()
    catch_up = CatchUp(context, "common", lambda _look: goes_on.wait(30) and None, 0.0)
    assert not catch_up.ended(0.0), "it is told to stop in the background"
    assert (catch_up.stopped, catch_up.overdue) == (True, True)
    assert not catch_up.ended(0.0)
    wait_for(lambda: context.deaf < 1_000_000 - 2, "its jobs to be cancelled")
    catch_up._until_s = 0.0  # the time of the stop is over
    assert catch_up.ended(0.0)
    goes_on.set()
    assert catch_up._ended.exception(30) is None


@pytest.mark.parametrize(
    ("master", "url", "count"),
    [("local", f"local[{LOCAL_SLOTS}]", 1), ("local[3]", f"local[{LOCAL_SLOTS}]", 3), ("spark://host:7077", "spark://host:7077", 12)],
)
def test_local_spark_has_a_slot_for_each_resident_task(master: str, url: str, count: int) -> None:
    pipelines = PipelinesSpec("b", {}, master=master)
    context: Any = type("Context", (), {"defaultParallelism": 12})
    assert master_url(pipelines) == url
    assert cores(lambda: context, pipelines) == count
