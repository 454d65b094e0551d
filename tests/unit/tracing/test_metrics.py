"""The metrics of Prometheus reach a collector of OpenTelemetry, and a fault of the export stops nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import Metric as Family
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from bascule.core.errors import InvalidInput
from bascule.pipelines.serving import metrics_of
from bascule.tracing import environment
from bascule.tracing.bridge import CONVENTIONS
from bascule.tracing.metrics import LAST_EXPORT_S, MetricsExport, metrics_export_of, process_metrics_export
from tests.support.collector import CollectedMetric, Collector
from tests.support.metrics_page import documented, sections
from tests.support.system import wait_for
from tests.unit.pipelines.test_metrics import Driver

GUIDE = Path(__file__).parents[3] / "docs" / "guides" / "tracing.md"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)


@contextmanager
def receiving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """Run a collector that the environment of this process names for metrics."""
    with Collector() as collector:
        for name, value in collector.metrics_environment.items():
            monkeypatch.setenv(name, value)
        yield collector


def exported(monkeypatch: pytest.MonkeyPatch, families: Iterable[Family], since_ns: int = 0) -> dict[str, CollectedMetric]:
    """Return what a collector gets when an export is closed, by name."""
    with receiving(monkeypatch) as collector:
        monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10000000")
        monkeypatch.setattr("bascule.tracing.metrics.LAST_EXPORT_S", 30.0)  # a loaded machine may need more time than a process has
        export = process_metrics_export("test", lambda _: families, since_ns=since_ns)
        assert export is not None
        export.close()
        return {each.name: each for each in collector.metrics}


def test_gauge_counter_and_histogram_keep_name_unit_labels_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = GaugeMetricFamily("bascule_queue_bytes", "Size", labels=("queue",))
    gauge.add_metric(("orders",), 7)
    gauge.add_metric(("stock",), 8)
    counter = CounterMetricFamily("bascule_messages_in", "Messages", value=3)
    histogram = HistogramMetricFamily("bascule_event_loop_stall_seconds", "Delay", labels=("loop",))
    histogram.add_metric(("main",), [("0.1", 2), ("0.5", 2), ("+Inf", 5)], 9.5)
    empty = GaugeMetricFamily("bascule_user_links", "Links", labels=("user",))
    found = exported(monkeypatch, [gauge, counter, histogram, empty], since_ns=123)
    assert empty.name not in found
    size = found["bascule_queue_bytes"]
    assert (size.service, size.unit, size.kind) == ("test", "By", "gauge")
    assert [(labels, point.as_double) for labels, point in size.points] == [({"queue": "orders"}, 7), ({"queue": "stock"}, 8)]
    count = found["bascule_messages_in_total"]
    ((labels, point),) = count.points
    assert (count.unit, count.kind, labels, point.as_double, point.start_time_unix_nano) == ("", "sum", {}, 3, 123)
    delay = found["bascule_event_loop_stall_seconds"]
    ((labels, point),) = delay.points
    assert (delay.unit, delay.kind, labels) == ("s", "histogram", {"loop": "main"})
    assert (list(point.explicit_bounds), list(point.bucket_counts), point.count, point.sum) == ([0.1, 0.5], [2, 0, 3], 5, 9.5)
    assert not point.HasField("min")


def test_pipelines_have_the_metrics_of_the_conventions_for_messaging(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.run()
    found = exported(monkeypatch, list(driver.metrics.collect()))
    sent, consumed = found["messaging.client.sent.messages"], found["messaging.client.consumed.messages"]
    kafka = {"messaging.system": "kafka"}
    assert [(labels, point.as_double) for labels, point in sent.points] == [
        ({"pipeline": "divert:orders", **kafka, "messaging.operation.name": "send"}, 7)
    ]
    assert [(labels, point.as_double) for labels, point in consumed.points] == [
        ({"pipeline": "ingress:stock", **kafka, "messaging.operation.name": "process"}, 1)
    ]
    assert sent.unit == "{message}"
    assert sent.points[0][1].start_time_unix_nano == 0
    for name, operation in (("messaging.process.duration", "process"), ("messaging.client.operation.duration", "commit")):
        assert {labels["messaging.operation.name"] for labels, _ in found[name].points} == {operation}
        assert (found[name].unit, found[name].kind) == ("s", "histogram")
    assert "bascule_pipeline_lag_records" in found
    assert not found.keys() & {"bascule_pipeline_records_total", "bascule_pipeline_batch_seconds"}


def test_conventions_name_metrics_that_exist_and_are_in_the_guide() -> None:
    documented_metrics = {each.name.removesuffix("_total") for section in sections() for each in documented(section)}
    guide = GUIDE.read_text()
    for convention in CONVENTIONS:
        assert convention.family in documented_metrics
        assert f"`{convention.name}`" in guide


def test_driver_exports_without_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    with receiving(monkeypatch) as collector:
        with metrics_of(None, "127.0.0.1") as metrics:
            assert metrics is not None
            wait_for(lambda: collector.metrics, "an export")
        (metric, *_) = collector.metrics
        assert {"bascule_build_info", "process_resident_memory_bytes"} <= {each.name for each in collector.metrics}
        assert (metric.service, metric.name) == ("bascule-pipelines", "bascule_pipelines_active")


def test_export_continues_after_a_fault(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    rounds = itertools.count()

    def collect(timeout_s: float) -> list[Family]:
        if next(rounds) == 0:
            raise TimeoutError(f"no answer in {timeout_s} s")
        return [GaugeMetricFamily("bascule_serving", "Serving", value=1)]

    with receiving(monkeypatch) as collector:
        monkeypatch.setenv("OTEL_METRIC_EXPORT_TIMEOUT", "5000")
        export = process_metrics_export("test", collect, since_ns=0)
        assert export is not None
        wait_for(lambda: collector.metrics, "an export")
        export.close()
    assert "metrics not exported reason=\"TimeoutError('no answer in 5.0 s')\"" in caplog.text


def test_collector_that_cannot_be_reached_delays_the_end_of_a_process_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "http://127.0.0.1:9/v1/metrics")
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "10000000")
    export = process_metrics_export("test", lambda _: [GaugeMetricFamily("bascule_serving", "Serving", value=1)], since_ns=0)
    assert export is not None
    begun_s = time.monotonic()
    export.close()
    assert time.monotonic() - begun_s < 2 * LAST_EXPORT_S


def test_failed_export_thread_ends_the_export_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: MetricsExport) -> None:
        raise AssertionError("injected")

    monkeypatch.setattr(MetricsExport, "_run", fail)
    with receiving(monkeypatch):
        export = process_metrics_export("test", lambda _: [], since_ns=0)
        assert export is not None
        export.close()
    assert "metrics export is off reason=injected" in caplog.text


@pytest.mark.parametrize("value", ["0", "-1", "soon", "nan", "inf"])
def test_interval_that_is_no_number_of_milliseconds_is_refused(value: str) -> None:
    with pytest.raises(InvalidInput, match=f"OTEL_METRIC_EXPORT_INTERVAL is '{value}'"):
        metrics_export_of({"OTEL_METRIC_EXPORT_INTERVAL": value}, "test", lambda _: [], since_ns=0)


def test_export_that_cannot_begin_is_logged_and_stops_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "influx")
    assert process_metrics_export("test", lambda _: [], since_ns=0) is None
    assert "metrics export is off reason=\"OTEL_METRICS_EXPORTER names 'influx'" in caplog.text


def test_exporter_that_refuses_its_environment_is_logged_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def begin() -> None:
        raise ValueError("injected")

    monkeypatch.setattr(environment, "entry_points", lambda **_: [SimpleNamespace(name="otlp_proto_http", load=lambda: begin)])
    with receiving(monkeypatch):
        assert process_metrics_export("test", lambda _: [], since_ns=0) is None
    assert "the exporter 'otlp_proto_http' of metrics cannot begin: ValueError" in caplog.text


def test_exporter_that_cannot_be_closed_is_logged_and_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise AssertionError("injected")

    with receiving(monkeypatch):
        export = process_metrics_export("test", lambda _: [], since_ns=0)
        assert export is not None
        monkeypatch.setattr(export._exporters[0], "shutdown", fail)
        export.close()
    assert "metrics exporter not closed" in caplog.text
