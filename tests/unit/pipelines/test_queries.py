"""When a query is started, and what is said of one that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bascule.pipelines.queries import Query, is_fatal, short
from bascule.writer.position import PositionLost

WORKER = """An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "changes.py", line 7, in checked
    raise RuntimeError("unlucky")
RuntimeError: unlucky

\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:1)
"""


class Ended:
    """A streaming query that has failed."""

    isActive = False  # noqa: N815 - Spark's name

    def __init__(self, said: str) -> None:
        self._said = said

    def exception(self) -> str:
        return self._said


def failed(said: str, directory: Path) -> Query:
    """One that has been looked at after Spark's had failed so."""
    query = Query("failed", lambda: None, directory, running=Ended(said))  # type: ignore[arg-type]
    query.check()
    return query


def test_of_a_workers_traceback_the_error_is_told() -> None:
    assert short(WORKER) == "RuntimeError: unlucky"


def test_of_javas_stack_the_messages_are_told() -> None:
    said = "Job aborted\n\tat a.b(C.scala:1)\nCaused by: java.io.EOFException\n\t... 8 more"
    assert short(said) == "Job aborted | Caused by: java.io.EOFException"


TAKEN = "bascule.writer.position.PositionTaken: another driver has taken over 'k'"
TRACEBACK = """Traceback (most recent call last):
  File "rules.py", line 14, in priced
    raise BadRecord(text)
"""
BATCH = """An exception was thrown from the Python worker:
{traceback}{raised}"""
QUERY = """[PYTHON_EXCEPTION] An exception was thrown from the Python worker: {traceback}{raised}
 SQLSTATE: 38000
=== Streaming Query ===
Identifier: [id = 98f451f6-47bf-40ac-9e7b-5d6c708220b2, runId = 187906c0-78fe-4ec0-bad1-dd6837aa5073]

Logical Plan:
WriteToMicroBatchDataSource noop-table

JVM stacktrace:
org.apache.spark.sql.execution.streaming.runtime.StreamExecution.runStream(StreamExecution.scala:1)
"""
FOREACH_BATCH = """An exception was raised by the Python Proxy. Return Message: Traceback (most recent call last):
  File "py4j/clientserver.py", line 644, in _call_proxy
    return_value = getattr(self.pool[obj_id], method)(*params)
                   ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "bascule/pipelines/transforming.py", line 50, in __call__
    raise BatchFailed(short(str(error))) from None
bascule.pipelines.transforming.BatchFailed: {raised}

=== Streaming Query ===
"""


@pytest.mark.parametrize("text", ["{raised}", BATCH, QUERY, FOREACH_BATCH], ids=["short", "batch", "query", "foreach batch"])
def test_an_error_that_starting_again_cannot_mend_is_known_by_its_name(text: str, tmp_path: Path) -> None:
    said = text.format(traceback=TRACEBACK, raised=TAKEN)
    assert is_fatal(said)
    assert is_fatal(short(said))
    query = failed(said, tmp_path)
    assert (query.stopped or "").endswith(TAKEN)
    assert query.superseded


@pytest.mark.parametrize("text", [BATCH, QUERY, FOREACH_BATCH], ids=["batch", "query", "foreach batch"])
@pytest.mark.parametrize(
    "raised",
    [
        "RuntimeError: unlucky",
        "shop.rules.BadRecord: too dear",
        "ValueError: no price: 'PositionTaken: x'",
        f"ValueError: no price: {TAKEN}",
        f"ValueError: no price:\n{TAKEN}",
        f"ValueError: no price:\n{TRACEBACK}{TAKEN}",
    ],
)
def test_the_text_of_somebody_elses_error_stops_no_pipeline(text: str, raised: str, tmp_path: Path) -> None:
    said = text.format(traceback=TRACEBACK, raised=raised)
    assert not is_fatal(said)
    assert not is_fatal(short(said))
    assert failed(said, tmp_path).stopped is None


@pytest.mark.parametrize(
    "quoted", ["PositionTaken: x", f"x\n{TAKEN}", f"x\n{TRACEBACK}{TAKEN}", f"{QUERY.format(traceback=TRACEBACK, raised=TAKEN)}"]
)
@pytest.mark.parametrize("text", ["{raised}", FOREACH_BATCH], ids=["query", "foreach batch"])
def test_the_text_of_a_message_that_spark_quotes_stops_no_pipeline(text: str, quoted: str, tmp_path: Path) -> None:
    said = f"""[CAST_INVALID_INPUT] The value '{quoted}' of the type "STRING" cannot be cast to "INT" because it is malformed."""
    assert not is_fatal(short(said))
    said = text.format(raised=said if text == "{raised}" else short(said))
    assert not is_fatal(said)
    assert failed(said, tmp_path).stopped is None


def test_a_users_class_of_a_name_of_ours_stops_no_pipeline(tmp_path: Path) -> None:
    # One of the main module has no module's name before its own.
    assert failed(BATCH.format(traceback=TRACEBACK, raised="BadRecord: too dear"), tmp_path).stopped is None


def test_a_pipeline_that_stops_for_another_reason_is_not_superseded(tmp_path: Path) -> None:
    query = failed("BadRecord: no JSON: 'PositionTaken: x'", tmp_path)
    assert query.stopped == "BadRecord: no JSON: 'PositionTaken: x'"
    assert not query.superseded


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
        raise PositionLost("restore the positions")

    query = Query("lost", build, tmp_path)  # type: ignore[arg-type]
    query.start()
    query.restart()
    query.check()
    assert asked == ["again"]
    assert query.stopped is not None
