"""Processor time of processes, against what a process says about itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.xa_cpu import processor_ms

WORK_S = 0.2
#: A tick of the system is 10 ms; a process has user and system time.
TOLERANCE_MS = 60.0
CHILD = f"import time\nwhile time.process_time() < {WORK_S}: pass\nprint(1000 * time.process_time(), flush=True)\ninput()"
#: A process with a child: both work. It prints the processor time of both while the child lives, and goes on after the end of the child.
PARENT = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
child_ms = float(child.stdout.readline())
while time.process_time() < {WORK_S}:
    pass
print(child_ms + 1000 * time.process_time(), flush=True)
input()
child.communicate("\\n")
print("ended", flush=True)
input()
"""


def test_processor_time_includes_children_at_work_and_ended() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        said_ms = float(parent.stdout.readline())
        at_work_ms = processor_ms([parent.pid])
        parent.stdin.write("\n")
        assert parent.stdout.readline() == "ended\n"
        ended_ms = processor_ms([parent.pid])
        parent.communicate("\n")
    assert [at_work_ms, ended_ms] == pytest.approx([said_ms] * 2, abs=TOLERANCE_MS)
