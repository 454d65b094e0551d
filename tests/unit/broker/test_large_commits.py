"""A commit of many messages is one record; its work in memory is divided into short turns."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import pytest

from bascule.broker import administration
from bascule.broker.errors import RecordTooLarge
from bascule.broker.local_transactions import PIECE_PLACES
from bascule.broker.policy import REJECT, AddressPolicy, Policy
from bascule.testing.broker import Receiver, snapshot_of
from tests.unit.broker.conftest import Bench

MANY = 1_000
STEPS = 200


@pytest.fixture
def bench() -> Bench:
    return Bench(Policy(AddressPolicy(auto_delete=False)))


def short_turns(bench: Bench) -> None:
    bench.engine.turns.steps = STEPS
    bench.engine.turns.begin_turn()


def received(bench: Bench) -> Any:
    """Return a transaction that has received many messages; one more message waits."""
    bench.fill(*range(MANY + 1))
    consumer = bench.consumer(credit=MANY)
    transaction = bench.engine.begin(b"1")
    for message in consumer.messages:
        bench.engine.acknowledge_in(transaction, consumer.consumer, message)
    bench.broker.settle()
    short_turns(bench)
    return transaction


def commit(bench: Bench, transaction: Any) -> list[Any]:
    answers: list[Any] = []
    bench.engine.commit(transaction, answers.append)
    return answers


def store_all(bench: Bench) -> None:
    """Store the records in flight, without continuing work in turns."""
    bench.engine.journaling.flush()
    bench.engine.turns.begin_turn()
    bench.broker.confirm(len(bench.broker.in_flight))


def loaded(bench: Bench, taken: Any) -> list[Any]:
    """Return the messages of a broker that starts from a snapshot."""
    bench.broker.announce(taken)
    store_all(bench)
    data = bench.broker.snapshots[taken.id]
    return [bench.content(message) for message in bench.broker.replay(data).engine.addresses.anycast["q"].ready]


def test_many_acknowledgements_are_one_record_and_leave_the_queue_over_several_turns(bench: Bench) -> None:
    transaction = received(bench)
    records = len(bench.values())
    answers = commit(bench, transaction)
    queue, turns = bench.queue(), 0
    assert len(queue.held) > MANY // 2
    store_all(bench)
    assert len(bench.values()) == records + 1
    assert answers == [None]
    while len(queue.held) > 1:
        bench.broker.flush()
        turns += 1
    assert turns > 3
    bench.crash()
    assert bench.waiting(bench.queue()) == [MANY]


@pytest.mark.parametrize("limit", [{"max_messages": 2}, {"max_bytes": 2_000}])
def test_committed_messages_still_leaving_queue_do_not_count_against_limits(bench: Bench, limit: dict[str, int]) -> None:
    transaction = received(bench)
    queue = bench.queue()
    queue.settings = dataclasses.replace(queue.settings, when_full=REJECT, **limit)
    bench.engine.addresses.forget_routes()
    bench.put("refused")
    woken: list[str] = []
    queue.blocked["producer"] = lambda: woken.append("producer")
    commit(bench, transaction)
    assert len(queue.held) > MANY // 2
    assert (queue.held_messages, queue.delivering_count) == (1, 0)
    assert queue.room(10) > 0
    assert woken == ["producer"]
    bench.put("taken")
    assert [token for token, error in bench.sender.answers if error is not None] == ["refused"]
    bench.broker.settle()
    assert (len(queue.held), queue.held_messages) == (2, 2)
    assert queue.held_bytes == sum(message.size_bytes for message in queue.held)
    assert bench.waiting(queue) == [MANY, "taken"]


def test_queue_whose_messages_are_all_committed_may_be_deleted_without_force(bench: Bench) -> None:
    transaction = received(bench)
    queue = bench.queue()
    (consumer,) = queue.consumers
    (last,) = queue.ready
    commit(bench, transaction)
    bench.engine.detach(consumer)
    with pytest.raises(administration.InUse, match="has 1 messages and 0 consumers"):
        administration.delete(bench.engine, queue)
    queue.take_out(last)
    bench.engine.gone(queue, last)
    assert len(queue.held) > MANY // 2
    administration.delete(bench.engine, queue)
    bench.broker.settle()
    assert "q" not in bench.engine.addresses.anycast
    assert bench.engine.memory.entries == 0


def test_auto_created_queue_is_deleted_after_its_committed_messages_have_left() -> None:
    bench = Bench(Policy(AddressPolicy(auto_delete_ms=1_000)))
    transaction = received(bench)
    (consumer,) = bench.queue().consumers
    bench.broker.give(cast(Receiver, consumer.port), 1)
    bench.broker.settle()
    bench.engine.acknowledge_in(transaction, consumer, consumer.unacked[max(consumer.unacked)])
    commit(bench, transaction)
    bench.engine.detach(consumer)
    bench.broker.settle()
    bench.now_ms += 1_000
    bench.engine.tick()
    assert "q" not in bench.engine.addresses.anycast


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("turns", [0, 2, 100])
def test_snapshot_taken_while_committed_messages_leave_contains_none_of_them(bench: Bench, stored: bool, turns: int) -> None:
    commit(bench, received(bench))
    for _ in range(turns):
        bench.engine.go_on()
    if stored:
        store_all(bench)
    taken = snapshot_of(bench.engine, bench.broker.offsets)
    (mids,) = (mids for mids in taken.mids if mids)
    assert len(mids) == len(set(mids)) == (1 if stored else MANY + 1)
    assert list(mids) == sorted(mids)
    assert loaded(bench, taken) == [MANY]


def test_crash_before_commit_record_is_stored_restores_all_messages(bench: Bench) -> None:
    commit(bench, received(bench))
    bench.engine.go_on()
    bench.crash()
    assert bench.waiting(bench.queue()) == list(range(MANY + 1))


def test_queue_may_be_deleted_while_committed_messages_leave_it(bench: Bench) -> None:
    commit(bench, received(bench))
    entries = bench.engine.memory.entries
    assert entries > 1
    bench.engine.delete_queue(bench.queue())
    bench.broker.settle()
    assert bench.engine.memory.entries == 0
    bench.fill("new")
    assert bench.waiting(bench.queue()) == ["new"]


def test_many_sends_reach_their_queue_over_several_turns_in_order(bench: Bench) -> None:
    transaction = bench.engine.begin(b"1")
    for number in range(MANY):
        bench.put(number, transaction=transaction)
    bench.broker.settle()
    records = len(bench.values())
    bench.engine.turns.steps = STEPS
    answers = commit(bench, transaction)
    bench.engine.journaling.flush()
    bench.engine.turns.begin_turn()
    bench.broker.confirm(len(bench.broker.in_flight))
    assert len(bench.values()) == records + 1
    queue = bench.queue()
    assert 0 < queue.ready.count <= MANY // 2
    assert answers == []
    bench.broker.settle()
    assert answers == [None]
    assert bench.waiting(queue) == list(range(MANY))
    bench.crash()
    assert bench.waiting(bench.queue()) == list(range(MANY))


SUBSCRIPTIONS, TO_EACH = 100, 50


def test_messages_of_a_commit_reach_many_queues_over_several_turns_in_order(bench: Bench) -> None:
    queues = [bench.subscription(f"sub-{number}") for number in range(SUBSCRIPTIONS)]
    transaction = bench.engine.begin(b"1")
    for number in range(TO_EACH):
        bench.put(number, to="t", transaction=transaction)
    bench.broker.settle()
    short_turns(bench)
    commit(bench, transaction)
    bench.engine.journaling.flush()
    bench.engine.turns.begin_turn()
    bench.broker.confirm(len(bench.broker.in_flight))
    there, turns = sum(queue.ready.count for queue in queues), 1
    assert 0 < there <= STEPS + PIECE_PLACES
    while there < SUBSCRIPTIONS * TO_EACH:
        bench.engine.go_on()
        before, there = there, sum(queue.ready.count for queue in queues)
        assert there - before <= STEPS + PIECE_PLACES
        turns += 1
    assert turns > SUBSCRIPTIONS * TO_EACH // (STEPS + PIECE_PLACES)
    assert all(bench.waiting(queue) == list(range(TO_EACH)) for queue in queues)


def test_rollback_of_messages_of_many_queues_takes_several_turns_and_keeps_their_order(bench: Bench) -> None:
    queues = [bench.subscription(f"sub-{number}") for number in range(SUBSCRIPTIONS)]
    bench.fill(*range(TO_EACH), to="t")
    transaction = bench.engine.begin(b"1")
    for queue in queues:
        consumer = bench.consumer(queue, credit=TO_EACH)
        for message in consumer.messages:
            bench.engine.acknowledge_in(transaction, consumer.consumer, message)
    bench.broker.settle()
    short_turns(bench)
    bench.engine.rollback(transaction)
    back = sum(queue.ready.count for queue in queues)
    assert 0 < back < STEPS
    takers = [bench.broker.attach(queue, TO_EACH + 1) for queue in queues]
    bench.fill(TO_EACH, to="t")
    assert all(bench.got(taker) == list(range(TO_EACH + 1)) for taker in takers)


def test_commit_that_is_too_large_for_a_record_acknowledges_nothing(bench: Bench) -> None:
    transaction = received(bench)
    bench.engine.turns.steps = 1 << 60
    bench.engine.journaling.record_bytes_max = 2_000
    (error,) = commit(bench, transaction)
    assert isinstance(error.__cause__ or error.cause, RecordTooLarge)
    bench.broker.settle()
    queue = bench.queue()
    assert (queue.held_messages, queue.delivering_count) == (MANY + 1, 0)
    assert bench.engine.journaling.batch.acks == {}
