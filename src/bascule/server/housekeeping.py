"""What keeps the journal short and a start quick: snapshots, the store of old messages, and the end of what nobody needs.

Runs beside the traffic, one round at a time. Whatever fails is tried again with the next round: nothing rests on it but size and time.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from bascule.broker import snapshot as snapshots
from bascule.broker.rounds import Rounds
from bascule.broker.snapshot import Snapshot
from bascule.core import crash
from bascule.core.errors import BasculeError
from bascule.core.kafka_records import Outgoing
from bascule.core.log import get_log
from bascule.journal.records import Op, json_entry
from bascule.kafka.admin import Topics
from bascule.kafka.compacted import Appender, await_stored, trim
from bascule.kafka.history import TopicHistory
from bascule.kafka.log import PartitionReader
from bascule.kafka.snapshots import SnapshotStore
from bascule.server.pins import Keeper, Pin, Pins
from bascule.threads.background import in_background

if TYPE_CHECKING:
    from bascule.broker.engine import Engine
    from bascule.journal.offsets import OffsetMap
    from bascule.server.epoch import JournalPlace

log = get_log(__name__)

T = TypeVar("T")

#: Journal read again at a start, beside what still waits in queues: about a second of it.
SNAPSHOT_BYTES = 128 << 20
#: How long Kafka may take to store what a round writes.
STORE_TIMEOUT_S = 60.0


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
                key, value = bytes(message.key() or b""), message.value()
                if not key.isdigit():
                    log.error("store %s, offset %s: foreign record passed over", self._topic, message.offset())
                    continue
                mid = int(key)
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
                await_stored(future, STORE_TIMEOUT_S)
        finally:
            appender.close()


class Housekeeping:
    """The rounds of one epoch. ``engine``, ``offsets`` and ``store`` are the epoch's; ``running`` says whether it goes on."""

    def __init__(self, place: JournalPlace, engine: Engine, offsets: OffsetMap, store: StoredMessages, running: Callable[[], bool]) -> None:
        self.place = place
        self._engine = engine
        self._running = running
        self._loop = asyncio.get_running_loop()
        self._snapshots = SnapshotStore(place.kafka, place.topics.snapshots)
        self._store = store
        self._rounds = Rounds(self, engine, offsets)
        self._records = 0  # stored in this epoch
        self._size_bytes = 0
        self._tried = (0, 0)  # as many when a snapshot was last begun
        self._kept = (engine.journaling.epoch, 0, 0)  # offset of the last snapshot, and as many when it was taken; before it, of the start
        self._task: asyncio.Task[None] | None = None  # the loop itself keeps no hold of it
        self._busy = False
        self._pins = Pins(place)
        self._found: list[Pin] = []  # as of the last snapshot
        self._trouble = ""  # why there was none the last time

    @property
    def pins(self) -> list[Pin]:
        """What the journal is kept for, as of the last snapshot, and what came since."""
        offset, records, size_bytes = self._kept
        reason = self._trouble or "what came since is in no snapshot yet"
        return [*self._found, Pin(Keeper.SNAPSHOT, "", offset, self._records - records, self._size_bytes - size_bytes, reason)]

    def appended(self, size_bytes: int) -> None:
        """A record is stored; when there are enough, a round begins."""
        self._records += 1
        self._size_bytes += size_bytes
        if self._due() and not self._busy:
            self._task = self._loop.create_task(self.rounds())

    def _due(self) -> bool:
        records, size_bytes = self._tried
        return self._records - records >= self.place.snapshot_records or self._size_bytes - size_bytes >= SNAPSHOT_BYTES

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
            self._trouble = "no snapshot this time: its announcement is not stored yet"
            log.warning("%s", self._trouble)
        except Exception as error:
            self._trouble = f"housekeeping: {error}"
            log.warning("%s", self._trouble, exc_info=not isinstance(error, BasculeError))
        finally:
            self._busy = False

    async def _due_rounds(self) -> None:
        await self._rounds.round()
        while self._due() and self.going_on():
            await self._rounds.round()

    # -- the steps of a round: see bascule.broker.rounds.Steps ---------------------------------------------------------

    def going_on(self) -> bool:
        """Whether the epoch has not ended."""
        return self._running()

    def taken(self) -> None:
        """What is stored from now on is in the next snapshot."""
        self._tried = self._records, self._size_bytes

    async def stored(self) -> set[int]:
        """The mids of all that the store has now. Raises Unavailable."""
        return await self._off_loop(self._store.mids_now)

    async def store(self, records: Mapping[int, bytes | None]) -> None:
        """Raises Unavailable."""
        await self._off_loop(self._store.write, records)

    async def write(self, taken: Snapshot) -> None:
        """Raises Unavailable."""
        await self._off_loop(lambda: self._snapshots.write(taken.id, snapshots.encode(taken)))

    async def announce(self, taken: Snapshot) -> None:
        """Raises TimeoutError."""
        announced = asyncio.Event()  # which may also be set when nobody waits any more
        self._engine.journaling.add(json_entry(Op.SNAPSHOT, {"id": taken.id}))
        self._engine.journaling.then(announced.set)
        await asyncio.wait_for(announced.wait(), self.place.append_timeout_s)
        self._kept = taken.next_offset, *self._tried

    async def delete_older(self, taken: Snapshot) -> None:
        """Raises Unavailable."""
        await self._off_loop(self._snapshots.delete_older, taken.id)

    async def trim(self, taken: Snapshot, held: Mapping[int, str]) -> None:
        """Raises Unavailable."""
        await self._off_loop(self._trim, taken, held)

    async def _off_loop(self, function: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.wrap_future(in_background(partial(function, *arguments), "housekeeping"))

    # -- trimming, off the loop ----------------------------------------------------------------------------------------

    def _trim(self, taken: Snapshot, held: Mapping[int, str]) -> None:
        """The journal before what the snapshot, the pipelines and the owner's retention need; and what of the ingress is journaled."""
        place = self.place
        journal = TopicHistory(place.kafka, place.topics.journal, place.topics.partition)
        mean_bytes = self._size_bytes / self._records if self._records else 0.0
        self._found = self._pins.found(taken, self._retained(journal), held, mean_bytes)
        kept = [pin.offset for pin in self._found if not pin.released]
        self._trim_to(journal, place.topics.journal, place.topics.partition, min([taken.next_offset, *kept]))
        if not taken.ingress or Topics(place.kafka).ids([place.topics.ingress]).get(place.topics.ingress) != taken.ingress_topic_id:
            return  # of one that was created again nothing has been taken
        for partition, next_offset in taken.ingress.items():
            ingress = TopicHistory(place.kafka, place.topics.ingress, partition)
            self._trim_to(ingress, place.topics.ingress, partition, min(next_offset, self._retained(ingress)))

    def _retained(self, history: TopicHistory) -> int:
        """Where the owner's retention begins."""
        return history.at_time(int((time.time() - self.place.retention_s) * 1000))

    def _trim_to(self, history: TopicHistory, topic: str, partition: int, end: int) -> None:
        if end > history.earliest():
            crash.point("journal.trim.before")
            trim(self.place.kafka, topic, {partition: end})
            crash.point("journal.trim.after")
