from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from bascule.core.errors import Unavailable
from bascule.kafka.history import PartitionOffsets, StableEnds, TopicHistory


def test_offset_query_to_unreachable_kafka_ends_at_timeout() -> None:
    history = TopicHistory({"bootstrap.servers": "127.0.0.1:1", "log_level": 0}, "t", 0, timeout_s=0.2)
    began_s = time.monotonic()
    with pytest.raises(Unavailable):
        history.stable()
    assert time.monotonic() - began_s < 20


class Client:
    """An admin client of Kafka that may fail."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing = 0

    def __len__(self) -> int:
        """Return the number of waiting events: as Kafka's client, one without events is false."""
        return 0

    def list_topics(self, _topic: str, *, timeout: float) -> None:
        self.calls.append("look")

    def list_offsets(self, asked: Mapping[TopicPartition, OffsetSpec], **_: object) -> dict[TopicPartition, Future[Any]]:
        self.calls.append("ask")
        answers: dict[TopicPartition, Future[Any]] = {}
        for at in asked:
            answers[at] = Future()
            if self.failing:
                answers[at].set_exception(KafkaException(KafkaError(KafkaError._TRANSPORT)))
            else:
                answers[at].set_result(SimpleNamespace(partition=at.partition, offset=5))
        self.failing = max(0, self.failing - 1)
        return answers


def test_admin_client_polls_before_first_query_and_after_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the client sometimes waits up to three seconds while it replaces its first connection."""
    client = Client()
    monkeypatch.setattr("bascule.kafka.clients.admin", lambda _: client)
    offsets = PartitionOffsets({}, [TopicPartition("t", 0), TopicPartition("t", 1)])
    for _ in range(2):
        assert offsets.ask(OffsetSpec.latest(), 5) == {0: 5, 1: 5}
    assert client.calls == ["look", "ask", "ask"]
    client.failing = 1
    assert offsets.ask(OffsetSpec.latest(), 5) == {0: 5, 1: 5}
    assert client.calls[3:] == ["ask", "look", "ask"]


def test_offsets_are_asked_with_the_client_that_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.kafka.clients.admin", lambda _: pytest.fail("another client is made"))
    shared: Any = Client()
    assert PartitionOffsets({}, [TopicPartition("t", 0)], shared).ask(OffsetSpec.latest(), 5) == {0: 5}
    assert shared.calls == ["look", "ask"]


def test_ends_of_many_topics_are_asked_with_one_client_that_looks_first_and_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver asks with each report. A new client would wait for one or two seconds, and the driver with it."""
    client = Client()
    made = [client]
    monkeypatch.setattr("bascule.kafka.clients.admin", lambda _: made.pop())
    ends, places = StableEnds({}), [("t", 0), ("t", 1)]
    assert ends.of([], 5) == {}
    for _ in range(2):
        assert ends.of(places, 5) == {("t", 0): 5, ("t", 1): 5}
    assert client.calls == ["look", "ask", "ask"]
    client.failing = 1
    assert ends.of(places, 5) == {}
    assert ends.of(places, 5) == {("t", 0): 5, ("t", 1): 5}
    assert client.calls[3:] == ["ask", "look", "ask"]


def test_record_that_arrives_during_time_query_is_not_counted_as_old(monkeypatch: pytest.MonkeyPatch) -> None:
    """The callers delete older records, or start after them."""
    history, latest, end = TopicHistory({}, "t", 0), OffsetSpec.latest(), [5]

    def answer(spec: OffsetSpec) -> int:
        if spec is latest:
            return end[0]
        end[0] += 1
        return -1

    monkeypatch.setattr(history, "_offset", answer)
    assert history.at_time(1) == 5
