"""What keeps the journal short and a start quick, without IO: when a round is due, what is announced, and what is trimmed up to where.

Rounds run beside the traffic, one at a time: :mod:`bascule.broker.rounds` says which steps one has. Whatever fails is tried again with the
next round: nothing rests on it but size and time.
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

#: Journal read again at a start, beside what still waits in queues: about a second of it.
SNAPSHOT_BYTES: Final = 128 << 20


class HousekeepingViolation(enum.StrEnum):
    """Rules of housekeeping that a test may break."""

    ANNOUNCEMENT_NOT_AWAITED = "older snapshots are deleted before the journal has the announcement of the new one"
    INGRESS_TRIMMED_EARLY = "the ingress topic is trimmed before the journal has its records"


class TrimmedLog(enum.StrEnum):
    """What a round trims."""

    JOURNAL = "journal"
    INGRESS = "ingress"


@dataclass(frozen=True, slots=True)
class HousekeepingLimits:
    """What bounds the journal; times in seconds."""

    snapshot_records: int  # a snapshot is due after so many
    announce_timeout_s: float
    retention: OwnersRetention
    partition: int = 0  # of the journal
    snapshot_bytes: int = SNAPSHOT_BYTES


class HousekeepingEffects(Protocol):
    """What housekeeping asks of its surroundings. What is awaited may raise Unavailable."""

    def going_on(self) -> bool:
        """Whether the epoch has not ended."""
        ...

    def spawn(self, protocol: Coroutine[Any, Any, None]) -> None:
        """Run a protocol beside what is being done. It raises nothing."""
        ...

    def waiter(self) -> Waiter[Any]:
        """A value that comes later."""
        ...

    def note(self, severity: Severity, event: str, detail: str, error: Exception | None = None) -> None:
        """Something for the log."""
        ...

    async def computed(self, calculation: Callable[[], T]) -> T:
        """The result of a calculation that takes long, made beside what is being done. Raises what it raises."""
        ...

    async def stored(self) -> Collection[int]:
        """The mids of all that the store has now."""
        ...

    async def store(self, records: Mapping[int, bytes | None]) -> None:
        """Keep messages in the store, forget those that are None."""
        ...

    async def write(self, snapshot_id: str, encoded: EncodedSnapshot) -> None:
        """Store a snapshot."""
        ...

    async def delete_older(self, snapshot_id: str) -> None:
        """Forget the snapshots that this one replaces."""
        ...

    async def pipelines(self, taken: Snapshot) -> Sequence[RetentionHold]:
        """Where pipelines stand by their committed positions: one that is not committed yet may never be."""
        ...

    async def retained_from(self, log: TrimmedLog, partition: int) -> int:
        """The offset where the time of the owner's retention begins."""
        ...

    async def first_offset(self, log: TrimmedLog, partition: int) -> int:
        """The first offset that is still there."""
        ...

    async def trim(self, log: TrimmedLog, partition: int, end: int) -> None:
        """Delete what is before ``end``."""
        ...

    async def ingress_topic_id(self) -> str | None:
        """The id of the ingress topic, if there is one."""
        ...


def _reported(work: Work, done: Waiter[Any]) -> Work:
    """Do work, and say when it is done; its error concerns nobody but who waits for it."""
    try:
        yield from work
    except Exception as error:
        done.fail(error)
    else:
        done.keep(None)


