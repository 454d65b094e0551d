"""The records of the store while a state is loaded: in a temporary file, so that a large store needs no memory for its messages."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Final

#: What is kept in memory before a file is made.
MEMORY_BYTES: Final = 4 << 20


class StoredValues(Mapping[int, bytes]):
    """Values by mid. Memory holds where each of them lies in the file. To be used by one thread, and to be closed."""

    def __init__(self, directory: Path | None = None) -> None:
        """``directory`` is made when a file is needed there; None for the system's directory of temporary files."""
        self._directory = directory
        self._file = SpooledTemporaryFile(MEMORY_BYTES, dir=None if directory is None else str(directory))  # noqa: SIM115
        #: Deletes the file, at the latest when nobody has the values any more.
        self.close = weakref.finalize(self, self._file.close)
        self._places: dict[int, tuple[int, int]] = {}  # where a value begins, and its size
        self._end = 0

    def keep(self, mid: int, value: bytes) -> None:
        """Keep a value, in place of an earlier one. Raises OSError."""
        if self._directory is not None and self._end + len(value) > MEMORY_BYTES:
            self._directory.mkdir(parents=True, exist_ok=True)
        self._file.seek(self._end)
        self._file.write(value)
        self._places[mid] = self._end, len(value)
        self._end += len(value)

    def forget(self, mid: int) -> None:
        """Keep no value for a mid."""
        self._places.pop(mid, None)

    def __getitem__(self, mid: int) -> bytes:
        start, size_bytes = self._places[mid]
        self._file.seek(start)
        return self._file.read(size_bytes)

    def __iter__(self) -> Iterator[int]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)
