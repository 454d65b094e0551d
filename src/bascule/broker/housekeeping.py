"""Housekeeping, without IO: when a snapshot is due, how it is announced, and how far the journal and the ingress topic are trimmed.

Rounds run beside the traffic, one at a time; :mod:`bascule.broker.rounds` has the steps of a round. A step that fails is tried again in the
next round. Failures only cost disk space and time at a start.
"""

from __future__ import annotations

import enum
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from bascule.broker import snapshot as snapshots
from bascule.broker.collecting import CollectedState, Collector
from bascule.broker.engine import Engine
from bascule.broker.retention import Keeper, OwnersRetention, RetentionHold, holds_of, needed_from
from bascule.broker.rounds import Rounds
from bascule.broker.snapshot import EncodedSnapshot, Snapshot
from bascule.broker.turns import Work
from bascule.core import crash
from bascule.core.effects import Severity, Waiter
from bascule.core.errors import BasculeError, Unavailable
from bascule.journal.offsets import OffsetMap
from bascule.journal.records import Op, json_entry

T = TypeVar("T")

#: Bytes of journal after which a snapshot is due. A start reads about a second for this size, besides the messages that still wait in
#: queues.
SNAPSHOT_BYTES: Final = 128 << 20


class HousekeepingViolation(enum.StrEnum):
    """Rules of housekeeping that a test can break."""

    ANNOUNCEMENT_NOT_AWAITED = "older snapshots are deleted before the journal has the announcement of the new one"
    INGRESS_TRIMMED_EARLY = "the ingress topic is trimmed before the journal has its records"


class TrimmedLog(enum.StrEnum):
    """The topics that a round trims."""

    JOURNAL = "journal"
    INGRESS = "ingress"


@dataclass(frozen=True, slots=True)
class HousekeepingLimits:
    """The limits of housekeeping; times in seconds."""

    snapshot_records: int  # a snapshot is due after this many records
    announce_timeout_s: float
    retention: OwnersRetention
    partition: int = 0  # of the journal
    snapshot_bytes: int = SNAPSHOT_BYTES


class HousekeepingEffects(Protocol):
    """The effects of housekeeping. Coroutines may raise Unavailable."""

    def going_on(self) -> bool:
        """Return True while the epoch runs."""
        ...

    def spawn(self, protocol: Coroutine[Any, Any, None]) -> None:
        """Run a protocol concurrently. The protocol raises nothing."""
        ...

    def waiter(self) -> Waiter[Any]:
        """Return a waiter for a later value."""
        ...

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        """Write an event to the log."""
        ...

    async def computed(self, calculation: Callable[[], T]) -> T:
        """Return the result of a long calculation that runs concurrently. Raises the error of the calculation."""
        ...

    async def stored(self) -> Collection[int]:
        """Return the mids of all records in the store."""
        ...

    async def store(self, records: Mapping[int, bytes | None]) -> None:
        """Write records to the store by mid; None deletes a record."""
        ...

    async def write(self, snapshot_id: str, encoded: EncodedSnapshot) -> None:
        """Store a snapshot."""
        ...

    async def delete_older(self, snapshot_id: str) -> None:
        """Delete the snapshots that this one replaces."""
        ...

    async def pipelines(self, taken: Snapshot) -> Sequence[RetentionHold]:
        """Return the pins of pipelines, by committed positions only: a position that is not committed yet may be aborted."""
        ...

    async def retained_from(self, log: TrimmedLog, partition: int) -> int:
        """Return the offset at which the configured retention time begins."""
        ...

    async def first_offset(self, log: TrimmedLog, partition: int) -> int:
        """Return the first offset that still exists."""
        ...

    async def trim(self, log: TrimmedLog, partition: int, end: int) -> None:
        """Delete the records before the offset ``end``."""
        ...

    async def ingress_topic_id(self) -> str | None:
        """Return the id of the ingress topic, or None if the topic does not exist."""
        ...


def _reported(work: Work, done: Waiter[Any]) -> Work:
    """Run work and report its end to ``done``. An error concerns only the caller that waits for it."""
    try:
        yield from work
    except Exception as error:
        done.fail(error)
    else:
        done.keep(None)


