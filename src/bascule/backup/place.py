"""The directory of a backup while the backup is made: nothing in it counts before the manifest is stored."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from bascule.backup.copies import FILES, MANIFEST, TOPICS
from bascule.config.private_file import make_private
from bascule.core.errors import InvalidInput

#: The file that says that the files beside it belong to a backup that is not complete. The process that makes the backup holds its lock.
INCOMPLETE: Final = "incomplete"


@contextmanager
def new_backup(directory: Path) -> Iterator[None]:
    """Prepare a directory for a backup. An earlier backup that was interrupted is deleted.

    If the block ends without an error, the directory is a backup. Raises InvalidInput if the directory has other content.
    """
    try:
        make_private(directory)
        content = {path.name for path in directory.iterdir()}
        if MANIFEST in content:
            raise InvalidInput(f"{directory} has a backup; choose another directory, or delete it")
        if content and INCOMPLETE not in content:
            raise InvalidInput(f"{directory} is not empty; choose an empty directory, or one that does not exist")
        mark = directory / INCOMPLETE
        with mark.open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InvalidInput(f"another process makes a backup in {directory}") from None
            for name in (TOPICS, FILES):
                shutil.rmtree(directory / name, ignore_errors=True)
            yield
            mark.unlink()
    except OSError as error:
        raise InvalidInput(f"the backup cannot be written to {directory}: {error.strerror or error}") from error
