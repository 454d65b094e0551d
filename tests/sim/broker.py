"""A broker process of the simulation: the real protocols of a broker, with effects on the model of Kafka, and clients in memory.

See bascule.broker.node, epoch, following, housekeeping and intake.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from operator import attrgetter
from typing import Final

from bascule.broker.addresses import Diverts
from bascule.broker.coverage import DivertCoverage
from bascule.broker.engine import Engine
from bascule.broker.epoch import EpochProtocol, SteppedDown
from bascule.broker.epoch_effects import EpochLimits
from bascule.broker.ingress_tail import Chunk, IngressReading, IngressRecord, IngressTaking
from bascule.broker.journaling import Journaling
from bascule.broker.loading import Loader
from bascule.broker.message import Bodies
from bascule.broker.node import ElectionOutcome, NodeProtocol
from bascule.broker.policy import Policy
from bascule.core.errors import BasculeError
from bascule.journal.errors import RecordError
from bascule.journal.records import KEY_OF_KIND, Kind
from tests.sim.connections import Connection
from tests.sim.control import CoverageControl
from tests.sim.effects import ProcessEffects, answered
from tests.sim.housekeeping import FETCH_MAX, INGRESS_ID, Following, Housekeeping
from tests.sim.kafka import INGRESS, JOURNAL, Appender, Kafka, ToWrite
from tests.sim.world import Process, Promise, World

#: Small versions of the real limits. Every record counts as large, so that several are in flight.
LIMITS: Final = EpochLimits(append_timeout_s=0.25, still_max_s=0.15, in_flight_max=3, small_record_bytes=0, watch_s=0.05, probe_s=0.1)
POLL_MS: Final = 20.0
#: Pause before the next try of a broker that could not serve.
PAUSE_MS: Final = 30.0
_KEY: Final = attrgetter("key")
_EPOCH_KEY: Final = KEY_OF_KIND[Kind.EPOCH]


class Broker:
    """One broker. ``launch`` starts its process, which begins an epoch when it is elected, whether or not another broker serves."""

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
        self.on_step_down: Callable[[], None] = lambda: None
        self.on_delivery: Callable[[int, int, int, int], None] = lambda *_: None  # epoch, queue, mid, delivery count
        self.on_stale_delivery: Callable[[int], None] = lambda _: None  # mid
        self.stands_by = False  # from the beginning of a run
        self.ended_max: int | None = None  # remembered outcomes of branches; None: as many as the product
        self.elected_unawares = True  # a restarted process is elected, even if another one was elected meanwhile
        self.slowness = 0.0  # how often a load is slow
        self.hesitates = False  # the next load is slow for sure
        self.elected: Promise[None] = Promise()
        self.journal = kafka.partition(JOURNAL)
        self.failure: Exception | None = None  # an error that keeps it from ever serving again
        self.current: BrokerEpoch | None = None
        self.follows_definitions = False  # of diverts that administrators define at run time
        self._launches = 0

    def launch(self, *, elected: bool = True) -> None:
        """Start or restart the process, to serve or to stand by."""
        self._launches += 1
        self.elected = Promise()
        if elected:
            self.elected.keep(None)
        self.process = Process(self.world, f"{self.name}#{self._launches}")
        self.current = None
        run = self.process.spawn(self._run(self.process))
        run.then(run.result)

    async def _run(self, process: Process) -> None:
        try:
            await BrokerNode(self, process).protocol.run()
        except RecordError as error:
            self.failure = error
        except BasculeError as error:
            self.world.note("epoch ended", f"{process.name}, {error}")
            self.world.after(self.world.random.random() * PAUSE_MS, self._launch_again, process)  # restarted by its supervisor

    def _launch_again(self, process: Process) -> None:
        if self.process is process and process.alive:
            self.kill()
            self.launch(elected=self.elected_unawares or not self.superseded)

    def kill(self) -> None:
        """Kill the process (kill -9)."""
        self.process.kill()
        if self.current is not None:
            self.current.appender.close()
        self.close_clients()
        self.serving = False

    def close_clients(self) -> None:
        """End every connection."""
        connections, self.connections = self.connections, {}
        for connection in connections:
            connection.close_by_broker()

    def connect(self, name: str) -> Connection | None:
        """Return a connection, if this broker accepts any."""
        if not self.serving or not self.process.alive or self.process.stopped:
            return None
        connection = Connection(self, name)
        self.connections[connection] = None
        return connection

    @property
    def engine(self) -> Engine:
        """Return the engine of the current epoch."""
        if self.current is None:
            raise RuntimeError(f"{self.name} has no epoch")
        return self.current.protocol.engine

    @property
    def standing_by(self) -> bool:
        """Return True if it follows the journal until it is elected."""
        return self.process.alive and not self.elected.done

    @property
    def replaced_unawares(self) -> bool:
        """Return True if it was suspended in this epoch, and a newer epoch has begun."""
        return self.current is not None and self.current.stood_still and self.superseded

    @property
    def superseded(self) -> bool:
        """Return True if a newer epoch has begun, whether or not this broker knows."""
        return _EPOCH_KEY in map(_KEY, islice(self.journal.records, self.epoch + 1, None))

    def fresh_engine(self, journaling: Journaling | None = None) -> Engine:
        """Return an engine without state."""
        violations = self.world.violations
        journaling = journaling or Journaling(lambda *_: None, violations=violations)
        engine = Engine(journaling, Bodies(None, 1 << 40), lambda: int(self.process.wall_ms), self.policy, violations=violations)
        engine.branches.ended_max = self.ended_max
        return engine

    def awake(self) -> bool:
        """Return True if it may act."""
        return self.current is not None and self.current.protocol.awake()

    def dispatch(self) -> None:
        """End a turn."""
        if self.awake():
            self.engine.dispatch()

    def lose_election(self, epoch: int) -> None:
        """Note that another broker was elected after this one had begun an epoch."""
        if self.serving and self.epoch == epoch and self.current is not None:
            self.world.note("lose election", self.process.name)
            self.current.protocol.lose_election()


class BrokerEpoch(ProcessEffects):
    """One epoch of a broker: see bascule.broker.epoch.EpochEffects."""

    def __init__(self, broker: Broker, node: NodeProtocol, process: Process) -> None:
        super().__init__(process)
        self._broker, self._node, self._kafka, self._journal = broker, node, broker.kafka, broker.journal
        self.end: Promise[BasculeError] = Promise()
        self.housekeeping: Housekeeping | None = None
        self.stood_still = False  # for so long that another broker may serve
        self._asked_s = 0.0  # when the protocol last asked for the time
        self.appender = Appender(self._kafka, process, self._journal, self._outcome)
        violations = process.world.violations
        self.coverage: DivertCoverage | None = None
        if broker.follows_definitions:
            self.coverage = DivertCoverage(CoverageControl(broker.kafka, process), (), LIMITS.append_timeout_s, violations=violations)
        self.protocol = EpochProtocol(self, LIMITS, JOURNAL, broker.diverts, coverage=self.coverage, violations=violations)
        slowness, broker.hesitates = 1.0 if broker.hesitates else broker.slowness, False
        self.following = Following(self._kafka, process, self.protocol.fresh_engine, slowness)
        self.loading = process.spawn(self.following.run())

    def now_s(self) -> float:
        """Return the world's time. A running broker asks for it all the time."""
        now_s = super().now_s()
        if self.protocol.loaded and now_s - self._asked_s > LIMITS.still_max_s:
            self.stood_still = True
        self._asked_s = now_s
        return now_s

    def _outcome(self, offset: int, failure: str | None) -> None:
        self.protocol.outcomes([(offset, failure)])

    def append(self, key: bytes, value: bytes) -> None:
        """Append a record with the epoch's producer."""
        self.appender.append(ToWrite(key, value))

    async def append_large(self, key: bytes, make: Callable[[], bytes]) -> None:
        """Append a large record with the epoch's producer."""
        self.append(key, make())

    async def records(self, start: int, end: int) -> Sequence[tuple[int, bytes | None]]:
        """Return records, which are fetched piece by piece."""
        found: list[tuple[int, bytes | None]] = []
        while start < end:
            count = min(FETCH_MAX, end - start)
            records, start = await answered(self._kafka.fetch(self.process, self._journal, start, committed=False, count=count))
            found += [(record.offset, record.value) for record in records if record.offset < end]
        return found

    async def recreated(self) -> bool:
        """Return False: no topic is deleted here."""
        return False

    async def takes_appends(self) -> bool:
        """Return True if Kafka answers a new client."""
        try:
            await answered(self._kafka.end_of(self.process, self._journal))
        except BasculeError:
            return False
        return True

    async def state_before(self, end: int) -> Loader:
        """Return the state when all of it is read."""
        self._broker.epoch = end - 1
        self.following.end = end
        return await self.loading

    def fresh_engine(self, journaling: Journaling) -> Engine:
        """Return an engine without state."""
        return self._broker.fresh_engine(journaling)

    def loaded(self) -> None:
        """Begin housekeeping."""
        broker, protocol = self._broker, self.protocol
        on_step = partial(broker.on_step, broker)
        coverage = self.coverage
        held = None if coverage is None else lambda: coverage.held
        self.housekeeping = Housekeeping(
            self._kafka, self.process, protocol.engine, protocol.offsets, lambda: not protocol.ended, broker.snapshot_records, on_step, held
        )

    def stored(self, size_bytes: int) -> None:
        """Count a stored record for housekeeping."""
        if self.housekeeping is not None:
            self.housekeeping.protocol.appended(size_bytes)

    def confirmed(self) -> None:
        """Tell the node that Kafka has stored something."""
        self._node.confirmed()

    def ticked(self) -> None:
        """Do nothing."""

    def stalled(self, error: BasculeError) -> None:
        """Tell the node that clients must not wait here."""
        self._node.stalled(error)

    def ended(self, error: BasculeError) -> None:
        """Tell the node that the epoch has ended."""
        if isinstance(error, SteppedDown):
            self.process.world.note("step down", f"{self.process.name}, {error}")
        self.end.keep(error)

    def close(self) -> None:
        """End everything that belongs to the epoch."""
        self.protocol.close()
        self.appender.close()
        self.following.closed = True


