"""The branches and decisions that recovery finishes or forgets, and those that it leaves alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from bascule.core.effects import run_blocking
from bascule.core.errors import InvalidInput, Unavailable
from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.xa.blocking import BlockingLog, BlockingParticipant, now_ms
from bascule.xa.errors import BranchHeuristic, BranchRolledBack, Code, ResourceFailed, UnknownXid
from bascule.xa.file_log import FileLog
from bascule.xa.log import DECISION_KEPT_S, Decision, Heuristic, LogState, Outcome
from bascule.xa.plan import Action, RecoveryView, plan
from bascule.xa.recovery import Recoverer
from bascule.xa.recovery_protocol import RecoveryProtocol
from bascule.xa.xid import Xid, branch, deadline_ms_of, log_id_of_gtrid, manager_of, new_gtrid
from tests.support.speed import SLOWNESS

NOW_MS = 1_790_000_000_000
LATER_MS = NOW_MS + 60_000
#: Time limit of an answer, also on a busy machine.
ANSWER_S = 2.0
LONG_S = 30.0 * SLOWNESS


def view(branches: dict[str, list[Xid]], *decisions: Decision, live: tuple[bytes, ...] = (), now: int = NOW_MS) -> RecoveryView:
    state = LogState({each.gtrid: each for each in decisions})
    return RecoveryView(branches, state, state, live, now)


def decision(gtrid: bytes, outcome: Outcome = Outcome.COMMIT, resources: tuple[str, ...] = ("db",), at_ms: int = NOW_MS) -> Decision:
    return Decision(gtrid, outcome, resources, at_ms, "host/1")


def actions(made: list) -> list[tuple[Action, str]]:
    return [(step.action, step.resource) for step in made]


def test_gtrid_contains_manager_name_and_deadline() -> None:
    gtrid = new_gtrid("shop", LATER_MS)
    assert manager_of(branch(gtrid, "db")) == "shop"
    assert deadline_ms_of(gtrid) == LATER_MS
    assert len(gtrid) <= 64
    assert manager_of(Xid(1, gtrid, b"db")) is None
    assert manager_of(Xid(branch(gtrid, "db").format_id, b"shop/other", b"db")) is None


def test_branch_follows_decision_and_is_rolled_back_without_decision() -> None:
    decided, given_up, unknown = (new_gtrid("shop", LATER_MS) for _ in range(3))
    branches = {"db": [branch(each, "db") for each in (decided, given_up, unknown)]}
    made = plan("shop", view(branches, decision(decided), decision(given_up, Outcome.ROLLBACK)), patient=False)
    assert actions(made) == [(Action.COMMIT, "db"), (Action.ROLLBACK, "db"), (Action.ROLLBACK, "db"), (Action.FORGET, "")]
    assert [step.why.partition(",")[0] for step in made[:3]] == ["the log says commit", "the log says rollback", "the log has no decision"]


def test_recovery_ignores_branches_of_other_managers_resources_and_formats() -> None:
    ours = branch(new_gtrid("shop", LATER_MS), "db")
    foreign = [branch(new_gtrid("shop2", LATER_MS), "db"), ours._replace(format_id=1), ours._replace(bqual=b"other"), Xid(1, b"x", b"")]
    assert plan("shop", view({"db": foreign}), patient=False) == []


def test_gtrid_contains_id_of_decision_log() -> None:
    gtrid = new_gtrid("s" * 31, LATER_MS, "0a1b2c3d")
    assert (manager_of(branch(gtrid, "db")), deadline_ms_of(gtrid), log_id_of_gtrid(gtrid)) == ("s" * 31, LATER_MS, "0a1b2c3d")
    assert len(gtrid) == 64
    assert new_gtrid("s" * 31, LATER_MS, "0a1b2c3d") != gtrid
    assert log_id_of_gtrid(new_gtrid("shop", LATER_MS)) == ""


def test_branch_with_decision_in_other_log_is_reported_and_left_unchanged() -> None:
    own, other, old = new_gtrid("shop", 0, "aaaaaaaa"), new_gtrid("shop", 0, "bbbbbbbb"), new_gtrid("shop", 0)
    listed = {"db": [branch(each, "db") for each in (own, other, old)]}
    state = LogState(log_id="aaaaaaaa")
    made = plan("shop", RecoveryView(listed, state, state, (), NOW_MS), patient=False)
    assert [(step.action, step.xid.gtrid) for step in made] == [(Action.ROLLBACK, own), (Action.FOREIGN, other), (Action.ROLLBACK, old)]
    assert all(log_id in made[1].why for log_id in ("aaaaaaaa", "bbbbbbbb"))
    adopted = plan("shop", RecoveryView(listed, state, state, (), NOW_MS, lost_logs=["bbbbbbbb"]), patient=False)
    assert [step.action for step in adopted] == [Action.ROLLBACK] * 3


def test_decision_of_transaction_with_other_log_is_left_unchanged() -> None:
    other = decision(new_gtrid("shop", 0, "bbbbbbbb"))
    state = LogState({other.gtrid: other}, log_id="aaaaaaaa")
    assert plan("shop", RecoveryView({"db": []}, state, state, (), NOW_MS), patient=False) == []


def test_managers_with_same_name_and_different_logs_do_not_end_branches_of_each_other(
    durable: DurableBranches, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = FileLog(tmp_path / "first.xalog"), FileLog(tmp_path / "second.xalog")
    theirs, own = (branch(new_gtrid("shop", 0, log.read().log_id), "db") for log in (first, second))
    durable.prepared = {theirs: ["theirs"], own: ["own"]}
    recovery = recoverer(second, ModelResource("db", durable))  # type: ignore[arg-type]
    for _ in range(2):
        done = recovery.run()
        assert ([step.xid for step in done.foreign], list(durable.prepared)) == ([theirs], [theirs])
    assert sum("another decision log" in record.getMessage() for record in caplog.records) == 1
    with pytest.raises(InvalidInput, match=first.read().log_id):
        recovery.finish_now(theirs, Outcome.ROLLBACK)
    recoverer(first, ModelResource("db", durable)).run()  # type: ignore[arg-type]
    assert durable.prepared == {}


def test_recovery_ignores_active_transactions_of_its_process() -> None:
    gtrid = new_gtrid("shop", LATER_MS)
    assert plan("shop", view({"db": [branch(gtrid, "db")]}, live=(gtrid,)), patient=False) == []
    assert plan("shop", view({"db": []}, decision(gtrid), live=(gtrid,)), patient=False) == []


def test_patient_recovery_waits_for_deadline_only_without_decision() -> None:
    gtrid, decided = new_gtrid("shop", LATER_MS), new_gtrid("shop", LATER_MS)
    branches = {"db": [branch(gtrid, "db"), branch(decided, "db")]}
    made = plan("shop", view(branches, decision(decided)), patient=True)
    assert actions(made) == [(Action.WAIT, "db"), (Action.COMMIT, "db"), (Action.FORGET, "")]
    assert "60 s left" in made[0].why
    made = plan("shop", view(branches, decision(decided), now=LATER_MS), patient=True)
    assert actions(made) == [(Action.ROLLBACK, "db"), (Action.COMMIT, "db"), (Action.FORGET, "")]


def test_commit_is_confirmed_by_unlisted_resources_before_decision_is_forgotten() -> None:
    gtrid = new_gtrid("shop", LATER_MS)
    committed = decision(gtrid, resources=("db", "kafka"))
    confirmed = [(Action.CONFIRM, "db"), (Action.CONFIRM, "kafka"), (Action.FORGET, "")]
    assert actions(plan("shop", view({"db": [], "kafka": []}, committed), patient=False)) == confirmed
    assert actions(plan("shop", view({"db": []}, committed), patient=False)) == [(Action.CONFIRM, "db")]  # kafka does not answer
    made = plan("shop", view({"db": [], "kafka": [branch(gtrid, "kafka")]}, committed), patient=False)
    assert actions(made) == [(Action.COMMIT, "kafka"), (Action.CONFIRM, "db"), (Action.FORGET, "")]


def test_branch_of_other_resource_on_same_database_does_not_confirm_commit() -> None:
    gtrid = new_gtrid("shop", LATER_MS)
    listed = [branch(gtrid, "orm")]
    made = plan("shop", view({"db": listed, "orm": listed}, decision(gtrid, resources=("db", "orm"))), patient=False)
    assert actions(made) == [(Action.COMMIT, "orm"), (Action.CONFIRM, "db"), (Action.FORGET, "")]


def test_commit_forgotten_after_listing_of_branch_is_not_heuristic(durable: DurableBranches) -> None:
    """The broker answers like this: it still knows that the branch was committed."""
    gtrid = new_gtrid("shop", 0)
    xid = branch(gtrid, "db")
    durable.prepared[xid] = ["work"]
    log = ModelLog()

    def act(point: str) -> None:
        if point == "db.recover.after" and xid in durable.prepared:
            log.decide(decision(gtrid))
            durable.prepared.pop(xid)
            log.forget([gtrid])
        elif point == "db.rollback.before":
            raise BranchHeuristic(f"{xid} has been committed", Code.XA_HEURCOM)

    resource = ModelResource("db", durable, watch=act)
    listed = resource.recover

    def list_first() -> list[Xid]:
        found = list(durable.prepared)
        listed()
        return found

    resource.recover = list_first  # type: ignore[method-assign]
    done = recoverer(log, resource).run()
    assert actions(done.steps) == [(Action.ROLLBACK, "db")]
    assert (done.failed, log.durable.heuristics) == ({}, {})


@pytest.mark.parametrize("at_work", [(True, False), (False, True)], ids=["ends", "begins"])
def test_transaction_that_ends_or_begins_during_recovery_is_left_unchanged(durable: DurableBranches, at_work: tuple[bool, bool]) -> None:
    gtrid = new_gtrid("shop", 0)
    durable.prepared[branch(gtrid, "db")] = ["work"]
    before_and_after = iter(at_work)
    log = ModelLog()
    done = recoverer(log, ModelResource("db", durable)).run(lambda: {gtrid} if next(before_and_after) else set())
    assert (done.steps, log.durable.decisions) == ([], {})
    assert list(durable.prepared) == [branch(gtrid, "db")]


def test_unlisted_branch_is_committed_before_decision_is_forgotten(durable: DurableBranches) -> None:
    """The resource may be a PostgreSQL standby that lags behind its primary."""
    gtrid = new_gtrid("shop", 0)
    durable.prepared[branch(gtrid, "db")] = ["work"]
    resource, log = ModelResource("db", durable), ModelLog(LogState({gtrid: decision(gtrid)}))
    resource.recover = list  # type: ignore[method-assign]
    recoverer(log, resource).run()
    assert durable.committed == ["work"]
    assert log.durable.decisions == {}


def test_decision_is_kept_until_resource_confirms_commit(durable: DurableBranches) -> None:
    gtrid = new_gtrid("shop", 0)

    def fail(point: str) -> None:
        if point == "db.commit.before":
            raise ResourceFailed("read-only")

    log = ModelLog(LogState({gtrid: decision(gtrid)}))
    done = recoverer(log, ModelResource("db", durable, watch=fail)).run()
    assert [(step.action, why) for step, why in done.failed.items()] == [(Action.CONFIRM, "XAER_RMFAIL: read-only")]
    assert not done.finished
    assert list(log.durable.decisions) == [gtrid]


def test_rollback_by_hand_during_downtime_is_recorded_as_heuristic(durable: DurableBranches) -> None:
    gtrid = new_gtrid("shop", 0)
    xid = branch(gtrid, "db")
    durable.prepared[xid] = ["work"]
    resource, log = ModelResource("db", durable), ModelLog()
    log.decide(Decision(gtrid, Outcome.COMMIT, ("db",), NOW_MS, "host/1", (resource.token(xid),)))
    resource.end_by_hand(xid, Outcome.ROLLBACK)
    recoverer(log, resource).run()
    assert log.durable.heuristics[xid].code is Code.XA_HEURRB
    assert log.durable.heuristics[xid].wanted is Outcome.COMMIT
    assert log.durable.decisions == {}


def test_recovery_ignores_decisions_of_other_manager_in_same_log(durable: DurableBranches) -> None:
    """Both managers call their own database "db", so this manager cannot ask the database of the other one."""
    theirs = new_gtrid("billing", 0)
    old = decision(new_gtrid("billing", 0), Outcome.ROLLBACK, at_ms=0)
    log = ModelLog(LogState({theirs: decision(theirs), old.gtrid: old}))
    log.record(Heuristic(branch(theirs, "other"), Code.XA_HEURRB, Outcome.COMMIT, "by hand", NOW_MS))
    done = recoverer(log, ModelResource("db", durable)).run()
    assert (done.steps, done.heuristics) == ([], [])
    assert list(log.durable.decisions) == [theirs, old.gtrid]
    with pytest.raises(InvalidInput, match="does not belong to transaction manager 'shop'"):
        recoverer(log, ModelResource("db", durable)).finish_now(branch(theirs, "db"), Outcome.ROLLBACK)


@pytest.mark.parametrize("code", [Code.XA_RBROLLBACK, Code.XA_RBTIMEOUT])
def test_commit_answered_with_rollback_is_recorded_as_heuristic(durable: DurableBranches, code: Code) -> None:
    gtrid = new_gtrid("shop", 0)
    xid = branch(gtrid, "db")
    durable.prepared[xid] = ["work"]

    def refuse(point: str) -> None:
        if point == "db.commit.before":
            raise BranchRolledBack("it is gone", code)

    log = ModelLog(LogState({gtrid: decision(gtrid)}))
    recoverer(log, ModelResource("db", durable, watch=refuse)).run()
    assert log.durable.heuristics[xid].code is Code.XA_HEURRB


def test_commit_stored_after_resources_were_listed_is_not_forgotten() -> None:
    gtrid = new_gtrid("shop", LATER_MS)
    seen = RecoveryView({"db": []}, LogState(), LogState({gtrid: decision(gtrid)}), (), NOW_MS)
    assert plan("shop", seen, patient=False) == []


class FakeClock:
    """A wall clock that the test sets, and a monotonic clock that the test advances."""

    def __init__(self) -> None:
        self.wall_ms, self.seconds = NOW_MS, 0.0

    def now_ms(self) -> int:
        return self.wall_ms

    def monotonic_s(self) -> float:
        return self.seconds


@pytest.mark.parametrize("at_ms", [0, NOW_MS, 2 * NOW_MS], ids=["clock behind", "same clock", "clock ahead"])
def test_rollback_decision_is_kept_for_one_day_independent_of_clock(at_ms: int) -> None:
    """If the clock of a recoverer is a day slow, the next one must not forget its ROLLBACK: a slow application could then store COMMIT."""
    gtrid = new_gtrid("shop", 0)
    log, clock = ModelLog(LogState({gtrid: decision(gtrid, Outcome.ROLLBACK, at_ms=at_ms)})), FakeClock()
    recovery = RecoveryProtocol("shop", BlockingLog(log), {"db": BlockingParticipant(ModelResource("db"))}, clock, "recoverer")

    def run() -> None:
        run_blocking(recovery.run(tuple, patient=False))

    run()
    clock.seconds = DECISION_KEPT_S
    clock.wall_ms += 10 * int(DECISION_KEPT_S) * 1000
    run()
    assert gtrid in log.durable.decisions
    assert log.decide(decision(gtrid)).outcome is Outcome.ROLLBACK
    clock.seconds += 1
    run()
    assert log.durable.decisions == {}


@pytest.fixture
def durable() -> DurableBranches:
    return DurableBranches()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def recoverer(log: ModelLog, *resources: ModelResource, patient: bool = False) -> Recoverer:
    return Recoverer("shop", log, resources, by="test", patient=patient)


def test_unreachable_resource_is_named_and_does_not_block_recovery_of_others(durable: DurableBranches) -> None:
    xid = branch(new_gtrid("shop", 0), "up")
    durable.prepared[xid] = ["work"]

    def fail(_point: str) -> None:
        raise ResourceFailed("no route")

    done = recoverer(ModelLog(), ModelResource("up", durable), ModelResource("down", watch=fail)).run()
    assert done.unreachable == {"down": "XAER_RMFAIL: no route"}
    assert not done.finished
    assert durable.prepared == {}


def test_hanging_resource_is_asked_again_after_its_answer_and_late_answer_is_discarded(durable: DurableBranches) -> None:
    asked, released = [], threading.Event()

    def hang(point: str) -> None:
        if point == "down.recover.after":
            asked.append(point)
            assert released.wait(LONG_S)

    xid, down = branch(new_gtrid("shop", 0), "down"), DurableBranches()
    resources = (ModelResource("down", down, watch=hang), ModelResource("up", durable))
    recovery = Recoverer("shop", ModelLog(), resources, by="test", patient=False, answer_within_s=ANSWER_S)
    durable.prepared[branch(new_gtrid("shop", 0), "up")] = ["work"]
    assert recovery.run().unreachable == {"down": f"XAER_RMFAIL: no answer within {ANSWER_S:g} s"}
    assert durable.prepared == {}
    assert recovery.run().unreachable == {"down": "XAER_RMFAIL: the previous request is not answered yet"}
    down.prepared[xid] = ["work"]
    released.set()
    wait_until(lambda: not recovery.run().unreachable)
    assert down.prepared == {}
    assert len(asked) == 2


@pytest.mark.parametrize("outcome", list(Outcome))
def test_hanging_recovery_step_does_not_block_other_resources_and_is_not_repeated_early(durable: DurableBranches, outcome: Outcome) -> None:
    asked, released = [], threading.Event()

    def hang(point: str) -> None:
        if point == f"down.{outcome}.before":
            asked.append(point)
            assert released.wait(LONG_S)

    gtrid, down, log = new_gtrid("shop", 0), DurableBranches(), ModelLog()
    first, second = branch(gtrid, "down"), branch(new_gtrid("shop", 0), "down")
    if outcome is Outcome.COMMIT:
        log.decide(decision(gtrid, resources=("down", "up")))
    down.prepared.update({first: ["one"]} if outcome is Outcome.COMMIT else {first: ["one"], second: ["two"]})
    durable.prepared[branch(gtrid, "up")] = ["three"]
    resources = (ModelResource("down", down, watch=hang), ModelResource("up", durable))
    recovery = Recoverer("shop", log, resources, by="test", patient=False, answer_within_s=ANSWER_S)
    done = recovery.run()
    assert not done.finished
    assert {each.resource for each in done.failed} == {"down"}
    assert len(done.failed) == len(down.prepared)
    assert durable.prepared == {}
    assert recovery.run().unreachable == {"down": "XAER_RMFAIL: the previous request is not answered yet"}
    assert len(asked) == 1
    # Another recoverer finishes the branch, and the hanging call finds it finished.
    recoverer(log, ModelResource("down", down), ModelResource("up", durable)).run()
    assert down.prepared == {}
    released.set()
    wait_until(lambda: recovery.run().finished)
    assert down.committed == (["one"] if outcome is Outcome.COMMIT else [])
    assert len(asked) == 1


def test_recovery_without_log_changes_nothing(durable: DurableBranches) -> None:
    durable.prepared[branch(new_gtrid("shop", 0), "db")] = ["work"]

    def fail(_point: str) -> None:
        raise Unavailable("no log")

    with pytest.raises(Unavailable):
        recoverer(ModelLog(watch=fail), ModelResource("db", durable)).run()
    assert durable.prepared


def test_recovery_dry_run_changes_nothing(durable: DurableBranches) -> None:
    xid = branch(new_gtrid("shop", 0), "db")
    durable.prepared[xid] = ["work"]
    log = ModelLog()
    look = recoverer(log, ModelResource("db", durable)).look()
    assert actions(look.steps) == [(Action.ROLLBACK, "db")]
    assert log.durable.decisions == {}
    assert durable.prepared == {xid: ["work"]}


@pytest.mark.parametrize("wanted", list(Outcome))
def test_operator_finishes_transaction_in_all_resources(wanted: Outcome) -> None:
    gtrid = new_gtrid("shop", 0)
    stores = [DurableBranches({branch(gtrid, name): ["work"]}) for name in ("one", "two")]
    resources = [ModelResource(name, store) for name, store in zip(("one", "two"), stores, strict=True)]
    assert recoverer(ModelLog(), *resources, patient=True).finish_now(branch(gtrid, "one"), wanted) is wanted
    assert [store.prepared for store in stores] == [{}, {}]
    assert [store.committed for store in stores] == ([["work"], ["work"]] if wanted is Outcome.COMMIT else [[], []])


def test_finish_for_one_resource_leaves_other_resources_to_recovery() -> None:
    """A member that takes over a partition with a claimed record must not wait for a database that hangs."""
    gtrid = new_gtrid("shop", LATER_MS)
    durables = [DurableBranches(prepared={branch(gtrid, name): ["row"]}) for name in ("hangs", "inbound")]

    def hang() -> list[Xid]:
        raise AssertionError("asked")

    hangs, inbound = ModelResource("hangs", durables[0]), ModelResource("inbound", durables[1])
    hangs.recover = hang  # type: ignore[method-assign]
    log = ModelLog()
    found = recoverer(log, hangs, inbound)
    assert found.finish_now(branch(gtrid, "inbound"), Outcome.ROLLBACK, who="the next member", only="inbound") is Outcome.ROLLBACK
    assert (durables[1].prepared, log.read().decisions[gtrid].by) == ({}, "the next member, test")


def test_operator_commit_is_kept_until_unavailable_resource_has_committed() -> None:
    gtrid, away = new_gtrid("shop", 0), True

    def watch(_point: str) -> None:
        if away:
            raise ResourceFailed("no route")

    stores = [DurableBranches({branch(gtrid, name): ["work"]}) for name in ("one", "two")]
    log = ModelLog()
    operator = recoverer(log, ModelResource("one", stores[0]), ModelResource("two", stores[1], watch=watch))
    with pytest.raises(ResourceFailed):
        operator.finish_now(branch(gtrid, "one"), Outcome.COMMIT, allow_split=True)
    operator.run()
    away = False
    operator.run()
    assert [(store.prepared, store.committed) for store in stores] == [({}, ["work"]), ({}, ["work"])]
    operator.run()
    assert log.durable.decisions == {}


def test_commit_decision_without_resources_is_not_forgotten() -> None:
    named_none = decision(new_gtrid("shop", 0), resources=())
    assert plan("shop", view({"db": []}, named_none), patient=False) == []


def test_operator_cannot_override_stored_decision(durable: DurableBranches) -> None:
    gtrid = new_gtrid("shop", 0)
    durable.prepared[branch(gtrid, "db")] = ["work"]
    log = ModelLog(LogState({gtrid: decision(gtrid)}))
    assert recoverer(log, ModelResource("db", durable)).finish_now(branch(gtrid, "db"), Outcome.ROLLBACK) is Outcome.COMMIT
    assert durable.committed == ["work"]


def test_operator_decision_is_stored_with_time_and_author(durable: DurableBranches) -> None:
    gtrid = new_gtrid("shop", 0)
    durable.prepared[branch(gtrid, "db")] = ["work"]
    log, before_ms = ModelLog(), now_ms()
    done = recoverer(log, ModelResource("db", durable)).finish_now(branch(gtrid, "db"), Outcome.COMMIT, who="ann")
    made = log.durable.decisions[gtrid]
    assert (done, made.outcome, made.resources, made.by) == (Outcome.COMMIT, Outcome.COMMIT, ("db",), "ann, test")
    assert before_ms <= made.at_ms <= now_ms()
    assert durable.committed == ["work"]


def test_forget_without_recorded_heuristic_is_refused() -> None:
    xid = branch(new_gtrid("shop", 0), "db")
    log = ModelLog()
    with pytest.raises(UnknownXid, match="no heuristic outcome is recorded"):
        recoverer(log, ModelResource("db")).forget(xid)
    log.record(Heuristic(xid, Code.XA_HEURHAZ, Outcome.COMMIT, "text", NOW_MS))
    recoverer(log).forget(xid)  # also if the manager no longer has the resource
    assert log.durable.heuristics == {}


def test_missing_resource_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    log = ModelLog(LogState({each.gtrid: each for each in [decision(new_gtrid("shop", NOW_MS), resources=("db", "stock"))]}))
    recoverer = Recoverer("shop", log, [ModelResource("db")], by="recoverer", patient=False)
    assert recoverer.run().missing == {"stock": 1}
    assert "stock" in caplog.text
    caplog.clear()
    assert recoverer.run().missing == {"stock": 1}
    assert "stock" not in caplog.text
