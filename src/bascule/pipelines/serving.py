"""The server of a driver's metrics. Needs the extra ``metrics`` if they are served."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bascule.core.errors import Unavailable
from bascule.core.log import get_log

if TYPE_CHECKING:
    from bascule.pipelines.metrics import PipelineMetrics

log = get_log(__name__)


@contextmanager
def metrics_of(port: int | None, host: str) -> Iterator[PipelineMetrics | None]:
    """Serve metrics of a driver, and yield them; None without a port. Port 0 selects a free port. Raises Unavailable, MissingExtra."""
    if port is None:
        yield None
        return
    from bascule.pipelines.metrics import PipelineMetrics
    from bascule.threads.metrics_server import MetricsServer

    metrics = PipelineMetrics()
    try:
        server = MetricsServer(metrics, port, host)
    except Unavailable as error:
        raise Unavailable(f"{error}. Choose another pipelines.metrics_port, or unset it") from error
    log.info("metrics are served", url=f"http://{host}:{server.port}/metrics")
    try:
        yield metrics
    finally:
        server.close()
