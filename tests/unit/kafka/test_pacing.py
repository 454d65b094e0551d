"""The pause between two transactions follows Kafka's refusals."""

from __future__ import annotations

import pytest

from bascule.kafka.pacing import FIRST_S, LONGER_S, LONGEST_S, SHORTER_S, BeginPause


def test_first_transaction_begins_at_once_and_the_next_after_the_pause() -> None:
    pause = BeginPause()
    assert pause.left_s(100.0) == 0.0
    pause.committed(100.0)
    assert pause.left_s(100.0) == pytest.approx(FIRST_S)
    assert pause.left_s(100.0 + FIRST_S) == 0.0


def test_refusals_make_the_pause_longer_up_to_a_limit_and_transactions_that_waited_make_it_shorter() -> None:
    pause = BeginPause()
    pause.learn(2)
    assert pause.pause_s == pytest.approx(FIRST_S + LONGER_S)
    for _ in range(100):
        pause.learn(1)
    assert pause.pause_s == LONGEST_S
    for _ in range(1_000):
        pause.committed(0.0)
        pause.left_s(0.0)
        pause.learn(0)
    assert pause.pause_s == 0.0


def test_transaction_that_came_after_the_pause_leaves_the_pause_as_it_is() -> None:
    pause = BeginPause()
    pause.committed(0.0)
    assert pause.left_s(1.0) == 0.0
    pause.learn(0)
    assert pause.pause_s == FIRST_S
    pause.committed(2.0)
    assert pause.left_s(2.0) > 0
    pause.learn(0)
    assert pause.pause_s == pytest.approx(FIRST_S - SHORTER_S)
