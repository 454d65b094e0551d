"""Records whose timestamps Kafka refuses are written with the time of their arrival."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from bascule.core.kafka_records import Output
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.history import TopicHistory
from bascule.pipelines.carry import Carrier, held_position
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import EARLIEST, PipelinesSpec, StartPosition
from bascule.writer.lineage import SeenRecord
from bascule.writer.position import INGRESS, position_key
from tests.scenarios.sparkless import workers_end

PIPELINE = f"{INGRESS}in"
DAY_MS = 24 * 3_600_000


@pytest.fixture
def carrier(kafka: EmbeddedKafka, topic_prefix: str) -> Iterator[Carrier]:
    pipelines = PipelinesSpec("b1", {"bootstrap.servers": kafka.bootstrap, "log_level": 0}, topics=JournalTopics(topic_prefix))
    positions = Positions(pipelines, "driver")
    positions.prepare_topics()
    source = f"{topic_prefix}-in"
    positions.topics.create(source, 1, {})
    producer = clients.producer(pipelines.kafka)
    producer.produce(source, b"v")
    assert producer.flush(30) == 0
    (taken,) = positions.take_sources(PIPELINE, {(source, 0): positions.topics.id(source)}, StartPosition(EARLIEST))
    claim = positions.claim(position_key(PIPELINE, source, 0), taken)
    with Carrier(pipelines, claim, held_position(pipelines, claim)) as carrier:
        yield carrier
    workers_end()


def test_records_with_timestamps_refused_by_kafka_are_written_with_arrival_time(
    carrier: Carrier, kafka: EmbeddedKafka, topic_prefix: str
) -> None:
    now_ms, topic = int(time.time() * 1000), f"{topic_prefix}-out"
    for timestamp_ms in (now_ms, now_ms + DAY_MS, 2**63 - 1, -1, -(2**63), 1, 0):
        carrier.add(
            Output(topic, None, str(timestamp_ms).encode(), [("jms.JMSTimestamp", str(timestamp_ms).encode())], timestamp_ms),
            lambda error: pytest.fail(f"a dead letter: {error}"),
        )
    carrier.reach(SeenRecord(0, None, b"v"))
    carrier.commit()
    history = TopicHistory({"bootstrap.servers": kafka.bootstrap}, topic, 0)
    found = {int(record.value() or b""): record for record in history.records(0, history.latest(), committed=True)}
    assert len(found) == 7
    for timestamp_ms, record in found.items():
        assert record.headers() == [("jms.JMSTimestamp", str(timestamp_ms).encode())]
        if timestamp_ms in (now_ms, 1):
            assert record.timestamp()[1] == timestamp_ms
        else:
            assert abs(record.timestamp()[1] - now_ms) < 600_000
