"""Keeps the journal of an epoch short: it performs the effects of :mod:`bascule.broker.housekeeping` off the event loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from bascule.broker.housekeeping import HousekeepingProtocol, TrimmedLog
from bascule.broker.retention import RetentionHold
from bascule.broker.snapshot import EncodedSnapshot, Snapshot
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.kafka.admin import Topics
from bascule.kafka.appender import Appender, await_stored
from bascule.kafka.compacted import stored_barrier, trim
from bascule.kafka.history import TopicHistory
from bascule.kafka.log import PartitionReader, offset_of
from bascule.kafka.snapshots import SnapshotStore
from bascule.server.effects import LoopEffects
from bascule.server.pipeline_holds import PipelineHolds
from bascule.server.stored_values import StoredValues

if TYPE_CHECKING:
    from bascule.broker.engine import Engine
    from bascule.journal.offsets import OffsetMap
    from bascule.server.epoch import JournalPlace

log = get_log(__name__)

T = TypeVar("T")

#: Key of barrier records in the store. Readers, also those of earlier releases, take such a record for the deletion of a message that never
#: existed.
BARRIER_KEY = b"0"
#: How long Kafka may take to store what a round writes.
STORE_TIMEOUT_S = 60.0


class StoredSnapshot(NamedTuple):
    """A snapshot that Kafka has stored: its size in bytes, and the time in seconds since 1970 at which it was stored."""

    size_bytes: int
    stored_s: float


#: Before the first snapshot of an epoch.
NO_SNAPSHOT: Final = StoredSnapshot(0, 0.0)


class StoredMessages:
    """The compacted topic of old messages, by message id. Blocking: use it off the event loop."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, directory: Path | None = None) -> None:
        """Begin before the first record. ``directory`` is for messages that ``read`` finds; None is the system's temporary directory."""
        self._kafka = kafka
        self._topic = topic
        self._next_offset = 0
        self._mids: set[int] = set()
        self._values = StoredValues(directory)

    def read(self, *, behind_barrier: bool = False) -> Mapping[int, bytes]:
        """Return all messages, which are kept until ``release``. Raises Unavailable.

        No decision may depend on a read without a barrier, because a former leader may answer.
        """
        barrier = stored_barrier(self._kafka, self._topic, BARRIER_KEY) if behind_barrier else -1
        try:
            for mid, value in self._records(barrier):
                if value is None:
                    self._values.forget(mid)
                else:
                    self._values.keep(mid, value)
        except OSError as error:
            raise Unavailable(f"messages of topic {self._topic} cannot be written to a temporary file: {error}") from error
        return self._values

    def release(self) -> None:
        """Delete the messages that ``read`` has kept."""
        self._values.close()

    def mids_now(self) -> list[int]:
        """Return the ids of all messages, including those stored after ``read``. Raises Unavailable."""
        for _ in self._records():
            pass
        return [*self._mids]

    def _records(self, barrier: int = -1) -> Iterator[tuple[int, bytes | None]]:
        """Yield the records since the previous read; None for a deleted message."""
        reader = PartitionReader(self._kafka, self._topic, 0)
        try:
            reader.seek(max(reader.range()[0], self._next_offset))
            for message in reader.to_end(barrier):
                key, value = bytes(message.key() or b""), message.value()
                if not key.isdigit():
                    log.error("foreign record skipped", topic=self._topic, offset=message.offset())
                    continue
                mid = int(key)
                if value is None:
                    self._mids.discard(mid)
                else:
                    self._mids.add(mid)
                yield mid, None if value is None else bytes(value)
                self._next_offset = offset_of(message) + 1
        finally:
            reader.close()

    def write(self, records: Mapping[int, bytes | None]) -> None:
        """Store messages, and delete those that are None; return when Kafka has stored the change. Raises Unavailable."""
        appender = Appender(self._kafka)
        try:
            futures = [appender.append(Outgoing(self._topic, str(mid).encode(), value, partition=0)) for mid, value in records.items()]
            for future in futures:
                await_stored(future, STORE_TIMEOUT_S)
        finally:
            appender.close()


