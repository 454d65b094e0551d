"""Which Kafka offset a sequence has, and how many bytes lie between two offsets.

The records of a single writer lie one behind the other, but for the rare gap.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

from bascule.journal.sizes import JournalSizes

#: Kafka has stored the record, and its client cannot say where: Kafka answers so to a retry after a leader change.
UNKNOWN_OFFSET: Final = -1001


@dataclass(slots=True)
class OffsetMap:
    """Runs of records whose offset and sequence differ by the same number."""

    starts: list[int] = field(default_factory=list)  # first sequence of each run
    deltas: list[int] = field(default_factory=list)  # offset - sequence in that run
    sizes: JournalSizes = field(default_factory=JournalSizes)

    def note(self, sequence: int, offset: int, size_bytes: int) -> None:
        """The record of ``sequence`` lies at ``offset``. To be told in order."""
        self.sizes.note(offset, size_bytes)
        if not self.deltas or self.deltas[-1] != offset - sequence:
            self.starts.append(sequence)
            self.deltas.append(offset - sequence)

    def offset_of(self, sequence: int) -> int:
        """Where a record lies. Raises IndexError for one before the first noted."""
        run = bisect_right(self.starts, sequence) - 1
        if run < 0:
            raise IndexError(sequence)
        return sequence + self.deltas[run]

    def copy(self) -> OffsetMap:
        """The map as it is now."""
        return OffsetMap(list(self.starts), list(self.deltas), self.sizes.copy())
