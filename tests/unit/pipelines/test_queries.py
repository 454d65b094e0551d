"""When a driver starts a query, and how it handles a failed one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException

from bascule.core.errors import BadRecord, BasculeError, Unavailable
from bascule.pipelines import queries
from bascule.pipelines.jobs import Startable
from bascule.pipelines.queries import STEADY_S, Query, RestartCounts
from bascule.writer.errors import PositionMoved
from bascule.writer.position import PositionLost, PositionTaken
from tests.support.spark_texts import FOREACH_BATCH, QUERY, WORKER, said_by_spark
from tests.support.system import wait_for


class Ended:
    """A query of Spark that has failed."""

    active = False

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def failure(self) -> Exception | None:
        return self._failure

    def stop(self) -> None: ...


def failed(failure: Exception | None, directory: Path) -> Query:
    """A query after ``check`` has seen that Spark's query ended with this failure."""
    query = Query("failed", lambda: None, directory, running=Ended(failure))
    query.check()
    return query


TAKEN = PositionTaken("another driver has taken over 'k'")


@pytest.mark.parametrize("failure", [TAKEN, said_by_spark(QUERY, TAKEN), said_by_spark(FOREACH_BATCH, TAKEN)], ids=["own", "task", "batch"])
def test_query_stops_on_non_retriable_error(failure: Exception, tmp_path: Path) -> None:
    query = failed(failure, tmp_path)
    assert query.stopped == "PositionTaken: another driver has taken over 'k'"
    assert query.superseded


def test_query_stopped_by_other_error_is_not_superseded(tmp_path: Path) -> None:
    query = failed(said_by_spark(QUERY, BadRecord("no JSON: 'PositionTaken: x'\nsecond line")), tmp_path)
    assert query.stopped == "BadRecord: no JSON: 'PositionTaken: x'"
    assert not query.superseded


@pytest.mark.parametrize(
    "failure",
    [said_by_spark(QUERY, Unavailable("no Kafka")), said_by_spark(QUERY, PositionMoved(None)), PySparkException(WORKER), None],
    ids=["task", "moved", "user", "no reason"],
)
def test_query_restarts_after_retriable_or_foreign_failure(failure: Exception | None, tmp_path: Path) -> None:
    query = failed(failure, tmp_path)
    assert (query.stopped, query.restarts) == (None, 1)


def test_idle_query_is_not_rebuilt_at_each_check(tmp_path: Path) -> None:
    asked: list[str] = []
    query = Query("idle", lambda: asked.append("again"), tmp_path)  # type: ignore[func-returns-value]
    query.start()
    query.check()
    assert asked == ["again"]
    query.restart()
    assert asked == ["again", "again"]


def test_stopped_query_is_not_restarted(tmp_path: Path) -> None:
    asked: list[str] = []

    def build() -> None:
        asked.append("again")
        raise PositionLost("restore the positions")

    query = Query("lost", build, tmp_path)  # type: ignore[arg-type]
    query.start()
    query.restart()
    query.check()
    assert asked == ["again"]
    assert query.stopped is not None


def test_restart_pause_doubles_up_to_limit_and_resets_after_steady_run(tmp_path: Path) -> None:
    query = Query("failing", lambda: None, tmp_path)

    def pause() -> float:
        """Before the start that follows a failure."""
        query.running = Ended(Unavailable("no Kafka"))
        before = time.monotonic()
        query.check()
        started_at_once = query._due_s == math.inf  # there is nothing to build
        return 0.0 if started_at_once else round(query._due_s - before, 1)

    assert [pause() for _ in range(9)] == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    query._since_s = time.monotonic() - STEADY_S - 1
    assert [pause() for _ in range(2)] == [0.0, 0.0]
    query._since_s = time.monotonic()
    assert pause() == 0.5


