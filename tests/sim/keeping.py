"""What a broker of the simulation does with the journal beside its traffic: it follows it before it serves, and keeps it short.

Which steps a round of housekeeping has is real (bascule.broker.rounds); how a state is loaded goes by bascule.server.following, what keeps
the journal by bascule.server.pins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from bascule.broker import snapshot as snapshots
from bascule.broker.engine import Engine
from bascule.broker.loading import Loader
from bascule.broker.rounds import Rounds
from bascule.broker.snapshot import Snapshot
from bascule.core.errors import BasculeError
from bascule.journal.offsets import OffsetMap
from bascule.journal.records import DamagedRecord, ForeignRecord, Op, json_entry
from bascule.kafka.snapshots import by_snapshot, joined, older_than, parted
from bascule.writer.position import position_key
from tests.sim.kafka import INGRESS, JOURNAL, SNAPSHOTS, STORE, TRIMMED, Kafka, KafkaFault, ToWrite
from tests.sim.world import Process, Promise, TimeOut
from tests.sim.writer import DIVERTS, PositionReader, position_partition

#: Records of one fetch: few, so that much happens between one and the next.
FETCH_MAX: Final = 12
#: How often who stands by looks for more.
FOLLOW_MS: Final = 30.0
#: How long what a broker has read of its state may be old when it reads on.
DAWDLE_MS: Final = 200.0
#: So that most snapshots are in several records.
CHUNK_BYTES: Final = 1_500
ANNOUNCE_MS: Final = 250.0


class SteppedDown(BasculeError):
    """A newer epoch has begun."""


class Closed(BasculeError):
    """Nobody wants the state any more."""


class Following:
    """The state of an epoch to come. ``end`` says where it stops, once that is known; ``slowness`` how often it takes its time."""

    def __init__(self, kafka: Kafka, process: Process, fresh_engine: Callable[[], Engine], slowness: float) -> None:
        self._kafka, self._process, self._fresh_engine, self._slowness = kafka, process, fresh_engine, slowness
        self._journal = kafka.partition(JOURNAL)
        self.end: int | None = None
        self.closed = False

    async def run(self) -> Loader:
        """The state of all records before ``end``. Raises KafkaFault, RecordError, SteppedDown, Closed."""
        tried: list[str] | None = None
        while True:
            await self._dawdle()
            found = joined(await newest(self._kafka, self._process, SNAPSHOTS))
            candidates = sorted(map(snapshots.decode, found.values()), key=lambda snapshot: -snapshot.sequence)
            await self._dawdle()
            try:
                return await self._load(candidates)
            except KafkaFault as fault:
                if fault.code != TRIMMED:
                    raise
                names = [each.id for each in candidates]
                if self.end is not None and any(each.epoch >= self.end for each in candidates):
                    raise SteppedDown("another broker has begun a newer epoch, and trimmed the journal") from fault
                if names == tried:
                    raise DamagedRecord("no usable snapshot covers what was trimmed") from fault
                self._process.world.note("load anew", self._process.name)
                tried = names

    async def _load(self, candidates: list[Snapshot]) -> Loader:
        journal = self._journal
        stored = {int(key): value for key, value in (await newest(self._kafka, self._process, STORE)).items()}
        first, high = await self._kafka.request(self._process, "ListOffsets", lambda: (journal.earliest, journal.latest()), at=journal)
        await self._dawdle()
        for snapshot in [*candidates, None]:
            loader = self._beginning(snapshot, stored, first)
            if loader is None:
                continue
            position = await self._apply(loader, loader.first_offset, lambda: high)
            if snapshot is not None and not loader.announced:
                self._process.world.note("pass snapshot over", f"{self._process.name}, {snapshot.id} was not announced")
                continue
            await self._apply(loader, position, lambda: self.end)
            loader.finish()
            return loader
        raise AssertionError("the whole journal is always a candidate")

    async def _dawdle(self) -> None:
        if self._process.world.chance(self._slowness):
            self._process.world.note("read slowly", self._process.name)
            await self._process.sleep(self._process.world.random.random() * DAWDLE_MS)

    def _beginning(self, snapshot: Snapshot | None, stored: Mapping[int, bytes], first: int) -> Loader | None:
        world, name = self._process.world, self._process.name
        try:
            loader = Loader(self._fresh_engine(), snapshot, stored)
        except DamagedRecord as error:
            world.note("outdated snapshot", f"{name}, {error}")
            return None
        if loader.first_offset >= first:
            return loader
        if snapshot is None:
            raise KafkaFault(TRIMMED)
        world.note("outdated snapshot", f"{name}, {snapshot.id} needs offset {loader.first_offset} of a journal from {first} on")
        return None

    async def _apply(self, loader: Loader, position: int, end: Callable[[], int | None]) -> int:
        while True:
            known = end()
            if known is not None and position >= known:
                return position
            if self.closed:
                raise Closed
            records, position = await self._kafka.fetch(self._process, self._journal, position, committed=False, count=FETCH_MAX)
            for record in records:
                if self.end is not None and record.offset >= self.end:
                    return self.end
                try:
                    loader.apply(record.offset, record.value)
                except ForeignRecord:
                    continue
            if not records:
                await self._process.sleep(FOLLOW_MS)


async def newest(kafka: Kafka, process: Process, topic: str) -> dict[bytes, bytes]:
    """What a compacted topic holds, read piece by piece up to the end that it had. Raises KafkaFault."""
    partition = kafka.partition(topic)
    position, end = 0, await kafka.end_of(process, partition)
    found: dict[bytes, bytes] = {}
    while position < end:
        records, position = await kafka.fetch(process, partition, position, committed=False, count=FETCH_MAX)
        for record in records:
            assert record.key is not None
            if record.value is None:
                found.pop(record.key, None)
            else:
                found[record.key] = record.value
    return found


class Housekeeping:
    """The rounds of one epoch, which goes on until ``ended`` is done; ``records`` of them make a round due.

    ``on_step`` is called before each request to Kafka.
    """

    def __init__(
        self, kafka: Kafka, process: Process, engine: Engine, offsets: OffsetMap, ended: Promise[None], records: int,
        on_step: Callable[[], None],
    ) -> None:  # fmt: skip
        self._kafka, self._process, self._engine, self._ended = kafka, process, engine, ended
        self._rounds = Rounds(self, engine, offsets)
        self._due = records
        self._on_step = on_step
        self._records = 0
        self._busy = False
        self._keys: dict[str, list[bytes]] | None = None  # of each snapshot

    def appended(self) -> None:
        """A record is stored; when there are enough, a round begins."""
        self._records += 1
        if self._records >= self._due and not self._busy:
            self._busy = True
            done = self._process.spawn(self._due_rounds())
            done.then(done.result)

    async def _due_rounds(self) -> None:
        try:
            while self._records >= self._due and self.going_on():
                await self._rounds.round()
        except (BasculeError, KafkaFault, TimeOut) as error:
            self._process.world.note("fail round", f"{self._process.name}, {error}")
        finally:
            self._busy = False

    # -- the steps of a round: see bascule.broker.rounds.Steps ---------------------------------------------------------

    def going_on(self) -> bool:
        """Whether the epoch has not ended."""
        return not self._ended.done

    def taken(self) -> None:
        """What is stored from now on is in the next snapshot."""
        self._records = 0

    async def stored(self) -> set[int]:
        """The mids of all that the store has now. Raises KafkaFault."""
        return set(map(int, await newest(self._kafka, self._process, STORE)))

    async def store(self, records: Mapping[int, bytes | None]) -> None:
        """Raises KafkaFault."""
        self._process.world.note("store messages" if None not in records.values() else "forget stored messages", self._process.name)
        partition, producer = self._kafka.partition(STORE), self._kafka.new_producer()
        batch = [ToWrite(str(mid).encode(), value) for mid, value in records.items()]
        await self._request("Produce store", lambda: partition.produce(producer, 0, 0, batch, None))

    async def write(self, taken: Snapshot) -> None:
        """Raises KafkaFault."""
        records = parted(taken.id, snapshots.encode(taken), CHUNK_BYTES)
        if self._keys is not None:
            self._keys[taken.id] = list(records)
        await self._send(records)

    async def announce(self, taken: Snapshot) -> None:
        """Raises TimeOut."""
        announced: Promise[None] = Promise()
        self._on_step()
        self._engine.journaling.add(json_entry(Op.SNAPSHOT, {"id": taken.id}))
        self._engine.journaling.then(announced.keep, None)
        await self._process.within(ANNOUNCE_MS, announced)

    async def delete_older(self, taken: Snapshot) -> None:
        """Raises KafkaFault."""
        if self._keys is None:
            self._keys = by_snapshot(await newest(self._kafka, self._process, SNAPSHOTS))
        older = older_than(taken.id, self._keys)
        await self._send({key: None for each in older for key in self._keys[each]})
        for each in older:
            del self._keys[each]

    async def _send(self, records: Mapping[bytes, bytes | None]) -> None:
        """One after another, and without idempotence: what is repeated may be there twice, and late."""
        partition = self._kafka.partition(SNAPSHOTS)
        for key, value in records.items():
            record = ToWrite(key, value)
            await self._request("Produce snapshots", lambda record=record: partition.store(record))  # type: ignore[misc]

    async def _request(self, what: str, carry_out: Callable[[], object]) -> None:
        self._on_step()
        await self._kafka.request(self._process, what, carry_out)

    async def trim(self, taken: Snapshot, held: Mapping[int, str]) -> None:
        """Raises KafkaFault, Unavailable."""
        key = position_key(DIVERTS, JOURNAL, 0)
        positions = await PositionReader(self._kafka, self._process, position_partition(self._kafka, key)).read()
        position = positions.get(key)
        await self._trim_to(JOURNAL, needed_from(taken, 0 if position is None else position.offset))
        await self._trim_to(INGRESS, taken.ingress.get(0, 0))

    async def _trim_to(self, topic: str, end: int) -> None:
        partition = self._kafka.partition(topic)
        if end > partition.start:
            self._process.world.note(f"trim {topic}", self._process.name)
            await self._request("DeleteRecords", lambda: partition.trim(end))


def needed_from(taken: Snapshot, position: int) -> int:
    """Where what a snapshot and the pipelines, which are at a position, need of the journal begins."""
    return min(taken.next_offset, taken.first_offset(), position)
