"""Long work continues in turns: steps limit the work of one turn, other clients are served meanwhile, and order is kept."""

from __future__ import annotations

import dataclasses
from functools import partial
from itertools import pairwise

import pytest

from bascule.broker import delivery
from bascule.broker import turns as broker_turns
from bascule.broker.errors import QueueDeleted
from bascule.broker.expiry import SWEEP_MS, Expiry
from bascule.broker.matching import EVALUATION_STEPS
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.queue import BrokerQueue
from bascule.broker.schedule import Schedule
from bascule.core.destination import Routing
from bascule.jms.selector import compile_selector
from bascule.testing.broker import BrokerInMemory, Receiver, Sender, message_bytes
from tests.support.faults import Faults, InjectedFault
from tests.unit.broker.conftest import Bench

STEPS = 1_000
#: More than one turn can do.
MANY = 2_000
RED = "colour = 'red'"


class Turns:
    """A broker whose turns are short. It counts the deliveries in each turn."""

    def __init__(self, count: int = MANY, **facts: object) -> None:
        self.now_ms = 1_000
        self.broker = BrokerInMemory(clock=lambda: self.now_ms)
        self.engine = self.broker.engine
        self.queue = self.engine.queue("q")
        self.sender = Sender()
        for number in range(count):
            self.send(number, properties={"colour": "blue"}, **facts)
        self.broker.settle()
        self.engine.turns.steps = STEPS

    def send(self, number: int, to: str = "q", **facts: object) -> None:
        self.broker.send(to, message_bytes(number, **facts), self.sender, number)  # type: ignore[arg-type]

    def consumer(self, credit: int = MANY, *, queue: str = "q", selector: str = "") -> Receiver:
        compiled = compile_selector(selector) if selector else None
        return self.broker.attach(self.engine.queue(queue), credit, selector=compiled)

    def turn(self) -> None:
        """Run one turn, and store the records in flight."""
        self.broker.flush()
        self.broker.confirm(len(self.broker.in_flight))

    def begin_rollback(self) -> Receiver:
        """Begin the rollback of a transaction that has received all messages; this turn does a part. Return its consumer."""
        consumer = self.consumer()
        self.settle()
        transaction = self.engine.begin(b"1")
        for message in consumer.messages:
            self.engine.acknowledge_in(transaction, consumer.consumer, message)
        self.engine.rollback(transaction)
        assert self.queue.ready.count < MANY
        return consumer

    def loaded_from_snapshot(self) -> list[int]:
        """Return the positions of the messages of a broker that starts from the snapshot."""
        (data,) = self.broker.snapshots.values()
        queue = self.broker.replay(data).engine.addresses.anycast["q"]
        return [message.position for message in queue.ready]

    def settle(self) -> int:
        """Run turns until nothing is left to do. Return their number."""
        turns = 0
        while self.broker.in_flight or self.engine.pending:
            self.turn()
            turns += 1
        return turns


def in_order(receiver: Receiver) -> bool:
    positions = [message.position for message in receiver.messages]
    return positions == sorted(positions)


def test_selector_search_takes_many_turns_and_other_queues_are_served_in_each_turn() -> None:
    run = Turns()
    seen: list[BrokerMessage] = []
    selective, other = run.consumer(selector=RED), run.consumer(queue="other")
    view = run.queue.ready.views[RED]
    matches = view.matches
    view.matches = lambda message, allowance: seen.append(message) or matches(message, allowance)
    for number in range(5):
        run.send(number, "other")
        for _ in range(4):  # stored, reserved, stored, delivered
            before = len(seen)
            run.turn()
            assert 0 < len(seen) - before <= 2 * STEPS // EVALUATION_STEPS + 2
        assert len(other.received) == number + 1
    assert 0 < len(seen) < MANY
    run.send(MANY, properties={"colour": "red"})
    run.settle()
    assert len(selective.received) == 1
    assert len(seen) == MANY + 1


def test_consumer_without_selector_is_served_during_selector_search_of_other_consumer() -> None:
    run = Turns()
    selective, plain = run.consumer(selector=RED), run.consumer(credit=5)
    run.turn()
    run.turn()
    run.turn()
    assert (len(selective.received), len(plain.received)) == (0, 5)


