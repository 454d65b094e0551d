"""The pool of connections: limits, waiting, validation and leaks; and the names of factories."""

from __future__ import annotations

import threading

import pytest

from bascule.adapter.outbound import KafkaConnectionFactory, PoolClosed, PoolExhausted, PoolLimits, Registry
from bascule.adapter.outbound.pool import Pool
from bascule.core.errors import InvalidInput, Unavailable


class Thing:
    def __init__(self, number: int) -> None:
        self.number = number
        self.works: bool | None = True
        self.closed = False

    def validate(self) -> None:
        if self.works is None:
            raise ZeroDivisionError
        if not self.works:
            raise Unavailable("broken")

    def close(self) -> None:
        self.closed = True


def pool(**limits: float) -> tuple[Pool[Thing], list[Thing]]:
    made: list[Thing] = []

    def make(number: int) -> Thing:
        made.append(Thing(number))
        return made[-1]

    return Pool("things", make, PoolLimits(**{"most": 2, "wait_s": 0.05, **limits})), made  # type: ignore[arg-type]


def test_returned_connection_is_lent_again() -> None:
    things, made = pool()
    number, thing = things.take()
    things.give_back(number)
    assert things.take() == (number, thing)
    assert len(made) == 1


def test_pool_timeout_error_names_holders() -> None:
    things, _ = pool()
    things.take()
    things.take()
    with pytest.raises(PoolExhausted, match="all 2 connections are held") as raised:
        things.take()
    assert threading.current_thread().name in str(raised.value)
    assert "test_pool_timeout_error_names_holders" in str(raised.value)


def test_waiting_caller_gets_returned_connection() -> None:
    things, _ = pool(most=1, wait_s=30)
    number, thing = things.take()
    got: list[Thing] = []
    waiting = threading.Thread(target=lambda: got.append(things.take()[1]))
    waiting.start()
    things.give_back(number)
    waiting.join(30)
    assert got == [thing]


def test_broken_idle_connection_is_replaced() -> None:
    things, made = pool(validate_after_s=0)
    things.give_back(things.take()[0])
    made[0].works = False
    _, thing = things.take()
    assert thing is made[1]
    assert made[0].closed


def test_connection_whose_validation_raises_is_closed_and_frees_its_place() -> None:
    things, made = pool(most=1, validate_after_s=0)
    things.give_back(things.take()[0])
    made[0].works = None
    with pytest.raises(ZeroDivisionError):
        things.take()
    assert made[0].closed
    assert things.take()[1] is made[1]


def test_slot_number_is_free_only_after_close_of_its_connection() -> None:
    """The number is part of a transactional id. The close of the first connection would fence a second one with the same id."""
    things, made = pool(most=1)
    number, thing = things.take()
    seen: list[int] = []
    thing.close = lambda: seen.append(len(things._free))  # type: ignore[method-assign]
    things.give_back(number, broken=True)
    assert seen == [0]
    assert things.take() == (number, made[1])


def test_connection_returned_as_broken_is_closed() -> None:
    things, made = pool()
    things.give_back(things.take()[0], broken=True)
    assert made[0].closed
    assert things.idle == 0


def test_connection_that_cannot_be_created_takes_no_place() -> None:
    def make(_number: int) -> Thing:
        raise Unavailable("no Kafka")

    things = Pool("things", make, PoolLimits(1, 0.05))
    for _ in range(3):
        with pytest.raises(Unavailable, match="no Kafka"):
            things.take()


def test_connection_leak_is_reported_once_with_its_holder(caplog: pytest.LogCaptureFixture) -> None:
    things, _ = pool(most=3, leak_after_s=0.001)
    things.take()
    (leak,) = things.leases()
    assert leak.by == threading.current_thread().name
    threading.Event().wait(0.002)
    things.take()
    things.take()
    reports = [record.getMessage() for record in caplog.records if "possible connection leak" in record.getMessage()]
    assert "test_connection_leak_is_reported_once_with_its_holder" in reports[0]
    assert len(reports) <= 2


def test_closed_pool_lends_nothing_and_closes_returned_connections() -> None:
    things, made = pool()
    number, _ = things.take()
    things.give_back(things.take()[0])
    things.close()
    assert made[1].closed
    with pytest.raises(PoolClosed, match="things is closed"):
        things.take()
    things.give_back(number)
    assert made[0].closed


def test_lookup_of_unbound_name_suggests_nearest_name() -> None:
    names, factory = Registry(), KafkaConnectionFactory({"bootstrap.servers": "127.0.0.1:1"})
    names.bind("kafka/orders", factory)
    assert names.lookup("kafka/orders") is factory
    with pytest.raises(InvalidInput, match=r"nothing is bound to 'kafka/order'; did you mean 'kafka/orders'\?"):
        names.lookup("kafka/order")
    with pytest.raises(InvalidInput, match="bound names: kafka/orders"):
        names.lookup("something")
    with pytest.raises(InvalidInput, match="already bound"):
        names.bind("kafka/orders", factory)
    names.bind("kafka/orders", factory, again=True)
    names.unbind("kafka/orders")
    with pytest.raises(InvalidInput, match="bound names: none"):
        names.lookup("kafka/orders")
    with pytest.raises(InvalidInput, match="is not a valid name"):
        names.bind("/kafka", factory)
