"""The latency of pipelines between two reports."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from bascule.pipelines import control
from bascule.pipelines.latency import IntervalLatencies, LatencyQuantiles
from bascule.writer.carried import CarriedCounts
from bascule.writer.control import PipelineState
from bascule.writer.position import Position
from tests.scenarios.operating import TIMEOUT_S, Operator
from tests.scenarios.sparkless import Bridge
from tests.scenarios.test_control import bridge, operator, topics
from tests.support.system import wait_for

__all__ = ["bridge", "operator", "topics"]  # fixtures

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


def test_latency_of_the_records_since_the_last_report_is_reported(
    bridge: Bridge, operator: Operator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "REPORT_S", 0.0)
    bridge.journal.start_epoch([])
    with bridge.running(bridge.divert("x")) as running:
        running.settle()
        operator.await_state(running, "divert:x", PipelineState.RUNNING)
        assert operator.topics.reports(TIMEOUT_S).pipelines["divert:x"].latency_p50_s is None

        def reported() -> bool:
            bridge.send("1")
            running.batch()  # stores the durations of the batch before it
            running.driver.poll()
            return operator.topics.reports(TIMEOUT_S).pipelines["divert:x"].latency_p99_s is not None

        wait_for(reported, "the latency to be reported")
        found = operator.topics.reports(TIMEOUT_S).pipelines["divert:x"]
        assert found.latency_p50_s is not None
        assert found.latency_p99_s is not None
        assert 0 <= found.latency_p50_s <= found.latency_p99_s
