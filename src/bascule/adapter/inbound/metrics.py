"""Prometheus metrics of endpoints."""

from __future__ import annotations

from bascule.core.extras import require

require("metrics")

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bascule.adapter.inbound.activation import ActivationStatus
from bascule.adapter.inbound.adapter import ResourceAdapter
from bascule.adapter.inbound.lag import EndpointLag
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
#: Lags, by unit: description, and the figure of an EndpointLag.
LAGS: Mapping[str, tuple[str, Callable[[EndpointLag], float | None]]] = {
    "records": ("Offsets between the position and the end of the source partitions that this member owns", lambda lag: lag.records),
    "bytes": ("Estimated size of the records between the position and the end of the sources, from samples", lambda lag: lag.size_bytes),
    "seconds": ("Estimated age of the oldest record that the endpoint has not read; 0 = none waits", lambda lag: lag.seconds),
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
        self._lags = adapter.lags()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, labelled with the group or the name of the worker pool."""
        statuses = self._adapter.status()
        partitions = GaugeMetricFamily("bascule_adapter_partitions", "Source partitions that this member owns", labels=("group",))
        for status in statuses:
            partitions.add_metric((status.group,), len(status.partitions))
        yield partitions
        running = GaugeMetricFamily(
            "bascule_adapter_running", "1 while the endpoint takes records, 0 after it has failed", labels=("group",)
        )
        for status in statuses:
            running.add_metric((status.group,), float(status.running))
        yield running
        yield from self._behind(statuses)
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
        latency = HistogramMetricFamily(
            "bascule_adapter_latency_seconds", "Time from the timestamp of a record until the endpoint has handled it", labels=("group",)
        )
        for status in statuses:
            latency.add_metric((status.group,), status.latency.buckets, status.latency.sum_s)
        yield latency
        yield from self._pools()

    def _behind(self, statuses: Sequence[ActivationStatus]) -> Iterator[Metric]:
        """Yield positions and lags. A lag that is not known, for example because Kafka does not answer, is left out."""
        position = GaugeMetricFamily(
            "bascule_adapter_position_offset",
            "Next offset that the endpoint reads from a source partition",
            labels=("group", "topic", "partition"),
        )
        for status in statuses:
            for place, offset in status.positions.items():
                position.add_metric((status.group, place.topic, str(place.partition)), offset)
        yield position
        lags = self._lags.look(statuses)
        for name, (text, value) in LAGS.items():
            lag = GaugeMetricFamily(f"bascule_adapter_lag_{name}", text, labels=("group",))
            for group, found in lags.items():
                if (figure := value(found)) is not None:
                    lag.add_metric((group,), figure)
            yield lag

    def _pools(self) -> Iterator[Metric]:
        pools = [pool.status() for pool in self._adapter.pools()]
        for name, text in POOL_GAUGES.items():
            gauge = GaugeMetricFamily(f"bascule_adapter_pool_{name}", text, labels=("pool",))
            for pool in pools:
                gauge.add_metric((pool.name,), getattr(pool, name))
            yield gauge


def serve_metrics(adapter: ResourceAdapter, port: int, host: str = "127.0.0.1") -> int:
    """Serve http://HOST:PORT/metrics from a thread until the process ends. Return the port, which 0 selects freely. Raises Unavailable."""
    return MetricsServer(AdapterCollector(adapter), port, host).port
