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

#: For so long the first driver of some runs stands still.
LATE_DRIVER_MS: Final = 400.0


def changing_leaders(simulation: Simulation) -> None:
    """Kafka's leaders change often, and answers to appends are lost: a repeated append is stored at an unknown offset."""
    simulation.nemesis.troubles = {"change leader": 2.0, "take over": 1.0}
    simulation.nemesis.pause_ms = 15.0
    simulation.kafka.weather.unanswered = 0.2


def quarrelling_brokers(simulation: Simulation) -> None:
    """Another broker is elected again and again, and nothing else goes wrong."""
    simulation.nemesis.troubles = {"take over": 1.0}
    simulation.kafka.weather = NetworkConditions()


def lossy_network(simulation: Simulation) -> None:
    """Many requests time out."""
    simulation.kafka.weather.lost = 0.4


def drivers_come_late(simulation: Simulation) -> None:
    """The first driver stands still until the journal has been trimmed more than once."""
    housekeepers(simulation)

    def stand_still() -> None:
        for driver in simulation.pipelines.drivers:
            driver.process.stop()
            simulation.world.after(LATE_DRIVER_MS, driver.process.go_on)

    simulation.world.after(0.0, stand_still)


def housekeepers(simulation: Simulation) -> None:
    """Brokers make snapshots often."""
    for broker in simulation.brokers:
        broker.snapshot_records = 5


def former_leaders(simulation: Simulation) -> None:
    """Nodes of Kafka are cut off, while brokers make snapshots often and replace one another."""
    simulation.nemesis.troubles = {"cut off node": 2.0, "take over": 1.0}
    simulation.nemesis.pause_ms = 60.0
    housekeepers(simulation)


PLANTED: Final = (
    Planted(
        EpochViolation.GAP_NOT_READ, "an epoch does not read what lies between two of its records", ("zombie-ack", "lost", "duplicated")
    ),
    Planted(EpochViolation.FAILED_APPEND_PASSED_OVER, "an epoch takes a failed append for a stored one", ("stuck", "lost")),
    Planted(
        EpochViolation.UNKNOWN_OFFSET_IS_NEXT,
        "an epoch takes a record stored at an unknown offset for the next one",
        ("zombie-ack", "lost", "duplicated", "stuck"),
        changing_leaders,
    ),
    Planted(
        EpochViolation.ELECTION_LOSS_IGNORED,
        "a broker that serves ignores that another one has been elected",
        ("stuck",),
        quarrelling_brokers,
    ),
    Planted(
        EpochViolation.STOPPED_PROCESS_ACTS,
        "a process that stood still and was replaced hands messages out",
        ("zombie-ack",),
    ),
    Planted(FollowingViolation.LAST_RECORD_MISSED, "a load ends one record too early", ("lost", "stuck", "duplicated")),
    Planted(
        FollowingViolation.FORMER_LEADER_BELIEVED,
        "a load takes for damage what a former leader answers",
        ("stuck",),
        former_leaders,
    ),
    Planted(FollowingViolation.NEWEST_SNAPSHOT_ONLY, "a load tries no snapshot but the newest", ("stuck",), housekeepers),
    Planted(NodeViolation.CLIENTS_KEPT_OPEN, "clients stay connected when an epoch has ended", ("stuck",)),
    Planted(RetentionViolation.ONE_RECORD_TOO_MANY, "one record too many is trimmed", ("stuck", "divert-loss"), housekeepers),
    Planted(
        RetentionViolation.PIPELINES_KEEP_NOTHING, "the journal is trimmed before diverts have read it", ("divert-loss",), housekeepers
    ),
    Planted(
        RetentionViolation.WAITING_MESSAGES_KEEP_NOTHING,
        "the journal is trimmed before waiting messages are taken",
        ("stuck",),
        housekeepers,
    ),
    Planted(
        RetentionViolation.UNCOMMITTED_POSITIONS_COUNT,
        "the journal is trimmed up to positions that are not committed",
        ("divert-loss",),
        housekeepers,
    ),
    Planted(RoundViolation.DELETED_BEFORE_ANNOUNCED, "older snapshots are deleted before the new one counts", ("stuck",), housekeepers),
    Planted(RoundViolation.FORGOTTEN_BEFORE_ANNOUNCED, "the store forgets before the new snapshot counts", ("stuck",), housekeepers),
    Planted(
        PipelineHoldViolation.UNREGISTERED_NEED_NOTHING,
        "the journal is trimmed before pipelines know an exclusive divert that has taken messages",
        ("divert-loss",),
        drivers_come_late,
    ),
    Planted(RoundViolation.WAITING_MESSAGES_FORGOTTEN, "the store forgets messages that still wait", ("stuck",), housekeepers),
    Planted(HousekeepingViolation.ANNOUNCEMENT_NOT_AWAITED, "a round does not wait for its announcement", ("stuck",), housekeepers),
    Planted(
        HousekeepingViolation.INGRESS_TRIMMED_EARLY, "the ingress is trimmed before the journal has it", ("ingress-loss",), housekeepers
    ),
    Planted(IngressTailViolation.UNCOMMITTED_TAKEN, "the ingress tail takes uncommitted records", ("ingress-dup", "unexpected")),
    Planted(
        IngressTailViolation.RECORD_SKIPPED_AFTER_FAULT,
        "the ingress tail skips a record after a fault",
        ("ingress-loss",),
        lossy_network,
    ),
)
