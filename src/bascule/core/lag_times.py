"""The lag of positions in seconds, from the ends of their sources at earlier looks. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bascule.core.kafka_records import Place

#: Ends that are kept for one position. If there are more, every second one of the older half is forgotten: older times are less exact.
ENDS_KEPT: Final = 32


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
        if len(seen) > ENDS_KEPT:
            seen[1 : ENDS_KEPT // 2] = seen[1 : ENDS_KEPT // 2 : 2]
        if end <= offset:
            return 0.0
        (first_s, first_end), (next_s, next_end) = seen[0], seen[min(1, len(seen) - 1)]
        if first_end > offset:
            return now_s - first_s
        # The records between both looks count as written evenly.
        return now_s - (first_s + (next_s - first_s) * (offset + 1 - first_end) / max(1, next_end - first_end))
