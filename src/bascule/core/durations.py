"""Histograms of durations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self


def cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, int]]:
    """Return the buckets of a histogram as Prometheus wants them: each upper bound as text, with the number of values up to it.

    ``counts`` has a number for each of ``bounds``, not cumulative, and one for larger values.
    """
    buckets, total = [], 0
    for bound, count in zip((*map(str, bounds), "+Inf"), counts, strict=True):
        total += count
        buckets.append((bound, total))
    return buckets


@dataclass(frozen=True, slots=True)
class Durations:
    """A number of durations. ``counts`` has a number for each of ``bounds_s``, not cumulative, and one for longer durations."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float = 0.0

    @classmethod
    def none(cls, bounds_s: tuple[float, ...]) -> Self:
        """Return no durations."""
        return cls(bounds_s, (0,) * (len(bounds_s) + 1))

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """Return the buckets as Prometheus wants them."""
        return cumulative(self.bounds_s, self.counts)

    def with_these(self, seconds: Iterable[float]) -> Durations:
        """Return these durations and more."""
        counts, sum_s = list(self.counts), self.sum_s
        for each in seconds:
            counts[bisect_left(self.bounds_s, each)] += 1
            sum_s += each
        return Durations(self.bounds_s, tuple(counts), sum_s)

    def since(self, earlier: Durations) -> Durations | None:
        """Return the durations that were added since an earlier state with the same bounds; None if they were not only added."""
        counts = tuple(now - before for now, before in zip(self.counts, earlier.counts, strict=True))
        return Durations(self.bounds_s, counts, self.sum_s - earlier.sum_s) if min(counts) >= 0 else None

    def quantile(self, share: float) -> float | None:
        """Return a duration in seconds that this share of the durations does not exceed; None if there are none.

        As in Prometheus, the durations between two bounds count as evenly spread, and those beyond the last bound as the last bound.
        """
        rank, passed, lower = share * sum(self.counts), 0, 0.0
        for upper, count in zip(self.bounds_s, self.counts, strict=False):
            if count and passed + count >= rank:
                return lower + (upper - lower) * (rank - passed) / count
            passed, lower = passed + count, upper
        return lower if self.counts[-1] else None

    def plus(self, other: Durations) -> Durations:
        """Return these durations and those of a histogram with the same bounds."""
        return Durations(self.bounds_s, tuple(map(sum, zip(self.counts, other.counts, strict=True))), self.sum_s + other.sum_s)
