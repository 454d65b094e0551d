"""Prometheus metrics of a driver and its pipelines. Needs the extra ``metrics``.

The thread of the driver shows what it knows, and the thread of the server reads it: both replace whole objects, and change none.
"""

from __future__ import annotations

from bascule.core.extras import require

require("metrics", "or unset pipelines.metrics_port")

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bascule.core.durations import Durations
from bascule.core.lag_times import LagTimes
from bascule.pipelines.queries import Query
from bascule.writer.carried import CarriedCounts, PipelineCount, summed
from bascule.writer.control import PipelineReport, PipelineState
from bascule.writer.position import BEGUN, DIVERT, INGRESS, Position


class ShownPipeline(NamedTuple):
    """What a driver knows about a pipeline at any time. ``task`` is the name of the query that carries it."""

    task: str
    state: PipelineState
    restarts: int
    error_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What a driver has read from Kafka at a time: reports and counts by pipeline, the lag in seconds and durations by task."""

    at_s: float = 0.0
    reports: Mapping[str, PipelineReport] = field(default_factory=dict)
    counts: Mapping[str, PipelineCount] = field(default_factory=dict)
    lag_s: Mapping[str, float] = field(default_factory=dict)
    tasks: Mapping[str, CarriedCounts] = field(default_factory=dict)

    def of_the_same(self, reports: Mapping[str, PipelineReport]) -> Measured:
        """Return this without the counts of ingresses that were deleted and created again: they begin at 0."""
        gone = {name for name, report in self.reports.items() if name in reports and reports[name].definition_id != report.definition_id}
        counts = {name: count for name, count in self.counts.items() if name not in gone}
        return replace(self, counts=counts, tasks={name: carried for name, carried in self.tasks.items() if name not in gone})


#: Metric, its help, and the field of PipelineCount.
COUNTERS: Final = (
    ("bascule_pipeline_records", "Records that the pipeline has written in committed transactions, dead letters included", "records"),
    ("bascule_pipeline_bytes", "Size of these records, with keys and headers", "bytes"),
    ("bascule_pipeline_dead_letters", "Records that the pipeline has written to the dead-letter topic", "dead_letters"),
)
#: Metric, its help, and the field of CarriedCounts.
HISTOGRAMS: Final = (
    ("bascule_pipeline_transaction_seconds", "Duration of the commits of Kafka transactions", "transactions"),
    ("bascule_pipeline_batch_seconds", "Time from the first record of a Kafka transaction until its commit", "batches"),
    ("bascule_pipeline_latency_seconds", "Time from the timestamp of a message or source record until its commit in Kafka", "latencies"),
)


class PipelineMetrics(Collector):
    """Collects the metrics of one driver."""

    def __init__(self) -> None:
        self._active = False
        self._shown: Mapping[str, ShownPipeline] = {}
        self._measured = Measured()
        self._lags = LagTimes()
        self._redriven: Mapping[str, int] = {}
        self._lineage: Mapping[str, int] = {}

    def show(
        self, states: Mapping[str, PipelineState], tasks: Mapping[str, str], queries: Mapping[str, Query], restarts: Mapping[str, int]
    ) -> None:
        """Show that this driver runs the pipelines, and their states. ``tasks`` has the names of their queries."""
        shown = {}
        for name, state in states.items():
            before, query = self._shown.get(name), queries.get(tasks[name])
            # A pipeline may get another query, which failed earlier or never, for example when a divert leaves its group.
            error_s = max(query.last_error_s if query else 0.0, before.error_s if before else 0.0)
            shown[name] = ShownPipeline(tasks[name], state, restarts[name], error_s)
        self._shown, self._active = shown, True

    def redriven(self, outcomes: Mapping[str, int]) -> None:
        """Show the number of dead letters of the redrives that this driver has finished, by outcome."""
        self._redriven = dict(outcomes)

    def lineage(self, outcomes: Mapping[str, int]) -> None:
        """Show the number of OpenLineage events of this driver, by outcome."""
        self._lineage = dict(outcomes)

    def measure(
        self, reports: Mapping[str, PipelineReport], stored: Mapping[str, Position], ends: Mapping[tuple[str, int], int],
        queries: Mapping[str, Query],
    ) -> None:  # fmt: skip
        """Show what was read from Kafka: all positions by key, and the ends of their sources."""
        counts: dict[str, PipelineCount] = {}
        tasks: dict[str, CarriedCounts] = {}
        for key, position in stored.items():
            task = key.partition("/")[0]
            if task.startswith(BEGUN):
                continue
            kind = INGRESS if task.startswith(INGRESS) else DIVERT
            counts = summed(counts, {f"{kind}{name}": count for name, count in position.carried.pipelines.items()})
            if task in queries:
                tasks[task] = tasks[task].plus(position.carried) if task in tasks else position.carried
        before, none = self._measured.of_the_same(reports), PipelineCount()
        counts = {name: counts.get(name, none).at_least(before.counts.get(name, none)) for name in reports}
        known = {name: before.tasks[name] for name in before.tasks if name in queries}
        tasks = known | {name: carried.at_least(known.get(name, carried)) for name, carried in tasks.items()}
        held = {key: ((at.topic, at.partition), at.offset) for key, at in stored.items() if key.partition("/")[0] in queries}
        lag_s: dict[str, float] = {}
        for key, seconds in self._lags.look(held, ends, time.monotonic()).items():
            task = key.partition("/")[0]
            lag_s[task] = max(seconds, lag_s.get(task, 0.0))
        self._measured = Measured(time.time(), reports, counts, lag_s, tasks)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics. A driver that does not run the pipelines has no metrics of them."""
        yield GaugeMetricFamily(
            "bascule_pipelines_active", "1 while this driver runs the pipelines, 0 while it starts or stands by", value=float(self._active)
        )
        redriven = CounterMetricFamily(
            "bascule_redrive_dead_letters",
            "Dead letters of the redrives that this driver has finished; outcome is redriven, failed (again), discarded or left",
            labels=("outcome",),
        )  # fmt: skip
        for outcome, count in self._redriven.items():
            redriven.add_metric((outcome,), count)
        yield redriven
        lineage = CounterMetricFamily(
            "bascule_lineage_events", "OpenLineage events of this driver; outcome is sent, failed or dropped (too many waited)",
            labels=("outcome",),
        )  # fmt: skip
        for outcome, count in self._lineage.items():
            lineage.add_metric((outcome,), count)
        yield lineage
        yield from _states(self._shown)
        yield from _measures(self._measured, self._shown)


