"""The admin server: health, status and metrics of a broker by HTTP, read only, on loopback unless told otherwise.

GET /livez    200 while the process answers
GET /readyz   200 while the broker serves clients, else 503 with the reason
GET /status   everything, JSON
GET /queues   the queues, JSON
GET /metrics  Prometheus text
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, TypedDict

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from bascule.embedded.process import PortInUse

#: Prometheus' own text format.
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: An HTTP client that keeps its connection open must not hold the broker's end up.
STOP_TIMEOUT_S = 1

log = logging.getLogger(__name__)


class QueueStatus(TypedDict):
    """One queue."""

    name: str
    address: str
    routing: str  # anycast | multicast
    messages: int
    bytes: int
    delivering: int  # handed to consumers, not settled
    consumers: int


class Status(TypedDict):
    """What a broker says of itself. ``counters`` only grow while the process lives; names are snake case, with their unit."""

    bridge: str
    version: str
    state: str
    serving: bool
    reason: str  # why it does not serve; empty when it does
    queues: list[QueueStatus]
    gauges: dict[str, float]
    counters: dict[str, float]


class StatusProvider(Protocol):
    """A broker, as the admin server sees it."""

    def status(self) -> Status:
        """How it stands now; called on the event loop, must not wait."""


#: Metric, its help, and the field of QueueStatus.
QUEUE_METRICS = (
    ("bascule_queue_messages", "Messages in the queue", "messages"),
    ("bascule_queue_bytes", "Size of the messages in the queue", "bytes"),
    ("bascule_queue_delivering", "Messages handed to consumers and not settled", "delivering"),
    ("bascule_queue_consumers", "Consumers of the queue", "consumers"),
)


class _StatusCollector(Collector):
    """Turns a status into metrics when it is asked."""

    def __init__(self, provider: StatusProvider) -> None:
        self._provider = provider

    def collect(self) -> Iterator[Metric]:
        """All metrics of one status."""
        status = self._provider.status()
        yield GaugeMetricFamily("bascule_serving", "1 while the broker serves clients", value=float(status["serving"]))
        for name, value in status["gauges"].items():
            yield GaugeMetricFamily(f"bascule_{name}", name.replace("_", " "), value=value)
        for name, value in status["counters"].items():
            yield CounterMetricFamily(f"bascule_{name}", name.replace("_", " "), value=value)
        for metric, text, field in QUEUE_METRICS:
            family = GaugeMetricFamily(metric, text, labels=("queue", "address"))
            for queue in status["queues"]:
                family.add_metric((queue["name"], queue["address"]), queue[field])  # type: ignore[literal-required]
            yield family


def admin_app(provider: StatusProvider) -> Starlette:
    """The routes over one broker."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_StatusCollector(provider))

    async def livez(_request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def readyz(_request: Request) -> Response:
        status = provider.status()
        return PlainTextResponse("ok\n") if status["serving"] else PlainTextResponse(f"{status['reason'] or status['state']}\n", 503)

    async def status(_request: Request) -> Response:
        return JSONResponse(provider.status())

    async def queues(_request: Request) -> Response:
        return JSONResponse(provider.status()["queues"])

    async def metrics(_request: Request) -> Response:
        return Response(generate_latest(registry), headers={"content-type": METRICS_TYPE})

    return Starlette(routes=[Route(f"/{each.__name__}", each) for each in (livez, readyz, status, queues, metrics)])


class _Server(uvicorn.Server):
    """Leaves the process's signals to the process."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


class AdminServer:
    """The admin server on the event loop of its broker."""

    def __init__(self, provider: StatusProvider, *, host: str, port: int) -> None:
        """Takes the port at once (0 = any free one). Raises PortInUse."""
        try:
            self._socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            raise PortInUse(f"port {port} for admin on {host} cannot be used ({error.strerror}); choose another by --admin-port") from error
        self.port: int = self._socket.getsockname()[1]
        self._server = _Server(
            uvicorn.Config(
                admin_app(provider),
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=STOP_TIMEOUT_S,
            )
        )
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Serve from now on; call it on a running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._server.serve(sockets=[self._socket]), name="admin")

    async def stop(self) -> None:
        """Answer nobody any more."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task
        self._socket.close()
