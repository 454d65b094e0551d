"""A collector of OpenTelemetry: an HTTP server that takes the spans of processes in the protocol OTLP."""

from __future__ import annotations

import gzip
import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """A span as a process has exported it. Ids are in hex."""

    service: str
    name: str
    trace_id: str
    parent_id: str
    attributes: dict[str, Any]


class Collector:
    """The spans that have arrived. Enter it to serve."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables that make a process export to this collector, soon after each span."""
        url = f"http://127.0.0.1:{self._server.server_address[1]}"
        return {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_BSP_SCHEDULE_DELAY": "100"}

    def take(self, body: bytes) -> None:
        """Decode the spans of a request."""
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = next(each.value.string_value for each in resource.resource.attributes if each.key == "service.name")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    attributes = {each.key: getattr(each.value, each.value.WhichOneof("value") or "") for each in span.attributes}
                    found = CollectedSpan(service, span.name, span.trace_id.hex(), span.parent_span_id.hex(), attributes)
                    self.spans.append(found)

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="collector", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
