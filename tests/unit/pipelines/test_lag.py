"""The lag of a position in seconds, from looks at the end of its source."""

from __future__ import annotations

import pytest

from bascule.core.lag_times import ENDS_KEPT, LagTimes
from bascule.pipelines import control
from bascule.pipelines.lag import lag_bytes_of, waiting_in
from bascule.writer.control import WantedState
from bascule.writer.position import Position
from tests.scenarios.operating import TIMEOUT_S, Operator
from tests.scenarios.sparkless import Bridge
from tests.scenarios.test_control import bridge, operator, topics
from tests.support.system import wait_for

__all__ = ["bridge", "operator", "topics"]  # fixtures

SOURCE = ("t", 0)


def lag(times: LagTimes, now_s: float, offset: int, end: int) -> float:
    return times.look({"key": (SOURCE, offset)}, {SOURCE: end}, now_s)["key"]


def test_position_at_the_end_has_no_lag_and_a_waiting_record_ages() -> None:
    times = LagTimes()
    assert lag(times, 0.0, 10, 10) == 0.0
    assert lag(times, 5.0, 10, 11) == 0.0  # the record came between the looks, at the latest now
    assert lag(times, 15.0, 10, 11) == 10.0
    assert lag(times, 20.0, 11, 11) == 0.0


def test_lag_shrinks_as_the_pipeline_takes_what_waits() -> None:
    times = LagTimes()
    lag(times, 0.0, 0, 0)
    assert lag(times, 10.0, 0, 100) == pytest.approx(9.9)
    assert lag(times, 20.0, 0, 200) == pytest.approx(19.9)
    assert lag(times, 30.0, 50, 300) == pytest.approx(24.9)
    assert lag(times, 30.0, 250, 300) == pytest.approx(4.9)


def test_driver_that_starts_behind_knows_the_time_since_its_start_only() -> None:
    times = LagTimes()
    assert lag(times, 100.0, 5, 1_000) == 0.0
    assert lag(times, 160.0, 5, 2_000) == 60.0


def test_long_lag_is_known_within_few_samples() -> None:
    times = LagTimes()
    lag(times, 0.0, 0, 0)
    found = [lag(times, float(second), 0, 10 * second) for second in range(1, 5_000)]
    assert found[-1] == pytest.approx(4_999.0, rel=0.1)
    assert len(times._seen["key"]) <= ENDS_KEPT


def test_source_with_unknown_end_has_no_lag_and_a_removed_position_is_forgotten() -> None:
    times = LagTimes()
    assert times.look({"key": (SOURCE, 5)}, {}, 0.0) == {}
    lag(times, 1.0, 5, 6)
    assert times.look({}, {}, 2.0) == {}
    assert times._seen == {}


def test_size_of_the_lag_is_the_sum_over_all_sources() -> None:
    positions = [Position("t", "id", 0, 5), Position("t", "id", 1, 9), Position("u", "id", 0, 3)]
    ends = {("t", 0): 8, ("t", 1): 9, ("u", 0): 5}
    assert waiting_in([*positions, Position("t", "id", 0, 2)], ends) == {("t", 0): (2, 8), ("t", 1): (9, 9), ("u", 0): (3, 5)}
    assert lag_bytes_of(positions, ends, {("t", 0): 10.4, ("u", 0): 100.0}) == 231
    assert lag_bytes_of(positions, ends, {("t", 0): 10.4}) is None, "the size of a source is not known"
    assert lag_bytes_of(positions, {("t", 0): 8}, {("t", 0): 10.4}) is None, "an end is not known"
    assert lag_bytes_of([Position("t", "id", 1, 9)], ends, {}) == 0


def test_size_of_what_waits_for_a_paused_divert_is_reported(bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "REPORT_S", 0.0)
    bridge.journal.start_epoch([])
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
        operator.want("divert:x", WantedState.PAUSED)
        operator.follow(running)
        bridge.send("x" * 5000)

        def size() -> int:
            running.driver.poll()
            return operator.topics.reports(TIMEOUT_S).pipelines["divert:x"].lag_bytes or 0

        wait_for(lambda: 5000 < size() < 6000, "the size of the message to be reported")
