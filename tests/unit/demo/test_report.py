"""The last table of the demo."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace

import pytest
from rich.console import Console

from demo.report import Results, Subscriber, Topic, percentile, report, rows

ALL = frozenset(range(10))
LATE = frozenset({2, 5})


def results(everything: Mapping[int, int] | None = None, *, in_queue: int = 10, wrong_keys: int = 0) -> Results:
    """Return the results of a run with ten flights and three airports, which is exact by default."""
    return Results(
        flights=10, sent=10, in_queue=in_queue,
        topics=[
            Topic("kafka.flights", ALL, dict.fromkeys(ALL, 1) if everything is None else everything, 0),
            Topic("kafka.flights.delayed", LATE, dict.fromkeys(LATE, 1), wrong_keys),
        ],
        airports=3, subscribers=[Subscriber("alerts-0", 3, 3, 0)], latencies_ms=[*range(1, 101)], seconds=2.0,
    )  # fmt: skip


def printed(found: Results) -> tuple[bool, str]:
    out = io.StringIO()
    exact = report(found, Console(file=out, width=80))
    return exact, out.getvalue()


def test_each_path_of_an_exact_run_says_how_its_messages_were_counted() -> None:
    exact, text = printed(results())
    assert exact
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if "→" in line]
    assert cells == [
        ["Java → queue flights", "10", "10", "10", "0", "0", "0", "depth of the queue at the end"],
        ["queue → kafka.flights", "10", "10", "10", "0", "0", "0", "read_committed, by row"],
        ["queue → kafka.flights.delayed", "10", "2", "2", "0", "0", "0", "read_committed, by row"],
        ["airport.alerts → alerts-0", "3", "3", "3", "0", "0", "0", "durable subscriber, by offset"],
    ]
    assert "5 flights/s" in text
    assert "p50 51 ms, p99 100 ms" in text
    assert text.endswith("\nexact\n")


@pytest.mark.parametrize(
    ("found", "counts"),
    [
        (results(dict.fromkeys(ALL - {4}, 1)), (9, 1, 0, 0)),
        (results({**dict.fromkeys(ALL, 1), 4: 3}), (12, 0, 2, 0)),
        (results(dict.fromkeys(ALL | {11}, 1)), (11, 0, 0, 1)),
    ],
    ids=["lost", "duplicated", "wrong"],
)
def test_flaw_of_a_topic_is_counted(found: Results, counts: tuple[int, ...]) -> None:
    row = [*rows(found)][1]
    assert (row.arrived, row.lost, row.duplicated, row.wrong) == counts
    assert not row.exact
    assert printed(found)[1].endswith("\nNOT exact\n")


def test_wrong_key_makes_the_result_inexact() -> None:
    assert not printed(results(wrong_keys=1))[0]


@pytest.mark.parametrize(("in_queue", "lost", "duplicated"), [(8, 2, 0), (11, 0, 1)])
def test_queue_with_another_number_of_messages_makes_the_result_inexact(in_queue: int, lost: int, duplicated: int) -> None:
    row = next(rows(results(in_queue=in_queue)))
    assert (row.lost, row.duplicated, row.exact) == (lost, duplicated, False)


def test_subscriber_that_lacks_a_message_makes_the_result_inexact() -> None:
    found = replace(results(), subscribers=[Subscriber("alerts-0", 3, 2, 1)])
    row = [*rows(found)][-1]
    assert (row.lost, row.duplicated, row.exact) == (1, 1, False)


def test_percentile_of_nothing_is_not_a_number() -> None:
    assert percentile([], 0.5) == "-"
