"""``writeStream.format("bascule")``, called as Spark calls it, on the mock cluster. The scenarios run the imported tests on Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError
from pyspark import TaskContext
from pyspark.sql import Row
from pyspark.sql.types import BinaryType, IntegerType, StringType, StructField, StructType

from bascule.core.destination import Routing
from bascule.core.errors import BadRecord, InvalidInput, Unavailable
from bascule.core.topics import JournalTopics
from bascule.jms.message import decode_message
from bascule.journal.records import KafkaOrigin, Op, Send, SendFlag, decode_header, decode_send, entries
from bascule.kafka.history import TopicHistory
from bascule.kafka.positions import PositionReader
from bascule.pipelines import sink as module
from bascule.pipelines.sink import DestinationWriter, Encoded
from bascule.writer.errors import Unwritable
from bascule.writer.position import POSITION_PARTITIONS, Position
from tests.scenarios.test_sink import (  # noqa: F401 - the same on the mock cluster
    TEXTS,
    test_job_without_earlier_pipelines_creates_only_positions_and_ingress_topics,
    test_repeated_batch_is_written_once_and_invalid_repeat_is_refused,
)
from tests.support.mock_cluster import MockCluster

#: The API key of Kafka's Produce request.
PRODUCE = 0


def schema(**columns: Any) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


def writer(options: dict[str, str] | None = None, columns: StructType = TEXTS, kafka: dict[str, Any] | None = None) -> DestinationWriter:
    return DestinationWriter({"id": "w", "address": "q"} if options is None else options, kafka or {}, columns)


@pytest.mark.parametrize(
    ("options", "columns", "said"),
    [
        ({"address": "q"}, TEXTS, "option id is missing"),
        ({"id": "", "address": "q"}, TEXTS, "option id is missing"),
        ({"id": "w", "address": "q", "Routing": "fanout"}, TEXTS, "option routing is 'fanout'; must be 'queue' or 'topic'"),
        ({"id": "w"}, TEXTS, "set column `address` or option address"),
        ({"id": "w", "address": "q"}, schema(text=StringType()), "column `value` is missing"),
        ({"id": "w", "address": "q"}, schema(value=IntegerType()), "column `value` is int; it must be string or binary"),
        (
            {"id": "w", "address": "q"},
            schema(value=StringType(), who=StringType(), colour=StringType()),
            "unknown columns: colour, who; known columns are address, correlation_id, group_id, message_id, priority,",
        ),
    ],
)
def test_missing_option_or_unknown_column_is_refused(options: dict[str, str], columns: StructType, said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        writer(options, columns)


def test_option_names_are_case_insensitive_and_address_may_be_column() -> None:
    writer({"ID": "w", "Address": "q"})
    writer({"id": "w"}, schema(value=BinaryType(), address=StringType()))


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> Iterator[TaskContext]:
    """The context of a task of the streaming query ``query``, as a Spark worker sets it."""
    context = TaskContext._getOrCreate()
    context._localProperties = {"sql.streaming.queryId": "query"}
    yield context
    TaskContext._setTaskContext(None)  # type: ignore[arg-type]


def sends(encoded: Encoded) -> list[Send]:
    return [decode_send(value, start, end) for value in encoded.values for op, start, end in entries(value) if op == Op.SEND]


def test_row_becomes_message_with_fields_of_its_columns(task: TaskContext) -> None:
    row = Row(
        value="text", address="other", message_id="ID:1", correlation_id="c", type="t", group_id="g", reply_to="r", priority=7,
        properties={"n": "1"},
    )  # fmt: skip
    encoded = writer({"id": "w", "address": "q", "routing": "topic"}).write(iter([row]))
    (send,) = sends(encoded)
    assert encoded.query == "query"
    assert (decode_header(encoded.values[0]).epoch, decode_header(encoded.values[0]).sequence) == (0, 0)
    assert (send.address, send.routing, send.priority, send.source) == ("other", Routing.MULTICAST, 7, KafkaOrigin("sink:w", 0, 0))
    assert send.flags == SendFlag.DURABLE | SendFlag.FROM_KAFKA | SendFlag.SOURCE | SendFlag.GROUPED
    message = decode_message(send.body)
    assert (message.message_id, message.correlation_id, message.type, message.group_id, message.reply_to) == ("ID:1", "c", "t", "g", "r")
    assert (message.priority, message.properties, message.body_kind, message.body) == (7, {"n": "1"}, "text", "text")
    assert (message.destination, message.destination_kind) == ("other", "topic")


def test_row_with_value_only_becomes_message_to_address_option(task: TaskContext) -> None:
    binary = writer(columns=schema(value=BinaryType()))
    (first, second) = sends(binary.write(iter([Row(value=bytearray(b"\x00\xff")), Row(value=b"x", priority=0)])))
    assert (first.address, first.routing, first.priority) == ("q", Routing.ANYCAST, 4)
    assert first.flags == SendFlag.DURABLE | SendFlag.FROM_KAFKA | SendFlag.SOURCE
    message = decode_message(first.body)
    assert (message.body_kind, message.body, message.destination_kind) == ("bytes", b"\x00\xff", "queue")
    assert second.priority == 0


def test_row_without_address_or_with_too_long_address_is_refused(task: TaskContext) -> None:
    with pytest.raises(InvalidInput, match="a row has no address"):
        writer({"id": "w"}, schema(value=StringType(), address=StringType())).write(iter([Row(value="x", address=None)]))
    with pytest.raises(BadRecord, match="an address has 1 to 1000 characters"):
        writer().write(iter([Row(value="x", address="a" * 1025)]))


@pytest.mark.parametrize("properties", [None, {}, {"sql.streaming.queryId": ""}])
def test_stream_writer_without_query_id_writes_nothing(task: TaskContext, properties: dict[str, str] | None) -> None:
    if properties is None:
        TaskContext._setTaskContext(None)  # type: ignore[arg-type]
    else:
        task._localProperties = properties
    with pytest.raises(InvalidInput, match="Spark does not name the streaming query"):
        writer().write(iter([Row(value="x")]))


def position(kafka: MockCluster, prefix: str) -> Position:
    reader = PositionReader(kafka.kafka, JournalTopics(prefix).positions, range(POSITION_PARTITIONS))
    try:
        return reader.read()["sink:w/batches/0"]
    finally:
        reader.close()


def test_sink_position_contains_next_batch_query_and_message_count(kafka: MockCluster, topic_prefix: str) -> None:
    options = {"id": "w", "address": "q", "prefix": topic_prefix, "unbound": "drop"}
    found = writer(options, kafka=kafka.kafka)
    found.commit([Encoded((b"1", b"2"), "query"), None, Encoded((b"3",), "query")], 0)
    assert position(kafka, topic_prefix) == Position("batches", "query", 0, 1, sequence=3)
    found.commit([Encoded((b"4",), "query")], 1)
    assert position(kafka, topic_prefix) == Position("batches", "query", 0, 2, sequence=1)
    history = TopicHistory(kafka.kafka, JournalTopics(topic_prefix).ingress, 0)
    records = list(history.records(0, history.latest()))
    assert [record.value() for record in records] == [b"1", b"2", b"3", b"4"]
    assert {tuple(record.headers() or ()) for record in records} == {(("unbound", b"drop"),)}
    found.abort([], 2)
    assert position(kafka, topic_prefix).offset == 2


@pytest.mark.parametrize("raised", [Unwritable({0: KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)}), Unavailable("no Kafka")])
def test_refused_batch_ends_its_transaction_and_closes_writer(
    kafka: MockCluster, topic_prefix: str, monkeypatch: pytest.MonkeyPatch, raised: Exception
) -> None:
    ended: list[str] = []
    closed: list[str] = []

    class Refusing(module.TransactionalWriter):
        def write(self, *_: Any) -> None:
            raise raised

        def close(self) -> None:
            closed.append(self.key)
            super().close()

    monkeypatch.setattr(module, "TransactionalWriter", Refusing)
    monkeypatch.setattr(module, "end_open_transactions", lambda _, ids: ended.extend(ids))
    with pytest.raises(type(raised)):
        writer({"id": "w", "address": "q", "prefix": topic_prefix}, kafka=kafka.kafka).commit([Encoded((b"1",), "query")], 0)
    assert ended == [f"{topic_prefix}.bascule.sink:w/batches/0"]
    assert closed == ["sink:w/batches/0"]
