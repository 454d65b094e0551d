"""The whole system under many seeds: no seed shows an anomaly, and each planted fault is found.

BASCULE_SIM_SEEDS sets the number of seeds, BASCULE_SIM_SEED the first one. `python -m tests.sim SEED` repeats a seed and prints its events.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from typing import Final

import pytest

from bascule.broker.ingress_access import Arrival
from bascule.broker.intake import Intake, IntakePlan
from bascule.broker.turns import TURN_STEPS
from tests.sim import broker as sim_broker
from tests.sim.nemesis import TROUBLES
from tests.sim.runs import Report, run_seeds
from tests.sim.simulation import Simulation
from tests.sim.world import TROUBLE
from tests.sim.xa_resources import FaultRates
from tests.sim.xa_workload import XaWorkload
from tests.support.history import Tally

#: With the runs of planted faults and of the other simulations, the usual suite has 3,000 histories. A run takes 70 ms of processor time,
#: five times as long as one of the other simulations.
SEEDS = int(os.environ.get("BASCULE_SIM_SEEDS", "1200"))
FIRST_SEED = int(os.environ.get("BASCULE_SIM_SEED", "1"))
TIMEOUT_S = 120 + SEEDS // 4
#: Further seeds of the slow suite.
MORE_SEEDS: Final = 8000
#: Too rare in runs that are not arranged for them.
STALL: Final = "journal stalled"
DOUBT: Final = "definition in doubt"
#: Fewer seeds may not show every other kind of trouble.
SEEING_SEEDS = 1000
#: Number of runs that are arranged for one of them.
ARRANGED_SEEDS: Final = 12
#: Seeds of runs with long ingress records; in some of them a broker is killed while a record is planned.
PLANNED_SEEDS = 40
#: Seeds of runs in which leaders of sources change while transactions are open.
CONFIRMED_SEEDS = 40
#: How long a record is planned in these runs, in virtual time.
PLANNED_MS = 20


@pytest.fixture(scope="module")
def report() -> Report:
    return run_seeds(FIRST_SEED, SEEDS)


@pytest.mark.timeout(TIMEOUT_S)
def test_no_seed_shows_an_anomaly(report: Report) -> None:
    assert report.bad == {}, "`python -m tests.sim SEED` says how"
    assert report.done == SEEDS
    assert report.idle == []


@pytest.mark.slow
@pytest.mark.timeout(TIMEOUT_S + MORE_SEEDS // 4)
def test_no_seed_of_many_more_shows_an_anomaly() -> None:
    report = run_seeds(FIRST_SEED + SEEDS, MORE_SEEDS)
    assert report.bad == {}, "`python -m tests.sim SEED` says how"
    assert report.done == MORE_SEEDS


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.skipif(SEEDS < SEEING_SEEDS, reason="some troubles are rare")
def test_simulation_runs_cover_every_kind_of_fault(report: Report) -> None:
    assert TROUBLES.keys() <= TROUBLE.keys()
    assert report.unseen <= {STALL, DOUBT}


def test_endless_run_is_stopped_and_reported_with_its_seed_and_stack() -> None:
    program = """
from tests.sim import runs
class Endless:
    def __init__(self, seed): pass
    def run(self):
        while True: pass
runs.Simulation, runs.RUN_LIMIT_S = Endless, 0.2
runs.run_chunk(range(7, 9))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "TimeoutError: seed 7 does not end within 0.2 s" in done.stderr
    assert "in run\n" in done.stderr


def test_ingress_records_that_are_planned_over_turns_are_taken_once_and_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bascule.broker.ingress_tail.TAKE_STEPS", 2 * TURN_STEPS)
    monkeypatch.setattr("bascule.broker.intake.PLAN_STEPS", TURN_STEPS)
    monkeypatch.setattr(sim_broker.BrokerIntake, "soon", lambda intake, action: intake.process.after(PLANNED_MS, action))
    begun = ended = 0
    plan, take_in_plan = Intake.plan, Intake.take_in_plan

    def begin(intake: Intake, sends: list[Arrival]) -> IntakePlan:
        nonlocal begun
        begun += 1
        return plan(intake, sends)

    def end(intake: Intake, partition: int, next_offset: int, planned: IntakePlan) -> None:
        nonlocal ended
        ended += 1
        take_in_plan(intake, partition, next_offset, planned)

    monkeypatch.setattr(Intake, "plan", begin)
    monkeypatch.setattr(Intake, "take_in_plan", end)
    for seed in range(1, PLANNED_SEEDS):
        assert Simulation(seed).run().anomalies == [], f"seed {seed}"
    assert begun > ended > PLANNED_SEEDS, "some plans are dropped, because a broker is killed or replaced"


