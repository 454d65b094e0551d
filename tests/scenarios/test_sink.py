"""The writer of a Spark job on a real Kafka; the test passes batches as Spark does."""

from __future__ import annotations

from contextlib import closing

import pytest
from pyspark.sql.types import StringType, StructField, StructType

from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import transactional
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory
from bascule.pipelines.sink import DestinationWriter, Encoded
from bascule.writer.errors import Unwritable
from bascule.writer.position import PositionLost
from tests.scenarios.changed_topics import set_topic
from tests.scenarios.topics import Reader
from tests.support.system import wait_for

TEXTS = StructType([StructField("value", StringType())])


def test_repeated_batch_is_written_once_and_invalid_repeat_is_refused(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    options = {"id": "w", "address": "q", "prefix": topic_prefix, "bridge": topic_prefix}

    def write(batch: int, query: str = "first", more: int = 0) -> None:
        writer = DestinationWriter(options, {"bootstrap.servers": kafka.bootstrap}, TEXTS)
        writer.commit([Encoded((f"{query} {batch}".encode(),), query), Encoded((b"more",) * more, query)], batch)

    for batch in (0, 0, 1, 2, 2):
        write(batch)
    with pytest.raises(PositionLost, match="has written batch 2, and Spark repeats batch 1"):
        write(1)
    for batch in (0, 2, 3):
        with pytest.raises(PositionLost, match="belongs to query 'first', and this checkpoint belongs to query 'second"):
            write(batch, "second")
    write(3)
    with pytest.raises(PositionLost, match="has written batch 3 with 1 messages, and Spark repeats the batch with 2"):
        write(3, more=1)
    with closing(Reader(kafka.bootstrap, f"{topic_prefix}.ingress")) as reader:
        assert reader.read_until("first 3") == [f"first {batch}" for batch in range(4)]


def test_batch_refused_by_kafka_leaves_no_open_transaction(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka would end the transaction by itself after five minutes, whatever the writer does."""
    monkeypatch.setattr(transactional, "TRANSACTION_TIMEOUT_MS", transactional.LONG_TRANSACTION_TIMEOUT_MS)
    options = {"id": "w", "address": "q", "prefix": topic_prefix, "bridge": topic_prefix}
    writer = DestinationWriter(options, {"bootstrap.servers": kafka.bootstrap}, TEXTS)
    writer.commit([Encoded((b"first",), "query")], 0)
    ingress = f"{topic_prefix}.ingress"
    set_topic(kafka.bootstrap, ingress, "max.message.bytes", "1000")
    with pytest.raises(Unwritable):
        writer.commit([Encoded((b"second", b"x" * 5000), "query")], 1)
    history = TopicHistory({"bootstrap.servers": kafka.bootstrap}, ingress, 0)
    # The end marker reaches the partition a moment after the answer.
    wait_for(lambda: history.stable() == history.latest(), "the end of the transaction")


def test_job_without_earlier_pipelines_creates_only_positions_and_ingress_topics(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    topics = Topics({"bootstrap.servers": kafka.bootstrap})
    before = topics.partitions().keys()
    options = {"id": "w", "address": "q", "prefix": topic_prefix}
    DestinationWriter(options, {"bootstrap.servers": kafka.bootstrap}, TEXTS).commit([Encoded((), "query")], 0)
    made = topics.partitions().keys() - before
    assert made - {"__transaction_state", "__consumer_offsets"} == {f"{topic_prefix}.positions", f"{topic_prefix}.ingress"}
