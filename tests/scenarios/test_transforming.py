"""Batches with transformations, in a Spark session of this process and on a real Kafka."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bascule.embedded.kafka import EmbeddedKafka
from bascule.pipelines.batches import BatchFailed
from bascule.pipelines.pools import WorkerPools
from bascule.pipelines.spark import journal_rows, kafka_range, spark_context, sql_session
from bascule.pipelines.spec import DivertSpec, PipelinesSpec
from bascule.pipelines.tasks import DivertTask
from bascule.pipelines.transforming import TransformingBatch
from bascule.writer.position import Position
from tests.scenarios.sparkless import Bridge
from tests.support.journal import text_message

#: Names the file that ``priced`` joins messages with.
PRICES = "BASCULE_TEST_PRICES"


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    session = sql_session(spark_context(PipelinesSpec("bridge", {}, master="local[1]")))
    yield session
    gateway = session.sparkContext._gateway
    assert gateway is not None
    session.stop()
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(120)
    SparkContext._gateway = SparkContext._jvm = None


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str) -> Bridge:
    found = Bridge(kafka, topic_prefix)
    found.positions.prepare_topics()
    found.journal.start_epoch()
    return found


def priced(messages: DataFrame) -> DataFrame:
    """Transform messages as a user's function with a static side that may be out of order."""
    prices = messages.sparkSession.read.schema("text string, price string").option("mode", "FAILFAST").json(os.environ[PRICES])
    return messages.join(F.broadcast(prices), "text").withColumn("value", F.col("price"))


def task_of(bridge: Bridge, divert: DivertSpec, made_bytes_max: int) -> DivertTask:
    """Return a divert that starts at the beginning of the journal."""
    pipelines, key = bridge.pipelines, bridge.positions.common_key
    topic_id = bridge.topics.ids([pipelines.topics.journal])[pipelines.topics.journal]
    position = Position(pipelines.topics.journal, topic_id, 0, 0, epoch=-1, sequence=0, members=(divert.name,), owner="me")
    with closing(bridge.positions.writer(key)) as writer:
        writer.write([], writer.current(), position)
    return DivertTask(pipelines, bridge.positions.claim(key, position), (divert,), made_bytes_max=made_bytes_max)


def carry(spark: SparkSession, bridge: Bridge, task: DivertTask) -> None:
    """Run one batch over the whole journal."""
    pools = WorkerPools(lambda: spark.sparkContext)
    journal = journal_rows(kafka_range(spark, bridge.pipelines, bridge.pipelines.topics.journal, 0, 0, bridge.end()))
    TransformingBatch(task, bridge.pipelines.topics.prefix, pools.using)(journal)  # a worker keeps clients for the topics of one bridge


@pytest.mark.slow  # each part that is too large costs Spark a worker
def test_batch_above_the_memory_limit_is_transformed_in_parts_and_keeps_its_order(spark: SparkSession, bridge: Bridge) -> None:
    sizes = [5, 40]
    texts = [[f"r{record}m{index}" for index in range(size)] for record, size in enumerate(sizes)]
    for record in texts:
        bridge.journal.send(*map(text_message, record))
    bridge.journal.flush()
    task = task_of(bridge, bridge.divert("upper", select=("upper(text) AS value",)), made_bytes_max=15_000)
    carry(spark, bridge, task)
    assert bridge.carried("upper") == [text.upper() for record in texts for text in record]
    assert bridge.dead() == []


@pytest.mark.slow
def test_failure_without_a_pyspark_error_class_dead_letters_only_its_message(spark: SparkSession, bridge: Bridge) -> None:
    bridge.send('{"a": 1}', "no JSON", '{"a": 2}')
    select = "string(from_json(text, 'a int', map('mode', 'FAILFAST')).a) AS value"
    carry(spark, bridge, task_of(bridge, bridge.divert("strict", select=(select,)), made_bytes_max=1 << 20))
    assert bridge.carried("strict") == ["1", "2"]
    assert bridge.dead() == ["strict: no JSON"]


@pytest.mark.slow
def test_failure_independent_of_messages_fails_the_batch_and_dead_letters_no_message(
    spark: SparkSession, bridge: Bridge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prices = tmp_path / "prices.json"
    monkeypatch.setenv(PRICES, str(prices))
    prices.write_text("being replaced")
    bridge.send("a", "b")
    task = task_of(bridge, bridge.divert("priced", function=f"{__name__}:priced"), made_bytes_max=1 << 20)
    with pytest.raises(BatchFailed, match="FAILED_READ_FILE"):
        carry(spark, bridge, task)
    assert bridge.dead() == []
    prices.write_text('{"text": "a", "price": "1"}\n{"text": "b", "price": "2"}\n')
    carry(spark, bridge, task)
    assert bridge.carried("priced") == ["1", "2"]
    assert bridge.dead() == []


def test_static_table_of_a_transformation_has_as_many_parts_as_spark_has_cores(spark: SparkSession) -> None:
    assert spark.createDataFrame([(str(number),) for number in range(300)], "text string").rdd.getNumPartitions() == 1
