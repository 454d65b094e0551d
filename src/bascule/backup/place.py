"""The directory of a backup while the backup is made: nothing in it counts before the manifest is stored."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from bascule.backup.copies import FILES, MANIFEST, TOPICS
from bascule.config.private_file import PRIVATE, PRIVATE_DIRECTORY, make_private
from bascule.core.errors import InvalidInput

#: The file that says that the files beside it belong to a backup that is not complete. The process that makes the backup holds its lock.
INCOMPLETE: Final = "incomplete"


@contextmanager
def new_backup(directory: Path) -> Iterator[None]:
    """Prepare a directory for a backup. An earlier backup that was interrupted is deleted.

    If the block ends without an error, the directory is a backup. Raises InvalidInput if the directory has other content, which stays as
    it was, or cannot be written.
    """
    try:
        directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
        _check_free(directory)
        mark = directory / INCOMPLETE
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with os.fdopen(os.open(mark, flags, PRIVATE), "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidInput(f"another process makes a backup in {directory}") from None
            _check_not_finished(directory, mark)
            make_private(directory)
            for name in (TOPICS, FILES):
                with suppress(FileNotFoundError):
                    shutil.rmtree(directory / name)
            yield
            mark.unlink()
    except OSError as error:
        raise InvalidInput(f"the backup cannot be written to {directory}: {error.strerror or error}") from error


@contextmanager
def restored_backup(directory: Path) -> Iterator[None]:
    """Keep other processes of this machine from restoring the backup: each would delete topics of the other. Raises InvalidInput."""
    with (directory / MANIFEST).open("rb") as manifest:
        try:
            fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidInput(f"another process restores {directory}") from None
        except OSError:
            pass  # some network file systems have no lock for a file that is only read
        yield


def _check_free(directory: Path) -> None:
    """Raise InvalidInput if a directory has content that no interrupted backup has left."""
    content = {path.name for path in directory.iterdir()}
    if MANIFEST in content:
        raise InvalidInput(f"{directory} has a backup; choose another directory, or delete it")
    if content and INCOMPLETE not in content:
        raise InvalidInput(f"{directory} is not empty; choose an empty directory, or one that does not exist")


def _check_not_finished(directory: Path, mark: Path) -> None:
    """Raise InvalidInput if another process has completed its backup before this process had the lock."""
    if (directory / MANIFEST).exists():
        with suppress(FileNotFoundError):
            mark.unlink()
        raise InvalidInput(f"{directory} has a backup; choose another directory, or delete it")
