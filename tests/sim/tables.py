"""Compacted topics and single appends for the simulated transaction managers, in place of ``bascule.kafka.compacted`` and ``appender``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

from bascule.core.errors import Unavailable
from bascule.journal.offsets import UNKNOWN_OFFSET
from bascule.kafka.compacted import Stored
from bascule.writer.reading import BARRIER_KEY, read_behind_barrier, read_latest
from bascule.xa.log_topic import LogRecord
from tests.sim.decisions import TopicDecisions
from tests.sim.kafka import Appender, Kafka, KafkaFault, Partition, ToWrite
from tests.sim.world import Process, Promise

#: How long a reader waits for an open transaction, and when it asks who has left it open.
READ_MS: Final = 1_500.0
HELD_UP_MS: Final = 60.0
POLL_MS: Final = 3.0
DECISIONS: Final = "decisions"


class Reader(Process):
    """A reading client of a process, with its own metadata: it may not know the leader to which another client appends."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.world, process.name)
        self._of = process

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something to the process."""
        self._of.do(action, *arguments)


class Table:
    """One client's view of some partitions of a topic (``bascule.writer.reading.TableEffects``)."""

    def __init__(self, kafka: Kafka, process: Process, at: Sequence[Partition]) -> None:
        self._kafka, self._process, self._reader = kafka, process, Reader(process)
        self._at = {partition.index: partition for partition in at}
        self._reached = dict.fromkeys(self._at, 0)
        self._entries: dict[bytes, Stored] = {}
        #: Called while an open transaction blocks reading for long, with the entries before it.
        self.held_up: Callable[[Mapping[bytes, Stored]], None] = lambda _: None

    def now_s(self) -> float:
        """See TableEffects."""
        return self._process.world.now_ms / 1000

    @property
    def partitions(self) -> Sequence[int]:
        """See TableEffects."""
        return list(self._at)

    @property
    def known(self) -> Mapping[bytes, Stored]:
        """Return the result of the last read."""
        return dict(self._entries)

    async def write_barriers(self, partitions: Sequence[int]) -> Mapping[int, int | None]:
        """See TableEffects."""
        return {index: await self._barrier(self._at[index]) for index in partitions}

    async def ends(self, *, stable: bool = False) -> Mapping[int, int]:
        """See TableEffects."""
        try:
            return {index: await self._kafka.end_of(self._reader, partition, committed=stable) for index, partition in self._at.items()}
        except KafkaFault as fault:
            raise Unavailable(f"no end is named: {fault}") from fault

    async def read_to(self, ends: Mapping[int, int]) -> Mapping[bytes, Stored]:
        """See TableEffects."""
        try:
            for index, end in ends.items():
                await self._read(self._at[index], end)
        except KafkaFault as fault:
            raise Unavailable(f"the table cannot be read: {fault}") from fault
        return dict(self._entries)

    async def _read(self, partition: Partition, end: int) -> None:
        world = self._process.world
        begun_ms, asked = world.now_ms, False
        while (at := self._reached[partition.index]) < end:
            if world.now_ms - begun_ms > READ_MS:
                raise Unavailable("a transaction stayed open")
            if not asked and world.now_ms - begun_ms > HELD_UP_MS:
                asked = True
                self.held_up(self.known)
            records, reached = await self._kafka.fetch(self._reader, partition, at, committed=True)
            for record in records:
                if record.offset < self._reached[partition.index] or record.key is None or record.key == BARRIER_KEY:
                    continue
                if record.value is None:
                    self._entries.pop(record.key, None)
                else:
                    self._entries[record.key] = Stored(record.value, partition.index, record.offset)
            self._reached[partition.index] = max(reached, self._reached[partition.index])
            if reached < end:
                await self._process.sleep(POLL_MS)

    async def _barrier(self, partition: Partition) -> int | None:
        store = partial(partition.produce, self._kafka.new_producer(), 0, 0, [ToWrite(BARRIER_KEY, None)], None)
        try:
            offset = await self._kafka.request(self._process, f"Produce {partition.topic}", store, at=partition)
        except KafkaFault as fault:
            raise Unavailable(f"no barrier is stored: {fault}") from fault
        return None if offset == UNKNOWN_OFFSET else offset


class Single:
    """A client that appends single records to a partition, in order; after a failure with another producer, as the product does."""

    def __init__(self, kafka: Kafka, process: Process, partition: Partition) -> None:
        self._kafka, self._process, self._partition = kafka, process, partition
        self._waiting: deque[Promise[int | None]] = deque()
        self._connect()

    def append(self, record: ToWrite) -> Promise[int | None]:
        """Append a record. The promise is its offset, None if it is unknown; it fails with Unavailable."""
        promise: Promise[int | None] = Promise()
        self._waiting.append(promise)
        self._appender.append(record)
        return promise

    def _connect(self) -> None:
        self._appender = Appender(self._kafka, self._process, self._partition, self._answered)

    def _answered(self, offset: int, error: str | None) -> None:
        promise = self._waiting.popleft()
        if error is None:
            promise.keep(None if offset == UNKNOWN_OFFSET else offset)
            return
        self._appender.close()
        self._connect()
        lost, self._waiting = [promise, *self._waiting], deque()
        for each in lost:
            each.fail(Unavailable(error))


class DecisionTopic(TopicDecisions):
    """The decision log of one process, on the nodes of Kafka: effects of ``bascule.xa.log_topic``."""

    def __init__(self, kafka: Kafka, process: Process) -> None:
        self._process = process
        self._keys = 0
        self._table = Table(kafka, process, [kafka.partition(DECISIONS)])
        self._appender = Single(kafka, process, kafka.partition(DECISIONS))
        self._violations = process.world.violations

    # TopicCalls

    def new_key(self) -> bytes:
        """See TopicCalls."""
        self._keys += 1
        return f"{self._process.name}:{self._keys}".encode()

    async def append(self, key: bytes, value: bytes) -> int | None:
        """See TopicCalls."""
        return await self._appender.append(ToWrite(key, value))

    async def reach(self, offset: int) -> Mapping[bytes, LogRecord]:
        """See TopicCalls."""
        return _records(await self._table.read_to({0: offset + 1}))

    async def tail(self, *, barrier: bool = True) -> Mapping[bytes, LogRecord]:
        """See TopicCalls."""
        return _records(await (read_behind_barrier(self._table) if barrier else read_latest(self._table)))

    def known(self) -> Iterable[bytes]:
        """See TopicCalls."""
        return self._table.known

    def post(self, key: bytes, value: bytes | None) -> None:
        """See TopicCalls."""
        self._appender.append(ToWrite(key, value))


def _records(table: Mapping[bytes, Stored]) -> dict[bytes, LogRecord]:
    return {key: LogRecord(entry.value, entry.offset) for key, entry in table.items()}
