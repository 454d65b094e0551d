"""Ranges of unsettled deliveries, popped whole or in pieces."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bascule.amqp.events import Delivery
from bascule.amqp.unsettled import UINT_MAX, SentDeliveries, Unsettled
from tests.support.costs import calls_of
from tests.unit.amqp.pair import Pair

IDS = st.sets(st.one_of(st.integers(0, 30), st.integers(UINT_MAX - 30, UINT_MAX)))
BOUND = st.one_of(st.integers(0, 30), st.integers(UINT_MAX - 30, UINT_MAX))


def unsettled_of(ids: set[int], settled: set[int]) -> Unsettled[int]:
    unsettled = Unsettled[int]()
    for delivery_id in sorted(ids):
        unsettled.add(delivery_id, delivery_id)
    for delivery_id in settled:
        unsettled.pop(delivery_id)
    return unsettled


@given(IDS, IDS, BOUND, BOUND, st.integers(1, 5))
def test_range_popped_in_pieces_equals_the_range_popped_whole(ids: set[int], settled: set[int], first: int, last: int, most: int) -> None:
    whole, pieces = unsettled_of(ids, settled), unsettled_of(ids, settled)
    found = []
    while piece := pieces.pop_range(first, last, most):
        assert len(piece) <= most
        found += piece
        if len(piece) < most:
            break
    assert found == whole.pop_range(first, last)
    assert pieces.by_id == whole.by_id


def test_range_of_deliveries_that_were_settled_one_by_one_moves_the_later_ids_once() -> None:
    class CountedIds(list[int]):
        deletions = 0

        def __delitem__(self, place: Any) -> None:
            CountedIds.deletions += 1
            super().__delitem__(place)

    unsettled = unsettled_of(set(range(20_000)), set(range(10_000)))
    unsettled.ids = CountedIds(unsettled.ids)
    assert unsettled.pop_range(0, 9_999, 20) == []
    assert CountedIds.deletions == 1
    assert unsettled.pop_range(0, 10_004, 20) == [(number, number) for number in range(10_000, 10_005)]


def test_end_of_the_only_link_with_deliveries_costs_the_same_for_any_number() -> None:
    pair = Pair()
    (link, _), (other, _) = pair.producer(), pair.producer()
    sent = SentDeliveries()
    for number in range(1_000):
        sent.add(Delivery(link, number, number))
    sent.decide(0, 9)
    found: list[Delivery] = []
    assert calls_of(lambda: found.extend(sent.pop_link(link))) < 100
    assert sorted(delivery.delivery_id for delivery in found) == list(range(1_000))
    assert (len(sent), sent.by_id(), link.held) == (0, {}, set())
    sent.add(Delivery(link, 1_000, 0))
    sent.add(Delivery(other, 1_001, 0))
    assert [delivery.delivery_id for delivery in sent.pop_link(other)] == [1_001]
    assert list(sent.by_id()) == [1_000]
