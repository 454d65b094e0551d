"""Waiting tasks in a real Spark: their records, what they refuse, and what is left when a part of them fails or is killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bascule.embedded.kafka import EmbeddedKafka
from bascule.jms.message import JmsMessage, encode_message
from bascule.pipelines import exchange
from bascule.pipelines.exchange import AskedMessage, NotTransformed, Transformer
from bascule.pipelines.failures import FAILURES, crossing
from bascule.pipelines.rows import ARROW_ROWS
from bascule.pipelines.spec import DivertSpec
from bascule.pipelines.tasks import MADE_BYTES_MAX
from bascule.pipelines.waiting import new_job, sunk, waiting_frame
from bascule.pipelines.waiting_plans import why_not
from tests.scenarios.bridge import Bridge
from tests.scenarios.test_transforming import spark
from tests.support.journal import text_message
from tests.support.spark_processes import daemons, workers
from tests.support.system import wait_for

__all__ = ["spark"]  # a fixture
pytestmark = pytest.mark.timeout(900)

#: So many that Spark hands over their rows in several parts: some have reached the sink when a later one fails.
MANY = 2 * ARROW_ROWS + 500


def messages(count: int) -> list[AskedMessage]:
    return [
        AskedMessage(
            7 + number, 0, 1 + number, 0, "orders", 1, encode_message(JmsMessage(body_kind="text", body=str(number), timestamp_ms=1))
        )
        for number in range(count)
    ]


@contextmanager
def waiting(session: SparkSession, divert: DivertSpec, path: str, count: int = 20) -> Iterator[Callable[[int], list[tuple[str, str]]]]:
    """Run one waiting task. Yield what returns the records (key and value) of a number of messages."""
    tag = f"test-{new_job()}"

    def run() -> None:
        job = new_job()
        session.sparkContext.addJobTag(tag)
        records = sunk(waiting_frame(session, divert, path, job, crossing, count), divert, path, job, crossing)
        with suppress(*FAILURES):  # it ends when it is cancelled
            records.write.format("noop").mode("overwrite").save()

    with Transformer(path, [divert.name]) as transformer:
        thread = threading.Thread(target=run)
        thread.start()

        def carried(count: int) -> list[tuple[str, str]]:
            found = transformer.records({divert.name: messages(count)}, MADE_BYTES_MAX)[divert.name]
            return [(bytes(row[4] or b"").decode(), bytes(row[5] or b"").decode()) for row in found]

        try:
            yield carried
        finally:
            deadline_s = time.monotonic() + 60
            while thread.is_alive() and time.monotonic() < deadline_s:
                session.sparkContext.cancelJobsWithTag(tag)
                thread.join(0.2)
    assert not thread.is_alive()


def lucky(text: str) -> str:
    if text == str(MANY - 5):
        raise RuntimeError("unlucky")
    return text


def failing_udf(frame: DataFrame) -> DataFrame:
    """Fail in Python on one of many messages."""
    checked = F.udf(lambda text: lucky(text), "string")  # from type hints, PySpark would infer another kind of function
    return frame.withColumn("value", checked("text"))


def failing_frames(frame: DataFrame) -> DataFrame:
    """Fail in a function of data frames on one of many messages."""

    def changed(parts: Iterator[object]) -> Iterator[object]:
        for part in parts:
            if (part["text"] == str(MANY - 5)).any():  # type: ignore[index]
                raise RuntimeError("unlucky")
            yield part

    return frame.mapInPandas(changed, frame.schema)


def joined(frame: DataFrame) -> DataFrame:
    """Join with a static table in memory."""
    prices = frame.sparkSession.createDataFrame([(str(number), f"p{number}") for number in range(3)], "text string, price string")
    return frame.join(F.broadcast(prices), "text").withColumn("value", F.col("price"))


def doubled(frame: DataFrame) -> DataFrame:
    return frame.withColumn("value", F.explode(F.array("text", F.concat("text", F.lit("+")))))


def preserving(frame: DataFrame) -> DataFrame:
    table = frame.sparkSession.createDataFrame([("a",)], "other string")
    return frame.join(F.broadcast(table), F.col("text") > F.col("other"), "right").withColumn("value", F.col("text"))


def cached(frame: DataFrame) -> DataFrame:
    return frame.cache().withColumn("value", F.col("text"))


def counted(frame: DataFrame) -> DataFrame:
    frame.count()
    return frame.withColumn("value", F.col("text"))


def of(name: str) -> DivertSpec:
    """Return a divert with a function of this module."""
    return DivertSpec(name, "#", function=f"{__name__}:{name}")


def select(*expressions: str) -> DivertSpec:
    return DivertSpec("select", "#", select=expressions)


@pytest.mark.parametrize(
    ("divert", "made"),
    [
        (select("upper(concat(text, 'x')) AS value"), ["0X", "1X", "2X", "3X"]),
        (of("doubled"), ["0", "0+", "1", "1+", "2", "2+", "3", "3+"]),
        (of("joined"), ["p0", "p1", "p2"]),
    ],
    ids=lambda each: each.name if isinstance(each, DivertSpec) else "",
)
def test_waiting_task_makes_the_records_of_one_batch_after_another(
    spark: SparkSession, tmp_path: Path, divert: DivertSpec, made: list[str]
) -> None:
    assert why_not(spark, divert) is None
    with waiting(spark, divert, str(tmp_path / "task")) as carried:
        for _ in range(3):
            assert sorted(value for _, value in carried(4)) == made
        assert carried(0) == []


def test_random_values_are_others_in_each_batch(spark: SparkSession, tmp_path: Path) -> None:
    with waiting(spark, select("uuid() AS key", "string(rand()) AS value"), str(tmp_path / "task")) as carried:
        made = [record for _ in range(3) for record in carried(4)]
    assert len({key for key, _ in made}) == len({value for _, value in made}) == len(made) == 12


@pytest.mark.parametrize(
    ("divert", "why"),
    [
        (select("string(now()) AS value"), "current time"),
        (select("string(current_date()) AS value"), "current time"),
        (select("(SELECT max(id) FROM range(3)) || text AS value"), "subquery"),
        (of("preserving"), "join of the kind"),
        (of("cached"), "InMemoryTableScan"),
        (of("counted"), "cannot be planned"),
    ],
)
def test_transformation_that_cannot_wait_is_named_with_the_reason(spark: SparkSession, divert: DivertSpec, why: str) -> None:
    found = why_not(spark, divert)
    assert found is not None
    assert why in found.reason
    assert found.lasting is (why != "cannot be planned")


@pytest.mark.parametrize(
    "divert",
    [
        select(f"if(text = '{MANY - 5}', raise_error('unlucky'), text) AS value"),
        of("failing_udf"),
        of("failing_frames"),
    ],
    ids=["sql", "udf", "frames"],
)
def test_operator_that_fails_within_a_batch_leaves_no_part_of_it_as_its_result(
    spark: SparkSession, tmp_path: Path, divert: DivertSpec
) -> None:
    """Spark closes the connection to the sink, and Arrow takes this for the end of the rows (``check_end``)."""
    with waiting(spark, divert, str(tmp_path / "task")) as carried:
        assert len(carried(10)) == 10
        with pytest.raises(NotTransformed, match="ended without an answer"):
            carried(MANY)


@pytest.mark.parametrize("victims", ["workers", "daemon"])
def test_batch_of_a_task_whose_workers_are_killed_is_not_taken_for_complete(
    spark: SparkSession, tmp_path: Path, victims: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "READY_S", 5.0)  # nothing starts the task again
    jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]
    divert = select("text AS value")
    with waiting(spark, divert, str(tmp_path / "task")) as carried:
        assert len(carried(10)) == 10
        wait_for(lambda: workers(jvm), "workers")
        for pid in (*(daemons(jvm) if victims == "daemon" else ()), *workers(jvm)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(NotTransformed):
            assert len(carried(10)) == 10


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Iterator[Bridge]:
    found = Bridge(kafka, topic_prefix, tmp_path)
    yield found
    found.child.stop(60)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["worker", "workers", "daemons", "jvm", "driver"])
def test_transformed_messages_arrive_exactly_once_when_a_process_is_killed(bridge: Bridge, victim: str) -> None:
    """Kill it while messages are carried: no message is taken for one that the transformation left out."""
    bridge.configure(f"""