class HousekeepingProtocol:
    """The rounds of one epoch, and the steps that a round calls. ``engine`` and ``offsets`` are those of the epoch."""

    def __init__(
        self, effects: HousekeepingEffects, limits: HousekeepingLimits, engine: Engine, offsets: OffsetMap,
        *, violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:  # fmt: skip
        self._effects = effects
        self._limits = limits
        self._engine = engine
        self._offsets = offsets
        self._violations = violations
        self._rounds = Rounds(self, engine, violations=violations)
        self._records = 0  # stored in this epoch
        self._size_bytes = 0
        self._tried = (0, 0)  # the two counts when the last snapshot was begun
        self._kept = (engine.journaling.epoch, 0, 0)  # next offset, records and bytes of the last snapshot (or the start)
        self._busy = False
        self._found: list[RetentionHold] = []  # as of the last snapshot
        self._trouble = ""  # why the last round made no snapshot

    @property
    def retention_holds(self) -> list[RetentionHold]:
        """Return the pins of the journal as of the last snapshot, and the pin of the records that no snapshot covers yet."""
        offset, records, size_bytes = self._kept
        reason = self._trouble or "no snapshot covers these records yet"
        return [*self._found, RetentionHold(Keeper.SNAPSHOT, "", offset, self._records - records, self._size_bytes - size_bytes, reason)]

    def appended(self, size_bytes: int) -> None:
        """Note that a record is stored. Begin a round if a snapshot is due."""
        self._records += 1
        self._size_bytes += size_bytes
        if self._due() and not self._busy:
            self._effects.spawn(self.rounds())

    def _due(self) -> bool:
        records, size_bytes = self._tried
        limits = self._limits
        return self._records - records >= limits.snapshot_records or self._size_bytes - size_bytes >= limits.snapshot_bytes

    async def rounds(self) -> None:
        """Run a round: snapshot, announcement, deletion of older snapshots, trim. Run another one if a snapshot is due again meanwhile."""
        await self._alone(self._due_rounds)

    async def hand_over(self) -> None:
        """Make a snapshot for the next broker. The next broker, which is waiting, deletes the older snapshots and trims."""
        await self._alone(self._rounds.snapshot)

    async def _alone(self, work: Callable[[], Awaitable[object]]) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            await work()
            self._trouble = ""
        except TimeoutError:
            self._trouble = "no snapshot in this round: Kafka has not stored its announcement yet"
            self._effects.note(Severity.WARNING, "housekeeping round failed", self._trouble)
        except Exception as error:
            self._trouble = f"housekeeping: {error}"
            self._effects.note(
                Severity.WARNING, "housekeeping round failed", self._trouble, None if isinstance(error, BasculeError) else error
            )
        finally:
            self._busy = False

    async def _due_rounds(self) -> None:
        await self._rounds.round()
        while self._due() and self.going_on():
            await self._rounds.round()

    # -- the steps of a round: see bascule.broker.rounds.Steps ---------------------------------------------------------

    def going_on(self) -> bool:
        """Return True while the epoch runs."""
        return self._effects.going_on()

    async def take(self) -> Snapshot:
        """Collect the state in turns and return its snapshot.

        Raises Unavailable if this takes too long, and the errors of the collector.
        """
        collector = Collector(self._engine, self._offsets)
        try:
            await self.in_turns(collector.walk())
            state = await self._finished(collector)
        finally:
            collector.stop()
        return await self._effects.computed(state.snapshot)

    async def _finished(self, collector: Collector) -> CollectedState:
        """Finish the collector between two records.

        Raises TimeoutError if no stored record is carried out in time, and the collector's errors.
        """
        finished: Waiter[CollectedState] = self._effects.waiter()

        def finish() -> None:
            if collector.stopped:
                return  # nobody waits for the result any more
            self._tried = self._records, self._size_bytes
            try:
                finished.keep(collector.finish())
            except Exception as error:
                finished.fail(error)

        self._engine.journaling.between_records(finish)
        return await finished.wait(self._limits.announce_timeout_s)

    async def in_turns(self, work: Work) -> None:
        """Do work in the turns of the engine.

        Raises the error of the work; Unavailable if it takes too long, or if the epoch ends before.
        """
        done = self._effects.waiter()
        self._engine.turns.begin(_reported(work, done))
        timeout_s = self._limits.announce_timeout_s
        try:
            await done.wait(timeout_s)
        except TimeoutError:
            raise Unavailable(f"the engine has not finished its work within {timeout_s:g} s") from None

    async def computed(self, calculation: Callable[[], T]) -> T:
        """Return the result of a calculation that runs concurrently. Raises the error of the calculation."""
        return await self._effects.computed(calculation)

    async def stored(self) -> Collection[int]:
        """Return the mids of all records in the store. Raises Unavailable."""
        return await self._effects.stored()

    async def store(self, records: Mapping[int, bytes | None]) -> None:
        """Write records to the store. Raises Unavailable."""
        await self._effects.store(records)

    async def write(self, taken: Snapshot) -> None:
        """Encode and store a snapshot. Raises Unavailable."""
        await self._effects.write(taken.id, await self._effects.computed(partial(snapshots.encode, taken)))

    async def announce(self, taken: Snapshot) -> None:
        """Announce a snapshot in the journal and wait until the announcement is stored. Raises TimeoutError."""
        announced = self._effects.waiter()  # it may be told after nobody waits any more
        self._engine.journaling.add(json_entry(Op.SNAPSHOT, {"id": taken.id}))
        self._engine.journaling.tell(announced.keep, None)
        if HousekeepingViolation.ANNOUNCEMENT_NOT_AWAITED not in self._violations:
            await announced.wait(self._limits.announce_timeout_s)
        self._kept = taken.next_offset, *self._tried

    async def delete_older(self, taken: Snapshot) -> None:
        """Delete the snapshots that this one replaces. Raises Unavailable."""
        await self._effects.delete_older(taken.id)

    async def trim(self, taken: Snapshot, branch: str) -> None:
        """Trim the journal up to what the snapshot, the pipelines and the retention need, and the ingress topic up to what is journaled."""
        effects, partition = self._effects, self._limits.partition
        retained = await effects.retained_from(TrimmedLog.JOURNAL, partition)
        pipelines = await effects.pipelines(taken)
        self._found = await effects.computed(partial(holds_of, taken, pipelines, retained, self._limits.retention, branch))
        needed = needed_from(taken, self._found, self._violations)
        await self._trim_to(TrimmedLog.JOURNAL, partition, needed)
        self._offsets.sizes.forget_before(needed)
        if not taken.ingress or await effects.ingress_topic_id() != taken.ingress_topic_id:
            return  # the topic was recreated, and none of its records is taken yet
        for ingress, next_offset in taken.ingress.items():
            retained = await effects.retained_from(TrimmedLog.INGRESS, ingress)
            early = HousekeepingViolation.INGRESS_TRIMMED_EARLY in self._violations
            await self._trim_to(TrimmedLog.INGRESS, ingress, retained if early else min(next_offset, retained))

    async def _trim_to(self, log: TrimmedLog, partition: int, end: int) -> None:
        if end > await self._effects.first_offset(log, partition):
            crash.point("journal.trim.before")
            await self._effects.trim(log, partition, end)
            crash.point("journal.trim.after")
