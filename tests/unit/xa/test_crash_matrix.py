"""Every crash at every point of every small transaction: then recovery, and no branch is split, stuck or orphaned."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
from tests.unit.xa.crashes import ENDINGS, VOTES, Case, Crash, Fault, World, cases, points, run, verdict

from bascule.testing.xa import ModelLog
from bascule.xa.log import Decision

#: What the matrix must have at least, over two and three resources.
CASES_MIN = 600
MATRIX = {count: list(cases(count)) for count in (2, 3)}
VICTIMS = ("process", "log", "r1", "r2", "r3")


def of(count: int, victim: str) -> list[Case]:
    return [case for case in MATRIX[count] if case.victim == victim]


def recovered(world: World) -> None:
    """Passes until nothing is left: the second finds nothing, or finishes what the first found half done."""
    for _ in range(2):
        last = world.recover()
    assert last.finished


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("count", [2, 3])
def test_after_any_crash_a_recovery_leaves_nothing_split_stuck_or_orphaned(count: int, victim: str) -> None:
    for case in of(count, victim):
        world, told = case.play()
        recovered(world)
        assert verdict(world, told) == [], case


@pytest.mark.parametrize("victim", VICTIMS[:-1])
def test_a_second_crash_at_any_point_of_the_recovery_changes_nothing(victim: str) -> None:
    for case in of(2, victim):
        at = 0
        while True:
            world, told = case.play()
            second = Fault("process", at)
            try:
                world.recover(second)
            except Crash:
                at += 1
            recovered(world)
            assert verdict(world, told) == [], (case, second.seen)
            if not second.down:
                break


@pytest.mark.parametrize("victim", ["process", "log", "r1"])
def test_a_second_recoverer_at_any_point_of_the_first_ones_work_changes_nothing(victim: str) -> None:
    for case in of(2, victim):
        at, count = 0, 1
        while at < count:
            world, told = case.play()
            seen: list[str] = []

            def other(point: str, at: int = at, seen: list[str] = seen, world: World = world) -> None:
                seen.append(point)
                if len(seen) == at + 1:
                    world.recover()

            world.recover(other)
            recovered(world)
            assert verdict(world, told) == [], (case, seen)
            at, count = at + 1, len(seen)


def meet(votes: tuple[str, ...], ending: str, at: int, log: type[ModelLog] = ModelLog) -> list[str]:
    """A recoverer that takes the application for dead, while it is at work."""
    world = World(votes)
    seen: list[str] = []

    def other(point: str) -> None:
        seen.append(point)
        if len(seen) == at + 1:
            world.recover()

    told = run(world, ending, other, log)
    recovered(world)
    return verdict(world, told)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("count", [2, 3])
def test_a_recoverer_at_any_point_of_a_transaction_at_work_does_not_split_it(count: int, ending: str) -> None:
    for votes in product(VOTES, repeat=count):
        for at, point in enumerate(points(votes, ending)):
            assert meet(votes, ending, at) == [], (votes, point)


def test_without_a_crash_a_transaction_commits_if_nobody_votes_no() -> None:
    for count in (2, 3):
        for votes in product(VOTES, repeat=count):
            world = World(votes)
            told = run(world, "commit")
            assert told == ("rolled back" if "no" in votes else "committed")
            assert verdict(world, told) == []
            assert world.log.decisions == {}


def test_the_matrix_has_enough_cases_and_reaches_each_phase() -> None:
    everything = [case for matrix in MATRIX.values() for case in matrix]
    assert len(everything) >= CASES_MIN
    calls = Counter(case.point.partition(".")[2] for case in everything)
    for call in ("start", "end", "prepare", "decide", "commit", "rollback", "forget"):
        assert calls[f"{call}.before"]
        assert calls[f"{call}.after"]


class LastWins(ModelLog):
    """What a decision log must not be."""

    def decide(self, decision: Decision) -> Decision:
        self.durable.decisions[decision.gtrid] = decision
        return decision


class Forgetful(ModelLog):
    """Neither this."""

    def decide(self, decision: Decision) -> Decision:
        return decision


@pytest.mark.parametrize("log", [LastWins, Forgetful])
def test_the_verdict_finds_what_a_bad_log_does(log: type[ModelLog]) -> None:
    found = {
        line.partition(":")[0] for at in range(len(points(("yes", "yes"), "commit"))) for line in meet(("yes", "yes"), "commit", at, log)
    }
    assert "xa-split" in found or "xa-lost" in found
