"""The export of a process's metrics to OpenTelemetry: switched on and configured by its standard environment variables.

No module of OpenTelemetry is loaded while the export is off. A fault of the export is logged, and stops nothing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from bascule import __version__
from bascule.core.errors import BasculeError, InvalidInput
from bascule.core.log import get_log
from bascule.threads.lasting import lasting_thread
from bascule.tracing.environment import METRICS, exporters_of, new_exporters, resource_of

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter
    from opentelemetry.sdk.resources import Resource
    from prometheus_client import Metric as Family

log = get_log(__name__)

_INTERVAL: Final = "OTEL_METRIC_EXPORT_INTERVAL", 60_000.0
_TIMEOUT: Final = "OTEL_METRIC_EXPORT_TIMEOUT", 30_000.0
#: Longest wait for the last export when the process ends, in seconds.
LAST_EXPORT_S: Final = 2.0


class MetricsExport:
    """Exports metrics in a thread of its own, at an interval and once when it is closed."""

    def __init__(
        self, exporters: Iterable[MetricExporter], resource: Resource, collect: Callable[[float], Iterable[Family]],
        *, interval_ms: float, timeout_ms: float, since_ns: int,
    ) -> None:  # fmt: skip
        """Begin to export what ``collect`` returns; its argument is a timeout in seconds, after which it raises TimeoutError.

        ``since_ns`` is the time, in ns since 1970, at which the counters were 0; 0 = unknown.
        """
        self._exporters = tuple(exporters)
        self._resource = resource
        self._collect = collect
        self._interval_s = interval_ms / 1000
        self._timeout_ms = timeout_ms
        self._since_ns = since_ns
        self._closing = threading.Event()
        self._thread = lasting_thread(
            self._run, "metrics-export", on_failure=lambda error: log.error("metrics export is off", reason=error)
        )
        self._thread.start()

    def close(self) -> None:
        """Export once more, and stop. Waits LAST_EXPORT_S at most."""
        self._closing.set()
        self._thread.join(LAST_EXPORT_S)
        for exporter in self._exporters:
            try:
                exporter.shutdown()
            except Exception as error:
                log.warning("metrics exporter not closed", reason=repr(error))

    def _run(self) -> None:
        while not self._closing.wait(self._interval_s):
            self._export()
        self._export()

    def _export(self) -> None:
        """Export the metrics of now. A receiver that refuses them gets those of the next time."""
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        from bascule.tracing.bridge import bridged

        try:
            families = self._collect(self._timeout_ms / 1000)
            metrics = list(bridged(families, self._since_ns, time.time_ns()))
            scope = ScopeMetrics(InstrumentationScope("bascule", __version__), metrics, "")
            data = MetricsData([ResourceMetrics(self._resource, [scope], "")])
            for exporter in self._exporters:
                exporter.export(data, timeout_millis=self._timeout_ms)
        except Exception as error:
            log.warning("metrics not exported", reason=repr(error))


def metrics_export_of(
    environment: Mapping[str, str], service: str, collect: Callable[[float], Iterable[Family]], *, since_ns: int
) -> MetricsExport | None:
    """Return the running export that an environment asks for; None if it is off. Raises InvalidInput, MissingExtra.

    ``service`` is the name of the service, if the environment has none. For ``collect`` and ``since_ns`` see MetricsExport.
    """
    interval_ms, timeout_ms = _milliseconds(environment, *_INTERVAL), _milliseconds(environment, *_TIMEOUT)
    exporters = new_exporters(environment, METRICS)
    if not exporters:
        return None
    resource = resource_of(environment, service)
    return MetricsExport(exporters, resource, collect, interval_ms=interval_ms, timeout_ms=timeout_ms, since_ns=since_ns)


def _milliseconds(environment: Mapping[str, str], name: str, default: float) -> float:
    text = environment.get(name) or str(default)
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < threading.TIMEOUT_MAX:
        raise InvalidInput(f"{name} is {text!r}, and must be a number of milliseconds")
    return found


def process_metrics_export(service: str, collect: Callable[[float], Iterable[Family]], *, since_ns: int) -> MetricsExport | None:
    """Return the running export of this process's metrics; None if it is off, or cannot begin. The caller closes it."""
    try:
        export = metrics_export_of(os.environ, service, collect, since_ns=since_ns)
    except (BasculeError, ImportError) as error:
        log.error("metrics export is off", reason=error)
        return None
    if export is not None:
        log.info("metrics export is on", service=service, exporters=",".join(exporters_of(os.environ, METRICS)))
    return export
