"""SIGHUP while a process begins: it neither ends the process nor is it lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bascule.threads import hangup
from tests.support.speed import SLOWNESS

SOON_S = 60.0 * SLOWNESS


def test_hangup_that_came_early_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: False)
    before, came = signal.getsignal(signal.SIGHUP), threading.Semaphore(0)
    try:
        hangup.hold_hangups()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGHUP)
        hangup.on_hangup(came.release)
        assert came.acquire(timeout=SOON_S)
        assert not hangup.take_held()
        os.kill(os.getpid(), signal.SIGHUP)
        assert came.acquire(timeout=SOON_S)
        assert not came.acquire(blocking=False), "three early signals are one reload"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_hangup_of_a_terminal_is_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: True)
    before = signal.getsignal(signal.SIGHUP)
    hangup.hold_hangups()
    assert signal.getsignal(signal.SIGHUP) is before


@pytest.mark.parametrize("command", ["up", "broker", "pipelines"])
def test_process_that_reads_its_settings_does_not_end_at_a_hangup(command: str, tmp_path: Path) -> None:
    settings = tmp_path / "bascule.toml"
    os.mkfifo(settings)
    arguments = [sys.executable, "-m", "bascule.cli", command, "--config", str(settings)]
    process = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=tmp_path, text=True)
    with process, settings.open("w") as file:  # the process has opened the file, and waits for its content
        process.send_signal(signal.SIGHUP)
        file.write("[journal]\nwrong = 1\n")
        file.close()
        assert "journal.wrong: unknown setting" in process.communicate(timeout=SOON_S)[1]
    assert process.returncode == 2
