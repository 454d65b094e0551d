"""A child process that never outlives its parent, writes to a log file, and reports why it did not start."""

from __future__ import annotations

import ctypes
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from bascule.core.errors import Scope, Unavailable

#: The embedded servers listen here: only processes of this machine reach them.
HOST: Final = "127.0.0.1"
PR_SET_PDEATHSIG = 1
#: Interval, in seconds, between two checks of a child that starts or stops: short against the 0.5 s or more that this takes.
POLL_S = 0.02
#: Ports below it belong to well-known services.
LASTING_PORT_MIN = 20_000
#: Ports that this process has returned as free: the caller may not listen there yet, or not at the moment.
_told: set[int] = set()
TAIL_LINES = 20
TAIL_BYTES = 1 << 16

# Loaded before any fork, because between fork and exec the child may only make system calls.
_prctl = ctypes.CDLL(None, use_errno=True).prctl if sys.platform == "linux" else None


class NotStarted(Unavailable):
    """A child ended before it was ready, or took too long; the text has the end of its log."""

    scope = Scope.PROCESS


class PortInUse(Unavailable):
    """Another process listens on the port."""

    scope = Scope.PROCESS


class Child:
    """One child process at a time, which can be restarted.

    On Linux the kernel sends the child SIGTERM when the *thread* that started it ends: start it from a thread that lives as long as the
    child. The child has its own session, so that Ctrl-C at a terminal reaches only the parent, which stops its children in order.
    """

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        log_file: Path,
        env: Mapping[str, str] | None = None,
        inherited: Mapping[str, str] | None = None,
        name: str | None = None,
    ) -> None:
        """``env`` is added to ``inherited``, by default the environment of this process; ``name`` appears in errors."""
        self.argv = [str(each) for each in argv]
        self.name = name or Path(self.argv[0]).name
        self.log_file = log_file
        self._env = None if inherited is None and not env else {**(os.environ if inherited is None else inherited), **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    def start(self, *, keep_open: Sequence[int] = ()) -> None:
        """Start the child; append its standard output and error to the log file. Raises NotStarted.

        The child inherits the file descriptors ``keep_open``: a lock on one of them lasts as long as the child.
        """
        if self.running:
            raise NotStarted(f"{self.name} is already running with process id {self.pid}; stop it first")
        parent = os.getpid()

        def tie_to_parent() -> None:
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            if _prctl is not None:
                _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
                if os.getppid() != parent:  # the parent died before the line above
                    os._exit(1)

        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
            try:
                self._process = subprocess.Popen(
                    self.argv,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env,
                    start_new_session=True,
                    preexec_fn=tie_to_parent,
                    pass_fds=keep_open,
                )
            except OSError as error:
                raise NotStarted(f"{self.name} could not be started: {error}") from error

    @property
    def pid(self) -> int | None:
        """Return the process id while the child runs."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Return whether the child was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    @property
    def returncode(self) -> int | None:
        """Return the exit code (negative: a signal), None while the child runs or if it was never started."""
        return self._process.poll() if self._process is not None else None

    def wait_ready(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Return when ``ready()`` is true. Raises NotStarted if the child ends or the time is up.

        If anything is raised, also by ``ready``, no process is left.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not ready():
                if not self.running:
                    raise NotStarted(f"{self.name} ended with {self.returncode} before it was ready; {self._log_end()}")
                if time.monotonic() > deadline:
                    raise NotStarted(f"{self.name} was not ready after {timeout_s:g} s; {self._log_end()}")
                time.sleep(POLL_S)
        except BaseException:
            self.kill()
            raise

    def wait(self, timeout_s: float) -> bool:
        """Return whether the child ends within the time."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, timeout_s: float = 30.0) -> None:
        """Stop the child with SIGTERM, and with SIGKILL after the timeout."""
        if self._process is None or not self.running:
            return
        self._process.terminate()
        if not self.wait(timeout_s):
            self.kill()

    def hang_up(self) -> None:
        """Send SIGHUP to the child."""
        if self._process is not None and self.running:
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Kill the child with SIGKILL, as in a crash."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _log_end(self) -> str:
        with self.log_file.open("rb") as log:
            log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return f"end of {self.log_file}:\n" + "\n".join(lines)


def free_port(host: str = HOST) -> int:
    """Return a port on which nothing listens at this moment."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = HOST) -> list[int]:
    """Return different ports on which nothing listens at this moment.

    They are not in the range from which the system chooses ports for outgoing connections and for port 0, because such a port could be
    taken before it is used, or while its process restarts. Ports of that range are returned only if all others are taken. For the same
    reasons no port is returned twice.
    """
    lasting = [port for port in range(LASTING_PORT_MIN, _first_passing_port()) if port not in _told]
    with ExitStack() as probes:
        found: list[int] = []
        for port in itertools.chain(random.sample(lasting, len(lasting)), itertools.repeat(0, count)):
            if len(found) == count:
                break
            probe = probes.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind((host, port))
                found.append(int(probe.getsockname()[1]))
        _told.update(found)
        return found


def _first_passing_port() -> int:
    """Return the first of the ports that the system chooses from, or IANA's value (RFC 6335) if the system does not report it."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:
        return 49_152


def check_port(port: int, purpose: str, setting: str, host: str = HOST) -> None:
    """Raise PortInUse, with the name of the setting, if something listens on ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            reason = f"port {port} for {purpose} on {host} cannot be used ({error.strerror})"
            raise PortInUse(f"{reason}; choose another with {setting}") from error
