"""Histograms of durations."""

from __future__ import annotations

from bascule.core.durations import Durations, cumulative

BOUNDS_S = (0.1, 1.0)


def test_duration_at_a_bound_counts_below_it_and_a_longer_one_in_the_last_bucket() -> None:
    found = Durations.none(BOUNDS_S).with_these((0.1, 0.2, 1.0, 5.0))
    assert found.counts == (1, 2, 1)
    assert found.sum_s == 6.3
    assert found.buckets == cumulative(BOUNDS_S, (1, 2, 1)) == [("0.1", 1), ("1.0", 3), ("+Inf", 4)]


def test_sum_of_two_histograms_has_the_durations_of_both() -> None:
    one, other = Durations.none(BOUNDS_S).with_these((0.5,)), Durations.none(BOUNDS_S).with_these((0.5, 2.0))
    assert one.plus(other) == Durations(BOUNDS_S, (0, 2, 1), 3.0)
