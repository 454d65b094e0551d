"""The contract of the exactly-once writer, on the model of Kafka: what bascule.kafka.transactional does, request by request.

A fresh producer incarnation for each transaction; ``init``, and only then the position, read to the high watermark; output and position in
one transaction, as a compare-and-set; after a commit in doubt the position that the next incarnation reads says what became of it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Final, NamedTuple

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Output
from bascule.kafka.transactional import PositionMoved
from bascule.writer.position import Position
from tests.sim.kafka import Kafka, KafkaFault, Partition, Producer, ToWrite
from tests.sim.world import Process, Promise

POSITIONS: Final = "positions"
#: The name under which all diverts stand.
DIVERTS: Final = "diverts"
#: Few, so that writers meet in one partition and have to wait for one another's open transactions.
POSITION_PARTITIONS: Final = 2
#: How long a reader waits for an open transaction, and a writer for Kafka.
READ_MS: Final = 1_500.0
WRITE_MS: Final = 3_000.0
POLL_MS: Final = 3.0
PAUSE_MAX_MS: Final = 200.0


def position_partition(kafka: Kafka, key: str) -> Partition:
    """Where a position is."""
    return kafka.partition(POSITIONS, zlib.crc32(key.encode()) % POSITION_PARTITIONS)


@lru_cache(maxsize=1_000)
def decoded(value: bytes) -> Position:
    """A position; each is read many times."""
    return Position.decode(value)


def committed_offset(kafka: Kafka, key: str) -> int:
    """Where a position is now, for who sees everything: 0 before there is one."""
    records, _ = position_partition(kafka, key).read(0, committed=True)
    found = [decoded(record.value or b"").offset for record in records if record.key == key.encode()]
    return found[-1] if found else 0


class PositionReader:
    """Reads positions as of now: to the high watermark noted when the read begins, waiting out open transactions."""

    def __init__(self, kafka: Kafka, process: Process, partition: Partition) -> None:
        self.kafka, self.process, self.partition = kafka, process, partition
        self._reached = 0
        self._positions: dict[str, Position] = {}

    async def read(self) -> dict[str, Position]:
        """All positions of the partition by key. Raises Unavailable."""
        deadline_ms = self.process.world.now_ms + READ_MS
        end = await self.end()
        while True:
            records, self._reached = await self.kafka.fetch(self.process, self.partition, self._reached, committed=True)
            for record in records:
                assert record.key is not None
                assert record.value is not None
                self._positions[record.key.decode()] = decoded(record.value)
            if self._reached >= end:
                return dict(self._positions)
            if self.process.world.now_ms > deadline_ms:
                raise Unavailable("a transaction stayed open")
            await self.process.sleep(POLL_MS)

    async def end(self) -> int:
        """What "now" is."""
        return await self.kafka.end_of(self.process, self.partition)


class Incarnation(NamedTuple):
    """A producer after init, and the positions read after that."""

    producer: Producer
    positions: dict[str, Position]


class Writer:
    """Writes records and moves one position, each time in one transaction."""

    def __init__(self, kafka: Kafka, process: Process, key: str) -> None:
        self.kafka, self.process, self.key = kafka, process, key
        self.partition = position_partition(kafka, key)
        self._reader = PositionReader(kafka, process, self.partition)
        self._next: Promise[Incarnation] | None = None
        self._handed_over: int | None = None

    async def current(self) -> Position | None:
        """The position as of now, in the hands of an incarnation that came after it. Raises Unavailable."""
        await self.abandon()
        while True:
            known = (await self.incarnation()).positions.get(self.key)
            with suppress(KafkaFault):
                if (await self._reader.read()).get(self.key) == known:
                    return known
            self.drop()

    def prepare(self) -> None:
        """The next incarnation, in the background."""
        if self._next is None:
            self._next = self.process.spawn(self.incarnate())

    async def incarnate(self) -> Incarnation:
        """Init, then the positions."""
        producer = Producer(self.kafka, self.process, f"writer.{self.key}")
        await producer.init()
        return Incarnation(producer, await self._reader.read())

    async def incarnation(self) -> Incarnation:
        """The next one, as soon as there is one. Raises Unavailable."""
        deadline_ms = self.process.world.now_ms + WRITE_MS
        while True:
            self.prepare()
            assert self._next is not None
            try:
                return await self._next
            except (KafkaFault, Unavailable) as error:
                self._next = None
                if self.process.world.now_ms > deadline_ms:
                    raise Unavailable(f"no transaction can be started: {error}") from error
                await self.process.sleep(POLL_MS)

    def drop(self) -> None:
        """Ends the present incarnation: it is never used again."""
        self._next = self._handed_over = None

    async def abandon(self) -> None:
        """Aborts what was begun ahead."""
        if self._handed_over is not None and self._next is not None:
            with suppress(KafkaFault):  # then the next incarnation does it
                await self._next.result().producer.end(commit=False)
            self.drop()

    async def ahead(self, outputs: Sequence[Output], before: Position | None) -> None:
        """Hands the first records of a transaction over while more are made."""
        if self._next is not None and self._next.done and self._next.error is None:
            incarnation = self._next.result()
            if incarnation.positions.get(self.key) == before:
                with suppress(KafkaFault):
                    await self.hand_over(incarnation.producer, outputs)

    async def write(self, outputs: Sequence[Output], before: Position | None, after: Position) -> None:
        """Both or neither, whatever fails on the way. Raises PositionMoved or Unavailable."""
        world = self.process.world
        deadline_ms = world.now_ms + WRITE_MS
        tried = False
        pause_ms = POLL_MS
        while True:
            incarnation = await self.incarnation()
            found = incarnation.positions.get(self.key)
            if tried and found == after:
                break
            if found != before:
                self.drop()
                world.note("PositionMoved", self.process.name)
                raise PositionMoved(found)
            try:
                await self.hand_over(incarnation.producer, outputs)
                await incarnation.producer.produce(self.partition, [ToWrite(self.key.encode(), after.encode())])
                await incarnation.producer.end(commit=True)
                break
            except KafkaFault as fault:
                world.say(f"{self.process.name}: {self.key} is not written: {fault}")
                self.drop()
                if world.now_ms > deadline_ms:
                    raise Unavailable(f"Kafka does not commit: {fault}") from fault
                tried = True
                # By chance: two that fence one another in step would do so for ever.
                await self.process.sleep(world.random.random() * pause_ms)
                pause_ms = min(2 * pause_ms, PAUSE_MAX_MS)
        self.drop()
        self.prepare()

    async def hand_over(self, producer: Producer, outputs: Sequence[Output]) -> None:
        """Those of the outputs that the incarnation has not got yet, in order."""
        if self._handed_over is None:
            producer.begin()
            self._handed_over = 0
        for place in range(self._handed_over, len(outputs)):
            topic, key, value, headers, _ = outputs[place]
            self._handed_over = place + 1
            await producer.produce(self.kafka.partition(topic), [ToWrite(key, value, headers)])
