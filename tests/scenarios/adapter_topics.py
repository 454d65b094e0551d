"""Topics around an endpoint, as the endpoint's neighbours see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from bascule.kafka import clients
from bascule.kafka.admin import Topics
from tests.support.system import wait_for

PARTITIONS = 2


def create(bootstrap: str, *topics: str, partitions: int = PARTITIONS) -> None:
    admin = Topics({"bootstrap.servers": bootstrap})
    for topic in topics:
        admin.create(topic, partitions, {})
    admin.await_visible(topics)


def produce(bootstrap: str, topic: str, values: Iterable[str], *, keys: Sequence[str] | None = None, partition: int = -1) -> None:
    """Produce records, and return when they are stored. The key of a record is its value, unless keys are given."""
    producer = clients.producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 1})
    for number, value in enumerate(values):
        key = keys[number % len(keys)] if keys else value
        producer.produce(topic, value.encode(), key.encode(), partition)
    assert producer.flush(60) == 0


class Watcher:
    """Reads all committed records of topics from their start."""

    def __init__(self, bootstrap: str, *topics: str) -> None:
        self._consumer = clients.consumer(
            {"bootstrap.servers": bootstrap, "group.id": "watcher", "enable.auto.commit": False, "isolation.level": "read_committed"}
        )
        counts = Topics({"bootstrap.servers": bootstrap}).partitions()
        self._consumer.assign([TopicPartition(topic, each, OFFSET_BEGINNING) for topic in topics for each in range(counts[topic])])
        self.records: list[Any] = []

    @property
    def values(self) -> list[str]:
        return [record.value().decode() for record in self.records]

    def look(self, timeout_s: float = 0.1) -> list[str]:
        for record in self._consumer.consume(10_000, timeout_s):
            assert record.error() is None, record.error()
            self.records.append(record)
        return self.values

    def wait(self, count: int, timeout_s: float = 90.0) -> list[str]:
        """Read until there are at least a number of records."""
        wait_for(lambda: len(self.look()) >= count, lambda: f"{count} records; there are {len(self.records)}", timeout_s)
        return self.values

    def close(self) -> None:
        self._consumer.close()
