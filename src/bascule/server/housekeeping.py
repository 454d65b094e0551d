"""What keeps the journal short and a start quick: snapshots, the store of old messages, and the end of what nobody needs.

Runs beside the traffic, one round at a time. Whatever fails is tried again with the next round: nothing rests on it but size and time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from bascule.broker import snapshot as snapshots
from bascule.broker.snapshot import Snapshot
from bascule.core import crash
from bascule.core.errors import BasculeError
from bascule.journal.records import Op, json_entry
from bascule.kafka.admin import Topics
from bascule.kafka.background import in_background
from bascule.kafka.compacted import Appender, Outgoing, trim
from bascule.kafka.epochs import taken_since
from bascule.kafka.history import TopicHistory
from bascule.kafka.log import PartitionReader
from bascule.kafka.positions import APART, BEGUN, COMMON, POSITION_PARTITIONS, Position, PositionReader, position_key
from bascule.kafka.snapshots import SnapshotStore

if TYPE_CHECKING:
    from bascule.broker.engine import Engine
    from bascule.journal.offsets import OffsetMap
    from bascule.server.epoch import JournalPlace

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Journal read again at a start, beside what still waits in queues: about a second of it.
SNAPSHOT_BYTES = 128 << 20
#: How long Kafka may take to store what a round writes.
STORE_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class Pin:
    """A pipeline for which the journal is kept, and how much of it is behind its position."""

    pipeline: str
    offset: int
    records: int
    bytes: int
    released: bool  # beyond the owner's quota: the journal is trimmed all the same


class StoredMessages:
    """The compacted topic of messages that have grown old, by mid. Blocking: to be used off the event loop."""

    def __init__(self, kafka: Mapping[str, Any], topic: str) -> None:
        self._kafka = kafka
        self._topic = topic
        self._next_offset = 0
        self._mids: set[int] = set()

    def read(self) -> dict[int, bytes]:
        """All of them. Raises Unavailable."""
        return {mid: value for mid, value in dict(self._records()).items() if value is not None}

    def mids_now(self) -> set[int]:
        """Of all of them, also of those that came after ``read``. Raises Unavailable."""
        for _ in self._records():
            pass
        return set(self._mids)

    def _records(self) -> Iterator[tuple[int, bytes | None]]:
        """What has been written since the last time; None for what is gone."""
        reader = PartitionReader(self._kafka, self._topic, 0)
        try:
            reader.seek(max(reader.range()[0], self._next_offset))
            for message in reader.to_end():
                mid, value = int(message.key() or b""), message.value()
                if value is None:
                    self._mids.discard(mid)
                else:
                    self._mids.add(mid)
                yield mid, None if value is None else bytes(value)
                self._next_offset = (message.offset() or 0) + 1
        finally:
            reader.close()

    def write(self, records: Mapping[int, bytes | None]) -> None:
        """Keep messages, forget those that are None; when this returns, Kafka has it. Raises Unavailable."""
        appender = Appender(self._kafka)
        try:
            futures = [appender.append(Outgoing(self._topic, str(mid).encode(), value, partition=0)) for mid, value in records.items()]
            for future in futures:
                future.result(STORE_TIMEOUT_S)
        finally:
            appender.close()


class Housekeeping:
    """The rounds of one epoch. ``engine``, ``offsets`` and ``store`` are the epoch's; ``running`` says whether it goes on."""

    def __init__(self, place: JournalPlace, engine: Engine, offsets: OffsetMap, store: StoredMessages, running: Callable[[], bool]) -> None:
        self.place = place
        self._engine = engine
        self._offsets = offsets
        self._running = running
        self._loop = asyncio.get_running_loop()
        self._snapshots = SnapshotStore(place.kafka, place.snapshots_topic)
        self._store = store
        self._stored: set[int] = set()  # mids that are there
        self._first = True
        self._sequences = deque([engine.journaling.sequence] * 2, maxlen=2)  # of the last two snapshots: what is older has come to stay
        self._records = 0
        self._size_bytes = 0
        self._all_records = 0
        self._all_bytes = 0
        self._task: asyncio.Task[None] | None = None  # the loop itself keeps no hold of it
        self._busy = False
        self.pins: list[Pin] = []
        self._taken: dict[Position | None, dict[str, int]] = {}

    def appended(self, size_bytes: int) -> None:
        """A record is stored; when there are enough, a round begins."""
        self._records += 1
        self._size_bytes += size_bytes
        if self._due() and not self._busy:
            self._task = self._loop.create_task(self.rounds())

    def _due(self) -> bool:
        return self._records >= self.place.snapshot_records or self._size_bytes >= SNAPSHOT_BYTES

    async def rounds(self) -> None:
        """Snapshot, announce it, forget the older ones, trim; once more for what came meanwhile, after which nothing may come."""
        await self._alone(self._rounds)

    async def hand_over(self) -> None:
        """A snapshot for the next broker; to clear away what that replaces is the next one's, which waits."""
        await self._alone(self._snapshot)

    async def _alone(self, work: Callable[[], Awaitable[object]]) -> None:
        if self._busy:
            return
        self._busy = True
        try:
            await work()
        except TimeoutError:
            log.warning("no snapshot this time: its announcement is not stored yet")
        except BasculeError as error:
            log.warning("housekeeping: %s", error)
        finally:
            self._busy = False

    async def _rounds(self) -> None:
        await self._round()
        while self._due() and self._running():
            await self._round()

    async def _round(self) -> None:
        taken = await self._snapshot()
        if taken is None:
            return
        crash.point("snapshot.delete.before")
        await self._off_loop(self._snapshots.delete_older, taken.id)
        crash.point("snapshot.delete.after")
        gone = self._stored.difference(taken.stored)
        if gone:
            crash.point("store.forget.before")
            await self._off_loop(self._store.write, dict.fromkeys(gone))
            crash.point("store.forget.after")
            self._stored -= gone
        if self._running():
            await self._off_loop(self._trim, taken)

    async def _off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(in_background(partial(function, *arguments), "housekeeping"))

    async def _snapshot(self) -> Snapshot | None:
        engine = self._engine
        if self._first:
            # Also what the broker before us has moved there while this one stood by: it may have trimmed the journal behind it.
            self._stored = await self._off_loop(self._store.mids_now)
            self._first = False
        taken = snapshots.take(engine, self._offsets)
        crash.point("snapshot.taken")
        self._all_records += self._records
        self._all_bytes += self._size_bytes
        self._records = self._size_bytes = 0
        if self._stored:
            taken.stored = sorted(self._stored.intersection(chain.from_iterable(taken.mids)))
        moved = snapshots.pinning(engine, taken, self._sequences[0])
        if moved:
            records = {mid: snapshots.stored_record(engine, message, queue) for mid, (message, queue) in moved.items()}
            await self._off_loop(self._store.write, records)
            crash.point("store.write.after")
            self._stored.update(moved)
            taken.stored = sorted({*taken.stored, *moved})
        crash.point("snapshot.write.before")
        await self._off_loop(lambda: self._snapshots.write(taken.id, snapshots.encode(taken)))
        crash.point("snapshot.write.after")
        if not self._running():
            return None
        announced = asyncio.Event()  # which may also be set when nobody waits any more
        engine.journaling.add(json_entry(Op.SNAPSHOT, {"id": taken.id}))
        engine.journaling.then(announced.set)
        await asyncio.wait_for(announced.wait(), self.place.append_timeout_s)
        crash.point("snapshot.announce.after")
        self._sequences.append(taken.sequence)
        return taken

    # -- trimming, off the loop ----------------------------------------------------------------------------------------

    def _trim(self, taken: Snapshot) -> None:
        """The journal before what the snapshot, the pipelines and the owner's retention need; and what of the ingress is journaled."""
        place = self.place
        self.pins = self._pins(taken.next_offset)
        kept = [pin.offset for pin in self.pins if not pin.released]
        self._trim_to(place.topic, place.partition, min(taken.first_offset(), *kept, taken.next_offset))
        for partition, next_offset in taken.ingress.items():
            self._trim_to(place.ingress_topic, partition, next_offset)

    def _trim_to(self, topic: str, partition: int, end: int) -> None:
        history = TopicHistory(self.place.kafka, topic, partition)
        retained = history.at_time(int((time.time() - self.place.retention_s) * 1000))
        if min(end, retained) > history.earliest():
            crash.point("journal.trim.before")
            trim(self.place.kafka, topic, {partition: min(end, retained)})
            crash.point("journal.trim.after")

    def _pins(self, end: int) -> list[Pin]:
        """Of committed positions only: one that is not committed yet may never be."""
        place = self.place
        positions = self._positions()
        mean_bytes = self._all_bytes / self._all_records if self._all_records else 0.0
        quota_bytes = place.pinned_bytes_max
        pins = []
        for key, position in sorted(positions.items()):
            # Where a divert once began is remembered, and needs nothing of the journal.
            if key.startswith(BEGUN) or position.vacant:
                continue
            if position.topic == place.topic and position.partition == place.partition:
                behind = max(0, end - position.offset)
                size_bytes = int(behind * mean_bytes)
                pins.append(Pin(key, position.offset, behind, size_bytes, bool(quota_bytes and size_bytes > quota_bytes)))
        for pin in pins:
            if pin.released:
                log.error(
                    "pipeline %s is %d records (%d bytes) behind, more than journal.pinned_bytes allows: what it has not read is deleted",
                    pin.pipeline, pin.records, pin.bytes,
                )  # fmt: skip
        return pins

    def _positions(self) -> dict[str, Position]:
        """Of the pipelines, and of exclusive diverts that none stands for yet: where begins what they took."""
        place = self.place
        if place.positions_topic not in Topics(place.kafka).partitions():
            return self._unclaimed(None)
        reader = PositionReader(place.kafka, place.positions_topic, range(POSITION_PARTITIONS))
        try:
            positions = reader.read()
        finally:
            reader.close()
        return self._unclaimed(positions.get(position_key(COMMON, place.topic, place.partition))) | positions

    def _unclaimed(self, common: Position | None) -> dict[str, Position]:
        place = self.place
        if common is not None and not common.vacant:
            return {}
        if common is not None and common.topic_id != Topics(place.kafka).ids([place.topic]).get(place.topic):
            common = None  # in an earlier journal of the same name
        if common not in self._taken:  # it changes with an epoch, and with the position
            history = TopicHistory(place.kafka, place.topic, place.partition)
            self._taken = {common: taken_since(common, history, history.latest())}
        return {
            position_key(f"{APART}{name}", place.topic, place.partition): Position(
                place.topic, "", place.partition, offset, members=(name,)
            )
            for name, offset in self._taken[common].items()
        }
