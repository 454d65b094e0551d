"""A broker process of the simulation: the real engine, journaling and loader, in a shell that keeps the rules of a real broker's.

The rules (docs/architecture.md, "Epochs and the fence"): an epoch begins with its start record; what is answered was stored at the offset
that follows the last one; a gap is read, and a newer epoch in it ends this one; so does an append that failed, and then the state is loaded
anew.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from bascule.broker.addresses import Diverts
from bascule.broker.engine import Engine
from bascule.broker.errors import JournalUnavailable
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import Bodies, Message
from bascule.broker.policy import Policy
from bascule.broker.queue import Consumer
from bascule.broker.transactions import Transaction
from bascule.core.errors import BasculeError
from bascule.journal.offsets import UNKNOWN_OFFSET, OffsetMap
from bascule.journal.records import (
    KEY_OF_KIND,
    Kind,
    Op,
    RecordError,
    Send,
    decode_header,
    decode_send,
    encode_record,
    entries,
    json_entry,
)
from tests.sim.kafka import INGRESS, JOURNAL, Appender, Kafka, KafkaFault, ToWrite
from tests.sim.keeping import Following, Housekeeping, SteppedDown
from tests.sim.world import Process, Promise, TimeOut, World

#: As the real shell, in small: appends on their way at once; how long an acknowledgement waits for company.
IN_FLIGHT_MAX: Final = 3
LINGER_MS: Final = 5.0
#: Appends that are out for longer close the clients' connections.
APPEND_TIMEOUT_MS: Final = 250.0
POLL_MS: Final = 20.0
#: A client that hears nothing for so long takes the connection for broken.
SILENCE_MS: Final = 300.0
#: How long what a client says may be held up on its way. Its connection may be gone by then.
HOLD_UP_MS: Final = 120.0


class ConnectionLost(Exception):
    """The connection is gone, and with it every answer."""


class Connection:
    """A client's connection, with messages on their way in both directions, in order."""

    def __init__(self, broker: Broker, name: str) -> None:
        self.broker = broker
        self.world = broker.world
        self.name = name
        self.lost: Promise[None] = Promise()
        self.closed_by_broker = False
        self.slowness = 0.0  # how often what the client says is held up
        self.consumers: list[Port] = []
        self.transactions: dict[bytes, Transaction] = {}
        self._process = broker.process
        self._engine = broker.engine
        self._asked: dict[Promise[Any], None] = {}
        self._up_ms = self._down_ms = 0.0

    def up(self, action: Callable[..., None], *arguments: Any) -> None:
        """To the broker."""
        self._up_ms = max(self._up_ms, self.world.now_ms + self.world.random.random())
        if self.world.chance(self.slowness):
            self.world.note("hold up manager", self.name)
            self._up_ms += self.world.random.random() * HOLD_UP_MS
        self.world.after(self._up_ms - self.world.now_ms, self._process.do, self._at_broker, action, arguments)

    def _at_broker(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.closed_by_broker and self.broker.engine is self._engine and self.broker.serving:
            action(*arguments)
            self.broker.dispatch()

    def down(self, action: Callable[..., None], *arguments: Any) -> None:
        """To the client."""
        self._down_ms = max(self._down_ms, self.world.now_ms + self.world.random.random())
        self.world.after(self._down_ms - self.world.now_ms, self._at_client, action, arguments)

    def _at_client(self, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if not self.lost.done:
            action(*arguments)

    async def ask(self, action: Callable[..., None], *arguments: Any) -> Any:
        """To the broker, and wait for what it keeps the promise with, which comes last of the arguments. Raises ConnectionLost."""
        promise: Promise[Any] = Promise()
        if self.lost.done:
            raise ConnectionLost
        self._asked[promise] = None
        self.up(action, *arguments, promise)
        self.world.after(SILENCE_MS, self._still_open, promise)
        try:
            return await promise
        finally:
            self._asked.pop(promise, None)

    def _still_open(self, promise: Promise[Any]) -> None:
        if not promise.done:
            self.drop()

    def drop(self) -> None:
        """The client's end is closed, or the network breaks; the broker's end hears of it later."""
        if not self.lost.done:
            self._forget()
            gone_ms = max(self._up_ms, self.world.now_ms + self.world.random.random() * 20)
            self.world.after(gone_ms - self.world.now_ms, self._process.do, self._gone)

    def _forget(self) -> None:
        self.lost.keep(None)
        for port in self.consumers:
            port.arrived.keep(None)
        for promise in list(self._asked):
            promise.fail(ConnectionLost())

    def close_by_broker(self) -> None:
        """The broker's epoch has ended, or its life."""
        if not self.closed_by_broker:
            self.closed_by_broker = True
            self.world.after(self.world.random.random() * 3, self._forget)

    def end(self) -> None:
        """The broker ends it, and lives on."""
        self._gone()
        self.world.after(self.world.random.random() * 3, self._forget)

    def _gone(self) -> None:
        if self.closed_by_broker or self.broker.engine is not self._engine:
            return
        self.closed_by_broker = True
        self.broker.connections.pop(self, None)
        for transaction in self.transactions.values():
            self._engine.rollback(transaction)
        for port in self.consumers:
            self._engine.detach(port.consumer, failed=False)
        self.broker.dispatch()

    # What the broker answers by: a producer's link. Tokens are promises of the client.

    def accepted(self, token: Promise[None]) -> None:
        """The message is stored."""
        self.down(token.keep, None)

    def refused(self, token: Promise[None], error: BasculeError) -> None:
        """It will never be."""
        self.down(token.fail, error)


class Port:
    """A consumer's link: what the broker gives goes down the connection, into the client's inbox."""

    def __init__(self, connection: Connection, credit: int) -> None:
        self.connection = connection
        self.credit = credit
        self.inbox: deque[tuple[Message, int]] = deque()
        self.arrived: Promise[None] = Promise()
        self.consumer: Consumer

    def deliver(self, message: Message, delivery_count: int) -> None:
        """At the broker."""
        self.credit -= 1
        broker = self.connection.broker
        broker.on_delivery(broker.epoch, self.consumer.queue.id, message.mid, delivery_count)
        self.connection.down(self._take, message, delivery_count)

    def _take(self, message: Message, delivery_count: int) -> None:
        self.inbox.append((message, delivery_count))
        arrived, self.arrived = self.arrived, Promise()
        arrived.keep(None)

    def dispatched(self) -> None:
        """Nothing waits for that here."""

    def ended(self, error: BasculeError) -> None:
        """No queue is deleted here while it has consumers."""
        raise AssertionError(error)


class Broker:
    """One broker. ``launch`` starts its process; it begins an epoch, whether or not another broker serves."""

    def __init__(self, world: World, kafka: Kafka, name: str, policy: Policy, diverts: Diverts) -> None:
        self.world = world
        self.kafka = kafka
        self.name = name
        self.policy = policy
        self.diverts = diverts
        self.process = Process(world, name)
        self.process.alive = False
        self.serving = False
        self.serving_since_ms = 0.0
        self.epoch = -1
        self.connections: dict[Connection, None] = {}
        self.snapshot_records = 25
        self.on_step: Callable[[Broker], None] = lambda _: None  # of its housekeeping
        self.on_delivery: Callable[[int, int, int, int], None] = lambda *_: None  # epoch, queue, mid, delivery count
        self.stands_by = False  # once it is replaced
        self.slowness = 0.0  # how often it takes its time over a load
        self.hesitates = False  # over the next one it takes its time for sure
        self.elected: Promise[None] = Promise()
        self.journal = kafka.partition(JOURNAL)
        self.failure: Exception | None = None  # what keeps it from ever serving again
        self._launches = 0

    def launch(self, *, elected: bool = True) -> None:
        """Start, or start again, to serve or to stand by."""
        self._launches += 1
        self.elected = Promise()
        if elected:
            self.elected.keep(None)
        self.process = Process(self.world, f"{self.name}#{self._launches}")
        run = self.process.spawn(self._run())
        run.then(run.result)

    def kill(self) -> None:
        """kill -9."""
        self.process.kill()
        self._close_clients()
        self.serving = False

    def _close_clients(self) -> None:
        connections, self.connections = self.connections, {}
        for connection in connections:
            connection.close_by_broker()

    def connect(self, name: str) -> Connection | None:
        """A connection, if this broker takes any."""
        if not self.serving or not self.process.alive or self.process.stopped:
            return None
        connection = Connection(self, name)
        self.connections[connection] = None
        return connection

    @property
    def standing_by(self) -> bool:
        """Whether it follows the journal until it is elected."""
        return self.process.alive and not self.elected.done

    @property
    def superseded(self) -> bool:
        """Whether a newer epoch has begun, known to this broker or not."""
        return any(record.key == KEY_OF_KIND[Kind.EPOCH] for record in self.journal.records[self.epoch + 1 :])

    # -- epochs ------------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            try:
                await self._epoch()
            except SteppedDown as error:
                self.world.say(f"{self.process.name}: {error}")
                self._put_down()
                if not self.stands_by:
                    return
                self.elected = Promise()
            except RecordError as error:
                self.failure = error
                self._put_down()
                return
            except (JournalUnavailable, KafkaFault, TimeOut) as error:
                self.world.note("end epoch", f"{self.process.name}, {error}")
                self._put_down()
            await self.process.sleep(self.world.random.random() * 30)

    def _put_down(self) -> None:
        self.serving = False
        self._close_clients()
        self.appender.close()
        self._following.closed = True

    async def _epoch(self) -> None:
        self.ended: Promise[None] = Promise()
        self._started: Promise[int] = Promise()
        self._flushing = self._flush_due = False
        self._oldest_ms = self.world.now_ms
        self._timer_ms = float("inf")
        self.appender = Appender(self.kafka, self.process, self.journal, self._outcome)
        slowness, self.hesitates = 1.0 if self.hesitates else self.slowness, False
        self._following = Following(self.kafka, self.process, self.fresh_engine, slowness)
        loading = self.process.spawn(self._following.run())
        await self._wait_for_election(loading)
        names = [divert.name for divert in self.diverts.exclusive]
        start = encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {"exclusive": names}))
        self.appender.append(ToWrite(KEY_OF_KIND[Kind.EPOCH], start))
        epoch = self.epoch = await self.process.within(APPEND_TIMEOUT_MS, self._started)
        self._following.end = epoch + 1
        loader = await loading
        engine = self.engine = loader.engine
        self.offsets: OffsetMap = loader.offsets
        engine.journaling.begin(epoch, loader.fence.sequence)
        engine.addresses.use(self.diverts)
        self._next_offset = epoch + 1
        on_step = partial(self.on_step, self)
        self._housekeeping = Housekeeping(self.kafka, self.process, engine, self.offsets, self.ended, self.snapshot_records, on_step)
        engine.schedule.on_earlier = self._set_timer
        self._set_timer()
        self.serving = True
        self.serving_since_ms = self.world.now_ms
        self.world.say(f"{self.process.name} serves epoch {epoch}")
        self.process.spawn(self._tail(engine, self.ended))
        self.process.spawn(self._watch(self.ended))
        await self.ended

    async def _wait_for_election(self, loading: Promise[Loader]) -> None:
        """It follows the journal meanwhile. Raises what that fails with."""
        either: Promise[None] = Promise()
        for promise in (self.elected, loading):
            promise.then(partial(either.keep, None))
        await either
        if not self.elected.done:
            loading.result()

    def fresh_engine(self) -> Engine:
        """One without any state."""
        journaling = Journaling(self._append, on_work=self._work, violations=self.world.violations)
        return Engine(journaling, Bodies(None, 1 << 40), lambda: int(self.world.now_ms), self.policy, violations=self.world.violations)

    def end(self, error: Exception) -> None:
        """Nothing is answered any more."""
        if not self.ended.done:
            self.serving = False
            self._close_clients()
            self.ended.fail(error)

    def lose_election(self, epoch: int) -> None:
        """Another broker has been elected since this one began an epoch."""
        if self.serving and self.epoch == epoch:
            self.world.note("lose election", self.process.name)
            self.end(SteppedDown("another broker has been elected"))

    # -- appends -----------------------------------------------------------------------------------------------------

    def _append(self, key: bytes, value: bytes) -> None:
        if len(self.engine.journaling.in_flight) == 1:
            self._oldest_ms = self.world.now_ms
        self.appender.append(ToWrite(key, value))

    def _work(self, urgent: bool) -> None:
        self.process.after(0 if urgent else LINGER_MS, self._flush, self.ended)

    def _flush(self, ended: Promise[None]) -> None:
        if ended.done:
            return
        if len(self.engine.journaling.in_flight) >= IN_FLIGHT_MAX:
            self._flush_due = True
            return
        self._flush_due = False
        self.engine.journaling.flush()

    def _outcome(self, offset: int, error: str | None) -> None:
        if self.ended.done:
            return
        if error is not None or offset == UNKNOWN_OFFSET:
            self.end(JournalUnavailable(f"append failed: {error or 'stored at an unknown offset'}"))
        elif not self._started.done:
            self._started.keep(offset)
        elif offset == self._next_offset or self.own_gap(self._next_offset, offset):
            self._next_offset = offset + 1
            self.offsets.note(self.engine.journaling.in_flight[0].sequence, offset)
            self.engine.confirm()
            self._oldest_ms = self.world.now_ms
            self.engine.stalled = None
            if self._flush_due:
                self._flush(self.ended)
            self._housekeeping.appended()

    def own_gap(self, start: int, end: int) -> bool:
        """Whether nobody but Kafka's own clients was between two of our records; a newer epoch ends this one."""
        if start < self.journal.start:
            self.end(JournalUnavailable("what lies between its records is trimmed"))
            return False
        for record in self.journal.records[start:end]:
            try:
                newer = decode_header(record.value).kind is Kind.EPOCH
            except RecordError:
                continue
            if newer:
                self.world.note("step down", self.process.name)
                self.end(SteppedDown(f"epoch {record.offset} has begun"))
                return False
        return True

    async def _watch(self, ended: Promise[None]) -> None:
        while not ended.done:
            await self.process.sleep(APPEND_TIMEOUT_MS / 5)
            age_ms = self.world.now_ms - self._oldest_ms
            if not ended.done and self.engine.journaling.in_flight and age_ms > APPEND_TIMEOUT_MS and self.engine.stalled is None:
                self.world.note("stall", self.process.name)
                self.engine.stalled = JournalUnavailable("Kafka does not store")
                for connection in list(self.connections):
                    connection.end()

    def dispatch(self) -> None:
        """The end of a turn."""
        self.engine.dispatch()

    def _set_timer(self) -> None:
        due_ms = self.engine.schedule.next_ms
        if due_ms is not None and due_ms < self._timer_ms:
            self._timer_ms = due_ms
            self.process.after(max(0.0, due_ms - self.world.now_ms) + 1, self._tick, self.ended, due_ms)

    def _tick(self, ended: Promise[None], due_ms: float) -> None:
        if not ended.done and due_ms == self._timer_ms:
            self._timer_ms = float("inf")
            self.engine.tick()
            self.engine.dispatch()
            self._set_timer()

    # -- the ingress -------------------------------------------------------------------------------------------------

    async def _tail(self, engine: Engine, ended: Promise[None]) -> None:
        """Takes what the pipelines wrote for JMS destinations, in chunks of a few records."""
        position = engine.ingress_positions.get(0, 0)
        partition = self.kafka.partition(INGRESS)
        while not ended.done:
            try:
                records, following = await self.kafka.fetch(
                    self.process, partition, position, committed=True, count=self.world.random.randint(1, 5)
                )
            except KafkaFault:
                continue
            if ended.done:
                return
            sends: list[tuple[Send, bool]] = []
            for record in records:
                assert record.value is not None
                keep = dict(record.headers).get("unbound") == b"keep"
                sends += [(decode_send(record.value, start, end), keep) for op, start, end in entries(record.value) if op == Op.SEND]
            if records:
                taken: Promise[None] = Promise()
                engine.take_in(0, following, sends)
                engine.journaling.then(taken.keep, None)
                ended.then(lambda taken=taken: taken.keep(None))  # type: ignore[misc]
                await taken
            position = following
            await self.process.sleep(POLL_MS * self.world.random.random())