class Housekeeping:
    """The housekeeping of one epoch, with its ``engine``, ``offsets`` and ``store``; ``running`` tells whether the epoch continues."""

    def __init__(
        self, place: JournalPlace, engine: Engine, offsets: OffsetMap, store: StoredMessages, running: Callable[[], bool],
        held_for_diverts: Callable[[], Mapping[str, tuple[str, int]]] = dict,
    ) -> None:  # fmt: skip
        """``held_for_diverts`` returns what ``DivertCoverage.held`` has."""
        self._effects = _Effects(place, store, running, held_for_diverts)
        self.protocol = HousekeepingProtocol(self._effects, place.housekeeping_limits, engine, offsets)

    @property
    def retention_holds(self) -> list[RetentionHold]:
        """Return what the journal is kept for, as of the last snapshot, and the records after it."""
        return self.protocol.retention_holds

    @property
    def snapshot(self) -> StoredSnapshot:
        """Return the last snapshot of the epoch."""
        return self._effects.snapshot

    async def rounds(self) -> None:
        """Run a round, and another one if one was requested meanwhile."""
        await self.protocol.rounds()

    async def hand_over(self) -> None:
        """Make a snapshot for the next broker."""
        await self.protocol.hand_over()


class _Effects(LoopEffects):
    """The effects of housekeeping: see bascule.broker.housekeeping.HousekeepingEffects."""

    def __init__(
        self, place: JournalPlace, store: StoredMessages, running: Callable[[], bool],
        held_for_diverts: Callable[[], Mapping[str, tuple[str, int]]],
    ) -> None:  # fmt: skip
        super().__init__("housekeeping")
        self._place = place
        self._store = store
        self.going_on = running
        self._snapshots = SnapshotStore(place.kafka, place.topics.snapshots)
        self._pipelines = PipelineHolds(place, held_for_diverts)
        self.snapshot = NO_SNAPSHOT

    async def computed(self, calculation: Callable[[], T]) -> T:
        """Calculate off the loop: the snapshot of a million messages takes a large part of a second. Raises what the calculation raises."""
        return await self.off_loop(calculation)

    async def stored(self) -> Collection[int]:
        """Return the mids of all records in the store. Raises Unavailable."""
        return await self.off_loop(self._store.mids_now)

    async def store(self, records: Mapping[int, bytes | None]) -> None:
        """Write records to the store. Raises Unavailable."""
        await self.off_loop(self._store.write, records)

    async def write(self, snapshot_id: str, encoded: EncodedSnapshot) -> None:
        """Store a snapshot. Raises Unavailable."""
        self.snapshot = await self.off_loop(self._written, snapshot_id, encoded)

    def _written(self, snapshot_id: str, encoded: EncodedSnapshot) -> StoredSnapshot:
        self._snapshots.write(snapshot_id, encoded)
        return StoredSnapshot(encoded.size_bytes, time.time())

    async def delete_older(self, snapshot_id: str) -> None:
        """Delete the snapshots that this one replaces. Raises Unavailable."""
        await self.off_loop(self._snapshots.delete_older, snapshot_id)

    async def pipelines(self, taken: Snapshot) -> Sequence[RetentionHold]:
        """Return the pins of pipelines. Raises Unavailable."""
        return await self.off_loop(self._pipelines.found, taken)

    async def retained_from(self, log: TrimmedLog, partition: int) -> int:
        """Return the offset at which the retention time begins. Raises Unavailable."""
        return await self.off_loop(self._retained_from, log, partition)

    def _retained_from(self, log: TrimmedLog, partition: int) -> int:
        begins_ms = int((time.time() - self._place.retention.period_s) * 1000)
        return TopicHistory(self._place.kafka, self._topic(log), partition).at_time(begins_ms)

    async def first_offset(self, log: TrimmedLog, partition: int) -> int:
        """Return the first offset that still exists. Raises Unavailable."""
        return await self.off_loop(lambda: TopicHistory(self._place.kafka, self._topic(log), partition).earliest())

    async def trim(self, log: TrimmedLog, partition: int, end: int) -> None:
        """Delete the records before an offset. Raises Unavailable."""
        await self.off_loop(trim, self._place.kafka, self._topic(log), {partition: end})

    async def ingress_topic_id(self) -> str | None:
        """Return the id of the ingress topic, or None. Raises Unavailable."""
        topic = self._place.topics.ingress
        return (await self.off_loop(lambda: Topics(self._place.kafka).ids([topic]))).get(topic)

    def _topic(self, log: TrimmedLog) -> str:
        return self._place.topics.journal if log is TrimmedLog.JOURNAL else self._place.topics.ingress
