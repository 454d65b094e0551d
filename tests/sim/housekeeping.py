"""The work of a simulated broker on the journal besides its traffic: it follows the journal before it serves, and keeps it short.

The rules are those of bascule.broker.following and bascule.broker.housekeeping; their effects are performed on the model of Kafka.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Final, TypeVar

from bascule.broker.engine import Engine
from bascule.broker.following import FollowingProtocol
from bascule.broker.housekeeping import HousekeepingLimits, HousekeepingProtocol, TrimmedLog
from bascule.broker.loading import Loader
from bascule.broker.retention import OwnersRetention, RetentionHold, RetentionViolation
from bascule.broker.snapshot import EncodedSnapshot, Snapshot
from bascule.journal.offsets import OffsetMap
from bascule.kafka.snapshots import BARRIER_KEY, SnapshotKeys, joined
from bascule.server.housekeeping import BARRIER_KEY as STORE_BARRIER_KEY
from bascule.writer.epochs import taken_since
from bascule.writer.pipeline_holds import PipelineHoldsProtocol, lowest
from bascule.writer.position import COMMON, Position, position_key
from bascule.writer.reading import read_behind_barrier
from tests.sim.effects import ProcessEffects, answered
from tests.sim.kafka import INGRESS, JOURNAL, SNAPSHOTS, STORE, Kafka, ToWrite
from tests.sim.partition import Record
from tests.sim.world import Process
from tests.sim.writer import PositionReader, all_positions, decoded, position_partition

T = TypeVar("T")
#: Returns from which offset on the journal is kept for diverts defined at run time, with the ids of their definitions, by name.
HeldForDiverts = Callable[[], Mapping[str, tuple[str, int]]]

#: Records of one fetch: few, so that much happens between two fetches.
FETCH_MAX: Final = 12
#: How often a standby looks for more records.
FOLLOW_MS: Final = 30.0
#: How old the state that a broker has read may be when it reads on.
DAWDLE_MS: Final = 200.0
#: Milliseconds of a load's pause for each second of the protocol.
RETRY_MS: Final = 40.0
#: Small, so that most snapshots take several records.
CHUNK_BYTES: Final = 1_500
ANNOUNCE_S: Final = 0.25
INGRESS_ID: Final = "ingress"
#: The id that drivers of the simulation write into positions.
JOURNAL_ID: Final = "id"


async def newest(kafka: Kafka, process: Process, topic: str, *, barrier_key: bytes | None = None) -> dict[bytes, bytes]:
    """Return the content of a compacted topic, read piece by piece up to its end; behind a barrier record, if there is a key for it.

    Raises Unavailable.
    """
    partition = kafka.partition(topic)
    if barrier_key is None:
        end = await answered(kafka.end_of(process, partition))
    else:
        process.world.note("load behind barriers", process.name)
        barrier = ToWrite(barrier_key, None)
        end = 1 + await answered(kafka.request(process, f"Produce {topic}", lambda: partition.store(barrier), at=partition))
    position = 0
    found: dict[bytes, bytes] = {}
    while position < end:
        records, position = await answered(kafka.fetch(process, partition, position, committed=False, count=FETCH_MAX))
        for record in records:
            key = record.key or b""
            if record.value is None:
                found.pop(key, None)
            else:
                found[key] = record.value
    return found


class Following(ProcessEffects):
    """The load for the next epoch. ``end`` is where it stops, once known; ``slowness`` is how often it is slow."""

    def __init__(self, kafka: Kafka, process: Process, fresh_engine: Callable[[], Engine], slowness: float) -> None:
        super().__init__(process)
        self._kafka, self._slowness = kafka, slowness
        self.fresh_engine = fresh_engine
        self._journal = kafka.partition(JOURNAL)
        self._protocol = FollowingProtocol(self, JOURNAL, violations=process.world.violations)
        self.end: int | None = None
        self.closed = False

    async def run(self) -> Loader:
        """Return the state of all records before ``end``. Raises Unavailable, RecordError, Closed."""
        return await self._protocol.run()

    # -- effects: see bascule.broker.following.FollowingEffects -------------------------------------------------------------

    def wanted_end(self) -> int | None:
        """Return where the load ends."""
        return self.end

    def closing(self) -> bool:
        """Return True if the state is no longer needed."""
        return self.closed

    async def recreated(self) -> bool:
        """Return False: no topic is deleted here."""
        await self._dawdle()
        return False

    async def sleep(self, delay_s: float) -> None:
        """Sleep for a scaled-down time."""
        await self.process.sleep(delay_s * RETRY_MS)

    async def snapshots(self, *, behind_barrier: bool) -> Mapping[str, bytes]:
        """Return every complete snapshot."""
        await self._dawdle()
        return joined(await newest(self._kafka, self.process, SNAPSHOTS, barrier_key=BARRIER_KEY if behind_barrier else None))

    async def stored(self, *, behind_barrier: bool) -> Mapping[int, bytes]:
        """Return the content of the store."""
        found = await newest(self._kafka, self.process, STORE, barrier_key=STORE_BARRIER_KEY if behind_barrier else None)
        return {int(key): value for key, value in found.items()}

    async def range(self) -> tuple[int, int]:
        """Return the journal's offsets."""
        journal = self._journal
        first, high = await answered(
            self._kafka.request(self.process, "ListOffsets", lambda: (journal.earliest, journal.latest()), at=journal)
        )
        await self._dawdle()
        return first, high

    async def read(self, offset: int) -> Sequence[tuple[int, bytes | None]]:
        """Return a few records."""
        records, _ = await answered(self._kafka.fetch(self.process, self._journal, offset, committed=False, count=FETCH_MAX))
        if not records:
            await self.process.sleep(FOLLOW_MS)
        return [(record.offset, record.value) for record in records]

    def bulk(self) -> AbstractContextManager[None]:
        """Return an empty context."""
        return nullcontext()

    async def _dawdle(self) -> None:
        if self.process.world.chance(self._slowness):
            self.process.world.note("read slowly", self.process.name)
            await self.process.sleep(self.process.world.random.random() * DAWDLE_MS)


