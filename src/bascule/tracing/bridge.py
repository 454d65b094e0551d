"""Metrics of Prometheus as metrics of OpenTelemetry, by its specification of the compatibility between both.

A metric keeps its name, unless the conventions of OpenTelemetry for messaging have a name for it: see CONVENTIONS.
"""

from __future__ import annotations

from bascule.core.extras import require

require("otel")

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    Sum,
)
from prometheus_client import Metric as Family
from prometheus_client.samples import Sample

_CUMULATIVE: Final = AggregationTemporality.CUMULATIVE
#: Unit (UCUM), by the end of a name in Prometheus' form.
_UNITS: Final = {"_seconds": "s", "_bytes": "By"}


class Convention(NamedTuple):
    """A metric of the conventions for messaging, made from the series of a family whose label ``pipeline`` begins with ``kind``."""

    family: str
    kind: str
    name: str
    unit: str
    operation: str


#: The pipelines are clients of Kafka. The conventions have no metrics for brokers.
CONVENTIONS: Final = (
    Convention("bascule_pipeline_records", "divert:", "messaging.client.sent.messages", "{message}", "send"),
    Convention("bascule_pipeline_records", "ingress:", "messaging.client.consumed.messages", "{message}", "process"),
    Convention("bascule_pipeline_batch_seconds", "", "messaging.process.duration", "s", "process"),
    Convention("bascule_pipeline_transaction_seconds", "", "messaging.client.operation.duration", "s", "commit"),
)


def bridged(families: Iterable[Family], since_ns: int, now_ns: int) -> Iterator[Metric]:
    """Yield the metrics of OpenTelemetry for families of Prometheus as of now.

    ``since_ns`` is the time, in ns since 1970, at which the counters were 0; 0 = unknown.
    """
    for family in families:
        conventions = [each for each in CONVENTIONS if each.family == family.name]
        for convention in conventions:
            samples = [each for each in family.samples if each.labels.get("pipeline", "").startswith(convention.kind)]
            more = {"messaging.system": "kafka", "messaging.operation.name": convention.operation}
            if samples:  # a metric without points has no type in OTLP
                yield Metric(convention.name, family.documentation, convention.unit, _data(family.type, samples, more, since_ns, now_ns))
        if family.samples and not conventions:
            name = f"{family.name}_total" if family.type == "counter" else family.name
            unit = next((unit for end, unit in _UNITS.items() if family.name.endswith(end)), "")
            yield Metric(name, family.documentation, unit, _data(family.type, family.samples, {}, since_ns, now_ns))


def _data(kind: str, samples: Iterable[Sample], more: dict[str, str], since_ns: int, now_ns: int) -> Gauge | Sum | Histogram:
    if kind == "histogram":
        return Histogram(list(_histograms(samples, more, since_ns, now_ns)), _CUMULATIVE)
    start_ns = since_ns if kind == "counter" else 0
    points = [NumberDataPoint({**each.labels, **more}, start_ns, now_ns, float(each.value)) for each in samples]
    return Sum(points, _CUMULATIVE, is_monotonic=True) if kind == "counter" else Gauge(points)


def _histograms(samples: Iterable[Sample], more: dict[str, str], since_ns: int, now_ns: int) -> Iterator[HistogramDataPoint]:
    """Yield a point for each series. Prometheus has cumulative buckets and no smallest and largest value."""
    buckets: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = defaultdict(list)
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in samples:
        labels = dict(sample.labels)
        bound = labels.pop("le", None)
        series = tuple(labels.items())
        if bound is not None:
            buckets[series].append((float(bound), sample.value))
        elif sample.name.endswith("_sum"):
            sums[series] = sample.value
    unknown: Any = None
    for series, cumulative in buckets.items():
        cumulative.sort()
        totals = [int(total) for _, total in cumulative]
        counts = [total - before for total, before in zip(totals, (0, *totals), strict=False)]
        bounds = [bound for bound, _ in cumulative[:-1]]
        yield HistogramDataPoint(
            {**dict(series), **more}, since_ns, now_ns, totals[-1], sums[series], counts, bounds, min=unknown, max=unknown
        )
