"""Histograms of durations."""

from __future__ import annotations

import pytest

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


@pytest.mark.parametrize(
    ("seconds", "share", "wanted"),
    [
        ((), 0.5, None),
        ((0.05,), 0.5, 0.05),
        ((0.05,) * 4, 0.25, 0.025),
        ((0.05, 0.5), 0.5, 0.1),
        ((0.05, 0.5), 0.75, 0.55),
        ((0.5,), 0.99, 0.1 + 0.9 * 0.99),
        ((0.05, 7.0), 0.99, 1.0),
        ((7.0,), 0.5, 1.0),
    ],
)  # fmt: skip
def test_quantile_is_estimated_as_prometheus_does(seconds: tuple[float, ...], share: float, wanted: float | None) -> None:
    assert Durations.none(BOUNDS_S).with_these(seconds).quantile(share) == (wanted if wanted is None else pytest.approx(wanted))


def test_durations_since_an_earlier_state_are_those_that_were_added() -> None:
    earlier = Durations.none(BOUNDS_S).with_these((0.5,))
    added = earlier.with_these((0.05, 2.0)).since(earlier)
    assert added is not None
    assert added.counts == (1, 0, 1)
    assert added.sum_s == pytest.approx(2.05)
    assert Durations.none(BOUNDS_S).with_these((0.05,)).since(earlier) is None, "a histogram that began again"
