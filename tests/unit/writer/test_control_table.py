"""Damaged records of the control of pipelines: each holds the pipeline of its key, and a later record lifts the hold."""

from __future__ import annotations

import random

import pytest

from bascule.broker.coverage import CoverageMark
from bascule.writer.control import (
    COVERED_KEY,
    DEFINITION_KEY,
    DELETED_KEY,
    OFFSETS_KEY,
    RESTART_KEY,
    WANTED_KEY,
    OffsetMove,
    OffsetsWish,
    PipelineDefinition,
    PipelineDeletion,
    PipelineState,
    RestartWish,
    Steering,
    WantedState,
    Wish,
    Wishes,
    encoded,
)
from bascule.writer.control_table import ControlRecord, wishes_of
from bascule.writer.definitions import DefinitionSteps
from bascule.writer.redrive import JOB_KEY
from tests.unit.writer.test_control import Driver
from tests.unit.writer.test_definitions import World

A, B = "divert:a", "ingress:b"
DEFINED = PipelineDefinition("id", 1, {"topics": ["t"]})
MOVE = OffsetsWish("r1", (OffsetMove("t", "id", 0, 9, 3),))
#: A valid record of each key that names a pipeline.
VALID: dict[str, Wish | RestartWish | OffsetsWish | PipelineDefinition] = {
    WANTED_KEY: Wish(WantedState.RUNNING),
    RESTART_KEY: RestartWish("1"),
    OFFSETS_KEY: MOVE,
    DEFINITION_KEY: DEFINED,
}
DAMAGED = (
    b"",
    b"{}",
    b"\xff",
    b'{"version":2}',
    b"[" * 10_000,
    b'{"version":1,"state":"paused","at_ms":' + b"9" * 30 + b"}",
    b'{"version":1,"state":"paused","by":"\\ud800"}',
    b'{"version":1,"id":"1","revision":1,"settings":{"a":NaN}}',
)


class Log:
    """The records of the topic; ``skipped`` has the places of those without effect."""

    def __init__(self) -> None:
        self.table: dict[str, ControlRecord] = {}
        self.skipped: list[str] = []
        self.offset = 0

    def write(self, key: str, value: bytes | None) -> None:
        if value is None:
            self.table.pop(key, None)
        else:
            self.table[key] = ControlRecord(value, self.offset, f"{key} at {self.offset}")
        self.offset += 1

    def wishes(self) -> Wishes:
        self.skipped.clear()

        def skipped(place: str, _reason: str) -> None:
            self.skipped.append(place)

        return wishes_of(self.table, skipped, skipped)


@pytest.mark.parametrize("value", DAMAGED, ids=range(len(DAMAGED)))
@pytest.mark.parametrize("key", VALID)
def test_damaged_record_holds_its_pipeline_until_its_key_is_written_again(key: str, value: bytes) -> None:
    log = Log()
    log.write(f"{WANTED_KEY}{B}", encoded(Wish(WantedState.PAUSED)))
    log.write(f"{key}{A}", value)
    found = log.wishes()
    assert (bool(found.trouble(A)), found.trouble(B), found.of(B)) == (key != RESTART_KEY, "", WantedState.PAUSED)
    assert log.skipped == ([f"{RESTART_KEY}{A} at 1"] if key == RESTART_KEY else [])
    assert (A in found.undefined) == (key == DEFINITION_KEY)
    for replacement in (encoded(VALID[key]), None):
        log.write(f"{key}{A}", value)
        log.write(f"{key}{A}", replacement)
        assert (log.wishes().trouble(A), log.skipped) == ("", [])


@pytest.mark.parametrize("value", DAMAGED, ids=range(len(DAMAGED)))
def test_move_out_of_range_holds_and_damaged_mark_or_job_has_no_effect(value: bytes) -> None:
    log = Log()
    for number in (-1, 1 << 63, 1 << 400):
        log.write(f"{OFFSETS_KEY}{A}", encoded(OffsetsWish("1", (OffsetMove("t", "id", 0, 0, number),))))
        assert log.wishes().trouble(A)
    log.write(f"{OFFSETS_KEY}{A}", encoded(OffsetsWish("1", (OffsetMove("t", "id", 1 << 31, 0, 0),))))
    assert log.wishes().trouble(A)
    log.write(f"{COVERED_KEY}{A}/7", encoded(CoverageMark("id", 1, 1 << 70)))
    log.write(f"{COVERED_KEY}{A}/8", encoded(CoverageMark("id", 1, 5)))
    log.write(f"{JOB_KEY}1", value)
    found = log.wishes()
    assert (found.covered, dict(found.redrives)) == ({A: (CoverageMark("id", 1, 5),)}, {})
    assert log.skipped == [f"{JOB_KEY}1 at 6", f"{COVERED_KEY}{A}/7 at 4"]


