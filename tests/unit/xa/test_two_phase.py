"""The states of a transaction, and each rule of two-phase commit and of recovery. A violation of a rule must be visible."""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable

import pytest

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.xa_codes import Code
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa.blocking import BlockingLog, BlockingParticipant, SystemClock
from bascule.xa.errors import (
    BranchHeuristic,
    BranchRolledBack,
    HeuristicOutcome,
    OutOfOrder,
    ResourceFailed,
    TransactionInDoubt,
    TransactionRolledBack,
)
from bascule.xa.finishing import FinishingViolation
from bascule.xa.jms import JmsResource
from bascule.xa.kafka import KafkaResource
from bascule.xa.log import Decision, LogState, Outcome
from bascule.xa.postgres import PostgresResource
from bascule.xa.recovery_protocol import RecoveryProtocol, RecoveryViolation
from bascule.xa.resource import CommitPriority
from bascule.xa.two_phase import ENDED, TRANSITIONS, TransactionEvent, TransactionStatus, TwoPhase, TwoPhaseViolation
from bascule.xa.xid import branch, new_gtrid

Points = dict[str, Callable[[], object]]


class Stage:
    """Two resources, a log and a transaction. ``at`` has the actions at points."""

    def __init__(self, *violations: enum.StrEnum) -> None:
        self.at: Points = {}
        self.seen: list[str] = []
        self.log = ModelLog(watch=self._watch)
        self.one, self.two = ModelResource("one", watch=self._watch), ModelResource("two", watch=self._watch)
        gtrid = new_gtrid("shop", 0)
        self.transaction = TwoPhase(gtrid, 60.0, BlockingLog(self.log), SystemClock(), "application", violations=violations)

    def enlist(self) -> None:
        for resource in (self.one, self.two):
            run_blocking(self.transaction.enlist(BlockingParticipant(resource))).append("work")

    def commit(self) -> None:
        self.enlist()
        run_blocking(self.transaction.commit())

    @property
    def committed(self) -> tuple[int, int]:
        return len(self.one.durable.committed), len(self.two.durable.committed)

    def recovery(self, *violations: enum.StrEnum) -> RecoveryProtocol:
        parts = {each.name: BlockingParticipant(each) for each in (self.one, self.two)}
        return RecoveryProtocol("shop", BlockingLog(self.log), parts, SystemClock(), "recoverer", violations=violations)

    def recover(self, *violations: enum.StrEnum) -> None:
        run_blocking(self.recovery(*violations).run(tuple, patient=False))

    def _watch(self, point: str) -> None:
        self.seen.append(point)
        if point in self.at:
            self.at[point]()


def fail(error: Exception) -> Callable[[], object]:
    def raise_it() -> None:
        raise error

    return raise_it


def test_transition_table_has_no_exit_from_ended_states_and_covers_all_others() -> None:
    assert ENDED.isdisjoint(state for state, _ in TRANSITIONS)
    assert {state for state, _ in TRANSITIONS} | ENDED == set(TransactionStatus)
    assert {event for _, event in TRANSITIONS} == set(TransactionEvent)


def test_ended_transaction_refuses_every_call() -> None:
    stage = Stage()
    stage.commit()
    calls = (stage.transaction.commit, stage.transaction.rollback, lambda: stage.transaction.enlist(BlockingParticipant(stage.one)))
    for call in calls:
        with pytest.raises(OutOfOrder, match="is committed"):
            run_blocking(call())
    with pytest.raises(OutOfOrder):
        stage.transaction.mark()


@pytest.mark.parametrize("broken", [False, True])
def test_no_branch_commits_before_all_branches_have_prepared(broken: bool) -> None:
    stage = Stage(*([TwoPhaseViolation.COMMIT_BEFORE_ALL_PREPARED] if broken else []))
    stage.two.vote = "no"
    with pytest.raises(HeuristicOutcome if broken else TransactionRolledBack):
        stage.commit()
    assert stage.committed == ((1, 0) if broken else (0, 0))


@pytest.mark.parametrize("broken", [False, True])
def test_no_branch_commits_before_decision_is_stored(broken: bool) -> None:
    stage = Stage(*([TwoPhaseViolation.COMMIT_BEFORE_DECISION] if broken else []))
    stage.commit()
    assert (stage.seen.index("one.commit.before") < stage.seen.index("log.decide.before")) is broken


