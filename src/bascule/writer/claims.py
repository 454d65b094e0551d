"""Claims: a driver run writes its name into a position before it works from it. Tasks of earlier runs find another name and stop.

Fencing does not stop a task: the task makes a new incarnation and finds the position that it expects. Another owner in the position does.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from bascule.writer.errors import PositionMoved
from bascule.writer.position import Position, PositionLost, PositionTaken


class ClaimViolation(enum.StrEnum):
    """Rules of claims that the simulation breaks on purpose."""

    OWNER_NOT_CHECKED = "a task uses a position whatever owner it names"
    BATCH_START_TRUSTED = "a task starts at the start of its batch, not at the position"


@dataclass(frozen=True, slots=True)
class Claim:
    """One source partition, as one driver run holds it. A task works only while the stored position has the same owner and members."""

    key: str
    topic: str
    topic_id: str
    partition: int
    owner: str
    members: tuple[str, ...] = ()

    def check(self, found: Position | None, *, violations: Collection[enum.StrEnum] = frozenset()) -> Position:
        """Return the position if this run holds it. Raises PositionLost or PositionTaken."""
        if found is None:
            raise PositionLost(f"position {self.key!r} of a known pipeline is missing; restore the position or register the pipeline again")
        if found.topic_id != self.topic_id:
            raise PositionLost(f"topic {self.topic!r} was recreated since position {self.key!r} was written; its old offsets are invalid")
        held = found.owner == self.owner and found.members == self.members
        if not held and ClaimViolation.OWNER_NOT_CHECKED not in violations:
            raise PositionTaken(f"another driver has taken over position {self.key!r}")
        return found

    def begin(self, position: Position, start: int, *, violations: Collection[enum.StrEnum] = frozenset()) -> Position:
        """Return the position where a task begins: the stored position, whatever ``start`` Spark says for the batch."""
        if ClaimViolation.BATCH_START_TRUSTED in violations:
            return replace(position, offset=start, epoch=-1, sequence=-1)
        return position


class ClaimingWriter(Protocol):
    """The part of a transactional writer that a claim needs."""

    key: str

    async def current(self) -> Position | None:
        """Return the position, read by an incarnation that began after the position was written."""
        ...

    async def write(self, outputs: Any, before: Position | None, after: Position | None) -> None:
        """Move the position. Raises PositionMoved."""
        ...


class Claims:
    """The positions that one driver run (``owner``) takes over.

    The owner name in a position consists of the run, the number of the attempt, and the generation. The generation is one more than the
    generation of the previous owner of the position taken first (the leader). A run that stalled after that takes nothing more from its
    successor.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._tries = itertools.count(1)
        self._held: set[str] = set()
        self._generations: dict[str, int] = {}

    def name(self, leader: str) -> str:
        """Return a new owner name for positions that are taken with ``leader``."""
        return f"{self.owner}.{next(self._tries)}.{self._generations[leader]}"

    def hold(self, keys: Collection[str]) -> None:
        """Note that this run has written its name into these positions."""
        self._held.update(keys)

    def give_up(self, keys: Collection[str]) -> None:
        """Note that this run has written positions without an owner. It may take them again if nobody else does."""
        self._held.difference_update(keys)

    async def take(self, writer: ClaimingWriter, leader: str) -> Position | None:
        """Return the position under a new name of this run.

        A vacant or missing position is returned unchanged, because nobody works from it.

        ``leader`` is the key of the position taken first. This run does not take a position back from its successor, that is, a position
        that it has held before or that a later generation holds: otherwise the two would stop each other in turn. Raises PositionTaken,
        Unavailable.
        """
        while True:
            found = await writer.current()
            if writer.key == leader and leader not in self._held:
                self._generations[leader] = generation(found) + 1
            if found is None or found.vacant:
                return found
            # The first generation has no predecessor: the leader's position may have been deleted by hand.
            later = writer.key in self._held or generation(found) >= self._generations[leader] > 1
            if later and found.owner.partition(".")[0] != self.owner:
                raise PositionTaken(f"position {writer.key!r} is held by another driver of the bridge, {found.owner!r}; this driver stops")
            taken = replace(found, owner=self.name(leader))
            with suppress(PositionMoved):  # moved by a fenced task that tried again: its work counts
                await writer.write([], found, taken)
                self._held.add(writer.key)
                return taken


def generation(found: Position | None) -> int:
    """Return the generation in the owner name of a position, or 0 if there is none."""
    parts = found.owner.split(".") if found is not None else []
    return int(parts[2]) if len(parts) > 2 else 0