[[divert]]
name = "made"
from = "flights"
to = "{bridge.prefix}.made"
select = ["concat('t', text) AS value"]
start = "earliest"
[[divert]]
name = "plain"
from = "flights"
to = "{bridge.prefix}.plain"
start = "earliest"
""")
    journal = bridge.journal
    journal.start_epoch()
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for _ in range(count):
            journal.send(text_message(str(sent)))
            sent += 1
        journal.flush()

    send(500)
    bridge.start()
    made, plain = bridge.reader(f"{bridge.prefix}.made"), bridge.reader(f"{bridge.prefix}.plain")
    made.wait_for(sent)
    assert "divert stays in micro-batches" not in bridge.said()
    for round_number in range(3):
        send(3_000)
        made.wait_for(sent - 2_500)
        found = {
            "worker": bridge.workers()[round_number % 2 :][:1],
            "workers": bridge.workers(),
            "daemons": bridge.daemons(),
            "jvm": bridge.jvms(),
            "driver": [],
        }[victim]
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if victim == "driver":
            bridge.child.kill()
        if victim in {"driver", "jvm"}:
            wait_for(lambda: bridge.child.returncode is not None, "the driver to end")
            bridge.start()
    send(100)
    assert made.wait_for(sent) == [f"t{number}" for number in range(sent)]
    assert plain.wait_for(sent) == [str(number) for number in range(sent)]
    made.poll()
    assert len(made.seen) == sent
    made.close()
    plain.close()
