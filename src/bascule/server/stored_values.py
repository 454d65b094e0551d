"""The records of the store while a state is loaded.

They are in a temporary file, so that a large store needs no memory for its messages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Final

#: Bytes that are kept in memory before a file is created.
MEMORY_BYTES: Final = 4 << 20


class StoredValues(Mapping[int, bytes]):
    """Values by mid. Memory holds only the place of each value in the file. Use this in one thread, and close it."""

    def __init__(self, directory: Path | None = None) -> None:
        """Create an empty mapping. ``directory`` is created when a file is needed; None is the system's directory of temporary files."""
        self._directory = directory
        self._file = SpooledTemporaryFile(MEMORY_BYTES, dir=None if directory is None else str(directory))  # noqa: SIM115
        #: Deletes the file, at the latest when the values are garbage collected.
        self.close = weakref.finalize(self, self._file.close)
        self._places: dict[int, tuple[int, int]] = {}  # start and size of each value
        self._end = 0

    def keep(self, mid: int, value: bytes) -> None:
        """Store a value, in place of an earlier one. Raises OSError."""
        if self._directory is not None and self._end + len(value) > MEMORY_BYTES:
            self._directory.mkdir(parents=True, exist_ok=True)
        self._file.seek(self._end)
        self._file.write(value)
        self._places[mid] = self._end, len(value)
        self._end += len(value)

    def forget(self, mid: int) -> None:
        """Remove the value of a mid."""
        self._places.pop(mid, None)

    def __getitem__(self, mid: int) -> bytes:
        start, size_bytes = self._places[mid]
        self._file.seek(start)
        return self._file.read(size_bytes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
