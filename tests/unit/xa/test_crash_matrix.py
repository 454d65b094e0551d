"""After a crash at any point of a small transaction, recovery leaves no split, stuck or orphaned branch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import product

import pytest

from bascule.testing.xa import ModelLog
from bascule.xa.errors import Code
from bascule.xa.log import Decision, Heuristic, Outcome
from bascule.xa.xid import Xid
from tests.unit.xa.crashes import ENDINGS, VOTES, Case, Crash, Fault, World, cases, points, run, verdict

#: Minimum size of the matrix, over two and three resources.
CASES_MIN = 600
MATRIX = {count: list(cases(count)) for count in (2, 3)}
VICTIMS = ("process", "log", "r1", "r2", "r3")


def cases_of(count: int, victim: str) -> list[Case]:
    return [case for case in MATRIX[count] if case.victim == victim]


def recover_fully(world: World) -> None:
    """Run two recovery passes. The second one finds nothing, or finishes work that the first one could not finish."""
    for _ in range(2):
        last = world.recover()
    assert last.finished


@pytest.mark.parametrize(("count", "victim"), [(count, victim) for count in (2, 3) for victim in VICTIMS[: 2 + count]])
def test_recovery_after_any_crash_leaves_no_split_stuck_or_orphaned_branch(count: int, victim: str) -> None:
    found = cases_of(count, victim)
    assert found
    for case in found:
        world, reported = case.play()
        recover_fully(world)
        assert verdict(world, reported) == [], case


@pytest.mark.parametrize("victim", VICTIMS[:-1])
def test_second_crash_at_any_point_of_recovery_changes_no_outcome(victim: str) -> None:
    found = cases_of(2, victim)
    assert found
    for case in found:
        at = 0
        while True:
            world, reported = case.play()
            second = Fault("process", at)
            try:
                world.recover(second)
            except Crash:
                at += 1
            recover_fully(world)
            assert verdict(world, reported) == [], (case, second.seen)
            if not second.down:
                break


@pytest.mark.parametrize("victim", ["process", "log", "r1"])
def test_concurrent_recovery_at_any_point_of_first_recovery_changes_no_outcome(victim: str) -> None:
    found = cases_of(2, victim)
    assert found
    for case in found:
        at, count = 0, 1
        while at < count:
            world, reported = case.play()
            seen: list[str] = []

            def other(point: str, at: int = at, seen: list[str] = seen, world: World = world) -> None:
                seen.append(point)
                if len(seen) == at + 1:
                    world.recover()

            world.recover(other)
            recover_fully(world)
            assert verdict(world, reported) == [], (case, seen)
            at, count = at + 1, len(seen)


def recover_during(votes: tuple[str, ...], ending: str, at: int, log: type[ModelLog] = ModelLog) -> list[str]:
    """Run a recovery pass at a point of a running transaction, as a recoverer that considers the application dead."""
    world = World(votes)
    seen: list[str] = []

    def other(point: str) -> None:
        seen.append(point)
        if len(seen) == at + 1:
            world.recover()

    reported = run(world, ending, other, log)
    recover_fully(world)
    return verdict(world, reported)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("count", [2, 3])
def test_recovery_at_any_point_of_running_transaction_does_not_split_it(count: int, ending: str) -> None:
    for votes in product(VOTES, repeat=count):
        reached = points(votes, ending)
        assert reached
        for at, point in enumerate(reached):
            assert recover_during(votes, ending, at) == [], (votes, point)


def test_transaction_without_crash_commits_unless_resource_votes_no() -> None:
    for count in (2, 3):
        for votes in product(VOTES, repeat=count):
            world = World(votes)
            reported = run(world, "commit")
            assert reported == ("rolled back" if "no" in votes else "committed")
            assert verdict(world, reported) == []
            assert world.log.decisions == {}


def test_crash_matrix_has_enough_cases_and_covers_each_phase() -> None:
    everything = [case for matrix in MATRIX.values() for case in matrix]
    assert len(everything) >= CASES_MIN
    calls = Counter(case.point.partition(".")[2] for case in everything)
    for call in ("start", "end", "prepare", "decide", "commit", "rollback", "forget"):
        assert calls[f"{call}.before"]
        assert calls[f"{call}.after"]


class LastWins(ModelLog):
    """A wrong decision log: the last decision replaces the first."""

    def decide(self, decision: Decision) -> Decision:
        self.durable.decisions[decision.gtrid] = decision
        return decision


class Forgetful(ModelLog):
    """A wrong decision log: it stores nothing."""

    def decide(self, decision: Decision) -> Decision:
        return decision


def names(wrong: list[str]) -> set[str]:
    return {line.partition(":")[0] for line in wrong}


@pytest.mark.parametrize("log", [LastWins, Forgetful])
def test_verdict_detects_violations_of_faulty_log(log: type[ModelLog]) -> None:
    votes = ("yes", "yes")
    found = [wrong for at in range(len(points(votes, "commit"))) for wrong in recover_during(votes, "commit", at, log)]
    assert names(found) == {"xa-split", "xa-heuristic"}


def world_with(*committed: int, prepared: Iterable[Xid] = (), log: Iterable[Decision | Heuristic] = ()) -> World:
    """Return a world with a number of commits for each branch, prepared branches, and entries of the decision log."""
    world = World(["yes"] * len(committed))
    for branch, count in zip(world.branches, committed, strict=True):
        branch.committed += ["work"] * count
    world.branches[0].prepared.update((xid, ["work"]) for xid in prepared)
    for each in log:
        world.log.add(each)
    return world


XID = Xid(0, b"transaction", b"r1")
PLANTED = [
    ("xa-split", world_with(1, 0), "in doubt"),
    ("xa-split", world_with(2, 2), "committed"),
    ("xa-lost", world_with(0, 0), "committed"),
    ("xa-ghost", world_with(1, 1), "rolled back"),
    ("xa-stuck", world_with(1, 1, prepared=[XID]), "committed"),
    ("xa-orphan", world_with(1, 1, log=[Decision(XID.gtrid, Outcome.COMMIT, ("r1", "r2"), 0, "application")]), "committed"),
    ("xa-heuristic", world_with(1, 1, log=[Heuristic(XID, Code.XA_HEURRB, Outcome.COMMIT, "by hand", 0)]), "committed"),
    ("xa-heuristic", world_with(1, 1), "HeuristicOutcome"),
]


@pytest.mark.parametrize(("name", "world", "reported"), PLANTED)
def test_verdict_names_each_planted_violation(name: str, world: World, reported: str) -> None:
    assert names(verdict(world, reported)) == {name}


def test_verdict_of_correct_outcome_is_empty() -> None:
    rolled_back = Decision(XID.gtrid, Outcome.ROLLBACK, (), 0, "recoverer")  # kept for participants that ask late
    assert verdict(world_with(1, 1), "committed") == verdict(world_with(0, 0, log=[rolled_back]), "rolled back") == []
