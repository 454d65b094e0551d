"""What is known about test processes of a run that died: their ends, what Python and the watchdog wrote before, and the machine's memory.

pytest-xdist only says that a process "crashed". The lines come last in the output, because of a long output often only the end is kept.
"""

from __future__ import annotations

import faulthandler
import os
import re
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support import stacks

#: In the input of a worker: the file for what it writes about its own end.
WORDS_FILE: Final = "bascule_last_words"
#: A worker that crashed is collected by then; one whose pipe is broken still runs.
END_TIMEOUT_S: Final = 5.0
#: Of each worker's last words: the reason is in the first lines.
LINES_MAX: Final = 12
_CURRENT_THREAD: Final = re.compile(r"^(Current thread|Thread .*this process)", re.MULTILINE)


class LostWorkers:
    """A plugin for the process that controls the workers."""

    def __init__(self) -> None:
        """Note the state of the machine before the run."""
        self._directory = Path(tempfile.mkdtemp(prefix="bascule-last-words-"))
        self._begun = 0
        self._oom_kills = oom_kills()
        self._told: list[str] = []

    def pytest_configure_node(self, node: Any) -> None:
        """Give a worker a file for its last words."""
        self._begun += 1
        node.workerinput[WORDS_FILE] = str(self._directory / f"{self._begun}-{node.gateway.id}.txt")

    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Note how a worker ended that did not finish."""
        if error in (None, "keyboard-interrupt"):
            return
        process = getattr(node.gateway._io, "popen", None)
        end = how_it_ended(process) if process is not None else "its end is unknown"
        self._told += [*last_words(Path(node.workerinput[WORDS_FILE])), f"{node.gateway.id} was lost ({error}): {end}", self._memory()]

    def _memory(self) -> str:
        peak_mb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss >> 10
        killed = f"{oom_kills() - self._oom_kills} processes killed for lack of it since the start"
        return f"memory: {available()}; {killed}{group_events()}; largest worker {peak_mb} MB"

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> Generator[None, object, object]:
        """Tell of lost workers after the list of failed tests."""
        result = yield
        for line in self._told:
            terminalreporter.write_line(line)
        return result

    def pytest_unconfigure(self) -> None:
        """Remove the files."""
        shutil.rmtree(self._directory, ignore_errors=True)


class LastWords:
    """A plugin for a worker: its file for what it writes about its own end."""

    def __init__(self, file: Path) -> None:
        """Open the file."""
        self._file = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def say(self, text: str) -> None:
        """Write text, at once."""
        os.write(self._file, text.encode())

    def pytest_sessionstart(self) -> None:
        """Let Python write the stacks into the file when a signal ends the process. pytest has chosen standard error before."""
        faulthandler.enable(self._file)


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """Return the exit code or the signal of a worker. Waits for an end that is close."""
    try:
        code = process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"process {process.pid} still runs, its pipe is broken\n{stacks.of_process(process.pid)}"
    if code < 0:
        return f"process {process.pid} was ended by signal {-code} ({signal.strsignal(-code)})"
    reason = ", the watchdog of tests/support/stacks.py, because its test did not end" if code == stacks.EXIT_CODE else ""
    return f"process {process.pid} ended with exit code {code}{reason}"


def last_words(file: Path) -> list[str]:
    """Return the first lines that a worker wrote about its end, and the stack of the thread that had the fault."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return []
    heading = text.splitlines()[:1]
    own = _CURRENT_THREAD.search(text)
    return heading + (text[own.start() :] if own else text.partition("\n")[2]).splitlines()[: LINES_MAX - 1]


def available() -> str:
    """Return the memory that processes can still get."""
    found = re.search(r"^MemAvailable:\s*(\d+)", Path("/proc/meminfo").read_text(), re.MULTILINE)
    return f"{int(found[1]) >> 10} MB available" if found else "unknown"


def oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory, 0 if it does not tell."""
    try:
        found = re.search(r"^oom_kill (\d+)", Path("/proc/vmstat").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0


def group_events() -> str:
    """Return the counts of memory limits of this process's control group that were reached, "" if it has none."""
    try:
        group = Path("/proc/self/cgroup").read_text().rpartition("::")[2].strip()
        places = [Path("/sys/fs/cgroup", each, "memory.events") for each in (group.lstrip("/"), "")]
        text = next(place.read_text() for place in places if place.exists())
    except (OSError, StopIteration):
        return ""
    return " (control group: " + ", ".join(line for line in text.splitlines() if not line.endswith(" 0")) + ")"
