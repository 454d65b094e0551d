"""The page of metrics, made from the collectors of the product: docs/reference/metrics.md.

python -m tests.support.metrics_page       # writes the page
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from prometheus_client.registry import Collector

from bascule.adapter.inbound import ResourceAdapter
from bascule.adapter.inbound.metrics import AdapterCollector
from bascule.broker.send_times import SendTimes
from bascule.config.settings import Settings
from bascule.pipelines.metrics import PipelineMetrics
from bascule.server.stalls import StallWatch
from bascule.server.status import HELP, BrokerStatus, MemoryStatus
from bascule.server.status_metrics import SendTimesCollector, StatusCollector
from bascule.server.tls_watch import TlsWatch
from bascule.threads.process_metrics import ProcessMetrics
from bascule.xa.metrics import TransactionCollector

PAGE: Final = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
HEAD: Final = """# Metrics

This page lists each metric that Bascule exports for Prometheus. `python -m tests.support.metrics_page` generates it from the code, and a
test compares the page with the code. A counter begins at 0 when its process starts, unless its section says otherwise. A histogram has
the series `NAME_bucket` (label `le`), `NAME_count` and `NAME_sum`. The
[alert rules and boards](../guides/deploy-kubernetes.md#monitor) use these metrics. Broker and pipelines can also
[export them to OpenTelemetry](../guides/tracing.md#export-metrics).
"""
#: Gauges of the status of a broker; the other names in HELP are counters.
GAUGES: Final = frozenset({
    "connections", "handshakes", "journal_offset", "journal_foreign_records", "ingress_foreign_records", "standby", "watches_elected",
    "queues", "transactions_open", "branches_prepared", "epoch", "journal_sequence", "journal_in_flight_bytes", "memory_bodies_bytes",
    "spilled_bodies_bytes", "snapshot_timestamp_seconds", "snapshot_bytes",
})  # fmt: skip
UNITS: Final = {"_timestamp_seconds": "seconds since 1970 (UTC)", "_seconds": "seconds", "_bytes": "bytes"}


class Section(NamedTuple):
    """A process or program, and where it serves its metrics."""

    title: str
    text: str
    collectors: tuple[Collector, ...]


class DocumentedMetric(NamedTuple):
    """A metric, as the page shows it."""

    name: str
    type: str
    labels: tuple[str, ...]
    unit: str
    text: str

    @property
    def row(self) -> str:
        """Return the row of the table."""
        labels = ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{self.name}` | {self.type} | {labels} | {self.unit} | {self.text} |"


def sections() -> tuple[Section, ...]:
    """Return the sections of the page."""
    return (
        Section(
            "Broker",
            "A broker serves these metrics at `/metrics` of its [admin port](../guides/operations.md#monitor-metrics).",
            (StatusCollector(_full_status()), StallWatch(loading=lambda: False), SendTimesCollector(SendTimes()), TlsWatch(Settings())),
        ),
        Section(
            "Pipelines",
            "A driver serves these metrics at `http://HOST:PORT/metrics` if `pipelines.metrics_port` is set\n"
            "([guide](../guides/pipelines.md#monitor-pipelines)). `pipeline` is `divert:NAME` or `ingress:NAME`. `task` is the task that\n"
            "carries it: `diverts` (the default group), `group:NAME`, `divert:NAME` (a divert with a position of its own) or\n"
            "`ingress:NAME`. The counters of records, bytes and dead letters, and the histograms, are stored in Kafka with the positions:\n"
            "they continue after a restart, and count each record once.",
            (PipelineMetrics(),),
        ),
        Section(
            "Resource adapter",
            "Your program serves these metrics ([guide](../guides/adapter.md#monitor-the-adapter-and-return-dead-letters)). They need the\n"
            "extra `metrics`.",
            (AdapterCollector(ResourceAdapter({})),),
        ),
        Section(
            "Transactions",
            "Your program serves these metrics ([guide](../guides/xa.md#monitor-transactions)). They need the extra `metrics`.",
            (TransactionCollector(),),
        ),
        Section(
            "Every process",
            "The broker, the driver, and `serve_metrics` of the adapter and of transactions serve these metrics, too. Those with the\n"
            "prefix `process_` have the names that other programs use; they need Linux. The processes that Spark starts are not included:\n"
            "Java, and the Python workers of a task. The registry of a program usually has these metrics already, so `AdapterCollector`\n"
            "and `TransactionCollector` do not have them.",
            (ProcessMetrics(),),
        ),
    )


def _full_status() -> BrokerStatus:
    memory = MemoryStatus(limit_bytes=0, used_bytes=0, blocked="", parts={}, spilled_bytes=0, spill_bytes=0, spill_limit_bytes=0)
    return BrokerStatus(
        bridge="", version="", build="", state="", serving=False, reason="", queues=[], pins=[], users=[], branches=[], memory=memory,
        gauges=dict.fromkeys(GAUGES, 0.0), counters=dict.fromkeys(HELP.keys() - GAUGES, 0.0),
    )  # fmt: skip


def documented(section: Section) -> Iterator[DocumentedMetric]:
    """Yield the metrics of a section."""
    for collector in section.collectors:
        for family in collector.collect():
            name = f"{family.name}_total" if family.type == "counter" else family.name
            unit = next((unit for suffix, unit in UNITS.items() if family.name.endswith(suffix)), "")
            yield DocumentedMetric(name, family.type, tuple(getattr(family, "_labelnames", ())), unit, family.documentation.rstrip("."))


def page() -> str:
    """Return the text of the page."""
    text = HEAD
    for section in sections():
        rows = sorted(documented(section))
        text += f"\n## {section.title}\n\n{section.text}\n\n| metric | type | labels | unit | meaning |\n| --- | --- | --- | --- | --- |\n"
        text += "".join(f"{each.row}\n" for each in rows)
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
