"""A queue with very many consumers: no turn goes through all of them. bench/extremes.py measures such queues with the largest numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bascule.broker import ready
from bascule.broker.errors import QueueDeleted, ResourceLimit
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.policy_change import change_policy
from bascule.broker.queue import FED_AT_ONCE
from bascule.jms.selector import compile_selector
from bascule.testing.broker import Receiver
from tests.support.costs import calls_of
from tests.unit.broker.conftest import Bench

MANY = 3_000
STEPS = 1_000


@pytest.fixture
def bench() -> Bench:
    return Bench(Policy(AddressPolicy(auto_delete=False)))


def consumers(bench: Bench, count: int, credit: int = 1, made: Callable[[int], Receiver] = Receiver) -> list[Receiver]:
    """Attach consumers to the queue, in turns of unlimited length."""
    found = []
    for _ in range(count):
        receiver = made(credit)
        receiver.consumer = bench.engine.attach(bench.queue(), receiver)
        bench.engine.wake(bench.queue(), receiver.consumer)
        found.append(receiver)
    bench.broker.settle()
    return found


def short_turns(bench: Bench) -> None:
    bench.engine.turns.steps = STEPS
    bench.engine.turns.begin_turn()


def turn(bench: Bench) -> None:
    bench.engine.turns.begin_turn()
    bench.broker.flush()
    bench.broker.confirm(len(bench.broker.in_flight))


def test_deletion_of_a_queue_reaches_its_consumers_in_turns_and_releases_what_they_hold(bench: Bench) -> None:
    for number in range(MANY):
        bench.put(number)
    held = consumers(bench, MANY)
    assert bench.engine.memory.unsettled == MANY
    short_turns(bench)
    assert calls_of(lambda: bench.engine.delete_queue(bench.queue())) < STEPS
    last = next(each for each in held if each.end is None)
    bench.engine.acknowledge(last.consumer, last.messages[0])  # the consumers of a deleted queue hold nothing
    bench.engine.reject(last.consumer, last.messages[0])
    assert bench.engine.memory.unsettled > 0
    bench.broker.settle()
    assert all(isinstance(each.end, QueueDeleted) for each in held)
    assert (bench.engine.memory.unsettled, bench.engine.memory.entries, bench.engine.memory.messages) == (0, 0, 0)
    assert not bench.engine.addresses.queues  # no dead letter was made


def test_message_makes_starved_consumers_takers_in_pieces_if_it_may_be_for_any_of_them(bench: Bench) -> None:
    bench.consumer(selector="n = 1")
    queue, takers = bench.queue(), []

    class Looking(Receiver):
        def deliver(self, message: BrokerMessage, delivery_count: int) -> int:
            takers.append(len(queue.takers))
            return super().deliver(message, delivery_count)

    starved = consumers(bench, MANY, made=Looking)
    assert len(queue.starved) == MANY + 1
    bench.fill(2, properties={"n": 2})
    assert 0 < takers[0] < MANY // 2
    assert [bench.got(each) for each in starved if each.messages] == [[2]]
    bench.fill(*range(10, 10 + MANY - 1))
    assert all(len(each.messages) == 1 for each in starved)


def test_messages_that_arrive_one_at_a_time_go_round_all_consumers(bench: Bench) -> None:
    bench.consumer(selector="n = 1")
    count = 2 * FED_AT_ONCE + 100
    receivers = consumers(bench, count, credit=100)
    for number in range(count):
        bench.fill(number, properties={"n": 2})
    assert {len(each.messages) for each in receivers} == {1}


def test_consumers_are_woken_in_turns_when_the_settings_of_their_queue_change(bench: Bench) -> None:
    receivers = consumers(bench, MANY, credit=0)
    answered = sum(each.drains_answered for each in receivers)
    short_turns(bench)
    change_policy(bench.engine, Policy(AddressPolicy(auto_delete=False, prefetch_max=7)))
    assert bench.queue().settings.prefetch_max == 7
    assert 0 < len(bench.queue().asking) < STEPS
    bench.broker.settle()
    assert sum(each.drains_answered for each in receivers) == answered + MANY


@pytest.mark.interpreted  # replaces a constant
def test_selector_beyond_the_limit_of_a_queue_is_refused_and_known_ones_are_accepted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "SELECTORS_MAX", 3)
    receivers = [bench.consumer(selector=f"n = {number}") for number in range(3)]
    used = bench.engine.memory.selectors.chars
    with pytest.raises(ResourceLimit, match="the consumers of the queue may have 3 different selectors"):
        bench.engine.attach(bench.queue(), Receiver(1), compile_selector("n = 3"))
    assert bench.engine.memory.selectors.chars == used
    assert len(bench.queue().consumers) == 3
    bench.consumer(selector="n = 2")
    bench.engine.detach(receivers[0].consumer)
    late = bench.consumer(selector="n = 3")
    bench.fill(3, properties={"n": 3})
    assert bench.got(late) == [3]