class BrokerNode(ProcessEffects):
    """The life of a broker process: see bascule.broker.node.NodeEffects."""

    def __init__(self, broker: Broker, process: Process) -> None:
        super().__init__(process)
        self._broker = broker
        self.protocol = NodeProtocol(self, violations=process.world.violations)
        self._intake: BrokerIntake | None = None

    @property
    def _epoch(self) -> BrokerEpoch:
        if self._broker.current is None:
            raise RuntimeError(f"{self.process.name} has no epoch")
        return self._broker.current

    def stopping(self) -> bool:
        """Return False: no broker is told to stop here."""
        return False

    async def listen(self) -> None:
        """Do nothing: there are no ports here."""

    def stop_listening(self) -> None:
        """Refuse clients."""
        self._broker.serving = False

    def begin_epoch(self) -> None:
        """Begin to follow the journal."""
        self._broker.current = BrokerEpoch(self._broker, self.protocol, self.process)

    async def close_epoch(self) -> None:
        """End everything that belongs to the epoch."""
        self._epoch.close()

    async def election(self, timeout_s: float | None) -> ElectionOutcome:
        """Return the first outcome of a wait for the election."""
        broker, loading = self._broker, self._epoch.loading
        either: Promise[None] = Promise()
        for promise in (broker.elected, loading):
            promise.then(partial(either.keep, None))
        if timeout_s is not None:
            self.process.world.after(timeout_s * 1000, either.keep, None)
        await either
        if broker.elected.done:
            return ElectionOutcome.ELECTED
        return ElectionOutcome.LOAD_ENDED if loading.done else ElectionOutcome.TIMEOUT

    def is_elected(self) -> bool:
        """Return True if it is elected, as far as it knows."""
        return self._broker.elected.done

    async def confirmed(self) -> bool:
        """Return True if it is elected; Kafka would say the same."""
        return self._broker.elected.done

    async def load_ended(self) -> None:
        """Raise the error that ended the load, if any."""
        self._epoch.loading.result()

    async def start_epoch(self) -> None:
        """Start the epoch with a start record that has only the diverts."""
        await self._epoch.protocol.start({})

    def lose_election(self) -> None:
        """End the epoch."""
        self._epoch.protocol.lose_election()

    async def serve(self) -> None:
        """Accept clients, and begin the intake."""
        broker, epoch = self._broker, self._epoch
        broker.serving = True
        broker.serving_since_ms = self.process.world.now_ms
        self.process.world.say(f"{self.process.name} serves epoch {broker.epoch}")
        self._intake = BrokerIntake(broker, self.process, epoch.protocol.engine)

    async def epoch_end(self) -> BasculeError | None:
        """Return why the epoch has ended."""
        return await self._epoch.end

    def flush(self) -> None:
        """Append the open record."""
        self._epoch.protocol.flush()

    async def stop_intake(self) -> None:
        """Stop the intake."""
        if self._intake is not None:
            self._intake.over = True

    def close_clients(self, error: BasculeError | None) -> None:
        """Close the connections. The broker may continue."""
        if self._epoch.protocol.ended:
            self._broker.close_clients()
        else:
            for connection in list(self._broker.connections):
                connection.end()

    async def clients_left(self, timeout_s: float) -> None:
        """Do nothing: clients leave at once here."""

    async def hand_over(self, timeout_s: float) -> None:
        """Do nothing: no broker stops in an orderly way here."""

    def check_room(self) -> None:
        """Check nothing, since no record is too large here. A replaced broker has lost the election, too."""
        error = self._epoch.end.result()
        if isinstance(error, SteppedDown):
            self._broker.elected = Promise()
            self._broker.on_step_down()

    async def pause(self, delay_s: float) -> None:
        """Pause for a scaled-down time."""
        await self.process.sleep(self.process.world.random.random() * delay_s * PAUSE_MS)

    def standing_by(self) -> None:
        """Do nothing."""

    def ready(self) -> None:
        """Do nothing: clients retry."""


