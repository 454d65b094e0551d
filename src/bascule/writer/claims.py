"""Claims: a driver run writes its name into a position before it works from it, and tasks of earlier runs stop when they find another name.

To be fenced does not stop a task: it makes a new incarnation and finds the position that it expects. Another owner in the position does.
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
    """Rules of claims, broken on purpose by the simulation."""

    OWNER_NOT_CHECKED = "a task works from a position whatever owner it names"
    BATCH_START_TRUSTED = "a task begins where its batch begins, not at the position"


@dataclass(frozen=True, slots=True)
class Claim:
    """One source partition as one driver run holds it: a task works only while the stored position says the same."""

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
        """Return where a task of a batch that begins at ``start`` begins: at the position, wherever Spark says that the batch begins."""
        if ClaimViolation.BATCH_START_TRUSTED in violations:
            return replace(position, offset=start, epoch=-1, sequence=-1)
        return position


class ClaimingWriter(Protocol):
    """What a claim needs of a transactional writer."""

    key: str

    async def current(self) -> Position | None:
        """Return the position, in the hands of an incarnation that came after it."""
        ...

    async def write(self, outputs: Any, before: Position | None, after: Position | None) -> None:
        """Move the position. Raises PositionMoved."""
        ...


class Claims:
    """The positions that one driver run (``owner``) takes over.

    A position's own owner is the run, which try of it, and the generation: one more than that of the owner before in the position taken
    first (the leader). A run that stalled after that takes nothing else from its successor.
    """

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._tries = itertools.count(1)
        self._held: set[str] = set()
        self._generations: dict[str, int] = {}

    def name(self, leader: str) -> str:
        """Return a new name for the owner of positions that are taken with ``leader``."""
        return f"{self.owner}.{next(self._tries)}.{self._generations[leader]}"

    def hold(self, keys: Collection[str]) -> None:
        """Note that this run has written its name into these positions."""
        self._held.update(keys)

    async def take(self, writer: ClaimingWriter, leader: str) -> Position | None:
        """Return the position under a new name of this run; a vacant or missing one as it is, for nobody works from it.

        ``leader`` is the key of the position taken first. What this run has held once, and what a later generation holds, it does not
        take from its successor: otherwise the two would stop each other in turn. Raises PositionTaken, Unavailable.
        """
        while True:
            found = await writer.current()
            if writer.key == leader and leader not in self._held:
                self._generations[leader] = generation(found) + 1
            if found is None or found.vacant:
                return found
            # The first generation knows of none before it: the position taken first may have been deleted by hand.
            later = writer.key in self._held or generation(found) >= self._generations[leader] > 1
            if later and found.owner.partition(".")[0] != self.owner:
                raise PositionTaken(f"position {writer.key!r} is held by another driver of the bridge, {found.owner!r}; this driver stops")
            taken = replace(found, owner=self.name(leader))
            with suppress(PositionMoved):  # by a task that was fenced and has tried again: what it did counts
                await writer.write([], found, taken)
                self._held.add(writer.key)
                return taken


def generation(found: Position | None) -> int:
    """Return the generation in the name of a position's owner; 0 where there is none."""
    parts = found.owner.split(".") if found is not None else []
    return int(parts[2]) if len(parts) > 2 else 0
