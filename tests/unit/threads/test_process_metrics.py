"""Each process that serves or exports metrics says which build it is, and what it uses of the machine."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

import bascule
from bascule.core.build import build
from bascule.threads.metrics_server import MetricsServer
from bascule.threads.process_metrics import ProcessMetrics
from tests.support.speed import SLOWNESS

SOON_S = 30.0 * SLOWNESS
NAMES = [
    "process_resident_memory_bytes", "process_virtual_memory_bytes", "process_cpu_seconds_total", "process_start_time_seconds",
    "process_open_fds", "process_max_fds",
]  # fmt: skip


class Nothing(Collector):
    def collect(self) -> Iterator[Metric]:
        """Yield no metric."""
        yield from ()


@pytest.fixture
def registry() -> CollectorRegistry:
    found = CollectorRegistry()
    found.register(ProcessMetrics())
    return found


def test_build_is_one_series_with_version_build_and_python(registry: CollectorRegistry) -> None:
    labels = {"version": bascule.__version__, "build": build(), "python": platform.python_version()}
    assert registry.get_sample_value("bascule_build_info", labels) == 1


def test_figures_are_those_of_this_process(registry: CollectorRegistry) -> None:
    before_s, used_s = time.time(), sum(os.times()[:2])
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    try:
        opened = registry.get_sample_value("process_open_fds")
    finally:
        for each in held:
            os.close(each)
    closed = registry.get_sample_value("process_open_fds")
    assert opened is not None
    assert closed is not None
    assert opened - closed >= 10, "other threads may open files meanwhile"
    begun_s = registry.get_sample_value("process_start_time_seconds")
    assert begun_s is not None
    assert before_s - 86_400 < begun_s < before_s + 2, "the start of the process, not of the machine or of the scrape"
    cpu_s, memory = registry.get_sample_value("process_cpu_seconds_total"), registry.get_sample_value("process_resident_memory_bytes")
    assert cpu_s is not None
    assert memory is not None
    assert cpu_s >= used_s - 0.1
    assert memory > 1 << 20
    assert registry.get_sample_value("process_max_fds")


def test_process_that_sees_only_processes_in_proc_has_all_figures(registry: CollectorRegistry, tmp_path: Path) -> None:
    # As with ProcSubset=pid of the broker's unit.
    (tmp_path / "self").symlink_to("/proc/self")
    confined = CollectorRegistry()
    confined.register(ProcessMetrics(str(tmp_path)))
    for name in NAMES:
        assert confined.get_sample_value(name) is not None, name
    begun_s = [each.get_sample_value("process_start_time_seconds") for each in (confined, registry)]
    assert begun_s[0] == pytest.approx(begun_s[1], abs=2)
    assert begun_s[0] == pytest.approx(time.time() - lived_s(), abs=5 * SLOWNESS)


def lived_s() -> float:
    """Return the age of this process as ps shows it."""
    return float(subprocess.run(["ps", "-o", "etimes=", "-p", str(os.getpid())], capture_output=True, text=True, check=True).stdout)


def test_server_of_metrics_shows_them_beside_those_of_its_program() -> None:
    server = MetricsServer(Nothing(), 0, "127.0.0.1")
    try:
        with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=SOON_S) as answer:
            text = answer.read().decode()
    finally:
        server.close()
    assert "\nbascule_build_info{" in text
    assert "\nprocess_resident_memory_bytes " in text