@pytest.mark.parametrize("broken", [False, True])
def test_application_obeys_stored_rollback_decision(broken: bool) -> None:
    stage = Stage(*([TwoPhaseViolation.DECISION_IGNORED] if broken else []))
    gtrid = stage.transaction.gtrid
    stage.at["log.decide.before"] = lambda: stage.log.durable.add(Decision(gtrid, Outcome.ROLLBACK, (), 0, "recoverer"))
    if broken:
        stage.commit()
    else:
        with pytest.raises(TransactionRolledBack, match="was rolled back by recoverer"):
            stage.commit()
    assert stage.committed == ((1, 1) if broken else (0, 0))


@pytest.mark.parametrize("violations", [[], [TwoPhaseViolation.IN_DOUBT_IS_ROLLED_BACK]], ids=["kept", "broken"])
def test_commit_in_doubt_is_not_reported_as_rolled_back(violations: list[TwoPhaseViolation]) -> None:
    stage = Stage(*violations)
    stage.at["log.decide.after"] = fail(Unavailable("no answer"))
    with pytest.raises(TransactionRolledBack if violations else TransactionInDoubt):
        stage.commit()
    assert stage.transaction.status is TransactionStatus.IN_DOUBT
    assert stage.transaction.pending
    stage.at.clear()
    stage.recover()
    assert stage.committed == (1, 1)


@pytest.mark.parametrize("broken", [False, True])
def test_decision_is_kept_until_every_branch_has_committed(broken: bool) -> None:
    stage = Stage(*([TwoPhaseViolation.UNTOLD_IS_FORGOTTEN] if broken else []))
    stage.at["two.commit.before"] = fail(ResourceFailed("down"))
    stage.commit()
    assert list(stage.transaction.unfinished) == ["two"]
    stage.at.clear()
    stage.recover()
    assert stage.committed == ((1, 0) if broken else (1, 1))


@pytest.mark.parametrize("broken", [False, True])
def test_failed_prepare_does_not_count_as_yes_vote(broken: bool) -> None:
    stage = Stage(*([TwoPhaseViolation.FAILED_PREPARE_IS_YES] if broken else []))
    stage.two.vote = "no"
    try:
        stage.commit()
    except TransactionRolledBack:
        assert not broken
    assert stage.committed == ((1, 0) if broken else (0, 0))


@pytest.mark.parametrize("broken", [False, True])
def test_recovery_obeys_commit_decision_stored_after_its_read_of_log(broken: bool) -> None:
    stage = Stage()
    gtrid = stage.transaction.gtrid
    for each in (stage.one, stage.two):
        each.durable.prepared[branch(gtrid, each.name)] = ["work"]
    stage.at["log.decide.before"] = lambda: stage.log.durable.add(Decision(gtrid, Outcome.COMMIT, ("one", "two"), 0, "application"))
    stage.recover(*([RecoveryViolation.DECISION_IGNORED] if broken else []))
    assert stage.committed == ((0, 0) if broken else (1, 1))


@pytest.mark.parametrize("broken", [False, True])
def test_recovery_stores_rollback_decision_before_it_rolls_back(broken: bool) -> None:
    stage = Stage()
    stage.one.durable.prepared[branch(stage.transaction.gtrid, "one")] = ["work"]
    stage.recover(*([RecoveryViolation.ROLLBACK_UNDECIDED] if broken else []))
    assert ("log.decide.before" in stage.seen) is not broken


@pytest.mark.parametrize("broken", [False, True])
def test_heuristic_outcome_of_another_process_is_recorded(broken: bool) -> None:
    stage = Stage()
    gtrid = stage.transaction.gtrid
    xid = branch(gtrid, "one")
    stage.one.durable.prepared[xid] = ["work"]
    stage.one.force(xid, Code.XA_HEURRB)
    stage.log.durable = LogState({gtrid: Decision(gtrid, Outcome.COMMIT, ("one",), 0, "application")})
    stage.recover(*([FinishingViolation.HEURISTIC_DROPPED] if broken else []))
    assert (xid in stage.log.durable.heuristics) is not broken


def test_heuristic_answer_to_one_phase_commit_is_recorded_and_raised() -> None:
    stage = Stage()
    run_blocking(stage.transaction.enlist(BlockingParticipant(stage.one)))
    stage.at["one.commit.before"] = fail(BranchHeuristic("by hand", Code.XA_HEURMIX))
    with pytest.raises(Exception, match="except for: XA_HEURMIX: by hand"):
        run_blocking(stage.transaction.commit())
    assert [each.code for each in stage.log.durable.heuristics.values()] == [Code.XA_HEURMIX]


def test_rollback_continues_when_resource_refuses_end_of_work() -> None:
    stage = Stage()
    stage.enlist()
    stage.at["one.end.before"] = fail(BranchRolledBack("gone"))
    run_blocking(stage.transaction.rollback())
    assert stage.transaction.status is TransactionStatus.ROLLED_BACK
    assert {"one.rollback.after", "two.rollback.after"} <= set(stage.seen)


