"""Rounds of housekeeping: the steps and their order. The caller implements the steps with IO.

A step that fails is tried again in the next round. Failures only cost disk space and time at a start. The order of the steps protects the
data: a snapshot counts once it is announced, and what it replaces is deleted only after that.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Final, Protocol, TypeVar

from bascule.broker.ascending import difference, in_order, intersection, union
from bascule.broker.engine import Engine
from bascule.broker.snapshot import Snapshot
from bascule.broker.store_move import StoreMove
from bascule.broker.turns import Work
from bascule.core import crash

T = TypeVar("T")

#: Messages that are deleted from the store in one step.
FORGOTTEN_AT_ONCE: Final = 10_000
#: Messages of branches that are compared in one piece of a search, and in one step.
COMPARED_AT_ONCE: Final = 2_000
COMPARED_PER_STEP: Final = 10


class RoundViolation(enum.StrEnum):
    """Rules of a round that a test can break."""

    DELETED_BEFORE_ANNOUNCED = "older snapshots are deleted before the new one is announced"
    FORGOTTEN_BEFORE_ANNOUNCED = "the store deletes messages before a snapshot without them is announced"
    WAITING_MESSAGES_FORGOTTEN = "the store deletes messages that are still in queues"


class Steps(Protocol):
    """The steps of a round. Each of them may fail, which ends the round."""

    def going_on(self) -> bool:
        """Return True while the epoch runs."""
        ...

    async def take(self) -> Snapshot:
        """Return a snapshot of the state that is stored now. Later changes are in the next one."""
        ...

    async def in_turns(self, work: Work) -> None:
        """Do work of the engine in turns, concurrently with the traffic."""
        ...

    async def computed(self, calculation: Callable[[], T]) -> T:
        """Return the result of a long calculation, made concurrently with the traffic."""
        ...

    async def stored(self) -> Collection[int]:
        """Return the mids of all records in the store."""
        ...

    async def store(self, records: Mapping[int, bytes | None]) -> None:
        """Write records to the store by mid; None deletes a record."""
        ...

    async def write(self, taken: Snapshot) -> None:
        """Store a snapshot."""
        ...

    async def announce(self, taken: Snapshot) -> None:
        """Announce a snapshot, and return once the journal has stored the announcement."""
        ...

    async def delete_older(self, taken: Snapshot) -> None:
        """Delete the snapshots that this one replaces."""
        ...

    async def trim(self, taken: Snapshot, branch: str) -> None:
        """Trim the journal up to what is still needed. ``branch`` is the xid of the branch that has the oldest message; "" if none has."""
        ...


class Rounds:
    """The rounds of one epoch, one at a time. ``engine`` is the engine of the epoch."""

    def __init__(self, steps: Steps, engine: Engine, *, violations: Collection[enum.StrEnum] = frozenset()) -> None:
        self._violations = violations
        self._steps = steps
        self._engine = engine
        self._stored: list[int] = []  # mids of messages in the store, ascending
        self._moved: list[int] = []  # mids of messages that were moved to the store since
        self._first = True
        self._sequences = deque([engine.journaling.sequence] * 2, maxlen=2)  # of the last two snapshots: older messages are likely to stay

    async def round(self) -> None:
        """Run one round: snapshot, announcement, deletion of older snapshots, trim."""
        steps = self._steps
        taken = await self.snapshot()
        if taken is None:
            return
        crash.point("snapshot.delete.before")
        await steps.delete_older(taken)
        crash.point("snapshot.delete.after")
        await self._forget(taken)
        if steps.going_on():
            await steps.trim(taken, await self._branch_of_oldest(taken))

    async def _branch_of_oldest(self, taken: Snapshot) -> str:
        """Return the xid of the branch that has received the oldest message that pins the journal; "" if no branch has."""
        if not self._engine.branches.prepared:
            return ""
        oldest = await self._steps.computed(taken.oldest)
        found: list[str] = []
        if oldest is not None:
            await self._steps.in_turns(self._find_branch(oldest[0], found))
        return "".join(found)

    def _find_branch(self, mid: int, found: list[str]) -> Work:
        """Add the xid of the branch that has received a message to ``found``."""
        for xid, branch in list(self._engine.branches.prepared.items()):
            acks = branch.acks
            for first in range(0, len(acks), COMPARED_AT_ONCE):
                if mid in [message.mid for _, message in acks[first : first + COMPARED_AT_ONCE]]:
                    found.append(str(xid))
                    return
                yield COMPARED_AT_ONCE // COMPARED_PER_STEP
            yield 1

    async def _forget(self, taken: Snapshot) -> None:
        """Delete the messages from the store that the valid snapshot does not have there."""
        if not (self._stored or self._moved):
            return
        steps = self._steps
        kept: list[int] = [] if RoundViolation.WAITING_MESSAGES_FORGOTTEN in self._violations else taken.stored
        gone = await steps.computed(lambda: list(difference(self._all_stored(), kept)))
        remaining = iter(gone)
        while batch := dict.fromkeys(islice(remaining, FORGOTTEN_AT_ONCE)):
            crash.point("store.forget.before")
            await steps.store(batch)
            crash.point("store.forget.after")
        self._stored, self._moved = kept, []

    def _all_stored(self) -> Iterator[int]:
        """Return the mids of all messages in the store, ascending."""
        return union(self._stored, sorted(self._moved))

    async def snapshot(self) -> Snapshot | None:
        """Make and announce a snapshot. Return None if the epoch has ended."""
        steps = self._steps
        if self._first:
            # The store may have messages from the previous broker, which may have trimmed the journal behind them while this one stood by.
            if stored := await steps.stored():
                self._stored = await steps.computed(lambda: list(in_order(stored)))
            self._first = False
        taken = await steps.take()
        crash.point("snapshot.taken")
        if self._stored or self._moved:
            taken.stored = await steps.computed(partial(self._in_store, taken))
        await self._move_old(taken)
        crash.point("snapshot.write.before")
        await steps.write(taken)
        crash.point("snapshot.write.after")
        if not steps.going_on():
            return None
        if RoundViolation.DELETED_BEFORE_ANNOUNCED in self._violations:
            await steps.delete_older(taken)
        if RoundViolation.FORGOTTEN_BEFORE_ANNOUNCED in self._violations:
            await self._forget(taken)
        await steps.announce(taken)
        crash.point("snapshot.announce.after")
        self._sequences.append(taken.sequence)
        return taken

    def _in_store(self, taken: Snapshot) -> list[int]:
        """Return the mids of a snapshot's messages that are in the store, ascending."""
        stored = list(self._all_stored())
        waiting = union(*(islice(mids, bisect_right(mids, stored[-1])) for mids in taken.mids))
        return list(intersection(stored, waiting))

    async def _move_old(self, taken: Snapshot) -> None:
        """Move messages to the store that would keep too much of the journal."""
        steps = self._steps
        move = StoreMove(self._engine, taken, self._sequences[0])
        await steps.computed(move.skip_stored)
        await steps.in_turns(move.choose())
        moved: list[int] = []
        while move.more and steps.going_on():
            await steps.in_turns(move.encode())
            if move.batch:
                await steps.store(move.batch)
                crash.point("store.write.after")
                self._moved.extend(move.batch)
                moved.extend(move.batch)
        if moved:
            taken.stored = await steps.computed(lambda: list(union(taken.stored, moved)))
