"""A snapshot: the broker's state at one confirmed sequence, without message bodies (which are in the journal).

Layout: u32 length of a JSON head, the head, then for each queue of the head its mids and counts as packed integers, then for each duplicate
window the digests and times that are in no segment, then the mids of messages in the store, then journal entries of the transaction
branches, then the segments of the windows. All integers are big endian. In version 1 a window has no segments.
"""

from __future__ import annotations

import json
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bascule.broker.ascending import has
from bascule.broker.remembered_ids import ID_SIZE_BYTES, SEGMENT_BYTES, RememberedIds, Segment
from bascule.journal.errors import DamagedRecord
from bascule.journal.offsets import OffsetMap
from bascule.journal.records import INDEX_BITS
from bascule.journal.sizes import JournalSizes

SNAPSHOT_VERSION = 2
_LENGTH = struct.Struct(">I")
#: Numbers that one call packs, which takes about 0.1 ms.
PACKED_NUMBERS = 4096


@dataclass(slots=True)
class Snapshot:
    """A decoded snapshot. ``next_offset`` is the first journal offset that it does not cover."""

    epoch: int
    sequence: int
    next_offset: int
    next_queue_id: int
    offsets: OffsetMap
    queues: list[dict[str, Any]]
    ingress: dict[int, int]
    mids: list[Sequence[int]] = field(default_factory=list)  # by queue, ascending
    counts: list[list[tuple[int, int]]] = field(default_factory=list)  # by queue: (mid, count)
    windows: dict[str, RememberedIds] = field(default_factory=dict)
    stored: list[int] = field(default_factory=list)  # ascending mids of messages in the store; all others are higher
    ingress_topic_id: str = ""  # empty in older snapshots
    branches: bytes = b""  # PREPARED and ENDED entries; complete, so that they need nothing of the journal
    plain_until_ms: int = 0  # as in DuplicateWindows; -1 in older snapshots, in which no digest contains a user

    @property
    def id(self) -> str:
        """Return the name of the snapshot in its topic and in its announcement."""
        return f"{self.epoch}-{self.sequence}"

    def oldest(self) -> tuple[int, dict[str, Any]] | None:
        """Return the oldest waiting message that is not in the store, and a queue that holds it."""
        firsts = ((next((mid for mid in mids if not has(self.stored, mid)), -1), number) for number, mids in enumerate(self.mids))
        mid, number = min((first for first in firsts if first[0] >= 0), default=(-1, -1))
        return None if mid < 0 else (mid, self.queues[number])

    def first_offset(self) -> int:
        """Return the offset where reading must begin, in order to load the bodies of all waiting messages."""
        oldest = self.oldest()
        return self.next_offset if oldest is None else self.offsets.offset_of(oldest[0] >> INDEX_BITS)


class EncodedSnapshot(NamedTuple):
    """The bytes of a snapshot: ``own``, followed by segments that other snapshots of the same epoch may share."""

    own: bytes
    segments: list[Segment]

    @property
    def size_bytes(self) -> int:
        """Return the number of all bytes."""
        return len(self.own) + sum(len(segment.packed) for segment in self.segments)

    def joined(self) -> bytes:
        """Return all bytes."""
        return b"".join([self.own, *(segment.packed for segment in self.segments)])


def encode(snapshot: Snapshot) -> EncodedSnapshot:
    """Return the bytes of a snapshot."""
    head = {
        "version": SNAPSHOT_VERSION, "epoch": snapshot.epoch, "sequence": snapshot.sequence, "next_offset": snapshot.next_offset,
        "next_queue_id": snapshot.next_queue_id, "starts": snapshot.offsets.starts, "deltas": snapshot.offsets.deltas,
        "sizes": [snapshot.offsets.sizes.offsets, snapshot.offsets.sizes.totals],
        "ingress": sorted(snapshot.ingress.items()),
        "ingress_topic_id": snapshot.ingress_topic_id,
        "mids": [len(mids) for mids in snapshot.mids], "counts": [len(counts) for counts in snapshot.counts],
        "stored": len(snapshot.stored), "branches": len(snapshot.branches), "plain_until_ms": snapshot.plain_until_ms,
        "windows": [
            [address, len(window.last), window.forgotten_bytes, len(window.segments)] for address, window in snapshot.windows.items()
        ],
    }  # fmt: skip
    # Encode queues one by one: a single call for 10,000 queues would hold the interpreter's lock, and block the broker, for too long.
    queues = ",".join(json.dumps(queue, separators=(",", ":")) for queue in snapshot.queues)
    encoded = f'{{"queues":[{queues}],{json.dumps(head, separators=(",", ":"))[1:]}'.encode()
    parts = [_LENGTH.pack(len(encoded)), encoded]
    for mids, counts in zip(snapshot.mids, snapshot.counts, strict=True):
        parts.extend(_packed(mids))
        parts.extend(_packed([number for pair in counts for number in pair]))
    parts.extend(window.last for window in snapshot.windows.values())
    parts.extend(_packed(snapshot.stored))
    parts.append(snapshot.branches)
    return EncodedSnapshot(b"".join(parts), [segment for window in snapshot.windows.values() for segment in window.segments])


