"""The pace of the senders: as fast as wanted, and no faster than the pipelines carry."""

from __future__ import annotations

import threading
from collections.abc import Callable

INTERVAL_S = 1.0
#: The senders slow down when the topics in Kafka lag by more than this, in seconds of sending, and the lag does not fall.
LAG_MAX_S = 0.5
SLOWER, FASTER = 0.8, 1.15
RATE_MIN = 200.0


def next_rate(rate: float, wanted: float, lag: int, lag_before: int) -> float:
    """Return the rate, in messages a second, for the next interval."""
    if lag > rate * LAG_MAX_S:
        return max(RATE_MIN, rate * SLOWER) if lag >= lag_before else rate
    return min(wanted, rate * FASTER)


class Pace(threading.Thread):
    """Changes the rate of the senders once a second, except while a killed part is away."""

    def __init__(self, wanted: float, lag: Callable[[], int], away: Callable[[], bool], tell: Callable[[float], None]) -> None:
        """``lag`` returns the number of messages that are sent and not in Kafka yet; ``tell`` takes a new rate."""
        super().__init__(name="pace", daemon=True)
        self.rate = wanted
        self._wanted, self._lag, self._away, self._tell = wanted, lag, away, tell
        self._ending = threading.Event()

    def run(self) -> None:
        lag_before = 0
        while not self._ending.wait(INTERVAL_S):
            lag, rate = self._lag(), self.rate
            if not self._away():
                self.rate = next_rate(rate, self._wanted, lag, lag_before)
            if self.rate != rate:
                self._tell(self.rate)
            lag_before = lag

    def stop(self) -> None:
        """Leave the rate as it is."""
        self._ending.set()
        self.join()
