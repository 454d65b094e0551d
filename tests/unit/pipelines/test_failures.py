"""Errors keep their class when they cross Spark's boundaries. No other text is mistaken for an error of Bascule."""

from __future__ import annotations

import gc
import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark import cloudpickle
from pyspark.errors import PySparkException

from bascule.core import log
from bascule.core.errors import BadRecord, BasculeError, TooLarge, TopicMissing, TransactionRolledBack, Unavailable, error_classes
from bascule.pipelines.failures import TEXT_MAX, CarriedError, crossing, crossing_batch, described, encoded, error_from_spark, short
from bascule.writer.position import PositionTaken
from tests.support.spark_texts import BATCH, FOREACH_BATCH, QUERY, TRACEBACK, WORKER, said_by_spark

TAKEN = PositionTaken("another driver has taken over 'k'")
TEXTS = pytest.mark.parametrize("text", [BATCH, QUERY, FOREACH_BATCH], ids=["batch", "query", "foreach batch"])


@TEXTS
def test_error_of_task_or_batch_function_keeps_class_text_and_fields_across_spark(text: str) -> None:
    found = error_from_spark(said_by_spark(text, TopicMissing("orders", 'does not exist:\n\u2028\ud800 "create" it')))
    assert isinstance(found, TopicMissing)
    assert str(found) == "topic 'orders' does not exist:\n\u2028\ud800 \"create\" it"
    assert (found.topic, found.retriable) == ("orders", False)


def test_overridden_error_attributes_are_kept_across_spark() -> None:
    error = TransactionRolledBack("was rolled back", transaction_id="shop-1", cause=TooLarge("x"))
    found = error_from_spark(said_by_spark(QUERY, error))
    assert isinstance(found, TransactionRolledBack)
    assert (found.transaction_id, found.condition, found.http_status) == ("shop-1", TooLarge.condition, TooLarge.http_status)


def test_error_of_unknown_class_keeps_name_and_retriability_across_spark() -> None:
    strange = type("Strange", (BasculeError,), {"retriable": True})
    failure = PySparkException(encoded(strange("why")).replace("Strange", "Stranger"))
    assert error_from_spark(failure) is None  # the checksum of the changed text does not match
    data = encoded(strange("why"))
    del strange
    gc.collect()
    assert "Strange" not in {each.__name__ for each in error_classes()}
    found = error_from_spark(PySparkException(data))
    assert (type(found), str(found), found is not None and found.retriable) == (BasculeError, "Strange: why", True)


def test_long_error_text_is_truncated_across_spark() -> None:
    found = error_from_spark(said_by_spark(FOREACH_BATCH, BadRecord("x" * 10_000)))
    assert str(found) == "x" * TEXT_MAX


@TEXTS
@pytest.mark.parametrize(
    "raised",
    [
        "RuntimeError: unlucky",
        "bascule.writer.position.PositionTaken: x",
        "bascule.pipelines.failures.CarriedError: " + encoded(TAKEN, "0" * 32),
        "bascule.pipelines.failures.CarriedError: " + encoded(TAKEN)[:-1],
        "bascule.pipelines.failures.CarriedError: " + encoded(TAKEN).replace("k", "K"),
        "bascule.pipelines.failures.CarriedError: " + ":".join(encoded(TAKEN).split(":")[:3]),
        "bascule.pipelines.failures.CarriedError: " + ":".join([*encoded(TAKEN).split(":")[:3], "much", "{}"]),
    ],
    ids=["user", "class name", "other secret", "cut", "changed", "nothing", "no length"],
)
def test_foreign_exception_text_is_not_decoded_as_error(text: str, raised: str) -> None:
    assert error_from_spark(PySparkException(text.format(traceback=TRACEBACK, raised=raised))) is None


def test_valid_encoded_error_is_found_after_damaged_one() -> None:
    both = f"{encoded(BadRecord('first'))[:-5]} {encoded(TAKEN)}"
    assert isinstance(error_from_spark(PySparkException(both)), PositionTaken)


def test_error_outside_of_spark_is_returned_unchanged() -> None:
    assert error_from_spark(TAKEN) is TAKEN
    assert isinstance(error_from_spark(CarriedError(encoded(TAKEN))), PositionTaken)
    assert error_from_spark(ValueError("x")) is None


@pytest.mark.parametrize(("error", "kind"), [(TAKEN, CarriedError), (KeyError("x"), KeyError)])
def test_task_encodes_only_bascule_errors(error: Exception, kind: type[Exception]) -> None:
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        yield from batches
        raise error

    given = crossing(task)(iter(["a", "b"]))
    assert [next(given), next(given)] == ["a", "b"]
    with pytest.raises(kind) as raised:
        next(given)
    assert isinstance(error_from_spark(raised.value), PositionTaken) == (kind is CarriedError)


def test_batch_function_encodes_only_bascule_errors() -> None:
    def batch(_frame: object, batch_id: int) -> None:
        raise Unavailable("no Kafka") if batch_id else KeyError("x")

    with pytest.raises(CarriedError) as raised:
        crossing_batch(batch)(None, 1)  # type: ignore[arg-type]
    assert raised.value.__suppress_context__
    assert isinstance(error_from_spark(raised.value), Unavailable)
    with pytest.raises(KeyError):
        crossing_batch(batch)(None, 0)  # type: ignore[arg-type]


def test_worker_process_encodes_errors_with_secret_of_driver() -> None:
    def task(_: Iterator[Any]) -> Iterator[Any]:
        from bascule.core.errors import BadRecord

        raise BadRecord("in a worker")

    code = "import pickle, sys\ntry:\n    list(pickle.load(sys.stdin.buffer)(iter([])))\nexcept Exception as error:\n    print(error)"
    done = subprocess.run([sys.executable, "-c", code], input=cloudpickle.dumps(crossing(task)), capture_output=True, check=True)
    found = error_from_spark(PySparkException(done.stdout.decode()))
    assert (type(found), str(found)) == (BadRecord, "in a worker")
    assert pickle.loads(cloudpickle.dumps(crossing(task))) is not None


def test_worker_process_uses_log_settings_of_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def task(batches: Iterator[Any]) -> Iterator[Any]:
        from bascule.core.log import get_log

        get_log("bascule.worker").info("record passed over", offset=7)
        yield from batches

    monkeypatch.setattr(log, "_configured", log.LogSettings("json"))
    code = "import pickle, sys\nlist(pickle.load(sys.stdin.buffer)(iter([])))"
    done = subprocess.run([sys.executable, "-c", code], input=cloudpickle.dumps(crossing(task)), capture_output=True, check=True)
    output = json.loads(done.stderr)
    assert (done.stdout, output["logger"], output["event"], output["offset"]) == (b"", "bascule.worker", "record passed over", 7)


def test_error_description_names_bascule_errors_and_shortens_other_stack_traces() -> None:
    assert described(said_by_spark(QUERY, TAKEN)) == "PositionTaken: another driver has taken over 'k'"
    assert described(PySparkException(WORKER)) == "RuntimeError: unlucky"


def test_short_text_of_worker_traceback_is_its_error() -> None:
    assert short(WORKER) == "RuntimeError: unlucky"


def test_short_text_of_java_stack_is_its_messages() -> None:
    output = "Job aborted\n\tat a.b(C.scala:1)\nCaused by: java.io.EOFException\n\t... 8 more"
    assert short(output) == "Job aborted | Caused by: java.io.EOFException"
