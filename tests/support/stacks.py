"""The stacks of all processes of a test run: Python by SIGUSR1 (``bascule.threads.stacks``), Java by ``jstack``."""

from __future__ import annotations

import faulthandler
import math
import os
import re
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from bascule.core.errors import BasculeError
from bascule.embedded.java import find_java
from bascule.threads.stacks import STACKS_SIGNAL, STACKS_VARIABLE

#: Time for a process to write its stacks: longer than a working one needs.
ANSWER_S = 5.0
LOOK_S = 0.05
JSTACK_TIMEOUT_S = 15.0
#: Most jstack processes at once: each is a JVM of its own.
JSTACKS_MAX = 4
#: Status of a process that got SIGSTOP.
STOPPED = "T"
#: After its timeout a test has this time to end by itself: a thread in C code handles no signal.
GRACE_S = 20.0
#: Exit code of a process of the run whose test does not end.
EXIT_CODE = 75


def of_processes(pids: Mapping[int, str]) -> str:
    """Return the stacks of this process and of others, which are given with their command lines."""
    parts = [f"===== {os.getpid()} (this process)\n{_own()}"]
    java = [pid for pid in pids if _is_java(pid)]
    # Forked processes write to one file, so they are asked one after another; jstack takes seconds.
    with ThreadPoolExecutor(JSTACKS_MAX) as pool:
        shown = dict(zip(java, pool.map(of_process, java), strict=True))
    for pid, command in sorted(pids.items()):
        parts.append(f"===== {pid} {command}\n{shown.get(pid) or of_process(pid)}")
    return "\n".join(parts)


def of_process(pid: int) -> str:
    """Return the stacks of a process, or why there are none."""
    try:
        if _status(pid, "State") == STOPPED:
            return "(it is stopped by a signal)"
        if _is_java(pid):
            return _of_java(pid)
        return _of_python(pid) if _catches(pid, STACKS_SIGNAL) else "(it shows no stacks)"
    except (OSError, ValueError, subprocess.SubprocessError, BasculeError) as error:
        return f"(no stacks: {error!r})"


def _is_java(pid: int) -> bool:
    return Path(f"/proc/{pid}/exe").resolve().name == "java"


def _own() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def _of_java(pid: int) -> str:
    argv = [str(find_java().home / "bin" / "jstack"), "-l", str(pid)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=JSTACK_TIMEOUT_S, check=False)
    return done.stdout + done.stderr


def _of_python(pid: int) -> str:
    environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    directory = next(each.partition(b"=")[2].decode() for each in environment if each.startswith(f"{STACKS_VARIABLE}=".encode()))
    file = next(path for each in (pid, _parent(pid)) if (path := Path(directory, f"{each}.txt")).exists())
    before = size = file.stat().st_size
    os.kill(pid, STACKS_SIGNAL)
    deadline = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline:
        time.sleep(LOOK_S)
        now = file.stat().st_size
        if now > before and now == size:  # the file grows no more
            break
        size = now
    return file.read_bytes()[before:].decode(errors="replace") or "(no answer)"


def _parent(pid: int) -> int:
    """Return the parent of a forked process, which writes to the same file."""
    return int(_status(pid, "PPid"))


def _catches(pid: int, number: signal.Signals) -> bool:
    return bool(int(_status(pid, "SigCgt"), 16) & 1 << number - 1)


def _status(pid: int, name: str) -> str:
    found = re.search(rf"^{name}:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    if found is None:
        raise ValueError(f"process {pid} has no {name}")
    return found[1]


class Alarms:
    """Calls of functions at later times, which are seldom reached.

    All alarms share one thread, which sleeps on when an alarm is taken back. Two threads for each of many thousand tests would take longer
    than most tests, since the start of a thread waits for the processor.
    """

    def __init__(self) -> None:
        self._set: dict[object, tuple[float, Callable[[], None]]] = {}
        self._changed = threading.Condition()
        self._wakes_at = math.inf
        self._running = False

    def set(self, delay_s: float, call: Callable[[], None]) -> object:
        """Call a function in a thread of its own, after a delay. Returns the alarm."""
        alarm, at = object(), time.monotonic() + delay_s
        with self._changed:
            self._set[alarm] = at, call
            if not self._running:
                self._running = True
                threading.Thread(target=self._ring, name="alarms", daemon=True).start()
            elif at < self._wakes_at:
                self._changed.notify()
        return alarm

    def take_back(self, alarm: object) -> None:
        """Forget an alarm, unless its time has come."""
        with self._changed:
            self._set.pop(alarm, None)

    def _ring(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for alarm in [alarm for alarm, (at, _) in self._set.items() if at <= now]:
                    threading.Thread(target=self._set.pop(alarm)[1], daemon=True).start()
                self._wakes_at = min((at for at, _ in self._set.values()), default=math.inf)
                self._changed.wait(None if self._wakes_at == math.inf else self._wakes_at - now)


ALARMS = Alarms()


class Watchdog:
    """A watchdog for one test.

    It collects the stacks of the run when the test has used nearly all of its time, and ends the process if the test does not end.
    """

    def __init__(self, limit_s: float, processes: Callable[[], dict[int, str]], say: Callable[[str], None]) -> None:
        """Create a watchdog. ``processes`` returns the other processes of the run; ``say`` gets the report before this process ends."""
        self._stacks = ""
        self._processes = processes
        self._say = say
        self._limit_s = limit_s
        self._taking, self._taken = threading.Event(), threading.Event()
        self._alarms: list[object] = []

    def __enter__(self) -> Self:
        """Set the alarms."""
        early_s = min(GRACE_S, self._limit_s / 2)
        self._alarms = [ALARMS.set(self._limit_s - early_s, self._take), ALARMS.set(self._limit_s + GRACE_S, self._end)]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Take the alarms back, because the test has ended."""
        for alarm in self._alarms:
            ALARMS.take_back(alarm)

    @property
    def stacks(self) -> str:
        """Return the collected stacks, "" if the test ended in time. Waits for a collection that is running."""
        if self._taking.is_set():
            self._taken.wait(JSTACK_TIMEOUT_S)
        return self._stacks

    def _take(self) -> None:
        self._taking.set()
        try:
            self._stacks = of_processes(self._processes())
        finally:
            self._taken.set()

    def _end(self) -> None:
        self._say(f"the test does not end after its timeout; stacks of the run:\n{self._stacks}\n")
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(EXIT_CODE)