def test_interrupted_commit_leaves_remaining_branches_to_recovery() -> None:
    stage = Stage()

    def interrupt() -> None:
        raise KeyboardInterrupt

    stage.at["one.commit.before"] = interrupt
    with pytest.raises(KeyboardInterrupt):
        stage.commit()
    assert stage.transaction.status is TransactionStatus.COMMITTED
    assert stage.transaction.pending
    stage.at.clear()
    stage.recover()
    assert stage.committed == (1, 1)


class Ordered:
    """A database, Kafka and a broker as models. ``told`` has the resources in the order of their commits."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.log = ModelLog()
        priorities = {"broker": CommitPriority.JMS, "kafka": CommitPriority.KAFKA, "database": CommitPriority.DATABASE}
        self.resources = [ModelResource(name, priority=priority, watch=self._watch) for name, priority in priorities.items()]

    def _watch(self, point: str) -> None:
        name, call, when = point.split(".")
        if (call, when) == ("commit", "before"):
            self.told.append(name)


def test_resources_commit_in_order_database_kafka_broker_for_any_enlistment_order() -> None:
    told = []
    for order in itertools.permutations(range(3)):
        ordered = Ordered()
        transaction = TwoPhase(new_gtrid("shop", 0), 60.0, BlockingLog(ordered.log), SystemClock(), "application")
        for place in order:
            run_blocking(transaction.enlist(BlockingParticipant(ordered.resources[place])))
        run_blocking(transaction.commit())
        told.append(ordered.told)
    assert told == [["database", "kafka", "broker"]] * 6


@pytest.mark.parametrize("operator", [False, True])
@pytest.mark.parametrize("listed", [True, False])
def test_recovery_and_operator_commit_resources_in_priority_order(operator: bool, listed: bool) -> None:
    ordered, gtrid = Ordered(), new_gtrid("shop", 0)
    names = [each.name for each in ordered.resources]
    for each in ordered.resources:
        if listed or operator or each.name != "database":
            each.durable.prepared[branch(gtrid, each.name)] = ["work"]
    parts = {each.name: BlockingParticipant(each) for each in ordered.resources}
    recovery = RecoveryProtocol("shop", BlockingLog(ordered.log), parts, SystemClock(), "recoverer")
    if operator:
        run_blocking(recovery.finish_now(branch(gtrid, "kafka"), Outcome.COMMIT, who="operator"))
    else:
        ordered.log.decide(Decision(gtrid, Outcome.COMMIT, tuple(names), 0, "application"))
        run_blocking(recovery.run(tuple, patient=False))
        assert ordered.log.durable.decisions == {}
    assert ordered.told == ["database", "kafka", "broker"]


def test_resources_have_default_priority_of_their_kind() -> None:
    database = PostgresResource("db", "")
    kafka, broker = KafkaResource("kafka", {"bootstrap.servers": "127.0.0.1:1"}), JmsResource("broker", "amqp://127.0.0.1:1")
    priorities = [BlockingParticipant(each).priority for each in (database, kafka, broker)]
    assert priorities == [CommitPriority.DATABASE, CommitPriority.KAFKA, CommitPriority.JMS]
    assert priorities == sorted(priorities)
    assert PostgresResource("db", "", priority=500).priority == 500
    assert JmsResource("broker", "amqp://127.0.0.1:1", priority=1).priority == 1


def test_resource_without_priority_has_database_priority() -> None:
    class Bare:
        name = "bare"

    assert BlockingParticipant(Bare()).priority == CommitPriority.DATABASE  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["rollback", "marked", "refused at its end", "an error at its end"])
def test_work_of_each_branch_ends_before_its_rollback(way: str) -> None:
    """A call that is still running in the branch must not continue in a later branch of the session."""
    stage = Stage()
    stage.enlist()
    if way == "marked":
        stage.transaction.mark()
    elif way == "refused at its end":
        stage.at["one.end.before"] = fail(BranchRolledBack("lost"))
    elif way == "an error at its end":
        stage.at["one.end.before"] = fail(ZeroDivisionError("a fault of the resource"))
    if way in ("rollback", "an error at its end"):
        run_blocking(stage.transaction.rollback())
    else:
        with pytest.raises(TransactionRolledBack):
            run_blocking(stage.transaction.commit())
    for name in ("one", "two"):
        assert stage.seen.index(f"{name}.end.before") < stage.seen.index(f"{name}.rollback.before")
    assert stage.transaction.status is TransactionStatus.ROLLED_BACK
    assert stage.one._active == stage.two._active == {}
