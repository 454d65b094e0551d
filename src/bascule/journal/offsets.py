"""The Kafka offset of each sequence.

The records of a single writer are consecutive, with few gaps.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import Final

from bascule.journal.sizes import JournalSizes

#: Kafka has stored the record, but its client does not know the offset: Kafka answers so to a retry after a leader change.
UNKNOWN_OFFSET: Final = -1001


@dataclass(slots=True)
class OffsetMap:
    """Runs of records with the same difference between offset and sequence."""

    starts: list[int] = field(default_factory=list)  # first sequence of each run
    deltas: list[int] = field(default_factory=list)  # offset - sequence in that run
    sizes: JournalSizes = field(default_factory=JournalSizes)

    def note(self, sequence: int, offset: int, size_bytes: int) -> None:
        """Record that ``sequence`` has ``offset``. Sequences must be recorded in order."""
        self.sizes.note(offset, size_bytes)
        if not self.deltas or self.deltas[-1] != offset - sequence:
            self.starts.append(sequence)
            self.deltas.append(offset - sequence)

    def offset_of(self, sequence: int) -> int:
        """Return the offset of a sequence. Raises IndexError for one before the first recorded."""
        run = bisect_right(self.starts, sequence) - 1
        if run < 0:
            raise IndexError(sequence)
        return sequence + self.deltas[run]

    def copy(self) -> OffsetMap:
        """Return a copy of the map."""
        return OffsetMap(list(self.starts), list(self.deltas), self.sizes.copy())
