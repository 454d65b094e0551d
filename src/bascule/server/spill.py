"""Message bodies that memory has no room for: files of one run of the broker, a cache of what the journal has."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from bascule.core.log import get_log

log = get_log(__name__)

#: A file is deleted when nobody needs any of it: small enough to come free, large enough not to be many.
SEGMENT_BYTES = 64 << 20
#: Written at once: a call of the system for each body would be most of the cost.
WRITE_BYTES = 256 << 10
_OFFSET_BITS = 32


class SpillFiles:
    """A body store on local files. A handle is ``segment << 32 | offset``."""

    def __init__(self, directory: Path) -> None:
        shutil.rmtree(directory, ignore_errors=True)  # of an earlier run: worthless
        self._directory = directory
        self._files: dict[int, int] = {}
        self._live: dict[int, int] = {}  # bodies still needed, by segment
        self._segment = -1
        self._end = SEGMENT_BYTES
        self._unwritten = bytearray()  # the last bytes of the current segment
        self._full = False  # the last body found no room

    def _path(self, segment: int) -> Path:
        return self._directory / f"bodies-{segment}"

    def put(self, body: bytes) -> int:
        """Keep ``body``; returns its handle. Raises OSError when the disk is full: nothing is kept then."""
        try:
            if self._end >= SEGMENT_BYTES:
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

    def _write(self) -> None:
        start = self._end - len(self._unwritten)
        written = os.pwrite(self._files[self._segment], self._unwritten, start)
        if written != len(self._unwritten):
            raise OSError(f"spill file {self._path(self._segment)}: {written} of {len(self._unwritten)} bytes written")
        self._unwritten.clear()

    def get(self, handle: int, size_bytes: int) -> bytes:
        """The body behind a handle."""
        segment, start = handle >> _OFFSET_BITS, handle & ((1 << _OFFSET_BITS) - 1)
        if segment == self._segment:
            first = start - (self._end - len(self._unwritten))
            if first >= 0:
                return bytes(self._unwritten[first : first + size_bytes])
        return os.pread(self._files[segment], size_bytes, start)

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
        self._segment = full + 1
        self._live[self._segment] = 0
        self._end = 0
        if full >= 0 and not self._live[full]:
            self._drop(full)

    def _drop(self, segment: int) -> None:
        os.close(self._files.pop(segment))
        del self._live[segment]
        self._path(segment).unlink(missing_ok=True)

    def close(self) -> None:
        """Delete everything."""
        for segment in list(self._files):
            self._drop(segment)
        shutil.rmtree(self._directory, ignore_errors=True)
