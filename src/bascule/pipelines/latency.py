"""End-to-end latency of pipelines between two reports of the driver, from the histograms that are stored with their positions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bascule.core.durations import Durations
from bascule.writer.carried import BOUNDS_S
from bascule.writer.position import Position


class LatencyQuantiles(NamedTuple):
    """Latencies in seconds that half of the records, and 99 of 100, did not exceed; None if nothing was carried."""

    p50_s: float | None = None
    p99_s: float | None = None


class IntervalLatencies:
    """Remembers the histograms of the last report, by name of the pipeline."""

    def __init__(self) -> None:
        self._before: dict[str, tuple[str, Durations]] = {}

    def since_last(self, name: str, task: str, positions: Iterable[Position]) -> LatencyQuantiles:
        """Return the latencies since the last call for a pipeline, by the positions of its task: the diverts of a group have the same."""
        now = Durations.none(BOUNDS_S)
        for each in positions:
            now = now.plus(each.carried.latencies)
        earlier, before = self._before.get(name, ("", now))
        self._before[name] = task, now
        between = now.since(before) if earlier == task else None
        return LatencyQuantiles() if between is None else LatencyQuantiles(between.quantile(0.5), between.quantile(0.99))
