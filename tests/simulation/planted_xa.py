"""Faults planted in transactions over several resources: their manager, recovery, decision log, and their branches at the broker."""

from __future__ import annotations

from typing import Final

from bascule.broker.branch_requests import RequestViolation
from bascule.broker.branches import BranchViolation
from bascule.xa.finishing import FinishingViolation
from bascule.xa.log_topic import LogTopicViolation
from bascule.xa.plan import PlanViolation
from bascule.xa.recovery_protocol import RecoveryViolation
from bascule.xa.two_phase import TwoPhaseViolation
from tests.sim.simulation import Simulation
from tests.simulation.planting import Planted


def managers_die(simulation: Simulation) -> None:
    """Managers are killed and stopped; databases are away, and their standbys answer."""
    simulation.nemesis.troubles = {"kill manager": 0.5, "stop manager": 0.5, "lose database": 1.0, "lose log": 0.1}
    simulation.nemesis.pause_ms = 40.0
    simulation.mishaps.standbys = 0.7


def managers_stand_still(simulation: Simulation) -> None:
    """Managers are stopped, while others recover."""
    simulation.nemesis.troubles = {"stop manager": 1.0}
    simulation.nemesis.pause_ms = 25.0


def databases_are_away(simulation: Simulation) -> None:
    """Databases do not answer, but their standbys do."""
    simulation.nemesis.troubles = {"lose database": 1.0}
    simulation.nemesis.pause_ms = 40.0
    simulation.mishaps.standbys = 0.8
    simulation.mishaps.lost_answers = 0.0


def primaries_are_away(simulation: Simulation) -> None:
    """Databases do not answer, and have no standby."""
    databases_are_away(simulation)
    simulation.mishaps.standbys = 0.0


def answers_are_lost(simulation: Simulation) -> None:
    """Answers of databases and of the log are lost."""
    simulation.mishaps.lost_answers = 0.4


def operators_intervene(simulation: Simulation) -> None:
    """The operators of the databases end prepared branches."""
    simulation.mishaps.hands = 1.0


def operators_roll_back(simulation: Simulation) -> None:
    """The operators of the databases end prepared branches, and the databases then answer XA_RB* to a commit."""
    operators_intervene(simulation)
    simulation.mishaps.frank = True


def brokers_forget(simulation: Simulation) -> None:
    """Brokers remember few outcomes of branches, and their answers are lost."""
    answers_are_lost(simulation)
    simulation.forget_ends()


def namesakes_die(simulation: Simulation) -> None:
    """Two managers have the same name and separate decision logs; both are killed and stopped."""
    managers_die(simulation)
    simulation.mishaps.namesakes = True


def brokers_move(simulation: Simulation) -> None:
    """Brokers are stopped and replaced."""
    simulation.nemesis.troubles = {"take over": 1.0, "stop broker": 1.0, "cut clients": 0.5, "kill manager": 0.3}
    simulation.nemesis.pause_ms = 15.0


