"""Message bodies that memory has no room for: files of one run of the broker, a cache of what the journal has."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from bascule.core.defaults import SPILL_BYTES, SPILL_FREE_BYTES
from bascule.core.log import get_log

log = get_log(__name__)

#: A file is deleted when nobody needs any of it: small enough to come free, large enough not to be many.
SEGMENT_BYTES = 64 << 20
#: Files at least, however small the limit is: those that are full come free one by one.
SEGMENTS_MIN = 16
#: Short of disk space from this part of the limit on, until no more than the second part is used, or so much more than asked for is free:
#: a gap, so that producers do not stop and go on all the time.
SHORT_AT, ENOUGH_AT, ENOUGH_FREE = 0.9, 0.8, 1.25
#: Written at once: a call of the system for each body would be most of the cost.
WRITE_BYTES = 256 << 10
_OFFSET_BITS = 32


class SpillFiles:
    """A body store on local files of ``limit_bytes`` in all, which leave ``free_min_bytes`` of their file system free.

    A handle is ``segment << 32 | offset``. ``shortage`` says why it has, or will soon have, no room; "" while it has.
    """

    def __init__(self, directory: Path, limit_bytes: int = SPILL_BYTES, free_min_bytes: int = SPILL_FREE_BYTES) -> None:
        shutil.rmtree(directory, ignore_errors=True)  # of an earlier run: worthless
        directory.parent.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.limit_bytes = limit_bytes
        self.free_min_bytes = free_min_bytes
        self.shortage = ""
        self._segment_bytes = min(SEGMENT_BYTES, max(1, limit_bytes // SEGMENTS_MIN))
        self._closed_bytes = 0  # size of the files that are full
        self._sizes: dict[int, int] = {}  # of these files
        self._files: dict[int, int] = {}
        self._live: dict[int, int] = {}  # bodies still needed, by segment
        self._segment = -1
        self._end = self._segment_bytes
        self._unwritten = bytearray()  # the last bytes of the current segment
        self._full = False  # the last body found no room

    def _path(self, segment: int) -> Path:
        return self._directory / f"bodies-{segment}"

    def put(self, body: bytes) -> int:
        """Keep ``body``; returns its handle. Raises OSError when there is no room: nothing is kept then."""
        try:
            self._check_room(len(body))
            if self._end >= self._segment_bytes:
                self._next_segment()
            if len(self._unwritten) >= WRITE_BYTES:
                self._write()
        except OSError as error:
            if not self._full:
                log.error("no room for message bodies, they stay in memory", directory=self._directory, error=error)
            self._full = True
            raise
        self._full = False
        handle = self._segment << _OFFSET_BITS | self._end
        self._unwritten += body
        self._end += len(body)
        self._live[self._segment] += 1
        return handle

    @property
    def used_bytes(self) -> int:
        """Size of the files, and of what is about to be written."""
        return self._closed_bytes + (self._end if self._segment >= 0 else 0)

    def free_bytes(self) -> int:
        """What is free on the file system. Raises OSError."""
        found = os.statvfs(self._directory.parent)
        return found.f_bavail * found.f_frsize

    def _check_room(self, size_bytes: int) -> None:
        if self.used_bytes + size_bytes > self.limit_bytes:
            raise OSError(errno.ENOSPC, f"spill files of {self.used_bytes} bytes; broker.spill_bytes allows {self.limit_bytes}")
        if len(self._unwritten) >= WRITE_BYTES and (free := self.free_bytes()) < self.free_min_bytes:
            raise OSError(errno.ENOSPC, f"{free} bytes are free on its file system; broker.spill_free_bytes keeps {self.free_min_bytes}")

    def look(self) -> str:
        """Whether there is room, as ``shortage`` says it from now on. Raises nothing: a disk that cannot be asked has no room."""
        try:
            self.shortage = self._judge(self.free_bytes())
        except OSError as error:
            self.shortage = f"spill files in {self._directory}: {error}"
        return self.shortage

    def _judge(self, free_bytes: int) -> str:
        used, limit = self.used_bytes, self.limit_bytes
        if used > (ENOUGH_AT if self.shortage else SHORT_AT) * limit:
            return f"spill files take {used} of {limit} bytes (broker.spill_bytes)"
        if free_bytes < self.free_min_bytes * (ENOUGH_FREE if self.shortage else 1):
            return f"{free_bytes} bytes are free where spill files are, less than {self.free_min_bytes} (broker.spill_free_bytes)"
        return ""

    def _write(self) -> None:
        start = self._end - len(self._unwritten)
        written = os.pwrite(self._files[self._segment], self._unwritten, start)
        if written != len(self._unwritten):
            raise OSError(f"spill file {self._path(self._segment)}: {written} of {len(self._unwritten)} bytes written")
        self._unwritten.clear()

    def get(self, handle: int, size_bytes: int) -> bytes:
        """The body behind a handle. Raises OSError."""
        segment, start = handle >> _OFFSET_BITS, handle & ((1 << _OFFSET_BITS) - 1)
        if segment == self._segment:
            first = start - (self._end - len(self._unwritten))
            if first >= 0:
                return bytes(self._unwritten[first : first + size_bytes])
        body = os.pread(self._files[segment], size_bytes, start)
        if len(body) != size_bytes:
            raise OSError(f"spill file {self._path(segment)}: {len(body)} of {size_bytes} bytes at {start}")
        return body

    def free(self, handle: int, size_bytes: int) -> None:  # noqa: ARG002 - the port tells the size
        """The body will not be asked for again."""
        segment = handle >> _OFFSET_BITS
        self._live[segment] -= 1
        if not self._live[segment] and segment != self._segment:
            self._drop(segment)

    def _next_segment(self) -> None:
        full = self._segment
        if self._unwritten:
            self._write()
        self._directory.mkdir(parents=True, exist_ok=True)
        self._files[full + 1] = os.open(self._path(full + 1), os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        if full >= 0:
            self._sizes[full] = self._end
            self._closed_bytes += self._end
        self._segment = full + 1
        self._live[self._segment] = 0
        self._end = 0
        if full >= 0 and not self._live[full]:
            self._drop(full)

    def _drop(self, segment: int) -> None:
        os.close(self._files.pop(segment))
        del self._live[segment]
        self._closed_bytes -= self._sizes.pop(segment, 0)
        self._path(segment).unlink(missing_ok=True)

    def close(self) -> None:
        """Delete everything."""
        for segment in list(self._files):
            self._drop(segment)
        shutil.rmtree(self._directory, ignore_errors=True)
