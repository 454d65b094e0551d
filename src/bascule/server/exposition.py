"""Metrics in Prometheus' text format, made and sent in pieces: the text about 32,000 queues with long names has hundreds of megabytes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from bascule.server.admin_http import ABORT
from bascule.server.in_turns import beside

#: Prometheus' own text format.
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Bytes of text that are made at once and wait for a peer that reads slowly.
PIECE_BYTES: Final = 256 << 10
#: Longest time, in seconds, for an answer in pieces to be read. A peer that reads slowly keeps the figures in memory.
ANSWER_TIMEOUT_S: Final = 60.0


class _OneMetric(Collector):
    """A registry with one metric."""

    def __init__(self, metric: Metric) -> None:
        self._metric = metric

    def collect(self) -> Iterator[Metric]:
        """Yield the metric."""
        yield self._metric


def exposition(metrics: Iterable[Metric]) -> Iterator[bytes]:
    """Yield the text of metrics in pieces. Metrics of the same name that follow each other are parts of one."""
    before, size = "", 0
    piece: list[bytes] = []
    for metric in metrics:
        text = generate_latest(_OneMetric(metric))
        if metric.name == before:
            text = text.split(b"\n", 2)[2]  # without HELP and TYPE, which a metric has once
        before = metric.name
        piece.append(text)
        size += len(text)
        if size >= PIECE_BYTES:
            yield b"".join(piece)
            piece, size = [], 0
    yield b"".join(piece)


class PiecesAnswer(Response):
    """An answer that is made in another thread, one piece after the other, while the peer reads. The connection of a slow peer ends."""

    def __init__(self, pieces: Iterator[bytes], media_type: str, *, done: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        """Call ``done`` when the answer is sent or the peer is gone, and ``failed`` with an error while a piece is made."""
        super().__init__(headers={"content-type": media_type})
        del self.headers["content-length"]
        self._pieces = pieces
        self._done = done
        self._failed = failed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer."""
        try:
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                await self._send(scope, send)
        except Exception as error:
            if not isinstance(error, TimeoutError):
                self._failed(error)
            scope["state"][ABORT]()  # otherwise the answer would look complete to some clients
            while (await receive())["type"] != "http.disconnect":
                pass
        finally:
            self._done()

    async def _send(self, scope: Scope, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while scope["method"] != "HEAD" and (piece := await beside(self._next)):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    def _next(self) -> bytes:
        return next(self._pieces, b"")
