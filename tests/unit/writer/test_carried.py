"""Counts of what pipelines have carried: their stored form, and that no change of positions loses or doubles them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.writer.carried import BOUNDS_S, NOTHING_CARRIED, CarriedCounts, PipelineCount, summed
from bascule.writer.position import Position, with_counts_kept

SOME = CarriedCounts(
    {"orders": PipelineCount(3, 300, 1)},
    NOTHING_CARRIED.transactions.with_these((0.02, 4.0)),
    NOTHING_CARRIED.batches.with_these((0.5,)),
    NOTHING_CARRIED.latencies.with_these((0.1, 9_999.0)),
)
AT = Position("journal", "id", 0, 7, members=("orders",))
NAMES = ("a", "b", "c")


def test_counts_are_read_as_they_were_stored() -> None:
    assert CarriedCounts.decode(SOME.encode()) == SOME
    assert CarriedCounts.decode(NOTHING_CARRIED.encode()) == NOTHING_CARRIED
    assert Position.decode(AT.encode(), SOME.encode()).carried == SOME


@pytest.mark.parametrize("value", [
    None, b"", b"no JSON", b"[]", b"{}", b'{"pipelines":[1]}', b'{"pipelines":{"orders":[1,2]}}"', b'{"pipelines":{"orders":[-1,2,3]}}',
    b'{"pipelines":{"orders":[1,2,3,4]}}', b'{"pipelines":{"orders":[true,2,3]}}', b'{"pipelines":{},"batches":5}',
    b'{"pipelines":{},"batches":[[],"x"]}', b"\xff", b"[" * 100_000,
])  # fmt: skip
def test_missing_or_damaged_counts_begin_at_zero_and_do_not_harm_the_position(value: bytes | None) -> None:
    assert CarriedCounts.decode(value).pipelines == {}
    assert Position.decode(AT.encode(), value) == AT


def test_histogram_with_other_bounds_begins_at_zero() -> None:
    said = json.loads(SOME.encode())
    said["batches"] = [[1, 2, 3], 4.5]
    assert CarriedCounts.decode(json.dumps(said).encode()) == replace(SOME, batches=NOTHING_CARRIED.batches)


def test_positions_with_different_counts_are_equal_and_store_the_same_value() -> None:
    counted = replace(AT, carried=SOME)
    assert counted == AT
    assert counted.encode() == AT.encode()


def test_position_that_ends_leaves_counts_of_pipelines_and_no_durations() -> None:
    kept = CarriedCounts({"orders": PipelineCount(1, 1, 1)}).with_pipelines_of(SOME)
    assert kept.pipelines == {"orders": PipelineCount(4, 301, 2)}
    assert kept.transactions == NOTHING_CARRIED.transactions
    assert len(kept.transactions.counts) == len(BOUNDS_S) + 1


KEYS = ("common", "group", "own")
COUNTS = st.builds(PipelineCount, *[st.integers(0, 100)] * 3)
POSITIONS = st.builds(
    lambda offset, counts: Position("journal", "id", 0, offset, carried=CarriedCounts(counts)),
    st.integers(0, 9), st.dictionaries(st.sampled_from(NAMES), COUNTS),
)  # fmt: skip


@given(
    before=st.dictionaries(st.sampled_from(KEYS), POSITIONS),
    heir=POSITIONS,
    others=st.dictionaries(st.sampled_from(KEYS[1:]), st.none() | POSITIONS),
)
def test_new_positions_keep_the_counts_of_the_stored_ones(
    before: dict[str, Position], heir: Position, others: dict[str, Position | None]
) -> None:
    written = with_counts_kept(before, {"common": heir, **others}, "common", ("a", "b"))
    after = {**before, **written}
    assert {key: position for key, position in written.items() if position is not None} == {"common": heir} | {
        key: position for key, position in others.items() if position is not None
    }
    for name in ("a", "b"):
        assert total(name, after) == total(name, before)
    assert all("c" not in position.carried.pipelines for position in written.values() if position is not None)


def total(name: str, positions: dict[str, Position | None] | dict[str, Position]) -> PipelineCount:
    counts: dict[str, PipelineCount] = {}
    for position in positions.values():
        if position is not None:
            counts = summed(counts, position.carried.pipelines)
    return counts.get(name, PipelineCount())


def test_histograms_of_earlier_versions_continue_in_more_buckets() -> None:
    counts = [0] * 14 + [3, 2]  # up to an hour, and longer
    stored = json.dumps({"pipelines": {}, "latencies": [counts, 9_000.0]}).encode()
    found = CarriedCounts.decode(stored).latencies
    assert (sum(found.counts), found.counts[14], found.counts[-1], found.sum_s) == (5, 3, 2, 9_000.0)
    assert CarriedCounts.decode(CarriedCounts(latencies=found).encode()).latencies == found
