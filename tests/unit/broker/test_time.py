"""Time: delivery delay, redelivery delay, expiry, old transactions, unused queues."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from bascule.amqp.types import Timestamp, ULong
from bascule.broker import expiry
from bascule.broker.engine import Engine
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import Bodies
from bascule.broker.policy import AddressPolicy, Policy
from bascule.jms.errors import MalformedMessage
from bascule.jms.sections import VALUE, header_bytes, scan, section_bytes
from bascule.testing.broker import Receiver, message_bytes
from tests.unit.broker.conftest import START_MS, Bench

SECOND = 1_000


def later(bench: Bench, by_ms: int) -> None:
    bench.now_ms += by_ms
    bench.engine.tick()
    bench.broker.settle()


def bench_with(**settings: Any) -> Bench:
    return Bench(Policy(AddressPolicy(**settings)))


def fail(bench: Bench, receiver: Receiver) -> None:
    """Let the last delivery fail."""
    bench.engine.give_back(receiver.consumer, receiver.messages[-1], failed=True)
    bench.broker.settle()


def test_delayed_message_is_delivered_at_its_delivery_time(bench: Bench) -> None:
    consumer = bench.consumer()
    bench.fill("later", delivery_time_ms=START_MS + SECOND)
    bench.fill("now")
    later(bench, SECOND - 1)
    assert bench.got(consumer) == ["now"]
    later(bench, 1)
    assert bench.got(consumer) == ["now", "later"]
    assert bench.counts(consumer) == [0, 0]


def test_delivery_delay_counts_from_send_and_survives_restart(bench: Bench) -> None:
    bench.fill("later", delivery_delay_ms=SECOND)
    bench.crash()
    consumer = bench.consumer()
    later(bench, SECOND - 1)
    assert bench.got(consumer) == []
    later(bench, 1)
    assert bench.got(consumer) == ["later"]


@pytest.mark.parametrize("snapshot_first", [False, True])
def test_a_delayed_message_is_not_marked_redelivered_after_a_crash(bench: Bench, snapshot_first: bool) -> None:
    consumer = bench.consumer()
    bench.fill("later", delivery_time_ms=START_MS + SECOND)
    bench.fill("now")
    bench.acknowledge(consumer)
    bench.broker.settle()
    if snapshot_first:
        bench.broker.take_snapshot()
        bench.broker.settle()
    bench.crash()
    consumer = bench.consumer()
    later(bench, SECOND)
    assert (bench.got(consumer), bench.counts(consumer)) == (["later"], [0])


def test_a_message_delivered_after_a_snapshot_is_marked_redelivered_after_a_crash(bench: Bench) -> None:
    consumer = bench.consumer()
    bench.fill("later", delivery_time_ms=START_MS + SECOND)
    bench.fill("now")
    bench.acknowledge(consumer)
    bench.broker.settle()
    bench.crash()
    later(bench, SECOND)
    bench.broker.take_snapshot()
    bench.broker.settle()
    consumer = bench.consumer()
    assert (bench.got(consumer), bench.counts(consumer)) == (["later"], [0])
    bench.crash()
    consumer = bench.consumer()
    assert (bench.got(consumer), bench.counts(consumer)) == (["later"], [1])


@pytest.mark.parametrize("snapshot_first", [False, True])
def test_a_failed_delivery_survives_a_crash_even_if_the_next_clock_is_behind(bench: Bench, snapshot_first: bool) -> None:
    for name in ("one", "two"):
        bench.subscription(name)
    bench.fill("later", to="t", delivery_time_ms=START_MS + SECOND)
    later(bench, SECOND)
    fail(bench, bench.consumer(bench.engine.addresses.subscriptions["one"]))
    if snapshot_first:
        bench.broker.take_snapshot()
        bench.broker.settle()
    bench.now_ms -= SECOND
    bench.crash()
    one, two = (bench.consumer(bench.engine.addresses.subscriptions[name]) for name in ("one", "two"))
    later(bench, SECOND)
    assert [bench.got(one), bench.got(two), bench.counts(one)] == [["later"], ["later"], [1]]
    bench.acknowledge(one)
    bench.acknowledge(two)
    assert bench.engine.bodies.memory_bytes == 0


def test_a_standby_that_loaded_a_delayed_message_marks_it_after_its_delivery(bench: Bench) -> None:
    bench.fill("later", delivery_time_ms=START_MS + SECOND)
    standby = Loader(Engine(Journaling(lambda *_: None), Bodies(None, 1 << 40), lambda: bench.now_ms))

    def follow(start: int) -> int:
        records = bench.broker.log.records
        for offset in range(start, len(records)):
            standby.apply(offset, records[offset][1])
        return len(records)

    read = follow(0)
    consumer = bench.consumer()
    later(bench, SECOND)
    assert bench.got(consumer) == ["later"]
    follow(read)
    standby.finish()
    (queue,) = standby.engine.addresses.queues.values()
    assert [queue.delivery_count(message) for message in queue.ready] == [1]


def test_delayed_messages_are_delivered_in_order_of_delivery_time(bench: Bench) -> None:
    for number in (3, 1, 2):
        bench.fill(number, delivery_time_ms=START_MS + number * SECOND)
    consumer = bench.consumer()
    later(bench, 5 * SECOND)
    assert bench.got(consumer) == [1, 2, 3]


def test_delivery_delay_in_transaction_counts_from_send(bench: Bench) -> None:
    transaction = bench.engine.begin(b"1")
    bench.put("later", transaction=transaction, delivery_delay_ms=SECOND)
    bench.now_ms += SECOND // 2
    bench.engine.commit(transaction, lambda _: None)
    consumer = bench.consumer()
    later(bench, SECOND // 2)
    assert bench.got(consumer) == ["later"]


def test_every_subscription_gets_a_delayed_message_even_if_another_one_is_deleted_meanwhile(bench: Bench) -> None:
    first, second = bench.subscription("first"), bench.subscription("second")
    bench.fill("later", to="t", delivery_delay_ms=SECOND)
    bench.engine.delete_queue(second)
    later(bench, SECOND)
    assert bench.waiting(first) == ["later"]
    assert bench.engine.bodies.memory_bytes == sum(message.size_bytes for message in first.ready)


def test_a_failed_delivery_is_retried_after_a_delay_that_grows_to_its_limit() -> None:
    bench = bench_with(redelivery_delay_ms=SECOND, redelivery_multiplier=3, redelivery_delay_max_ms=5 * SECOND)
    bench.fill("x", "y")
    consumer = bench.consumer(credit=1)
    consumer.credit = 0
    for deliveries, pause_ms in enumerate((SECOND, 3 * SECOND, 5 * SECOND, 5 * SECOND), start=1):
        fail(bench, consumer)
        later(bench, pause_ms - 1)
        bench.broker.settle()
        assert len(consumer.received) == deliveries
        consumer.credit = 0
        later(bench, 1)
        assert next(iter(bench.queue().ready)) is consumer.messages[0]
        bench.broker.give(consumer, 1)
        bench.broker.settle()
    assert bench.counts(consumer) == [0, 1, 2, 3, 4]


def test_a_message_with_a_redelivery_delay_blocks_no_other_message() -> None:
    bench = bench_with(redelivery_delay_ms=SECOND)
    bench.fill("bad", "good")
    consumer = bench.consumer(credit=1)
    fail(bench, consumer)
    bench.broker.give(consumer, 1)
    bench.broker.settle()
    assert bench.got(consumer) == ["bad", "good"]
    assert bench.queue().held_messages == 2


def test_a_subscription_deleted_during_a_redelivery_delay_leaves_messages_of_others() -> None:
    bench = bench_with(redelivery_delay_ms=SECOND)
    first, second = bench.subscription("first"), bench.subscription("second")
    bench.fill("news", to="t")
    consumer = bench.consumer(second)
    fail(bench, consumer)
    bench.engine.delete_queue(second)
    later(bench, SECOND)
    (message,) = first.ready
    assert message.references == 1
    assert bench.engine.bodies.memory_bytes == message.size_bytes


def test_an_expired_message_goes_to_the_expiry_address_without_a_consumer(bench: Bench) -> None:
    bench.fill("x", ttl_ms=10 * SECOND, message_id="ID:1")
    later(bench, 10 * SECOND - 1)
    assert bench.waiting(bench.queue()) == ["x"]
    later(bench, 1)
    assert bench.waiting(bench.queue()) == []
    assert bench.waiting(bench.queue("ExpiryQueue")) == ["x"]
    assert bench.annotation("ExpiryQueue", "x-opt-ORIG-ADDRESS") == "q"
    assert bench.annotation("ExpiryQueue", "x-opt-ORIG-MESSAGE-ID") == "ID:1"
    assert bench.annotation("ExpiryQueue", "x-opt-bascule-reason") == "expired"
    assert bench.annotation("ExpiryQueue", "x-opt-ORIG-EXPIRATION") == Timestamp(START_MS + 10 * SECOND)
    bench.crash()
    assert bench.waiting(bench.queue("ExpiryQueue")) == ["x"]


@pytest.mark.parametrize("expiry_address", ["ExpiryQueue", ""])
@pytest.mark.parametrize("consumed", [False, True])
def test_many_messages_that_expire_together_expire_over_several_turns(
    monkeypatch: pytest.MonkeyPatch, expiry_address: str, consumed: bool
) -> None:
    monkeypatch.setattr(expiry, "EXPIRED_BYTES", 10 * expiry.EXPIRED_OVERHEAD_BYTES)
    bench = bench_with(expiry_address=expiry_address)
    bench.fill(*range(25), ttl_ms=SECOND)
    bench.fill("fresh")
    bench.now_ms += SECOND
    receiver = bench.broker.attach(bench.queue(), 30) if consumed else None
    turns = [bench.engine.counters.expired]
    while turns[-1] < 25:
        if receiver is None:
            bench.engine.tick()
        bench.broker.flush()
        turns.append(bench.engine.counters.expired)
        bench.broker.confirm(len(bench.broker.in_flight))
        if receiver is not None:
            bench.engine.tick()
    # Both the sweep and the dispatch find them.
    assert max(after - before for before, after in pairwise(turns)) <= (21 if consumed else 11)
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ([] if consumed else ["fresh"])
    assert receiver is None or bench.got(receiver) == ["fresh"]
    assert bench.waiting(bench.queue("ExpiryQueue")) == (list(range(25)) if expiry_address else [])


def test_an_expired_message_does_not_expire_again(bench: Bench) -> None:
    bench.fill("x", ttl_ms=SECOND)
    later(bench, 2 * SECOND)
    (message,) = bench.queue("ExpiryQueue").ready
    assert message.expiry_ms == 0
    assert scan(bench.engine.bodies.read(message)).ttl_ms == 0


def test_a_message_that_expires_while_unsettled_expires_when_it_returns(bench: Bench) -> None:
    bench.fill("x", ttl_ms=SECOND)
    consumer = bench.consumer()
    later(bench, 5 * SECOND)
    bench.engine.detach(consumer.consumer, failed=False)
    later(bench, 2 * SECOND)
    assert bench.waiting(bench.queue("ExpiryQueue")) == ["x"]


def test_a_message_rejected_as_expired_goes_to_the_expiry_address(bench: Bench) -> None:
    receiver = bench.consumer()
    bench.fill("late", ttl_ms=SECOND)
    bench.now_ms += SECOND
    bench.engine.reject(receiver.consumer, receiver.messages[0])
    bench.broker.settle()
    assert bench.waiting(bench.queue("ExpiryQueue")) == ["late"]


def test_without_an_expiry_address_expired_messages_are_removed() -> None:
    bench = bench_with(expiry_address="")
    bench.fill("x", ttl_ms=SECOND)
    later(bench, 2 * SECOND)
    assert bench.queue().held_messages == 0
    assert list(bench.engine.addresses.anycast) == ["q"]
    bench.crash()
    assert bench.waiting(bench.queue()) == []


def test_settings_can_add_and_shorten_the_time_to_live() -> None:
    bench = bench_with(expiry_ms=5 * SECOND, expiry_max_ms=8 * SECOND)
    bench.fill("none")
    bench.fill("short", ttl_ms=SECOND)
    bench.fill("long", ttl_ms=100 * SECOND)
    left = []
    for _ in range(9):
        later(bench, SECOND)
        left.append(len(bench.waiting(bench.queue())))
    assert left == [2, 2, 2, 2, 1, 1, 1, 0, 0]


def test_a_transaction_that_holds_messages_for_too_long_is_rolled_back() -> None:
    bench = Bench(Policy(transaction_ms_max=SECOND))
    bench.fill("x")
    consumer = bench.consumer()
    transaction = bench.engine.begin(b"1")
    later(bench, 10 * SECOND)
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    bench.put("sent", to="other", transaction=transaction)
    later(bench, SECOND - 1)
    assert transaction.doomed is None
    later(bench, 1)
    assert (bench.got(consumer), bench.counts(consumer)) == (["x", "x"], [0, 1])
    answers: list[Any] = []
    bench.engine.commit(transaction, answers.append)
    assert answers[0].condition == "amqp:transaction:timeout"
    assert bench.waiting(bench.queue("other")) == []


def test_a_timed_out_transaction_holds_later_messages_no_longer_than_any_other() -> None:
    bench = Bench(Policy(transaction_ms_max=SECOND))
    bench.fill("x", "y")
    consumer = bench.consumer()
    transaction = bench.engine.begin(b"1")
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    later(bench, SECOND)
    error = transaction.doomed
    assert error is not None
    later(bench, 10 * SECOND)
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[1])
    later(bench, SECOND - 1)
    assert bench.got(consumer) == ["x", "y", "x"]
    later(bench, 1)
    assert bench.got(consumer) == ["x", "y", "x", "y"]
    assert transaction.doomed is error


def test_a_too_large_transaction_holds_received_messages_no_longer_than_any_other() -> None:
    bench = Bench(Policy(transaction_ms_max=SECOND, transaction_bytes_max=1000))
    bench.fill("x")
    consumer = bench.consumer()
    transaction = bench.engine.begin(b"1")
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    bench.put("large" * 1000, to="other", transaction=transaction)
    later(bench, SECOND)
    assert bench.got(consumer) == ["x", "x"]
    assert "larger than 1000 bytes" in str(transaction.doomed)


def test_an_unused_auto_created_queue_is_deleted_after_the_configured_time() -> None:
    bench = Bench(Policy(AddressPolicy(auto_delete_ms=SECOND), queues=("kept",)))
    bench.engine.create_configured()
    bench.fill(1)
    consumer = bench.consumer()
    bench.acknowledge(consumer)
    later(bench, 2 * SECOND)
    assert "q" in bench.engine.addresses
    bench.engine.detach(consumer.consumer)
    later(bench, SECOND)
    assert list(bench.engine.addresses.anycast) == ["kept"]
    bench.crash()
    assert list(bench.engine.addresses.anycast) == ["kept"]


def test_a_queue_with_a_message_in_flight_is_not_unused() -> None:
    bench = bench_with(auto_delete_ms=SECOND)
    bench.engine.detach(bench.consumer().consumer)
    bench.broker.settle()
    bench.put("x")
    bench.broker.flush()
    bench.now_ms += SECOND
    bench.engine.tick()
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == ["x"]
    bench.crash()
    assert bench.waiting(bench.queue()) == ["x"]


def test_a_queue_with_a_producer_is_in_use() -> None:
    bench = bench_with(auto_delete_ms=SECOND)
    queue = bench.queue()
    bench.engine.attach_producer("q", queue.routing)
    bench.engine.detach(bench.consumer().consumer)
    later(bench, 2 * SECOND)
    assert not queue.deleted
    bench.engine.detach_producer("q", queue.routing)
    later(bench, SECOND)
    assert queue.deleted


#: Message annotations that are not examined on arrival: a truncated map.
UNREADABLE = bytes.fromhex("005372c103023f3f")


def test_an_expired_message_with_unreadable_annotations_goes_to_the_expiry_address(bench: Bench) -> None:
    body = header_bytes(durable=True, ttl_ms=SECOND) + UNREADABLE + section_bytes(VALUE, "bad")
    readable = header_bytes(durable=True, ttl_ms=SECOND) + section_bytes(VALUE, "bad")
    bench.broker.send("q", body, bench.sender, "bad", facts=scan(readable))
    bench.fill("later", to="other", delivery_delay_ms=SECOND)
    later(bench, SECOND)
    assert bench.waiting(bench.queue("ExpiryQueue")) == ["bad"]
    assert bench.waiting(bench.queue("other")) == ["later"]


@pytest.mark.parametrize("when", ["delivery_time_ms", "delivery_delay_ms"])
def test_delivery_time_after_year_9999_is_refused(when: str) -> None:
    with pytest.raises(MalformedMessage, match=f"invalid delivery time: {1 << 63} ms is after the year 9999"):
        scan(message_bytes("never", **{when: ULong(1 << 63)}))
