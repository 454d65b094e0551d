"""Which journal records are valid: the rule of every reader (broker, standby, pipelines, audit)."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from bascule.journal.errors import DamagedRecord
from bascule.journal.records import Header, Kind

#: Maximum appends of an epoch in flight: this many of its records may follow the start of the epoch that replaces it.
IN_FLIGHT_MAX: Final = 4
#: Brokers that fail one after the other, each with all its appends in flight: this many fenced records may be in a row and hide an epoch.
#: Readers that start in the middle of a journal look this far back and ahead to find the current epoch.
STRAY_RECORDS_MAX: Final = 25 * IN_FLIGHT_MAX


class FenceViolation(enum.StrEnum):
    """Rules of the fence that a test may violate."""

    OLDER_EPOCHS_COUNT = "records of an older epoch are valid after the start of a newer one"


@dataclass(slots=True)
class Fence:
    """The state of a reader: the newest epoch started, and the last valid sequence.

    ``sequence`` -1 means that the reader starts in the middle, as a new divert does: the first valid record sets it.
    """

    epoch: int = -1
    sequence: int = 0
    violations: Collection[enum.StrEnum] = field(default=frozenset(), kw_only=True, compare=False, repr=False)

    def admits(self, offset: int, header: Header) -> bool:
        """Return whether the record at ``offset`` is valid, and update the fence if it is.

        Records of an older epoch after the start of a newer one come from a fenced broker and are invalid, and so is a repeated sequence.
        Raises DamagedRecord for a gap: a missing record must never be skipped silently.
        """
        if header.kind is Kind.EPOCH:
            self.epoch = offset
            return True
        if header.epoch < self.epoch:
            return FenceViolation.OLDER_EPOCHS_COUNT in self.violations
        if header.epoch > self.epoch:
            if self.epoch >= 0:
                raise DamagedRecord(f"offset {offset}: record of epoch {header.epoch}, whose start is missing (at epoch {self.epoch})")
            self.epoch = header.epoch
        if self.sequence >= 0:
            if header.sequence <= self.sequence:
                return False
            if header.sequence != self.sequence + 1:
                raise DamagedRecord(f"offset {offset}: sequence {header.sequence} follows {self.sequence}: records are missing in between")
        self.sequence = header.sequence
        return True


@dataclass(slots=True)
class JoiningFence(Fence):
    """The fence of a reader that begins in the middle of the journal, where the first records may belong to a broker that was replaced.

    Before ``strays_end``, a record of a newer epoch counts although the start of that epoch is missing. The sequences of a newer epoch, and
    those behind the first start of an epoch, do not follow the sequences of a replaced broker.
    """

    sequence: int = -1
    strays_end: int = 0
    started: bool = False

    def admits(self, offset: int, header: Header) -> bool:
        """Return whether the record at ``offset`` is valid, and update the fence. See Fence."""
        if header.kind is Kind.EPOCH:
            if not self.started:
                self.sequence, self.started = -1, True
        elif offset < self.strays_end and header.epoch > self.epoch:
            self.epoch, self.sequence = header.epoch, -1
        return Fence.admits(self, offset, header)
