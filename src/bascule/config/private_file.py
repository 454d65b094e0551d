"""Files that only their owner may read, replaced so that a reader sees the old content or the new one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Only the owner may read and write.
PRIVATE: Final = 0o600


def replace_private(path: Path, content: bytes) -> None:
    """Replace the content of a file, or create it, with the mode 0600. If ``path`` is a symbolic link, its target is replaced.

    After the call, the new content survives a crash of the machine. Raises OSError.
    """
    place = path.resolve()
    draft = place.with_name(f"{place.name}.{os.getpid()}.new")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(draft, flags, PRIVATE), "wb") as file:
            _make_private(place, file.fileno())
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(place)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    directory = os.open(place.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _make_private(place: Path, draft: int) -> None:
    """Set the mode and, if root writes, the owner of the file or of its directory, which may be the user of the broker."""
    os.fchmod(draft, PRIVATE)
    if os.geteuid() == 0:
        owner = (place if place.exists() else place.parent).stat()
        os.fchown(draft, owner.st_uid, owner.st_gid)