class Housekeeping(ProcessEffects):
    """The rounds of one epoch, which run while ``going_on`` returns True. After ``records`` records a round is due.

    ``on_step`` is called before each request to Kafka.
    """

    def __init__(
        self, kafka: Kafka, process: Process, engine: Engine, offsets: OffsetMap, going_on: Callable[[], bool], records: int,
        on_step: Callable[[], None], held: HeldForDiverts | None = None,
    ) -> None:  # fmt: skip
        super().__init__(process)
        self._kafka = kafka
        self.going_on = going_on
        limits = HousekeepingLimits(snapshot_records=records, announce_timeout_s=ANNOUNCE_S, retention=OwnersRetention(0.0))
        self._violations = process.world.violations
        self.protocol = HousekeepingProtocol(self, limits, engine, offsets, violations=self._violations)
        self._pipelines = PipelineHolds(kafka, process, held)
        self._on_step = on_step
        self._keys = SnapshotKeys()
        self._keys_read = False

    # -- effects: see bascule.broker.housekeeping.HousekeepingEffects -------------------------------------------------------

    async def computed(self, calculation: Callable[[], T]) -> T:
        """Return the result of a calculation, which takes no time here."""
        return calculation()

    async def stored(self) -> set[int]:
        """Return the mids of all records in the store."""
        return set(map(int, await newest(self._kafka, self.process, STORE)))

    async def store(self, records: Mapping[int, bytes | None]) -> None:
        """Write all records in one batch."""
        self.process.world.note("store messages" if None not in records.values() else "forget stored messages", self.process.name)
        partition, producer = self._kafka.partition(STORE), self._kafka.new_producer()
        batch = [ToWrite(str(mid).encode(), value) for mid, value in records.items()]
        await self._request("Produce store", lambda: partition.produce(producer, 0, 0, batch, None))

    async def write(self, snapshot_id: str, encoded: EncodedSnapshot) -> None:
        """Write a snapshot in pieces."""
        records = self._keys.to_write(snapshot_id, encoded, CHUNK_BYTES)
        await self._send(records)
        self._keys.written(records)

    async def delete_older(self, snapshot_id: str) -> None:
        """Delete the pieces of older snapshots, one after another."""
        if not self._keys_read:
            self._keys.add(await newest(self._kafka, self.process, SNAPSHOTS))
            self._keys_read = True
        older = self._keys.to_delete(snapshot_id)
        await self._send(dict.fromkeys(older))
        self._keys.deleted(older)

    async def pipelines(self, taken: Snapshot) -> Sequence[RetentionHold]:
        """Return the pins of the diverts."""
        return await self._pipelines.protocol.found(taken)

    async def retained_from(self, log: TrimmedLog, partition: int) -> int:
        """Return the last stable offset: no retention is configured here."""
        return self._kafka.partition(_topic(log), partition).stable

    async def first_offset(self, log: TrimmedLog, partition: int) -> int:
        """Return the first offset that was not trimmed."""
        return self._kafka.partition(_topic(log), partition).earliest

    async def trim(self, log: TrimmedLog, partition: int, end: int) -> None:
        """Delete records before an offset (DeleteRecords)."""
        topic = _topic(log)
        trimmed = self._kafka.partition(topic, partition)
        self.process.world.note(f"trim {topic}", self.process.name)
        await self._request("DeleteRecords", lambda: trimmed.trim(end))

    async def ingress_topic_id(self) -> str | None:
        """Return the id of the ingress topic, which is never deleted."""
        return INGRESS_ID

    async def _send(self, records: Mapping[bytes, bytes | None]) -> None:
        """Send records one after another and without idempotence: a repeated record may be stored twice, and late."""
        partition = self._kafka.partition(SNAPSHOTS)
        for key, value in records.items():
            record = ToWrite(key, value)
            await self._request("Produce snapshots", lambda record=record: partition.store(record))  # type: ignore[misc]

    async def _request(self, what: str, carry_out: Callable[[], object]) -> None:
        self._on_step()
        await answered(self._kafka.request(self.process, what, carry_out))


