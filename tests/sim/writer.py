"""The transactional writer on the model of Kafka: effects of ``bascule.writer`` that wait in simulated time."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Final, Generic, TypeVar

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Output
from bascule.journal.offsets import UNKNOWN_OFFSET
from bascule.writer.errors import PositionMoved, TransactionFault
from bascule.writer.incarnation import Attempt, Identity, Pending
from bascule.writer.position import Position
from bascule.writer.reading import BARRIER_KEY, read_behind_barrier, read_latest
from bascule.writer.transactional import Confirm
from bascule.writer.transactional import Writer as Protocol
from tests.sim.kafka import Kafka, KafkaFault, Partition, Producer, ToWrite
from tests.sim.world import Process, Promise, TimeOut

T = TypeVar("T")
V = TypeVar("V")

POSITIONS: Final = "positions"
#: The position name of all diverts.
DIVERTS: Final = "diverts"
#: Few, so that writers share partitions and have to wait for one another's open transactions.
POSITION_PARTITIONS: Final = 2
#: How long a reader waits for an open transaction, and a writer for Kafka.
READ_MS: Final = 1_500.0
WRITE_MS: Final = 3_000.0
POLL_MS: Final = 3.0
#: Factor by which pauses of the protocol are shorter, as requests are.
HASTE: Final = 0.03


def position_partition(kafka: Kafka, key: str) -> Partition:
    """Return the partition of a position."""
    return kafka.partition(POSITIONS, zlib.crc32(key.encode()) % POSITION_PARTITIONS)


@lru_cache(maxsize=1_000)
def decoded(value: bytes) -> Position:
    """Return a decoded position. Cached, since each is read many times."""
    return Position.decode(value)


def committed_offset(kafka: Kafka, key: str) -> int:
    """Return the current offset of a position, as an all-seeing observer knows it; 0 if there is none."""
    position = committed_position(kafka, key)
    return 0 if position is None else position.offset


def committed_position(kafka: Kafka, key: str) -> Position | None:
    """Return the current position of a key, as an all-seeing observer knows it."""
    newest = position_partition(kafka, key).newest(key.encode())
    return None if newest is None or newest.value is None else decoded(newest.value)


class TableView(Generic[V]):
    """A client that reads one partition of a compacted topic (``bascule.writer.reading.TableEffects``)."""

    def __init__(self, kafka: Kafka, process: Process, partition: Partition, decode: Callable[[bytes], V]) -> None:
        self.kafka, self.process, self.partition = kafka, process, partition
        self._decode = decode
        self._reached = 0
        self._table: dict[str, V] = {}

    def now_s(self) -> float:
        """Return the world's time."""
        return self.process.world.now_ms / 1000

    @property
    def partitions(self) -> Sequence[int]:
        """Return the partition."""
        return [self.partition.index]

    async def write_barriers(self, partitions: Sequence[int]) -> Mapping[int, int | None]:
        """Store a barrier record. Raises Unavailable."""
        store = partial(self.partition.produce, self.kafka.new_producer(), 0, 0, [ToWrite(BARRIER_KEY, None)], None)
        try:
            offset = await self.kafka.request(self.process, f"Produce {self.partition.topic}", store, at=self.partition)
        except KafkaFault as fault:
            raise Unavailable(f"no barrier is stored: {fault}") from fault
        return dict.fromkeys(partitions, None if offset == UNKNOWN_OFFSET else offset)

    async def ends(self, *, stable: bool = False) -> Mapping[int, int]:
        """Return the high watermark, or the last stable offset. Raises Unavailable."""
        try:
            return {self.partition.index: await self.kafka.end_of(self.process, self.partition, committed=stable)}
        except KafkaFault as fault:
            raise Unavailable(f"no end is named: {fault}") from fault

    async def read(self) -> Mapping[str, V]:
        """Return the table, as some node knows it. Raises Unavailable."""
        return await read_latest(self)

    async def read_to(self, ends: Mapping[int, int]) -> Mapping[str, V]:
        """Return the table before an offset, after waiting for open transactions. Raises Unavailable."""
        world, end = self.process.world, ends[self.partition.index]
        deadline_ms = world.now_ms + READ_MS
        try:
            while self._reached < end:
                if world.now_ms > deadline_ms:
                    raise Unavailable("a transaction stayed open")
                records, reached = await self.kafka.fetch(self.process, self.partition, self._reached, committed=True)
                for record in records:
                    if record.key is not None and record.offset >= self._reached:
                        self._take(record.key.decode(), record.value)
                self._reached = max(reached, self._reached)
                if self._reached < end:
                    await self.process.sleep(POLL_MS)
        except KafkaFault as fault:
            raise Unavailable(f"{self.partition.topic} cannot be read: {fault}") from fault
        return dict(self._table)

    def _take(self, key: str, value: bytes | None) -> None:
        if value is None:
            self._table.pop(key, None)
        else:
            self._table[key] = self._decode(value)


class PositionReader(TableView[Position]):
    """A client that reads one partition of the positions."""

    def __init__(self, kafka: Kafka, process: Process, partition: Partition) -> None:
        super().__init__(kafka, process, partition, decoded)


