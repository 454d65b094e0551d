"""One simulated run: a seed draws the clients, the faults and their times.

First safety is checked, then all is healed and liveness is demanded.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Final

from bascule.broker.addresses import Diverts, ExclusiveDivert
from bascule.broker.matching import wants
from bascule.broker.policy import AddressPolicy, Policy
from bascule.core.destination import Routing
from bascule.jms.selector import compile_selector
from bascule.pipelines.spec import DivertSpec, IngressSpec
from tests.sim.broker import Broker
from tests.sim.clients import Client, ReceivingClient, Sender, Stage, TransactedSender, id_of
from tests.sim.kafka import JOURNAL, Kafka, KafkaFault, NetworkConditions, Producer, ToWrite
from tests.sim.late_diverts import LateDiverts
from tests.sim.nemesis import Nemesis
from tests.sim.pipelines import Pipelines
from tests.sim.witness import Witness
from tests.sim.world import Process, World
from tests.sim.writer import committed_offset
from tests.sim.xa_resources import FaultRates
from tests.sim.xa_workload import XaWorkload
from tests.support.history import Divert as Diverted
from tests.support.history import Tally, check
from tests.support.history_audit import JournalAudit

#: How long faults happen, and how soon after that all messages must have arrived.
TROUBLE_MS: Final = 550.0
HEALED_MS: Final = 12_000.0
#: An epoch may still end for this long after the faults are healed. A broker that was elected just before the last kill, and that reads a
#: journal while it is trimmed, starts its epoch about 900 ms after the healing, and thereby ends the epoch of the broker before it.
AFTERMATH_MS: Final = 1_000.0
#: If nothing has happened for this time, nothing more will.
QUIET_MS: Final = 200.0
LOOK_MS: Final = 25.0
#: How often a broker is killed again after the run: then its stored state counts.
LAST_KILL: Final = 0.4
LAST_KILL_MS: Final = 300.0
#: Long enough for waiting messages to become old: as long as some rounds of housekeeping.
NAP_MS: Final = 400.0
#: Share of the runs in which messages of transactions are refused.
REFUSING: Final = 0.25
#: How often managers have one name, and a decision log each.
NAMESAKES: Final = 0.09
#: So often a database answers that a branch was rolled back, and a broker remembers few ends of branches.
FRANK: Final = 0.25
FORGETFUL: Final = 0.1
#: Share of the runs in which diverts are defined at run time.
DEFINING: Final = 0.05
#: So many ends such a broker remembers.
ENDED_MAX: Final = 2
DEAD_LETTERS: Final = "DLQ"
ODD: Final = "kind = 1"

DIVERTS: Final = (
    DivertSpec("orders", "orders", "t.orders"),
    DivertSpec("odd", "orders", "t.odd", selector=ODD),
    DivertSpec("moved", "moved", "t.moved"),
    DivertSpec("news", "news", "t.news"),
    DivertSpec("away", "away", "t.away", selector=ODD, exclusive=True),
    DivertSpec("back", "alerts", "t.alerts"),
)
#: The topic of a divert is among the sources: what this bridge wrote must not come in again.
INGRESSES: Final = (IngressSpec("alerts", "alerts", topics=("in.alerts", "t.news"), routing=Routing.ANYCAST, unbound="keep"),)


class Simulation:
    """A run. ``tally`` is the verdict of the checker."""

    def __init__(
        self,
        seed: int,
        *,
        trace: bool = False,
        violations: Collection[enum.StrEnum] = (),
        arrange: Callable[[Simulation], None] | None = None,
    ) -> None:
        """Create a run. ``violations`` are rules that the run breaks on purpose. ``arrange`` changes the run once its weather is drawn."""
        self.seed = seed
        self._arrange = arrange
        world = self.world = World(seed, violations)
        world.trace = [] if trace else None
        self.random = world.random
        self.kafka = Kafka(world)
        exclusive = [divert for divert in DIVERTS if divert.exclusive]
        diverts = Diverts(
            tuple(ExclusiveDivert(each.name, each.source, _matcher(each.selector)) for each in exclusive),
            tuple(each.source for each in DIVERTS),
        )
        policy = Policy(AddressPolicy(deliveries_max=6, dead_letter_address=DEAD_LETTERS, auto_delete=False))
        self.brokers = [Broker(world, self.kafka, name, policy, diverts) for name in ("red", "blue")]
        self.pipelines = Pipelines(world, self.kafka, DIVERTS, INGRESSES)
        refusals = Random(f"refusals {seed}")
        self.stage = Stage(world, self.brokers, refusals=refusals if refusals.random() < REFUSING else None)
        self.clients: list[Client] = []
        self.late: LateDiverts | None = None
        self.healed_ms = float("inf")
        self.nemesis = Nemesis(self)
        self.witness = Witness(self.kafka, self.brokers[0].fresh_engine)

    # -- the course of a run -----------------------------------------------------------------------------------------

    def run(self) -> Tally:
        """Run troubles and healing, and return the verdict."""
        self._draw_weather()
        if self._arrange is not None:
            self._arrange(self)
        self.brokers[0].launch()
        if self.brokers[1].stands_by:
            self.brokers[1].launch(elected=False)
        self.pipelines.launch()
        self._people()
        self.nemesis.begin()
        application = Process(self.world, "application")
        feeding = application.spawn(self._feed(application, self.random.randint(0, 12)))
        feeding.then(feeding.result)
        self.world.run(self.world.now_ms + TROUBLE_MS)
        self._heal()
        self._look()
        self.world.run(self.world.now_ms + HEALED_MS)
        return self._judge()

    def _draw_weather(self) -> None:
        """Draw this seed's mixture of faults, so that many seeds have only some of them."""
        pick = self.random

        def some(most: float) -> float:
            return pick.random() * most if pick.random() < 0.5 else 0.0

        self.kafka.weather = NetworkConditions(
            lost=some(0.04),
            unanswered=some(0.06),
            held=some(0.25),
            slow=some(0.1),
            failed_append=some(0.03),
            delay_ms=pick.choice((0.5, 2.0, 6.0)),
            transaction_ms=pick.choice((150.0, 900.0)),
            lag_ms=pick.choice((0.0, 0.0, 1.0, 5.0)),
        )
        self.pipelines.reruns = some(0.4)
        self.pipelines.zombies = some(0.4)
        self.pipelines.restlessness = some(0.4)
        stand_by, slowness = pick.random() < 0.3, some(0.6)
        self.nemesis.frailty, self.nemesis.hesitation = some(0.1), some(0.8)
        for broker in self.brokers:
            broker.stands_by, broker.slowness, broker.on_step = stand_by, slowness, self.nemesis.housekeeping
            broker.on_delivery = self.witness.handed_out
            broker.on_stale_delivery = self.witness.handed_out_stale
            broker.on_step_down = self.nemesis.replaced
            broker.snapshot_records = pick.choice((5, 12, 25, 1000))
        self.mishaps = FaultRates(some(0.1), some(0.1), some(0.2), some(0.5), some(0.3))
        self.mishaps.namesakes = Random(f"xa names {self.seed}").random() < NAMESAKES
        self.mishaps.frank = Random(f"xa answers {self.seed}").random() < FRANK
        if Random(f"xa memory {self.seed}").random() < FORGETFUL:
            self.forget_ends()
        self.nemesis.draw()
        if Random(f"definitions {self.seed}").random() < DEFINING:
            self.define_diverts()

    def define_diverts(self) -> LateDiverts:
        """Let an administrator define diverts in this run. Nothing but a divert wants the messages for them."""
        if self.late is None:
            self.late = LateDiverts(self.stage, self.kafka)
            self.pipelines.beside = self.late.follow
            for broker in self.brokers:
                broker.follows_definitions = True
                broker.diverts = replace(broker.diverts, replayable=())
        return self.late

    def forget_ends(self) -> None:
        """From now on the brokers remember few ends of branches."""
        for broker in self.brokers:
            broker.ended_max = ENDED_MAX

    def _people(self) -> None:
        stage, pick = self.stage, self.random
        stage.nap_ms = pick.choice((0.0, NAP_MS))
        pause_ms = pick.choice((8.0, 25.0, 60.0))
        self.senders = [
            Sender(stage, "s1", "orders", pick.randint(3, 14), pause_ms),
            Sender(stage, "s2", "away", pick.randint(0, 6), pause_ms),
            Sender(stage, "s3", "topic:news", pick.randint(0, 8), pause_ms),
            TransactedSender(stage, "x1", ("orders", "topic:news"), pick.randint(0, 7), pause_ms),
            TransactedSender(stage, "x2", ("orders", "alerts"), pick.randint(0, 3), pause_ms),
        ]
        self.takers = [
            ReceivingClient(stage, "m1", "orders", to="moved"),
            *([ReceivingClient(stage, "m2", "orders", to="moved")] if pick.random() < 0.4 else []),
            ReceivingClient(stage, "t1", "moved", transacted=pick.random() < 0.5),
            ReceivingClient(stage, "t2", "away", naps=True),
            ReceivingClient(stage, "t3", "alerts", transacted=pick.random() < 0.5),
            ReceivingClient(stage, "d1", "topic:news", subscription="all"),
            ReceivingClient(stage, "d2", "topic:news", subscription="some", selector=ODD, naps=True),
            ReceivingClient(stage, "undertaker", DEAD_LETTERS),
        ]
        self.xa_workload = XaWorkload(stage, pick.choice((0, 4, 8)), pause_ms, self.mishaps)
        if self.late is not None:
            self.late.begin()

    async def _feed(self, process: Process, count: int) -> None:
        """Write records for the ingress as a Kafka application; aborted records do not count."""
        partition = self.kafka.partition("in.alerts")
        for number in range(count):
            producer = Producer(self.kafka, process, "application")
            with suppress(KafkaFault):
                await producer.init()
                producer.begin()
                await producer.produce(partition, [ToWrite(None, f"k-{number}".encode())])
                await process.sleep(self.random.random() * 30)
                aborted = self.random.random() < 0.2
                if aborted:
                    self.world.note("abort input")
                await producer.end(commit=not aborted)
            await process.sleep(self.random.random() * 50)

    # -- the end -----------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        """End all faults, and let every part run."""
        self.healed_ms = self.world.now_ms
        self.world.say("healed")
        self.kafka.cluster.heal()
        if self.world.chance(LAST_KILL):
            self.world.after(self.random.random() * LAST_KILL_MS, self._kill_newest)
        self.pipelines.reruns = self.pipelines.zombies = 0.0
        self.xa_workload.calm()
        self.stage.nap_ms = 0.0
        self.stage.refusals = None
        for broker in self.brokers:
            broker.slowness = self.nemesis.frailty = 0.0
            broker.elected_unawares = False
        drivers = self.pipelines.drivers
        managers = self.xa_workload.processes
        for process in (
            *(each.process for each in self.brokers),
            *(each.process for each in managers),
            *(each.process for each in drivers),
        ):
            if process.stopped:
                process.go_on()
        for driver in drivers:
            for worker in driver.workers:
                if worker.process.stopped:
                    worker.process.go_on()
        self._supervise()

    def _kill_newest(self) -> None:
        for broker in self._newest():
            self.world.note("kill broker", broker.process.name)
            self.nemesis.kill(broker, broker.process)

    def _supervise(self) -> None:
        """Restart dead parts, and tell replaced brokers: one may have begun when the others were told."""
        for broker in self.brokers:
            if broker.serving and broker.superseded:
                broker.lose_election(broker.epoch)
        drivers = self.pipelines.drivers
        if not any(driver.process.alive and not driver.taken_over for driver in drivers):
            self.pipelines.launch()
        up = [broker for broker in self.brokers if broker.process.alive and not broker.standing_by]
        if not any(broker.serving or broker.world.now_ms - self.healed_ms < 500 for broker in up):
            self.nemesis.take_over()
        self.xa_workload.supervise()
        self.world.after(100, self._supervise)

    def _look(self) -> None:
        """Check whether the run is over."""
        if self._drained():
            self.world.stop()
        self.world.after(LOOK_MS, self._look)

    def _drained(self) -> bool:
        """Return True if senders are done, pipelines at their ends, and nothing has arrived for a while."""
        serving = [broker for broker in self.brokers if broker.serving]
        since_ms = max((self.stage.last_work_ms, self.healed_ms, *(broker.serving_since_ms for broker in serving)))
        if not serving or self.world.now_ms - since_ms < QUIET_MS or not all(sender.done.done for sender in self.senders):
            return False
        if any(self.xa_workload.in_doubt(self._newest())) or (self.late is not None and any(self.late.left())):
            return False
        return not self.kafka.unfinished and all(committed_offset(self.kafka, key) >= end for key, end in self._ends())

    def _newest(self) -> list[Broker]:
        """Return the serving broker that counts: another one may not have heard of its end yet if nobody has asked it for anything."""
        return sorted((broker for broker in self.brokers if broker.serving), key=lambda broker: broker.epoch)[-1:]

    def _ends(self) -> Iterator[tuple[str, int]]:
        for ingress, partition in self.pipelines.sources():
            yield self.pipelines.key(ingress, partition), partition.committed_end()

    def _judge(self) -> Tally:
        def found(topic: str) -> list[str]:
            return [(record.value or b"").decode() for record in self.kafka.partition(topic).all_committed()]

        diverted = {
            divert.target: Diverted(
                f"topic:{divert.source}" if divert.source == "news" else divert.source, found(divert.target),
                divert.selector, divert.exclusive, ordered=not divert.selector,
            )
            for divert in DIVERTS
        }  # fmt: skip
        self.xa_workload.note()
        audit = self._audit()
        journal = audit.result()
        tally = check(
            self.stage.operations,
            diverted=diverted,
            ingested={"alerts": found("in.alerts")},
            journal=journal,
            spills=dict.fromkeys(("orders", "moved", "away", "alerts", "topic:news"), (DEAD_LETTERS,)),
            left=dict(self._left()),
            healed_ms=self.healed_ms + AFTERMATH_MS,
            clock_ms=0,
        )
        self.xa_workload.judge(tally, self._newest())
        self.witness.judge(tally, audit.counts)
        if self.late is not None:
            self.late.judge(tally, journal)
        tally.report("stuck", "records that could not be carried", found("dead-letter"))
        tally.report("claimed-twice", "tasks worked from a position that another driver run held", self.pipelines.claimed_twice)
        return tally

    def _left(self) -> Iterator[tuple[str, list[str]]]:
        for sender in self.senders:
            if not sender.done.done:
                yield f"{sender.name}, a sender", [sender.name]
        for broker in self.brokers:
            if broker.failure is not None:
                yield f"{broker.name}, which cannot load its journal: {broker.failure}", [broker.name]
        if self.late is not None:
            yield from self.late.left()
        serving = self._newest()
        for broker in serving:
            for queue in broker.engine.addresses.queues.values():
                yield queue.name, [id_of(message.body or b"") for message in (*queue.untouched(), *queue.unacked())]
        if not serving:
            yield "front of brokers that do not serve", ["all"]
        for key, end in self._ends():
            if committed_offset(self.kafka, key) < end:
                yield f"front of {key}, at {committed_offset(self.kafka, key)} of {end}", [key]

    def _audit(self) -> JournalAudit:
        """Return an independent audit of the journal: records that do not belong to the newest epoch begun before them do not count."""
        audit = JournalAudit(id_of)
        for record in self.kafka.partition(JOURNAL).records:
            assert record.value is not None
            audit.take(record.offset, record.value)
        return audit


def _matcher(selector: str) -> Callable[[bytes], bool]:
    compiled = compile_selector(selector)
    return lambda body: wants(compiled, body)
