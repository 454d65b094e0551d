"""Processes that are forked from one that has imported everything: the start of a broker takes a sixth of the processor time.

The driver of the pipelines starts without importing PySpark, too.

A forked process runs its program from the beginning, in a process, a session and an environment of its own. Only the imports are shared.
Each program has a process that forks, from its first use to ``stop``.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from bascule.core import crash
from bascule.core.errors import Unavailable
from bascule.embedded.process import PR_SET_PDEATHSIG, Child, NotStarted
from tests.support.speed import SLOWNESS


class Program(NamedTuple):
    """A function without arguments, which reads ``sys.argv``, and the modules that it imports when it runs."""

    module: str
    function: str
    imports: tuple[str, ...] = ()


_SERVING: Final = ("bascule.cli.run", "bascule.config", "bascule.embedded.protection", "bascule.embedded.service_manager")
COMMAND: Final = Program(
    "bascule.cli.main", "main", (*_SERVING, "bascule.server.admin", "bascule.server.node", "bascule.server.reload")
)  # fmt: skip
#: The same command without the modules that only a broker needs, and with those of a driver.
PIPELINES: Final = Program("bascule.cli.main", "main", (*_SERVING, "bascule.pipelines.driver"))
#: The program that runs each serving command.
PROGRAMS: Final = {"broker": COMMAND, "pipelines": PIPELINES}
#: Variables that the command reads when it runs. Another one may decide about the imports.
OF_THE_COMMAND: Final = ("BASCULE_", "PYTHONUNBUFFERED")
MESSAGE_BYTES_MAX: Final = 1 << 17
#: Time for the imports and for an answer, on a loaded machine.
ANSWER_S: Final = 120.0 * SLOWNESS

# Loaded before any fork, because between a fork and its end the child should load nothing.
_prctl = ctypes.CDLL(None, use_errno=True).prctl


class _Process(subprocess.Popen[bytes]):
    """A forked process, with the methods of Popen that ``Child`` calls."""

    _child_created = False  # for the destructor of Popen, whose constructor is not called

    def __init__(self, parent: _Parent, arguments: Sequence[str], pid: int, pidfd: int) -> None:
        self.args = list(arguments)
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent
        self._pidfd = pidfd
        self._ending = threading.Lock()

    def __del__(self) -> None:
        os.close(self._pidfd)

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            poller = select.poll()
            poller.register(self._pidfd, select.POLLIN)
            if not poller.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            with self._ending:  # the code is told once, and several threads may wait
                if self.returncode is None:
                    self.returncode = self._parent.code_of(self.pid)
        return self.returncode

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, sig)


class _Parent:
    """The process that forks one program, for one process of the tests."""

    def __init__(self, program: Program) -> None:
        self._lock = threading.Lock()
        self._codes: dict[int, int] = {}
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(ANSWER_S)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.preloaded", str(theirs.fileno()), json.dumps(program)],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUNBUFFERED": "1"}, start_new_session=True, pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._read("ready")

    @property
    def pid(self) -> int:
        """Return its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Return True if it forks no more."""
        return self._process.poll() is not None

    def fork(self, arguments: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> _Process:
        """Return a new process. Raises Unavailable."""
        asked = {"log": str(log_file), "environment": dict(environment), "directory": str(Path.cwd()), "arguments": list(arguments)}
        with self._lock:
            self._socket.send(json.dumps(asked).encode())
            said, (pidfd,) = self._read("forked")
        return _Process(self, arguments, said["forked"], pidfd)

    def code_of(self, pid: int) -> int:
        """Return the code of a process that has ended, negative for a signal. Raises Unavailable."""
        with self._lock:
            while pid not in self._codes:
                self._read("ended")
            return self._codes.pop(pid)

    def stop(self) -> None:
        """End this process, and with it all forked ones."""
        self._socket.close()
        self._process.wait(ANSWER_S)

    def _read(self, event: str) -> tuple[dict[str, Any], list[int]]:
        """Return the next message of a kind. Note the codes of ended processes meanwhile."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES_MAX, 1)
            if not message:
                raise Unavailable(f"the process that forks has ended with {self._process.wait(ANSWER_S)}")
            said: dict[str, Any] = json.loads(message)
            if "error" in said:
                raise Unavailable(said["error"])
            if "ended" in said:
                self._codes[said["ended"]] = said["code"]
            if event in said:
                return said, descriptors


