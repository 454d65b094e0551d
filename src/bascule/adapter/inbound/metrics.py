"""Prometheus metrics of endpoints."""

from __future__ import annotations

from bascule.core.extras import require

require("metrics")

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bascule.adapter.inbound.adapter import ResourceAdapter
from bascule.core.errors import Unavailable

#: Name -> description. The name is also a field of ActivationStatus.
GAUGES = {
    "waiting": "records that wait for a worker or for their next try",
    "delayed": "records that wait for their next try",
    "at_work": "endpoints at work",
    "hanging": "threads in an endpoint that was given up",
    "blocked": "source partitions that wait for a transaction which this endpoint cannot finish",
    "dead_letters": "records that failed too often and are not sent back",
}
COUNTERS = {
    "delivered": "records handled",
    "failed": "deliveries that failed",
    "retried": "records that got another try",
    "dead_lettered": "records that failed too often",
    "hung": "deliveries that took too long",
    "superseded": "deliveries whose partition had gone to another member",
    "vanished": "records in flight that were deleted from their topic",
    "redelivered": "records found in flight at a taking over",
}
#: Metrics of shared pools: name -> description. The name is also a field of PoolStatus.
POOL_GAUGES = {
    "threads": "threads of a worker pool, but for those that replace hanging ones",
    "at_work": "threads of a worker pool at work",
    "hanging": "threads of a worker pool in an endpoint that was given up",
}


class AdapterCollector(Collector):
    """Collects metrics. Register it in your program's registry: ``REGISTRY.register(AdapterCollector(adapter))``."""

    def __init__(self, adapter: ResourceAdapter) -> None:
        self._adapter = adapter

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, labelled with the group or the name of the worker pool."""
        statuses = self._adapter.status()
        partitions = GaugeMetricFamily("bascule_adapter_partitions", "source partitions in this member's hands", labels=("group",))
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
        pools = [pool.status() for pool in self._adapter.pools()]
        for name, text in POOL_GAUGES.items():
            gauge = GaugeMetricFamily(f"bascule_adapter_pool_{name}", text, labels=("pool",))
            for pool in pools:
                gauge.add_metric((pool.name,), getattr(pool, name))
            yield gauge


def serve_metrics(adapter: ResourceAdapter, port: int, host: str = "127.0.0.1") -> int:
    """Serve http://HOST:PORT/metrics from a thread until the process ends. Return the port, which 0 selects freely. Raises Unavailable."""
    registry = CollectorRegistry()
    registry.register(AdapterCollector(adapter))
    try:
        server, _ = start_http_server(port, host, registry)
    except OSError as error:
        raise Unavailable(f"could not serve metrics at {host}:{port}: {error}") from error
    return int(server.server_port)
