"""What bench/bridge.py counts and reports, without its processes."""

from __future__ import annotations

from typing import Any

import pytest

from bench.bridge_load import back_after_s, counts, spent
from bench.bridge_report import flawed, page
from bench.bridges import FROM_KAFKA, TO_KAFKA, Usage, versions
from bench.latency import Arrivals, numbered

MARKS = [numbered("phase", number) for number in range(4)]


def arrived(*numbers: int) -> Arrivals:
    arrivals = Arrivals()
    for number in numbers:
        arrivals.note(MARKS[number] + b"x")
    return arrivals


@pytest.mark.parametrize(
    ("numbers", "lost", "duplicated", "disordered"),
    [
        ((0, 1, 2, 3), 0, 0, 0),
        ((0, 1, 3), 1, 0, 0),
        ((0, 1, 1, 2, 1, 3), 0, 2, 0),
        ((0, 2, 1, 3), 0, 0, 1),
        ((3, 0, 1, 2), 0, 0, 3),
        ((), 4, 0, 0),
    ],
)
def test_lost_duplicated_and_disordered_messages_are_counted(numbers: tuple[int, ...], lost: int, duplicated: int, disordered: int) -> None:
    assert counts(MARKS, arrived(*numbers)) == {"sent": 4, "lost": lost, "duplicated": duplicated, "disordered": disordered}


def test_messages_of_another_phase_are_not_counted() -> None:
    arrivals = arrived(0, 1, 2, 3)
    arrivals.note(numbered("other", 7))
    assert counts(MARKS, arrivals) == {"sent": 4, "lost": 0, "duplicated": 0, "disordered": 0}


def test_bridge_is_back_when_a_message_that_was_due_after_the_kill_arrives() -> None:
    due_s = {mark: float(second) for second, mark in enumerate(MARKS)}
    at_s = {MARKS[0]: 0.1, MARKS[1]: 1.7, MARKS[2]: 5.5, MARKS[3]: 5.6}
    assert back_after_s([1.5], due_s, at_s) == [4.0]
    assert back_after_s([3.5], due_s, at_s) == []


def test_process_that_was_started_between_two_moments_counts_from_nothing() -> None:
    assert spent({"broker": Usage(3.0, 1)}, {"broker": Usage(5.0, 1), "bridge workers": Usage(2.0, 1)}) == {
        "broker": 2.0,
        "bridge workers": 2.0,
    }


def run(records_per_s: float, lost: int = 0) -> dict[str, Any]:
    flaws = {"sent": 100, "lost": lost, "duplicated": 0, "disordered": 0}
    load = {"records_per_s": records_per_s, "cpu_us": {"bridge": 10.0, "clients": 5.0}, "rss_mb": {"bridge": 100.0}, **flaws}
    at_rate = {"p50_ms": 1.0, "p99_ms": 2.0, "longest_ms": 3.0, "cpu_percent": {"bridge": 4.0}, **flaws}
    kills = {**flaws, "back_s": [5.0, 7.0]}
    return {"backlog": {TO_KAFKA: load}, "latency": {TO_KAFKA: {"100": at_rate}}, "kills": {TO_KAFKA: kills}, "load_average": 1.0}


def content(load_average: float) -> dict[str, Any]:
    results = {"bascule": [run(200), run(400)], "camel": [run(100), run(100)]}
    results["camel"][0]["load_average"] = load_average
    return {
        "machine": {"cores": 2, "cpu": "a processor", "load_average": (1.0, 1.0, 1.0), "build": "interpreted", "python": "3.11"},
        "load_average_at_end": (1.0, 1.0, 1.0), "flush_ms": 0.2, "versions": {"Camel": "4"}, "results": results,
        "options": {"rounds": 2, "bytes": 1024, "records": 100, "rate": [100], "seconds": 5, "kills": 5, "kill_rate": 100},
    }  # fmt: skip


def test_page_shows_medians_with_spread_and_the_ratio_of_each_round() -> None:
    said = page(content(1.0))
    assert "| 300 (200, 400) |" in said
    assert "**bascule : camel** | **3.00 (2.00, 4.00)**" in said
    assert "6.0, 7.0" in said
    assert FROM_KAFKA not in said
    assert "Busy machine" not in said


def test_page_warns_of_a_busy_machine() -> None:
    assert "Busy machine" in page(content(9.0))


def test_a_lost_message_of_any_phase_is_a_flaw() -> None:
    assert not flawed([run(1)])
    assert flawed([run(1), run(1, lost=1)])


def test_versions_are_those_of_the_pinned_jars() -> None:
    assert {"Camel", "Artemis", "Kafka", "Spark"} <= versions().keys()
