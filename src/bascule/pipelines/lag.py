"""The lag of positions in bytes, from the ends of their sources and the mean sizes of records. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bascule.core.kafka_records import Place
from bascule.writer.position import Position


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
