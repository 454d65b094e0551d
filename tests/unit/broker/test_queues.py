from __future__ import annotations

import pytest

from bascule.amqp.types import UByte, UInt
from bascule.broker import delivery
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from bascule.journal.records import Op, decode_count, entries
from bascule.testing.broker import Receiver
from tests.unit.broker.conftest import Bench

#: Annotations of a dead letter: its origin, the reason, and the number of deliveries.
DEAD_LETTER_ANNOTATIONS = (
    "x-opt-ORIG-ADDRESS", "x-opt-ORIG-QUEUE", "x-opt-ORIG-ROUTING-TYPE", "x-opt-bascule-reason", "x-opt-bascule-deliveries",
)  # fmt: skip


def test_messages_are_delivered_in_the_order_of_their_sends(bench: Bench) -> None:
    bench.fill(1, 2, 3)
    assert bench.got(bench.consumer()) == [1, 2, 3]


def test_higher_priorities_are_delivered_first_and_each_priority_in_order(bench: Bench) -> None:
    for content, priority in ((1, 4), (2, 9), (3, 4), (4, 9), (5, 0)):
        bench.put(content, priority=priority)
    bench.broker.settle()
    assert bench.got(bench.consumer()) == [2, 4, 1, 3, 5]


def test_priorities_above_9_count_as_9(bench: Bench) -> None:
    bench.fill("above", priority=200)
    bench.fill("nine", priority=9)
    assert bench.got(bench.consumer()) == ["above", "nine"]


def test_competing_consumers_take_turns(bench: Bench) -> None:
    first, second, third = (bench.consumer() for _ in range(3))
    bench.fill(*range(9))
    assert sorted(map(bench.got, (first, second, third))) == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]


def test_a_consumer_without_credit_is_skipped(bench: Bench) -> None:
    idle, busy = bench.consumer(credit=0), bench.consumer(credit=2)
    bench.fill(1, 2, 3)
    assert bench.got(idle) == []
    assert bench.got(busy) == [1, 2]
    bench.broker.give(idle, 1)
    bench.broker.settle()
    assert bench.got(idle) == [3]


def test_expired_messages_do_not_delay_messages_behind_them(bench: Bench) -> None:
    bench.consumer(credit=0)
    bench.fill("a", "b", "c", ttl_ms=10)
    bench.fill("fresh")
    bench.now_ms += 10
    assert bench.got(bench.consumer()) == ["fresh"]


def test_an_expired_message_is_never_delivered_and_its_removal_is_journaled(bench: Bench) -> None:
    bench.fill("old", ttl_ms=10)
    bench.now_ms += 11
    bench.consumer()
    bench.crash()
    assert bench.waiting(bench.queue()) == []


def test_a_message_is_delivered_until_its_time_to_live_ends(bench: Bench) -> None:
    bench.fill("young", ttl_ms=10)
    bench.now_ms += 9
    assert bench.got(bench.consumer()) == ["young"]


def test_an_acknowledged_message_stays_removed_after_a_crash(bench: Bench) -> None:
    bench.fill(1, 2)
    bench.acknowledge(bench.consumer(), 0)
    bench.broker.settle()
    bench.crash()
    assert bench.waiting(bench.queue()) == [2]


def test_second_acknowledgement_of_message_has_no_effect(bench: Bench) -> None:
    bench.fill(1)
    consumer = bench.consumer()
    bench.acknowledge(consumer, 0, 0)
    bench.broker.settle()
    assert bench.engine.bodies.memory_bytes == 0


def test_released_messages_are_redelivered_in_their_place_and_unmarked(bench: Bench) -> None:
    bench.fill(1, 2, 3)
    first = bench.consumer(credit=2)
    for message in reversed(first.messages):
        bench.engine.give_back(first.consumer, message, failed=False)
    second = bench.consumer()
    assert bench.got(second) == [1, 2, 3]
    assert bench.counts(second) == [0, 0, 0]


def test_failed_delivery_increments_delivery_count(bench: Bench) -> None:
    bench.fill(1)
    first = bench.consumer(credit=2)
    bench.engine.give_back(first.consumer, first.messages[0], failed=True)
    bench.broker.settle()
    assert bench.counts(first) == [0, 1]


