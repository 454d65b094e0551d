"""How long senders wait for the acknowledgement of their messages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Final

#: Upper bounds of the histogram, in seconds.
BOUNDS_S: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
#: Messages that arrive within this time, in seconds, count with the time of the first of them: few times are kept of many messages.
RESOLUTION_S: Final = 0.0005


class SendTimes:
    """The times from the decision about a persistent message until its answer, when it is stored. They continue over epochs."""

    def __init__(self, clock_s: Callable[[], float] = float) -> None:
        """``clock_s`` returns the time in seconds. The default always returns 0.0, so all times are 0."""
        self.clock_s = clock_s
        self.counts = [0] * (len(BOUNDS_S) + 1)  # not cumulative
        self.count = 0
        self.sum_s = 0.0

    def answered(self, since_s: Sequence[float], counts: Sequence[int]) -> None:
        """Count messages whose answers are given now, by the times at which they were decided."""
        now_s = self.clock_s()
        for begun_s, count in zip(since_s, counts, strict=True):
            waited_s = now_s - begun_s
            self.counts[bisect_left(BOUNDS_S, waited_s)] += count
            self.count += count
            self.sum_s += waited_s * count
