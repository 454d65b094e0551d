"""Requests to Kafka that are retried until a deadline."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import KafkaError, KafkaException

from bascule.kafka.retrying import FIRST_ANSWER_S, LEAST_ANSWER_S, ask_in_tries

FAR_S = 1_000.0


def test_each_further_request_may_take_twice_as_long() -> None:
    timeouts_s: list[float] = []

    def ask(timeout_s: float) -> str:
        timeouts_s.append(timeout_s)
        if len(timeouts_s) < 4:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return "answer"

    assert ask_in_tries(time.monotonic() + FAR_S, ask) == "answer"
    assert timeouts_s == [FIRST_ANSWER_S * factor for factor in (1, 2, 4, 8)]


@pytest.mark.parametrize(
    ("within_s", "tries_s"),
    [(0.5, [0.5]), (2, [2]), (3.9, [3.9]), (4, [1, 3]), (5, [1, 4]), (10, [1, 2, 7]), (30, [1, 2, 4, 8, 15]), (45, [1, 2, 4, 8, 16, 14])],
)
def test_last_request_gets_all_the_time_that_is_left_and_its_error_is_raised(
    monkeypatch: pytest.MonkeyPatch, within_s: float, tries_s: list[float]
) -> None:
    """A slow cluster may answer in most of a short time. In a long time, a cluster may replace a node that does not answer."""
    now_s = 50.0
    monkeypatch.setattr("bascule.kafka.retrying.time.monotonic", lambda: now_s)
    timeouts_s: list[float] = []

    def ask(timeout_s: float) -> None:
        nonlocal now_s
        timeouts_s.append(timeout_s)
        now_s += timeout_s
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, f"request {len(timeouts_s)}"))

    with pytest.raises(KafkaException, match=f"request {len(tries_s)}"):
        ask_in_tries(now_s + within_s * FIRST_ANSWER_S, ask)
    assert timeouts_s == pytest.approx([each * FIRST_ANSWER_S for each in tries_s])


def test_request_at_the_deadline_gets_the_least_timeout() -> None:
    assert ask_in_tries(time.monotonic() - 1, lambda timeout_s: timeout_s) == LEAST_ANSWER_S


def test_error_that_is_not_temporary_is_raised_at_once() -> None:
    asked: list[float] = []

    def ask(timeout_s: float) -> None:
        asked.append(timeout_s)
        raise KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))

    with pytest.raises(KafkaException):
        ask_in_tries(time.monotonic() + FAR_S, ask)
    assert len(asked) == 1
