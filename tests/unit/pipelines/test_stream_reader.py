"""``readStream.format("bascule")``, called as Spark calls it, on the mock cluster. The scenarios run the imported tests on Kafka."""

from __future__ import annotations

from functools import partialmethod
from typing import Any

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from pyspark.sql.types import StringType, StructField, StructType

from bascule.core.errors import InvalidInput, Unavailable
from bascule.journal.records import Kind, Op, SendFlag, json_entry
from bascule.pipelines import source as module
from bascule.pipelines.rows import ROW_SCHEMA
from bascule.pipelines.sink import DestinationWriter
from bascule.pipelines.source import BasculeDataSource, JournalStreamReader, kafka_settings, register
from bascule.writer.position import PositionLost
from tests.scenarios.sparkless import Bridge as Sparkless
from tests.scenarios.test_source import (  # noqa: F401 - the same on the mock cluster
    Job,
    malformed,
    test_malformed_message_becomes_a_row_with_its_raw_body_and_the_reason,
    test_malformed_message_is_dropped_and_logged_in_mode_dropmalformed,
    test_malformed_message_stops_a_failfast_job_which_continues_in_mode_permissive,
    test_stream_resumes_from_offset_of_an_earlier_version_and_stores_the_journal_id,
    test_stream_stops_when_its_unread_records_are_trimmed,
    test_unknown_reader_mode_is_refused_with_the_valid_modes,
)
from tests.support.mock_cluster import MockCluster


@pytest.fixture
def bridge(kafka: Any, topic_prefix: str) -> Sparkless:
    """A bridge whose journal has an epoch with two messages and ends at offset 3."""
    found = Sparkless(kafka, topic_prefix)
    found.journal.start_epoch()
    found.send("1", "2")
    return found


def reader(bridge: Sparkless, **options: str) -> JournalStreamReader:
    return JournalStreamReader(
        {"kafka.bootstrap.servers": bridge.pipelines.kafka["bootstrap.servers"], "prefix": bridge.pipelines.topics.prefix, **options}
    )


def texts(found: JournalStreamReader, start: int, end: int, journal_id: str | None = None) -> list[str]:
    (part,) = found.partitions({"offset": start}, {"offset": end, "journal_id": journal_id})
    return [row["text"] for rows in found.read(part) for row in rows.to_pylist()]


def test_kafka_settings_are_options_with_kafka_prefix() -> None:
    assert kafka_settings({"kafka.bootstrap.servers": "k:1", "kafka.sasl.username": "u", "id": "w"}) == {
        "bootstrap.servers": "k:1",
        "sasl.username": "u",
    }
    with pytest.raises(InvalidInput, match=r"option kafka\.bootstrap\.servers is missing"):
        kafka_settings({"bootstrap.servers": "k:1"})


def test_bascule_format_is_registered_for_streaming_read_and_write(bridge: Sparkless) -> None:
    class Session:
        registered: Any = None

        @property
        def dataSource(self) -> Session:
            return self

        def register(self, kind: Any) -> None:
            Session.registered = kind

    register(Session())  # type: ignore[arg-type]
    assert Session.registered is BasculeDataSource
    assert BasculeDataSource.name() == "bascule"
    format_ = BasculeDataSource({"kafka.bootstrap.servers": "127.0.0.1:1", "id": "w", "address": "q"})
    assert format_.schema() == ROW_SCHEMA
    texts_only = StructType([StructField("value", StringType())])
    assert isinstance(format_.streamReader(texts_only), JournalStreamReader)
    assert isinstance(format_.streamWriter(texts_only, overwrite=False), DestinationWriter)


@pytest.mark.parametrize(
    ("options", "offset"),
    [
        ({}, 3),
        ({"startingOffsets": "latest"}, 3),
        ({"startingoffsets": "earliest", "startingOffsets": "latest"}, 1),
        ({"startingOffsets": "99999999999999"}, 3),
    ],
)
def test_stream_starts_at_starting_offsets_option(bridge: Sparkless, options: dict[str, str], offset: int) -> None:
    bridge.trim(1)
    found = reader(bridge, **options).initialOffset()
    assert found == {"offset": offset, "journal_id": bridge.topics.id(bridge.pipelines.topics.journal), "leader_epoch": -1}


def test_batch_ends_at_read_limit_or_end_of_journal(bridge: Sparkless) -> None:
    found = reader(bridge, maxoffsetspertrigger="2")
    limit = found.getDefaultReadLimit()
    assert isinstance(limit, ReadMaxRows)
    assert limit.max_rows == 2
    start = {"offset": 0, "journal_id": "as it was"}
    assert found.latestOffset(start, limit) == {"offset": 2, "journal_id": "as it was", "leader_epoch": -1}
    assert found.latestOffset(start, ReadMaxRows(7)) == {"offset": 3, "journal_id": "as it was", "leader_epoch": -1}
    assert found.latestOffset({"offset": 3, "journal_id": "as it was"}, limit)["offset"] == 3
    assert found.latestOffset(start, ReadAllAvailable())["offset"] == 3


