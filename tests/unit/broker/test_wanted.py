"""The messages that a load still has to find: by record, in the order of the journal, without a number object for each."""

from __future__ import annotations

import random
import tracemalloc
from array import array

import pytest

from bascule.broker.snapshot import Snapshot, decode, encode
from bascule.broker.wanted import WantedMessages
from bascule.journal.offsets import OffsetMap
from bascule.journal.records import MESSAGES_PER_RECORD_MAX, mid_of


@pytest.mark.parametrize("seed", range(5))
def test_messages_are_found_record_by_record_with_the_queues_that_hold_them(seed: int) -> None:
    random_ = random.Random(seed)
    journal = {mid_of(sequence, index) for sequence in range(1, 20) for index in range(30)}
    queues = {queue: sorted(random_.sample(sorted(journal), random_.randrange(200))) for queue in range(1, 8)}
    stored = sorted(random_.sample(sorted(journal), 40))
    wanted = WantedMessages(stored)
    for queue, mids in queues.items():
        wanted.add(queue, random_.choice((list, lambda mids: array("Q", mids)))(mids))
    expected = {mid: {queue for queue, mids in queues.items() if mid in mids} for mid in journal}
    found = {mid: set(holders) for mid, holders in wanted.stored.items()}
    for sequence in range(1, 20):
        taken = wanted.take(mid_of(sequence, 0), mid_of(sequence, 0) + MESSAGES_PER_RECORD_MAX)
        assert {mid >> 16 for mid in taken} <= {sequence}
        found |= {mid: set(holders) for mid, holders in taken.items()}
    assert found == {mid: holders for mid, holders in expected.items() if holders}
    assert wanted.left() == []


def test_passed_and_unreached_messages_are_left() -> None:
    wanted = WantedMessages()
    wanted.add(1, [5, 70_000, 200_000])
    wanted.add(2, [5, 70_001])
    assert wanted.take(mid_of(1, 0), mid_of(2, 0)) == {70_000: (1,), 70_001: (2,)}
    assert wanted.left() == [5, 200_000]


def test_wanted_messages_of_a_deep_queue_take_little_memory() -> None:
    count = 100_000
    snapshot = Snapshot(1, 2, 3, 2, OffsetMap(), [{"id": 1}], {}, mids=[range(1 << 40, (1 << 40) + count)], counts=[[]])
    data = encode(snapshot).joined()
    tracemalloc.start()
    try:
        wanted = WantedMessages()
        wanted.add(1, decode(data).mids[0])
        used, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used < 10 * count
    assert peak < 30 * count
    assert len(wanted.left()) == count
