"""A collector of OpenTelemetry: an HTTP server that takes the spans and metrics of processes in the protocol OTLP."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span as a process has exported it. Ids are in hex."""

    service: str
    name: str
    trace_id: str
    parent_id: str
    attributes: dict[str, Any]
    span_id: str


@dataclass(frozen=True, slots=True)
class CollectedMetric:
    """One export of a metric. ``kind`` is gauge, sum or histogram; ``points`` has the points with their attributes."""

    service: str
    instance: str
    name: str
    unit: str
    kind: str
    points: list[tuple[dict[str, Any], Any]]


class Collector:
    """The spans and metrics that have arrived. Enter it to serve."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        self.metrics: list[CollectedMetric] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                take = collector.take_metrics if self.path == "/v1/metrics" else collector.take
                take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def url(self) -> str:
        """Return the URL at which both are taken."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that make a process export to this collector, soon after each span, and the metrics every second."""
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": self.url, "OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "1000"}

    @property
    def metrics_environment(self) -> dict[str, str]:
        """Return the variables that make a process export its metrics alone, ten times a second."""
        return {"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": f"{self.url}/v1/metrics", "OTEL_METRIC_EXPORT_INTERVAL": "100"}

    def take(self, body: bytes) -> None:
        """Decode the spans of a request."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = next(each.value.string_value for each in resource.resource.attributes if each.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    trace, parent, own = (each.hex() for each in (span.trace_id, span.parent_span_id, span.span_id))
                    self.spans.append(CollectedSpan(service, span.name, trace, parent, _values(span.attributes), own))

    def take_metrics(self, body: bytes) -> None:
        """Decode the metrics of a request."""
        for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            described = _values(resource.resource.attributes)
            for scope in resource.scope_metrics:
                for metric in scope.metrics:
                    kind = metric.WhichOneof("data") or ""
                    points = [(_values(point.attributes), point) for point in getattr(metric, kind).data_points]
                    found = CollectedMetric(
                        described["service.name"], described["service.instance.id"], metric.name, metric.unit, kind, points
                    )
                    self.metrics.append(found)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="collector", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _values(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in attributes}