def _unpacked(data: bytes) -> array[int]:
    """Return packed numbers, a million of which take 40 MB less than in a list. Raises ValueError if the last one is cut."""
    numbers = array("Q")
    numbers.frombytes(data)
    if sys.byteorder == "little":
        numbers.byteswap()
    return numbers


def _packed(numbers: Sequence[int]) -> Iterator[bytes]:
    """Pack numbers in parts, since one call for a million numbers would take too long."""
    for start in range(0, len(numbers), PACKED_NUMBERS):
        part = numbers[start : start + PACKED_NUMBERS]
        if isinstance(part, array):
            if sys.byteorder == "little":
                part.byteswap()
            yield part.tobytes()
        else:
            yield struct.pack(f">{len(part)}Q", *part)


def queues_of(data: bytes) -> list[tuple[int, str, str]]:
    """Return id, name and address of each queue of a snapshot that :func:`encode` wrote, of any version. Raises DamagedRecord."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        return [
            (int(queue["id"]), str(queue["name"]), str(queue["address"])) for queue in json.loads(data[4 : 4 + length])["queues"]
        ]  # fmt: skip
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise DamagedRecord(f"snapshot: {error}") from error


def decode(data: bytes) -> Snapshot:
    """Return the snapshot that :func:`encode` wrote. Raises DamagedRecord."""
    try:
        (length,) = _LENGTH.unpack_from(data)
        head = json.loads(data[4 : 4 + length])
        if head["version"] > SNAPSHOT_VERSION:
            raise DamagedRecord(f"snapshot has format {head['version']}; this version of Bascule reads formats up to {SNAPSHOT_VERSION}")
        position = 4 + length
        snapshot = Snapshot(
            head["epoch"], head["sequence"], head["next_offset"], head["next_queue_id"],
            OffsetMap(head["starts"], head["deltas"], JournalSizes(*head.get("sizes", ([], [])))), head["queues"], dict(head["ingress"]),
            ingress_topic_id=head.get("ingress_topic_id", ""), plain_until_ms=head.get("plain_until_ms", -1),
        )  # fmt: skip
        for mid_count, count_count in zip(head["mids"], head["counts"], strict=True):
            snapshot.mids.append(_unpacked(data[position : position + 8 * mid_count]))
            position += 8 * mid_count
            numbers = struct.unpack_from(f">{2 * count_count}Q", data, position)
            snapshot.counts.append(list(zip(numbers[::2], numbers[1::2], strict=True)))
            position += 16 * count_count
        windows = head["windows"] if head["version"] > 1 else [[address, count * ID_SIZE_BYTES, 0, 0] for address, count in head["windows"]]
        for address, last_bytes, forgotten_bytes, _ in windows:
            snapshot.windows[address] = RememberedIds([], data[position : position + last_bytes], forgotten_bytes)
            position += last_bytes
        snapshot.stored = list(struct.unpack_from(f">{head['stored']}Q", data, position))
        position += 8 * head["stored"]
        snapshot.branches = data[position : position + head.get("branches", 0)]
        position += len(snapshot.branches)
        for address, _, _, segment_count in windows:
            for _ in range(segment_count):
                snapshot.windows[address].segments.append(Segment.of(data[position : position + SEGMENT_BYTES]))
                position += SEGMENT_BYTES
    except (struct.error, ValueError, KeyError, TypeError) as error:
        raise DamagedRecord(f"snapshot: {error}") from error
    if position != len(data):
        raise DamagedRecord(f"snapshot has {len(data)} bytes; its header says {position}")
    return snapshot
