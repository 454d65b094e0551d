"""Clients of Kafka are connected before they look for something, so that they need not look twice."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from bascule.embedded.process import free_port
from bascule.kafka import clients
from tests.support.mock_cluster import MockCluster


@pytest.mark.parametrize("reachable", [True, False])
def test_consumer_is_connected_before_its_assignment(monkeypatch: pytest.MonkeyPatch, reachable: bool) -> None:
    calls: list[str] = []

    class Watched(Consumer):
        def list_topics(self, *args: Any, **more: Any) -> Any:
            calls.append("list_topics")
            return super().list_topics(*args, **more)

        def assign(self, *args: Any, **more: Any) -> None:
            calls.append("assign")
            super().assign(*args, **more)

    monkeypatch.setattr(clients, "_INTRODUCTION_S", 60.0 if reachable else 0.1)
    with MockCluster() as cluster:
        cluster.create("topic")
        place = cluster.kafka if reachable else {"bootstrap.servers": f"127.0.0.1:{free_port()}", "log_level": 0}
        with closing(Watched({**place, "group.id": "any"})) as consumer:
            clients.assign(consumer, [TopicPartition("topic", 0, 0)])
            assert calls == ["list_topics", "assign"]
            assert [(each.topic, each.partition) for each in consumer.assignment()] == [("topic", 0)]