@pytest.mark.parametrize(
    ("key", "decision", "lifted"),
    [
        (OFFSETS_KEY, WANTED_KEY, True),
        (OFFSETS_KEY, RESTART_KEY, True),
        (WANTED_KEY, OFFSETS_KEY, False),
        (WANTED_KEY, RESTART_KEY, False),
        (DEFINITION_KEY, WANTED_KEY, False),
    ],
)
def test_later_decision_of_an_administrator_lifts_the_hold_of_a_damaged_move_only(key: str, decision: str, lifted: bool) -> None:
    log = Log()
    log.write(f"{decision}{A}", encoded(VALID[decision]))
    log.write(f"{key}{A}", b"x")
    assert log.wishes().trouble(A), "the decision was earlier"
    log.write(f"{decision}{A}", encoded(VALID[decision]))
    assert bool(log.wishes().trouble(A)) != lifted
    assert log.skipped == ([f"{key}{A} at 1"] if lifted else [])


@pytest.mark.parametrize("name", ["", "a", "divert:", "queue:a", "divert:\ufffd", "divert:a/b", "divert:a\n", "divert"])
def test_record_whose_key_names_no_pipeline_is_skipped(name: str) -> None:
    log = Log()
    for value in (b"x", encoded(VALID[DEFINITION_KEY])):
        for key in VALID:
            log.write(f"{key}{name}", value)
        assert (log.wishes(), len(log.skipped)) == (Wishes(), len(VALID))


def test_definition_that_cannot_be_read_holds_no_pipeline_of_the_file() -> None:
    log = Log()
    for name in (A, "ingress:a", B):
        log.write(f"{DEFINITION_KEY}{name}", b"x")
    log.write(f"{WANTED_KEY}{A}", b"x")
    found = log.wishes().beside_file({"a"})
    assert found.undefined == {B}
    assert (found.trouble(A), found.trouble("ingress:a")) == (log.wishes().unreadable[A][WANTED_KEY], "")


@pytest.mark.parametrize("seed", range(100))
def test_driver_never_runs_a_pipeline_with_a_damaged_record_and_runs_the_others_whoever_starts(seed: int) -> None:
    chance, log = random.Random(seed), Log()
    steering, driver = Steering((A, B)), Driver()
    driver.held = steering.begin(log.wishes())
    for number in range(30):
        key, pipeline = chance.choice((WANTED_KEY, RESTART_KEY)), chance.choice((A, B))
        state = chance.choice(list(WantedState))
        record = Wish(state) if key == WANTED_KEY else RestartWish(str(number))
        log.write(f"{key}{pipeline}", chance.choice((b"x", None, encoded(record), encoded(record))))
        found = log.wishes()
        if chance.random() < 0.2:  # another driver takes over
            steering, driver = Steering((A, B)), Driver()
            driver.held = steering.begin(found)
        driver.failing = {A} if chance.random() < 0.2 else set()
        steering.follow(found)
        steering.step(driver)
        for each in (A, B):
            wanted = found.of(each) is WantedState.RUNNING and f"{WANTED_KEY}{each}" not in broken(log)
            assert (each in driver.held) == (not wanted)
            if each not in driver.failing and not wanted:
                stands = {WantedState.PAUSED: PipelineState.PAUSED, WantedState.STOPPED: PipelineState.STOPPED}
                assert steering.held(each) is stands.get(found.of(each), PipelineState.FAILED)
                assert bool(steering.trouble(each)) == (f"{WANTED_KEY}{each}" in broken(log))


def broken(log: Log) -> set[str]:
    return {key for key, record in log.table.items() if record.value == b"x"}


def test_pipeline_of_a_damaged_definition_keeps_its_positions_and_follows_the_next_definition() -> None:
    world, log = World(random.Random(1), faults=False), Log()
    steps = DefinitionSteps(())
    key = f"{DEFINITION_KEY}{B}"
    for restarted in (False, True):
        log.write(key, encoded(DEFINED))
        follow(steps, log, world)
        assert (world.running, world.marks) == ({B: DEFINED}, {B: "id"})
        log.write(key, b"x")
        if restarted:
            world.running.clear()
            steps = DefinitionSteps(())
            steps.begin({}, world.marks, log.wishes().undefined)
        follow(steps, log, world)
        assert (world.marks, list(steps.due), set(steps.unreadable), steps.id_of(B)) == ({B: "id"}, [], {B}, "id")
        changed = PipelineDefinition("id", 2, {"topics": ["u"]})
        log.write(key, encoded(changed))
        follow(steps, log, world)
        assert (world.running, world.marks) == ({B: changed}, {B: "id"})
    log.write(key, b"x")
    follow(steps, log, world)
    log.write(key, None)
    follow(steps, log, world)
    assert (world.marks, set(steps.unreadable)) == ({B: "id"}, {B}), "nobody has deleted it"
    log.write(f"{DELETED_KEY}{B}", encoded(PipelineDeletion("ann", 1)))
    follow(steps, log, world)
    assert (world.running, world.marks, set(steps.pipelines)) == ({}, {}, set())


def follow(steps: DefinitionSteps, log: Log, world: World) -> None:
    found = log.wishes().losing(steps.begun, "control")
    steps.follow(found.definitions, found.undefined)
    steps.step(world)