class PipelineHolds:
    """The pins of pipelines in one epoch (``bascule.writer.pipeline_holds.PipelineHoldsEffects``).

    ``held`` returns what the broker keeps for diverts that are defined at run time; None in a run without such diverts.
    """

    def __init__(self, kafka: Kafka, process: Process, held: HeldForDiverts | None) -> None:
        self._kafka, self._process = kafka, process
        self._violations = process.world.violations
        self._apart = held is not None  # there are positions besides the common one
        self.protocol = PipelineHoldsProtocol(self, JOURNAL, 0, defined=held or dict, violations=self._violations)

    def wall_s(self) -> float:
        """Return the process's wall clock."""
        return self._process.wall_ms / 1000

    def note_released(self, hold: RetentionHold) -> None:
        """Do nothing: no quota is configured here."""

    async def stored(self) -> Mapping[str, Position]:
        """Return the stored positions of the diverts."""
        partition = position_partition(self._kafka, position_key(COMMON, JOURNAL, 0))
        if RetentionViolation.UNCOMMITTED_POSITIONS_COUNT in self._violations:
            records, _ = await answered(self._kafka.fetch(self._process, partition, 0, committed=False))
            return {(record.key or b"").decode(): decoded(record.value) for record in records if record.value}
        if self._apart:
            return lowest(await all_positions(self._kafka, self._process), await all_positions(self._kafka, self._process))
        return await read_behind_barrier(PositionReader(self._kafka, self._process, partition), violations=self._violations)

    async def journal_id(self) -> str:
        """Return the journal's id: the journal is never recreated."""
        return JOURNAL_ID

    async def taken_since(self, common: Position | None, end: int) -> Mapping[str, int]:
        """Return the offsets by the epochs in the journal."""
        journal = self._kafka.partition(JOURNAL)
        records, _ = await answered(self._kafka.fetch(self._process, journal, journal.earliest, committed=False))
        return taken_since(common, ReadJournal(journal.earliest, records), end)

    async def said(self, name: str) -> tuple[int, str]:
        """Return nothing: drivers publish nothing here."""
        return -1, ""


class ReadJournal:
    """The records that were read (``bascule.writer.epochs.JournalHistory``)."""

    def __init__(self, earliest: int, records: Sequence[Record]) -> None:
        self._earliest, self._records = earliest, records

    def earliest(self) -> int:
        return self._earliest

    def latest(self) -> int:
        return self._records[-1].offset + 1 if self._records else self._earliest

    def records(self, start: int, end: int) -> Iterator[_ReadRecord]:
        return (_ReadRecord(record) for record in self._records if start <= record.offset < end)


class _ReadRecord:
    def __init__(self, record: Record) -> None:
        self._record = record

    def offset(self) -> int:
        return self._record.offset

    def key(self) -> bytes | None:
        return self._record.key

    def value(self) -> bytes | None:
        return self._record.value


def _topic(log: TrimmedLog) -> str:
    return JOURNAL if log is TrimmedLog.JOURNAL else INGRESS