class PreloadedChild(Child):
    """A serving command that is forked from a process that has imported everything. ``argv`` says what it runs, but is not executed."""

    def __init__(self, command: str, *options: str, log_file: Path, env: Mapping[str, str]) -> None:
        """``command`` is broker or pipelines."""
        super().__init__([sys.executable, "-m", "bascule.cli", command, *options], log_file=log_file, env=env, name=command)
        self._program = PROGRAMS[command]
        self._arguments = ["bascule", command, *options]
        self._more = dict(env)

    def start(self, *, keep_open: object = ()) -> None:
        """Fork the child; append its standard output and error to the log file. Raises NotStarted."""
        if self.running:
            raise NotStarted(f"{self.name} is already running with process id {self.pid}; stop it first")
        self.log_file.parent.mkdir(parents=True, exist_ok=True)
        with self.log_file.open("ab") as log:
            self._log_start = log.tell()
        self._process = fork(self._program, self._arguments, self.log_file, self._more)


_lock = threading.Lock()
_parents: dict[Program, _Parent] = {}


def fork(program: Program, arguments: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Return a process with ``arguments`` as its ``sys.argv``, which appends its output to a file. Raises Unavailable.

    ``environment`` is added to that of this process.
    """
    with _lock:
        parent = _parents.get(program)
        if parent is None or parent.ended:
            parent = _parents[program] = _Parent(program)
    return parent.fork(arguments, log_file, {**os.environ, **environment})


def possible(environment: Mapping[str, str]) -> bool:
    """Return True if a process with these variables, apart from inherited ones, may share its imports with others."""
    return all(name.startswith(OF_THE_COMMAND) for name in environment)


def pids() -> set[int]:
    """Return the ids of the processes that fork."""
    with _lock:
        return {parent.pid for parent in _parents.values()}


def stop() -> None:
    """End the processes that fork, and all that they have forked."""
    with _lock:
        for parent in _parents.values():
            parent.stop()
        _parents.clear()


class _Server:
    """The process that forks. It has one thread, so that a forked process is whole."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._woken, self._wake = socket.socketpair()
        for end in (self._woken, self._wake):
            end.setblocking(False)

    def __enter__(self) -> Self:
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake.fileno())
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for each in (self._socket, self._woken, self._wake):
            each.close()

    def next(self) -> dict[str, Any] | None:
        """Return the next wish of the tests, or None at their end. Tell them of processes that have ended meanwhile."""
        while True:
            readable, _, _ = select.select([self._socket, self._woken], [], [])
            if self._woken in readable:
                self._woken.recv(4096)
                self._reap()
            if self._socket in readable:
                message = self._socket.recv(MESSAGE_BYTES_MAX)
                asked: dict[str, Any] | None = json.loads(message) if message else None
                return asked

    def forked(self, pid: int) -> None:
        """Tell the tests of a new process. Nobody has waited for it, so the descriptor is that of this process."""
        pidfd = os.pidfd_open(pid)
        socket.send_fds(self._socket, [json.dumps({"forked": pid}).encode()], [pidfd])
        os.close(pidfd)

    def say(self, **event: int | str) -> None:
        self._socket.send(json.dumps(event).encode())

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                self.say(ended=ended[0], code=os.waitstatus_to_exitcode(ended[1]))


def _become(asked: Mapping[str, Any], parent: int) -> None:
    """Make a forked process what ``Child`` makes of its own: in a session, tied to its parent, with its own output and environment."""
    os.setsid()
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
    log = os.open(asked["log"], os.O_WRONLY | os.O_APPEND)
    for standard in (1, 2):
        os.dup2(log, standard)
    os.close(log)
    os.chdir(asked["directory"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    sys.path += [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path not in sys.path]
    crash.arm(os.environ.get(crash.ARMED_VARIABLE, ""), os.environ.get(crash.ONCE_VARIABLE, ""))
    sys.argv = asked["arguments"]


def main() -> None:
    """Fork a program for the process at the other end of a socket. In a forked process, run the program."""
    program = Program(*json.loads(sys.argv[2]))
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    with _Server(connection) as server:
        try:
            for module in (program.module, *program.imports):
                importlib.import_module(module)
            gc.collect()
            gc.freeze()  # a collection in a forked process would copy all that it examines
            if len(os.listdir("/proc/self/task")) > 1:
                raise RuntimeError("an import has started a thread, which a forked process would not have")
        except BaseException:
            server.say(error=traceback.format_exc())
            raise
        server.say(ready=1)
        parent = os.getpid()
        while (asked := server.next()) is not None:
            if not (pid := os.fork()):
                become = partial(_become, asked, parent)
                break
            server.forked(pid)
        else:
            return
    become()
    getattr(sys.modules[program.module], program.function)()


if __name__ == "__main__":
    main()
