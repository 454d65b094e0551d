"""Faults planted in transactions on one host: the decision in a database, the file of the decision log, pooled handles."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Final, NamedTuple

from bascule.xa.database import DatabaseViolation
from bascule.xa.deciding_database import DecidingViolation
from bascule.xa.file_log import FileLogViolation
from bascule.xa.plan import PlanViolation
from bascule.xa.recovery_protocol import RecoveryViolation
from tests.sim.driver import ServerFaults
from tests.sim.hosts import ORDERS, HostSimulation
from tests.simulation.planting import Planted
from tests.support.history import Tally


class PlantedHost(Planted):
    """A rule, broken in the simulation of transactions on one host."""

    @property
    def course(self) -> tuple[object, ...]:
        """See Planted."""
        return type(self), ARRANGED.get(self.violation)

    def run(self, seed: int, *, violated: bool = True) -> Tally:
        """See Planted."""
        arrange = ARRANGED.get(self.violation)
        return HostSimulation(seed, [self.violation] if violated else [], arrange=arrange).run()


def processes_die(simulation: HostSimulation) -> None:
    """Processes are killed, and others recover."""
    simulation.troubles = {"kill": 1.0, "stop": 0.3}
    simulation.pause_ms = 25.0


def databases_are_away(simulation: HostSimulation) -> None:
    """Databases do not answer for a while, and processes are killed."""
    simulation.troubles = {"lose database": 1.0, "kill": 0.3}
    simulation.pause_ms = 25.0


def databases_come_and_go(simulation: HostSimulation) -> None:
    """Databases do not answer for a while, and answers of the database that decides are lost; the processes of the transactions recover."""
    simulation.troubles = {"lose database": 1.0}
    simulation.pause_ms = 60.0
    simulation.left, simulation.workers = 16, 2
    for name, server in simulation.servers.items():
        server.faults = ServerFaults(lost_answers=0.08 if name == ORDERS else 0.0)


def processes_stand_still_in_doubt(simulation: HostSimulation) -> None:
    """Commits of databases that decide are not answered, and processes are stopped before they ask for the outcome."""
    simulation.troubles = {"stop": 1.0}
    simulation.pause_ms = 20.0
    simulation.left, simulation.workers = 16, 2
    faults = simulation.faults
    faults.lost_commits, faults.lost_answers, faults.held, faults.refusals = 0.6, 0.0, 0.0, 0.0


def answers_are_lost(simulation: HostSimulation) -> None:
    """Answers of databases are lost, and statements arrive late."""
    simulation.faults.lost_answers, simulation.faults.held = 0.1, 0.1


def logs_are_removed(simulation: HostSimulation) -> None:
    """The file of the decision log is moved away, and processes are killed."""
    simulation.troubles = {"remove log": 1.0, "kill": 0.3}
    simulation.pause_ms = 25.0


class _Row(NamedTuple):
    violation: enum.StrEnum
    fault: str
    anomalies: tuple[str, ...]
    arrange: Callable[[HostSimulation], None] | None = None


_ROWS: Final = (
    _Row(
        DecidingViolation.ROW_BESIDE_WORK,
        "a database that decides commits the work and the decision row in separate transactions",
        ("xa-split", "lost", "xa-told"),
        processes_die,
    ),
    _Row(
        DecidingViolation.ROW_FORGOTTEN_EARLY,
        "the row of a decision is deleted before the other resources have committed",
        ("xa-split", "lost"),
        databases_are_away,
    ),
    _Row(
        DecidingViolation.IN_DOUBT_IS_ROLLED_BACK,
        "an unanswered commit in the database that decides counts as rolled back",
        ("xa-told", "xa-split"),
        answers_are_lost,
    ),
    _Row(
        DecidingViolation.LAST_DECISION_STANDS,
        "the last decision stored in a database counts, not the first",
        ("xa-told", "xa-split"),
        answers_are_lost,
    ),
    _Row(
        RecoveryViolation.MISSING_ROW_IS_COMMIT,
        "recovery treats a transaction without a row in the database that decides as committed",
        ("xa-split", "xa-told"),
        processes_die,
    ),
    _Row(
        RecoveryViolation.CARRIED_OUT_IS_FORGOTTEN,
        "recovery deletes the COMMIT of a database before the process of the transaction asks about it",
        ("xa-told", "xa-split"),
        processes_stand_still_in_doubt,
    ),
    _Row(
        PlanViolation.WAITING_IS_COMMITTED,
        "recovery deletes a decision that its second read has not found, although a branch waits for it",
        ("xa-split", "lost"),
        databases_come_and_go,
    ),
    _Row(
        FileLogViolation.REMOVED_GOES_ON_EMPTY,
        "a file log that is removed while in use continues empty",
        ("xa-stuck", "xa-split", "lost"),
        logs_are_removed,
    ),
    _Row(
        DatabaseViolation.HANDLE_OUTLIVES_BRANCH,
        "the handle of a branch that has ended writes into the next branch on its connection",
        ("unexpected",),
    ),
)
ARRANGED: Final = {row.violation: row.arrange for row in _ROWS}
PLANTED: Final = tuple(PlantedHost(row.violation, row.fault, row.anomalies) for row in _ROWS)
