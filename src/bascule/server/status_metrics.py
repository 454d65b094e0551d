"""Prometheus metrics of a broker, made from its status."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bascule.broker.send_times import BOUNDS_S, SendTimes
from bascule.core.durations import cumulative
from bascule.server.status import HELP, BrokerStatus, MemoryStatus

#: Queues in a slice of a metric.
SLICE: Final = 256
#: Metric, its help, and the field of QueueStatus.
QUEUE_METRICS = (
    ("bascule_queue_messages", "Messages in the queue", "messages"),
    ("bascule_queue_bytes", "Size of the messages in the queue", "bytes"),
    ("bascule_queue_delivering", "Messages delivered to consumers and not settled", "delivering"),
    ("bascule_queue_delayed", "Messages whose delivery time has not come", "delayed"),
    ("bascule_queue_consumers", "Consumers of the queue", "consumers"),
)
#: Metric, its help, and the field of RetentionHoldStatus.
PIN_METRICS = (
    ("bascule_journal_pinned_records", "Records of the journal that a pipeline or another keeper still needs", "records"),
    ("bascule_journal_pinned_bytes", "Size of the records of the journal that a pipeline or another keeper still needs", "bytes"),
)
#: Metric, its help, and the field of UserStatus.
USER_METRICS = (
    ("bascule_user_connections", "Connections of a user", "connections"),
    ("bascule_user_sessions", "Sessions of a user", "sessions"),
    ("bascule_user_links", "Producers and consumers of a user", "links"),
    ("bascule_user_transactions", "Open local transactions of a user", "transactions"),
    ("bascule_user_queues", "Queues and subscriptions that a connected user has created", "queues"),
    ("bascule_user_durable_subscriptions", "Durable subscriptions that a connected user has created", "durable_subscriptions"),
)
#: Metric, its help, and the field of MemoryStatus.
MEMORY_METRICS = (
    ("bascule_memory_limit_bytes", "Memory that the broker may use for its clients", "limit_bytes"),
    ("bascule_memory_used_bytes", "Memory that the broker uses for its clients", "used_bytes"),
    ("bascule_spill_bytes", "Size of the spill files", "spill_bytes"),
    ("bascule_spill_limit_bytes", "Limit on the size of the spill files", "spill_limit_bytes"),
)


class StatusCollector(Collector):
    """A collector that turns a status into metrics."""

    def __init__(self, status: BrokerStatus) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics of the status."""
        return self._metrics(sys.maxsize)

    def slices(self) -> Iterator[Metric]:
        """Yield all metrics of the status. Those of queues and users are divided into several of the same name."""
        return self._metrics(SLICE)

    def _metrics(self, most: int) -> Iterator[Metric]:
        """Yield all metrics, with at most this number of queues, users or keepers in each."""
        status = self._status
        yield GaugeMetricFamily("bascule_serving", "1 while the broker serves clients", value=float(status["serving"]))
        for name, value in status["gauges"].items():
            yield GaugeMetricFamily(f"bascule_{name}", HELP[name], value=value)
        for name, value in status["counters"].items():
            yield CounterMetricFamily(f"bascule_{name}", HELP[name], value=value)
        yield from _memory_metrics(status["memory"])
        yield from _sliced(QUEUE_METRICS, {"queue": "name", "address": "address"}, status["queues"], most)
        yield from _sliced(USER_METRICS, {"user": "user"}, status["users"], most)
        yield from _sliced(PIN_METRICS, {"keeper": "keeper", "name": "name"}, status["pins"], most)


def _sliced(
    metrics: Sequence[tuple[str, str, str]], labels: Mapping[str, str], entries: Sequence[Mapping[str, Any]], most: int
) -> Iterator[Metric]:
    """Yield the metrics of entries. ``labels`` has the names of the labels with those of the fields."""
    for metric, text, field in metrics:
        remaining = iter(entries)
        part = list(islice(remaining, most))
        while True:
            family = GaugeMetricFamily(metric, text, labels=tuple(labels))
            for entry in part:
                family.add_metric([entry[label] for label in labels.values()], entry[field])
            yield family
            if not (part := list(islice(remaining, most))):
                break


class SendTimesCollector(Collector):
    """A collector of the times that senders wait."""

    def __init__(self, times: SendTimes) -> None:
        self._times = times

    def collect(self) -> Iterator[Metric]:
        """Yield the histogram."""
        yield HistogramMetricFamily(
            "bascule_send_acknowledgement_seconds",
            "Time from taking a persistent message, outside of a transaction, until the broker accepts it: it is then stored in Kafka",
            buckets=cumulative(BOUNDS_S, self._times.counts), sum_value=self._times.sum_s,
        )  # fmt: skip


def _memory_metrics(memory: MemoryStatus | None) -> Iterator[Metric]:
    if memory is None:
        return
    family = GaugeMetricFamily("bascule_memory_bytes", "Memory that the broker uses, by part", labels=("part",))
    for part, used_bytes in memory["parts"].items():
        family.add_metric((part,), used_bytes)
    yield family
    for metric, text, field in MEMORY_METRICS:
        yield GaugeMetricFamily(metric, text, value=memory[field])  # type: ignore[literal-required]
    yield GaugeMetricFamily(
        "bascule_producers_blocked", "1 while producers wait for memory or disk space", value=float(bool(memory["blocked"]))
    )
