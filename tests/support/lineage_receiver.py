"""A receiver of OpenLineage events on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self


class LineageReceiver:
    """The events that have arrived. Enter it to serve. ``answer`` returns the status of each answer; 201 takes the event."""

    def __init__(self, answer: Callable[[], int] = lambda: 201) -> None:
        self.events: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                status = answer()
                if status == 201:
                    receiver.paths.add(self.path)
                    receiver.events.append(json.loads(body))
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def types(self, job: str) -> list[str]:
        """Return the types of the events of a job, in order."""
        return [event["eventType"] for event in list(self.events) if event["job"]["name"] == job]

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, name="receiver", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
