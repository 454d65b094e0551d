"""Load of the state for the next epoch, without IO: it follows the journal, and is complete once the start record of the epoch is stored.

The server performs the effects in a thread, and the simulator of the tests performs them in its simulated world.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Final, Protocol

from bascule.broker import snapshot as snapshots
from bascule.broker.engine import Engine
from bascule.broker.loading import Loader
from bascule.broker.snapshot import Snapshot
from bascule.core.effects import Severity
from bascule.core.errors import BasculeError, Scope, Unavailable
from bascule.journal.errors import DamagedRecord, ForeignRecord, RecordError
from bascule.journal.reading import Trimmed

#: How long Kafka may take to return records that exist. If a former leader answers, the new leader gets the same time.
ANSWER_TIMEOUT_S: Final = 30.0
#: Pause before topics that contradict one another are read again.
RETRY_S: Final = 0.5
HELP: Final = "Restore the topic, or delete all topics of Bascule to start from scratch"
RECREATED: Final = f"was recreated; its records are lost. {HELP}"


class Closed(BasculeError):
    """Raised when the broker stops and the state is no longer needed."""

    retriable = False
    scope = Scope.OPERATION


class FollowingViolation(enum.StrEnum):
    """Rules of following that a test can break."""

    LAST_RECORD_MISSED = "loading ends before the last record that precedes the start of the epoch"
    NEWEST_SNAPSHOT_ONLY = "an unannounced snapshot is skipped, and no older snapshot is tried"
    FORMER_LEADER_BELIEVED = "inconsistent topics count as damaged although a former leader may have answered"


class _Contradiction(BasculeError):
    """Raised when topics contradict one another: one is damaged, or a former leader, which lacks records, has answered."""

    retriable = True
    scope = Scope.OPERATION


class FollowingEffects(Protocol):
    """The effects of a load. Each method may raise Unavailable.

    With ``behind_barrier`` a table is read behind a barrier record, so that no former leader can answer (docs/adr/0013).
    """

    def now_s(self) -> float:
        """Return the time of a monotonic clock."""
        ...

    def wanted_end(self) -> int | None:
        """Return the offset of the journal at which the load ends; None while it is unknown."""
        ...

    def closing(self) -> bool:
        """Return True if the state is no longer needed."""
        ...

    def fresh_engine(self) -> Engine:
        """Return an engine without state."""
        ...

    async def recreated(self) -> bool:
        """Return True if the topic of the journal is not the topic of the first start."""
        ...

    async def sleep(self, delay_s: float) -> None:
        """Return after ``delay_s``, or earlier if the state is no longer needed."""
        ...

    async def snapshots(self, *, behind_barrier: bool) -> Mapping[str, bytes]:
        """Return every complete snapshot by its id."""
        ...

    async def stored(self, *, behind_barrier: bool) -> Mapping[int, bytes]:
        """Return every record of the store by its mid."""
        ...

    async def range(self) -> tuple[int, int]:
        """Return the first offset of the journal and its high watermark, as some node reports them."""
        ...

    async def read(self, offset: int) -> Sequence[tuple[int, bytes | None]]:
        """Return some of the journal's records from ``offset`` on, with their offsets; none if no record arrives for a moment.

        Raises Trimmed.
        """
        ...

    def bulk(self) -> AbstractContextManager[None]:
        """Return a context for the load of many objects that will stay."""
        ...

    def note(self, severity: Severity, event: str, detail: str) -> None:
        """Write an event to the log."""
        ...


class FollowingProtocol:
    """The load of one state: it loads the newest snapshot and applies the journal's records until it reaches the wanted end."""

    def __init__(self, effects: FollowingEffects, topic: str, *, violations: Collection[enum.StrEnum] = frozenset()) -> None:
        self._effects = effects
        self._topic = topic
        self._violations = violations
        self.foreign = 0  # records of other programs
        self.next_offset = 0  # of the journal; the records before it have been read

    async def run(self) -> Loader:
        """Return the state of all records before the wanted end. Raises Unavailable, RecordError, Closed.

        The serving broker may trim the journal before this load has read it, but only behind a newer snapshot. The snapshot of an epoch
        behind the wanted end is announced behind the wanted end, where this load does not read.

        Topics that contradict one another are read again. Only reads that no former leader can answer prove damage: the snapshots and the
        store behind barrier records, and the journal behind the start record, which all in-sync replicas have stored. A standby writes no
        start record, so it cannot prove damage: it reads again until it is elected.
        """
        believed = FollowingViolation.FORMER_LEADER_BELIEVED in self._violations
        tried: list[str] | None = None  # the snapshots of the last load that could prove damage
        certain = False
        while True:
            candidates = await self._candidates(certain)
            try:
                return await self._load(candidates, certain)
            except (Trimmed, _Contradiction) as error:
                names, end = [each.id for each in candidates], self._effects.wanted_end()
                if end is not None and any(each.epoch >= end for each in candidates):
                    raise Unavailable(f"{error}: another broker has started a newer epoch, so this epoch must not serve") from error
                if names == tried:
                    raise DamagedRecord(f"{error}, and no usable snapshot covers the records before that offset. {HELP}") from error
                self._effects.note(Severity.INFO, "load restarted", str(error))
                tried, self.foreign = names if certain or believed else None, 0
            if not believed:
                certain = await self._elected()

    async def _elected(self) -> bool:
        """Return True if the start record is stored. Otherwise pause first, and return the state after the pause. Raises Closed."""
        if self._effects.wanted_end() is None:
            await self._effects.sleep(RETRY_S)
        if self._effects.closing():
            raise Closed("the broker stops")
        return self._effects.wanted_end() is not None

    async def _candidates(self, certain: bool) -> list[Snapshot]:
        """Return the readable snapshots, newest first."""
        found: list[Snapshot] = []
        for name, data in (await self._effects.snapshots(behind_barrier=certain)).items():
            try:
                found.append(snapshots.decode(data))
            except DamagedRecord as error:
                self._effects.note(Severity.ERROR, "damaged snapshot", f"snapshot {name} cannot be used: {error}")
        if await self._effects.recreated():
            raise DamagedRecord(f"journal {self._topic} {RECREATED}")
        return sorted(found, key=lambda snapshot: snapshot.sequence, reverse=True)

    async def _load(self, candidates: list[Snapshot], certain: bool) -> Loader:
        loader, position = await self._base(candidates, certain)
        await self._apply(loader, position, self._wanted_end)
        loader.finish()
        return loader

    async def _base(self, candidates: list[Snapshot], certain: bool) -> tuple[Loader, int]:
        """Load the newest usable snapshot, or the whole journal, up to the high watermark.

        Return the loader and the offset of the next record.
        """
        # The store may also have records for a snapshot that was never completed; the next snapshot removes them.
        stored = await self._effects.stored(behind_barrier=certain)
        first, high = await self._range(certain)
        for newest in candidates[:1]:
            if newest.next_offset > high:
                lost = f"journal {self._topic} has lost records at its end: it ends at offset {high}"
                raise _Contradiction(f"{lost}; snapshot {newest.id} was made at {newest.next_offset}")
        for snapshot in candidates:
            loader = self._beginning(snapshot, stored, first)
            if loader is None:
                continue
            position = await self._read_up(loader, high)
            if loader.announced:
                self._read(f"snapshot {snapshot.id}", loader, position)
                return loader, position
            self._effects.note(Severity.WARNING, "snapshot skipped", f"snapshot {snapshot.id} was never announced; not used")
            if FollowingViolation.NEWEST_SNAPSHOT_ONLY in self._violations:
                break
        if first > 0:
            raise Trimmed(f"journal {self._topic} begins at offset {first}")
        loader = Loader(self._effects.fresh_engine())
        position = await self._read_up(loader, high)
        self._read("the beginning", loader, position)
        return loader, position

    async def _range(self, certain: bool) -> tuple[int, int]:
        """Return the first offset and the high watermark. If ``certain``, the node that reports them has the start record."""
        effects, since_s = self._effects, self._effects.now_s()
        while True:
            first, high = await effects.range()
            end = effects.wanted_end()
            if not certain or end is None or high >= end:
                return first, high
            if effects.closing():
                raise Closed("the broker stops")
            if effects.now_s() - since_s > ANSWER_TIMEOUT_S:
                raise Unavailable(
                    f"journal {self._topic} has stored a record at offset {end - 1}, but a node reports {high} as its end;"
                    " this node is cut off from the other nodes"
                )
            await effects.sleep(RETRY_S)

    def _read(self, base: str, loader: Loader, position: int) -> None:
        span = f"journal read from offset {loader.first_offset} to {position}"
        self._effects.note(Severity.INFO, "state loaded", f"loaded from {base}, {span}")

    async def _read_up(self, loader: Loader, high: int) -> int:
        with self._effects.bulk():
            return await self._apply(loader, loader.first_offset, lambda: high)

    def _beginning(self, snapshot: Snapshot, stored: Mapping[int, bytes], first: int) -> Loader | None:
        try:
            loader = Loader(self._effects.fresh_engine(), snapshot, stored)
        except DamagedRecord as error:
            self._effects.note(Severity.ERROR, "outdated snapshot", f"snapshot cannot be used: {error}")
            return None
        if loader.first_offset >= first:
            return loader
        needed = f"snapshot {snapshot.id} needs journal offset {loader.first_offset}; it begins at {first}"
        self._effects.note(Severity.ERROR, "outdated snapshot", needed)
        return None

    async def _apply(self, loader: Loader, position: int, end: Callable[[], int | None]) -> int:
        """Apply records from ``position`` on, up to the end (None: not known yet). Return the offset after the last record."""
        effects = self._effects
        since_s = effects.now_s()
        while True:
            known = end()
            if known is not None and position >= known:
                return position
            if effects.closing():
                raise Closed("the broker stops")
            records = await effects.read(position)
            if records or known is None:
                since_s = effects.now_s()
            elif effects.now_s() - since_s > ANSWER_TIMEOUT_S:
                raise Unavailable(f"reading {self._topic}: no record for {ANSWER_TIMEOUT_S:.0f} s at offset {position} of {known}")
            wanted = self._wanted_end()
            for offset, value in records:
                if wanted is not None and offset >= wanted:
                    return wanted  # a record of another broker, which the fence checks
                self._apply_one(loader, offset, value)
                self.next_offset = position = offset + 1

    def _wanted_end(self) -> int | None:
        end = self._effects.wanted_end()
        if end is not None and FollowingViolation.LAST_RECORD_MISSED in self._violations:
            return end - 2  # the start record is the record before the end
        return end

    def _apply_one(self, loader: Loader, offset: int, value: bytes | None) -> None:
        place = f"journal {self._topic}, offset {offset}"
        try:
            loader.apply(offset, value)
        except ForeignRecord as error:
            self.foreign += 1
            self._effects.note(Severity.ERROR, "foreign record skipped", f"{place}: foreign record skipped: {error}")
        except RecordError as error:
            raise type(error)(f"{place}: {error}") from error
