"""Samples of a running soak, every second: depth of the queues, memory, size of the journal, stalls."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple

from tests.soak.site import Site
from tests.support.stalls import StallLog
from tests.support.usage import disk_mib, memory_mib

INTERVAL_S = 1.0


class Sample(NamedTuple):
    """One sample with its time (s since the epoch). A broker that does not answer has no queues in it."""

    at_s: float
    backlog: int | None  # messages in all queues, of the serving broker
    rss_mib: Mapping[str, float]  # by running part
    journal_mib: float


class Measures(threading.Thread):
    """Samples until it is stopped."""

    def __init__(self, site: Site) -> None:
        super().__init__(name="measures", daemon=True)
        self.samples: list[Sample] = []
        self.stalls = StallLog()
        self._site = site
        self._journal = site.kafka.data_dir / "data" / f"{site.plan.prefix}.journal-0"
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Stop sampling."""
        self._stopping.set()
        self.join()

    def run(self) -> None:
        """Sample repeatedly."""
        while not self._stopping.wait(INTERVAL_S):
            pids = {name: part.pid() for name, part in self._site.parts.items()}
            rss: dict[str, float] = {}
            for name, pid in pids.items():
                with suppress(OSError):  # the process has just ended
                    if pid is not None:
                        rss[name] = memory_mib(pid)
            self.samples.append(Sample(time.time(), self._backlog(), rss, disk_mib(self._journal)))
            for name, metrics in self._site.metrics():
                if (pid := pids[name]) is not None and pid == self._site.parts[name].pid():  # not of a process that was started meanwhile
                    self.stalls.take(time.time(), name, pid, metrics)

    def _backlog(self) -> int | None:
        depths = self._site.depths()
        return None if depths is None else sum(depths.values())
