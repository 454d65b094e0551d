"""The resources that processes and directories use, as Linux reports them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

MIB = 1 << 20
#: The unit in which ``stat`` counts disk usage, whatever the block size of the disk is.
_BLOCK_BYTES = 512
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int, what: Literal["VmRSS", "VmHWM"] = "VmRSS") -> float:
    """Return the resident memory of a process in MiB: now, or its maximum (``VmHWM``). Raises OSError if the process has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(f"process {pid} has ended")  # the process waits for its parent to read its exit status


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far, of all threads. Raises OSError if the process has ended."""
    return _cpu_s(Path(f"/proc/{pid}/stat"))


def main_thread_cpu_s(pid: int) -> float:
    """Return the processor time of the first thread, which in a broker runs the event loop. Raises OSError if the process has ended."""
    return _cpu_s(Path(f"/proc/{pid}/task/{pid}/stat"))


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def disk_mib(directory: Path) -> float:
    """Return the disk usage of the files below a directory in MiB; Kafka's indexes are sparse files. 0 if the directory does not exist."""
    size_bytes = 0
    for file in directory.rglob("*"):
        try:
            size_bytes += file.stat().st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue  # deleted meanwhile
    return size_bytes / MIB