def test_a_search_finds_new_and_returned_messages_once_and_in_order() -> None:
    run = Turns()
    plain = run.consumer(credit=3)
    run.send(MANY, properties={"colour": "red"}, priority=4)
    run.settle()
    selective = run.consumer(selector=RED)
    run.turn()
    run.send(MANY + 1, properties={"colour": "red"}, priority=9)
    run.send(MANY + 2, properties={"colour": "red"}, priority=0)
    run.turn()
    run.engine.detach(plain.consumer)
    run.settle()
    assert [message.priority for message in selective.messages] == [9, 4, 0]
    assert run.queue.waiting_count == MANY


def test_a_consumer_with_much_credit_gets_messages_in_each_turn_and_in_order() -> None:
    run = Turns()
    consumer, given = run.consumer(), [0]
    while len(consumer.received) < MANY:
        run.turn()
        given.append(len(consumer.received))
    assert max(after - before for before, after in pairwise(given)) <= 2 * STEPS // delivery.DELIVERY_STEPS + 2
    assert in_order(consumer)


@pytest.mark.parametrize("failed", [True, False])
def test_a_large_prefetch_returns_in_many_turns_and_no_message_overtakes_it(failed: bool) -> None:
    run = Turns()
    first, second = run.consumer(MANY // 2), run.consumer(0)
    run.settle()
    assert len(first.received) == MANY // 2
    run.engine.detach(first.consumer, failed=failed)
    run.broker.give(second, MANY)
    assert run.settle() > 2
    assert len(second.received) == MANY
    assert in_order(second)


def test_error_while_a_large_prefetch_returns_does_not_block_its_queue() -> None:
    run = Turns()
    run.queue.settings = dataclasses.replace(run.queue.settings, redelivery_delay_ms=1_000)
    first, second = run.consumer(MANY // 2), run.consumer(0)
    run.settle()
    faults = Faults()
    run.engine.schedule.on_earlier = lambda: faults.at("timer")  # of the next try
    faults.arm(1)
    with pytest.raises(InjectedFault):
        run.engine.detach(first.consumer, failed=True)
    run.broker.give(second, MANY)
    run.settle()
    assert len(second.received) == MANY // 2
    assert in_order(second)


def test_error_in_a_sweep_for_expired_messages_does_not_stop_later_sweeps() -> None:
    now_ms, expired, faults = 1_000, list[BrokerMessage](), Faults()

    def expire(_: BrokerQueue, message: BrokerMessage) -> None:
        expired.append(message)
        faults.at("expire")

    schedule = Schedule()
    turns = broker_turns.Turns(when_stored=lambda action, work: action(work))
    expiry = Expiry(turns, schedule, lambda: now_ms, expire)
    queue = BrokerQueue(1, "q", "q", Routing.ANYCAST, AddressPolicy(), durable=False)
    messages = [BrokerMessage(b"", 4, 2_000, None) for _ in range(3)]
    for position, message in enumerate(messages):
        message.position = position
        queue.add(message)
    expiry.watch(queue, 2_000)
    faults.arm(1)
    now_ms = 2_000
    with pytest.raises(InjectedFault):
        schedule.run(now_ms, 10, turns)
    assert expired == messages[:1]
    now_ms += SWEEP_MS
    schedule.run(now_ms, 10, turns)
    assert expired == messages


@pytest.mark.parametrize("failed", [True, False])
def test_a_snapshot_contains_the_messages_of_a_prefetch_that_is_returning(failed: bool) -> None:
    run = Turns()
    consumer = run.consumer(MANY // 2)
    run.settle()
    run.engine.detach(consumer.consumer, failed=failed)
    assert run.queue.ready.count < MANY
    run.broker.take_snapshot()
    run.settle()
    assert len(run.loaded_from_snapshot()) == MANY


def test_a_snapshot_contains_the_messages_of_a_transaction_that_is_being_rolled_back() -> None:
    run = Turns()
    run.begin_rollback()
    run.broker.take_snapshot()
    run.settle()
    assert len(run.loaded_from_snapshot()) == MANY


def test_a_snapshot_waits_until_a_record_is_completely_carried_out() -> None:
    run = Turns(0)
    run.engine.turns.begin_turn()
    for number in range(MANY):
        run.send(number)
    run.engine.journaling.flush()
    for number in range(MANY, 2 * MANY):
        run.send(number)
    run.engine.journaling.flush()
    run.broker.confirm(2)
    assert 0 < run.queue.held_messages < MANY
    confirmed = run.engine.journaling.confirmed_sequence
    run.broker.take_snapshot()
    assert not run.broker.snapshots
    run.settle()
    assert list(run.broker.snapshots) == [f"0-{confirmed + 1}"]  # made before all work is done: under load that moment may never come
    assert len(run.loaded_from_snapshot()) == 2 * MANY


def test_large_transaction_rolls_back_over_many_turns_in_order() -> None:
    run = Turns()
    consumer = run.begin_rollback()
    consumer.received.clear()
    run.broker.give(consumer, MANY)
    assert run.settle() > 2
    assert len(consumer.received) == MANY
    assert in_order(consumer)


def test_messages_of_another_consumers_groups_are_set_aside_and_returned_in_many_turns() -> None:
    run = Turns(group="g")
    holder, other = run.consumer(1), run.consumer(0)
    run.settle()
    assert len(holder.received) == 1
    run.broker.give(other, 10)
    assert run.settle() > 2
    assert run.queue.groups is not None
    assert (run.queue.groups.count, len(other.received)) == (MANY - 1, 0)
    run.engine.acknowledge(holder.consumer, holder.messages[0])
    run.engine.detach(holder.consumer)
    run.broker.give(other, MANY)
    assert run.settle() > 2
    assert (run.queue.groups.count, len(other.received)) == (0, MANY - 1)
    assert in_order(other)


def test_a_deep_queue_is_deleted_by_one_entry_and_released_in_many_turns() -> None:
    run = Turns()
    records = len(run.broker.log.records)
    run.engine.delete_queue(run.queue)
    assert "q" not in run.engine.addresses.anycast
    assert run.engine.bodies.memory_bytes > 0
    run.settle()
    assert run.engine.bodies.memory_bytes == 0
    assert len(run.broker.log.records) == records + 1


def test_consumers_of_a_deleted_queue_are_ended_in_many_turns() -> None:
    run = Turns(0)
    consumers = [run.consumer(credit=0) for _ in range(200)]
    run.settle()
    run.engine.turns.begin_turn()
    run.engine.delete_queue(run.queue)
    assert 0 < sum(consumer.end is not None for consumer in consumers) < 200
    assert run.settle() > 2
    assert all(isinstance(consumer.end, QueueDeleted) for consumer in consumers)


def test_senders_that_wait_for_room_are_resumed_in_many_turns_and_in_order() -> None:
    run = Turns(0)
    run.queue.settings = dataclasses.replace(run.queue.settings, max_messages=1)
    run.send(1)
    run.turn()
    resumed: list[int] = []
    for number in range(500):
        run.engine.when_room("q", Routing.ANYCAST, number, partial(resumed.append, number))
    consumer = run.consumer()
    run.settle()
    run.engine.turns.begin_turn()
    run.engine.acknowledge(consumer.consumer, consumer.messages[0])
    assert 0 < len(resumed) < 500
    assert run.settle() > 2
    assert resumed == list(range(500))


def full_topic(subscriptions: int, senders: int) -> tuple[Turns, list[Receiver], list[int]]:
    """Return a topic whose subscriptions are all full, a consumer of each, and the senders that got credit; the others wait."""
    run, resumed = Turns(0), list[int]()
    queues = [run.engine.create_queue(f"s{number}", "t", Routing.MULTICAST) for number in range(subscriptions)]
    for queue in queues:
        queue.settings = dataclasses.replace(queue.settings, max_messages=1)
    consumers = [run.broker.attach(queue, 1) for queue in queues]
    run.broker.send("t", message_bytes(0), run.sender, 0, routing=Routing.MULTICAST)
    run.settle()

    def ask(number: int) -> None:
        if run.engine.share_of_room("t", Routing.MULTICAST, 1):
            resumed.append(number)
        else:
            run.engine.when_room("t", Routing.MULTICAST, number, partial(ask, number))

    for number in range(senders):
        run.engine.attach_producer("t", Routing.MULTICAST)
        ask(number)
    assert not resumed
    return run, consumers, resumed


def test_senders_to_many_full_subscriptions_are_registered_at_one_and_look_for_room_over_many_turns() -> None:
    run, consumers, resumed = full_topic(subscriptions=400, senders=100)
    queues = [receiver.consumer.queue for receiver in consumers]
    assert sum(len(queue.blocked) for queue in queues) == 1
    run.engine.turns.begin_turn()
    run.engine.acknowledge(consumers[-1].consumer, consumers[-1].messages[0])
    assert run.engine.turns.left == run.engine.turns.steps, "nobody waits for the last subscription"
    for receiver in consumers[:-1]:
        assert not resumed
        run.engine.turns.begin_turn()
        run.engine.acknowledge(receiver.consumer, receiver.messages[0])
    assert 0 < len(resumed) < 20, "each sender looks for room in 400 subscriptions"
    assert run.settle() > 5
    assert resumed == list(range(100))


def test_many_delayed_messages_become_due_in_many_turns_and_in_order() -> None:
    run = Turns(delivery_time_ms=5_000)
    consumer = run.consumer()
    run.now_ms = 5_000
    run.engine.tick()
    assert run.queue.ready.count == delivery.DUE_MAX
    assert run.engine.schedule.next_ms == 5_000
    while len(run.queue.delayed):
        run.engine.tick()
        run.turn()
    run.settle()
    assert len(consumer.received) == MANY
    assert in_order(consumer)


def test_delayed_messages_of_many_subscriptions_become_due_in_many_turns_and_in_order() -> None:
    run = Turns(0)
    subscriptions = [run.engine.create_queue(f"s{number}", "t", Routing.MULTICAST, durable=False) for number in range(200)]
    for number in range(20):
        body = message_bytes(number, durable=False, delivery_time_ms=5_000)
        run.broker.send("t", body, run.sender, number, routing=Routing.MULTICAST)
    run.settle()
    run.now_ms, run.engine.turns.left = 5_000, 0
    run.engine.tick()
    assert 0 < subscriptions[0].ready.count < 20
    while subscriptions[0].delayed.count:
        run.engine.tick()
        run.turn()
    for subscription in subscriptions:
        positions = [message.position for message in subscription.ready]
        assert len(positions) == 20
        assert positions == sorted(positions)


def test_failed_messages_return_in_many_turns_after_their_delay() -> None:
    run = Turns()
    run.queue.settings = dataclasses.replace(run.queue.settings, redelivery_delay_ms=1_000)
    consumer = run.consumer()
    run.settle()
    run.engine.detach(consumer.consumer, failed=True)
    run.settle()
    assert run.queue.delayed.count == MANY
    run.now_ms, run.engine.turns.left = 5_000, 0
    counts = list[int]()
    while run.queue.ready.count < MANY:
        run.engine.tick()
        run.turn()
        counts.append(run.queue.ready.count)
    assert 0 < counts[0] < MANY
    assert not run.queue.delayed.count


def test_actions_of_a_stored_record_run_in_order_over_several_turns() -> None:
    run = Turns(0)
    run.engine.turns.begin_turn()
    done: list[int] = []
    for number in range(MANY):
        run.engine.journaling.add(b"")
        run.engine.journaling.then(done.append, number)
    run.broker.flush()
    sequence = run.engine.journaling.confirmed_sequence
    run.broker.confirm(1)
    assert 0 < len(done) < MANY
    assert run.engine.journaling.confirmed_sequence == sequence  # only confirmed when all is done: a snapshot would lack the messages
    run.settle()
    assert done == list(range(MANY))
    assert run.engine.journaling.confirmed_sequence == sequence + 1


def test_looks_at_many_queues_that_deliver_nothing_take_many_turns() -> None:
    run = Turns(count=0)
    queues = [run.engine.queue(f"q{number}") for number in range(MANY)]
    run.broker.settle()
    run.engine.turns.begin_turn()
    for queue in queues:
        run.engine.wake(queue)
    run.engine.dispatch()
    turns = 1
    while run.engine.pending:
        run.engine.go_on()
        turns += 1
    assert turns >= MANY * delivery.QUEUE_STEPS // STEPS
    assert delivery.QUEUE_STEPS > 2  # an empty queue takes several microseconds


def test_consumers_that_wait_for_the_end_of_a_dispatch_are_told_in_turns() -> None:
    bench = Bench(Policy(), turn_steps=1_000)
    receivers = [Receiver(0) for _ in range(2_000)]
    queue = bench.queue()
    bench.broker.settle()
    for receiver in receivers:
        receiver.consumer = bench.engine.attach(queue, receiver)
        bench.engine.wake(queue, receiver.consumer)
    told, turns = 0, 0
    while bench.engine.pending:
        bench.broker.flush()
        told, before = sum(receiver.drains_answered for receiver in receivers), told
        assert told - before < 700
        turns += 1
        assert turns < 1_000
    assert all(receiver.drains_answered == 1 for receiver in receivers)
