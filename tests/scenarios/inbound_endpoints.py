"""Endpoints of the adapter with a real Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bascule.adapter.inbound import Activation, ActivationSpec, Backoff, InboundLog, Record
from bascule.embedded.kafka import EmbeddedKafka
from tests.scenarios.adapter_topics import create
from tests.support.kafka_proxy import KafkaProxy
from tests.support.speed import SLOWNESS
from tests.support.system import wait_for
from tests.unit.cli.conftest import Bascule, bascule  # noqa: F401 - a fixture

QUICK = Backoff(0.05, 2.0, 0.2)
#: Time after which an endpoint counts as hanging. The next attempt, which may ask Kafka, must be done within it.
HANGS_S = 10.0 * SLOWNESS


@contextmanager
def active(kafka: EmbeddedKafka | KafkaProxy, spec: ActivationSpec, endpoint: Any, **client: str) -> Iterator[Activation]:
    """Return the options of an activation. ``client`` are settings of the Kafka client, with underscores for dots."""
    settings = {name.replace("_", "."): value for name, value in client.items()}
    activation = Activation({"bootstrap.servers": kafka.bootstrap, **settings}, spec, endpoint)
    activation.start()
    try:
        yield activation
    finally:
        activation.stop(5.0)


@pytest.fixture
def topic(kafka: EmbeddedKafka, topic_prefix: str) -> str:
    """Create a topic of two partitions."""
    create(kafka.bootstrap, topic_prefix)
    return topic_prefix


def values(count: int) -> list[str]:
    return [f"v{number}" for number in range(count)]


def text(record: Record) -> str:
    return (record.value or b"").decode()


class Seen:
    """An endpoint that keeps the records that it receives; ``act`` may raise."""

    def __init__(self, act: Callable[[Record], None] = lambda _: None) -> None:
        self.records: list[Record] = []
        self._act = act

    def __call__(self, record: Record) -> None:
        self._act(record)
        self.records.append(record)

    @property
    def values(self) -> list[str]:
        return [text(record) for record in self.records]

    def wait(self, count: int) -> list[str]:
        wait_for(lambda: len(self.records) >= count, lambda: f"{count} records; there are {len(self.records)}", 90)
        return self.values


def nothing_in_flight(kafka: EmbeddedKafka, group: str) -> None:
    log = InboundLog("look", {"bootstrap.servers": kafka.bootstrap}, group=group)
    wait_for(lambda: log.all_flights() == {}, "nothing in flight")
    log.close()
