"""The metrics of a driver, as Prometheus reads them."""

from __future__ import annotations

import socket
import urllib.request
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from bascule.core.errors import Unavailable
from bascule.embedded.service_manager import ServiceManager
from bascule.pipelines.lag import lag_bytes_of
from bascule.pipelines.metrics import PipelineMetrics
from bascule.pipelines.queries import Query
from bascule.pipelines.serving import NOT_ALIVE_S, health_of, metrics_of
from bascule.writer.carried import CarriedCounts, PipelineCount
from bascule.writer.control import PipelineReport, PipelineState
from bascule.writer.position import Position
from tests.support.alerts import Watch

TASKS = {"divert:orders": "diverts", "ingress:stock": "ingress:stock"}
STATES = {"divert:orders": PipelineState.RUNNING, "ingress:stock": PipelineState.FAILED}
QUERIES = {
    "diverts": Query("diverts", lambda: None, Path()),
    "ingress:stock": Query("ingress:stock", lambda: None, Path(), restarts=3, last_error_s=1_000.0),
}
REPORTS = {
    "divert:orders": PipelineReport(
        PipelineState.RUNNING, "driver", 0, sources=(("journal", 0, 7, 9),), partitions=1, lag=2, lag_bytes=2000
    ),
    "ingress:stock": PipelineReport(PipelineState.FAILED, "driver", 0),
}
JOURNAL = Position("journal", "id", 0, 7, carried=CarriedCounts({"orders": PipelineCount(5, 500, 1)}).plus(
    CarriedCounts(latencies=CarriedCounts().latencies.with_these((0.2, 0.3)))
))  # fmt: skip
OWN = Position("journal", "id", 0, 7, carried=CarriedCounts({"orders": PipelineCount(2, 200, 0), "removed": PipelineCount(1, 1, 1)}))
STORED = {
    "diverts/journal/0": JOURNAL, "divert:orders/journal/0": OWN, "begun:orders/journal/0": JOURNAL,
    "ingress:stock/t/0": replace(JOURNAL, topic="t", carried=CarriedCounts({"stock": PipelineCount(1, 10, 0)})),
}  # fmt: skip


class Driver:
    """The metrics of a driver, and their values."""

    def __init__(self) -> None:
        self.metrics = PipelineMetrics()
        self.registry = CollectorRegistry()
        self.registry.register(self.metrics)

    def run(self, stored: dict[str, Position] = STORED, reports: Mapping[str, PipelineReport] = REPORTS) -> None:
        self.metrics.show(STATES, TASKS, QUERIES, {name: QUERIES[task].restarts for name, task in TASKS.items()})
        self.metrics.measure(reports, stored, {("journal", 0): 9}, QUERIES)

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"bascule_{name}", labels)


def test_driver_that_stands_by_says_so_and_shows_no_pipelines() -> None:
    driver = Driver()
    assert driver.value("pipelines_active") == 0
    assert [family.name for family in driver.metrics.collect() if family.samples] == ["bascule_pipelines_active"]


def test_pipelines_have_state_lag_position_and_counts_of_all_their_positions() -> None:
    driver = Driver()
    driver.run()
    orders = {"pipeline": "divert:orders"}
    assert driver.value("pipelines_active") == 1
    assert driver.value("pipeline_info", task="diverts", **orders) == 1
    assert driver.value("pipeline_state", state="running", **orders) == 1
    assert driver.value("pipeline_state", state="failed", **orders) == 0
    assert driver.value("pipeline_position_offset", topic="journal", partition="0", **orders) == 7
    assert driver.value("pipeline_lag_records", **orders) == 2
    assert driver.value("pipeline_lag_bytes", **orders) == 2000
    assert driver.value("pipeline_lag_seconds", **orders) is not None
    counts = [driver.value(f"pipeline_{name}_total", **orders) for name in ("records", "bytes", "dead_letters", "restarts")]
    assert counts == [7, 700, 1, 0]
    assert driver.value("pipeline_latency_seconds_count", task="diverts") == 2
    assert driver.value("pipeline_latency_seconds_bucket", task="diverts", le="0.25") == 1


def test_alert_fires_if_records_of_gigabytes_wait() -> None:
    driver, watch = Driver(), Watch()
    alert = "BasculePipelineLagLarge"
    for waiting, fires in ((4_000, []), (6_000, ["divert:orders"])):
        size = lag_bytes_of([replace(JOURNAL, offset=7)], {("journal", 0): 7 + waiting}, {("journal", 0): 1e6})
        driver.run(reports={**REPORTS, "divert:orders": replace(REPORTS["divert:orders"], lag=waiting, lag_bytes=size)})
        watch.read(driver=generate_latest(driver.registry).decode())
        assert [each["pipeline"] for each in watch.fires(alert)] == fires, waiting


