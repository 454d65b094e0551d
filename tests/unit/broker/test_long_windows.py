"""Duplicate windows that use more than their share of the memory forget the oldest ids of the longest windows."""

from __future__ import annotations

import pytest

from bascule.broker import duplicates, memory
from bascule.broker.duplicates import DuplicateWindow, DuplicateWindows
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


def measured(bench: Bench, now_s: float = 0.0) -> int:
    """Measure the memory at a time of a monotonic clock. Return the bytes of the windows."""
    found: dict[MemoryPart, int] = {}
    for _ in memory.measuring(bench.engine, found, now_s):
        pass
    bench.engine.memory.measured(found)
    bench.engine.memory.look()
    return found[MemoryPart.DUPLICATES]


def test_the_longest_windows_forget_their_oldest_ids_once_all_take_too_much(bench: Bench) -> None:
    engine = bench.engine
    engine.memory.limit(LIMIT_BYTES)
    long, short = remember(bench, "long", 19_000), remember(bench, "short", 500)
    engine.memory.transactions_bytes += LIMIT_BYTES // 2
    measured(bench, -duplicates.UNUSED_S)
    assert measured(bench) <= memory.WINDOWS_SHARE * LIMIT_BYTES
    windows = engine.windows.by_address
    kept = len(windows["long"].digests)
    assert KEPT <= kept < 3_600
    assert all(each in windows["long"] for each in long[-kept:])
    assert not any(each in windows["long"] for each in long[:-kept])
    assert all(each in windows["short"] for each in short)
    assert engine.counters.duplicate_ids_forgotten == 19_000 - kept


def test_windows_beyond_their_share_forget_nothing_while_there_is_much_memory(bench: Bench) -> None:
    engine = bench.engine
    engine.memory.limit(LIMIT_BYTES)
    remember(bench, "long", 15_000)
    measured(bench)
    assert (len(engine.windows.by_address["long"].digests), engine.counters.duplicate_ids_forgotten) == (15_000, 0)
    engine.memory.transactions_bytes += LIMIT_BYTES // 2
    assert measured(bench, duplicates.UNUSED_S) <= memory.WINDOWS_SHARE * LIMIT_BYTES


def test_ids_of_a_minute_are_kept_while_windows_of_other_addresses_have_older_ones(bench: Bench) -> None:
    engine = bench.engine
    engine.memory.limit(LIMIT_BYTES)
    old = {address: remember(bench, address, KEPT + 900) for address in ("a", "b")}
    measured(bench, 0.0)
    measured(bench, 0.0 + duplicates.UNUSED_S)
    busy = remember(bench, "busy", KEPT + 1_000)
    engine.memory.transactions_bytes += LIMIT_BYTES // 2
    measured(bench, 1.0 + duplicates.UNUSED_S)
    windows = engine.windows.by_address
    assert all(each in windows["busy"] for each in busy)
    assert {len(windows[address].digests) for address in old} == {KEPT}


def test_ids_that_expire_meanwhile_are_not_forgotten_twice(bench: Bench) -> None:
    windows = DuplicateWindows(clock=lambda: 0)
    window = windows.window("a")
    window.add_all([number.to_bytes(16, "big") for number in range(3 * KEPT)], 0)
    window.look(0.0)
    window.look(0.0 + duplicates.UNUSED_S)
    new = [number.to_bytes(16, "little") for number in range(1 << 40, (1 << 40) + KEPT)]
    window.add_all(new, window.period_ms)
    steps = windows.forgetting_old(3 * KEPT, lambda _: None)
    next(steps)
    window.expire(2 * window.period_ms, 3 * KEPT)
    assert sum(1 for _ in steps) == 0
    assert all(each in window for each in new)


def test_windows_alone_do_not_block_producers(bench: Bench) -> None:
    bench.engine.memory.limit(LIMIT_BYTES)
    remember(bench, "long", 18_000)
    remember(bench, "longer", 19_000)
    measured(bench)
    assert bench.engine.memory.blocked == ""


