"""Read positions from the compacted topic that holds them."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from bascule.core.kafka_records import Headers
from bascule.kafka.compacted import Stored, TableReader
from bascule.kafka.shared import SharedClients
from bascule.writer.carried import HEADER, NOTHING_CARRIED
from bascule.writer.position import Position, PositionLost
from bascule.writer.reading import READ_TIMEOUT_S


class PositionReader:
    """Reads partitions of the positions to their high watermarks, each time from the end of the previous read."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, partitions: Sequence[int], shared: SharedClients | None = None) -> None:
        """``shared`` are clients to use in place of own ones."""
        self._topic = topic
        self.table = TableReader(kafka, topic, partitions, shared=shared)

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

    @property
    def failed(self) -> bool:
        """Return True if a read has raised an error. A new reader may find another node."""
        return self.table.failed

    def rest(self) -> None:
        """Cost nothing until the next read. See ``TableReader.rest``."""
        self.table.rest()

    def close(self) -> None:
        """Free the clients."""
        self.table.close()


class PositionReaders:
    """Readers of the positions for short uses, one after the other. Thread-safe.

    A new reader reads its partitions from the beginning. One that is given back continues there, and one for each set of partitions is
    kept.
    """

    def __init__(self, kafka: Mapping[str, Any], topic: str) -> None:
        self._kafka, self._topic = kafka, topic
        #: The clients that all readers share, and others may use.
        self.shared = SharedClients(kafka)
        self._idle: dict[tuple[int, ...], PositionReader] = {}
        self._lock = threading.Lock()

    def take(self, partitions: Sequence[int]) -> PositionReader:
        """Return a reader that nobody else uses. The caller returns it with ``give_back``."""
        with self._lock:
            kept = self._idle.pop(tuple(partitions), None)
        return PositionReader(self._kafka, self._topic, partitions, self.shared) if kept is None else kept

    def give_back(self, reader: PositionReader) -> None:
        """Keep a reader for the next use, unless it has failed."""
        reader.rest()
        with self._lock:
            kept = not reader.failed and self._idle.setdefault(tuple(reader.table.partitions), reader) is reader
        if not kept:
            reader.close()

    @contextmanager
    def reading(self, partitions: Sequence[int]) -> Iterator[PositionReader]:
        """Return a reader for the time of a block."""
        reader = self.take(partitions)
        try:
            yield reader
        finally:
            self.give_back(reader)

    def close(self) -> None:
        """Free the shared clients, and the readers that nobody uses. A later use makes new ones."""
        with self._lock:
            idle, self._idle = self._idle, {}
        for reader in idle.values():
            reader.close()
        self.shared.close()


def headers_of(position: Position | None) -> Headers:
    """Return the headers of the record of a position: the counts of what was carried."""
    carried = NOTHING_CARRIED if position is None else position.carried
    return [] if carried == NOTHING_CARRIED else [(HEADER, carried.encode())]


def _carried(headers: Headers) -> bytes | None:
    value = next((value for name, value in headers if name == HEADER), None)
    return value.encode() if isinstance(value, str) else value
