"""Which journal records count: the rule every reader follows (broker, standby, pipelines, audit)."""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Final

from bascule.journal.records import DamagedRecord, Header, Kind

#: Appends of an epoch on their way at once. So many of its records, at most, stand behind the start of the epoch that replaces it.
IN_FLIGHT_MAX: Final = 4
#: Brokers that die one soon after the other, each with all that it had in flight: so many strays may stand together, and hide an epoch.
#: Readers that begin in the middle of a journal look so far back, and ahead, to know the epoch in force.
STRAY_RECORDS_MAX: Final = 25 * IN_FLIGHT_MAX


class FenceViolation(enum.StrEnum):
    """Rules of the fence that a test may break."""

    OLDER_EPOCHS_COUNT = "records of an older epoch count after the start of a newer one"


@dataclass(slots=True)
class Fence:
    """Where a reader stands: the newest epoch it saw start, and the last sequence it took.

    ``sequence`` -1 means that the reader starts in the middle (a divert that starts today): the first record it takes sets it.
    """

    epoch: int = -1
    sequence: int = 0
    violations: Collection[enum.StrEnum] = field(default=frozenset(), kw_only=True, compare=False, repr=False)

    def admits(self, offset: int, header: Header) -> bool:
        """Whether the record at ``offset`` counts; moves the fence when it does.

        Records of an older epoch after a newer one's start are a zombie's and do not count; a repeated sequence does not count.
        Raises DamagedRecord on a hole: a missing record must never be passed silently.
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
                raise DamagedRecord(f"offset {offset}: sequence {header.sequence} follows {self.sequence}: records are missing")
        self.sequence = header.sequence
        return True
