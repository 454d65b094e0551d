"""A slot while Kafka is away: it gives up in time, and its end hides no other error and leaves nothing open."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from bascule.core.errors import Unavailable
from bascule.kafka.slot import Slot
from bascule.threads.background import in_background


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


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.kafka.slot.TRANSACT_DEADLINE_S", 0.01)
    monkeypatch.setattr("bascule.kafka.guards.EXPLAIN_TIMEOUT_S", 0.01)


def test_a_transaction_whose_incarnation_does_not_come_is_given_up_in_time(reader: Reader, hasty: None) -> None:
    slot = Slot({}, "id", "table", 0)
    slot._next = Future()
    given_up = in_background(lambda: slot.transact(lambda _: []), "transaction").exception(10)
    assert isinstance(given_up, Unavailable)
    assert str(given_up) == "no transaction can be started: Kafka does not answer in time"
    slot.close()
    assert reader.closed


def test_whether_a_transaction_can_be_started_is_waited_for_where_none_could_be_before(reader: Reader, hasty: None) -> None:
    slot = Slot({}, "id", "table", 0)
    slot._next = Future()
    with pytest.raises(Unavailable, match="no transaction can be started"):
        slot.reach()
    slot._next.set_result(cast("Any", "an incarnation"))
    slot.reach()
    slot._next = Future()
    slot.reach()
    slot._next.set_exception(KafkaException(KafkaError(KafkaError._TIMED_OUT)))
    with pytest.raises(Unavailable, match="no transaction can be started"):
        slot.reach()
    slot._next = Future()
    with pytest.raises(Unavailable):
        slot.reach()
    slot.close()


def test_of_two_threads_that_prepare_a_slot_one_makes_its_incarnation(reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each later one fences those before it."""
    first, goes_on = threading.Event(), threading.Event()
    made: list[Future[Any]] = []

    def make(*_: object) -> Future[Any]:
        made.append(Future())
        first.set()
        goes_on.wait(30)
        return made[-1]

    monkeypatch.setattr("bascule.kafka.slot.in_background", make)
    slot = Slot({}, "id", "table", 0)
    threads = [threading.Thread(target=slot.prepare) for _ in range(2)]
    threads[0].start()
    assert first.wait(30)
    threads[1].start()
    threads[1].join(0.2)  # as long as a wrong one might take
    goes_on.set()
    for thread in threads:
        thread.join()
    assert len(made) == 1
    slot.close()
    assert reader.closed
