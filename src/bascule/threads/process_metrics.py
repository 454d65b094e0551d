"""Prometheus metrics of a process, whatever it does: its build, and what it uses of the machine. Needs the extra ``metrics``."""

from __future__ import annotations

from bascule.core.extras import require

require("metrics")

import platform
import sys
import time
from collections.abc import Iterator

from prometheus_client import Metric, ProcessCollector
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from bascule import __version__
from bascule.core.build import build


class _ConfinedProcess(ProcessCollector):
    """Does not need ``/proc/stat``, which a unit with ``ProcSubset=pid`` hides: the collector would have no metric at all."""

    def _boot_time(self) -> float:
        if sys.platform != "linux":
            raise OSError("no process file system")
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


class ProcessMetrics(Collector):
    """Collects the build, and the memory, processor time, open files and start time of this process. The latter need Linux."""

    def __init__(self, proc: str = "/proc") -> None:
        """``proc`` is the directory where the kernel shows processes."""
        self._process = _ConfinedProcess(proc=proc, registry=None)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics."""
        info = GaugeMetricFamily(
            "bascule_build_info",
            "1; the labels have the version of Bascule, its build (compiled or interpreted) and the version of Python",
            labels=("version", "build", "python"),
        )
        info.add_metric((__version__, build(), platform.python_version()), 1)
        yield info
        yield from self._process.collect()
