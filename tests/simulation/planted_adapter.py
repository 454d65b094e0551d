"""Planted faults of the resource adapter: the inbound log, takeovers, the order of log, offsets and delivery."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Final

from bascule.adapter.inbound.log_protocol import LogViolation
from bascule.adapter.inbound.settling import SettlingViolation
from bascule.adapter.inbound.state import FoldViolation
from bascule.xa.two_phase import TwoPhaseViolation
from tests.sim.adapter import InboundSimulation
from tests.sim.cluster import NetworkConditions
from tests.simulation.planting import Planted
from tests.support.history import Tally


class PlantedInbound(Planted):
    """A rule of the adapter, broken."""

    @property
    def course(self) -> tuple[object, ...]:
        """See Planted."""
        return type(self), ARRANGED.get(self.violation)

    def run(self, seed: int, *, violated: bool = True) -> Tally:
        """See Planted."""
        run = InboundSimulation(seed, [self.violation] if violated else [])
        if (arrange := ARRANGED.get(self.violation)) is not None:
            arrange(run)
        return run.run()


def commits_late(run: InboundSimulation) -> None:
    """Arrange that commits of offsets arrive after later ones, and that partitions change hands."""
    run.group.late = 0.5
    run.transacted, run.work_ms, run.pause_ms, run.troubles = True, 2.0, 80.0, {"rebalance": 1.0}
    run.counts = dict.fromkeys(run.counts, 12)


def appends_fail(run: InboundSimulation) -> None:
    """Arrange that many appends fail and arrive all the same, while records are done fast."""
    run.kafka.weather = NetworkConditions(held=0.2, failed_append=0.25, delay_ms=2.0)
    run.transacted, run.work_ms, run.pause_ms = True, 2.0, 80.0
    run.troubles = {"rebalance": 1.0, "compact": 0.5}
    run.counts = dict.fromkeys(run.counts, 12)


def owners_write_late(run: InboundSimulation) -> None:
    """Arrange that members write after they were replaced, that deletions get lost, and that what is deleted is compacted soon."""
    run.kafka.weather = NetworkConditions(held=0.15, failed_append=0.15, delay_ms=2.0)
    run.transacted, run.restlessness, run.pause_ms = True, 0.3, 10.0
    run.troubles = {"stop member": 1.0, "rebalance": 1.0, "compact": 2.0, "kill member": 0.3}


def recovery_is_hasty(run: InboundSimulation) -> None:
    """Arrange that recovery rolls transactions back before their members have decided."""
    run.transacted, run.hasty, run.work_ms = True, True, 40.0


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
    SettlingViolation.AWAY_IS_FAILURE: ("lost",),
    TwoPhaseViolation.RECOVERY_IS_FAILURE: ("lost",),
    SettlingViolation.DONE_BEFORE_MOVED: ("lost",),
    SettlingViolation.DEAD_LETTER_FORGOTTEN: ("lost", "stuck"),
}
#: Faults that random runs show too seldom.
ARRANGED: Final[Mapping[enum.StrEnum, Callable[[InboundSimulation], None]]] = {
    LogViolation.READ_ENTRIES_IGNORED: commits_late,
    LogViolation.DOUBTFUL_TOKEN_KEPT: appends_fail,
    SettlingViolation.AWAY_IS_FAILURE: appends_fail,
    TwoPhaseViolation.RECOVERY_IS_FAILURE: recovery_is_hasty,
    LogViolation.OWNERS_BEFORE_VOID: owners_write_late,
}
#: Descriptions of the broken code, for violations whose value is not a description.
_FAULTS: Final[Mapping[enum.StrEnum, str]] = {
    TwoPhaseViolation.RECOVERY_IS_FAILURE: "a rollback by recovery counts as a failure of the record",
}
PLANTED = tuple(PlantedInbound(each, _FAULTS.get(each, each.value), anomalies) for each, anomalies in SHOWS.items())
