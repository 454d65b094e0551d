"""A server of metrics for Prometheus, in a thread. Needs the extra ``metrics``."""

from __future__ import annotations

from bascule.core.extras import require

require("metrics")

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.registry import Collector

from bascule.core.errors import Unavailable


class MetricsServer:
    """Serves http://HOST:PORT/metrics until the process ends, or until ``close``."""

    def __init__(self, collector: Collector, port: int, host: str) -> None:
        """Begin to serve the metrics of ``collector``. Port 0 selects a free port. Raises Unavailable."""
        registry = CollectorRegistry()
        registry.register(collector)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise Unavailable(f"could not serve metrics at {host}:{port}: {error}") from error
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
