"""Moves of positions that an administrator asks for, and what they mean. A broker without the pipelines makes no plans."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Self

from bascule.core.errors import InvalidInput, Scope
from bascule.core.times import TIME_FORMS, written_time
from bascule.kafka.bounds import Bounds, Place
from bascule.writer.control import OffsetMove
from bascule.writer.position import EARLIEST, LATEST, NEVER_MOVED, MovedMark, Position

#: The largest offset of Kafka.
OFFSET_MAX: Final = 2**63 - 1
_DIGITS_MAX: Final = len(str(OFFSET_MAX))


class NoOffsets(InvalidInput):
    """The pipeline has no position that could move as wanted."""

    scope = Scope.OPERATION
    http_status = 409


@dataclass(frozen=True, slots=True)
class OffsetTarget:
    """Where positions shall move: ``earliest``, ``latest``, to an offset, to a time in ms since the epoch, or by a number of records."""

    at: str
    value: int = 0

    @classmethod
    def parsed(cls, to: str) -> Self:
        """Return the target in a text. Raises InvalidInput."""
        if to in (EARLIEST, LATEST):
            return cls(to)
        if to.isdecimal() and to.isascii() and len(digits := to.lstrip("0") or "0") <= _DIGITS_MAX and int(digits) <= OFFSET_MAX:
            return cls("offset", int(digits))
        try:
            return cls("time", written_time(to).ms)
        except ValueError:
            raise InvalidInput(f"cannot move to {to!r:.60}; use 'earliest', 'latest', an offset, {TIME_FORMS}") from None


class PipelineOffsets(NamedTuple):
    """The positions of a pipeline with the bounds of their partitions, and the last request that a driver handled (``mark``)."""

    positions: tuple[Position, ...]
    bounds: Mapping[Place, Bounds]
    mark: MovedMark = NEVER_MOVED


class CountedMessages(NamedTuple):
    """The messages of a divert in a range of the journal. Of these, ``taken`` are in no queue, because the exclusive divert took them.

    If not ``complete``, there may be more.
    """

    messages: int
    taken: int
    complete: bool


class PlannedMove(NamedTuple):
    """A move with what it means: the offsets that are skipped and repeated, and for a divert its messages there."""

    move: OffsetMove
    bounds: Bounds
    skipped: int
    repeated: int
    counted: CountedMessages | None = None

    @property
    def discards(self) -> bool:
        """Return whether messages are lost, or may be: nobody else has what an exclusive divert took."""
        return self.skipped > 0 and self.counted is not None and (self.counted.taken > 0 or not self.counted.complete)


class OffsetPlan(NamedTuple):
    """Moves that an administrator may confirm. ``after`` is how many requests the drivers had handled when the plan was made."""

    moves: tuple[PlannedMove, ...]
    after: int
