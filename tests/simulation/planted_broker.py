"""Faults planted in the protocols of a broker process: node, epoch, following, housekeeping, retention, intake."""

from __future__ import annotations

from typing import Final

from bascule.broker.epoch import EpochViolation
from bascule.broker.following import FollowingViolation
from bascule.broker.housekeeping import HousekeepingViolation
from bascule.broker.ingress_tail import IngressTailViolation
from bascule.broker.node import NodeViolation
from bascule.broker.retention import RetentionViolation
from bascule.broker.rounds import RoundViolation
from bascule.writer.pipeline_holds import PipelineHoldViolation
from tests.sim.kafka import NetworkConditions
from tests.sim.simulation import Simulation
from tests.simulation.planting import Planted

#: When brokers that quarrel are elected. Clients connect meanwhile, some to the one broker and some to the other.
ELECTIONS_MS: Final = (30.0, 80.0, 130.0, 180.0, 230.0, 300.0, 400.0, 500.0)
#: How long the first driver of some runs is suspended.
LATE_DRIVER_MS: Final = 400.0


def changing_leaders(simulation: Simulation) -> None:
    """Kafka's leaders change often, and answers to appends are lost: a repeated append is stored at an unknown offset."""
    simulation.nemesis.troubles = {"change leader": 2.0, "take over": 1.0}
    simulation.nemesis.pause_ms = 15.0
    simulation.kafka.weather.unanswered = 0.2


def quarrelling_brokers(simulation: Simulation) -> None:
    """Another broker is elected repeatedly during the first half second, without other faults."""
    simulation.nemesis.troubles = {}
    simulation.kafka.weather = NetworkConditions()
    for at_ms in ELECTIONS_MS:
        simulation.world.after(at_ms, simulation.nemesis.take_over)


def lossy_network(simulation: Simulation) -> None:
    """Many requests time out."""
    simulation.kafka.weather.lost = 0.4


def drivers_come_late(simulation: Simulation) -> None:
    """The first driver is suspended until the journal has been trimmed more than once."""
    housekeepers(simulation)

    def stand_still() -> None:
        for driver in simulation.pipelines.drivers:
            driver.process.stop()
            simulation.world.after(LATE_DRIVER_MS, driver.process.go_on)

    simulation.world.after(0.0, stand_still)


def housekeepers(simulation: Simulation) -> None:
    """Brokers take snapshots often."""
    for broker in simulation.brokers:
        broker.snapshot_records = 5


def former_leaders(simulation: Simulation) -> None:
    """Kafka nodes are cut off, while brokers take snapshots often and replace one another."""
    simulation.nemesis.troubles = {"cut off node": 2.0, "take over": 1.0}
    simulation.nemesis.pause_ms = 60.0
    housekeepers(simulation)


PLANTED: Final = (
    Planted(EpochViolation.GAP_NOT_READ, "an epoch does not read a gap between two of its records", ("zombie-ack", "lost", "duplicated")),
    Planted(EpochViolation.FAILED_APPEND_PASSED_OVER, "an epoch treats a failed append as stored", ("stuck", "lost")),
    Planted(
        EpochViolation.UNKNOWN_OFFSET_IS_NEXT,
        "an epoch treats a record stored at an unknown offset as the next record",
        ("zombie-ack", "lost", "duplicated", "stuck"),
        changing_leaders,
    ),
    Planted(
        EpochViolation.ELECTION_LOSS_IGNORED,
        "a serving broker ignores that another broker has been elected",
        ("stuck",),
        quarrelling_brokers,
    ),
    Planted(
        EpochViolation.STOPPED_PROCESS_ACTS,
        "a process that was suspended and replaced delivers messages",
        ("zombie-ack",),
    ),
    Planted(FollowingViolation.LAST_RECORD_MISSED, "a load stops one record too early", ("lost", "stuck", "duplicated")),
    Planted(
        FollowingViolation.FORMER_LEADER_BELIEVED,
        "a load treats the answer of a former leader as damage",
        ("stuck",),
        former_leaders,
    ),
    Planted(FollowingViolation.NEWEST_SNAPSHOT_ONLY, "a load tries only the newest snapshot", ("stuck",), housekeepers),
    Planted(NodeViolation.CLIENTS_KEPT_OPEN, "clients stay connected when an epoch has ended", ("stuck",)),
    Planted(RetentionViolation.ONE_RECORD_TOO_MANY, "one record too many is trimmed", ("stuck", "divert-loss"), housekeepers),
    Planted(
        RetentionViolation.PIPELINES_KEEP_NOTHING, "the journal is trimmed before diverts have read it", ("divert-loss",), housekeepers
    ),
    Planted(
        RetentionViolation.WAITING_MESSAGES_KEEP_NOTHING,
        "the journal is trimmed although a queue still needs its messages",
        ("stuck",),
        housekeepers,
    ),
    Planted(
        RetentionViolation.UNCOMMITTED_POSITIONS_COUNT,
        "the journal is trimmed up to positions that are not committed",
        ("divert-loss",),
        housekeepers,
    ),
    Planted(RoundViolation.DELETED_BEFORE_ANNOUNCED, "older snapshots are deleted before the new one is valid", ("stuck",), housekeepers),
    Planted(
        RoundViolation.FORGOTTEN_BEFORE_ANNOUNCED, "the store deletes messages before the new snapshot is valid", ("stuck",), housekeepers
    ),
    Planted(
        PipelineHoldViolation.UNREGISTERED_NEED_NOTHING,
        "the journal is trimmed before the pipelines know an exclusive divert that has taken messages",
        ("divert-loss",),
        drivers_come_late,
    ),
    Planted(RoundViolation.WAITING_MESSAGES_FORGOTTEN, "the store deletes messages that are still in queues", ("stuck",), housekeepers),
    Planted(HousekeepingViolation.ANNOUNCEMENT_NOT_AWAITED, "a round does not wait for its announcement", ("stuck",), housekeepers),
    Planted(
        HousekeepingViolation.INGRESS_TRIMMED_EARLY,
        "the ingress topic is trimmed before its records are journaled",
        ("ingress-loss",),
        housekeepers,
    ),
    Planted(IngressTailViolation.UNCOMMITTED_TAKEN, "the ingress tail takes uncommitted records", ("ingress-dup", "unexpected")),
    Planted(
        IngressTailViolation.RECORD_SKIPPED_AFTER_FAULT,
        "the ingress tail skips a record after a fault",
        ("ingress-loss",),
        lossy_network,
    ),
)
