"""A broker engine on an in-memory log, for tests of the engine and for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from bascule.amqp.types import Symbol
from bascule.broker import snapshot as snapshots
from bascule.broker.collecting import Collector
from bascule.broker.containment import ErrorContainment
from bascule.broker.engine import Engine
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import DEFAULT_PRIORITY, Bodies, BrokerMessage
from bascule.broker.policy import Policy
from bascule.broker.queue import BrokerQueue, QueueConsumer
from bascule.broker.snapshot import Snapshot
from bascule.broker.transactions import LocalTransaction
from bascule.broker.turns import Work
from bascule.core.defaults import MEMORY_BYTES
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.jms.sections import (
    APPLICATION_PROPERTIES,
    DELIVERY_DELAY,
    DELIVERY_TIME,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    VALUE,
    Scan,
    header_bytes,
    scan,
    section_bytes,
)
from bascule.journal.errors import ForeignRecord
from bascule.journal.offsets import OffsetMap
from bascule.journal.records import KEY_OF_KIND, Kind, Op, encode_record, json_entry


def message_bytes(
    content: Any, *, durable: bool = True, priority: int = DEFAULT_PRIORITY, ttl_ms: int = 0,
    message_id: str | None = None, properties: Mapping[str, Any] | None = None, group: str | None = None,
    delivery_time_ms: int = 0, delivery_delay_ms: int = 0,
) -> bytes:  # fmt: skip
    """Return an encoded AMQP message with one value as its body."""
    parts = [header_bytes(durable, priority, ttl_ms)]
    times = {DELIVERY_TIME: delivery_time_ms, DELIVERY_DELAY: delivery_delay_ms}
    annotations = {Symbol(name): time_ms for name, time_ms in times.items() if time_ms}
    if annotations:
        parts.append(section_bytes(MESSAGE_ANNOTATIONS, annotations))
    if group is not None:
        parts.append(section_bytes(PROPERTIES, [message_id, *[None] * 9, group]))
    elif message_id is not None:
        parts.append(section_bytes(PROPERTIES, [message_id]))
    if properties:
        parts.append(section_bytes(APPLICATION_PROPERTIES, dict(properties)))
    parts.append(section_bytes(VALUE, content))
    return b"".join(parts)


@dataclass
class MemoryLog:
    """Records by offset, as in Kafka."""

    records: list[tuple[bytes, bytes]] = field(default_factory=list)

    def append(self, key: bytes, value: bytes) -> int:
        """Store a record and return its offset."""
        self.records.append((key, value))
        return len(self.records) - 1


@dataclass
class Sender:
    """A producer's link that stores its answers."""

    answers: list[tuple[Any, BasculeError | None]] = field(default_factory=list)

    def accepted(self, token: Any) -> None:
        """Store that the broker has accepted a message."""
        self.answers.append((token, None))

    def refused(self, token: Any, error: BasculeError) -> None:
        """Store that the broker has refused a message."""
        self.answers.append((token, error))

    @property
    def accepted_tokens(self) -> list[Any]:
        """The tokens of accepted messages, in the order of the answers."""
        return [token for token, error in self.answers if error is None]


class Receiver:
    """A consumer's link with credit from the test; it stores (message, delivery count)."""

    def __init__(self, credit: int) -> None:
        self.credit = credit
        self.received: list[tuple[BrokerMessage, int]] = []
        self.drains_answered = 0
        self.end: BasculeError | None = None
        self.consumer: QueueConsumer

    def deliver(self, message: BrokerMessage, delivery_count: int) -> int:
        """Store a delivery. Return the credit that is left."""
        self.credit -= 1
        self.received.append((message, delivery_count))
        return self.credit

    def dispatched(self) -> None:
        """Handle the end of a dispatch."""
        self.drains_answered += 1

    def ended(self, error: BasculeError) -> None:
        """Handle the end of the queue."""
        self.end = error

    @property
    def messages(self) -> list[BrokerMessage]:
        """The delivered messages, without the counts."""
        return [message for message, _ in self.received]


def snapshot_of(engine: Engine, offsets: OffsetMap) -> Snapshot:
    """Return a snapshot, taken in one turn."""
    return Collector(engine, offsets).finish().snapshot()