def test_the_delivery_count_survives_a_crash(bench: Bench) -> None:
    bench.fill(1)
    consumer = bench.consumer(credit=2)
    bench.engine.give_back(consumer.consumer, consumer.messages[0], failed=True)
    bench.broker.settle()
    bench.engine.give_back(consumer.consumer, consumer.messages[1], failed=True)
    bench.broker.settle()
    bench.crash()
    assert bench.counts(bench.consumer()) == [2]


def test_delivery_counts_of_many_messages_survive_crash_in_entries_of_bounded_size(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivery, "COUNTS_MAX", 2)
    bench.fill(*range(5))
    bench.engine.detach(bench.consumer().consumer)
    bench.broker.settle()
    value = bench.values()[-1]
    assert [len(decode_count(value, start, end)[1]) for op, start, end in entries(value) if op == Op.COUNT] == [2, 2, 1]
    bench.crash()
    assert bench.counts(bench.consumer()) == [1] * 5


def test_message_goes_to_dlq_after_last_allowed_delivery_fails(bench: Bench, policy: Policy) -> None:
    bench.fill("poison", "good")
    consumer = bench.consumer(credit=1)
    for number in range(policy.defaults.deliveries_max):
        bench.engine.give_back(consumer.consumer, consumer.messages[number], failed=True)
        bench.broker.give(consumer, 1)
        bench.broker.settle()
    assert bench.got(consumer) == ["poison"] * policy.defaults.deliveries_max + ["good"]
    assert bench.waiting(bench.queue(policy.defaults.dead_letter_address)) == ["poison"]
    said = {name: bench.annotation(policy.defaults.dead_letter_address, name) for name in DEAD_LETTER_ANNOTATIONS}
    assert list(said.values()) == ["q", "q", UByte(0), "delivery-attempts", UInt(policy.defaults.deliveries_max)]


def test_without_a_dead_letter_address_a_message_that_fails_too_often_is_removed() -> None:
    bench = Bench(Policy(AddressPolicy(dead_letter_address="", deliveries_max=1)))
    bench.fill("poison", "good")
    consumer = bench.consumer(credit=1)
    bench.engine.give_back(consumer.consumer, consumer.messages[0], failed=True)
    bench.broker.settle()
    bench.crash()
    assert bench.waiting(bench.queue()) == ["good"]
    assert list(bench.engine.addresses.anycast) == ["q"]


def test_a_rejected_message_goes_to_the_dead_letters_at_once(bench: Bench) -> None:
    bench.fill("bad")
    consumer = bench.consumer()
    bench.engine.reject(consumer.consumer, consumer.messages[0])
    bench.broker.settle()
    bench.crash()
    assert bench.waiting(bench.queue()) == []
    assert bench.waiting(bench.queue("DLQ")) == ["bad"]
    assert [bench.annotation("DLQ", name) for name in DEAD_LETTER_ANNOTATIONS] == ["q", "q", UByte(0), "rejected", UInt(0)]


def test_the_move_to_the_dead_letters_is_one_record(bench: Bench) -> None:
    bench.fill("bad")
    consumer = bench.consumer()
    before = len(bench.broker.log.records)
    bench.engine.reject(consumer.consumer, consumer.messages[0])
    bench.broker.settle()
    assert len(bench.broker.log.records) == before + 1


def test_a_message_rejected_from_the_dead_letters_stays_there(bench: Bench) -> None:
    bench.fill("bad", to="DLQ")
    consumer = bench.consumer(bench.queue("DLQ"), credit=1)
    bench.engine.reject(consumer.consumer, consumer.messages[0])
    bench.broker.settle()
    assert bench.waiting(bench.queue("DLQ")) == ["bad"]


def test_a_dead_letter_does_not_expire(bench: Bench) -> None:
    bench.fill("bad", ttl_ms=10)
    consumer = bench.consumer()
    bench.engine.reject(consumer.consumer, consumer.messages[0])
    bench.broker.settle()
    bench.now_ms += 1000
    assert bench.got(bench.consumer(bench.queue("DLQ"))) == ["bad"]


