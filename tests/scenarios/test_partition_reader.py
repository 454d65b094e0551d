"""A partition is read from an offset that has no record, on a real Kafka."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from confluent_kafka import TopicPartition

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import KafkaRecord, SourceStart, Taken
from bascule.embedded.kafka import EmbeddedKafka
from bascule.journal.reading import CutOff, Trimmed
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.lineage import PartitionLineage
from bascule.kafka.log import PartitionReader
from bascule.kafka.source import KafkaSource
from bascule.writer.lineage import SeenRecord

TIMEOUT_S = 30


@pytest.fixture
def reader(kafka: EmbeddedKafka, topic_prefix: str) -> Iterator[PartitionReader]:
    """Create a topic with three records, the first of which is deleted."""
    client, topic = {"bootstrap.servers": kafka.bootstrap}, f"{topic_prefix}.read"
    Topics(client).create(topic, 1, {})
    producer = clients.producer(client)
    for _ in range(3):
        producer.produce(topic, b"x")
    assert producer.flush(TIMEOUT_S) == 0
    place, admin = TopicPartition(topic, 0, 1), clients.admin(client)
    admin.delete_records([place])[place].result(TIMEOUT_S)
    with closing(PartitionReader(client, topic, 0)) as reader:
        yield reader


@pytest.mark.parametrize(
    ("offset", "error", "said"),
    [(0, Trimmed, "begins at offset 1, after the position 0"), (5, CutOff, "ends at offset 3, before the position 5")],
)
def test_reader_reports_a_trimmed_start_and_a_cut_off_end_of_the_topic(
    reader: PartitionReader, offset: int, error: type[Unavailable], said: str
) -> None:
    reader.seek(offset)
    with pytest.raises(Unavailable, match=said) as raised:
        next(reader.to_end())
    assert type(raised.value) is error


def test_reader_reads_up_to_a_barrier_beyond_the_end_first_reported(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    client, topic = {"bootstrap.servers": kafka.bootstrap}, f"{topic_prefix}.barrier"
    Topics(client).create(topic, 1, {})
    producer = clients.producer(client)

    def append(value: bytes) -> None:
        producer.produce(topic, value)
        assert producer.flush(TIMEOUT_S) == 0

    append(b"first")
    with closing(PartitionReader(client, topic, 0)) as reader:
        reader.seek(0)
        found = reader.to_end(barrier=1)
        assert next(found).value() == b"first"
        append(b"barrier")  # the record was not there when the reader reached the end
        assert [message.value() for message in found] == [b"barrier"]


def test_following_reader_says_so_before_it_returns_records_of_a_recreated_topic(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    client, topic = {"bootstrap.servers": kafka.bootstrap}, f"{topic_prefix}.recreated"
    topics = Topics(client)
    producer = clients.producer(client)

    def append(*values: bytes) -> None:
        for value in values:
            producer.produce(topic, value)
        assert producer.flush(TIMEOUT_S) == 0

    def read(reader: PartitionReader, wanted: bytes) -> int | None:
        """Return what the reader says when it has returned a record."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while wanted not in [message.value() for message in reader.read_at_once(1, 0.1)]:
            assert time.monotonic() < deadline_s
        return reader.topic_view

    topics.create(topic, 1, {})
    append(b"0")
    with closing(PartitionReader(client, topic, 0, following=True)) as reader:
        assert reader.topic_view is None, "nothing is known before the first answer"
        reader.seek(0)
        first = read(reader, b"0")
        append(b"1")
        assert first is not None
        assert read(reader, b"1") == first, "no further check is needed"
        assert reader.read_topic_id == topics.id(topic)
        topics.delete([topic])
        topics.create(topic, 1, {})
        append(b"A", b"B", b"C")
        assert read(reader, b"C") != first
        assert reader.read_topic_id == topics.id(topic)


def record_of(found: Iterator[Taken], topic: str) -> KafkaRecord:
    """Return the next record of a topic."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        for record in next(found).records:
            if record.topic == topic:
                return record
    raise AssertionError(f"no record of {topic}")


def test_source_of_a_pipeline_returns_no_record_of_a_recreated_topic(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    """The new topic is already longer than the offset that the source has reached, and its leader has the same epoch."""
    client, topic, other = {"bootstrap.servers": kafka.bootstrap}, f"{topic_prefix}.source", f"{topic_prefix}.other"
    topics = Topics(client)
    producer = clients.producer(client)

    def append(name: str, *values: bytes) -> None:
        for value in values:
            producer.produce(name, value)
        assert producer.flush(TIMEOUT_S) == 0

    for name in (topic, other):
        topics.create(name, 1, {})
        append(name, b"0", b"1")
    starts = {(name, 0): SourceStart(0, topics.id(name), 0) for name in (topic, other)}
    with closing(KafkaSource(client, starts, committed=True)) as source:
        found, seen = iter(source), set[tuple[str, bytes | None]]()
        while len(seen) < 4:
            seen |= {(record.topic, record.value) for record in next(found).records}
        assert source._topics is None, "the client knows the topics, so Kafka is not asked"
        topics.delete([topic])
        topics.create(topic, 1, {})
        append(topic, b"A", b"B", b"C")
        with pytest.raises(Unavailable, match=f"topic '{topic}' was recreated: its id is {re.escape(topics.id(topic))}"):
            record_of(found, topic)


def test_source_of_a_pipeline_does_not_read_from_a_former_leader(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    client, topic = {"bootstrap.servers": kafka.bootstrap}, f"{topic_prefix}.led"
    topics = Topics(client)
    topics.create(topic, 1, {})
    producer = clients.producer(client)
    producer.produce(topic, b"0")
    assert producer.flush(TIMEOUT_S) == 0
    start = SourceStart(0, topics.id(topic), 3)  # as if the node that answers had missed three elections
    with (
        closing(KafkaSource(client, {(topic, 0): start}, committed=True)) as source,
        pytest.raises(Unavailable, match=re.escape(f"{topic}-0 was read from a former leader (leader epoch 0, expected 3)")),
    ):
        record_of(iter(source), topic)


def test_former_leader_does_not_say_which_records_the_log_has(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    client, topic = {"bootstrap.servers": kafka.bootstrap}, f"{topic_prefix}.asked"
    Topics(client).create(topic, 1, {})
    producer = clients.producer(client)
    producer.produce(topic, b"0")
    assert producer.flush(TIMEOUT_S) == 0
    lineage, last = PartitionLineage(client, topic, 0), SeenRecord(0, None, b"0")
    assert run_blocking(lineage.has(last, 0)) is True
    assert run_blocking(lineage.reached(1, 0, 0)) is True
    assert run_blocking(lineage.has(last._replace(value=b"1"), 0)) is False
    # as if another node had led since then, and the node that answers had missed it
    assert run_blocking(lineage.has(last, 1)) is None
    assert run_blocking(lineage.reached(1, 0, 1)) is None
