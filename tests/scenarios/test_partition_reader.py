"""A partition is read from an offset that has no record, on a real Kafka."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from confluent_kafka import TopicPartition

from bascule.core.errors import Unavailable
from bascule.embedded.kafka import EmbeddedKafka
from bascule.journal.reading import CutOff, Trimmed
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.log import PartitionReader

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