PLANTED: Final = (
    Planted(TwoPhaseViolation.COMMIT_BEFORE_ALL_PREPARED, "a manager commits each branch as soon as it is prepared", ("xa-split",)),
    Planted(
        TwoPhaseViolation.FAILED_PREPARE_IS_YES,
        "a manager treats a refused prepare as a yes vote",
        ("xa-split", "unexpected", "lost", "xa-heuristic", "xa-told"),
    ),
    Planted(
        TwoPhaseViolation.COMMIT_BEFORE_DECISION,
        "a manager commits branches before the decision is stored",
        ("xa-split", "unexpected"),
        managers_die,
    ),
    Planted(
        TwoPhaseViolation.DECISION_IGNORED,
        "a manager commits although the log answers ROLLBACK",
        ("xa-split", "xa-told"),
        managers_die,
    ),
    Planted(TwoPhaseViolation.IN_DOUBT_IS_ROLLED_BACK, "a manager reports a commit in doubt as rolled back", ("xa-told",)),
    Planted(
        TwoPhaseViolation.ONE_PHASE_IN_DOUBT_IS_ROLLED_BACK,
        "a manager reports a commit in one phase in doubt as rolled back",
        ("unexpected", "duplicated", "xa-told"),
        answers_are_lost,
    ),
    Planted(TwoPhaseViolation.UNTOLD_IS_FORGOTTEN, "a manager deletes a decision although a branch has not received it", ("xa-split",)),
    Planted(
        TwoPhaseViolation.LAST_BRANCH_IN_ONE_PHASE,
        "a manager commits the last branch in one phase although others are prepared",
        ("xa-split", "unexpected"),
    ),
    Planted(FinishingViolation.HEURISTIC_DROPPED, "a branch that ended against the decision is not recorded", ("xa-heuristic",)),
    Planted(
        FinishingViolation.UNKNOWN_IS_DONE,
        "a branch that its database does not know counts as committed, although the database can tell",
        ("xa-heuristic",),
        operators_intervene,
    ),
    Planted(
        FinishingViolation.ROLLED_BACK_IS_DONE,
        "a branch whose resource answers XA_RB* to the commit counts as committed",
        ("xa-heuristic",),
        operators_roll_back,
    ),
    Planted(
        PlanViolation.FOREIGN_DECISIONS_FORGOTTEN,
        "recovery deletes decisions of another manager that shares the log",
        ("xa-split", "lost"),
        databases_are_away,
    ),
    Planted(PlanViolation.FOREIGN_BRANCHES_ROLLED_BACK, "recovery rolls back prepared branches of another manager", ("xa-disturbed",)),
    Planted(
        PlanViolation.NOT_LISTED_IS_COMMITTED,
        "recovery treats a branch that its resource does not list as committed",
        ("xa-split", "lost"),
        databases_are_away,
    ),
    Planted(
        PlanViolation.UNREACHABLE_IS_COMMITTED,
        "recovery deletes a decision although a resource does not answer",
        ("xa-split", "lost"),
        primaries_are_away,
    ),
    Planted(
        PlanViolation.OTHER_LOG_IGNORED,
        "recovery rolls back prepared branches of a manager of the same name that has another decision log",
        ("xa-split", "xa-heuristic", "xa-disturbed", "lost"),
        namesakes_die,
    ),
    Planted(PlanViolation.AT_WORK_IGNORED, "recovery rolls back transactions that its own process is working on", ("xa-disturbed",)),
    Planted(
        PlanViolation.DEADLINE_IGNORED,
        "recovery does not wait for the deadline of the transactions of other processes",
        ("xa-disturbed",),
        managers_die,
    ),
    Planted(
        PlanViolation.ROLLBACK_FORGOTTEN_EARLY,
        "recovery deletes a ROLLBACK before a slow application asks for COMMIT",
        ("xa-split", "xa-told"),
        managers_stand_still,
    ),
    Planted(RecoveryViolation.ROLLBACK_UNDECIDED, "recovery rolls a branch back without asking the log", ("xa-split",), managers_die),
    Planted(RecoveryViolation.NOTHING_DONE, "recovery finishes nothing", ("xa-stuck",)),
    Planted(
        RecoveryViolation.FAILED_STEP_IS_DONE,
        "recovery deletes a decision although a branch has not received it",
        ("xa-split", "lost"),
        databases_are_away,
    ),
    Planted(LogTopicViolation.LAST_DECISION_STANDS, "the last decision in the log counts, not the first", ("xa-split",), managers_die),
    Planted(LogTopicViolation.DECISION_UNSTORED, "a manager acts on a decision before the log has stored it", ("xa-split",)),
    Planted(
        LogTopicViolation.OWN_DECISION_STANDS,
        "a manager does not read whether the log has an earlier decision",
        ("xa-split",),
        managers_die,
    ),
    Planted(
        RequestViolation.TRANSACTION_STAYS,
        "a prepared JMS transaction still belongs to its connection, and is rolled back when the connection ends",
        ("duplicated", "ingress-dup", "unexpected"),
    ),
    Planted(
        RequestViolation.LOST_JOIN_IS_EMPTY,
        "a branch is committed without the work of a session that has joined it and closed",
        ("lost",),
    ),
    Planted(
        RequestViolation.JOINED_STAYS,
        "the work of a session that has joined a branch stays with its connection when the branch is prepared or committed",
        ("lost",),
    ),
    Planted(BranchViolation.VOTE_UNSTORED, "a broker answers a prepare before the branch is stored", ("lost",)),
    Planted(BranchViolation.SENDS_AT_PREPARE, "a broker routes the sends of a branch when it is prepared", ("unexpected", "duplicated")),
    Planted(BranchViolation.ENDED_TWICE, "a broker applies a branch twice", ("duplicated", "unexpected")),
    Planted(BranchViolation.ACKNOWLEDGEMENT_DROPPED, "the commit of a branch omits an acknowledgement", ("zombie-ack", "duplicated")),
    Planted(
        BranchViolation.ROLLBACK_UNMARKED,
        "messages of a branch that was rolled back are not marked as redelivered",
        ("redelivered-unmarked",),
    ),
    Planted(BranchViolation.ENDS_FORGOTTEN, "a broker forgets how branches have ended", ("unexpected",)),
    Planted(
        BranchViolation.FORGOTTEN_IS_ROLLED_BACK,
        "a broker answers that a branch was rolled back, although it has forgotten the end of the branch",
        ("unexpected", "duplicated"),
        brokers_forget,
    ),
    Planted(BranchViolation.FORCED_ENDS_FORGOTTEN, "a broker forgets which branches an administrator has ended", ("lost",)),
    Planted(BranchViolation.COMMITTING_UNKNOWN, "a broker does not track which commits in one phase are not stored yet", ("unexpected",)),
    Planted(BranchViolation.FORGET_UNJOURNALED, "a broker does not journal that an administrator's outcome was forgotten", ("unexpected",)),
    Planted(BranchViolation.SNAPSHOT_WITHOUT_PREPARED, "snapshots omit prepared branches", ("lost",)),
    Planted(BranchViolation.SNAPSHOT_WITHOUT_ENDED, "snapshots omit the outcomes of branches", ("unexpected",)),
    Planted(BranchViolation.SNAPSHOT_WITHOUT_FORCED, "snapshots omit branches that an administrator has ended", ("lost",)),
)
