"""The pace of the demo's senders."""

from __future__ import annotations

import threading

import pytest

from demo import pace
from demo.pace import RATE_MIN, Pace, next_rate


@pytest.mark.parametrize(
    ("rate", "lag", "lag_before", "expected"),
    [
        (1000, 600, 500, 800),  # the pipelines fall behind
        (1000, 600, 700, 1000),  # they catch up
        (1000, 400, 300, pytest.approx(1150)),  # they keep pace
        (1990, 0, 0, 2000),  # not above the wanted rate
        (201, 5000, 4000, RATE_MIN),
    ],
)
def test_rate_follows_the_lag(rate: float, lag: int, lag_before: int, expected: float) -> None:
    assert next_rate(rate, 2000, lag, lag_before) == expected


def test_rate_that_exceeds_the_speed_of_the_pipelines_settles_near_this_speed_with_a_small_lag() -> None:
    speed, rate, lag, before = 2000.0, 4500.0, 0.0, 0.0
    rates, lags = [], []
    for _ in range(120):
        lag, before = max(0.0, lag + rate - speed), lag
        rate = next_rate(rate, 4500, int(lag), int(before))
        rates.append(rate)
        lags.append(lag)
    assert speed * 0.7 < sum(rates[30:]) / 90 < speed * 1.1
    assert sum(lags[30:]) / 90 < speed


def test_senders_slow_down_for_a_growing_lag_but_not_while_a_killed_part_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "INTERVAL_S", 0.001)
    told: list[float] = []
    asked, enough, away = 0, threading.Event(), True

    def lag() -> int:
        nonlocal asked, away
        asked += 1
        if asked == 20:
            assert told == []
            away = False
        if len(told) == 3:
            enough.set()
        return asked * 10_000

    thread = Pace(1000, lag, lambda: away, told.append)
    thread.start()
    assert enough.wait(30)
    thread.stop()
    assert told[:3] == pytest.approx([800, 640, 512])
    assert thread.rate == told[-1]
