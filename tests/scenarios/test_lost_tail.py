"""A Kafka whose disk has lost the end of a source topic: its ingress stops, even after the topic has grown past the position again."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import SHORT_LIVED, EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.history import TopicHistory
from bascule.pipelines.carry import Carrier, held_position
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import EARLIEST, PipelinesSpec, StartPosition
from bascule.writer.lineage import SeenRecord
from bascule.writer.position import INGRESS, Position, PositionLost, position_key
from tests.scenarios.sparkless import workers_end

TOPIC = "orders"
PIPELINE = f"{INGRESS}in"
RECORDS = 10
#: Number of records that the disk still has.
LEFT = 5
#: The start of a batch: its first offset, and the number of bytes that follow.
_BATCH_HEAD = struct.Struct(">qi")
#: Files that Kafka rebuilds from the log.
_DERIVED = ("*/*index", "*/*.snapshot", ".kafka_cleanshutdown", "recovery-point-offset-checkpoint", "replication-offset-checkpoint")


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[EmbeddedKafka]:
    with EmbeddedKafka(tmp_path / "kafka", jvm_options=SHORT_LIVED) as running:
        yield running


def put(kafka: EmbeddedKafka, count: int) -> None:
    """Produce records, each in a batch of its own."""
    producer = clients.producer({"bootstrap.servers": kafka.bootstrap})
    for number in range(count):
        producer.produce(TOPIC, b"%d" % number)
        assert producer.flush(30) == 0


def lose_tail(data_dir: Path) -> None:
    (log,) = data_dir.glob(f"**/{TOPIC}-0/*.log")
    octets = log.read_bytes()
    end = 0
    for _ in range(LEFT):
        end += _BATCH_HEAD.size + _BATCH_HEAD.unpack_from(octets, end)[1]
    with log.open("r+b") as file:
        file.truncate(end)
    for path in (path for pattern in _DERIVED for path in data_dir.glob(f"**/{pattern}")):
        path.unlink()


def take(pipelines: PipelinesSpec) -> Position:
    positions = Positions(pipelines, "driver")
    (taken,) = positions.take_sources(PIPELINE, {(TOPIC, 0): positions.topics.id(TOPIC)}, StartPosition(EARLIEST))
    return taken


def carry(pipelines: PipelinesSpec, position: Position, end: int) -> None:
    claim = Positions(pipelines, "").claim(position_key(PIPELINE, TOPIC, 0), position)
    with Carrier(pipelines, claim, held_position(pipelines, claim)) as carrier:
        for record in TopicHistory(pipelines.kafka, TOPIC, 0).records(position.offset, end):
            carrier.reach(SeenRecord(record.offset() or 0, None, record.value(), record.timestamp()[1]))
        carrier.commit()


@pytest.mark.slow
def test_ingress_whose_topic_lost_its_tail_stops_also_after_the_topic_has_grown(broken: EmbeddedKafka, tmp_path: Path) -> None:
    pipelines = PipelinesSpec("b1", {"bootstrap.servers": broken.bootstrap, "log_level": 0}, topics=JournalTopics("lost-tail"))
    Positions(pipelines, "").prepare_topics()
    Positions(pipelines, "").topics.create(TOPIC, 1, {})
    put(broken, RECORDS)
    carry(pipelines, take(pipelines), RECORDS - 1)
    workers_end()
    broken.stop()
    broken.start()
    position = take(pipelines)
    assert position.offset == RECORDS - 1
    carry(pipelines, position, RECORDS)  # a new leader with all records
    workers_end()
    broken.stop()
    lose_tail(tmp_path / "kafka")
    broken.start()
    for grown in (0, 2 * RECORDS):
        put(broken, grown)
        with pytest.raises(
            PositionLost, match=rf"{TOPIC}-0 has lost its tail: records up to offset {RECORDS} .* ends at offset {LEFT + grown}"
        ):
            take(pipelines)
