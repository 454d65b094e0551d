"""The output of a run ends with what is known about a test process that died."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import stacks
from tests.support.speed import SLOWNESS

ROOT = Path(__file__).parents[3]
WAIT_S = 60.0 * SLOWNESS
LOST = """
import os, signal, threading, tests.support.stacks as stacks
def test_has_a_fault(): os.kill(os.getpid(), signal.SIGSEGV)
def test_does_not_end():
    stacks.GRACE_S = 0.2
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()
"""


def test_output_ends_with_the_ends_of_lost_test_processes(tmp_path: Path) -> None:
    (tmp_path / "test_lost.py").write_text(LOST)
    argv = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--timeout=1", "-q", "-n", "1", tmp_path]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env["PYTHONPATH"] = os.pathsep.join((str(ROOT / "src"), str(ROOT)))
    ended = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
    after_list = ended.stdout.rpartition("\nFAILED ")[2]
    first, second = after_list.split("\nmemory: ")[:2]
    assert "Fatal Python error: Segmentation fault" in first, ended.stdout
    assert "in test_has_a_fault" in first
    assert "gw0 was lost" in first
    assert "signal 11 (Segmentation fault)" in first
    assert "the test does not end" in second, ended.stdout
    assert "gw1 was lost" in second
    assert f"exit code {stacks.EXIT_CODE}, the watchdog" in second
    assert len(after_list.splitlines()) < 40
