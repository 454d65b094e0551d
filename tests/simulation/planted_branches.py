"""Faults planted in transactions over Kafka and a database: branches in Kafka, transactions that check a table, reads of decisions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from bascule.writer.table import TableViolation
from bascule.xa.kafka_protocol import KafkaBranchViolation
from bascule.xa.log_topic import LogTopicViolation
from bascule.xa.recovery_protocol import RecoveryViolation
from tests.sim.branches import MANAGER, PREPARE_WITHIN_S, SLOW_LINE_MS, BranchSimulation
from tests.simulation.planting import Planted
from tests.support.history import Tally


class PlantedBranch(Planted):
    """A rule, broken in the simulation of branches in Kafka."""

    @property
    def course(self) -> tuple[object, ...]:
        """See Planted."""
        return type(self), ARRANGED.get(self.violation)

    def run(self, seed: int, *, violated: bool = True) -> Tally:
        """See Planted."""
        arrange = ARRANGED.get(self.violation)
        return BranchSimulation(seed, [self.violation] if violated else [], arrange=arrange).run()


def nodes_are_cut_off(simulation: BranchSimulation) -> None:
    """Kafka nodes are cut off from their peers, and many processes work and recover."""
    simulation.troubles = {"cut off node": 1.0}
    simulation.left = 16
    simulation.launch()
    simulation.launch()


def managers_stand_still(simulation: BranchSimulation) -> None:
    """Managers are stopped, while others recover and clean up."""
    simulation.troubles = {"stop": 1.0}
    simulation.pause_ms = 20.0


def remains_are_kept_briefly(simulation: BranchSimulation) -> None:
    """Managers are stopped, and messages are deleted soon after the time in which their branch must be prepared."""
    managers_stand_still(simulation)
    simulation.limits = simulation.limits._replace(unprepared_kept_s=PREPARE_WITHIN_S + 0.01)


def clocks_are_ahead(simulation: BranchSimulation) -> None:
    """The wall clocks of half of the machines are 25 hours ahead."""
    simulation.left = 16
    simulation.world.offsets_ms |= {f"{MANAGER}{number}": 25 * 3_600_000.0 for number in range(1, 100, 2)}


def answers_of_kafka_are_lost(simulation: BranchSimulation) -> None:
    """Commits are in doubt, while other processes recover."""
    simulation.troubles = {"stop": 0.5, "stop node": 1.0, "kill": 0.2}
    simulation.pause_ms = 20.0
    simulation.kafka.weather.unanswered = 0.1


def lines_are_slow(simulation: BranchSimulation) -> None:
    """Kafka aborts the first attempt of large transactions after its timeout."""
    simulation.line_ms = SLOW_LINE_MS


class _Row(NamedTuple):
    violation: KafkaBranchViolation | TableViolation | LogTopicViolation | RecoveryViolation
    fault: str
    anomalies: tuple[str, ...]
    arrange: Callable[[BranchSimulation], None] | None = None


_ROWS: Final = (
    _Row(KafkaBranchViolation.VOTE_UNSTORED, "a branch in Kafka votes yes before its record is stored", ("lost", "xa-split")),
    _Row(
        KafkaBranchViolation.DOUBT_IS_DONE,
        "a branch in Kafka counts as committed although the coordinator's answer is unknown",
        ("lost", "xa-split"),
    ),
    _Row(
        KafkaBranchViolation.RECORD_DELETED_FIRST,
        "the record of a branch in Kafka is deleted before the transaction that copies its messages has ended",
        ("lost", "xa-split"),
    ),
    _Row(
        KafkaBranchViolation.RECORD_UNCHECKED,
        "the messages of a branch in Kafka are copied without checking that its record exists",
        ("duplicated",),
    ),
    _Row(
        KafkaBranchViolation.OWN_SLOT_TAKEN,
        "a process ends the branch of another process under its own transactional id",
        ("duplicated", "lost", "xa-split", "xa-stuck"),
    ),
    _Row(
        KafkaBranchViolation.ROLLBACK_UNTOLD,
        "a process rolls back the branch of another process and does not record this",
        ("lost",),
        answers_of_kafka_are_lost,
    ),
    _Row(
        KafkaBranchViolation.NEEDED_DELETED,
        "messages that a prepared branch in Kafka still needs are deleted",
        ("lost", "xa-split", "xa-stuck"),
        managers_stand_still,
    ),
    _Row(
        KafkaBranchViolation.PREPARED_LATE,
        "a branch in Kafka counts as prepared although its messages may have been deleted",
        ("lost", "xa-split", "xa-stuck"),
        remains_are_kept_briefly,
    ),
    _Row(
        KafkaBranchViolation.AGE_BY_WALL_CLOCK,
        "a process whose wall clock is a day ahead deletes the messages of branches that may still be prepared",
        ("lost", "xa-split", "xa-stuck"),
        clocks_are_ahead,
    ),
    _Row(
        KafkaBranchViolation.ENDED_BESIDE_CALL,
        "a branch in Kafka is prepared or committed while its application is still using it",
        ("torn-tx", "lost", "xa-split", "xa-stuck"),
    ),
    _Row(TableViolation.READ_BEFORE_INIT, "the table is read before an earlier transaction under the same id is ended", ("duplicated",)),
    _Row(
        TableViolation.TIME_NOT_EXTENDED,
        "a transaction that Kafka aborted after a timeout gets no more time when it is retried",
        ("xa-stuck",),
        lines_are_slow,
    ),
    _Row(TableViolation.NOT_MADE_AGAIN, "a transaction in doubt is written again without reading the table", ("duplicated",)),
    _Row(
        LogTopicViolation.END_TRUSTED,
        "the log decides from its content up to the end that a former leader reports, not up to its own record",
        ("lost", "torn-tx", "xa-told", "xa-split"),
        nodes_are_cut_off,
    ),
    _Row(
        RecoveryViolation.DECISION_IGNORED,
        "recovery ignores the answer of the log to its ROLLBACK",
        ("xa-split", "xa-stuck", "lost"),
        managers_stand_still,
    ),
)
ARRANGED: Final = {row.violation: row.arrange for row in _ROWS}
PLANTED: Final = tuple(PlantedBranch(row.violation, row.fault, row.anomalies) for row in _ROWS)
