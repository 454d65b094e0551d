"""The clock of leases, fences and sessions advances while the machine is suspended: it is the boot clock, not the monotonic clock."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import Final

import pytest

from bascule.threads.clock import elapsed_s

#: Seconds that the boot clock is ahead of the monotonic clock in a time namespace, as if the machine had been suspended for so long.
SUSPENDED_S: Final = 100_000
READ: Final = "import time; from bascule.threads.clock import elapsed_s; print(time.monotonic(), elapsed_s())"


def test_elapsed_time_includes_the_time_of_a_suspension() -> None:
    """A time namespace moves the boot clock only, as a suspension does."""
    command = ["unshare", "--time", "--boottime", str(SUSPENDED_S), sys.executable, "-c", READ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no time namespace here: {done.stderr.strip()}")
    monotonic_s, read_s = map(float, done.stdout.split())
    boot_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert read_s - monotonic_s >= SUSPENDED_S
    assert read_s <= boot_s + SUSPENDED_S


def test_elapsed_time_is_that_of_the_boot_clock() -> None:
    before_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    assert before_s <= elapsed_s() <= time.clock_gettime(time.CLOCK_BOOTTIME)
