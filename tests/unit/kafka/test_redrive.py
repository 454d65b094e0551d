"""Records that move to other topics: all or none of them, and the count of the rest needs no second read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import KafkaRecord, Outgoing
from bascule.core.topics import RECORD_BYTES_MAX
from bascule.kafka import clients, redrive
from bascule.kafka.redrive import Redrive


class Letter:
    """A message of the client library."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def topic(self) -> str:
        return "dead"

    def partition(self) -> int:
        return 0

    def offset(self) -> int:
        return self._offset

    def key(self) -> None:
        return None

    def value(self) -> bytes:
        return b"body"

    def headers(self) -> None:
        return None

    def timestamp(self) -> tuple[int, int]:
        return 1, 0


class Topic:
    """A topic with one partition: its offsets, the offset up to which records have moved, and the offsets that were read."""

    def __init__(self, offsets: range) -> None:
        self.offsets = offsets
        self.moved = -1001
        self.read: list[int] = []

    def records(self, start: int, end: int, *, committed: bool) -> Iterator[Letter]:
        assert committed
        for offset in self.offsets:
            if start <= offset < end:
                self.read.append(offset)
                yield Letter(offset)

    def earliest(self) -> int:
        return self.offsets.start

    def latest(self) -> int:
        return self.offsets.stop

    def partitions(self) -> dict[str, int]:
        return {"dead": 1}


class Client:
    """Producer and consumer of the client library. The call ``fails`` raises an error."""

    def __init__(self, fails: str = "") -> None:
        self.calls: list[str] = []
        self._fails = fails

    def __call__(self, settings: dict[str, Any]) -> Client:
        self.settings = settings
        return self

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> None:
            self.calls.append(name)
            if name == self._fails:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

        return call


@pytest.fixture
def topic(monkeypatch: pytest.MonkeyPatch) -> Topic:
    there = Topic(range(3, 6))
    monkeypatch.setattr(redrive, "TopicHistory", lambda *_: there)
    monkeypatch.setattr(redrive, "Topics", lambda *_: there)
    monkeypatch.setattr(redrive, "committed_offset", lambda *_: there.moved)
    return there


def sent(received: KafkaRecord) -> Outgoing:
    return Outgoing("retry", received.key, received.value)


def test_counted_dead_letters_are_not_read_again(topic: Topic) -> None:
    mover = Redrive({}, "dead", "shop")
    assert mover.count() == 3
    assert mover.count() == 3
    topic.offsets = range(3, 8)
    assert mover.count() == 5
    assert topic.read == [3, 4, 5, 6, 7]


def test_returned_or_deleted_dead_letters_are_not_counted(topic: Topic) -> None:
    mover = Redrive({}, "dead", "shop")
    mover.count()
    topic.moved = 4
    assert mover.count() == 2
    topic.offsets = range(5, 7)
    assert mover.count() == 2
    topic.moved = 7
    assert mover.count() == 0
    topic.offsets, topic.moved = range(2), -1001
    assert mover.count() == 2


def test_largest_stored_dead_letter_can_be_returned(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Client()
    monkeypatch.setattr(clients, "producer", producer)
    monkeypatch.setattr(clients, "consumer", Client())
    Redrive({}, "dead", "shop").move(sent)
    assert producer.settings["message.max.bytes"] == RECORD_BYTES_MAX


@pytest.mark.parametrize("fails", ["", "produce", "send_offsets_to_transaction", "commit_transaction"])
def test_failed_return_of_dead_letters_aborts_transaction(topic: Topic, monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    producer = Client(fails)
    monkeypatch.setattr(clients, "producer", producer)
    monkeypatch.setattr(clients, "consumer", Client())
    mover = Redrive({}, "dead", "shop")
    if not fails:
        assert mover.move(sent) == 3
    else:
        with pytest.raises(Unavailable, match="records were not moved, or the move is in doubt"):
            mover.move(sent)
    assert producer.calls[-1] == ("abort_transaction" if fails else "commit_transaction")


def test_return_with_invalid_output_record_aborts_transaction(topic: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = Client()
    monkeypatch.setattr(clients, "producer", producer)
    monkeypatch.setattr(clients, "consumer", Client())
    with pytest.raises(ZeroDivisionError):
        Redrive({}, "dead", "shop").move(lambda _: 1 / 0)  # type: ignore[arg-type, return-value]
    assert producer.calls[-1] == "abort_transaction"
