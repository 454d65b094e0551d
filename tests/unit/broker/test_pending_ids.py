"""Duplicate ids of a planned commit count from its decision on, and are added to their windows piece by piece after it is stored."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.broker.errors import RecordTooLarge
from bascule.broker.memory import DUPLICATE_BYTES, MemoryPart, measuring
from bascule.broker.policy import AddressPolicy, Policy
from bascule.testing.broker import BrokerInMemory
from tests.support.costs import calls_of
from tests.unit.broker.conftest import Bench

MANY = 2_000
ADDRESSES = 500
STEPS = 200


@pytest.fixture
def bench() -> Bench:
    return Bench(Policy(AddressPolicy(auto_delete=False)))


def options(number: int) -> dict[str, Any]:
    return {"to": f"t.{number % ADDRESSES}", "properties": {"_AMQ_DUPL_ID": str(number)}}


def planned(bench: Bench, first: int = 0, count: int = MANY) -> Any:
    """Return a transaction with messages to many topics, whose plan is ready."""
    transaction = bench.engine.begin(str(first).encode())
    for number in range(first, first + count):
        bench.put(number, transaction=transaction, **options(number))
    bench.broker.settle()
    bench.engine.turns.steps = STEPS
    while not bench.engine.plan_commit(transaction):
        bench.engine.go_on()
    bench.engine.turns.begin_turn()
    return transaction


def commit(bench: Bench, transaction: Any) -> list[Any]:
    answers: list[Any] = []
    bench.engine.commit(transaction, answers.append)
    return answers


def remembered(broker: BrokerInMemory) -> int:
    return sum(len(window.digests) for window in broker.engine.windows.by_address.values())


def repeat(bench: Bench) -> int:
    """Send all messages again, and return the number of those that were duplicates."""
    before = bench.engine.counters.duplicates
    for number in range(MANY):
        bench.put(number, **options(number))
    return bench.engine.counters.duplicates - before


def test_the_turn_of_a_commit_adds_no_id_to_a_window_and_the_following_turns_add_a_few_at_a_time(bench: Bench) -> None:
    bench.subscription("all", "t.#")
    answers = commit(bench, planned(bench))
    assert remembered(bench.broker) == 0
    bench.engine.journaling.flush()
    bench.broker.confirm(1)
    added, turns = remembered(bench.broker), 0
    assert 0 < added <= 400
    while bench.engine.pending:
        bench.engine.go_on()
        turns += 1
        assert remembered(bench.broker) - added <= 400
        added = remembered(bench.broker)
    assert added == MANY
    assert turns > 4
    assert answers == [None]
    assert bench.engine.windows.pending == []


def test_a_message_that_repeats_one_of_a_decided_commit_is_a_duplicate_at_any_time(bench: Bench) -> None:
    everything = bench.subscription("all", "t.#")
    commit(bench, planned(bench))
    assert repeat(bench) == MANY
    bench.engine.journaling.flush()
    bench.broker.confirm(1)
    assert 0 < remembered(bench.broker) < MANY
    assert repeat(bench) == MANY
    bench.broker.settle()
    assert repeat(bench) == MANY
    bench.broker.settle()
    assert everything.held_messages == MANY


def test_a_second_commit_of_the_same_ids_takes_none_of_its_messages(bench: Bench) -> None:
    everything = bench.subscription("all", "t.#")
    first, second = planned(bench), bench.engine.begin(b"second")
    for number in range(MANY):
        bench.put(number, transaction=second, **options(number))
    while not bench.engine.plan_commit(second):
        bench.engine.go_on()
    commit(bench, first)
    while not bench.engine.plan_commit(second):
        bench.engine.go_on()
    commit(bench, second)
    bench.broker.settle()
    assert bench.engine.counters.duplicates == MANY
    assert everything.held_messages == MANY


@pytest.mark.parametrize("turns", [0, 1, 3])
def test_a_snapshot_taken_while_ids_are_pending_knows_all_ids_of_its_records(bench: Bench, turns: int) -> None:
    bench.subscription("all", "t.#")
    commit(bench, planned(bench))
    bench.engine.journaling.flush()
    if turns:
        bench.broker.confirm(1)
    for _ in range(turns - 1):
        bench.engine.go_on()
    bench.broker.take_snapshot()
    bench.broker.settle()
    (data,) = bench.broker.snapshots.values()
    loaded = bench.broker.replay(data).engine
    assert sum(len(window.digests) for window in loaded.windows.by_address.values()) == MANY


def test_a_commit_that_fails_in_its_turn_leaves_no_pending_id(bench: Bench) -> None:
    bench.subscription("all", "t.#")
    transaction = planned(bench)
    bench.engine.journaling.record_bytes_max = 1_000
    (error,) = commit(bench, transaction)
    assert isinstance(error.cause, RecordTooLarge)
    assert bench.engine.windows.pending == []
    bench.engine.journaling.record_bytes_max = 1 << 26
    bench.broker.settle()
    assert repeat(bench) == 0


def test_pending_ids_count_as_memory_of_duplicate_windows(bench: Bench) -> None:
    commit(bench, planned(bench))
    parts: dict[MemoryPart, int] = {}
    for _ in measuring(bench.engine, parts):
        pass
    assert remembered(bench.broker) == 0
    assert parts[MemoryPart.DUPLICATES] == MANY * DUPLICATE_BYTES


@pytest.mark.interpreted
def test_a_plan_is_compared_once_with_the_ids_of_each_earlier_commit(bench: Bench) -> None:
    bench.subscription("all", "t.#")
    earlier = [planned(bench, 10_000 + 1_000 * number, 600) for number in range(10)]
    last = planned(bench)
    commit(bench, earlier[0])
    with_one = calls_of(lambda: bench.engine.plan_commit(last))
    for transaction in earlier[1:]:
        commit(bench, transaction)
    assert len(bench.engine.windows.pending) == len(earlier)
    with_many = calls_of(lambda: bench.engine.plan_commit(last))
    assert with_many < with_one + MANY
    assert commit(bench, last) == []
    bench.broker.settle()
    assert bench.engine.counters.duplicates == 0
