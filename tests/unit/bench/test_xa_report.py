"""The calculations of the benchmark of transactions."""

from __future__ import annotations

import pytest

from bench.xa_modes import APART, JAVA, MODES, PEER, PYTHON, Clients, runs
from bench.xa_report import HEAD, figures, peer_clients, ratios, spread, table

ONE, FOUR, PROCESSES = Clients(1, 1), Clients(1, 4), Clients(4, 1)
FAILED = {"failures": 1}


def run(per_s: float, p50_ms: float = 1.0, failures: int = 0) -> dict[str, float]:
    cpu = {"cpu_client_ms": 3.0, "cpu_broker_ms": 4.0, "cpu_postgres_ms": 1.0}
    return {"failures": failures, "per_s": per_s, "p50_ms": p50_ms, "p99_ms": 9.0, **cpu}


def cells(page: str, *first: str) -> list[str]:
    """Return the remaining cells of the line that begins with the cells ``first``."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines()]
    (found,) = [line[len(first) :] for line in lines if line[: len(first)] == list(first)]
    return found


def test_figures_are_rate_over_measured_time_and_latency_quantiles() -> None:
    taken_ms = [float(each) for each in range(200, 0, -1)]
    assert figures(taken_ms, 4.0) == {"failures": 0, "per_s": 50.0, "p50_ms": 101.0, "p99_ms": 199.0}


def test_run_without_transactions_has_failed() -> None:
    assert figures([], 4.0) == FAILED


@pytest.mark.parametrize(("values", "text"), [([], "-"), ([1234.4], "1,234"), ([3.0, 1.0, 8.0], "3 (1 to 8)"), ([1.0, 4.0], "2 (1 to 4)")])
def test_spread_is_median_with_minimum_and_maximum(values: list[float], text: str) -> None:
    assert spread(values, 0) == text


def test_ratio_compares_runs_of_the_same_round() -> None:
    ours, theirs = [run(100, 2.0), run(10, 20.0)], [run(50, 4.0), run(5, 40.0)]
    assert ratios(ours, theirs, "per_s", more_is_better=True) == [2.0, 2.0]
    assert ratios(ours, theirs, "p50_ms", more_is_better=False) == [2.0, 2.0]


def test_worse_result_gives_a_ratio_below_1() -> None:
    assert ratios([run(50, 4.0)], [run(100, 2.0)], "per_s", more_is_better=True) == [0.5]
    assert ratios([run(50, 4.0)], [run(100, 2.0)], "p50_ms", more_is_better=False) == [0.5]


def test_round_with_a_failed_run_has_no_ratio() -> None:
    assert ratios([FAILED, run(9), run(8)], [run(3), run(3), FAILED], "per_s", more_is_better=True) == [3.0]


def test_table_compares_decision_in_database_with_two_phases_of_the_peer() -> None:
    page = table(
        {
            ("jms-postgres-send", PEER, ONE): [run(100, 4.0), run(300, 4.0)],
            ("jms-postgres-send-deciding", PYTHON, ONE): [run(150, 2.0), run(600, 1.0)],
        }
    )
    deciding = cells(page, "insert, send: decision in the database", "1", PYTHON)
    assert deciding == [
        "375 (150 to 600)",
        "1.5 (1.0 to 2.0)",
        "9.0 (9.0 to 9.0)",
        "3.0 (3.0 to 3.0)",
        "4.0 (4.0 to 4.0)",
        "1.0 (1.0 to 1.0)",
        "**1.75 (1.50 to 2.00)**",
        "**3.00 (2.00 to 4.00)**",
        "0",
    ]
    assert cells(page, "insert, send: two phases", "1", PEER)[6:] == ["", "", "0"]


def test_table_compares_processes_with_as_many_threads_of_the_peer() -> None:
    page = table(
        {
            ("jms-relay", PEER, ONE): [run(1)],
            ("jms-relay", PEER, FOUR): [run(100, 4.0)],
            ("jms-relay", PYTHON, PROCESSES): [run(50, 8.0)],
            ("jms-relay", JAVA, FOUR): [run(25, 16.0)],
        }
    )
    assert cells(page, "receive, send: one phase", "4 processes", PYTHON)[6:] == ["**0.50**", "**0.50**", "0"]
    assert cells(page, "receive, send: one phase", "4 threads", JAVA)[6:] == ["**0.25**", "**0.25**", "0"]
    assert peer_clients(PROCESSES) == FOUR


def test_table_counts_failures_and_omits_failed_runs() -> None:
    page = table({("all-relay", PYTHON, ONE): [FAILED, run(7), {"failures": 3}]})
    assert cells(page, "receive, insert, produce, send: two phases", "1", PYTHON) == ["7", "1.0", "9.0", "3.0", "4.0", "1.0", "", "", "4"]
    assert cells(page, *HEAD) == []


def test_modes_run_only_where_the_implementation_supports_them() -> None:
    by_name = {mode.name: mode for mode in MODES}
    assert runs(PEER, by_name["jms-postgres-relay"], FOUR)
    assert not runs(PEER, by_name["jms-postgres-relay"], PROCESSES)
    assert not runs(PEER, by_name["jms-postgres-relay-deciding"], ONE)
    assert not runs(PEER, by_name["all-send"], ONE)
    assert runs(PEER, by_name["postgres"], ONE)
    assert not runs(JAVA, by_name["postgres"], ONE)
    assert not runs(APART, by_name["all-relay"], ONE)
    assert all(runs(PYTHON, mode, each) for mode in MODES for each in (ONE, FOUR, PROCESSES))
