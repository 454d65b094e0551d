"""The latency of pipelines between two reports."""

from __future__ import annotations

from collections.abc import Sequence

from bascule.pipelines.latency import IntervalLatencies, LatencyQuantiles
from bascule.writer.carried import CarriedCounts
from bascule.writer.position import Position

NOTHING = LatencyQuantiles()


def positions(*histograms: Sequence[float]) -> list[Position]:
    """Return positions that have carried records with these latencies in seconds."""
    none = CarriedCounts().latencies
    return [
        Position("t", "id", number, 1, carried=CarriedCounts(latencies=none.with_these(each))) for number, each in enumerate(histograms)
    ]


def test_latency_is_that_of_the_records_of_all_partitions_since_the_last_report() -> None:
    latencies = IntervalLatencies()
    assert latencies.since_last("divert:a", "diverts", positions([600.0] * 50)) == NOTHING, "the driver has just begun"
    assert latencies.since_last("divert:a", "diverts", positions([600.0] * 50)) == NOTHING, "nothing was carried"
    found = latencies.since_last("divert:a", "diverts", positions([600.0] * 50 + [0.002], [0.002] * 98 + [0.7]))
    assert (found.p50_s, found.p99_s) == (0.005 * 50 / 99, 0.005)
    assert latencies.since_last("divert:b", "diverts", positions([600.0])) == NOTHING, "each pipeline has a report of its own"


def test_task_of_before_and_positions_that_began_again_do_not_count() -> None:
    latencies = IntervalLatencies()
    latencies.since_last("divert:a", "divert:a", positions([]))
    assert latencies.since_last("divert:a", "diverts", positions([600.0])) == NOTHING, "it has joined its group"
    assert latencies.since_last("divert:a", "diverts", positions([])) == NOTHING
    assert latencies.since_last("divert:a", "diverts", positions([0.6])).p50_s == 0.75
