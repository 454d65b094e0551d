"""Positions in Kafka: reading the compacted topic that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bascule.kafka.compacted import READ_TIMEOUT_S, Stored, TableReader
from bascule.writer.position import Position, PositionLost


class PositionReader:
    """Reads partitions of the positions to their high watermarks, each time from where it stopped the last time."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, partitions: Sequence[int]) -> None:
        self._topic = topic
        self._table = TableReader(kafka, topic, partitions)

    def read(self, timeout_s: float = READ_TIMEOUT_S) -> dict[str, Position]:
        """All positions of the partitions, as of now, by key.

        "Now" is the high watermark when the call begins, not the last stable offset: a reader that stops there can miss its own last
        commit behind a neighbour's open transaction. Raises Unavailable when that offset is not reached in time, PositionLost with the
        place of what is no position.
        """
        return dict(self._decoded(key, stored) for key, stored in self._table.read(timeout_s).items())

    def _decoded(self, key: bytes, stored: Stored) -> tuple[str, Position]:
        try:
            return key.decode(), Position.decode(stored.value)
        except (UnicodeDecodeError, PositionLost) as error:
            raise PositionLost(f"{stored.place(self._topic, key)}: no position: {error}") from error

    def close(self) -> None:
        """Frees the client."""
        self._table.close()
