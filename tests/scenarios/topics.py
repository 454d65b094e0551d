"""Kafka topics as an application sees them."""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import OFFSET_BEGINNING, TopicPartition

from bascule.kafka import clients
from bascule.kafka.admin import Topics
from tests.support.system import wait_for

READ_S = 0.1
WAIT_S = 240.0  # a first pass through Spark, on a loaded machine


def create(bootstrap: str, *topics: str) -> None:
    """Create topics of one partition, so that their records have one order."""
    admin = Topics({"bootstrap.servers": bootstrap})
    for topic in topics:
        admin.create(topic, 1, {})
    admin.await_visible(topics)


def produce(bootstrap: str, topic: str, values: Iterable[str]) -> None:
    """Produce records, and return when they are stored. Each has its value in the header ``storm_id``, too."""
    producer = clients.producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0})
    for value in values:
        producer.produce(topic, value.encode(), headers={"storm_id": value.encode()})
    assert producer.flush(30) == 0


class Reader:
    """Reads a topic of one partition from its start, either committed transactions only, or everything."""

    def __init__(self, bootstrap: str, topic: str, *, committed: bool = True) -> None:
        isolation = "read_committed" if committed else "read_uncommitted"
        self._consumer = clients.consumer(
            {"bootstrap.servers": bootstrap, "group.id": "reader", "enable.auto.commit": False, "isolation.level": isolation}
        )
        self._consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        self._topic = topic
        self.values: list[str] = []
        self.headers: list[dict[str, bytes | str | None]] = []
        self.ids: list[bytes | str | None] = []  # offset of each in the journal, if a divert has written it

    def read_until(self, last: str) -> list[str]:
        """Return all values up to ``last``. Records keep their order, so no earlier value is missing."""

        def there() -> bool:
            for record in self._consumer.consume(1000, READ_S):
                assert record.error() is None, record.error()
                value = record.value()
                assert value is not None
                self.values.append(value.decode())
                self.headers.append(dict(record.headers() or ()))
                self.ids.append(self.headers[-1].get("bascule.id"))
            return last in self.values

        wait_for(there, lambda: f"record {last!r} in topic {self._topic}; there are {self.values}", WAIT_S)
        return self.values

    def close(self) -> None:
        """Close the consumer."""
        self._consumer.close()
