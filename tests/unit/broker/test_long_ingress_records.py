"""Records of the ingress topic with many messages are planned in short turns, and then taken as a whole."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from bascule.broker import planned_sends
from bascule.broker.containment import ErrorContainment
from bascule.broker.errors import BindingsChanged
from bascule.broker.ingress_access import Arrival
from bascule.broker.ingress_tail import FAILED_RETRY_MS, IngressTaking, RecordSends
from bascule.broker.policy import BLOCK, AddressPolicy, Policy
from bascule.broker.turns import TURN_STEPS
from bascule.core.destination import Routing
from bascule.journal.records import MESSAGES_PER_RECORD_MAX, Send, SendFlag
from bascule.testing.broker import message_bytes
from tests.support.costs import quiet
from tests.support.speed import SLOWNESS
from tests.unit.broker.conftest import Bench

#: Turns so short that a record of MANY messages needs several.
STEPS = 400
MANY = 200
TURN_S_MAX = 0.05 * SLOWNESS


class Taking:
    """The intake of one chunk. The test decides when the next turn begins."""

    def __init__(self, bench: Bench, *records: RecordSends, steps: int = STEPS) -> None:
        self.bench, self.engine = bench, bench.engine
        self.engine.turns.steps = steps
        self.engine.turns.begin_turn()
        self.soon: list[Callable[[], object]] = []
        self.chunks_stored = 0
        self.ended = False
        self.taking = IngressTaking(self.engine, "bascule.ingress", 0, soon=self.soon.append, taken=self._taken, ending=lambda: self.ended)
        self.taking.gather(deque(records))

    def _taken(self) -> None:
        self.chunks_stored += 1

    def turn(self) -> bool:
        """Run one turn. Return False if the intake waits for nothing."""
        soon, self.soon[:] = list(self.soon), []
        self.engine.go_on()
        for action in soon:
            action()
        return bool(self.soon)

    def go_on(self) -> int:
        """Run turns until the intake waits for nothing. Return their number."""
        count = 0
        while self.soon:
            self.turn()
            count += 1
        self.bench.broker.settle()
        return count


def record(first: int, count: int, *, to: str = "q", offset: int = 1, keep: bool = True, **fields: Any) -> RecordSends:
    """Return a record at ``offset - 1`` with numbered messages."""
    routing = Routing.MULTICAST if to.startswith("t") else Routing.ANYCAST
    send = Send(SendFlag.DURABLE, routing, 4, 0, 0, 0, to, (), (), (), None, b"")._replace(**fields)
    return offset, [Arrival(send._replace(body=message_bytes(number)), keep) for number in range(first, first + count)]


def test_long_record_is_taken_over_turns_as_one_journal_record_before_the_record_behind_it(bench: Bench) -> None:
    bench.queue()
    bench.broker.settle()
    records = len(bench.values())
    taking = Taking(bench, record(0, MANY, offset=1), record(MANY, 1, offset=2))
    assert taking.turn()
    bench.broker.settle()
    assert len(bench.values()) == records
    assert taking.go_on() > 1
    assert len(bench.values()) == records + 1
    assert bench.waiting(bench.queue()) == list(range(MANY + 1))
    assert taking.engine.confirmed_ingress == {0: 2}
    assert taking.chunks_stored == 1
    assert (taking.engine.memory.ingress_bytes, taking.engine.memory.plans_bytes, bench.queue().incoming) == (0, 0, 0)
    bench.crash()
    assert bench.waiting(bench.queue()) == list(range(MANY + 1))
    assert bench.engine.ingress_positions == {0: 2}


@pytest.mark.parametrize("stored", [0, 1])
def test_long_record_is_taken_once_when_the_broker_crashes_before_or_after_it_is_stored(bench: Bench, stored: int) -> None:
    bench.queue()
    bench.broker.settle()
    taking = Taking(bench, record(0, MANY))
    while taking.soon:
        taking.turn()
    bench.broker.flush()
    bench.crash(stored)
    assert bench.engine.ingress_positions.get(0, 0) == stored
    assert len(bench.waiting(bench.queue())) == (MANY if stored else 0)
    Taking(bench, record(0, MANY)).go_on()
    assert bench.waiting(bench.queue()) == list(range(MANY))


def test_crash_while_a_long_record_is_planned_leaves_nothing_of_it(bench: Bench) -> None:
    bench.queue()
    bench.broker.settle()
    taking = Taking(bench, record(0, MANY))
    assert taking.turn()
    bench.broker.settle()
    bench.crash()
    assert bench.engine.ingress_positions == {}
    assert bench.waiting(bench.queue()) == []
    Taking(bench, record(0, MANY)).go_on()
    assert bench.waiting(bench.queue()) == list(range(MANY))


def test_clients_send_and_receive_while_a_long_record_is_planned(bench: Bench) -> None:
    consumer = bench.consumer(credit=2 * MANY)
    taking = Taking(bench, record(0, MANY))
    assert taking.turn()
    bench.fill("between")
    assert bench.got(consumer) == ["between"]
    taking.go_on()
    assert bench.got(consumer) == ["between", *range(MANY)]


def test_subscription_created_while_a_long_record_is_planned_gets_all_messages(bench: Bench) -> None:
    first = bench.subscription("first")
    taking = Taking(bench, record(0, MANY, to="t"))
    assert taking.turn()
    second = bench.subscription("second", selector="kind IS NULL")
    taking.go_on()
    assert bench.waiting(first) == bench.waiting(second) == list(range(MANY))


@pytest.mark.parametrize("keep", [True, False])
def test_queue_deleted_while_a_long_record_is_planned_is_recreated_for_kept_messages(bench: Bench, keep: bool) -> None:
    bench.queue()
    bench.broker.settle()
    taking = Taking(bench, record(0, MANY, keep=keep))
    assert taking.turn()
    bench.engine.delete_queue(bench.queue())
    bench.broker.settle()
    taking.go_on()
    assert ("q" in bench.engine.addresses) is keep
    assert bench.waiting(bench.queue()) == (list(range(MANY)) if keep else [])
    bench.crash()
    assert bench.waiting(bench.queue()) == (list(range(MANY)) if keep else [])


def test_bindings_that_change_in_each_turn_delay_a_long_record_for_a_limited_number_of_turns(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_sends, "AT_ONCE_STEPS", 0)
    subscriptions = [bench.subscription("s0")]
    taking = Taking(bench, record(0, MANY, to="t"), steps=5 * STEPS)
    while taking.turn():
        assert len(subscriptions) < 2 * MANY
        subscriptions.append(bench.subscription(f"s{len(subscriptions)}"))
    bench.broker.settle()
    assert len(subscriptions) > planned_sends.ROUNDS_MAX
    assert all(bench.waiting(subscription) == list(range(MANY)) for subscription in subscriptions)
    assert all(subscription.incoming == 0 for subscription in subscriptions)


@pytest.mark.interpreted
def test_long_record_waits_if_bindings_change_too_often_to_plan_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    contained: list[Exception] = []
    bench.engine.journaling.errors = ErrorContainment(lambda _, error, __: contained.append(error))
    monkeypatch.setattr(planned_sends, "AT_ONCE_STEPS", 0)
    monkeypatch.setattr(planned_sends, "LAST_AT_ONCE_STEPS", 0)
    monkeypatch.setattr(planned_sends, "ROUNDS_MAX", 1)
    monkeypatch.setattr(planned_sends, "FAILED_ROUNDS", 2)
    subscriptions = [bench.subscription("s0")]
    taking = Taking(bench, record(0, MANY, to="t"), steps=5 * STEPS)
    while taking.turn():
        subscriptions.append(bench.subscription(f"s{len(subscriptions)}"))
    bench.broker.settle()
    assert [type(error) for error in contained] == [BindingsChanged]
    assert (taking.engine.memory.plans_bytes, taking.engine.ingress_positions) == (0, {})
    bench.now_ms += FAILED_RETRY_MS
    bench.engine.tick()
    taking.go_on()
    assert all(bench.waiting(subscription) == list(range(MANY)) for subscription in subscriptions)


def test_long_record_waits_for_a_queue_that_became_full_while_it_was_planned() -> None:
    bench = Bench(Policy(AddressPolicy(max_messages=1, when_full=BLOCK)))
    bench.queue()
    bench.broker.settle()
    taking = Taking(bench, record(0, MANY))
    assert taking.turn()
    bench.fill("first")
    taking.go_on()
    assert "queue 'q' is full" in taking.taking.waits
    assert bench.waiting(bench.queue()) == ["first"]
    bench.acknowledge(bench.consumer(credit=1))
    bench.broker.settle()
    taking.go_on()
    assert bench.waiting(bench.queue()) == list(range(MANY))
    assert taking.engine.memory.plans_bytes == 0


@pytest.mark.interpreted
def test_long_record_that_cannot_be_planned_is_tried_again_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    contained: list[Exception] = []
    bench.engine.journaling.errors = ErrorContainment(lambda _, error, __: contained.append(error))
    bench.queue()
    with monkeypatch.context() as faulty:
        faulty.setattr("bascule.broker.intake.send_entry", Mock(side_effect=ValueError("a fault of the broker")))
        taking = Taking(bench, record(0, MANY), record(MANY, 1, offset=2))
        taking.go_on()
        assert "a fault of the broker" in taking.taking.waits
    assert list(map(str, contained)) == ["a fault of the broker"]
    assert (taking.engine.memory.plans_bytes, taking.engine.ingress_positions) == (0, {})
    bench.now_ms += FAILED_RETRY_MS
    bench.engine.tick()
    taking.go_on()
    assert bench.waiting(bench.queue()) == list(range(MANY + 1))


def test_plan_of_a_long_record_is_dropped_when_the_intake_ends(bench: Bench) -> None:
    taking = Taking(bench, record(0, MANY))
    assert taking.turn()
    assert taking.engine.memory.plans_bytes > 0
    taking.ended = True
    taking.go_on()
    assert taking.engine.memory.plans_bytes == 0
    assert (taking.engine.ingress_positions, bench.waiting(bench.queue())) == ({}, [])


def test_record_with_the_most_messages_has_no_long_turn(bench: Bench) -> None:
    bench.queue()
    bench.broker.settle()
    longest_s = 0.0
    with quiet():
        taking = Taking(bench, record(0, 0, offset=1), steps=TURN_STEPS)
        bench.broker.settle()
        begun_s = time.thread_time()
        taking.taking.gather(deque([_largest()]))
        longest_s = max(longest_s, time.thread_time() - begun_s)
        going_on = True
        while going_on:
            begun_s = time.thread_time()
            going_on = taking.turn()
            longest_s = max(longest_s, time.thread_time() - begun_s)
    bench.broker.settle()
    assert bench.queue().held_messages == MESSAGES_PER_RECORD_MAX
    assert longest_s < TURN_S_MAX


def _largest() -> RecordSends:
    offset, arrivals = record(0, 1, offset=2)
    return offset, arrivals * MESSAGES_PER_RECORD_MAX
