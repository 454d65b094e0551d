"""The Kafka side of the load: an application that writes the topics of the ingresses, and a reader of what the diverts write."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterable
from typing import NamedTuple

from confluent_kafka import KafkaException, Producer

from bascule.kafka import clients
from bascule.kafka.history import TopicHistory
from tests.soak.clients import ID, PAUSE_S, Guarded
from tests.soak.plan import INGRESSES, Plan

#: Time limit of a transaction of the application; Kafka itself aborts it soon after.
TRANSACTION_S = 20.0
TRANSACTION_TIMEOUT_MS = 30_000
FLUSH_S = 60.0
#: Share of its transactions that are rolled back: nothing of them may arrive.
ROLLED_BACK = 0.2


class Record(NamedTuple):
    """A committed record: when Kafka stored it (ms since the epoch), and its id."""

    stored_ms: float
    id: str


class Topic:
    """A topic of one partition, read as ``read_committed`` from its start."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.name = topic
        self.records: list[Record] = []
        self._history = TopicHistory({"bootstrap.servers": bootstrap, "log_level": 2}, topic, 0)
        self._next = 0

    def read(self) -> list[Record]:
        """Return all records so far. Raises Unavailable."""
        for message in self._history.records(self._next, self._history.latest(), committed=True):
            offset, value = message.offset(), message.value()
            assert offset is not None
            assert value is not None
            self.records.append(Record(float(message.timestamp()[1]), value.decode()))
            self._next = offset + 1
        return self.records

    def has(self, id: str) -> bool:
        """Return whether a record is there."""
        return any(record.id == id for record in reversed(self.read()))


def produce(bootstrap: str, topic: str, ids: Iterable[str]) -> None:
    """Produce records, and return when they are stored."""
    producer = clients.producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for id in ids:
        producer.produce(topic, id.encode(), headers={ID: id.encode()})
    assert producer.flush(FLUSH_S) == 0


class Application(Guarded):
    """Writes records for the ingresses in transactions, and rolls some of them back. The topics tell what was committed."""

    def __init__(self, bootstrap: str, plan: Plan) -> None:
        super().__init__(name="application", target=self._write, daemon=True)
        self.rolled_back = 0
        self._servers = bootstrap
        self._plan = plan
        self._random = random.Random(f"{plan.seed}/application")
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stop writing, and return when the last transaction has ended."""
        self._stopping.set()
        self.join()

    def _write(self) -> None:
        """Run one transaction after the other, with a new incarnation after each failure."""
        numbers = itertools.count()
        producer: Producer | None = None
        while not self._stopping.is_set():
            try:
                producer = producer or self._incarnation()
                self._transaction(producer, [next(numbers) for _ in range(self._plan.batch)])
            except KafkaException:
                producer = None
                self._stopping.wait(PAUSE_S)
            self._stopping.wait(self._plan.batch / self._plan.rate)

    def _incarnation(self) -> Producer:
        producer = clients.producer(
            {
                "bootstrap.servers": self._servers,
                "transactional.id": f"{self._plan.prefix}-application",
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
                "reconnect.backoff.max.ms": 500,
                "log_level": 2,
            }
        )
        producer.init_transactions(TRANSACTION_S)
        return producer

    def _transaction(self, producer: Producer, numbers: Iterable[int]) -> None:
        producer.begin_transaction()
        for number in numbers:
            for name in INGRESSES.values():
                id = f"{name}-{number}"
                producer.produce(self._plan.topic(name), id.encode(), headers={ID: id.encode()})
        if self._random.random() < ROLLED_BACK:
            producer.flush(TRANSACTION_S)
            producer.abort_transaction(TRANSACTION_S)
            self.rolled_back += 1
        else:
            producer.commit_transaction(TRANSACTION_S)