def test_pipeline_that_failed_has_its_restarts_and_the_time_of_the_error() -> None:
    driver = Driver()
    driver.run()
    stock = {"pipeline": "ingress:stock"}
    assert driver.value("pipeline_state", state="failed", **stock) == 1
    assert driver.value("pipeline_restarts_total", **stock) == 3
    assert driver.value("pipeline_last_error_timestamp_seconds", **stock) == 1_000
    assert driver.value("pipeline_records_total", **stock) == 1
    assert driver.value("pipeline_lag_records", **stock) is None
    assert driver.value("pipeline_lag_bytes", **stock) is None


def test_time_of_the_last_error_stays_if_a_task_that_failed_earlier_carries_the_pipeline() -> None:
    driver = Driver()
    driver.run()
    earlier = Query("ingress:stock", lambda: None, Path(), restarts=1, last_error_s=500.0)
    driver.metrics.show(STATES, TASKS, {**QUERIES, "ingress:stock": earlier}, dict.fromkeys(TASKS, 4))
    assert driver.value("pipeline_last_error_timestamp_seconds", pipeline="ingress:stock") == 1_000


def test_counts_of_pipelines_that_are_not_configured_are_not_exported() -> None:
    driver = Driver()
    driver.run()
    labels = {label for family in driver.metrics.collect() for sample in family.samples for label in sample.labels.values()}
    assert "divert:removed" not in labels


def test_counter_does_not_fall_if_a_replica_that_lags_answers() -> None:
    driver = Driver()
    driver.run()
    driver.run({"diverts/journal/0": JOURNAL})
    assert driver.value("pipeline_records_total", pipeline="divert:orders") == 7


def test_no_counter_falls_if_a_position_is_read_no_more_or_has_begun_again() -> None:
    driver = Driver()
    driver.run()
    before = counters(driver)
    assert before["bascule_pipeline_latency_seconds_count", "diverts"] == 2
    for stored in ({}, dict.fromkeys(STORED, replace(JOURNAL, carried=CarriedCounts()))):
        driver.run(stored)
        after = counters(driver)
        assert {at: after[at] for at in before if at in after} == {at: before[at] for at in before if at in after}
    assert before == after


def test_counters_of_an_ingress_that_was_created_again_begin_at_0() -> None:
    driver = Driver()
    carried = CarriedCounts({"stock": PipelineCount(1, 10, 0)}, latencies=CarriedCounts().latencies.with_these((0.2,)))
    place = "ingress:stock/t/0"
    for stored, definition, count in ((carried, "1", 1), (CarriedCounts(), "1", 1), (CarriedCounts(), "2", 0)):
        reports = {**REPORTS, "ingress:stock": replace(REPORTS["ingress:stock"], revision=1, definition_id=definition)}
        driver.run({place: replace(JOURNAL, topic="t", carried=stored)}, reports)
        assert driver.value("pipeline_records_total", pipeline="ingress:stock") == count
        assert driver.value("pipeline_latency_seconds_count", task="ingress:stock") == count


def counters(driver: Driver) -> dict[tuple[str, str], float]:
    """Return the values of all counters, and of the counts of histograms, by name and by pipeline or task."""
    samples = [sample for family in driver.metrics.collect() for sample in family.samples]
    return {
        (each.name, each.labels.get("pipeline") or each.labels.get("task", "")): each.value
        for each in samples
        if each.name.endswith(("_total", "_count"))
    }


def test_latency_of_a_pipeline_that_was_paused_for_a_day_has_a_bucket() -> None:
    driver = Driver()
    paused = CarriedCounts(latencies=CarriedCounts().latencies.with_these((80_000.0,)))
    driver.run({"diverts/journal/0": replace(JOURNAL, carried=paused)})
    assert driver.value("pipeline_latency_seconds_bucket", task="diverts", le="86400.0") == 1


def test_metrics_are_served_until_the_driver_ends() -> None:
    with metrics_of(0, "127.0.0.1") as metrics:
        assert metrics is not None
    with metrics_of(None, "127.0.0.1") as metrics:
        assert metrics is None
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=f"127.0.0.1:{port}.*Choose another pipelines.metrics_port"), metrics_of(port, "127.0.0.1"):
            pass
    with metrics_of(port, "127.0.0.1"), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        assert b"bascule_pipelines_active 0.0" in answer.read()
    with pytest.raises(OSError, match="refused"), urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30):
        pass


def test_health_of_a_driver_is_what_it_reports_to_its_service_manager() -> None:
    manager = ServiceManager({})
    live, ready = (health_of(manager)[path] for path in ("/livez", "/readyz"))
    assert (live(), ready()) == ((True, "alive"), (False, "the driver is starting or stopping"))
    manager.ready("standby pipelines=2")
    assert ready() == (True, "standby pipelines=2")
    manager.stopping()
    assert not ready()[0]
    manager.alive_s -= NOT_ALIVE_S + 1
    assert live() == (False, "the driver has made no progress for 301 s")
    manager.alive()
    assert live()[0]