class HousekeepingProtocol:
    """The rounds of one epoch. ``engine`` and ``offsets`` are the epoch's. Has the steps that a round asks for."""

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
        self._tried = (0, 0)  # as many when a snapshot was last begun
        self._kept = (engine.journaling.epoch, 0, 0)  # offset of the last snapshot, and as many when it was taken; before it, of the start
        self._busy = False
        self._found: list[RetentionHold] = []  # as of the last snapshot
        self._trouble = ""  # why there was none the last time

    @property
    def retention_holds(self) -> list[RetentionHold]:
        """What the journal is kept for, as of the last snapshot, and what came since."""
        offset, records, size_bytes = self._kept
        reason = self._trouble or "no snapshot covers these records yet"
        return [*self._found, RetentionHold(Keeper.SNAPSHOT, "", offset, self._records - records, self._size_bytes - size_bytes, reason)]

    def appended(self, size_bytes: int) -> None:
        """A record is stored; when there are enough, a round begins."""
        self._records += 1
        self._size_bytes += size_bytes
        if self._due() and not self._busy:
            self._effects.spawn(self.rounds())

    def _due(self) -> bool:
        records, size_bytes = self._tried
        limits = self._limits
        return self._records - records >= limits.snapshot_records or self._size_bytes - size_bytes >= limits.snapshot_bytes

    async def rounds(self) -> None:
        """Snapshot, announce it, forget the older ones, trim; once more for what came meanwhile, after which nothing may come."""
        await self._alone(self._due_rounds)

    async def hand_over(self) -> None:
        """A snapshot for the next broker; to clear away what that replaces is the next one's, which waits."""
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
        """Whether the epoch has not ended."""
        return self._effects.going_on()

    async def take(self) -> Snapshot:
        """Collect the state in turns. Raises Unavailable if that takes too long, and what it raises."""
        collector = Collector(self._engine, self._offsets)
        try:
            await self.in_turns(collector.walk())
            state = await self._finished(collector)
        finally:
            collector.stop()
        return await self._effects.computed(state.snapshot)

    async def _finished(self, collector: Collector) -> CollectedState:
        """Raises TimeoutError when a stored record is not carried out in time, and what the collector raises."""
        finished: Waiter[CollectedState] = self._effects.waiter()

        def finish() -> None:
            if collector.stopped:
                return  # nobody waits any more
            self._tried = self._records, self._size_bytes
            try:
                finished.keep(collector.finish())
            except Exception as error:
                finished.fail(error)

        self._engine.journaling.between_records(finish)
        return await finished.wait(self._limits.announce_timeout_s)

    async def in_turns(self, work: Work) -> None:
        """Raises what the work raises, and Unavailable if it takes too long, or the epoch ends before it is done."""
        done = self._effects.waiter()
        self._engine.turns.begin(_reported(work, done))
        timeout_s = self._limits.announce_timeout_s
        try:
            await done.wait(timeout_s)
        except TimeoutError:
            raise Unavailable(f"the engine has not finished its work within {timeout_s:g} s") from None

    async def computed(self, calculation: Callable[[], T]) -> T:
        """Raises what the calculation raises."""
        return await self._effects.computed(calculation)

    async def stored(self) -> Collection[int]:
        """The mids of all that the store has now. Raises Unavailable."""
        return await self._effects.stored()

    async def store(self, records: Mapping[int, bytes | None]) -> None:
        """Raises Unavailable."""
        await self._effects.store(records)

    async def write(self, taken: Snapshot) -> None:
        """Raises Unavailable."""
        await self._effects.write(taken.id, await self._effects.computed(partial(snapshots.encode, taken)))

    async def announce(self, taken: Snapshot) -> None:
        """Raises TimeoutError."""
        announced = self._effects.waiter()  # which may also be told when nobody waits any more
        self._engine.journaling.add(json_entry(Op.SNAPSHOT, {"id": taken.id}))
        self._engine.journaling.tell(announced.keep, None)
        if HousekeepingViolation.ANNOUNCEMENT_NOT_AWAITED not in self._violations:
            await announced.wait(self._limits.announce_timeout_s)
        self._kept = taken.next_offset, *self._tried

    async def delete_older(self, taken: Snapshot) -> None:
        """Raises Unavailable."""
        await self._effects.delete_older(taken.id)

    async def trim(self, taken: Snapshot, held: Mapping[int, str]) -> None:
        """The journal before what the snapshot, the pipelines and the owner's retention need; and what of the ingress is journaled."""
        effects, partition = self._effects, self._limits.partition
        retained = await effects.retained_from(TrimmedLog.JOURNAL, partition)
        pipelines = await effects.pipelines(taken)
        self._found = await effects.computed(partial(holds_of, taken, pipelines, retained, self._limits.retention, held))
        needed = needed_from(taken, self._found, self._violations)
        await self._trim_to(TrimmedLog.JOURNAL, partition, needed)
        self._offsets.sizes.forget_before(needed)
        if not taken.ingress or await effects.ingress_topic_id() != taken.ingress_topic_id:
            return  # nothing has been taken of one that was created again
        for ingress, next_offset in taken.ingress.items():
            retained = await effects.retained_from(TrimmedLog.INGRESS, ingress)
            early = HousekeepingViolation.INGRESS_TRIMMED_EARLY in self._violations
            await self._trim_to(TrimmedLog.INGRESS, ingress, retained if early else min(next_offset, retained))

    async def _trim_to(self, log: TrimmedLog, partition: int, end: int) -> None:
        if end > await self._effects.first_offset(log, partition):
            crash.point("journal.trim.before")
            await self._effects.trim(log, partition, end)
            crash.point("journal.trim.after")
