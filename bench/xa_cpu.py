"""Processor time of processes, from Linux's ``/proc``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

_TICK_MS: Final = 1000 / os.sysconf("SC_CLK_TCK")
#: Fields of ``/proc/PID/stat`` behind the name of the command: parent; ticks of the process, and of its children that have ended.
_PARENT, _TICKS = 1, slice(11, 15)


def processor_ms(pids: Iterable[int]) -> float:
    """Return the processor time of processes and of their children, in milliseconds. PostgreSQL has a child for each session."""
    wanted = set(pids)
    total = 0
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        try:
            fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        if int(process.name) in wanted or int(fields[_PARENT]) in wanted:
            total += sum(map(int, fields[_TICKS]))
    return total * _TICK_MS