def test_messages_of_a_lost_consumer_are_redelivered_in_order_and_marked(bench: Bench) -> None:
    bench.fill(1, 2, 3)
    first = bench.consumer(credit=2)
    bench.engine.detach(first.consumer)
    second = bench.consumer()
    assert bench.got(second) == [1, 2, 3]
    assert bench.counts(second) == [1, 1, 0]


def test_an_orderly_close_does_not_count_as_a_failed_delivery_of_prefetched_messages(bench: Bench, policy: Policy) -> None:
    bench.fill(1)
    for _ in range(policy.defaults.deliveries_max + 2):
        consumer = bench.consumer()
        bench.engine.detach(consumer.consumer, failed=False)
        bench.broker.settle()
    assert bench.counts(bench.consumer()) == [1]


def test_many_returned_messages_keep_their_places_among_those_of_other_consumers(bench: Bench) -> None:
    bench.fill(*range(3000))
    first, second = bench.consumer(credit=0), bench.consumer(credit=0)
    for consumer in (first, second):
        bench.broker.give(consumer, 1000)
    bench.broker.settle()
    bench.engine.detach(first.consumer)
    bench.engine.detach(second.consumer)
    assert bench.waiting(bench.queue()) == list(range(3000))


def test_drain_is_answered_after_last_deliverable_message(bench: Bench) -> None:
    bench.fill(1)
    consumer = bench.broker.attach(bench.queue(), 10)
    bench.broker.flush()
    assert consumer.drains_answered == 0
    bench.broker.settle()
    assert bench.got(consumer) == [1]
    assert consumer.drains_answered == 1


def test_a_deleted_queue_releases_all_messages_and_consumers(bench: Bench) -> None:
    bench.fill(1, 2, 3)
    consumer = bench.consumer(credit=2)
    transaction = bench.engine.begin(b"1")
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[0])
    bench.engine.delete_queue(bench.queue())
    bench.acknowledge(consumer, 1)
    bench.engine.rollback(transaction)
    bench.engine.detach(consumer.consumer)
    bench.broker.settle()
    assert bench.engine.bodies.memory_bytes == 0
    bench.crash()
    assert "q" not in bench.engine.addresses


def test_a_recreated_queue_is_empty(bench: Bench) -> None:
    bench.fill(1)
    bench.engine.delete_queue(bench.queue())
    bench.fill(2)
    bench.crash()
    assert bench.waiting(bench.queue()) == [2]


def test_send_beyond_limit_of_queues_is_refused_and_error_names_queue() -> None:
    bench = Bench(Policy(queues_max=1))
    bench.fill(1)
    bench.put(2, to="another")
    token, error = bench.sender.answers[-1]
    assert token == 2
    assert error is not None
    assert error.condition == "amqp:resource-limit-exceeded"
    assert "'another'" in str(error)


def test_limit_of_queues_does_not_block_dead_letter() -> None:
    bench = Bench(Policy(queues_max=1))
    bench.fill("bad")
    consumer = bench.consumer()
    bench.engine.reject(consumer.consumer, consumer.messages[0])
    bench.broker.settle()
    assert bench.waiting(bench.queue("DLQ")) == ["bad"]


def test_a_non_persistent_message_is_delivered_at_once_and_lost_in_a_crash(bench: Bench) -> None:
    consumer = bench.consumer()
    records = len(bench.broker.log.records)
    bench.put("light", durable=False)
    bench.engine.dispatch()
    assert bench.sender.accepted_tokens == ["light"]
    assert bench.got(consumer) == ["light"]
    assert len(bench.broker.log.records) == records
    bench.crash()
    assert bench.waiting(bench.queue()) == []


def test_a_consumer_of_settled_messages_needs_no_acknowledgement(bench: Bench) -> None:
    class Settled(Receiver):
        def deliver(self, message: BrokerMessage, delivery_count: int) -> int:
            credit = super().deliver(message, delivery_count)
            bench.engine.acknowledge(self.consumer, message)
            return credit

    consumer = Settled(credit=10)
    consumer.consumer = bench.engine.attach(bench.queue(), consumer)
    bench.fill(1, 2)
    bench.crash()
    assert len(consumer.messages) == 2
    assert bench.waiting(bench.queue()) == []
