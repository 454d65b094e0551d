"""Bascule's topics, changed with Kafka's own tools."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions, ResourceType

from bascule.client import Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.pipelines.positions import Positions
from tests.support.system import System, wait_for

ADMIN_TIMEOUT_S = 30


ORDERS = Queue("orders")


def set_topic(bootstrap: str, topic: str, setting: str, value: str) -> None:
    kafka = {"bootstrap.servers": bootstrap}
    entry = ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=[entry])
    admin = clients.admin(kafka)  # keep the reference: its futures end with it
    admin.incremental_alter_configs([resource])[resource].result(ADMIN_TIMEOUT_S)
    wait_for(lambda: Topics(kafka).config(topic)[setting] == value, f"{setting} of {topic} to be {value}")


def make_transactions(positions: Positions) -> None:
    """Create Kafka's own topic for transactions, which the first transaction creates."""
    with closing(positions.writer("any")) as writer:
        writer.current()


class Hand:
    """Changes topics as a user with Kafka's own tools does."""

    def __init__(self, bootstrap: str, prefix: str) -> None:
        self.kafka = {"bootstrap.servers": bootstrap}
        self.prefix = prefix
        self._admin = clients.admin(self.kafka)

    def set(self, topic: str, setting: str, value: str) -> None:
        set_topic(self.kafka["bootstrap.servers"], f"{self.prefix}.{topic}", setting, value)

    def add_partitions(self, topic: str, count: int) -> None:
        name = f"{self.prefix}.{topic}"
        self._admin.create_partitions([NewPartitions(name, count)])[name].result(ADMIN_TIMEOUT_S)
        wait_for(lambda: Topics(self.kafka).partitions()[name] == count, "the new partitions")

    def create_anew(self, topic: str) -> None:
        name, topics = f"{self.prefix}.{topic}", Topics(self.kafka)
        settings = {"cleanup.policy": "delete", "retention.ms": "-1"}
        self._admin.delete_topics([name])[name].result(ADMIN_TIMEOUT_S)
        wait_for(lambda: name not in topics.partitions(), "the deletion of the topic")
        topics.create(name, 1, settings)
        topics.await_visible([name])

    def put(self, value: bytes, key: bytes = b"D", topic: str = "journal") -> int:
        offsets: list[int] = []
        producer = clients.producer(self.kafka)
        producer.produce(f"{self.prefix}.{topic}", value, key, 0, on_delivery=lambda _, message: offsets.append(message.offset() or 0))
        assert producer.flush(ADMIN_TIMEOUT_S) == 0
        return offsets[0]


@pytest.fixture
def system(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path, prefix=topic_prefix) as running:
        yield running


@pytest.fixture
def hand(system: System) -> Hand:
    return Hand(system.bootstrap, system.prefix)


def send(system: System, text: str) -> None:
    with connect(system.url) as context:
        context.send(ORDERS, text)


def refused(system: System) -> str:
    """Return the error of a broker that does not start."""
    system.broker.launch()
    wait_for(lambda: not system.broker.running, "the broker to refuse")
    return system.broker.said()
