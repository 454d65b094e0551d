"""Kafka in memory, for tests of the product's readers and writers."""

from __future__ import annotations

import pytest

from bascule.kafka import incarnation
from tests.support.kafka_in_memory import KafkaInMemory


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> KafkaInMemory:
    monkeypatch.setattr(incarnation, "SETTLE_S", 0.0)
    return KafkaInMemory(monkeypatch)
