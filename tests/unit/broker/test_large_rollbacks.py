"""The rollback of a transaction with very many received messages runs in short turns."""

from __future__ import annotations

import time

import pytest

from bascule.broker.policy import AddressPolicy, Policy
from bascule.broker.transactions import LocalTransaction
from bascule.broker.turns import TURN_STEPS
from bascule.testing.broker import Receiver
from tests.support.costs import quiet
from tests.support.speed import SLOWNESS
from tests.unit.broker.conftest import Bench

#: As many acknowledgements as one record can hold.
MANY = 1_000_000
TURN_S_MAX = 0.02 * SLOWNESS
SOME = 1_000


@pytest.fixture
def bench() -> Bench:
    return Bench(Policy(AddressPolicy(auto_delete=False)))


def received(bench: Bench, count: int) -> tuple[Receiver, LocalTransaction]:
    bench.fill(*range(count))
    consumer = bench.consumer(credit=count)
    transaction = bench.engine.begin(b"1")
    for message in consumer.messages:
        bench.engine.acknowledge_in(transaction, consumer.consumer, message)
    bench.broker.settle()
    bench.engine.turns.steps = TURN_STEPS
    bench.engine.turns.begin_turn()
    return consumer, transaction


def test_rollback_of_many_acknowledgements_has_short_turns(bench: Bench) -> None:
    _, transaction = received(bench, 1)
    transaction.acks *= MANY  # the first turn reaches only a few of them
    with quiet():
        begun_s = time.thread_time()
        bench.engine.rollback(transaction)
        used_s = time.thread_time() - begun_s
    assert used_s < TURN_S_MAX
    assert bench.engine.pending


def test_rolled_back_messages_of_several_queues_keep_their_order(bench: Bench) -> None:
    bench.fill(*range(SOME), to="q")
    bench.fill(*range(SOME), to="p")
    consumers = [bench.consumer(bench.queue(name), credit=SOME - 1) for name in "qp"]
    transaction = bench.engine.begin(b"1")
    for pair in zip(*(consumer.messages for consumer in consumers), strict=True):
        for consumer, message in zip(consumers, pair, strict=True):
            bench.engine.acknowledge_in(transaction, consumer.consumer, message)
    bench.broker.settle()
    bench.engine.turns.steps = 500
    bench.engine.turns.begin_turn()
    bench.engine.rollback(transaction)
    for consumer in consumers:
        consumer.received.clear()
        bench.broker.give(consumer, SOME)
    bench.broker.settle()
    assert [bench.got(consumer) for consumer in consumers] == [list(range(SOME))] * 2
    assert bench.engine.memory.unsettled == 2 * SOME


def test_queue_deleted_during_a_rollback_releases_its_messages(bench: Bench) -> None:
    _, transaction = received(bench, SOME)
    bench.engine.rollback(transaction)
    assert bench.engine.pending
    bench.engine.delete_queue(bench.queue())
    bench.broker.settle()
    assert bench.engine.memory.entries == 0


def test_many_transactions_of_a_client_are_rolled_back_over_several_turns_and_their_messages_keep_their_order(bench: Bench) -> None:
    count = 500
    for number in range(count):
        bench.put(number)
    bench.broker.settle()
    consumer = bench.consumer(credit=count)
    transactions = []
    for number, message in enumerate(reversed(consumer.messages)):
        transaction = bench.engine.begin(b"%d" % number)
        bench.engine.acknowledge_in(transaction, consumer.consumer, message)
        transactions.append(transaction)
    bench.engine.turns.steps = 500
    bench.engine.turns.begin_turn()
    bench.engine.rollback_all(transactions)
    assert 0 < bench.queue().waiting_count < count
    other = bench.broker.attach(bench.queue(), count)
    turns = 0
    while len(bench.engine.transactions):
        assert other.messages == []
        bench.engine.go_on()
        turns += 1
    assert turns > 3
    bench.broker.settle()
    assert bench.got(other) == list(range(count))
    assert [delivered for _, delivered in other.received] == [1] * count
    assert bench.engine.memory.unsettled == count
    assert bench.engine.counters.rolled_back == count


def test_transactions_that_time_out_together_are_ended_over_turns(bench: Bench) -> None:
    engine = bench.engine
    bench.fill(*range(12))
    consumer = bench.consumer(credit=12)
    transactions = [engine.begin(b"%d" % number) for number in range(10)]
    for transaction, message in zip(transactions, consumer.messages[:10], strict=True):
        engine.acknowledge_in(transaction, consumer.consumer, message)
    engine.turns.steps = 10
    engine.turns.begin_turn()
    bench.now_ms += engine.local_transactions.ms_max
    engine.tick()
    assert transactions[0].doomed is not None
    assert transactions[-1].doomed is None
    committed = transactions[-1]
    engine.commit(committed, lambda _: None)
    late = engine.begin(b"late")
    engine.acknowledge_in(late, consumer.consumer, consumer.messages[10])
    while engine.turns.pending:
        engine.go_on()
    bench.broker.settle()
    assert [transaction.doomed is not None for transaction in transactions] == [True] * 9 + [False]
    assert late.doomed is None
    assert engine.deliveries.counters.acknowledged == 1
    assert bench.queue().held_messages == 11
    bench.now_ms += engine.local_transactions.ms_max
    engine.tick()
    assert late.doomed is not None
