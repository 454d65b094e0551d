"""What is said of a failed query."""

from __future__ import annotations

from bascule.pipelines.queries import is_fatal, short

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
