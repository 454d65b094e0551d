"""The stacks of all threads of a process that seems to hang, on request by a signal: ``kill -USR1 PID``."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Final, TextIO

#: A directory: stacks are appended to its file ``PID.txt`` instead of standard error.
STACKS_VARIABLE: Final = "BASCULE_STACKS"
STACKS_SIGNAL: Final = signal.SIGUSR1

_files: list[TextIO] = []  # kept open, because the handler only has the file's descriptor


def show_stacks_on_signal() -> None:
    """Make this process write the stacks of all threads on SIGUSR1 and continue.

    A process started by fork writes to the same file; another process must call this function itself.
    """
    if directory := os.environ.get(STACKS_VARIABLE):
        _files.append(Path(directory, f"{os.getpid()}.txt").open("a"))  # noqa: SIM115 - open until the process ends
    else:
        _files.append(sys.stderr)
    faulthandler.register(STACKS_SIGNAL, file=_files[-1], all_threads=True, chain=False)
