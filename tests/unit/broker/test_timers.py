"""Scheduled actions: a client cannot leave any number of them behind, and they keep nothing of a deleted queue in memory."""

from __future__ import annotations

import gc
from typing import Any

from bascule.broker.message import BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.policy_change import change_policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.schedule import CANCELLED_MAX, ScheduledAction
from tests.unit.broker.conftest import Bench

DAY_MS = 86_400_000
MANY = 4 * CANCELLED_MAX


def kept(kind: type, mark: Any) -> int:
    """Return the number of objects in memory that a test has marked."""
    gc.collect()
    return sum(
        1 for each in gc.get_objects() if type(each) is kind and getattr(each, "priority" if kind is BrokerMessage else "name") == mark
    )


def test_messages_that_expire_ever_earlier_leave_no_timers_behind(bench: Bench) -> None:
    consumer = bench.consumer(credit=MANY)
    for number in range(MANY):
        bench.put(number, durable=False, ttl_ms=2_000_000_000 - number)
        bench.broker.flush()
        bench.acknowledge(consumer, number)
    assert bench.queue().held_messages == 0
    assert len(bench.engine.schedule) < 2 * CANCELLED_MAX


def test_sweep_comes_at_the_earliest_expiry(bench: Bench) -> None:
    bench.fill("later", ttl_ms=3 * DAY_MS)
    bench.fill("soon", ttl_ms=DAY_MS)
    bench.now_ms += DAY_MS
    bench.engine.tick()
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["later"]
    bench.now_ms += 2 * DAY_MS
    bench.engine.tick()
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == []


def test_queue_that_is_deleted_during_its_sweep_gets_no_further_timer() -> None:
    bench = Bench(Policy(), turn_steps=100)
    queue = bench.queue()
    bench.fill("soon", durable=False, ttl_ms=1)
    bench.fill(*range(MANY), durable=False, ttl_ms=30 * DAY_MS)
    bench.now_ms += DAY_MS
    bench.engine.tick()
    assert queue.sweeping
    bench.engine.delete_queue(queue)
    bench.broker.settle()
    assert (queue.sweeping, queue.deleted, list(queue.timer_for)) == (False, True, [])
    assert bench.engine.schedule.next_ms is None


def test_deleted_queue_frees_messages_that_wait_for_their_redelivery() -> None:
    bench = Bench(Policy(AddressPolicy(redelivery_delay_ms=DAY_MS)))
    consumer = bench.consumer(credit=1)
    bench.fill("x", durable=False, priority=7)
    (message, _), *_ = consumer.received
    bench.engine.give_back(consumer.consumer, message, failed=True)
    consumer.received.clear()
    del message
    assert kept(BrokerMessage, 7) == 1
    bench.engine.detach(consumer.consumer)
    bench.engine.delete_queue(bench.queue())
    bench.broker.settle()
    assert kept(BrokerMessage, 7) == 0


def test_message_is_redelivered_after_each_delay() -> None:
    bench = Bench(Policy(AddressPolicy(redelivery_delay_ms=DAY_MS)))
    consumer = bench.consumer(credit=10)
    bench.fill("x")
    for attempt in range(1, 4):
        bench.engine.give_back(consumer.consumer, consumer.messages[-1], failed=True)
        bench.broker.settle()
        assert len(consumer.received) == attempt
        bench.now_ms += DAY_MS
        bench.engine.tick()
        bench.broker.settle()
        assert len(consumer.received) == attempt + 1
    assert not [each for each in bench.queue().timer_for if type(each) is object]


def test_ended_subscription_is_not_kept_until_it_would_expire() -> None:
    bench = Bench(Policy(AddressPolicy(subscription_expiry_ms=30 * DAY_MS)))
    for _ in range(3):
        made = bench.subscription("c.s", subscription="s")
        consumer = bench.broker.attach(made)
        bench.engine.detach(consumer.consumer)
        bench.engine.delete_queue(made)
        bench.broker.settle()
    bench.broker.log.records.clear()
    del made, consumer
    assert kept(BrokerQueue, "c.s") == 0


def test_subscription_stays_if_its_expiry_is_turned_off_before_it_is_due() -> None:
    bench = Bench(Policy(AddressPolicy(subscription_expiry_ms=DAY_MS)))
    made = bench.subscription("c.s", subscription="s")
    bench.engine.look_for_use(made)
    change_policy(bench.engine, Policy())
    bench.broker.settle()
    bench.now_ms += 2 * DAY_MS
    bench.engine.tick()
    bench.broker.settle()
    assert not made.deleted


def test_queue_has_one_timer_for_a_purpose(bench: Bench) -> None:
    def timer() -> ScheduledAction:
        return bench.engine.schedule.cancellable(bench.now_ms, lambda: None)

    queue, first, second = bench.queue(), timer(), timer()
    queue.keep_timer("a", first)
    queue.keep_timer("a", second)
    assert (first.pending, second.pending) == (False, True)
