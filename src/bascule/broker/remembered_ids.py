"""The ids of a duplicate window as a snapshot stores them: packed digests and times, in segments that never change."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Set
from hashlib import blake2b
from typing import Final, NamedTuple

from bascule.journal.records import DIGEST_SIZE

#: A digest, and the time of acceptance in ms since the epoch.
ID: Final = struct.Struct(f">{DIGEST_SIZE}sq")
ID_SIZE_BYTES: Final = ID.size
TIME_SIZE_BYTES: Final = ID_SIZE_BYTES - DIGEST_SIZE
#: Ids of a segment: a record of 24 KiB in the topic of snapshots, and 20 records for a window of the usual length.
SEGMENT_IDS: Final = 1024
SEGMENT_BYTES = SEGMENT_IDS * ID_SIZE_BYTES


class Segment(NamedTuple):
    """Consecutive ids of one window, which never change again: packed digests and times, and a name derived from them."""

    name: bytes
    packed: bytes

    @classmethod
    def of(cls, packed: bytes) -> Segment:
        """Return the segment that consists of packed ids."""
        return cls(segment_name(packed), packed)


def segment_name(packed: bytes) -> bytes:
    """Return the name of a segment: a digest of its ids, so that different segments have different names."""
    return blake2b(packed, digest_size=DIGEST_SIZE).digest()


class RememberedIds(NamedTuple):
    """The ids of one window in a snapshot: full segments, the packed ids behind them, and the number of forgotten bytes at the start."""

    segments: list[Segment]
    last: bytes
    forgotten_bytes: int = 0

    def ids(self) -> Iterator[tuple[bytes, int]]:
        """Return digests and times in ms since the epoch, oldest first."""
        return ID.iter_unpack(self._packed()[self.forgotten_bytes :])

    def _packed(self) -> bytes:
        return b"".join([*(segment.packed for segment in self.segments), self.last])

    def without(self, unconfirmed: Set[bytes]) -> RememberedIds:
        """Return a copy without the ids in ``unconfirmed``. Segments before the first such id stay as they are."""
        kept: list[Segment] = []
        for segment in self.segments:
            if any(digest in unconfirmed for digest, _ in ID.iter_unpack(segment.packed)):
                break
            kept.append(segment)
        forgotten_bytes = self.forgotten_bytes if kept else 0
        rest = RememberedIds(self.segments[len(kept) :], self.last, 0 if kept else self.forgotten_bytes)
        packed = b"".join(ID.pack(digest, time_ms) for digest, time_ms in rest.ids() if digest not in unconfirmed)
        whole = len(packed) - len(packed) % SEGMENT_BYTES
        kept.extend(Segment.of(packed[start : start + SEGMENT_BYTES]) for start in range(0, whole, SEGMENT_BYTES))
        return RememberedIds(kept, packed[whole:], forgotten_bytes)
