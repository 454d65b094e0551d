"""A broker engine on a log in memory: for tests of the engine, and for the simulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bascule.broker import snapshot as snapshots
from bascule.broker.engine import Engine, Policy
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import Bodies, Message
from bascule.broker.queue import Consumer, Queue
from bascule.core.errors import BasculeError
from bascule.jms.sections import scan
from bascule.journal.offsets import OffsetMap
from bascule.journal.records import KEY_OF_KIND, Kind, Op, encode_record, json_entry


@dataclass
class MemoryLog:
    """Records by offset, as Kafka would keep them."""

    records: list[tuple[bytes, bytes]] = field(default_factory=list)

    def append(self, key: bytes, value: bytes) -> int:
        """Store a record; returns its offset."""
        self.records.append((key, value))
        return len(self.records) - 1


@dataclass
class Sender:
    """A producer's link that remembers its answers."""

    answers: list[tuple[Any, BasculeError | None]] = field(default_factory=list)

    def accepted(self, token: Any) -> None:
        """Stored."""
        self.answers.append((token, None))

    def refused(self, token: Any, error: BasculeError) -> None:
        """Not taken."""
        self.answers.append((token, error))


@dataclass
class Receiver:
    """A consumer's link with credit that the test gives; it keeps (message, delivery count)."""

    credit: int = 0
    received: list[tuple[Message, int]] = field(default_factory=list)
    consumer: Consumer | None = None

    def deliver(self, message: Message, delivery_count: int) -> None:
        """Take one."""
        self.credit -= 1
        self.received.append((message, delivery_count))

    def dispatched(self) -> None:
        """Nothing more for now."""


class BrokerInMemory:
    """One epoch after another on a log in memory. Appends are confirmed when the test says so, in order."""

    def __init__(self, log: MemoryLog | None = None, *, clock: Callable[[], int] = lambda: 1_000, policy: Policy | None = None) -> None:
        """A broker whose first epoch has begun."""
        self.log = log or MemoryLog()
        self.clock = clock
        self.policy = policy
        self.in_flight: list[tuple[bytes, bytes]] = []
        self.snapshot: bytes | None = None
        self.start()

    def start(self) -> None:
        """A new epoch: what was in flight is lost, all else is loaded."""
        self.in_flight.clear()
        epoch = self.log.append(KEY_OF_KIND[Kind.EPOCH], encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {"exclusive": []})))
        journaling = Journaling(lambda key, value: self.in_flight.append((key, value)))
        self.engine = Engine(journaling, Bodies(None, 1 << 40), self.clock, self.policy)
        loader = Loader(self.engine, None if self.snapshot is None else snapshots.decode(self.snapshot))
        for offset in range(loader.first_offset, epoch + 1):
            loader.apply(offset, self.log.records[offset][1])
        loader.finish()
        journaling.begin(epoch, loader.fence.sequence)
        self.offsets: OffsetMap = loader.offsets

    def take_snapshot(self) -> None:
        """The next load begins from here."""
        if self.engine.journaling.confirmed_sequence:
            self.snapshot = snapshots.encode(snapshots.take(self.engine, self.offsets))

    def settle(self, count: int | None = None) -> None:
        """Append what has gathered; confirm ``count`` records, or all until nothing is left to append."""
        self.engine.dispatch()
        self.engine.journaling.flush()
        while self.in_flight and count != 0:
            offset = self.log.append(*self.in_flight.pop(0))
            self.offsets.note(self.engine.journaling.in_flight[0].sequence, offset)
            self.engine.confirm()
            if count is None:
                self.engine.journaling.flush()
            else:
                count -= 1

    def attach(self, queue: Queue, credit: int = 0, **options: Any) -> Receiver:
        """A consumer with credit."""
        receiver = Receiver(credit)
        receiver.consumer = self.engine.attach(queue, receiver, **options)
        self.engine.wake(queue)
        return receiver

    def send(self, address: str, body: bytes, sender: Sender, token: Any, *, routing: Any = 0, container: str = "c", transaction: Any = None) -> None:
        """Send an encoded message."""
        from bascule.core.destination import Routing

        self.engine.send(address, Routing(routing), body, scan(body), container, sender, token, transaction)
