"""The end of a slot while Kafka is away: it hides no other error, and leaves nothing open."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from bascule.core.errors import Unavailable
from bascule.kafka.slot import Slot


class Reader:
    closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Reader:
    reader = Reader()
    monkeypatch.setattr("bascule.kafka.slot.TableReader", lambda *_: reader)
    monkeypatch.setattr("bascule.kafka.slot.COORDINATOR_TIMEOUT_S", 0.01)
    return reader


def closing(failure: BaseException | None) -> None:
    slot = Slot({}, "id", "table", 0)
    coming: Future[Any] = Future()
    if failure is not None:
        coming.set_exception(failure)
    slot._next = coming
    slot.close()


@pytest.mark.parametrize("failure", [None, KafkaException(KafkaError(KafkaError._TIMED_OUT)), Unavailable("no Kafka")])
def test_a_slot_whose_next_incarnation_does_not_come_is_closed(reader: Reader, failure: BaseException | None) -> None:
    closing(failure)
    assert reader.closed


def test_a_slot_is_closed_whatever_its_next_incarnation_failed_of(reader: Reader) -> None:
    with pytest.raises(ZeroDivisionError):
        closing(ZeroDivisionError())
    assert reader.closed
