"""The server and the export of a driver's metrics, with its health checks. Needs the extra ``metrics`` if they are served or exported."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Final

from bascule.core.errors import Unavailable
from bascule.core.log import get_log
from bascule.embedded.service_manager import NO_SERVICE_MANAGER, ServiceManager
from bascule.tracing.environment import METRICS, exporters_of
from bascule.tracing.metrics import process_metrics_export

if TYPE_CHECKING:
    from bascule.pipelines.metrics import PipelineMetrics
    from bascule.threads.metrics_server import MetricsServer

log = get_log(__name__)

#: A driver without progress for this time, in seconds, is not alive any more: WatchdogSec of the units of systemd.
NOT_ALIVE_S: Final = 300.0


@contextmanager
def metrics_of(port: int | None, host: str, service_manager: ServiceManager = NO_SERVICE_MANAGER) -> Iterator[PipelineMetrics | None]:
    """Serve and export metrics of a driver, and yield them; None if neither is asked for. Raises Unavailable, MissingExtra.

    They are served if there is a port (0 = any free port), and exported to OpenTelemetry if the environment asks for it. The server also
    answers ``/livez`` and ``/readyz``, from what the driver reports to ``service_manager``.
    """
    if port is None and not exporters_of(os.environ, METRICS):
        yield None
        return
    from bascule.pipelines.metrics import PipelineMetrics
    from bascule.threads.process_metrics import ProcessMetrics

    metrics, process = PipelineMetrics(), ProcessMetrics()
    with ExitStack() as ends:
        if port is not None:
            ends.callback(_served(metrics, port, host, health_of(service_manager)).close)
        # The counters of the pipelines are stored with their positions, and are older than this process.
        export = process_metrics_export("bascule-pipelines", lambda _timeout_s: chain(metrics.collect(), process.collect()), since_ns=0)
        if export is not None:
            ends.callback(export.close)
        yield metrics


def health_of(driver: ServiceManager) -> Mapping[str, Callable[[], tuple[bool, str]]]:
    """Return the health checks of a driver by their paths: whether the driver is healthy, and a line with the reason."""

    def live() -> tuple[bool, str]:
        idle_s = time.monotonic() - driver.alive_s
        return (True, "alive") if idle_s < NOT_ALIVE_S else (False, f"the driver has made no progress for {idle_s:.0f} s")

    def ready() -> tuple[bool, str]:
        return bool(driver.reported), driver.reported or "the driver is starting or stopping"

    return {"/livez": live, "/readyz": ready}


def _served(metrics: PipelineMetrics, port: int, host: str, health: Mapping[str, Callable[[], tuple[bool, str]]]) -> MetricsServer:
    from bascule.threads.metrics_server import MetricsServer

    try:
        server = MetricsServer(metrics, port, host, health)
    except Unavailable as error:
        raise Unavailable(f"{error}. Choose another pipelines.metrics_port, or unset it") from error
    log.info("metrics are served", url=f"http://{host}:{server.port}/metrics")
    return server