def test_prepared_query_is_started_by_next_check_and_not_built_again(tmp_path: Path) -> None:
    built: list[str] = []
    started: list[str] = []

    def start(name: str, _checkpoint: str) -> Ended:
        started.append(name)
        return Ended(None)

    def build() -> Startable:
        built.append("once")
        return start

    query = Query("q", build, tmp_path)
    query.prepare()
    assert (built, started) == (["once"], [])
    query.check()
    assert (built, started) == (["once"], ["q-1"])


class Slow:
    """A query of Spark that ends when the test says so."""

    active = True

    def __init__(self) -> None:
        self.told, self.may_end = threading.Event(), threading.Event()

    def failure(self) -> None: ...

    def stop(self) -> None:
        self.told.set()
        assert self.may_end.wait(30)


@pytest.fixture
def slow() -> Iterator[Slow]:
    found = Slow()
    yield found
    found.may_end.set()


def slow_query(slow: Slow, directory: Path, started: list[str]) -> Query:
    def start(name: str, _checkpoint: str) -> Ended:
        started.append(name)
        return Ended(None)

    return Query("q", lambda: start, directory, running=slow)  # type: ignore[arg-type]


def test_driver_does_not_wait_for_a_query_that_is_slow_to_end_and_starts_it_again_when_it_has_ended(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries, "STOP_WAIT_S", 0.0)
    started: list[str] = []
    query = slow_query(slow, tmp_path, started)
    query.restart()
    assert slow.told.wait(30)
    query.check()
    query.restart()
    assert (started, query.running, query.ending, query.idle) == ([], None, True, False)
    slow.may_end.set()
    wait_for(lambda: query.check() or started, "the next run")
    assert (started, query.ending) == (["q-1"], False)


def test_query_starts_again_although_its_last_run_does_not_end(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(queries, "ENDING_S", 0.0)
    started: list[str] = []
    slow_query(slow, tmp_path, started).restart()
    assert started == ["q-1"]
    assert [record.getMessage() for record in caplog.records] == ["task of pipeline has not ended pipeline=q waited_s=0.0"]


@pytest.mark.parametrize("late", [False, True])
def test_error_of_spark_while_a_query_is_stopped_reaches_the_driver(
    slow: Slow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.setattr(queries, "STOP_WAIT_S", 0.0 if late else 30.0)

    def stop() -> None:
        assert not late or slow.may_end.wait(30)
        raise PySparkException("the JVM has ended")

    monkeypatch.setattr(slow, "stop", stop)
    query = slow_query(slow, tmp_path, [])
    if late:
        query.stop()
        slow.may_end.set()
    with pytest.raises(PySparkException, match="has ended"):
        query.has_ended(30) if late else query.stop()


def test_failed_preparation_is_repeated_by_next_check(tmp_path: Path) -> None:
    answers: list[BasculeError | None] = [Unavailable("no Kafka"), None]

    def build() -> None:
        answer = answers.pop(0)
        if answer is not None:
            raise answer

    query = Query("q", build, tmp_path)  # type: ignore[arg-type]
    query.prepare()
    assert query.restarts == 1
    query.check()
    assert answers == []


def test_pipeline_keeps_its_restarts_when_another_query_carries_it(tmp_path: Path) -> None:
    def query(name: str, restarts: int = 0) -> Query:
        return Query(name, lambda: None, tmp_path, restarts=restarts)

    counts, group = RestartCounts(), query("group", restarts=5)
    shared, alone = {"x": "group", "y": "group"}, {"x": "x", "y": "group"}
    assert counts.look(shared, {"group": group}) == {"x": 5, "y": 5}
    own = query("x", restarts=1)  # it failed at once
    assert counts.look(alone, {"group": group, "x": own}) == {"x": 6, "y": 5}
    own.restarts, group.restarts = 2, 6
    assert counts.look(alone, {"group": group, "x": own}) == {"x": 7, "y": 6}
    assert counts.look(alone, {"group": group, "x": query("x")}) == {"x": 7, "y": 6}
    group.restarts = 7
    assert counts.look(shared, {"group": group}) == {"x": 8, "y": 7}
    assert counts.look(shared, {}) == {"x": 8, "y": 7}
