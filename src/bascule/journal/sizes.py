"""How many bytes of the journal lie between two offsets."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import Final

#: Between two offsets that are noted: what is interpolated may be wrong by that much, and 100 GiB of journal have 100,000 notes.
STEP_BYTES: Final = 1 << 20


@dataclass(slots=True)
class JournalSizes:
    """The bytes before some offsets, a step apart, and before the end. What lies before the first one has the mean size of a record."""

    offsets: list[int] = field(default_factory=list)  # ascending; the last one is the end of what is known
    totals: list[int] = field(default_factory=list)  # bytes before each, counted from the first one

    @property
    def end(self) -> int:
        """The offset behind the last record that is known."""
        return self.offsets[-1] if self.offsets else 0

    def note(self, offset: int, size_bytes: int) -> None:
        """A record lies at ``offset``. To be told in order; records that are known already are passed over."""
        if not self.offsets:
            self.offsets, self.totals = [offset, offset], [0, 0]
        if offset < self.offsets[-1]:
            return
        known_bytes = self.totals[-1] - self.totals[-2]
        if known_bytes and known_bytes + size_bytes > STEP_BYTES:  # a record larger than a step has one of its own
            self.offsets.append(offset)
            self.totals.append(self.totals[-1])
        self.offsets[-1] = offset + 1
        self.totals[-1] += size_bytes

    def between(self, start: int, end: int) -> int:
        """Bytes of the records from ``start`` on and before ``end``, 0 where there are none."""
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
        """The first offset behind which no more than so many bytes lie."""
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
        """The journal was trimmed up to ``offset``."""
        index = min(bisect_right(self.offsets, offset) - 1, len(self.offsets) - 2)
        if index > 0:
            del self.offsets[:index], self.totals[:index]

    def copy(self) -> JournalSizes:
        """The sizes as they are now."""
        return JournalSizes(list(self.offsets), list(self.totals))
