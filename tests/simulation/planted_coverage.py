"""Faults planted in the coverage of diverts that are defined at run time."""

from __future__ import annotations

from typing import Final

from bascule.broker.coverage import CoverageViolation
from tests.sim.simulation import Simulation
from tests.simulation.planted_broker import housekeepers
from tests.simulation.planting import Planted

#: How long a driver may not look for new diverts.
LATE_MS: Final = 400.0
#: The pauses of a busy administrator, and of an ordinary one.
BUSY_MS: Final = 4.0
SOON_MS: Final = 20.0


def brokers_change(simulation: Simulation) -> None:
    """A divert changes all the time, while brokers replace one another without other faults, and do not know it at once."""
    late = simulation.define_diverts()
    late.pause_ms, late.changes_max, late.messages = BUSY_MS, 30, 150
    simulation.nemesis.troubles = {"take over": 1.0}
    simulation.nemesis.pause_ms = 60.0


def drivers_begin_late(simulation: Simulation) -> None:
    """Drivers begin a divert long after its administrator has an answer. Brokers take snapshots often."""
    late = simulation.define_diverts()
    late.look_ms, late.pause_ms = LATE_MS, SOON_MS
    housekeepers(simulation)


PLANTED: Final = (
    Planted(
        CoverageViolation.EPOCH_NOT_PROVED,
        "a broker that was replaced says that the journal covers a divert, which its successor does not know",
        ("divert-loss",),
        brokers_change,
    ),
    Planted(
        CoverageViolation.SERVED_BEFORE_READ,
        "a broker that takes over serves before it has read the definitions of diverts",
        ("divert-loss",),
        brokers_change,
    ),
    Planted(
        CoverageViolation.OFFSET_OF_PROOF,
        "a broker says that the journal covers a changed divert from the change on only",
        ("divert-loss",),
        drivers_begin_late,
    ),
    Planted(
        CoverageViolation.NOTHING_HELD,
        "the journal is trimmed before the driver has begun a divert that is defined at run time",
        ("divert-loss",),
        drivers_begin_late,
    ),
)
