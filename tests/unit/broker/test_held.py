"""The messages that a queue holds, in any order of arrival: a load first adds the messages that prepared branches have received."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.broker import branches
from bascule.broker import held as held_module
from bascule.broker.held import BLOCK_MESSAGES, Held
from bascule.broker.message import BrokerMessage
from bascule.journal.branches import Ending
from tests.unit.broker.branch_work import XID
from tests.unit.broker.conftest import Bench

MANY = BLOCK_MESSAGES + 100
NEWEST = MANY - 1


def message(mid: int) -> BrokerMessage:
    made = BrokerMessage(b"")
    made.mid = mid
    return made


def walked(held: Held) -> list[int]:
    """Return the messages that a walk meets, from one piece to the next."""
    mids: list[int] = []
    while found := held.after(mids[-1] if mids else -1):
        mids += [each.mid for each in found]
    return mids


def copied(held: Held, low: int, high: int) -> list[int]:
    """Return the mids that a snapshot copies, from one piece to the next."""
    mids: list[int] = []
    while found := held.mids_between(mids[-1] if mids else low, high):
        mids += found
    return mids


@given(st.lists(st.integers(0, 30)))
def test_walk_and_search_find_each_message_while_others_arrive_and_leave(mids: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_module, "BLOCK_MESSAGES", 2)
        held = Held()
        there: dict[int, BrokerMessage] = {}
        for mid in mids:
            if mid in there:
                assert held.remove(mid) is there.pop(mid)
                assert held.remove(mid) is None
            else:
                there[mid] = message(mid)
                held.add(there[mid])
            assert walked(held) == sorted(there)
            for low, high in ((-1, 30), (3, 20)):
                assert copied(held, low, high) == [each for each in sorted(there) if low < each <= high]
            assert {each: held.get(each) for each in range(31) if held.get(each)} == there
            assert len(held) == len(there)


@pytest.mark.parametrize("step", [1, -1])
def test_walk_takes_short_pieces_when_messages_are_added_below_newest(step: int) -> None:
    held, last = Held(), 10 * BLOCK_MESSAGES
    held.add(message(last))
    for mid in range(last)[::step]:
        held.add(message(mid))
    assert walked(held) == list(range(last + 1))
    place, longest = -1, 0
    while found := held.after(place):
        place, longest = found[-1].mid, max(longest, len(found))
    assert longest <= 2 * BLOCK_MESSAGES


def test_message_of_a_deep_queue_takes_few_bytes() -> None:
    count = 50 * BLOCK_MESSAGES
    messages = [message(mid) for mid in range(count)]
    tracemalloc.start()
    try:
        held = Held()
        for each in messages:
            held.add(each)
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(held) == count
    assert used < 25 * count


def test_block_with_many_empty_places_is_made_short_and_not_divided() -> None:
    held = Held()
    held.add(message(10 * BLOCK_MESSAGES))
    for mid in range(9 * BLOCK_MESSAGES):
        held.add(message(mid))
        if mid >= 3:
            held.remove(mid)
    assert walked(held) == [0, 1, 2, 10 * BLOCK_MESSAGES]
    assert [len(block.messages) <= 2 * BLOCK_MESSAGES for block in held._blocks] == [True]


def received_by_a_branch(bench: Bench) -> None:
    """Return a broker that was killed after a branch had received the newest message of a deep queue."""
    bench.fill(*range(MANY))
    consumer = bench.consumer(credit=MANY)
    transaction = bench.engine.begin(b"1")
    bench.engine.acknowledge_in(transaction, consumer.consumer, consumer.messages[NEWEST])
    branches.prepare(bench.engine, transaction, XID, "client", lambda _: None)
    bench.broker.settle()
    bench.crash()


def start_from_a_snapshot(bench: Bench) -> None:
    bench.broker.take_snapshot()
    bench.broker.settle()
    bench.crash()


def test_snapshot_after_a_load_with_a_branch_has_all_other_messages(bench: Bench) -> None:
    received_by_a_branch(bench)
    start_from_a_snapshot(bench)
    assert bench.waiting(bench.queue()) == list(range(NEWEST))
    branches.end(bench.engine, XID, Ending.ROLLED_BACK, lambda: None)
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == list(range(MANY))


def test_messages_received_by_a_committed_branch_stay_removed(bench: Bench) -> None:
    received_by_a_branch(bench)
    branches.end(bench.engine, XID, Ending.COMMITTED, lambda: None)
    consumer = bench.consumer(credit=MANY)
    bench.acknowledge(consumer)
    bench.broker.settle()
    start_from_a_snapshot(bench)
    assert bench.waiting(bench.queue()) == []
