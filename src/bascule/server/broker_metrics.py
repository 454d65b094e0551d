"""The export of a broker's metrics to OpenTelemetry, if the environment asks for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from itertools import chain

from prometheus_client import Metric
from prometheus_client.registry import Collector

from bascule.server.administrator import Administrator
from bascule.server.status_metrics import StatusCollector
from bascule.tracing.metrics import MetricsExport, process_metrics_export


def broker_metrics_export(broker: Administrator, collectors: Sequence[Collector]) -> MetricsExport | None:
    """Return the running export of what ``/metrics`` shows; None if it is off. Call this on the event loop, at the start of the process."""
    loop = asyncio.get_running_loop()

    def collect(timeout_s: float) -> Iterable[Metric]:
        status = asyncio.run_coroutine_threadsafe(broker.status(), loop).result(timeout_s)
        return chain.from_iterable(each.collect() for each in (StatusCollector(status), *collectors))

    return process_metrics_export("bascule-broker", collect, since_ns=time.time_ns())
