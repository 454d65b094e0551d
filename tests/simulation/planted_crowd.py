"""Faults planted in the order of senders whose messages enter many queues."""

from __future__ import annotations

from typing import Final

from bascule.broker.sender_line import SenderLineViolation
from tests.sim.crowd import CrowdSimulation
from tests.simulation.planting import Planted
from tests.support.history import Tally


class PlantedCrowd(Planted):
    """A rule, broken in the simulation of senders."""

    @property
    def course(self) -> tuple[object, ...]:
        """See Planted."""
        return (type(self),)

    def run(self, seed: int, *, violated: bool = True) -> Tally:
        """See Planted."""
        return CrowdSimulation(seed, [self.violation] if violated else []).run()


PLANTED: Final = (
    PlantedCrowd(
        SenderLineViolation.ORDER_IGNORED,
        "the sender that asks first goes on, although others have waited for longer",
        ("out-of-order",),
    ),
    PlantedCrowd(SenderLineViolation.LOST_STAY, "senders that no longer exist keep their places in the line", ("stuck",)),
)
