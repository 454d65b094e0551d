"""Counts of what pipelines have carried. They are stored with a position, in the same transaction, so they count each record once.

They are a header of the position's record, which earlier versions ignore, and they decide nothing: damaged counts begin again at zero.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from bascule.core.durations import Durations

#: The header of the record of a position that has the counts.
HEADER: Final = "bascule.carried"
#: Upper bounds, in seconds, of the histograms: from a small transaction on an idle machine to a pipeline that was paused for a week.
BOUNDS_S: Final = (
    0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 3600.0, 21_600.0, 86_400.0, 604_800.0
)  # fmt: skip
#: How many of these bounds the stored histograms of earlier versions have.
_EARLIER_BOUNDS: Final = 15
#: Digits of the stored sums of seconds.
_SUM_DIGITS: Final = 6
_HISTOGRAMS: Final = ("transactions", "batches", "latencies")
_NO_DURATIONS: Final = Durations.none(BOUNDS_S)


class PipelineCount(NamedTuple):
    """What one pipeline has written: records with dead letters, their bytes with keys and headers, and dead letters."""

    records: int = 0
    bytes: int = 0
    dead_letters: int = 0

    def plus(self, other: PipelineCount) -> PipelineCount:
        """Return the sum of both."""
        return PipelineCount(*map(sum, zip(self, other, strict=True)))

    def at_least(self, other: PipelineCount) -> PipelineCount:
        """Return the larger number of each."""
        return PipelineCount(*map(max, zip(self, other, strict=True)))


@dataclass(frozen=True, slots=True)
class CarriedCounts:
    """What was carried under one position, by name of the divert or ingress, and how long it took.

    ``transactions`` has the durations of commits, ``batches`` those from the first record of a transaction to its commit, and
    ``latencies`` those from the time when a record was sent until it was committed. The durations of a transaction are stored with the
    next one.
    """

    pipelines: Mapping[str, PipelineCount] = field(default_factory=dict)
    transactions: Durations = _NO_DURATIONS
    batches: Durations = _NO_DURATIONS
    latencies: Durations = _NO_DURATIONS

    def plus(self, other: CarriedCounts) -> CarriedCounts:
        """Return the sums of both."""
        return CarriedCounts(
            summed(self.pipelines, other.pipelines), *(getattr(self, name).plus(getattr(other, name)) for name in _HISTOGRAMS)
        )

    def at_least(self, other: CarriedCounts) -> CarriedCounts:
        """Return the larger ones of the counts and of the numbers of durations, for counters that must not fall."""
        pipelines = {name: count.at_least(other.pipelines.get(name, count)) for name, count in self.pipelines.items()}
        larger = (max(getattr(self, name), getattr(other, name), key=lambda each: sum(each.counts)) for name in _HISTOGRAMS)
        return CarriedCounts({**other.pipelines, **pipelines}, *larger)

    def with_pipelines_of(self, other: CarriedCounts) -> CarriedCounts:
        """Return these counts, and those of the pipelines of a position that ends here. Its durations end with its task."""
        return replace(self, pipelines=summed(self.pipelines, other.pipelines))

    def only(self, names: Collection[str]) -> CarriedCounts:
        """Return the counts without those of other pipelines."""
        return replace(self, pipelines={name: count for name, count in self.pipelines.items() if name in names})

    def encode(self) -> bytes:
        """Return the value of the header."""
        histograms = {
            name: (each.counts, round(each.sum_s, _SUM_DIGITS)) for name in _HISTOGRAMS if any((each := getattr(self, name)).counts)
        }
        return _JSON.encode({"pipelines": self.pipelines, **histograms}).encode()

    @classmethod
    def decode(cls, value: bytes | None) -> CarriedCounts:
        """Return the counts in a header. There are none if the header is missing, or is not readable."""
        if not value:
            return NOTHING_CARRIED
        try:
            said: dict[str, Any] = json.loads(value)
            pipelines = {str(name): PipelineCount(*map(_natural, count)) for name, count in said["pipelines"].items()}
            return cls(pipelines, **{name: _durations(said[name]) for name in _HISTOGRAMS if name in said})
        except (ValueError, TypeError, AttributeError, KeyError, OverflowError, RecursionError):
            return NOTHING_CARRIED


def summed(one: Mapping[str, PipelineCount], other: Mapping[str, PipelineCount]) -> dict[str, PipelineCount]:
    """Return the sums of the counts of each pipeline."""
    sums = dict(one)
    for name, count in other.items():
        sums[name] = count.plus(sums[name]) if name in sums else count
    return sums


def _natural(number: Any) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(number)
    return number


def _durations(said: Any) -> Durations:
    counts, sum_s = said
    if len(counts) == _EARLIER_BOUNDS + 1:  # its durations above the last bound may be of any length
        counts = [*counts[:-1], *[0] * (len(BOUNDS_S) - _EARLIER_BOUNDS), counts[-1]]
    if len(counts) != len(BOUNDS_S) + 1:
        return _NO_DURATIONS
    return Durations(BOUNDS_S, tuple(map(_natural, counts)), float(sum_s))


_JSON: Final = json.JSONEncoder(separators=(",", ":"))
NOTHING_CARRIED: Final = CarriedCounts()
