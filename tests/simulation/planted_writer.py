"""Faults planted in the transactional writer, in reads that decide, and in claims."""

from __future__ import annotations

from typing import Final

from bascule.writer.claims import ClaimViolation
from bascule.writer.reading import ReadingViolation
from bascule.writer.transactional import WriterViolation
from tests.sim.simulation import Simulation
from tests.simulation.planting import Planted

DOUBLED: Final = ("divert-dup", "ingress-dup")


def late_ends(simulation: Simulation) -> None:
    """Ends of transactions are late more often, and by less, so that some arrive at the critical moment."""
    simulation.kafka.late_ends, simulation.kafka.held_ms = 6.0, 60.0


def cut_off_nodes(simulation: Simulation) -> None:
    """Nodes are cut off from their peers again and again, while each task gets a new worker."""
    simulation.nemesis.troubles, simulation.nemesis.pause_ms = {"cut off node": 1.0}, 15.0
    simulation.pipelines.restlessness = 0.7


def left_open(simulation: Simulation) -> None:
    """Workers are killed and leave transactions open, while each task gets a new worker."""
    simulation.nemesis.troubles, simulation.nemesis.pause_ms = {"kill worker": 1.0}, 15.0
    simulation.pipelines.restlessness = 0.7


def restless(simulation: Simulation) -> None:
    """Drivers are replaced, and Spark considers running tasks dead."""
    simulation.nemesis.troubles, simulation.nemesis.pause_ms = {"stop driver": 1.0, "stop worker": 1.0}, 30.0
    simulation.pipelines.zombies = simulation.pipelines.restlessness = 0.4


PLANTED: Final = (
    Planted(ReadingViolation.NO_BARRIER, "a position is read up to the high watermark of a former leader", DOUBLED, cut_off_nodes),
    Planted(ReadingViolation.LAST_STABLE_OFFSET, "a position is read up to the last stable offset", DOUBLED, left_open),
    Planted(WriterViolation.READ_BEFORE_INIT, "the position is read before an earlier transaction is ended", DOUBLED),
    Planted(WriterViolation.CONTINUITY_ASSUMED, "a writer treats its last position as current, whatever the epoch", DOUBLED, restless),
    Planted(
        WriterViolation.KEPT_UNSETTLED,
        "an incarnation has a further transaction although a request of it may be late",
        ("divert-loss", "ingress-loss", *DOUBLED),
        late_ends,
    ),
    Planted(WriterViolation.NO_LOOK_AFTER_DOUBT, "a transaction in doubt is written again without reading the position", DOUBLED),
    Planted(WriterViolation.NOT_COMPARED, "a writer moves the position without comparing it", DOUBLED, restless),
    Planted(ClaimViolation.BATCH_START_TRUSTED, "a task starts at the start of its batch, not at the position", DOUBLED),
    Planted(ClaimViolation.OWNER_NOT_CHECKED, "a task uses a position that another driver has claimed", ("claimed-twice",), restless),
)
