"""Comparisons of lists of mids, which give the same results as sets, in any order of arrival."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from bascule.broker.ascending import SORTED_AT_ONCE, difference, has, in_order, intersection, union

MIDS = st.sets(st.integers(0, 40))


@given(MIDS, MIDS)
def test_ascending_lists_are_compared_as_sets(one: set[int], other: set[int]) -> None:
    left, right = sorted(one), sorted(other)
    assert list(union(left, right)) == sorted(one | other)
    assert list(intersection(left, right)) == sorted(one & other)
    assert list(difference(left, right)) == sorted(one - other)
    assert {mid for mid in range(41) if has(left, mid)} == one


def test_many_message_ids_are_sorted_in_parts() -> None:
    mids = [number * 7919 % (3 * SORTED_AT_ONCE + 1) for number in range(3 * SORTED_AT_ONCE)]
    assert list(in_order(mids)) == sorted(mids)