class BrokerIntake(ProcessEffects):
    """The intake of the pipelines' records for JMS destinations: see bascule.broker.ingress_tail.IngressEffects."""

    def __init__(self, broker: Broker, process: Process, engine: Engine) -> None:
        super().__init__(process)
        self._kafka, self._engine = broker.kafka, engine
        self._partition = broker.kafka.partition(INGRESS)
        self._position, self._committed = 0, True
        self.over = False
        self._stored: Promise[None] = Promise()  # the chunk that is in flight to the journal
        reading = IngressReading(self, INGRESS, 0, topic_id=engine.ingress_topic_id, violations=process.world.violations)
        self._taking = IngressTaking(engine, INGRESS, 0, soon=self.soon, taken=self._taken, ending=self.ending)
        process.spawn(reading.run(engine.ingress_positions.get(0, 0)))

    def ending(self) -> bool:
        """Return True if the epoch has ended."""
        return self.over

    async def topic_id(self) -> str:
        """Return the id of the topic, which is never deleted."""
        return INGRESS_ID

    def topic_view(self) -> int:
        """Return the same number at all times."""
        return 0

    def read_topic_id(self) -> str:
        """Return the id of the topic, which is never deleted."""
        return INGRESS_ID

    async def open(self, offset: int, committed: bool) -> None:
        """Set the position; no request is needed."""
        self._position, self._committed = offset, committed

    async def read(self) -> Sequence[IngressRecord]:
        """Return a few records."""
        world = self.process.world
        await self.process.sleep(POLL_MS * world.random.random())
        fetched = self._kafka.fetch(
            self.process, self._partition, self._position, committed=self._committed, count=world.random.randint(1, 5)
        )
        records, self._position = await answered(fetched)
        return [IngressRecord(record.offset, record.value, dict(record.headers).get("unbound") == b"keep") for record in records]

    async def open_transaction(self) -> int:
        """Return -1: open transactions are not looked for here."""
        return -1

    async def pause(self, delay_s: float) -> None:
        """Pause for a scaled-down time."""
        await self.process.sleep(self.process.world.random.random() * delay_s * PAUSE_MS)

    async def hand_over(self, chunk: Chunk) -> None:
        """Pass a chunk on, one at a time."""
        if not self.over:
            room: Promise[None] = Promise()
            self._stored = room
            self._taking.gather(chunk)
            await room

    def _taken(self) -> None:
        self._stored.keep(None)

    def first_seen(self, topic_id: str) -> None:
        """Tell the engine, which is on the same thread."""
        self._engine.ingress_is(topic_id, dict(self._engine.ingress_positions))

    def largest(self) -> int:
        """Return the largest message, for which there is always room."""
        return self._engine.local_transactions.bytes_max
