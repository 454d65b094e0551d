"""A hanging test is ended, with the stacks of all processes of its run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.support import stacks
from tests.support.speed import SLOWNESS

ROOT = Path(__file__).parents[3]
WAIT_S = 60.0 * SLOWNESS
HANGING = """
import signal, subprocess, sys, threading
from tests.support.speed import SLOWNESS
CHILD = "import threading\\ndef waits_for_ever(): print(1, flush=True); threading.Event().wait()\\nwaits_for_ever()"
def test_hangs():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        {before}
        try:
            threading.Event().wait()
        finally:
            child.kill()
"""


FAULT = """
import os
def test_has_a_fault():
    os.kill(os.getpid(), signal.SIGSEGV)
"""
#: Signals cannot end the test, so the watchdog does.
BLOCKING = "import tests.support.stacks as stacks; stacks.GRACE_S = 1.0; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])"


def run(directory: Path, before: str, *options: str, fault: str = "") -> subprocess.CompletedProcess[str]:
    (directory / "test_hanging.py").write_text(HANGING.format(before=before) + fault)
    argv = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", "--timeout=4", "-q", *options, directory]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "src"), str(ROOT)))}
    del env["PYTEST_CURRENT_TEST"]
    env.pop("PYTEST_XDIST_WORKER", None)
    return subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)


def test_hanging_test_fails_with_stacks_of_all_processes(tmp_path: Path) -> None:
    ended = run(tmp_path, "pass")
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
    assert "in test_hangs" in ended.stdout
    assert "in waits_for_ever" in ended.stdout
    assert "Timeout" in ended.stdout


@pytest.mark.slow
def test_hanging_test_that_blocks_signals_is_killed_with_its_process_and_children(tmp_path: Path) -> None:
    ended = run(tmp_path, BLOCKING)
    assert ended.returncode == stacks.EXIT_CODE, ended.stdout
    assert "in test_hangs" in ended.stderr
    assert "in waits_for_ever" in ended.stderr


def test_output_of_a_run_ends_with_the_reasons_why_its_processes_died(tmp_path: Path) -> None:
    ended = run(tmp_path, BLOCKING, "-n", "1", fault=FAULT)
    assert ended.returncode == pytest.ExitCode.TESTS_FAILED, ended.stdout
    assert "in test_hangs" in ended.stderr
    assert "in waits_for_ever" in ended.stderr
    end = ended.stdout.rpartition("\nFAILED ")[2]
    first, second, closing = end.split("\nmemory: ")
    assert "the test does not end" in first, ended.stdout
    assert "gw0 was lost" in first
    assert f"exit code {stacks.EXIT_CODE}, the watchdog" in first
    assert "Fatal Python error: Segmentation fault" in second, ended.stdout
    assert "in test_has_a_fault" in second
    assert "gw1 was lost" in second
    assert "signal 11 (Segmentation fault)" in second
    assert "0 processes killed for lack of it" in closing
    assert len(end.splitlines()) < 40


def test_command_shows_stacks_of_all_threads_on_signal() -> None:
    script = "from bascule.threads.stacks import *; import os, signal; show_stacks_on_signal(); os.kill(os.getpid(), signal.SIGUSR1)"
    env = {name: value for name, value in os.environ.items() if name != stacks.STACKS_VARIABLE}
    shown = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert shown.returncode == 0, shown.stderr
    assert "most recent call first" in shown.stderr


def test_process_that_asks_for_its_stacks_again_opens_no_further_file_and_ends_without_warning(tmp_path: Path) -> None:
    script = """
import os, signal
from bascule.threads.stacks import show_stacks_on_signal
files = []
for _ in range(2):
    show_stacks_on_signal()
    files.append(len(os.listdir("/proc/self/fd")))
os.kill(os.getpid(), signal.SIGUSR1)
print(files[1] - files[0])
"""
    argv = [sys.executable, "-W", "error", "-c", script]
    env = {**os.environ, stacks.STACKS_VARIABLE: str(tmp_path)}
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, timeout=WAIT_S, check=False)
    assert (ended.stdout, ended.stderr) == ("0\n", "")
    assert "most recent call first" in next(tmp_path.iterdir()).read_text()


def test_stacks_of_stopped_process_are_not_awaited() -> None:
    child = subprocess.Popen([sys.executable, "-c", "print(1, flush=True); import time; time.sleep(60)"], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        child.send_signal(signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert stacks.of_process(child.pid) == "(it is stopped by a signal)"
        child.kill()


def test_failed_test_shows_stacks_that_are_still_being_taken_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    taking, ended = threading.Event(), threading.Event()

    def processes() -> dict[int, str]:
        taking.set()
        ended.wait(WAIT_S)
        return {}

    monkeypatch.setattr(stacks, "GRACE_S", WAIT_S)
    with stacks.Watchdog(0.02, processes, print) as watchdog:
        assert taking.wait(WAIT_S)
        threading.Timer(0.02, ended.set).start()
        assert "in test_failed_test_shows_stacks" in watchdog.stacks


def test_process_without_stack_handler_is_left_running() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "print(1, flush=True); import time; time.sleep(60)"], stdout=subprocess.PIPE)
    with child:
        assert child.stdout is not None
        child.stdout.readline()
        assert stacks.of_process(child.pid) == "(it shows no stacks)"
        assert child.poll() is None
        child.send_signal(signal.SIGKILL)
