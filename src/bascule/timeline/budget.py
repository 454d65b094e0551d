"""What a search may cost: time, records and bytes of all topics together. A search can be cancelled from another thread."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final

#: Records between two pauses of a search that shares its process with other work.
RECORDS_PER_PAUSE: Final = 200


class SearchBudget:
    """What is left of the time, in seconds, the records and the bytes of a search; None for no limit.

    A search pauses after some records as long as it has worked, for ``pause_max_s`` at most: a broker's event loop needs the interpreter.
    """

    def __init__(
        self, seconds_max: float | None = None, records_max: int | None = None, bytes_max: int | None = None, *, pause_max_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._clock = clock
        self._seconds_max, self._records_max, self._bytes_max = seconds_max, records_max, bytes_max
        self._deadline_s = math.inf if seconds_max is None else clock() + seconds_max
        self._pause_max_s = pause_max_s
        self._resumed_s = clock()
        self._cancelled = threading.Event()
        self.records = self.bytes = 0

    def cancel(self) -> None:
        """End the search: nobody waits for its answer any more. Any thread may call this."""
        self._cancelled.set()

    @property
    def spent(self) -> str:
        """Return why the search must read nothing more; "" if it may go on."""
        if self._cancelled.is_set():
            return "the search was cancelled"
        if self._records_max is not None and self.records >= self._records_max:
            return f"a search reads at most {self._records_max} records"
        if self._bytes_max is not None and self.bytes >= self._bytes_max:
            return f"a search reads at most {self._bytes_max} bytes"
        if self._clock() >= self._deadline_s:
            return f"a search takes at most {self._seconds_max:g} s"
        return ""

    def timeout_s(self, longest_s: float) -> float:
        """Return how long a request to Kafka may take, in seconds: at most ``longest_s``, and more than nothing."""
        return max(0.1, min(longest_s, self._deadline_s - self._clock()))

    def room(self, count: int) -> int:
        """Return how many records to read at once: at most ``count``, and at least one."""
        return count if self._records_max is None else max(1, min(count, self._records_max - self.records))

    def take(self, size_bytes: int) -> None:
        """Count a record that was read, and pause if it is time."""
        self.records += 1
        self.bytes += size_bytes
        if self._pause_max_s and not self.records % RECORDS_PER_PAUSE:
            self._cancelled.wait(min(self._pause_max_s, self._clock() - self._resumed_s))
            self._resumed_s = self._clock()
