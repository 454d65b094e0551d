"""The stacks of all threads of a process that seems to hang, by a signal: ``kill -USR1 PID``."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
from pathlib import Path
from typing import Final, TextIO

#: A directory: stacks are appended to its file ``PID.txt``, in place of standard error.
STACKS_VARIABLE: Final = "BASCULE_STACKS"
STACKS_SIGNAL: Final = signal.SIGUSR1

_files: list[TextIO] = []  # kept open: the handler has no more than the file's number


def show_stacks_on_signal() -> None:
    """From now on SIGUSR1 makes this process write the stack of each of its threads, whatever they do, and go on.

    Signals are not forwarded: a process started by fork writes to the same file, another one calls this itself.
    """
    if directory := os.environ.get(STACKS_VARIABLE):
        _files.append(Path(directory, f"{os.getpid()}.txt").open("a"))  # noqa: SIM115 - for as long as the process lives
    else:
        _files.append(sys.stderr)
    faulthandler.register(STACKS_SIGNAL, file=_files[-1], all_threads=True, chain=False)
