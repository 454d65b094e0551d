"""The wanted states of pipelines: their records, and how a driver follows them."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.writer.control import (
    STEERING,
    DriverReport,
    OffsetMove,
    OffsetsWish,
    PipelineDefinition,
    PipelineReport,
    PipelineState,
    RestartWish,
    Steering,
    SteeringEvent,
    SteeringState,
    UnreadableControl,
    WantedState,
    Wish,
    Wishes,
    decoded,
    encoded,
)

PIPELINES = ("divert:a", "divert:b", "ingress:c")
REPORT = PipelineReport(
    PipelineState.CATCHING_UP, "driver", 5, {"to": "t"}, "g", (("t", 0, 3, 9), ("t", 1, 4, None)), 2, None, 1.5, 2, "an error", 4
)

OFFSETS = OffsetsWish("1", (OffsetMove("t", "id", 0, 9, 3), OffsetMove("t", "id", 1, 4, 4)), "ann", 2)


@pytest.mark.parametrize(
    "record",
    [
        Wish(WantedState.PAUSED, "ann", 1),
        RestartWish("1", "ann", 2),
        OFFSETS,
        REPORT,
        PipelineDefinition("1", 2, {"topics": ["a"]}, "ann", 3),
        DriverReport("d", 3, running=False),
    ],
    ids=repr,
)
def test_record_is_decoded_as_it_was_encoded_and_unknown_fields_are_ignored(
    record: Wish | RestartWish | OffsetsWish | PipelineDefinition | PipelineReport | DriverReport,
) -> None:
    value = encoded(record)
    assert decoded(type(record), value, "here") == record
    assert decoded(type(record), value[:-1] + b',"later":1}', "here") == record


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (b'{"version":2,"state":"paused"}', "here: format 2; this version of Bascule reads 1. Upgrade Bascule"),
        (b'{"version":true,"state":"paused"}', "here: format True"),
        (b'{"state":"paused"}', "here: unreadable record"),
        (b'{"version":1}', "here: unreadable record"),
        (b'{"version":1,"state":"asleep"}', "'asleep' is not a valid WantedState"),
        (b"[1]", "here: unreadable record"),
        (b"\xff", "here: unreadable record"),
    ],
)
def test_record_of_another_format_is_refused_with_its_place(value: bytes, text: str) -> None:
    with pytest.raises(UnreadableControl) as caught:
        decoded(Wish, value, "here")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Wish, {"state": "paused", "by": 5}),
        (Wish, {"state": "paused", "at_ms": "now"}),
        (RestartWish, {"id": None}),
        (OffsetsWish, {"id": "1", "moves": [["t", "id", 0, 9]]}),
        (OffsetsWish, {"id": "1", "moves": [["t", "id", 0, "far", 3]]}),
        (OffsetsWish, {"id": "1", "moves": 3}),
        (DriverReport, {"driver": "d", "at_ms": "5"}),
        (PipelineReport, {"state": "paused", "driver": "d", "at_ms": 5, "definition": 7}),
        (PipelineReport, {"state": "paused", "driver": "d", "at_ms": 5, "sources": [["t", 0, float("inf"), None]]}),
        (PipelineReport, {"state": "paused", "driver": "d", "at_ms": 5, "sources": [["t", 0, 5, "far"]]}),
    ],
    ids=repr,
)
def test_record_with_a_field_of_another_type_is_refused(kind: type[Wish], said: dict[str, Any]) -> None:
    with pytest.raises(UnreadableControl, match="here: unreadable record"):
        decoded(kind, json.dumps({"version": 1, **said}).encode(), "here")


def test_record_of_deep_lists_is_refused() -> None:
    with pytest.raises(UnreadableControl, match="here: unreadable record"):
        decoded(Wish, b"[" * 100_000, "here")


class Driver:
    """The pipelines that a driver runs. ``failing`` are those whose steps are not complete at once."""

    def __init__(self, held: Collection[str] = ()) -> None:
        self.held = set(held)
        self.failing: set[str] = set()
        self.restarted: list[str] = []
        self.moved: list[str] = []

    def hold(self, pipeline: str) -> bool:
        self.held.add(pipeline)  # also by a step that fails later
        return pipeline not in self.failing

    def release(self, pipeline: str) -> bool:
        self.held.discard(pipeline)
        return pipeline not in self.failing

    def move(self, pipeline: str, wish: OffsetsWish) -> bool:
        assert pipeline in self.held, "a pipeline would run while its position moves"
        if pipeline in self.failing:
            return False
        self.moved.append(wish.id)
        return True

    def restart(self, pipeline: str) -> None:
        assert pipeline not in self.held, "a pipeline that is held would run"
        self.restarted.append(pipeline)


def wishes(held: Collection[str], restarts: dict[str, str] | None = None) -> Wishes:
    return Wishes(
        {name: Wish(WantedState.PAUSED if name in held else WantedState.RUNNING) for name in PIPELINES},
        {name: RestartWish(id) for name, id in (restarts or {}).items()},
    )


steps = st.lists(
    st.tuples(st.sets(st.sampled_from(PIPELINES)), st.sets(st.sampled_from(PIPELINES)), st.booleans(), st.sampled_from(["", *PIPELINES])),
    max_size=12,
)


@given(steps)
def test_driver_reaches_the_last_wish_whatever_fails_or_ends_before(history: list[tuple[set[str], set[str], bool, str]]) -> None:
    steering, driver = Steering(PIPELINES), Driver()
    driver.held = steering.begin(Wishes())
    restarts: dict[str, str] = {}
    held: set[str] = set()
    for number, (held, failing, killed, restarted) in enumerate(history):
        if restarted:
            restarts[restarted] = str(number)
        if killed:  # and another driver starts
            steering, driver = Steering(PIPELINES), Driver()
            driver.held = steering.begin(wishes(held, restarts))
        driver.failing = failing
        steering.follow(wishes(held, restarts))
        steering.step(driver)
    driver.failing = set()
    steering.follow(wishes(held, restarts))
    steering.step(driver)
    assert driver.held == held
    assert not list(steering.due)
    assert {name for name in PIPELINES if steering.held(name)} == held
    driver.restarted.clear()
    steering.follow(wishes(held, restarts))
    steering.step(driver)
    assert driver.restarted == [], "a request restarts once"


def test_states_follow_the_table_of_steering() -> None:
    assert STEERING.states == set(SteeringState)
    assert (SteeringState.HELD, SteeringEvent.HOLD) not in STEERING
    steering, driver = Steering(["divert:a"]), Driver()
    driver.failing = {"divert:a"}
    steering.follow(wishes({"divert:a"}))
    steering.step(driver)
    assert list(steering.due) == ["divert:a"]
    assert steering.held("divert:a") is None
    driver.failing = set()
    steering.step(driver)
    assert steering.held("divert:a") is PipelineState.PAUSED
    steering.follow(Wishes({"divert:a": Wish(WantedState.STOPPED)}))
    assert steering.held("divert:a") is PipelineState.STOPPED
    assert steering.held("divert:unknown") is None


def test_restart_of_a_running_pipeline_happens_and_of_a_held_one_does_not() -> None:
    steering, driver = Steering(PIPELINES), Driver()
    steering.begin(wishes((), {"divert:a": "1"}))
    steering.follow(wishes({"divert:b"}, {"divert:a": "2", "divert:b": "1"}))
    steering.step(driver)
    assert driver.restarted == ["divert:a"]


def test_pipelines_that_are_added_follow_the_wishes_and_deleted_ones_do_not() -> None:
    steering, driver = Steering(()), Driver()
    steering.begin(wishes({"ingress:c"}, {"ingress:c": "1"}), {"ingress:c": "moved"})
    assert steering.add("ingress:c"), "a paused pipeline must not start"
    assert not steering.add("divert:a")
    driver.held = {"ingress:c"}
    assert (steering.held("ingress:c"), steering.moved("ingress:c")) == (PipelineState.PAUSED, "moved")
    steering.follow(wishes((), {"ingress:c": "1", "divert:a": "1"}))
    steering.remove("divert:a")
    steering.step(driver)
    assert (driver.held, driver.restarted) == (set(), [])
    steering.remove("ingress:c")
    steering.follow(wishes({"ingress:c"}, {"ingress:c": "2"}))
    steering.step(driver)
    assert (driver.held, driver.restarted, steering.moved("ingress:c"), list(steering.due)) == (set(), [], "", [])


@pytest.mark.parametrize("state", [WantedState.RUNNING, WantedState.PAUSED, WantedState.STOPPED])
def test_request_to_move_is_handled_once_while_the_pipeline_is_held_which_then_goes_on_as_wanted(state: WantedState) -> None:
    steering, driver = Steering(PIPELINES), Driver()
    steering.begin(Wishes())
    wanted = Wishes({"divert:a": Wish(state)}, offsets={"divert:a": OFFSETS})
    driver.failing = {"divert:a"}
    for _ in range(2):
        steering.follow(wanted)
        steering.step(driver)
        assert list(steering.due) == ["divert:a"]
    driver.failing = set()
    for _ in range(3):
        steering.follow(wanted)
        steering.step(driver)
    assert driver.moved == ["1"]
    assert steering.moved("divert:a") == "1"
    assert not list(steering.due)
    assert ("divert:a" in driver.held) == (state is not WantedState.RUNNING)


def test_driver_that_starts_holds_a_pipeline_until_its_request_is_handled_unless_an_earlier_driver_has_handled_it() -> None:
    wanted = Wishes(offsets={"divert:a": OFFSETS, "divert:b": OFFSETS})
    steering, driver = Steering(PIPELINES), Driver()
    driver.held = steering.begin(wanted, {"divert:b": "1"})
    assert driver.held == {"divert:a"}
    steering.follow(wanted)
    steering.step(driver)
    assert (driver.moved, driver.held) == (["1"], set())
    assert steering.moved("divert:b") == "1"
