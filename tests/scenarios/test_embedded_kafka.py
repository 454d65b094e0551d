"""Kafka as a child process: its data survive its end, and it does not survive its parent."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import OFFSET_BEGINNING, TopicPartition
from confluent_kafka.admin import NewTopic

from bascule.embedded.kafka import DataInUse, EmbeddedKafka, serves
from bascule.embedded.process import NotStarted, PortInUse
from bascule.kafka import clients
from bascule.kafka.history import TopicHistory


def produce(kafka: EmbeddedKafka, topic: str, values: list[bytes]) -> None:
    admin = clients.admin({"bootstrap.servers": kafka.bootstrap})
    if topic not in admin.list_topics(timeout=60).topics:
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result()
    producer = clients.producer({"bootstrap.servers": kafka.bootstrap, "enable.idempotence": True, "message.max.bytes": 70 << 20})
    errors = []
    for value in values:
        producer.produce(topic, value, on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(30) == 0
    assert errors == [None] * len(values)


def read(kafka: EmbeddedKafka, topic: str, count: int) -> list[bytes | None]:
    consumer = clients.consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "reader", "enable.auto.commit": False})
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        return [message.value() for message in consumer.consume(count, 30)]
    finally:
        consumer.close()


class Restarted(NamedTuple):
    """A Kafka that was killed and started again, and what was known before."""

    kafka: EmbeddedKafka
    history: TopicHistory  # of topic t, asked before the kill
    port: int
    pid: int | None


@pytest.fixture(scope="module")
def restarted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Restarted]:
    kafka = EmbeddedKafka(tmp_path_factory.mktemp("own-kafka") / "data")
    try:
        kafka.start()
        produce(kafka, "t", [b"1", b"2"])
        history = TopicHistory({"bootstrap.servers": kafka.bootstrap}, "t", 0, timeout_s=30)
        assert history.latest() == 2
        before = Restarted(kafka, history, kafka.port, kafka.pid)
        kafka.kill()
        assert not kafka.running
        kafka.start()
        yield before
    finally:
        kafka.stop()


def test_offset_query_is_answered_soon_after_kafka_restart(restarted: Restarted) -> None:
    """The client does not wait for its own periodic refresh of the leader, which takes minutes."""
    assert restarted.history.latest() == 2


def test_acknowledged_records_survive_kill_9_and_clean_stop_on_the_same_port(restarted: Restarted) -> None:
    kafka, port = restarted.kafka, restarted.port
    assert kafka.port == port
    assert kafka.pid != restarted.pid
    assert read(kafka, "t", 2) == [b"1", b"2"]
    produce(kafka, "t", [b"3"])
    kafka.stop()
    assert kafka.pid is None
    assert not serves(port)
    with EmbeddedKafka(kafka.data_dir, port=port, fsync=True) as again:
        assert read(again, "t", 3) == [b"1", b"2", b"3"]


def test_kafka_accepts_a_record_of_64_mib(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    large = os.urandom(1 << 20) * 64
    produce(kafka, topic_prefix, [large])
    assert read(kafka, topic_prefix, 1) == [large]


def test_kafka_error_for_a_port_in_use_names_the_setting(data_dir: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUse, match=rf"port {port} for Kafka .*--kafka-port"):
            EmbeddedKafka(data_dir, port=port).start()


def test_second_kafka_on_the_same_data_directory_is_refused(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bascule.embedded.kafka.ORPHAN_TIMEOUT_S", 0.1)
    second = EmbeddedKafka(kafka.data_dir)
    with pytest.raises(DataInUse, match=r"another Kafka runs on .*--data-dir"):
        second.start()
    assert second.pid is None
    produce(kafka, topic_prefix, [b"still there"])


def test_failed_start_of_kafka_shows_the_end_of_its_log(data_dir: Path) -> None:
    (data_dir / "data").mkdir(parents=True)
    (data_dir / "data" / "meta.properties").write_text("version=1\ncluster.id=AAAAAAAAAAAAAAAAAAAAAA\nnode.id=7\n")
    with pytest.raises(
        NotStarted, match=r"(?s)Kafka ended with 1 before it was ready; end of .*kafka\.log.*Stored node id 7 doesn.t match"
    ):
        EmbeddedKafka(data_dir).start()


def test_kafka_ends_when_its_parent_is_killed_and_the_next_kafka_waits_for_the_end(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.embedded.kafka.ORPHAN_TIMEOUT_S", 60.0)  # without an earlier orderly stop, Kafka first writes its archive
    command = [sys.executable, "-m", "bascule.embedded.kafka", "--data-dir", str(data_dir)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        ready = re.fullmatch(r"ready kafka=127\.0\.0\.1:(\d+) pid=(\d+)\n", parent.stdout.readline())
        assert ready
        port, pid = int(ready[1]), int(ready[2])
        assert serves(port)
        parent.kill()
    with EmbeddedKafka(data_dir, port=port) as again:
        assert again.pid != pid
        stat = Path(f"/proc/{pid}/stat")
        assert not stat.exists() or ") Z " in stat.read_text()  # ended, whether or not the system has reaped the process
