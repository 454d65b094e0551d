"""The first and last offsets of many partitions, and their offsets at a time. Blocking."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from confluent_kafka.admin import OffsetSpec

from bascule.kafka.history import offsets_client, offsets_of

#: Topic and partition.
Place = tuple[str, int]


class Bounds(NamedTuple):
    """The first offset that is not deleted, and the offset behind the last record, whatever the state of its transaction."""

    first: int
    end: int


def bounds_of(kafka: Mapping[str, Any], places: Collection[Place], timeout_s: float) -> dict[Place, Bounds]:
    """Return the bounds of partitions. Those for which Kafka reports none are left out. Raises Unavailable."""
    if not places:
        return {}
    admin = offsets_client(kafka)
    ends = offsets_of(admin, places, OffsetSpec.latest(), timeout_s)
    firsts = offsets_of(admin, places, OffsetSpec.earliest(), timeout_s)
    return {place: Bounds(firsts[place], end) for place, end in ends.items() if place in firsts}


def offsets_at(kafka: Mapping[str, Any], places: Collection[Place], timestamp_ms: int, timeout_s: float) -> dict[Place, int]:
    """Return the first offset at or after a time. Partitions whose records are all older are left out. Raises Unavailable."""
    return offsets_of(offsets_client(kafka), places, OffsetSpec.for_timestamp(timestamp_ms), timeout_s) if places else {}
