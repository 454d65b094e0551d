"""The lag of positions in seconds, from the ends of their sources that a driver has seen, and in bytes, from mean sizes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from bascule.core.kafka_records import Place
from bascule.writer.position import Position

#: Ends that are kept for one position. If there are more, every second one of the older half is forgotten: older times are less exact.
SAMPLES_MAX: Final = 32


class LagTimes:
    """Estimates how old the next record of each position is: it was written between two looks at the end of its source."""

    def __init__(self) -> None:
        #: The time and the end of each look, by key of the position. The first one may be before the position.
        self._seen: dict[str, list[tuple[float, int]]] = {}

    def look(self, positions: Mapping[str, tuple[Place, int]], ends: Mapping[Place, int], now_s: float) -> dict[str, float]:
        """Return the lag of each position, by key, whose end is known. ``positions`` has the source and offset of each.

        If a driver starts while a pipeline lags, the result is at least the time since then.
        """
        self._seen = {key: self._seen.get(key, []) for key in positions}
        return {key: self._lag(self._seen[key], offset, ends[place], now_s) for key, (place, offset) in positions.items() if place in ends}

    def _lag(self, seen: list[tuple[float, int]], offset: int, end: int, now_s: float) -> float:
        if not seen or end > seen[-1][1]:
            seen.append((now_s, end))
        elif end <= offset:
            seen[-1] = now_s, end
        while len(seen) > 1 and seen[1][1] <= offset:
            del seen[0]
        if len(seen) > SAMPLES_MAX:
            seen[1 : SAMPLES_MAX // 2] = seen[1 : SAMPLES_MAX // 2 : 2]
        if end <= offset:
            return 0.0
        (first_s, first_end), (next_s, next_end) = seen[0], seen[min(1, len(seen) - 1)]
        if first_end > offset:
            return now_s - first_s
        # The records between both looks count as written evenly.
        return now_s - (first_s + (next_s - first_s) * (offset + 1 - first_end) / max(1, next_end - first_end))


def waiting_in(positions: Iterable[Position], ends: Mapping[Place, int]) -> dict[Place, tuple[int, int]]:
    """Return the first offset that waits in each source, and the end of the source. Sources without a known end are left out."""
    waiting: dict[Place, tuple[int, int]] = {}
    for at in positions:
        place = at.topic, at.partition
        if place in ends:
            waiting[place] = min(at.offset, waiting.get(place, (at.offset, 0))[0]), ends[place]
    return waiting


def lag_bytes_of(positions: Iterable[Position], ends: Mapping[Place, int], sizes: Mapping[Place, float]) -> int | None:
    """Return the estimated size of the records behind positions, by the mean size of each source; None if one is not known."""
    total = 0.0
    for at in positions:
        place = at.topic, at.partition
        if place not in ends:
            return None
        if (waiting := ends[place] - at.offset) > 0:
            if place not in sizes:
                return None
            total += waiting * sizes[place]
    return round(total)
