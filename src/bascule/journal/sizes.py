"""The number of bytes of the journal between two offsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Final

#: Distance of the noted offsets: an interpolated size may be wrong by this much, and 100 GiB of journal have 100,000 notes.
STEP_BYTES: Final = 1 << 20


@dataclass(slots=True)
class JournalSizes:
    """The bytes before offsets that are a step apart, and before the end.

    Records before the first offset count with the mean record size.
    """

    offsets: list[int] = field(default_factory=list)  # ascending; the last one is the known end
    totals: list[int] = field(default_factory=list)  # bytes before each, counted from the first

    @property
    def end(self) -> int:
        """The offset after the last known record."""
        return self.offsets[-1] if self.offsets else 0

    def note(self, offset: int, size_bytes: int) -> None:
        """Add the record at ``offset``. Records must be added in order; known ones are ignored."""
        if not self.offsets:
            self.offsets, self.totals = [offset, offset], [0, 0]
        if offset < self.offsets[-1]:
            return
        known_bytes = self.totals[-1] - self.totals[-2]
        if known_bytes and known_bytes + size_bytes > STEP_BYTES:  # a record larger than a step gets its own
            self.offsets.append(offset)
            self.totals.append(self.totals[-1])
        self.offsets[-1] = offset + 1
        self.totals[-1] += size_bytes

    def between(self, start: int, end: int) -> int:
        """Return the bytes of the records from ``start`` to before ``end``, 0 if there are none."""
        return max(0, round(self._before(end) - self._before(start)))

    def _before(self, offset: int) -> float:
        offsets, totals = self.offsets, self.totals
        if not offsets or offset >= offsets[-1]:
            return totals[-1] if totals else 0
        index = bisect_right(offsets, offset) - 1
        if index < 0:
            return totals[0] - (offsets[0] - offset) * self._mean_bytes()
        share = (offset - offsets[index]) / (offsets[index + 1] - offsets[index])
        return totals[index] + share * (totals[index + 1] - totals[index])

    def _mean_bytes(self) -> float:
        records = self.offsets[-1] - self.offsets[0]
        return (self.totals[-1] - self.totals[0]) / records if records else 0.0

    def start_of_last(self, size_bytes: int) -> int:
        """Return the first offset after which at most ``size_bytes`` bytes follow."""
        offsets, totals = self.offsets, self.totals
        if not offsets:
            return 0
        before = totals[-1] - size_bytes
        if before <= totals[0]:
            mean_bytes = self._mean_bytes()
            return offsets[0] - int((totals[0] - before) / mean_bytes) if mean_bytes else 0
        index = bisect_left(totals, before)
        share = (before - totals[index - 1]) / (totals[index] - totals[index - 1])
        return offsets[index - 1] + -int(-share * (offsets[index] - offsets[index - 1]) // 1)

    def forget_before(self, offset: int) -> None:
        """Forget the records before ``offset`` after a trim of the journal."""
        index = min(bisect_right(self.offsets, offset) - 1, len(self.offsets) - 2)
        if index > 0:
            del self.offsets[:index], self.totals[:index]

    def copy(self) -> JournalSizes:
        """Return a copy of the sizes."""
        return JournalSizes(list(self.offsets), list(self.totals))
