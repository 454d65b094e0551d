"""Files and directories that only their owner may read. Files are replaced so that a reader sees the old content or the new one."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

#: Only the owner may read and write.
PRIVATE: Final = 0o600
PRIVATE_DIRECTORY: Final = 0o700
#: Files that a process creates with this mask are for their owner alone.
PRIVATE_UMASK: Final = 0o077


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
    store_entries(place.parent)


def store_entries(directory: Path) -> None:
    """Return when the names of the files in a directory survive a crash of the machine. Raises OSError."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _make_private(place: Path, draft: int) -> None:
    """Set the mode and, if root writes, the owner of the file or of its directory, which may be the user of the broker."""
    os.fchmod(draft, PRIVATE)
    if os.geteuid() == 0:
        owner = (place if place.exists() else place.parent).stat()
        os.fchown(draft, owner.st_uid, owner.st_gid)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock a file against other writers, by a file beside it, since the file itself is replaced. Raises OSError."""
    with os.fdopen(os.open(path.with_name(f"{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, PRIVATE), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_private(directory: Path) -> None:
    """Create a directory of Bascule, or take the rights of other users from it. Raises OSError."""
    directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    if readable_by_others(directory):
        directory.chmod(PRIVATE_DIRECTORY)


def readable_by_others(path: Path) -> bool:
    """Return whether its mode lets other users, or a group, use the file or directory. Raises OSError."""
    return bool(stat.S_IMODE(path.stat().st_mode) & PRIVATE_UMASK)