def _states(shown: Mapping[str, ShownPipeline]) -> Iterator[Metric]:
    """Yield the metrics that are known without Kafka."""
    info = GaugeMetricFamily(
        "bascule_pipeline_info", "1; the label task names the task that carries the pipeline: its own, or that of its group",
        labels=("pipeline", "task"),
    )  # fmt: skip
    states = GaugeMetricFamily(
        "bascule_pipeline_state", "1 for the state of the pipeline, 0 for the other states", labels=("pipeline", "state")
    )
    restarts = CounterMetricFamily(
        "bascule_pipeline_restarts", "Failures of the task of the pipeline since this driver began; the driver restarts the task after each"
        " that a restart can mend", labels=("pipeline",),
    )  # fmt: skip
    errors = GaugeMetricFamily(
        "bascule_pipeline_last_error_timestamp_seconds", "When the task of the pipeline failed last, in seconds since the epoch; 0 = never",
        labels=("pipeline",),
    )  # fmt: skip
    for name, pipeline in shown.items():
        info.add_metric((name, pipeline.task), 1)
        for state in PipelineState:
            states.add_metric((name, state.value), float(state is pipeline.state))
        restarts.add_metric((name,), pipeline.restarts)
        errors.add_metric((name,), pipeline.error_s)
    yield from (info, states, restarts, errors)


def _measures(measured: Measured, shown: Mapping[str, ShownPipeline]) -> Iterator[Metric]:
    """Yield the metrics that the driver has read from Kafka."""
    at = GaugeMetricFamily(
        "bascule_pipelines_measured_timestamp_seconds",
        "When the driver has read positions and counts from Kafka, in seconds since the epoch",
    )
    if measured.at_s:
        at.add_metric((), measured.at_s)
    positions = GaugeMetricFamily(
        "bascule_pipeline_position_offset", "Next offset that the pipeline takes from a source partition",
        labels=("pipeline", "topic", "partition"),
    )  # fmt: skip
    records = GaugeMetricFamily(
        "bascule_pipeline_lag_records", "Offsets between the position and the end of the sources", labels=("pipeline",)
    )
    size = GaugeMetricFamily(
        "bascule_pipeline_lag_bytes", "Estimated size of the records between the position and the end of the sources, from samples",
        labels=("pipeline",),
    )  # fmt: skip
    seconds = GaugeMetricFamily(
        "bascule_pipeline_lag_seconds", "Estimated age of the oldest record that the pipeline has not taken; 0 = none waits",
        labels=("pipeline",),
    )  # fmt: skip
    for name, report in measured.reports.items():
        for topic, partition, offset, _ in report.sources:
            positions.add_metric((name, topic, str(partition)), offset)
        if report.lag is not None:
            records.add_metric((name,), report.lag)
        if report.lag_bytes is not None:
            size.add_metric((name,), report.lag_bytes)
        if name in shown and (lag_s := measured.lag_s.get(shown[name].task)) is not None:
            seconds.add_metric((name,), lag_s)
    yield from (at, positions, records, size, seconds)
    for metric, text, field_name in COUNTERS:
        counter = CounterMetricFamily(metric, text, labels=("pipeline",))
        for name in measured.reports:
            counter.add_metric((name,), getattr(measured.counts[name], field_name))
        yield counter
    for metric, text, field_name in HISTOGRAMS:
        histogram = HistogramMetricFamily(metric, text, labels=("task",))
        for task, carried in measured.tasks.items():
            durations: Durations = getattr(carried, field_name)
            histogram.add_metric((task,), durations.buckets, durations.sum_s)
        yield histogram
