"""Read positions from the compacted topic that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bascule.core.kafka_records import Headers
from bascule.kafka.compacted import Stored, TableReader
from bascule.writer.carried import HEADER, NOTHING_CARRIED
from bascule.writer.position import Position, PositionLost
from bascule.writer.reading import READ_TIMEOUT_S


class PositionReader:
    """Reads partitions of the positions to their high watermarks, each time from the end of the previous read."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, partitions: Sequence[int]) -> None:
        self._topic = topic
        self.table = TableReader(kafka, topic, partitions)

    def read(self, timeout_s: float = READ_TIMEOUT_S) -> dict[str, Position]:
        """Return all positions of the partitions by key, as some node knows them (``TableReader.read``). No decision may depend on them.

        The reader reads to the high watermark, not to the last stable offset, because an open transaction of another pipeline may hide
        its own last commit. Raises Unavailable if it does not reach that offset in time, and PositionLost with the place of a record
        that is not a position.
        """
        return self.decoded(self.table.read(timeout_s))

    def read_behind_barrier(self, timeout_s: float = READ_TIMEOUT_S) -> dict[str, Position]:
        """Return all positions of the partitions by key, whichever node answers (``TableReader.read_behind_barrier``).

        Raises Unavailable, PositionLost.
        """
        return self.decoded(self.table.read_behind_barrier(timeout_s))

    def decoded(self, table: Mapping[bytes, Stored]) -> dict[str, Position]:
        """Return the positions in a table that was read. Raises PositionLost."""
        return dict(self._decoded(key, stored) for key, stored in table.items())

    def _decoded(self, key: bytes, stored: Stored) -> tuple[str, Position]:
        try:
            return key.decode(), Position.decode(stored.value, _carried(stored.headers))
        except (UnicodeDecodeError, PositionLost) as error:
            raise PositionLost(f"{stored.place(self._topic, key)}: not a valid position: {error}") from error

    def rest(self) -> None:
        """Cost nothing until the next read. See ``TableReader.rest``."""
        self.table.rest()

    def close(self) -> None:
        """Free the clients."""
        self.table.close()


def headers_of(position: Position | None) -> Headers:
    """Return the headers of the record of a position: the counts of what was carried."""
    carried = NOTHING_CARRIED if position is None else position.carried
    return [] if carried == NOTHING_CARRIED else [(HEADER, carried.encode())]


def _carried(headers: Headers) -> bytes | None:
    value = next((value for name, value in headers if name == HEADER), None)
    return value.encode() if isinstance(value, str) else value
