"""How far endpoints are behind their sources, asked for when somebody reads the metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from bascule.adapter.inbound.activation import ActivationStatus
from bascule.adapter.inbound.state import Place
from bascule.core.errors import Unavailable
from bascule.core.lag_times import LagTimes
from bascule.kafka.history import StableEnds
from bascule.kafka.record_sizes import RecordSizes

#: Timeout, in seconds, of the request for the ends of all sources: less than that of Prometheus.
ENDS_TIMEOUT_S: Final = 3.0


@dataclass(frozen=True, slots=True)
class EndpointLag:
    """The records that an endpoint has not read: their number, and estimates of their size and of the age of the oldest one.

    A figure is None if it is not known.
    """

    records: int | None = None
    size_bytes: int | None = None
    seconds: float | None = None


class EndpointLags:
    """Asks Kafka for the ends of the sources of all endpoints at once. Thread-safe. Clients are made at the first use."""

    def __init__(self, kafka: Mapping[str, Any]) -> None:
        self._ends = StableEnds(kafka)
        self._sizes = RecordSizes(kafka)
        self._times = LagTimes()
        self._lock = threading.Lock()

    def look(self, statuses: Sequence[ActivationStatus]) -> dict[str, EndpointLag]:
        """Return the lag of each endpoint, by group. Waits for Kafka for some seconds at most."""
        held = {(status.group, place): offset for status in statuses for place, offset in status.positions.items()}
        with self._lock:
            ends: Mapping[tuple[str, int], int] = {}
            with suppress(Unavailable):  # the figures are unknown then
                ends = self._ends.of({place for _, place in held}, ENDS_TIMEOUT_S)
            waiting: dict[tuple[str, int], tuple[int, int]] = {}
            for (_, place), offset in held.items():
                if place in ends:
                    waiting[place] = min(offset, waiting.get(place, (offset, 0))[0]), ends[place]
            sizes = self._sizes.look(waiting)
            positions = {f"{group}/{place}": (place, offset) for (group, place), offset in held.items()}
            ages_s = self._times.look(positions, ends, time.monotonic())
        return {status.group: _lag(status.group, status.positions, ends, sizes, ages_s) for status in statuses}


def _lag(
    group: str, positions: Mapping[Place, int], ends: Mapping[tuple[str, int], int], sizes: Mapping[tuple[str, int], float],
    ages_s: Mapping[str, float],
) -> EndpointLag:  # fmt: skip
    if not positions.keys() <= ends.keys():
        return EndpointLag()
    behind = {place: ends[place] - offset for place, offset in positions.items() if ends[place] > offset}
    size = round(sum(count * sizes[place] for place, count in behind.items())) if behind.keys() <= sizes.keys() else None
    return EndpointLag(sum(behind.values()), size, max((ages_s[f"{group}/{place}"] for place in positions), default=0.0))
