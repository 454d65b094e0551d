"""Spill files: message bodies that do not fit into memory. The files belong to one run of the broker; the journal has the same bodies."""

from __future__ import annotations

import errno
import os
import shutil
from array import array
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Final

from bascule.broker.message import BodyOwner
from bascule.broker.turns import Work
from bascule.config.private_file import PRIVATE_DIRECTORY, make_private
from bascule.core.defaults import MEMORY_BYTES, SPILL_BYTES, SPILL_FREE_BYTES
from bascule.core.log import get_log

log = get_log(__name__)

#: Size of a file, which is deleted when none of its bodies is needed: small enough to become free, large enough to keep the number low.
SEGMENT_BYTES: Final = 64 << 20
#: Least number of files, however small the limit is, since full files become free one by one.
SEGMENTS_MIN: Final = 16
#: Disk space counts as short from the first share of the limit on, until at most the second share is used, or until the third factor of the
#: required free space is free. The gap avoids quick alternation of producers.
SHORT_AT, ENOUGH_AT, ENOUGH_FREE = 0.9, 0.8, 1.25
#: Share of the room up to which bodies go to the files before memory is short. Beyond it, memory is used first: producers wait for neither.
ROOMY = 0.5
#: Bytes that are written at once: a system call for each body would be most of the cost.
WRITE_BYTES: Final = 256 << 10
#: Bytes that are read at once if bodies are read in the order of their arrival, as the consumer of a deep queue reads them.
READ_AHEAD_BYTES: Final = 64 << 10
#: From this size on, a body is written in later turns of the event loop, in pieces of WRITE_BYTES: to copy and write 64 MiB takes 100 ms.
LARGE_BYTES: Final = 1 << 20
#: Bodies that are stored together are written with what lies between them if this is at most so many times their size.
GAPS_FACTOR: Final = 1.25
#: Share of `broker.memory_bytes` for bodies that wait to be written. Further large bodies stay in memory; one may always wait.
WAITING_SHARE: Final = 0.25
#: Files may be this many times as large as the needed bodies (less if space is short), plus a few segments. If messages leave in the order
#: in which they came, files become free by themselves. Otherwise segments with few needed bodies are compacted.
WASTE_MAX: Final = 2.0
WASTE_SHORT_MAX: Final = 1.25
SLACK_SEGMENTS: Final = 2
#: Bytes that a body counts in addition: its place takes 16 bytes of memory until its file is deleted, so small bodies must not make long
#: indexes.
ENTRY_BYTES: Final = 64
#: Steps to copy one body, and bytes of it for one more step: the body is read and written again.
COPY_STEPS: Final = 10
BYTES_PER_STEP: Final = 500
#: Places without a body that are skipped in one piece.
PLACES_PER_PIECE: Final = 1000
_NUMBER_BITS: Final = 32
_NUMBER_MASK: Final = (1 << _NUMBER_BITS) - 1


class SpillSegment:
    """One file, and its bodies by number, in the order of their arrival."""

    __slots__ = ("end", "file", "live", "live_bytes", "owners", "path", "starts")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.end = 0  # size, including unwritten bytes
        self.live = 0  # number of needed bodies
        self.live_bytes = 0
        self.starts = array("Q")
        self.owners: list[BodyOwner | None] = []  # None for a body that is no longer needed

    @property
    def weight(self) -> int:
        """Return the cost of the segment: the size of the file, and the places of its bodies."""
        return self.end + ENTRY_BYTES * len(self.owners)

    @property
    def live_weight(self) -> int:
        """Return the part of the cost that the needed bodies cause."""
        return self.live_bytes + ENTRY_BYTES * self.live

    def drop(self) -> None:
        """Delete the file."""
        os.close(self.file)
        self.path.unlink(missing_ok=True)


