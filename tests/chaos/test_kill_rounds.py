"""Broker, Spark driver and Spark workers die by kill -9 at random moments under load: nothing is lost, nothing doubled, anywhere.

BASCULE_CHAOS_SECONDS says how long the rounds of `make test` go on, BASCULE_CHAOS_ROUNDS how many `make soak` has; a seed that was printed
is given again by BASCULE_CHAOS_SEED.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from tests.scenarios.topics import Reader, create, produce

from bascule.embedded.kafka import EmbeddedKafka
from bascule.testing.history import Operation, check
from bascule.testing.qpid import QpidPeer
from bascule.testing.storm import Storm
from bascule.testing.system import System, descendants, wait_for

CONFIG = """
[pipelines]
master = "local[2]"

[[divert]]
name = "orders"
from = "orders"
to = "PREFIX.orders"
start = "earliest"

[[divert]]
name = "moved"
from = "moved"
to = "PREFIX.moved"
start = "earliest"

[[ingress]]
name = "payments"
topics = ["PREFIX.payments"]
to = "payments"
routing = "anycast"
unbound = "keep"
"""
DIVERTED = ("orders", "moved")
CLIENTS = ("send:orders", "send-tx:orders", "move:orders>moved", "take:moved", "take:payments")
RATE = 60  # messages per second of each sender: two cores are to be busy with deaths, not with messages
#: Each round's kill comes at a random moment of this time.
MOMENT_MAX_S = 1.5
#: How often a driver is killed again while it starts.
KILLED_IN_START = 0.25
BURST = 5  # records for the ingress, every BURST_S
BURST_S = 0.1
SECONDS = float(os.environ.get("BASCULE_CHAOS_SECONDS", "75"))
ROUNDS = int(os.environ.get("BASCULE_CHAOS_ROUNDS", "20"))
DRAIN_S = 120.0
THE_END = "the end"


class Chaos:
    """The system under load, what kills it, and what the world has seen in the end."""

    def __init__(self, system: System, storm: Storm, seed: int) -> None:
        self.system = system
        self.storm = storm
        self.seed = seed
        self.random = random.Random(seed)
        self.kills: dict[str, int] = {"broker": 0, "pipelines": 0, "worker": 0}
        self._produced = 0
        self.operations: list[Operation] = []
        self.diverted: dict[str, tuple[str, list[str]]] = {}

    def rounds(self, another: Callable[[int], bool]) -> None:
        """Kill, while ``another(rounds so far)`` is true; every part has its turn, in an order that differs."""
        victims: list[str] = []
        while another(sum(self.kills.values())):
            if not victims:
                victims = self.random.sample(sorted(self.kills), len(self.kills))
            victim = victims.pop()
            self._work_for(self.random.random() * MOMENT_MAX_S)
            getattr(self, f"_kill_{victim}")()
            self.kills[victim] += 1

    def _topic(self, name: str) -> str:
        return f"{self.system.prefix}.{name}"

    def _kill_broker(self) -> None:
        self.system.broker.restart()

    def _kill_pipelines(self) -> None:
        if self.random.random() > KILLED_IN_START:
            self._wait_pipelines()
        self.system.pipelines.kill()
        self.system.pipelines.launch()

    def _wait_pipelines(self) -> None:
        while "ready pipelines=" not in self.system.pipelines.said():
            assert self.system.pipelines.running, self.system.pipelines.said()[-3000:]
            self._work_for(BURST_S)

    def _kill_worker(self) -> None:
        self._wait_pipelines()

        def workers() -> list[int]:
            return [
                pid for pid, command in descendants(self.system.pipelines.pid).items() if "pyspark" in command and "java" not in command
            ]

        wait_for(workers, "a Spark worker")
        with suppress(ProcessLookupError):
            os.kill(self.random.choice(sorted(workers())), signal.SIGKILL)

    def _work_for(self, duration_s: float) -> None:
        """Records for the ingress, while the Java clients do their part."""
        deadline = time.monotonic() + duration_s
        while True:
            first = self._produced
            produce(self.system.bootstrap, self._topic("payments"), (f"payment-{number}" for number in range(first, first + BURST)))
            self._produced += BURST
            if time.monotonic() > deadline:
                return
            time.sleep(BURST_S)

    def drain(self, peer: QpidPeer) -> None:
        """No more deaths and no more messages; everything arrives."""
        self._wait_pipelines()

        def payments() -> int:
            return len({id for each in self.storm.history() if each.source == "payments" and each.outcome != "fail" for id in each.ids})

        wait_for(lambda: payments() >= self._produced, f"{self._produced} payments", DRAIN_S)
        self.storm.stop()
        self.operations = self.storm.history()
        ids = tuple(f"payment-{number}" for number in range(self._produced))
        self.operations.append(Operation("kafka", ids, "ok", target="payments"))
        connection = peer.connect(self.system.url)
        for queue in DIVERTED:
            topic = self._topic(queue)
            connection.session().producer(f"queue:{queue}").send(THE_END)
            with closing(Reader(self.system.bootstrap, topic)) as reader:
                self.diverted[topic] = (queue, reader.read_until(THE_END)[:-1])
        connection.close()


def run(chaos: Chaos, peer: QpidPeer, another: Callable[[int], bool], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        chaos.rounds(another)
        chaos.drain(peer)
        tally = check(chaos.operations, diverted=chaos.diverted)
    finally:
        with capsys.disabled():
            print(f"\nchaos: seed {chaos.seed}, kills {chaos.kills}")  # noqa: T201
    with capsys.disabled():
        print(f"chaos: {tally}")  # noqa: T201
    assert tally.anomalies == []
    assert tally.sent > 0
    assert all(chaos.kills.values()), "a part was never killed"


@contextmanager
def blowing(kafka: EmbeddedKafka, directory: Path, prefix: str) -> Iterator[Chaos]:
    create(kafka.bootstrap, *(f"{prefix}.{name}" for name in (*DIVERTED, "payments")))
    seed = int(os.environ.get("BASCULE_CHAOS_SEED", random.randrange(1 << 32)))
    with System(kafka.bootstrap, directory, prefix=prefix, config=CONFIG.replace("PREFIX", prefix)) as system:
        system.pipelines.start()
        with Storm(system.failover_url, directory, *CLIENTS, rate=RATE, batch=5, quiet_s=3) as storm:
            yield Chaos(system, storm, seed)


@pytest.fixture(scope="module")
def chaos(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    with blowing(kafka, tmp_path_factory.mktemp("chaos"), "chaos") as found:
        yield found


@pytest.mark.timeout(600)
def test_nothing_is_lost_or_doubled_whatever_is_killed_whenever(
    chaos: Chaos, qpid_peer: QpidPeer, capsys: pytest.CaptureFixture[str]
) -> None:
    end = time.monotonic() + SECONDS
    run(chaos, qpid_peer, lambda done: done < len(chaos.kills) or time.monotonic() < end, capsys)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_lost_or_doubled_in_many_rounds(
    kafka: EmbeddedKafka, tmp_path: Path, qpid_peer: QpidPeer, capsys: pytest.CaptureFixture[str]
) -> None:
    with blowing(kafka, tmp_path, "chaos-rounds") as chaos:
        run(chaos, qpid_peer, lambda done: done < ROUNDS, capsys)


def test_an_anomaly_that_is_planted_in_what_was_seen_is_found(chaos: Chaos) -> None:
    topic, (queue, copies) = next(iter(chaos.diverted.items()))
    produce(chaos.system.bootstrap, topic, [copies[0], "a stranger"])
    with closing(Reader(chaos.system.bootstrap, topic)) as reader:
        values = reader.read_until("a stranger")
    found = check(chaos.operations, diverted={topic: (queue, [value for value in values if value != THE_END])}).anomalies
    assert [str(anomaly) for anomaly in found] == [
        f"divert-dup: 1 twice in topic {topic} ({copies[0]})",
        f"unexpected: 1 in topic {topic} and never sent to {queue} (a stranger)",
    ]
    taken = next(each for each in chaos.operations if each.source == "payments" and each.outcome == "ok")
    assert check([each for each in chaos.operations if each is not taken]).anomalies != []
    assert check([*chaos.operations, taken]).anomalies != []
