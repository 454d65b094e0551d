from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bascule.journal.sizes import STEP_BYTES, JournalSizes

records = st.lists(st.tuples(st.integers(1, 3), st.integers(0, STEP_BYTES // 2)), min_size=1, max_size=60)


def sizes_of(distances: list[tuple[int, int]]) -> tuple[JournalSizes, dict[int, int]]:
    """Return JournalSizes of records with gaps between their offsets, and the sizes by offset."""
    sizes, plain, offset = JournalSizes(), dict[int, int](), 0
    for distance, size_bytes in distances:
        offset += distance
        sizes.note(offset, size_bytes)
        plain[offset] = size_bytes
    return sizes, plain


@given(records, st.integers(0, 200), st.integers(0, 200))
def test_size_between_two_offsets_is_accurate_to_steps(distances: list[tuple[int, int]], start: int, end: int) -> None:
    sizes, plain = sizes_of(distances)
    first, end = next(iter(plain)), max(start, end)
    known = sum(size for offset, size in plain.items() if max(first, start) <= offset < end)
    assert abs(sizes.between(max(first, start), end) - known) <= 2 * 1.5 * STEP_BYTES


@given(records)
def test_sizes_of_equal_small_records_are_exact(distances: list[tuple[int, int]]) -> None:
    sizes, _ = sizes_of([(1, 1000)] * len(distances))
    assert sizes.between(1, len(distances) + 1) == 1000 * len(distances)
    assert sizes.start_of_last(1000) == len(distances)
    assert sizes.start_of_last(1999) == len(distances)


@given(records, st.integers(0, 40 * STEP_BYTES))
def test_start_of_last_bytes_has_at_most_that_size_after_it(distances: list[tuple[int, int]], size_bytes: int) -> None:
    sizes, _ = sizes_of(distances)
    start = sizes.start_of_last(size_bytes)
    assert sizes.between(start, sizes.end) <= size_bytes


@given(records, st.integers(0, 200))
def test_trimming_leaves_sizes_of_remaining_records_unchanged(distances: list[tuple[int, int]], trimmed: int) -> None:
    sizes, plain = sizes_of(distances)
    trimmed = min(trimmed, max(plain))
    before = {start: sizes.between(start, sizes.end) for start in range(max(trimmed, min(plain)), sizes.end)}
    sizes.forget_before(trimmed)
    assert {start: sizes.between(start, sizes.end) for start in before} == before


def test_repeated_record_counts_once_and_earlier_offsets_have_the_mean_size() -> None:
    sizes, _ = sizes_of([(11, 100), (1, 300)])
    sizes.note(11, 100)
    assert sizes.between(11, 13) == 400
    assert sizes.between(1, 11) == 2000
    assert sizes.start_of_last(1400) == 6
    assert JournalSizes().between(0, 5) == 0


def test_notes_of_sizes_are_a_step_apart() -> None:
    sizes, _ = sizes_of([(1, 1000)] * 20_000)
    assert len(sizes.offsets) <= 2 + 20_000 * 1000 // STEP_BYTES


def test_size_of_record_larger_than_a_step_is_exact() -> None:
    sizes, _ = sizes_of([*[(1, 1000)] * 10, (1, 30 * STEP_BYTES), *[(1, 1000)] * 10])
    assert sizes.between(11, 12) == 30 * STEP_BYTES
    assert sizes.between(1, 11) == sizes.between(12, 22) == 10_000