def test_each_window_keeps_the_ids_that_a_producer_may_repeat_after_a_failure(bench: Bench) -> None:
    bench.engine.memory.limit(LIMIT_BYTES // 100)
    ids = {address: remember(bench, address, KEPT + 700) for address in ("a", "b", "c")}
    assert measured(bench) >= 3 * KEPT * DUPLICATE_BYTES
    assert {len(window.digests) for window in bench.engine.windows.by_address.values()} == {KEPT}
    for address, remembered in ids.items():
        window = bench.engine.windows.by_address[address]
        assert window.repeats((remembered[-KEPT],), bench.engine.clock())
        assert remembered[-KEPT - 1] not in window


def test_windows_that_nobody_uses_are_dropped_if_short_ones_take_twice_the_share(bench: Bench) -> None:
    bench.engine.memory.limit(LIMIT_BYTES)
    for number in range(5):
        remember(bench, str(number), KEPT)
        measured(bench, 100.0 + number)
    for number in range(5, 8):
        remember(bench, str(number), KEPT)
    bench.engine.memory.transactions_bytes += LIMIT_BYTES // 2
    measured(bench, 103.5 + duplicates.UNUSED_S)
    assert list(bench.engine.windows.by_address) == ["4", "5", "6", "7"]
    assert measured(bench, 104.5 + duplicates.UNUSED_S) <= 2 * memory.WINDOWS_SHARE * LIMIT_BYTES
    assert list(bench.engine.windows.by_address) == ["5", "6", "7"]
    assert bench.engine.counters.duplicate_ids_forgotten == 5 * KEPT


def test_windows_count_as_unused_only_while_a_broker_serves(bench: Bench) -> None:
    """A producer could not connect during an outage, and wall clocks jump."""
    for number in range(60):
        bench.put(number, properties={"_AMQ_DUPL_ID": f"order-{number}"})
    bench.broker.settle()
    waiting = bench.waiting(bench.queue())
    bench.now_ms += 10 * 60_000
    bench.crash()
    bench.engine.memory.limit(LIMIT_BYTES // 10_000)
    for now_s in (1_000.0, 999.0 + duplicates.UNUSED_S):
        measured(bench, now_s)
        bench.engine.memory.limit(1 << 30)
        bench.put("repeated", properties={"_AMQ_DUPL_ID": "order-0"})
        bench.broker.settle()
        assert bench.waiting(bench.queue()) == waiting
        bench.engine.memory.limit(LIMIT_BYTES // 10_000)
    measured(bench, 1_000.0 + duplicates.UNUSED_S)
    assert "q" not in bench.engine.windows.by_address


def test_windows_in_use_are_kept_whatever_they_take(bench: Bench) -> None:
    bench.engine.memory.limit(LIMIT_BYTES // 100)
    for number in range(8):
        remember(bench, str(number), KEPT)
    measured(bench, 100.0)
    measured(bench, 99.0 + duplicates.UNUSED_S)
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


@pytest.mark.parametrize("snapshot", [False, True])
def test_id_that_was_forgotten_early_and_accepted_again_is_the_newest_one_after_a_restart(bench: Bench, *, snapshot: bool) -> None:
    """The load finds the id twice in the journal. A window that is short again forgets the ids before the second message."""
    for number in range(60):
        bench.put(number, properties={"_AMQ_DUPL_ID": f"order-{number}"})
    bench.broker.settle()
    if snapshot:
        bench.broker.take_snapshot()
        bench.broker.settle()
    bench.engine.windows.by_address["q"].shorten(20)
    bench.put("again", properties={"_AMQ_DUPL_ID": "order-0"})
    bench.broker.settle()
    bench.crash()
    window = bench.engine.windows.by_address["q"]
    while len(window.digests) > 20:
        window.shorten(20)
    waiting = bench.waiting(bench.queue())
    bench.put("repeated", properties={"_AMQ_DUPL_ID": "order-0"})
    bench.put("repeated", properties={"_AMQ_DUPL_ID": "order-59"})
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == waiting
    bench.put("forgotten", properties={"_AMQ_DUPL_ID": "order-1"})
    bench.broker.settle()
    assert bench.waiting(bench.queue()) == [*waiting, "forgotten"]


def test_id_with_several_places_is_forgotten_with_its_last_place() -> None:
    ids = [number.to_bytes(16, "big") for number in range(5)]
    window = DuplicateWindow(count_max=3)
    window.admit_stored(ids[:3], 0)
    window.admit_stored(ids[:1], 1)
    window.admit_stored(ids[:1], 2)
    assert window.digests == set(ids[:3])
    window.admit_stored(ids[3:4], 3)
    assert window.digests == {ids[0], ids[2], ids[3]}
    copy = DuplicateWindow(count_max=3)
    copy.restore(window.remembered())
    for each in (window, copy):
        each.admit_stored(ids[4:], 4)
        assert each.digests == {ids[0], ids[3], ids[4]}
        assert each.shorten(2) == 0, "the first place of the oldest id"
        while len(each.digests) > 1:
            each.shorten(1)
        assert each.digests == {ids[4]}
        assert each.expire(duplicates.WINDOW_MS + 5, 9) == 1
        assert each.digests == set()
        each.admit_stored(ids[:1], duplicates.WINDOW_MS + 6)
        assert each.shorten(0) == 1
        assert each.digests == set()


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
