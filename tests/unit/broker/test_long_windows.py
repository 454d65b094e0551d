"""Duplicate windows that use more than their share of the memory forget the oldest ids of the longest windows."""

from __future__ import annotations

import pytest

from bascule.broker import duplicates, memory
from bascule.broker.duplicates import DuplicateWindows
from bascule.broker.memory import DUPLICATE_BYTES, MemoryPart
from bascule.broker.turns import TURN_STEPS
from tests.unit.broker.conftest import Bench

KEPT = duplicates.KEPT_IDS_MIN
#: Within a limit of this size, the share of the windows holds 4,000 ids.
LIMIT_BYTES = int(4_000 * DUPLICATE_BYTES / memory.WINDOWS_SHARE)


def remember(bench: Bench, address: str, count: int, ago_ms: int = 0) -> list[bytes]:
    """Let the window of an address have this many ids. Return them, oldest first."""
    ids = [number.to_bytes(16, "big") for number in range(count)]
    window = bench.engine.windows.window(address)
    for number, each in enumerate(ids):
        assert window.admit((each,), bench.engine.clock() + number - ago_ms)
    return ids


def measured(bench: Bench) -> int:
    """Measure the memory. Return the bytes of the windows."""
    found: dict[MemoryPart, int] = {}
    for _ in memory.measuring(bench.engine, found):
        pass
    bench.engine.memory.measured(found)
    bench.engine.memory.look()
    return found[MemoryPart.DUPLICATES]


def test_the_longest_windows_forget_their_oldest_ids_once_all_take_too_much(bench: Bench) -> None:
    engine = bench.engine
    engine.memory.limit(LIMIT_BYTES)
    long, short = remember(bench, "long", 9_000), remember(bench, "short", 500)
    assert measured(bench) <= memory.WINDOWS_SHARE * LIMIT_BYTES
    windows = engine.windows.by_address
    kept = len(windows["long"].digests)
    assert KEPT < kept < 3_600
    assert all(each in windows["long"] for each in long[-kept:])
    assert not any(each in windows["long"] for each in long[:-kept])
    assert all(each in windows["short"] for each in short)
    assert engine.counters.duplicate_ids_forgotten == 9_000 - kept


def test_windows_alone_do_not_block_producers(bench: Bench) -> None:
    bench.engine.memory.limit(LIMIT_BYTES)
    remember(bench, "long", 18_000)
    remember(bench, "longer", 19_000)
    measured(bench)
    assert bench.engine.memory.blocked == ""


def test_each_window_keeps_the_ids_that_a_producer_may_repeat_after_a_failure(bench: Bench) -> None:
    bench.engine.memory.limit(LIMIT_BYTES // 100)
    ids = {address: remember(bench, address, KEPT + 700) for address in ("a", "b", "c")}
    measured(bench)
    for address, remembered in ids.items():
        window = bench.engine.windows.by_address[address]
        assert len(window.digests) == KEPT
        assert window.repeats((remembered[-KEPT],), bench.engine.clock())
        assert remembered[-KEPT - 1] not in window


def test_windows_that_nobody_uses_are_dropped_if_short_ones_take_twice_the_share(bench: Bench) -> None:
    bench.engine.memory.limit(LIMIT_BYTES)
    for number in range(5):
        remember(bench, str(number), KEPT, (10 - number) * duplicates.UNUSED_MS)
    for number in range(5, 8):
        remember(bench, str(number), KEPT, duplicates.UNUSED_MS // 2)
    assert measured(bench) <= 2 * memory.WINDOWS_SHARE * LIMIT_BYTES
    assert list(bench.engine.windows.by_address) == ["5", "6", "7"]
    assert bench.engine.counters.duplicate_ids_forgotten == 5 * KEPT


def test_windows_in_use_are_kept_whatever_they_take(bench: Bench) -> None:
    bench.engine.memory.limit(LIMIT_BYTES // 100)
    for number in range(8):
        remember(bench, str(number), KEPT, duplicates.UNUSED_MS // 2)
    measured(bench)
    assert len(bench.engine.windows.by_address) == 8


def test_windows_within_their_share_forget_nothing(bench: Bench) -> None:
    bench.engine.memory.limit(LIMIT_BYTES)
    remember(bench, "long", 3_900)
    measured(bench)
    assert len(bench.engine.windows.by_address["long"].digests) == 3_900
    assert bench.engine.counters.duplicate_ids_forgotten == 0


def test_ids_are_forgotten_in_turns() -> None:
    windows, forgotten = DuplicateWindows(), list[int]()
    for name in range(40):
        windows.window(str(name)).add_all([number.to_bytes(16, "big") for number in range(20_000)], 0)
    steps = list(windows.shortening(700_000, forgotten.append))
    assert sum(forgotten) >= 700_000
    assert max(steps) < TURN_STEPS
    assert {len(window.digests) for window in windows.by_address.values()} == {2_500}


def test_messages_with_duplicate_ids_are_stored_once_after_their_window_was_shortened_and_after_a_restart(bench: Bench) -> None:
    count = 60
    for number in range(count):
        bench.put(number, properties={"_AMQ_DUPL_ID": f"order-{number}"})
    bench.broker.settle()
    bench.engine.windows.by_address["q"].shorten(20)
    before = bench.waiting(bench.queue())
    bench.put("again", properties={"_AMQ_DUPL_ID": f"order-{count - 1}"})
    bench.put("old", properties={"_AMQ_DUPL_ID": "order-0"})
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == [*before, "old"]
    bench.crash()
    assert bench.waiting(bench.queue()) == [*before, "old"]
    bench.put("again", properties={"_AMQ_DUPL_ID": "order-0"})
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == [*before, "old"]


@pytest.mark.parametrize(
    ("lengths", "count", "most"),
    [
        ([10_000, 500], 1, 9_999),
        ([10_000, 9_000], 1_000, 9_000),
        ([10_000, 9_000], 2_000, 8_500),
        ([9_000, 10_000, 3_000], 30_000, KEPT),
        ([500], 100, KEPT),
        ([], 1, KEPT),
    ],
)
def test_windows_are_shortened_to_one_length(lengths: list[int], count: int, most: int) -> None:
    assert duplicates._shortened(lengths, count) == most
