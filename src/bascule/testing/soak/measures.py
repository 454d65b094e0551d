"""What can be seen from outside while a soak goes on, every second: depth of the queues, memory, size of the journal."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from bascule.testing.soak.site import Site

INTERVAL_S = 1.0
MIB = 1 << 20


class Sample(NamedTuple):
    """One look: when (s since the epoch), and what was to be seen; a broker that does not answer tells nothing of its queues."""

    at_s: float
    backlog: int | None  # messages in all queues, of whoever serves
    rss_mib: Mapping[str, float]  # by part that runs
    journal_mib: float


class Measures(threading.Thread):
    """Looks until it is stopped."""

    def __init__(self, site: Site) -> None:
        super().__init__(name="measures", daemon=True)
        self.samples: list[Sample] = []
        self._site = site
        self._journal = site.kafka.data_dir / "data" / f"{site.plan.prefix}.journal-0"
        self._stopping = threading.Event()

    def stop(self) -> None:
        """No more looks."""
        self._stopping.set()
        self.join()

    def run(self) -> None:
        """Look, and look again."""
        while not self._stopping.wait(INTERVAL_S):
            pids = {name: part.pid() for name, part in self._site.parts.items()}
            rss = {name: rss_mib(pid) for name, pid in pids.items() if pid is not None}
            self.samples.append(
                Sample(time.time(), self._backlog(), {name: size for name, size in rss.items() if size}, self._journal_mib())
            )

    def _backlog(self) -> int | None:
        depths = self._site.depths()
        return None if depths is None else sum(depths.values())

    def _journal_mib(self) -> float:
        size_bytes = 0
        for file in self._journal.glob("*"):
            try:
                size_bytes += file.stat().st_blocks * 512  # Kafka's indexes are files with holes
            except FileNotFoundError:
                continue
        return size_bytes / MIB


def rss_mib(pid: int) -> float:
    """Resident memory of a process; 0 when it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS:")), 0.0)
