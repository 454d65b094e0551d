"""The last table of the demo: how many messages of each path arrived, and how they were counted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

#: The table needs this width; a narrower terminal breaks its lines.
WIDTH_MIN = 124


@dataclass(frozen=True)
class Topic:
    """The records of a topic that a ``read_committed`` reader has seen."""

    name: str
    expected: frozenset[int]
    arrived: Mapping[int, int]  # row of the flight -> number of records
    wrong_keys: int


@dataclass(frozen=True)
class Subscriber:
    """The messages that a durable subscriber has received."""

    name: str
    received: int
    distinct: int
    duplicates: int


@dataclass(frozen=True)
class Results:
    """The content of the report."""

    flights: int
    sent: int
    in_queue: int
    topics: list[Topic]
    airports: int
    subscribers: list[Subscriber]
    latencies_ms: list[int]
    #: From the first send to the last record in Kafka.
    seconds: float


@dataclass(frozen=True)
class PathResult:
    """A row of the table."""

    path: str
    sent: int
    expected: int
    arrived: int
    lost: int
    duplicated: int
    wrong: int
    counted: str

    @property
    def exact(self) -> bool:
        """Return whether each expected message arrived once, and no other message."""
        return not (self.lost or self.duplicated or self.wrong) and self.arrived == self.expected


def rows(results: Results) -> Iterator[PathResult]:
    """Return the rows of the table."""
    total, queued = results.flights, results.in_queue
    yield PathResult(
        "Java → queue flights", results.sent, total, queued, max(total - queued, 0), max(queued - total, 0), 0,
        "depth of the queue at the end",
    )  # fmt: skip
    for topic in results.topics:
        seen, arrived = set(topic.arrived), sum(topic.arrived.values())
        yield PathResult(
            f"queue → {topic.name}", results.sent, len(topic.expected), arrived, len(topic.expected - seen), arrived - len(seen),
            len(seen - topic.expected) + topic.wrong_keys, "read_committed, by row",
        )  # fmt: skip
    for each in results.subscribers:
        yield PathResult(
            f"airport.alerts → {each.name}", results.airports, results.airports, each.received, results.airports - each.distinct,
            each.duplicates, 0, "durable subscriber, by offset",
        )  # fmt: skip


def percentile(values: list[int], share: float) -> str:
    """Return the value in milliseconds below which a share of the values lies."""
    ordered = sorted(values)
    return f"{ordered[min(int(len(ordered) * share), len(ordered) - 1)]:,} ms" if ordered else "-"


def report(results: Results, console: Console) -> bool:
    """Print the table. Return whether all counts are exact."""
    if console.width < WIDTH_MIN:
        console.width = WIDTH_MIN
    table = Table("path", title="Count of all messages", header_style="bold")
    for title in ("sent", "expected", "arrived", "lost", "duplicated", "wrong"):
        table.add_column(title, justify="right")
    table.add_column("how counted")
    exact = True
    for row in rows(results):
        exact &= row.exact
        numbers = (row.sent, row.expected, row.arrived, row.lost, row.duplicated, row.wrong)
        table.add_row(row.path, *(f"{number:,}" for number in numbers), row.counted)
    console.print(table)
    console.print(
        f"{results.flights / results.seconds:,.0f} flights/s from the first send to the last record in Kafka "
        f"({results.seconds:.0f} s, kills included); send to committed in Kafka: p50 {percentile(results.latencies_ms, 0.5)}, "
        f"p99 {percentile(results.latencies_ms, 0.99)} (p99 includes the time after a kill)",
        soft_wrap=True,
    )
    console.print("[green]exact[/green]" if exact else "[red]NOT exact[/red]")
    return exact
