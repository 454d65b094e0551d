"""A server of metrics for Prometheus and of health checks, in a thread. Needs the extra ``metrics``."""

from __future__ import annotations

from bascule.core.extras import require

require("metrics")

import socket
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from socketserver import ThreadingMixIn
from types import MappingProxyType
from typing import Any, Final
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from bascule.core.errors import Unavailable
from bascule.threads.lasting import lasting_thread
from bascule.threads.process_metrics import ProcessMetrics

#: Connections at once: each has a thread. A further one ends the oldest, so that peers that send nothing do not keep Prometheus out.
CONNECTIONS_MAX: Final = 16
#: How long, in seconds, the server waits for the next bytes of a request, or for a peer that reads no answer.
PEER_TIMEOUT_S: Final = 10.0


class _Handler(WSGIRequestHandler):
    """One connection, which has one request."""

    timeout = PEER_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


class _BoundedServer(ThreadingMixIn, WSGIServer):
    """A thread for each connection, and few of them. The host must be an address, not a name."""

    daemon_threads = True
    request_queue_size = CONNECTIONS_MAX

    def __init__(self, family: int, host: str, port: int) -> None:
        self.address_family = family
        self._lock = threading.Lock()
        self._open: dict[int, socket.socket] = {}  # by identity, the oldest first
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a new connection, at the cost of the oldest one if there are too many."""
        with self._lock:
            if len(self._open) >= CONNECTIONS_MAX:
                _end(self._open.pop(next(iter(self._open))))
            self._open[id(request)] = request
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that has ended."""
        with self._lock:
            self._open.pop(id(request), None)
        super().shutdown_request(request)

    def end_connections(self) -> None:
        """End all connections."""
        with self._lock:
            for connection in self._open.values():
                _end(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore peers that leave or send nothing. Their threads have ended."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class MetricsServer:
    """Serves http://HOST:PORT/metrics until the process ends, or until ``close``."""

    def __init__(
        self, collector: Collector, port: int, host: str, health: Mapping[str, Callable[[], tuple[bool, str]]] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        """Begin to serve the metrics of ``collector`` and of this process. Port 0 selects a free port. Raises Unavailable.

        ``health`` has functions by path: whether the process is healthy (200, else 503), and the line of the answer.
        """
        registry = CollectorRegistry()
        registry.register(collector)
        registry.register(ProcessMetrics())
        try:
            family, _, _, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._server = _BoundedServer(family, str(address[0]), port)
        except OSError as error:
            raise Unavailable(f"could not serve metrics at {host}:{port}: {error}") from error
        metrics: WSGIApplication = make_wsgi_app(registry)

        def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
            if (check := health.get(environ["PATH_INFO"])) is None:
                return metrics(environ, start_response)
            well, line = check()
            start_response("200 OK" if well else "503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{line}\n".encode()]

        self._server.set_app(answer)
        self._thread = lasting_thread(self._server.serve_forever, "metrics", on_failure=self._failed)
        self._thread.start()
        self.port = int(self._server.server_port)

    def _failed(self, _error: BaseException) -> None:
        """Refuse connections, so that Prometheus and health checks notice the failure: the program goes on without this server."""
        self._server.server_close()

    def close(self) -> None:
        """Stop serving, and end the connections."""
        self._server.shutdown()
        self._server.server_close()
        self._server.end_connections()
        self._thread.join()


def _end(connection: socket.socket) -> None:
    with suppress(OSError):  # the peer has ended it
        connection.shutdown(socket.SHUT_RDWR)