class SpillFiles:
    """A body store in local files of ``limit_bytes`` in total, which leave ``free_min_bytes`` of their file system free.

    Of ``memory_bytes``, a share is for large bodies that wait to be written.
    A handle is ``segment << 32 | number``. ``shortage`` says why there is, or will soon be, no room; "" if there is.
    """

    def __init__(
        self, directory: Path, limit_bytes: int = SPILL_BYTES, free_min_bytes: int = SPILL_FREE_BYTES, memory_bytes: int = MEMORY_BYTES
    ) -> None:
        shutil.rmtree(directory, ignore_errors=True)  # files of an earlier run are worthless
        directory.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        self._directory = directory
        self.limit_bytes = limit_bytes
        self.free_min_bytes = free_min_bytes
        self.memory_bytes = memory_bytes
        self.shortage = ""
        self.roomy = True
        self._segment_bytes = min(SEGMENT_BYTES, max(1, limit_bytes // SEGMENTS_MIN))
        self._segments: dict[int, SpillSegment] = {}
        self._last: SpillSegment | None = None  # the segment that is being written
        self._last_number = -1
        self._unwritten = bytearray()  # the last bytes of that segment
        self._large: dict[int, bytes] = {}  # large bodies that are not written, by handle
        self.waiting_bytes = 0  # of these bodies
        #: Is called when a large body waits, and no other did: see ``writing``. Without it, large bodies are written at once.
        self.on_waiting: Callable[[], None] | None = None
        self.used_bytes = 0  # size of all files, including unwritten bytes
        self._full = False  # there was no room for the last body
        self._ahead = b""  # the last bytes that were read from a file, and their place: small bodies are written once
        self._ahead_number = -1
        self._ahead_start = 0

    def put(self, body: bytes, owner: BodyOwner) -> int:
        """Store ``body`` and return its handle. Raises OSError, and stores nothing, if there is no room."""
        size_bytes = len(body)
        segment = self._last
        # The usual case, without further calls: a starting broker may store a million bodies.
        if (
            segment is None
            or len(self._unwritten) >= WRITE_BYTES
            or size_bytes >= LARGE_BYTES
            or self.used_bytes + size_bytes > self.limit_bytes
            or segment.end + ENTRY_BYTES * len(segment.owners) >= self._segment_bytes
        ):
            segment = self._room_or_report(size_bytes)
        owners = segment.owners
        handle = self._last_number << _NUMBER_BITS | len(owners)
        segment.starts.append(segment.end)
        owners.append(owner)
        segment.end += size_bytes
        segment.live += 1
        segment.live_bytes += size_bytes
        self.used_bytes += size_bytes
        if size_bytes < LARGE_BYTES:
            self._unwritten += body
        else:
            self._put_large(handle, body)
        return handle

    def put_all(self, content: bytes, starts: Sequence[int], owners: Sequence[BodyOwner]) -> int:
        """Store bodies that have less than LARGE_BYTES together: a starting broker may store a million of them.

        The bodies begin at ``starts`` in ``content``, ascending. What lies between them is written too unless it is long, since a copy of
        each body would cost more. Return the handle of the first body, which the handles of the others follow. Raises OSError, and stores
        nothing, if there is no room.
        """
        sizes = [owner.size_bytes for owner in owners]
        first, end, size_bytes = starts[0], starts[-1] + sizes[-1], sum(sizes)
        if end - first > GAPS_FACTOR * size_bytes:
            content = b"".join([content[start : start + size] for start, size in zip(starts, sizes, strict=True)])
            starts, first, end = [*accumulate(sizes[:-1], initial=0)], 0, size_bytes
        segment = self._room_or_report(end - first, writes=True)
        try:
            self._write()
            _write_at(segment, memoryview(content)[first:end], segment.end)
        except OSError as error:
            self._report(error)
            raise
        handle, moved = self._last_number << _NUMBER_BITS | len(segment.owners), segment.end - first
        segment.starts.extend([start + moved for start in starts])
        segment.owners.extend(owners)
        segment.end += end - first
        segment.live += len(owners)
        segment.live_bytes += size_bytes
        self.used_bytes += end - first
        return handle

    def _put_large(self, handle: int, body: bytes) -> None:
        """Keep a body until it is written. The bytes before it are written."""
        self._large[handle] = body
        self.waiting_bytes += len(body)
        if self.on_waiting is None:
            for _ in self.writing():
                pass
        elif len(self._large) == 1:
            self.on_waiting()

    def writing(self) -> Work:
        """Write the large bodies that wait, in pieces. If the disk fails, they stay in memory until the next call."""
        while self._large:
            handle, body = next(iter(self._large.items()))
            segment = self._segments[handle >> _NUMBER_BITS]
            start = segment.starts[handle & _NUMBER_MASK]
            for position in range(0, len(body), WRITE_BYTES):
                piece = memoryview(body)[position : position + WRITE_BYTES]
                try:
                    _write_at(segment, piece, start + position)
                except OSError as error:
                    self._report(error)
                    return
                yield COPY_STEPS + len(piece) // BYTES_PER_STEP
                if handle not in self._large:  # freed meanwhile, perhaps with its segment
                    break
            else:
                self._written(handle)

    def _written(self, handle: int) -> None:
        body = self._large.pop(handle, None)
        self.waiting_bytes -= 0 if body is None else len(body)

    def _room_or_report(self, size_bytes: int, *, writes: bool = False) -> SpillSegment:
        """Return the segment for ``size_bytes`` more. Log the first error of several in a row. Raises OSError.

        ``writes``: the caller writes the bytes at once.
        """
        try:
            segment = self._room_for(size_bytes, writes)
        except OSError as error:
            self._report(error)
            raise
        self._full = False
        return segment

    def _report(self, error: OSError) -> None:
        if not self._full:
            log.error("message bodies not spilled, they stay in memory", directory=self._directory, error=error)
        self._full = True

    def _room_for(self, size_bytes: int, writes: bool) -> SpillSegment:
        """Return the segment for ``size_bytes`` more. Raises OSError."""
        self._check_room(size_bytes, writes)
        segment = self._last
        if segment is None or segment.weight >= self._segment_bytes:
            return self._next_segment()
        if len(self._unwritten) >= WRITE_BYTES or size_bytes >= LARGE_BYTES:
            self._write()
        return segment

    def free_bytes(self) -> int:
        """Return the free bytes of the file system, without those for bodies that wait to be written. Raises OSError."""
        found = os.statvfs(self._directory.parent)
        return found.f_bavail * found.f_frsize - self.waiting_bytes

    def _check_room(self, size_bytes: int, writes: bool) -> None:
        if self.used_bytes + size_bytes > self.limit_bytes:
            raise OSError(errno.ENOSPC, f"spill files use {self.used_bytes} bytes; broker.spill_bytes allows {self.limit_bytes}")
        if size_bytes >= LARGE_BYTES and self.waiting_bytes and self.waiting_bytes + size_bytes > WAITING_SHARE * self.memory_bytes:
            raise OSError(errno.EAGAIN, f"{self.waiting_bytes} bytes wait to be written to the spill files")
        writes = writes or size_bytes >= LARGE_BYTES or len(self._unwritten) >= WRITE_BYTES
        if writes and (free := self.free_bytes()) < self.free_min_bytes:
            raise OSError(
                errno.ENOSPC,
                f"{free} bytes are free on the disk of the spill files; broker.spill_free_bytes reserves {self.free_min_bytes}",
            )

    def look(self) -> str:
        """Update and return ``shortage``. Raises nothing: a disk that reports an error counts as full."""
        self.roomy = False
        try:
            free_bytes = self.free_bytes()
            self.shortage = self._judge(free_bytes)
            self.roomy = not self.shortage and self.used_bytes <= ROOMY * self.limit_bytes and free_bytes >= self.free_min_bytes / ROOMY
        except OSError as error:
            self.shortage = f"spill files in {self._directory}: {error}"
        return self.shortage

    def _judge(self, free_bytes: int) -> str:
        used, limit = self.used_bytes, self.limit_bytes
        if used > (ENOUGH_AT if self.shortage else SHORT_AT) * limit:
            return f"spill files use {used} of {limit} bytes (broker.spill_bytes)"
        if free_bytes < self.free_min_bytes * (ENOUGH_FREE if self.shortage else 1):
            return f"{free_bytes} bytes are free on the disk of the spill files, less than {self.free_min_bytes} (broker.spill_free_bytes)"
        return ""

    def _write(self) -> None:
        """Write the unwritten bytes. Raises OSError."""
        segment = self._last
        if segment is None or not self._unwritten:
            return
        _write_at(segment, self._unwritten, segment.end - len(self._unwritten))
        self._unwritten.clear()

    def get(self, handle: int, size_bytes: int) -> bytes:
        """Return the body with a handle. Raises OSError."""
        if self._large and (waiting := self._large.get(handle)) is not None:
            return waiting
        number = handle >> _NUMBER_BITS
        segment = self._segments[number]
        start = segment.starts[handle & _NUMBER_MASK]
        behind = start - self._ahead_start if number == self._ahead_number else -1
        if 0 <= behind <= len(self._ahead) - size_bytes and size_bytes < LARGE_BYTES:
            return self._ahead[behind : behind + size_bytes]
        written = segment.end
        if segment is self._last:
            written -= len(self._unwritten)
            if start >= written:
                return bytes(self._unwritten[start - written : start - written + size_bytes])
        follows = 0 <= behind <= len(self._ahead) + READ_AHEAD_BYTES
        wanted = min(READ_AHEAD_BYTES, written - start) if follows and size_bytes < READ_AHEAD_BYTES else size_bytes
        found = os.pread(segment.file, wanted, start)
        if len(found) < size_bytes:
            raise OSError(f"spill file {segment.path}: read {len(found)} of {size_bytes} bytes at offset {start}")
        if size_bytes >= READ_AHEAD_BYTES:
            return found
        self._ahead, self._ahead_number, self._ahead_start = found, number, start
        return found[:size_bytes]

    def free(self, handle: int, size_bytes: int) -> None:
        """Free the body with a handle, which nobody will ask for again."""
        if self._large:
            self._written(handle)
        number = handle >> _NUMBER_BITS
        segment = self._segments[number]
        segment.owners[handle & _NUMBER_MASK] = None
        segment.live -= 1
        segment.live_bytes -= size_bytes
        if not segment.live and segment is not self._last:
            self._drop(number)

    def _next_segment(self) -> SpillSegment:
        """Begin another file. Raises OSError."""
        self._write()
        make_private(self._directory)
        full, number = self._last, self._last_number
        self._last = SpillSegment(self._directory / f"bodies-{number + 1}")
        self._last_number = number + 1
        self._segments[number + 1] = self._last
        if full is not None and not full.live:
            self._drop(number)
        return self._last

    def _drop(self, number: int) -> None:
        segment = self._segments.pop(number)
        self.used_bytes -= segment.end
        segment.drop()

    # -- compaction --------------------------------------------------------------------------------------------------------

    @property
    def wasteful(self) -> bool:
        """Return True if the files are much larger than the needed bodies."""
        weight = live_weight = 0
        for segment in self._segments.values():
            weight += segment.weight
            live_weight += segment.live_weight
        waste_max = WASTE_SHORT_MAX if self.shortage else WASTE_MAX
        return weight > waste_max * live_weight + SLACK_SEGMENTS * self._segment_bytes

    def compaction(self) -> Work:
        """Copy the needed bodies of the emptiest segments, until the files are no longer wasteful. Raises OSError."""
        while self.wasteful:
            full = [number for number, segment in self._segments.items() if segment is not self._last]
            if not full:
                return
            emptiest = min(full, key=lambda number: self._segments[number].live_weight)
            yield from self._copy(self._segments[emptiest])

    def _copy(self, segment: SpillSegment) -> Work:
        """Copy the needed bodies of a segment. Its file is deleted with the last of them."""
        for place in range(len(segment.owners)):
            owner = segment.owners[place]
            if owner is not None:
                handle, size_bytes = owner.handle, owner.size_bytes
                owner.handle = self.put(self.get(handle, size_bytes), owner)
                self.free(handle, size_bytes)
                yield COPY_STEPS + size_bytes // BYTES_PER_STEP
            elif not place % PLACES_PER_PIECE:
                yield COPY_STEPS

    def close(self) -> None:
        """Delete all files."""
        for number in list(self._segments):
            self._drop(number)
        self._last = None
        self._unwritten.clear()
        self._large.clear()
        self.waiting_bytes = 0
        shutil.rmtree(self._directory, ignore_errors=True)


def _write_at(segment: SpillSegment, data: bytearray | memoryview, offset: int) -> None:
    """Write data to the file of a segment. Raises OSError."""
    written = os.pwrite(segment.file, data, offset)
    if written != len(data):
        raise OSError(f"spill file {segment.path}: wrote {written} of {len(data)} bytes")
