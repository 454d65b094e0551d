"""Prometheus metrics of a transaction manager."""

from __future__ import annotations

from bascule.core.extras import require

require("metrics")

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from bascule.core.xa_codes import Code
from bascule.threads.metrics_server import MetricsServer
from bascule.xa.manager import TransactionManager
from bascule.xa.two_phase import TransactionStatus

#: The value of the label ``outcome``.
OUTCOMES = {
    TransactionStatus.COMMITTED: "committed",
    TransactionStatus.ROLLED_BACK: "rolled_back",
    TransactionStatus.IN_DOUBT: "in_doubt",
}
#: The value of the label ``kind``.
KINDS = {Code.XA_HEURCOM: "commit", Code.XA_HEURRB: "rollback", Code.XA_HEURMIX: "mixed", Code.XA_HEURHAZ: "hazard"}


class TransactionCollector(Collector):
    """Collects metrics. Register it in your program's registry: ``REGISTRY.register(TransactionCollector(manager))``."""

    def __init__(self, *managers: TransactionManager) -> None:
        """Collect metrics of ``managers``. All managers of a registry must be in one collector."""
        self._managers = managers

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics, labelled with the manager."""
        labels = ("manager",)
        ended = CounterMetricFamily(
            "bascule_xa_transactions", "Ended transactions, by the outcome reported to the application", labels=("manager", "outcome")
        )
        active = GaugeMetricFamily("bascule_xa_active", "Active transactions of this process", labels=labels)
        doubts = GaugeMetricFamily("bascule_xa_in_doubt", "Transactions that are not finished in all resources", labels=labels)
        oldest = GaugeMetricFamily(
            "bascule_xa_in_doubt_oldest_seconds", "Time since this process first found its oldest unfinished transaction", labels=labels
        )
        heuristics = GaugeMetricFamily(
            "bascule_xa_heuristics", "Heuristic outcomes in the decision log that are not forgotten", labels=("manager", "kind")
        )
        phases = HistogramMetricFamily("bascule_xa_phase_seconds", "Duration of each phase of a transaction", labels=("manager", "phase"))
        for manager in self._managers:
            now = manager.statistics()
            for status, outcome in OUTCOMES.items():
                ended.add_metric((manager.name, outcome), now.ended[status])
            active.add_metric((manager.name,), manager.active)
            doubts.add_metric((manager.name,), len(now.in_doubt))
            oldest.add_metric((manager.name,), max(now.in_doubt.values(), default=0.0))
            found = Counter(each.code for each in now.heuristics)
            for code, kind in KINDS.items():
                heuristics.add_metric((manager.name, kind), found[code])
            for phase, times in now.phases.items():
                phases.add_metric((manager.name, phase.value), times.buckets, times.sum_s)
        yield from (ended, active, doubts, oldest, heuristics, phases)


def serve_metrics(manager: TransactionManager, port: int, host: str = "127.0.0.1") -> int:
    """Serve http://HOST:PORT/metrics from a thread until the process ends. Return the port, which 0 selects freely. Raises Unavailable."""
    return MetricsServer(TransactionCollector(manager), port, host).port
