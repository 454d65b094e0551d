"""The stacks of all threads of a process that seems to hang, on request by a signal: ``kill -USR1 PID``."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from functools import cache
from pathlib import Path
from typing import Final

#: A directory: stacks are appended to its file ``PID.txt`` instead of standard error.
STACKS_VARIABLE: Final = "BASCULE_STACKS"
STACKS_SIGNAL: Final = signal.SIGUSR1


def show_stacks_on_signal() -> None:
    """Make this process write the stacks of all threads on SIGUSR1 and continue.

    A process started by fork writes to the same file; another process must call this function itself.
    """
    directory = os.environ.get(STACKS_VARIABLE)
    file = _opened(Path(directory, f"{os.getpid()}.txt")) if directory else sys.stderr
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)


@cache
def _opened(path: Path) -> int:
    """Return a descriptor that appends to a file. It stays open until the process ends, because the signal may come at any time."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
