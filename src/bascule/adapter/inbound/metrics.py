"""Prometheus metrics of endpoints."""

from __future__ import annotations

from bascule.core.extras import require

require("metrics")

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bascule.adapter.inbound.adapter import ResourceAdapter
from bascule.threads.metrics_server import MetricsServer

#: Name -> description. The name is also a field of ActivationStatus.
GAUGES = {
    "waiting": "Records that wait for a worker or for a retry",
    "delayed": "Records that wait for a retry",
    "at_work": "Endpoint calls in progress",
    "hanging": "Threads that still run an endpoint call whose timeout has expired",
    "blocked": "Source partitions that are blocked by a transaction that this endpoint cannot finish",
    "dead_letters": "Dead letters that have not been returned",
}
COUNTERS = {
    "delivered": "Records handled",
    "failed": "Failed deliveries",
    "retried": "Retries of failed records",
    "dead_lettered": "Records written to the dead-letter topic",
    "hung": "Deliveries that exceeded their timeout",
    "superseded": "Deliveries of records that another member of the group handles",
    "vanished": "Records in flight that were deleted from their topic",
    "redelivered": "Records that were in flight when this member took over their partition",
}
#: Metrics of shared pools: name -> description. The name is also a field of PoolStatus.
POOL_GAUGES = {
    "threads": "Threads of the worker pool, without replacements of hanging threads",
    "at_work": "Threads of the worker pool that handle a record",
    "hanging": "Threads of the worker pool that still run an endpoint call whose timeout has expired",
}


class AdapterCollector(Collector):
    """Collects metrics. Register it in your program's registry: ``REGISTRY.register(AdapterCollector(adapter))``."""

    def __init__(self, adapter: ResourceAdapter) -> None:
        self._adapter = adapter

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, labelled with the group or the name of the worker pool."""
        statuses = self._adapter.status()
        partitions = GaugeMetricFamily("bascule_adapter_partitions", "Source partitions that this member owns", labels=("group",))
        for status in statuses:
            partitions.add_metric((status.group,), len(status.partitions))
        yield partitions
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(f"bascule_adapter_{name}", text, labels=("group",))
            for status in statuses:
                value = getattr(status, name)
                gauge.add_metric((status.group,), len(value) if isinstance(value, tuple) else value)
            yield gauge
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(f"bascule_adapter_{name}", text, labels=("group",))
            for status in statuses:
                counter.add_metric((status.group,), status.counts[name])
            yield counter
        handler = HistogramMetricFamily("bascule_adapter_handler_seconds", "Duration of the calls of the endpoint", labels=("group",))
        for status in statuses:
            handler.add_metric((status.group,), status.handler.buckets, status.handler.sum_s)
        yield handler
        pools = [pool.status() for pool in self._adapter.pools()]
        for name, text in POOL_GAUGES.items():
            gauge = GaugeMetricFamily(f"bascule_adapter_pool_{name}", text, labels=("pool",))
            for pool in pools:
                gauge.add_metric((pool.name,), getattr(pool, name))
            yield gauge


def serve_metrics(adapter: ResourceAdapter, port: int, host: str = "127.0.0.1") -> int:
    """Serve http://HOST:PORT/metrics from a thread until the process ends. Return the port, which 0 selects freely. Raises Unavailable."""
    return MetricsServer(AdapterCollector(adapter), port, host).port
