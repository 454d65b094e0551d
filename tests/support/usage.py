"""What processes and directories take of the machine, as Linux tells it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

MIB = 1 << 20
#: In which ``stat`` counts what a file takes of the disk, whatever the disk's own are.
_BLOCK_BYTES = 512
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def memory_mib(pid: int, what: Literal["VmRSS", "VmHWM"] = "VmRSS") -> float:
    """Resident memory of a process: now, or at its most (``VmHWM``). Raises OSError when it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{what}:"):
            return int(line.split()[1]) / 1024
    raise ProcessLookupError(f"process {pid} has ended")  # and waits for its parent to ask how


def cpu_s(pid: int) -> float:
    """Processor time of a process so far, all threads. Raises OSError when it has ended."""
    return _cpu_s(Path(f"/proc/{pid}/stat"))


def main_thread_cpu_s(pid: int) -> float:
    """The same of its first thread, which is that of a broker's event loop. Raises OSError when it has ended."""
    return _cpu_s(Path(f"/proc/{pid}/task/{pid}/stat"))


def _cpu_s(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def disk_mib(directory: Path) -> float:
    """What the files below a directory take of the disk; Kafka's indexes are files with holes. 0 when it is not there."""
    size_bytes = 0
    for file in directory.rglob("*"):
        try:
            size_bytes += file.stat().st_blocks * _BLOCK_BYTES
        except FileNotFoundError:
            continue  # deleted meanwhile
    return size_bytes / MIB
