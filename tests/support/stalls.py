"""Stalls of a broker, by its own histogram of event loop stalls: no turn may take longer than 50 ms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from tests.support.speed import SLOWNESS

#: Longest processor time of one turn.
TURN_S_MAX: Final = 0.05 * SLOWNESS
LONGEST_S_MAX: Final = TURN_S_MAX
_BUCKET = re.compile(r'^bascule_event_loop_stall_seconds_bucket\{le="([^"]+)"\} ([0-9.e+]+)$', re.MULTILINE)


class Stall(NamedTuple):
    """Turns of a broker that were too long: when they were seen (s since the epoch), their number, and an upper bound of the longest."""

    at_s: float
    part: str
    turns: int
    bound_s: float

    def __str__(self) -> str:
        longest = f"up to {self.bound_s:g} s" if self.bound_s < math.inf else "without bound"
        return f"{self.part} kept others waiting: {self.turns} turns longer than {TURN_S_MAX:.2g} s of processor time, {longest}"


class StallLog:
    """A collection of brokers' stalls. Each process begins to count anew."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], Mapping[float, float]] = {}
        self.found: list[Stall] = []

    def take(self, at_s: float, part: str, pid: int, metrics: str) -> None:
        """Add the metrics of a process."""
        counts = turns_above(metrics)
        before = self._counts.get((part, pid), {})
        self._counts[part, pid] = counts
        news = {bound: count - before.get(bound, 0) for bound, count in counts.items()}
        turns = sum(news.values())
        if turns > 0:
            self.found.append(Stall(at_s, part, round(turns), max(bound for bound, count in news.items() if count > 0)))


def longest_turn_s(metrics: str, since: str = "") -> float:
    """Return an upper bound of the longest turn of a process. Turns in its earlier metrics ``since`` do not count."""
    earlier = {bound: float(text) for bound, text in _BUCKET.findall(since)}
    below, longest_s = 0.0, 0.0
    for bound, text in _BUCKET.findall(metrics):
        count = float(text) - earlier.get(bound, 0.0)
        if count > below:
            below, longest_s = count, float(bound)
    return longest_s


def check_turns(metrics: str, since: str = "") -> float:
    """Check that no turn of a process was too long, and return the result of ``longest_turn_s``."""
    longest_s = longest_turn_s(metrics, since)
    assert 0 < longest_s <= LONGEST_S_MAX, f"{longest_s:g} s of processor time in one turn; turns by bucket: {turns_above(metrics)}"
    return longest_s


def turns_above(metrics: str) -> dict[float, float]:
    """Return the number of turns in each bucket of the histogram with too long turns, by its upper bound."""
    found: dict[float, float] = {}
    below, lower_s = 0.0, 0.0
    for bound, text in _BUCKET.findall(metrics):
        count = float(text)
        if lower_s >= TURN_S_MAX:
            found[float(bound)] = count - below
        below, lower_s = count, float(bound)
    return found
