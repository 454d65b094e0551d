"""Planted faults of the resource adapter: the inbound log, takeovers, the order of log, offsets and delivery."""

from __future__ import annotations

from typing import Final

from bascule.adapter.inbound.log_protocol import LogViolation
from bascule.adapter.inbound.state import FoldViolation
from tests.sim.adapter import InboundSimulation
from tests.simulation.planting import Planted
from tests.support.history import Tally


class PlantedInbound(Planted):
    """A rule of the adapter, broken."""

    def run(self, seed: int, *, violated: bool = True) -> Tally:
        """See Planted."""
        return InboundSimulation(seed, [self.violation] if violated else []).run()


SHOWS: Final = {
    FoldViolation.FENCE_IGNORED: ("duplicated", "stuck"),
    LogViolation.TAKE_UNCHECKED: ("lost", "stuck"),
    LogViolation.OWNERS_BEFORE_VOID: ("lost", "stuck", "duplicated"),
    LogViolation.READ_ENTRIES_IGNORED: ("duplicated",),
    LogViolation.FORMER_READ_ENTRIES_DELETED_UNREAD: ("duplicated",),
    LogViolation.ADVANCED_BEFORE_FLIGHTS: ("lost",),
    LogViolation.CLAIM_UNCHECKED: ("duplicated",),
    LogViolation.CLAIM_ENDS_FIRST: ("duplicated",),
    LogViolation.ROLLBACK_ENDS_FLIGHT: ("lost",),
    LogViolation.OPEN_CLAIMS_IGNORED: ("lost", "stuck"),
    LogViolation.OFFSETS_BEFORE_LOG: ("lost",),
    LogViolation.DELIVERED_BEFORE_COMMIT: ("duplicated",),
    LogViolation.RECEIPT_BEFORE_WORK: ("lost",),
    LogViolation.DOUBTFUL_TOKEN_KEPT: ("lost", "duplicated", "stuck"),
    LogViolation.AHEAD_DELIVERED_AT_ONCE: ("duplicated",),
}
PLANTED = tuple(PlantedInbound(violation, violation.value, anomalies) for violation, anomalies in SHOWS.items())
