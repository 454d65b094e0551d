"""When a query is started, and what is said of one that failed."""

from __future__ import annotations

from pathlib import Path

from bascule.core.errors import BasculeError
from bascule.pipelines.queries import Query, is_fatal, short

WORKER = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "changes.py", line 7, in checked
    raise RuntimeError("unlucky")
RuntimeError: unlucky

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)
"""


def test_of_a_workers_traceback_the_error_is_told() -> None:
    assert short(WORKER) == "RuntimeError: unlucky"


def test_of_javas_stack_the_messages_are_told() -> None:
    said = "Job aborted\n\tat a.b(C.scala:1)\nCaused by: java.io.EOFException\n\t... 8 more"
    assert short(said) == "Job aborted | Caused by: java.io.EOFException"


def test_an_error_that_starting_again_cannot_mend_is_known_by_its_name() -> None:
    assert is_fatal("bascule.kafka.positions.PositionTaken: another driver has taken over")
    assert not is_fatal("RuntimeError: unlucky")


def test_a_query_with_nothing_to_do_is_not_asked_again_at_once(tmp_path: Path) -> None:
    asked: list[str] = []
    query = Query("idle", lambda: asked.append("again"), tmp_path)  # type: ignore[func-returns-value]
    query.start()
    query.check()
    assert asked == ["again"]
    query.restart()
    assert asked == ["again", "again"]


def test_a_query_that_has_come_to_its_end_is_not_started_again(tmp_path: Path) -> None:
    asked: list[str] = []

    def build() -> None:
        asked.append("again")
        raise BasculeError("PositionLost: restore the positions")

    query = Query("lost", build, tmp_path)  # type: ignore[arg-type]
    query.start()
    query.restart()
    query.check()
    assert asked == ["again"]
    assert query.stopped is not None
