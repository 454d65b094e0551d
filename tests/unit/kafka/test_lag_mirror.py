"""The mirror of the lag, which only monitoring uses, delays nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, TopicPartition

from bascule.embedded.process import free_port
from bascule.kafka import history
from bascule.kafka.history import LagMirror
from tests.support.speed import SLOWNESS

ENDED_S = 20.0 * SLOWNESS


def test_lag_mirror_closes_while_kafka_is_away() -> None:
    mirror = LagMirror({"bootstrap.servers": f"127.0.0.1:{free_port()}", "log_level": 0}, "mirror")
    mirror.show({("orders", 0): 7})
    closed = threading.Event()

    def close() -> None:
        mirror.close()
        closed.set()

    threading.Thread(target=close, daemon=True).start()
    assert closed.wait(ENDED_S)


class Commits:
    """A consumer that answers each commit at the next poll, and the clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.committed: list[tuple[str, int, int, str | None]] = []
        self.error: KafkaError | None = None
        self.now_s = 0.0
        self._unanswered: list[TopicPartition] = []
        self._answer: Callable[[KafkaError | None, list[TopicPartition]], None] = lambda *_: None
        monkeypatch.setattr("bascule.kafka.clients.consumer", self._made)
        monkeypatch.setattr(history, "time", SimpleNamespace(monotonic=lambda: self.now_s))

    def _made(self, settings: Mapping[str, Any]) -> Commits:
        self._answer = settings["on_commit"]
        return self

    def commit(self, offsets: Sequence[TopicPartition], *, asynchronous: bool) -> None:
        assert asynchronous
        self._unanswered = list(offsets)
        self.committed += [(each.topic, each.partition, each.offset, each.metadata) for each in offsets]

    def poll(self, _timeout_s: float) -> None:
        answered, self._unanswered = self._unanswered, []
        if answered:
            self._answer(self.error, answered)


def test_unchanged_offsets_are_published_once_and_again_after_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = Commits(monkeypatch)
    mirror = LagMirror({}, "mirror")
    for _ in range(3):
        mirror.show({("orders", 0): 7})
    mirror.show({("orders", 0): 7}, "why")
    mirror.show({("orders", 0): 8}, "why")
    mirror.show({("orders", 0): 8}, "why")
    once = [("orders", 0, 7, ""), ("orders", 0, 7, "why"), ("orders", 0, 8, "why")]
    assert commits.committed == once
    commits.now_s = history.REPEAT_S
    mirror.show({("orders", 0): 8}, "why")
    assert commits.committed == [*once, once[-1]]


def test_offsets_that_kafka_has_not_stored_are_published_again(monkeypatch: pytest.MonkeyPatch) -> None:
    commits = Commits(monkeypatch)
    mirror = LagMirror({}, "mirror")
    commits.error = KafkaError(KafkaError.NOT_COORDINATOR)
    mirror.show({("orders", 0): 7})
    mirror.show({("orders", 0): 7})
    mirror.show({})
    commits.error = None
    mirror.show({})
    mirror.show({})
    assert commits.committed == [("orders", 0, 7, "")] * 3
