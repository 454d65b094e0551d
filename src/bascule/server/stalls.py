"""Measurement of event loop stalls: a due timer is late by the turns that run before it."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Final

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bascule.core.durations import cumulative

#: Interval of the checks: 50 checks a second cost a ten-thousandth of a processor.
PERIOD_S: Final = 0.02
#: Upper bounds of the histogram. No turn should take longer than 50 ms.
BOUNDS_S: Final = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class StallWatch(Collector):
    """Measures how late its own timer is, as far as the loop's thread had the processor in that time.

    While a state is ``loading`` no client waits, so a check counts no time in which a state was loading.
    """

    def __init__(
        self,
        loading: Callable[[], bool],
        clock_s: Callable[[], float] = time.monotonic,
        thread_time_s: Callable[[], float] = time.thread_time,
    ) -> None:
        self._loading = loading
        self._was_loading = True
        self._clock_s = clock_s
        self._thread_time_s = thread_time_s
        self._due_s = self._used_s = 0.0
        self._counts = [0] * (len(BOUNDS_S) + 1)
        self._sum_s = 0.0

    def start(self) -> None:
        """Begin to measure. Call this on the event loop."""
        self._used_s, self._was_loading = self._thread_time_s(), self._loading()
        self._next()

    def _next(self) -> None:
        self._due_s = self._clock_s() + PERIOD_S
        asyncio.get_running_loop().call_later(PERIOD_S, self._look)

    def _look(self) -> None:
        self.look()
        self._next()

    def look(self) -> None:
        """Count the lateness of this check, or the processor time of the thread since the last check if that is less."""
        used_s = self._thread_time_s()
        stall_s = max(0.0, min(self._clock_s() - self._due_s, used_s - self._used_s))
        self._used_s = used_s
        was_loading, self._was_loading = self._was_loading, self._loading()
        if was_loading or self._was_loading:
            return
        self._counts[bisect_left(BOUNDS_S, stall_s)] += 1
        self._sum_s += stall_s

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        buckets = cumulative(BOUNDS_S, self._counts)
        text = "Delay of the event loop before it starts due work, in processor time of its thread; not measured while loading"
        yield HistogramMetricFamily("bascule_event_loop_stall_seconds", text, buckets=buckets, sum_value=self._sum_s)
