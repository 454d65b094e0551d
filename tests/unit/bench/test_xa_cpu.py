"""Processor time of processes, against what a process says about itself."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from bench.xa_cpu import processor_ms

WORK_MS = 200.0
#: A tick of the system is 10 ms; a process has user and system time.
TOLERANCE_MS = 40.0


def test_processor_time_includes_children_at_work_and_ended() -> None:
    before_ms = processor_ms([os.getpid()])
    until_s = time.process_time() + WORK_MS / 1000
    while time.process_time() < until_s:
        pass
    assert processor_ms([os.getpid()]) - before_ms == pytest.approx(WORK_MS, abs=TOLERANCE_MS)
    work = f"import time\nwhile time.process_time() < {WORK_MS / 1000}: pass\nprint(1000 * time.process_time(), flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", work], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said_ms = float(child.stdout.readline())
        at_work_ms = processor_ms([os.getpid()]) - before_ms
        child.communicate("\n")
    ended_ms = processor_ms([os.getpid()]) - before_ms
    assert [at_work_ms, ended_ms] == pytest.approx([WORK_MS + said_ms] * 2, abs=2 * TOLERANCE_MS)
