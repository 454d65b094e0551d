"""The server and the export of a driver's metrics. Needs the extra ``metrics`` if they are served or exported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.tracing.environment import METRICS, exporters_of
from bascule.tracing.metrics import process_metrics_export

if TYPE_CHECKING:
    from bascule.pipelines.metrics import PipelineMetrics
    from bascule.threads.metrics_server import MetricsServer

log = get_log(__name__)


@contextmanager
def metrics_of(port: int | None, host: str) -> Iterator[PipelineMetrics | None]:
    """Serve and export metrics of a driver, and yield them; None if neither is asked for. Raises Unavailable, MissingExtra.

    They are served if there is a port (0 = any free port), and exported to OpenTelemetry if the environment asks for it.
    """
    if port is None and not exporters_of(os.environ, METRICS):
        yield None
        return
    from bascule.pipelines.metrics import PipelineMetrics

    metrics = PipelineMetrics()
    with ExitStack() as ends:
        if port is not None:
            ends.callback(_served(metrics, port, host).close)
        # The counters of the pipelines are stored with their positions, and are older than this process.
        export = process_metrics_export("bascule-pipelines", lambda _timeout_s: metrics.collect(), since_ns=0)
        if export is not None:
            ends.callback(export.close)
        yield metrics


def _served(metrics: PipelineMetrics, port: int, host: str) -> MetricsServer:
    from bascule.threads.metrics_server import MetricsServer

    try:
        server = MetricsServer(metrics, port, host)
    except Unavailable as error:
        raise Unavailable(f"{error}. Choose another pipelines.metrics_port, or unset it") from error
    log.info("metrics are served", url=f"http://{host}:{server.port}/metrics")
    return server
