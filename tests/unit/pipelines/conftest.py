"""Kafka for tests of the pipelines that need no real service: librdkafka's mock cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from confluent_kafka import OFFSET_END

from bascule.kafka.history import TopicHistory
from tests.scenarios import sparkless, test_idle_sources, test_positions
from tests.support.mock_cluster import MockCluster, product_on


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Iterator[MockCluster]:
    """A mock cluster of one node for the product, with the operations that the scenarios without Spark need."""
    with product_on(monkeypatch) as cluster:

        def delete_records(_: str, topic: str, before: int) -> None:
            cluster.delete_records(topic, TopicHistory(cluster.kafka, topic, 0).latest() if before == OFFSET_END else before)

        def trim(_: Mapping[str, Any], topic: str, ends: Mapping[int, int]) -> None:
            for partition, before in ends.items():
                cluster.delete_records(topic, before, partition)

        for module in (test_positions, test_idle_sources):
            monkeypatch.setattr(module, "delete_records", delete_records)
        monkeypatch.setattr(sparkless, "trim", trim)
        yield cluster


@pytest.fixture
def bridge(kafka: Any, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> sparkless.Bridge:
    """A bridge with a journal on the mock cluster, whose drivers run without Spark."""
    sparkless.without_spark(monkeypatch)
    return sparkless.Bridge(kafka, topic_prefix)
