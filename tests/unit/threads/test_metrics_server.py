"""The server of metrics, and peers that do not speak HTTP."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bascule.core.errors import Unavailable
from bascule.threads import metrics_server
from bascule.threads.metrics_server import CONNECTIONS_MAX, MetricsServer
from tests.support.speed import SLOWNESS

SOON_S = 30.0 * SLOWNESS


class One(Collector):
    def collect(self) -> Iterator[Metric]:
        """Yield a metric with a label that must be escaped."""
        gauge = GaugeMetricFamily("one", "", labels=("name",))
        gauge.add_metric(('a"b\\c\nd',), 1)
        yield gauge


@pytest.fixture
def server() -> Iterator[MetricsServer]:
    server = MetricsServer(One(), 0, "127.0.0.1")
    yield server
    server.close()


def text_of(server: MetricsServer, host: str = "127.0.0.1") -> str:
    with urlopen(f"http://{host}:{server.port}/metrics", timeout=SOON_S) as answer:
        return str(answer.read().decode())


def connected(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=SOON_S)


def test_peers_that_send_nothing_do_not_keep_prometheus_out(server: MetricsServer) -> None:
    with ExitStack() as stack:
        silent = [stack.enter_context(connected(server)) for _ in range(CONNECTIONS_MAX)]
        assert 'one{name="a\\"b\\\\c\\nd"} 1.0' in text_of(server)
        assert silent[0].recv(1) == b"", "the oldest connection was not ended"
        silent[-1].sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert silent[-1].recv(15) == b"HTTP/1.0 200 OK"


def test_slow_peer_is_disconnected(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.01)
    server = MetricsServer(One(), 0, "127.0.0.1")
    with connected(server) as slow:
        slow.sendall(b"GET /met")
        assert slow.recv(1) == b""
    server.close()
    assert capfd.readouterr().err == ""


def test_connections_end_with_the_server() -> None:
    server = MetricsServer(One(), 0, "127.0.0.1")
    with connected(server) as silent:
        text_of(server)  # it is served after the silent connection
        server.close()
        assert silent.recv(1) == b""


def test_failed_thread_of_metrics_server_refuses_connections(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A server that accepts connections and answers none would keep Prometheus waiting."""

    def fail(*_: object) -> None:
        raise AssertionError("injected")

    monkeypatch.setattr(metrics_server._BoundedServer, "service_actions", fail)
    server = MetricsServer(One(), 0, "127.0.0.1")
    server._thread.join(SOON_S)
    with pytest.raises(ConnectionRefusedError):
        connected(server)
    assert "thread failed thread=metrics" in caplog.text
    server.close()


def test_host_may_be_a_name_or_missing() -> None:
    for host in ("localhost", ""):
        server = MetricsServer(One(), 0, host)
        assert "one{" in text_of(server, "localhost")
        server.close()


def test_unknown_host_is_reported() -> None:
    with pytest.raises(Unavailable, match="could not serve metrics at no\\.such\\.host\\.invalid:0"):
        MetricsServer(One(), 0, "no.such.host.invalid")


def test_health_checks_answer_beside_the_metrics() -> None:
    server = MetricsServer(One(), 0, "127.0.0.1", {"/livez": lambda: (True, "alive"), "/readyz": lambda: (False, "the driver starts")})
    try:
        assert "one{" in text_of(server)
        with urlopen(f"http://127.0.0.1:{server.port}/livez", timeout=SOON_S) as answer:
            assert (answer.status, answer.read()) == (200, b"alive\n")
        with pytest.raises(HTTPError) as caught:
            urlopen(f"http://127.0.0.1:{server.port}/readyz", timeout=SOON_S)
        with caught.value as refused:
            assert (refused.code, refused.read()) == (503, b"the driver starts\n")
    finally:
        server.close()