async def all_positions(kafka: Kafka, process: Process) -> dict[str, Position]:
    """Return the positions of all partitions, each read behind a barrier record. Raises Unavailable."""
    found: dict[str, Position] = {}
    for index in range(POSITION_PARTITIONS):
        found |= await read_behind_barrier(
            PositionReader(kafka, process, kafka.partition(POSITIONS, index)), violations=process.world.violations
        )
    return found


class _Spawned(Generic[T]):
    """A coroutine of a process (``bascule.writer.incarnation.Pending``)."""

    def __init__(self, process: Process, promise: Promise[T]) -> None:
        self._process, self._promise = process, promise

    @property
    def ended(self) -> bool:
        return self._promise.done

    @property
    def ready(self) -> bool:
        return self._promise.done and self._promise.error is None

    def result(self) -> T:
        return self._promise.result()

    async def wait(self, timeout_s: float) -> T:
        if self._promise.done:
            return self._promise.result()
        try:
            return await self._process.within(timeout_s * 1000, self._promise)
        except TimeOut:
            raise TimeoutError from None


class TransactionalCalls:
    """The requests of a transactional protocol to Kafka's client and the clock (``bascule.writer.incarnation.ClientEffects``)."""

    def __init__(self, kafka: Kafka, process: Process, transactional_id: str) -> None:
        self.kafka, self.process = kafka, process
        self._id = transactional_id

    def now_s(self) -> float:
        """See ClientEffects."""
        return self.process.world.now_ms / 1000

    async def sleep(self, seconds: float) -> None:
        """See ClientEffects."""
        await self.process.sleep(seconds * 1000 * HASTE)

    def random(self) -> float:
        """See ClientEffects."""
        return self.process.world.random.random()

    def start(self, work: Coroutine[Any, Any, T]) -> Pending[T]:
        """See ClientEffects."""
        return _Spawned(self.process, self.process.spawn(work))

    async def init(self, attempt: Attempt) -> Producer:
        """See ClientEffects."""
        producer = Producer(self.kafka, self.process, self._id)
        try:
            await producer.init(self.time_out_ms(attempt))
        except KafkaFault as fault:
            raise fault_of(fault) from fault
        return producer

    def time_out_ms(self, attempt: Attempt) -> float | None:
        """Return the time-out of the transactions of a client; None for that of all others."""
        del attempt
        return None

    async def identity(self, producer: Producer) -> Identity | None:
        """See ClientEffects."""
        return Identity(producer.producer_id, producer.producer_epoch)

    async def settled(self, producer: Producer, transactions: int) -> bool:
        """See ClientEffects."""
        del transactions
        return producer.settled

    def discard(self, producer: Producer) -> None:
        """See ClientEffects. Nothing is left of it."""

    async def explain(self, reason: str) -> Unavailable:
        """See ClientEffects."""
        return Unavailable(f"no transaction can be started: {reason}")


class _Effects(TransactionalCalls, PositionReader):
    """The effects of the protocol (``bascule.writer.transactional.WriterEffects``)."""

    def __init__(self, kafka: Kafka, process: Process, key: str) -> None:
        PositionReader.__init__(self, kafka, process, position_partition(kafka, key))
        TransactionalCalls.__init__(self, kafka, process, f"writer.{key}")
        self._key = key

    async def begin(self, producer: Producer) -> None:
        producer.begin()

    async def hand_over(self, producer: Producer, outputs: Sequence[Output], start: int, *, careful: bool) -> None:
        del careful
        try:
            for topic, key, value, headers, _ in outputs[start:]:
                await producer.produce(self.kafka.partition(topic), [ToWrite(key, value, headers)])
        except KafkaFault as fault:
            raise fault_of(fault) from fault

    async def commit(
        self, producer: Producer, positions: Mapping[str, Position | None], *, careful: bool, confirm: Confirm | None = None
    ) -> None:
        del careful
        try:
            for key, position in positions.items():
                value = position.encode() if position is not None else None
                await producer.produce(position_partition(self.kafka, key), [ToWrite(key.encode(), value)])
            if confirm is not None:
                await confirm()
            await producer.end(commit=True)
        except KafkaFault as fault:
            self.process.world.say(f"{self.process.name}: {self._key} is not written: {fault}")
            raise fault_of(fault) from fault

    async def abort(self, producer: Producer) -> None:
        try:
            await producer.end(commit=False)
        except KafkaFault as fault:
            raise fault_of(fault) from fault


class Writer(Protocol[Producer, Output, Position]):
    """A writer of records that moves one position with each transaction, and notes the troubles that it meets."""

    def __init__(self, kafka: Kafka, process: Process, key: str) -> None:
        violations = process.world.violations
        super().__init__(_Effects(kafka, process, key), key, deadline_s=WRITE_MS / 1000, violations=violations)
        self._process = process

    async def write(
        self,
        outputs: Sequence[Output],
        before: Position | None,
        after: Position | None,
        others: Mapping[str, Position | None] | None = None,
        confirm: Confirm | None = None,
    ) -> None:
        """Write as the protocol does. Raises PositionMoved or Unavailable."""
        try:
            await super().write(outputs, before, after, others, confirm)
        except PositionMoved:
            self._process.world.note("PositionMoved", self._process.name)
            raise


def fault_of(fault: KafkaFault) -> TransactionFault:
    """Return a fault in the terms of the protocol."""
    return TransactionFault(str(fault), fenced=fault.code == "fenced")