class BrokerInMemory:
    """A broker with epochs on an in-memory log. The test confirms appends, in order."""

    def __init__(
        self, log: MemoryLog | None = None, *, clock: Callable[[], int] = lambda: 1_000, policy: Policy | None = None,
        memory_bytes: int = MEMORY_BYTES, errors: ErrorContainment | None = None,
        bodies: Callable[[int], Bodies] = lambda size: Bodies(None, size), journaling: Callable[..., Journaling] = Journaling,
        turn_steps: int = 1 << 60,
    ) -> None:  # fmt: skip
        """Start the first epoch. ``memory_bytes`` is the limit of the memory account.

        A turn does as much as ``turn_steps`` allow (bascule.broker.turns), by default everything. Errors that a broker process contains are
        raised, unless ``errors`` handles them.
        """
        self.memory_bytes = memory_bytes
        self.errors = errors
        self.bodies = bodies
        self.journaling = journaling
        self.turn_steps = turn_steps
        self.log = log or MemoryLog()
        self.clock = clock
        self.policy = policy
        self.in_flight: list[tuple[bytes, bytes]] = []
        self.snapshots: dict[str, bytes] = {}
        self.start()

    def start(self, *, stored: int = 0) -> None:
        """Start a new epoch, as after a crash: ``stored`` of the appends in flight are in the log, unanswered; the rest is lost."""
        for record in self.in_flight[:stored]:
            self.log.append(*record)
        self.in_flight.clear()
        self._collector: Collector | None = None
        epoch = self.log.append(KEY_OF_KIND[Kind.EPOCH], encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {"exclusive": []})))
        loader = self._load()
        loader.engine.journaling.begin(epoch, loader.fence.sequence)
        self.engine = loader.engine
        self.engine.turns.steps = self.turn_steps
        self.engine.turns.begin_turn()
        self.offsets: OffsetMap = loader.offsets

    def _load(self) -> Loader:
        for data in reversed(self.snapshots.values()):
            loader = self.replay(data)
            if loader.announced:
                return loader
        return self.replay(None)

    def replay(self, snapshot: bytes | None, end: int | None = None) -> Loader:
        """Return the result of loading the log, from a snapshot or from its start, up to an offset."""
        journaling = self.journaling(lambda key, value: self.in_flight.append((key, value)), errors=self.errors)
        engine = Engine(journaling, self.bodies(self.memory_bytes), self.clock, self.policy)
        loader = Loader(engine, None if snapshot is None else snapshots.decode(snapshot))
        for offset in range(loader.first_offset, len(self.log.records) if end is None else end):
            try:
                loader.apply(offset, self.log.records[offset][1])
            except ForeignRecord:
                continue
        loader.finish()
        return loader

    def take_snapshot(self) -> None:
        """Collect a snapshot in turns and announce it; the next load starts from it once it is stored.

        Does nothing while another snapshot is being collected.
        """
        if self._collector is None:
            self._collector = Collector(self.engine, self.offsets)
            self.engine.turns.begin(self._collect(self._collector))

    def _collect(self, collector: Collector) -> Work:
        yield from collector.walk()
        self.engine.journaling.between_records(partial(self._finish_snapshot, collector))

    def _finish_snapshot(self, collector: Collector) -> None:
        self._collector = None
        self.announce(collector.finish().snapshot())

    def announce(self, taken: Snapshot) -> None:
        """Write and announce a snapshot."""
        self.snapshots.pop(taken.id, None)
        self.snapshots[taken.id] = snapshots.encode(taken).joined()
        self.engine.journaling.add(json_entry(Op.SNAPSHOT, {"id": taken.id}))

    def flush(self) -> None:
        """End the turn: dispatch, continue long work, and append the collected records."""
        self.engine.go_on()
        self.engine.journaling.flush()

    def confirm(self, count: int) -> None:
        """Confirm the oldest ``count`` records in flight."""
        for record in self.in_flight[:count]:
            offset = self.log.append(*record)
            self.offsets.note(self.engine.journaling.in_flight[0].sequence, offset, len(record[1]))
            self.engine.confirm()
        del self.in_flight[:count]

    def settle(self) -> None:
        """Run turns and confirmations until nothing is left to do."""
        self.flush()
        while self.in_flight or self.engine.pending:
            self.confirm(len(self.in_flight))
            self.flush()

    def attach(self, queue: BrokerQueue, credit: int = 0, **options: Any) -> Receiver:
        """Attach a consumer with credit."""
        receiver = Receiver(credit)
        receiver.consumer = self.engine.attach(queue, receiver, **options)
        self.engine.wake(queue)
        return receiver

    def give(self, receiver: Receiver, credit: int) -> None:
        """Add credit to a consumer."""
        receiver.credit += credit
        self.engine.wake(receiver.consumer.queue)

    def send(
        self, address: str, body: bytes, sender: Sender, token: Any, *,
        routing: Routing = Routing.ANYCAST, container: str = "client", transaction: LocalTransaction | None = None,
        facts: Scan | None = None, user: str = "",
    ) -> None:  # fmt: skip
        """Send an encoded message. ``facts`` are the fields of a message that an earlier version accepted and this one would refuse."""
        self.engine.send(address, routing, body, facts or scan(body), container, sender, token, transaction, user=user)
