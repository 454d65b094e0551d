"""Forked brokers are processes of their own: output, environment, crash points, exit codes, and an end with their parent."""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest

from bascule.core.crash import ARMED_VARIABLE
from bascule.embedded.process import free_port
from bascule.threads.background import in_background
from tests.support import preloaded
from tests.support.preloaded import PreloadedChild, Program, fork, possible
from tests.support.system import wait_for

#: Nothing listens there: the broker waits for Kafka.
SETTINGS = {"BASCULE_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1", "BASCULE_LOG__LEVEL": "info"}


def child(directory: Path, more: Mapping[str, str] | None = None, command: str = "broker") -> PreloadedChild:
    ports = {"BASCULE_BROKER__PORT": str(free_port()), "BASCULE_ADMIN__PORT": str(free_port())}
    env = {**SETTINGS, **ports, "BASCULE_EMBEDDED__DATA_DIR": str(directory / "data"), **(more or {})}
    return PreloadedChild(command, log_file=directory / "broker.log", env=env)


def running(directory: Path) -> PreloadedChild:
    broker = child(directory)
    broker.start()
    wait_for(lambda: broker.log_file.stat().st_size, "its first line")
    return broker


@pytest.mark.parametrize(("command", "setting"), [("broker", "broker.port"), ("pipelines", "pipelines.metrics_port")])
def test_exit_code_and_output_are_those_of_the_command(tmp_path: Path, command: str, setting: str) -> None:
    started = child(tmp_path, {f"BASCULE_{setting.upper().replace('.', '__')}": "none"}, command)
    started.start()
    assert started.wait(60)
    assert started.returncode == 2
    assert setting in started.log_file.read_text()
    assert not started.running


def test_process_finds_modules_in_its_python_path(tmp_path: Path) -> None:
    (tmp_path / "changes.py").write_text('"""Words that only this module has."""')
    log_file = tmp_path / "program.log"
    log_file.touch()
    process = fork(Program("pydoc", "cli"), ["pydoc", "changes"], log_file, {"PYTHONPATH": str(tmp_path)})
    assert process.wait(60) == 0
    assert "Words that only this module has." in log_file.read_text()


def test_processes_have_a_session_a_directory_and_signals_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    brokers = [running(tmp_path / name) for name in ("one", "two")]
    pids = [broker.pid for broker in brokers]
    for pid in pids:
        assert pid is not None
        assert os.getsid(pid) == pid
        assert Path(f"/proc/{pid}/cwd").resolve() == tmp_path.resolve()
    brokers[0].kill()
    assert brokers[0].returncode == -signal.SIGKILL
    assert brokers[1].running
    brokers[1].kill()


def test_each_process_has_its_own_crash_points(tmp_path: Path) -> None:
    broker = child(tmp_path, {ARMED_VARIABLE: "no such point:1"})
    broker.start()
    assert broker.wait(60)
    assert "no such point" in broker.log_file.read_text()


def test_processes_end_with_the_one_that_forked_them(tmp_path: Path) -> None:
    parent, log_file = preloaded._Parent(preloaded.COMMAND), tmp_path / "broker.log"  # not the one of the other tests
    log_file.touch()
    pid = parent.fork(["bascule", "broker"], log_file, {**os.environ, **child(tmp_path)._more}).pid
    wait_for(lambda: log_file.stat().st_size, "its first line")
    parent.stop()
    wait_for(lambda: not Path(f"/proc/{pid}").exists(), "its end")


def test_variable_that_may_decide_about_imports_rules_a_fork_out() -> None:
    assert possible({"BASCULE_BROKER__PORT": "1", "PYTHONUNBUFFERED": "1"})
    assert not possible({"PYTHONPATH": "other"})


def test_several_threads_may_wait_for_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that forks tells the exit code once: a second thread that asked for the code waited in vain."""
    broker = running(tmp_path)
    process = broker._process
    assert isinstance(process, preloaded._Process)
    os.kill(process.pid, signal.SIGKILL)
    ready, asked, go = threading.Semaphore(0), list[int](), threading.Event()
    code_of, registered = process._parent.code_of, select.poll

    class Poll:
        def __init__(self) -> None:
            self._poll = registered()
            self.register = self._poll.register

        def poll(self, timeout_ms: float | None) -> object:
            found = self._poll.poll(timeout_ms)
            ready.release()
            return found

    def ask(pid: int) -> int:
        asked.append(pid)
        assert go.wait(60)
        return code_of(pid) if len(asked) == 1 else 0

    monkeypatch.setattr(process._parent, "code_of", ask)
    monkeypatch.setattr(select, "poll", Poll)
    waiting = [in_background(partial(process.wait, 60), "waits") for _ in range(2)]
    for _ in waiting:
        assert ready.acquire(timeout=60)
    go.set()
    assert [each.result(60) for each in waiting] == [-signal.SIGKILL] * 2
    assert asked == [process.pid]
