"""The progress of the demo, on a terminal and elsewhere."""

from __future__ import annotations

import io
import threading

from rich.console import Console

from demo.progress import PathCounts, Progress

PATHS = [
    PathCounts("queue → kafka.flights", 12_000, 11_900, kills=1),
    PathCounts("airport.alerts → alerts-0", 300, 300, 295, kills=1),
]


def test_lag_counts_messages_that_have_not_reached_the_end_of_their_path() -> None:
    assert [each.lag for each in PATHS] == [100, 5]
    assert PathCounts("counted later", 10, 12).lag == 0


def test_live_table_has_a_row_for_each_path() -> None:
    console = Console(file=io.StringIO(), width=100)
    console.print(Progress(console, lambda: PATHS).table())
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [cell.strip() for cell in lines[2].split("┃")[1:-1]] == ["path", "sent", "in Kafka", "delivered", "lag", "kills"]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines[4:6]]
    assert rows == [
        ["queue → kafka.flights", "12,000", "11,900", "", "100", "1"],
        ["airport.alerts → alerts-0", "300", "300", "295", "5", "1"],
    ]


def test_terminal_shows_a_live_table_and_no_plain_lines() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Progress(console, lambda: PATHS, plain_s=0.001):
        pass
    assert "queue → kafka.flights" in out.getvalue()
    assert "lag 100" not in out.getvalue()


def test_plain_line_of_each_interval_has_the_counts_of_all_paths() -> None:
    out, read_twice, reads = io.StringIO(), threading.Event(), 0

    def read() -> list[PathCounts]:
        nonlocal reads
        reads += 1
        if reads == 2:
            read_twice.set()
        return PATHS

    with Progress(Console(file=out, width=60), read, plain_s=0.001):
        assert read_twice.wait(30)
    line, *others = out.getvalue().splitlines()
    assert line.partition(" s: ")[2] == (
        "queue → kafka.flights 12,000 sent, 11,900 in Kafka, lag 100; "
        "airport.alerts → alerts-0 300 sent, 300 in Kafka, 295 delivered, lag 5; kills 1"
    )
    assert others