def no_answers(run: Simulation) -> None:
    """Arrange that no request reaches Kafka for longer than an append may take."""
    weather = run.kafka.weather
    run.world.after(100, setattr, run.kafka, "weather", replace(weather, lost=0.97))
    run.world.after(500, setattr, run.kafka, "weather", weather)


def test_broker_without_answers_from_kafka_stalls_and_recovers() -> None:
    stalled = 0
    for seed in range(1, 1 + ARRANGED_SEEDS):
        simulation = Simulation(seed, arrange=no_answers)
        assert simulation.run().anomalies == [], f"seed {seed}"
        stalled += STALL in simulation.world.seen
    assert stalled


def lost_definitions(run: Simulation) -> None:
    """Arrange that an administrator defines diverts while most requests are lost on their way to Kafka or back."""
    weather = run.kafka.weather
    run.define_diverts()
    run.world.after(50, setattr, run.kafka, "weather", replace(weather, lost=0.9))
    run.world.after(500, setattr, run.kafka, "weather", weather)


def test_divert_whose_definition_is_in_doubt_carries_each_message_once() -> None:
    doubts = 0
    for seed in range(1, 1 + ARRANGED_SEEDS):
        simulation = Simulation(seed, arrange=lost_definitions)
        assert simulation.run().anomalies == [], f"seed {seed}"
        doubts += DOUBT in simulation.world.seen
    assert doubts


def refusing(run: Simulation) -> None:
    """Arrange that the leaders of sources change while transactions are open."""
    run.pipelines.refusals = 0.3


def test_transactions_that_the_leader_of_their_source_does_not_confirm_are_aborted_and_written_again() -> None:
    refused = 0
    for seed in range(1, CONFIRMED_SEEDS):
        simulation = Simulation(seed, arrange=refusing)
        assert simulation.run().anomalies == [], f"seed {seed}"
        refused += simulation.pipelines.refused
    assert refused > CONFIRMED_SEEDS


def trace_of(program: str, hash_seed: int) -> str:
    """Run a program that defines ``run`` in another process. Return the verdict and the trace of that simulation."""
    program += "; print(run.run(), *run.world.trace, sep=chr(10))"
    environment = {**os.environ, "PYTHONHASHSEED": str(hash_seed)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.parametrize(
    "program",
    [
        "from tests.sim.simulation import *; run = Simulation(7, trace=True)",
        "from tests.simulation.planted_adapter import *; owners_write_late("
        "run := InboundSimulation(12, [LogViolation.OWNERS_BEFORE_VOID], trace=True))",
        "from tests.sim.branches import *; run = BranchSimulation(7, trace=True)",
        "from tests.sim.hosts import *; run = HostSimulation(1, trace=True)",
    ],
    ids=["broker", "adapter", "branches", "hosts"],
)
def test_seed_repeats_its_run_independent_of_set_order(program: str) -> None:
    first = trace_of(program, 1)
    assert len(first.splitlines()) > 20
    assert trace_of(program, 3) == first


def test_broker_replaced_before_serving_learns_of_its_replacement_after_healing() -> None:
    simulation = Simulation(1)
    world, (red, blue) = simulation.world, simulation.brokers
    simulation.xa_workload = XaWorkload(simulation.stage, 0, 1.0, FaultRates())
    simulation.pipelines.launch()
    for broker in (red, blue):
        broker.launch()
        world.run(world.now_ms + 100)
    assert red.serving
    assert blue.serving
    simulation.healed_ms = world.now_ms
    simulation._supervise()
    world.run(world.now_ms + 50)
    assert not red.serving
    assert blue.serving


def test_decreasing_delivery_count_is_detected() -> None:
    witness = Simulation(1).witness
    for epoch, count in ((0, 0), (0, 2), (7, 1)):
        witness.handed_out(epoch, 1, 5, count)

    def found(journal: list[tuple[int, int]]) -> list[str]:
        tally = Tally()
        witness.judge(tally, {(1, 5): journal})
        return list(map(str, tally.anomalies))

    assert found([(0, 1), (7, 2)]) == []
    stored = "redelivered-unmarked: 1 handed out with a lower delivery count than the journal has (5 of queue 1)"
    assert found([(0, 1), (0, 2)]) == [stored]
    witness.handed_out(7, 1, 5, 0)
    assert found([]) == ["redelivered-unmarked: 1 handed out with a lower delivery count than before (5 of queue 1)"]
