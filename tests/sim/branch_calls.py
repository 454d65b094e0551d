"""Kafka as a resource of the simulated transaction managers: effects of ``bascule.xa.kafka_protocol`` on the model of Kafka."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Final

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.kafka.compacted import Stored
from bascule.writer.incarnation import Attempt
from bascule.writer.reading import read_behind_barrier
from bascule.writer.table import TableTransactions
from bascule.xa.kafka_records import BranchTopics, Make, SideEnds, SideRecord, slots_of
from tests.sim.kafka import Kafka, KafkaFault, Partition, Producer, ToWrite
from tests.sim.tables import POLL_MS, READ_MS, Single, Table
from tests.sim.world import Process, Promise
from tests.sim.writer import TransactionalCalls, fault_of

TOPICS: Final = BranchTopics("xa.side", "xa.log", 2)
#: How long a Kafka transaction is retried.
WRITE_S: Final = 0.4
#: The longest time for Kafka to report the size limit of a topic.
ROOM_MS: Final = 10.0
#: Timeouts of Kafka transactions on a slow line, as in ``bascule.kafka.slot``: of the first try, and of the next one.
TRANSACTION_MS: Final = 50.0
LONG_TRANSACTION_MS: Final = 900.0
#: The header of a record on the side topic with its timestamp in ms.

Log = Mapping[bytes, Stored]


class SlotCalls(TransactionalCalls, Table):
    """The effects of ``bascule.writer.table``: a transactional id, and its partition of the log."""

    def __init__(self, kafka: Kafka, process: Process, slot: str, line_ms: float) -> None:
        """``line_ms`` is how long a record is on its way to Kafka."""
        self._line_ms = line_ms
        TransactionalCalls.__init__(self, kafka, process, slot)
        Table.__init__(self, kafka, process, [kafka.partition(TOPICS.log, TOPICS.partition_of(slot))])

    def time_out_ms(self, attempt: Attempt) -> float | None:
        """See TransactionalCalls. As ``bascule.kafka.slot`` has it, where the line is slow."""
        if not self._line_ms:
            return None
        return LONG_TRANSACTION_MS if attempt.long else TRANSACTION_MS

    async def write(self, producer: Producer, records: Sequence[Outgoing]) -> None:
        """Write records as SlotEffects says."""
        try:
            producer.begin()
            for record in records:
                at = self.kafka.partition(record.topic, max(0, record.partition))
                if self._line_ms:
                    await self.process.sleep(self._line_ms)
                await producer.produce(at, [ToWrite(record.key, record.value, record.headers)])
            await producer.end(commit=True)
        except KafkaFault as fault:
            self.process.world.say(f"{self.process.name}: {self._id} is not written: {fault}")
            raise fault_of(fault) from fault


Slot = TableTransactions[Producer, Outgoing, Log]


class Receipt:
    """A receipt as ``bascule.xa.kafka_protocol.Receipt``."""

    def __init__(self, stored: Promise[int | None]) -> None:
        self._stored = stored

    async def offset(self) -> int | None:
        """Return the offset as Receipt says."""
        return await self._stored


class Turn:
    """A lock that admits one coroutine of a process at a time."""

    def __init__(self) -> None:
        self._taken = False
        self._waiting: list[Promise[None]] = []

    async def __aenter__(self) -> None:
        while self._taken:
            free: Promise[None] = Promise()
            self._waiting.append(free)
            await free
        self._taken = True

    async def __aexit__(self, *_: object) -> None:
        self._taken = False
        if self._waiting:
            self._waiting.pop(0).keep(None)


class SimulatedCalls:
    """The effects of one process."""

    def __init__(self, kafka: Kafka, process: Process, own_slots: Sequence[str], slow: Random | None, line_ms: float) -> None:
        """Create the effects. ``slow`` draws the time for a topic's size limit; None: no time. For ``line_ms`` see SlotCalls."""
        self._line_ms = line_ms
        self._kafka, self._process, self._own_slots, self._slow = kafka, process, own_slots, slow
        self._slots: dict[str, Slot] = {}
        self._turns: dict[str, Turn] = {}
        self._appenders: dict[Partition, Single] = {}
        self._table = Table(kafka, process, [kafka.partition(TOPICS.log, index) for index in range(TOPICS.partitions)])
        self._table.held_up = self._end_transactions

    def now_ms(self) -> int:
        """See BranchCalls."""
        return int(self._process.wall_ms)

    def monotonic_s(self) -> float:
        """See BranchCalls."""
        return self._process.monotonic_ms / 1000

    def turn(self, slot: str) -> Turn:
        """See BranchCalls."""
        return self._turns.setdefault(slot, Turn())

    def get_ready(self, slot: str) -> None:
        """See BranchCalls."""
        self._slot(slot).prepare()

    async def reach(self, slot: str) -> None:
        """See BranchCalls. As ``bascule.kafka.slot`` does."""
        if not self._slot(slot).reachable:
            await self._slot(slot).reach()

    async def room(self, record: Outgoing) -> int:
        """See BranchCalls."""
        if self._slow is not None:
            await self._process.sleep(self._slow.random() * ROOM_MS)
        return len(record.value or b"")

    def append(self, record: Outgoing) -> Receipt:
        """See BranchCalls."""
        at = self._kafka.partition(record.topic, record.partition)
        if at not in self._appenders:
            self._appenders[at] = Single(self._kafka, self._process, at)
        return Receipt(self._appenders[at].append(ToWrite(record.key, record.value, record.headers)))

    async def transact(self, slot: str, make: Make) -> None:
        """See BranchCalls."""
        await self._slot(slot).transact(make)

    async def table(self) -> Log:
        """See BranchCalls."""
        return await read_behind_barrier(self._table)

    async def side(self, partition: int, first: int, last: int) -> Iterable[SideRecord]:
        """See BranchCalls."""
        at, found, begun_ms = self._kafka.partition(TOPICS.side, partition), [], self._process.world.now_ms
        try:
            while first <= last:
                if self._process.world.now_ms - begun_ms > READ_MS:
                    raise Unavailable("the side topic cannot be read")
                records, first = await self._kafka.fetch(self._process, at, first, committed=False)
                found += [record for record in records if record.offset <= last]
                if first <= last:
                    await self._process.sleep(POLL_MS)
        except KafkaFault as fault:
            raise Unavailable(f"the side topic cannot be read: {fault}") from fault
        return [SideRecord(record.key, record.value, list(record.headers)) for record in found]  # type: ignore[arg-type]

    async def side_ends(self) -> SideEnds:
        """See BranchCalls."""
        found = {}
        for index in range(TOPICS.partitions):
            at = self._kafka.partition(TOPICS.side, index)
            try:
                found[index] = await self._kafka.request(self._process, "ListOffsets", at.latest, at=at)
            except KafkaFault as fault:
                raise Unavailable(str(fault)) from fault
        return SideEnds("", found)

    async def trim(self, ends: Mapping[int, int]) -> None:
        """See BranchCalls."""
        for index, end in ends.items():
            at = self._kafka.partition(TOPICS.side, index)
            if end > at.start:
                self._process.world.note("trim branches", self._process.name)
                with suppress(KafkaFault):
                    await self._kafka.request(self._process, "DeleteRecords", partial(at.trim, end), at=at)

    def _slot(self, slot: str) -> Slot:
        if (found := self._slots.get(slot)) is None:
            effects = SlotCalls(self._kafka, self._process, slot, self._line_ms)
            effects.held_up = self._end_transactions
            own = slot in self._own_slots
            found = TableTransactions(effects, ahead=own, deadline_s=WRITE_S, violations=self._process.world.violations)
            if own:
                self._slots[slot] = found
        return found

    def _end_transactions(self, table: Log) -> None:
        """End the open transactions of a process that died, under ids that its branches name."""
        for slot in sorted(slots_of(table).difference(self._own_slots)):
            self._process.world.note("end open transaction", self._process.name)
            self._process.spawn(Producer(self._kafka, self._process, slot).init())