def test_range_with_trimmed_records_is_refused(bridge: Sparkless) -> None:
    bridge.trim(2)
    with pytest.raises(PositionLost, match="records from offset 1 were trimmed"):
        texts(reader(bridge), 1, 3)
    assert texts(reader(bridge), 2, 3) == ["2"]


def test_stream_stops_when_journal_lost_its_tail_or_was_recreated(bridge: Sparkless, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.PartitionLineage, "check_tail", partialmethod(module.PartitionLineage.check_tail, timeout_s=0.0))
    with pytest.raises(PositionLost, match=r"has lost its tail: records up to offset 4 .* give the query a new checkpoint"):
        reader(bridge).latestOffset({"offset": 4}, ReadAllAvailable())
    with pytest.raises(PositionLost, match=r"offset 4 of this stream is not valid in journal .*: the topic was recreated"):
        reader(bridge).latestOffset({"offset": 4, "journal_id": "another"}, ReadAllAvailable())


def test_stream_stops_at_recreated_journal(bridge: Sparkless, kafka: MockCluster) -> None:
    journal = bridge.pipelines.topics.journal
    before = bridge.topics.id(journal)
    kafka.ids[journal] = "another"
    with pytest.raises(PositionLost, match="offset 2 of this stream is not valid in journal"):
        texts(reader(bridge), 2, 3, before)
    assert texts(reader(bridge), 2, 3, None) == ["2"]
    kafka.ids[journal] = ""
    with pytest.raises(Unavailable, match=r"topic '.*\.journal' does not exist; start the broker"):
        reader(bridge).initialOffset()


def test_range_contains_only_records_before_its_end(bridge: Sparkless) -> None:
    found = reader(bridge)
    assert [(part.start, part.end, part.journal_id) for part in found.partitions({"offset": 1}, {"offset": 3, "journal_id": "i"})] == [
        (1, 3, "i")
    ]
    assert texts(found, 0, 2) == ["1"]
    assert texts(found, 2, 2) == []
    with pytest.raises(InvalidInput, match="is not a range of the journal"):
        list(found.read(InputPartition(0)))


def test_repeated_range_returns_same_rows(bridge: Sparkless) -> None:
    epoch = bridge.journal.epoch
    bridge.journal.start_epoch()
    bridge.send("3")
    bridge.journal.put(Kind.DATA, b"", epoch=epoch, sequence=3)  # a record of the fenced broker
    bridge.send("4")
    found = reader(bridge)
    for start, end, expected in ((0, 5, ["1", "2", "3"]), (5, 7, ["4"]), (0, 5, ["1", "2", "3"]), (4, 7, ["3", "4"]), (5, 7, ["4"])):
        assert texts(found, start, end) == expected
        assert module._reached[bridge.pipelines.topics.journal].offset == end


def test_next_range_continues_at_fence_of_previous_range_of_same_journal(
    bridge: Sparkless, kafka: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    look = module.journal_position

    def looks(topic: str, topic_id: str, partition: int, offset: int, history: Any) -> Any:
        looked.append(offset)
        return look(topic, topic_id, partition, offset, history)

    monkeypatch.setattr(module, "journal_position", looks)
    found, journal = reader(bridge), bridge.topics.id(bridge.pipelines.topics.journal)
    texts(found, 0, 2, journal)
    texts(found, 2, 3, journal)
    assert looked == [0]
    kafka.ids[bridge.pipelines.topics.journal] = "another"
    texts(found, 3, 3, "another")
    assert looked == [0, 3]


def test_stream_filters_messages_by_options(bridge: Sparkless) -> None:
    bridge.send("taken", taken_by=["exclusive"])
    bridge.send("from kafka", flags=SendFlag.DURABLE | SendFlag.FROM_KAFKA)
    everything = ["1", "2", "taken", "from kafka"]
    assert texts(reader(bridge), 0, 5) == everything
    assert texts(reader(bridge, address="flights"), 0, 5) == everything
    assert texts(reader(bridge, address="other"), 0, 5) == []
    assert texts(reader(bridge, selector="JMSPriority = 4"), 0, 5) == everything
    assert texts(reader(bridge, selector="JMSPriority > 4"), 0, 5) == []


def test_exclusive_divert_without_marks_takes_nothing_from_stream(bridge: Sparkless) -> None:
    bridge.journal.epoch = bridge.journal.put(Kind.EPOCH, json_entry(Op.EPOCH, {"exclusive": ["bascule-stream"]}), epoch=0, sequence=0)
    bridge.journal.sequence = 0
    bridge.send("3")
    assert texts(reader(bridge), 0, 3) == ["1", "2"]
