"""Metrics in Prometheus' text format, made and sent in pieces: the text about 32,000 queues with long names has hundreds of megabytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

#: Prometheus' own text format.
METRICS_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
#: Bytes of text that are made at once and wait for a peer that reads slowly.
PIECE_BYTES: Final = 256 << 10


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
