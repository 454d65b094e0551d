"""The supervisor of the parts on one machine: it starts them in order, restarts those that end, and records their process ids."""

from __future__ import annotations

import enum
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from bascule.core.errors import BasculeError, InvalidInput, Unavailable
from bascule.core.signals import StopSignals
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.process import Child, PortInUse, check_port, free_port
from bascule.embedded.service_manager import NO_SERVICE_MANAGER, ServiceManager

#: A part that ends is restarted at once, then after 0.5 s, 1 s, 2 s, ... up to this time.
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
#: After this time without an end, the next one counts as the first again. A start of the pipelines costs ten seconds of a core at most.
STEADY_S = 20.0
#: Interval of the checks of parts. A restart waits at most this time; the checks take 0.1 % of a core.
LOOK_S = 0.05
#: Spark on a loaded machine takes the longest.
START_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 30.0
#: A standby part is ready, too.
READY_LINES = (b"ready ", b"standby ")
ERROR_LINE = "error: "


class PartState(enum.StrEnum):
    """The state of a part."""

    WAITING = "waiting"  # for the parts before it, or for the end of its back-off
    STARTING = "starting"
    READY = "ready"


class Input(enum.Enum):
    """An event of a part."""

    LAUNCHED = enum.auto()
    SERVES = enum.auto()
    ENDED = enum.auto()
    LATE = enum.auto()


TRANSITIONS = {
    (PartState.WAITING, Input.LAUNCHED): PartState.STARTING,
    (PartState.WAITING, Input.ENDED): PartState.WAITING,  # the launch itself failed
    (PartState.STARTING, Input.SERVES): PartState.READY,
    (PartState.STARTING, Input.ENDED): PartState.WAITING,
    (PartState.STARTING, Input.LATE): PartState.WAITING,
    (PartState.READY, Input.ENDED): PartState.WAITING,
}


class Part(Protocol):
    """One process that the supervisor watches."""

    @property
    def name(self) -> str:
        """Return the name for messages and for the file of process ids."""

    @property
    def pid(self) -> int | None:
        """Return the process id; None if the process does not run."""

    def start(self) -> None:
        """Launch the process; may wait until it is ready. Raises BasculeError."""

    def ready(self) -> bool:
        """Return True if the process is ready, after ``start``."""

    def failure(self) -> BasculeError:
        """Return the error because of which the process ended."""

    def hang_up(self) -> None:
        """Ask the process to reload its settings, if it can."""

    def stop(self, timeout_s: float) -> None:
        """Stop the process in an orderly way, and kill it after ``timeout_s``."""


class CommandPart:
    """A ``bascule`` command as a child process. It is ready when it has printed its ready line."""

    def __init__(
        self,
        name: str,
        argv: Sequence[str | Path],
        *,
        log_file: Path,
        inherited: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name = name
        self._child = Child(argv, log_file=log_file, inherited=inherited, env={"PYTHONUNBUFFERED": "1", **(env or {})}, name=name)
        self._log_start = 0

    @property
    def pid(self) -> int | None:
        """Return the process id; None if the process does not run."""
        return self._child.pid

    def start(self) -> None:
        """Launch the process. Raises NotStarted."""
        with suppress(FileNotFoundError):
            self._log_start = self._child.log_file.stat().st_size
        self._child.start()

    def ready(self) -> bool:
        """Return True if the ready line is in the log."""
        return any(line.startswith(READY_LINES) and line.endswith(b"\n") for line in self._said())

    def failure(self) -> BasculeError:
        """Return the error line of the process, or its exit code and the name of its log."""
        code = self._child.returncode
        lines = [line.decode(errors="replace").rstrip() for line in self._said()]
        starts = [number for number, line in enumerate(lines) if line.startswith(ERROR_LINE)]
        kind = InvalidInput if code == InvalidInput.exit_code else Unavailable
        if starts and code != 0:
            first, *rest = lines[starts[-1] :]
            more = itertools.takewhile(lambda line: line.startswith(" "), rest)  # other threads may have printed lines after it
            return kind("\n".join([first.removeprefix(ERROR_LINE), *more]))
        return kind(f"{self.name} ended with {code}; see {self._child.log_file}")

    def hang_up(self) -> None:
        """Let the process reload its settings."""
        self._child.hang_up()

    def stop(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL after ``timeout_s``."""
        self._child.stop(timeout_s)

    def _said(self) -> list[bytes]:
        with self._child.log_file.open("rb") as log:
            log.seek(self._log_start)
            return log.readlines()


class KafkaPart:
    """The embedded Kafka. Its process id is that of the JVM."""

    name = "kafka"

    def __init__(self, kafka: EmbeddedKafka) -> None:
        self._kafka = kafka

    @property
    def pid(self) -> int | None:
        """Return the process id of the JVM; None if it does not run."""
        return self._kafka.pid

    def start(self) -> None:
        """Start Kafka, and return when it is ready. Raises PortInUse, NoJdk, JarUnavailable, NotStarted."""
        self._kafka.start()

    def ready(self) -> bool:
        """Return True, since ``start`` has waited."""
        return True

    def failure(self) -> BasculeError:
        """Return an error that names the log."""
        return Unavailable(f"kafka ended; see {self._kafka.log_file}")

    def hang_up(self) -> None:
        """Do nothing: Kafka has no settings that may change."""

    def stop(self, timeout_s: float) -> None:
        """Shut Kafka down in a controlled way."""
        self._kafka.stop(timeout_s)


class _Watched:
    """A part and its state."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self.state = PartState.WAITING
        self.since_s = 0.0
        self.due_s = 0.0
        self.deaths = 0
        self.served = False
        self.reload_due = False

    def move(self, seen: Input, now_s: float) -> None:
        was_steady = self.state is PartState.READY and now_s - self.since_s >= STEADY_S
        self.state = TRANSITIONS[self.state, seen]
        self.since_s = now_s
        self.served = self.served or seen is Input.SERVES
        if self.state is PartState.WAITING:
            self.deaths = 0 if was_steady else self.deaths
            self.due_s = now_s + backoff_s(self.deaths)
            self.deaths += 1


def backoff_s(deaths: int) -> float:
    """Return the wait before the next start, after ``deaths`` ends in a short time."""
    return min(BACKOFF_FIRST_S * 2 ** (deaths - 1), BACKOFF_MAX_S) if deaths else 0.0


class Supervisor:
    """Runs parts in the given order: each is first started when those before it are ready."""

    def __init__(
        self, parts: Sequence[Part], *, pids_file: Path, tell: Callable[[str], None],
        service_manager: ServiceManager = NO_SERVICE_MANAGER,
    ) -> None:  # fmt: skip
        """Prepare to run ``parts``. ``tell`` gets one line for each event after the start."""
        self._service_manager = service_manager
        self._watched = [_Watched(part) for part in parts]
        self._pids_file = pids_file
        self._tell = tell
        self._pids_written: dict[str, int | None] | None = None

    def run(self, stop: StopSignals, on_ready: Callable[[], None]) -> None:
        """Start and watch the parts until ``stop`` is set, then stop them in reverse order. Call ``on_ready`` once when all are ready.

        Call this from a thread that stays: on Linux the parts end with it. Raises BasculeError if a part does not become ready the first
        time.
        """
        told = False
        try:
            while not stop.is_set():
                self.look(time.monotonic())
                self._service_manager.alive()
                if not told and self.all_ready:
                    told = True
                    on_ready()
                stop.wait(LOOK_S)
        finally:
            self._service_manager.stopping()
            for watched in reversed(self._watched):
                watched.part.stop(STOP_TIMEOUT_S)
            self._write_pids()

    def hang_up(self) -> None:
        """Send SIGHUP to each part that can reload its settings, once the part is ready."""
        for watched in self._watched:
            watched.reload_due = True

    @property
    def all_ready(self) -> bool:
        """Return True if every part is ready."""
        return all(watched.state is PartState.READY for watched in self._watched)

    def look(self, now_s: float) -> None:
        """Check every part once, and do what is due. Raises BasculeError for a part that was never ready."""
        for position, watched in enumerate(self._watched):
            if watched.state is PartState.WAITING:
                if now_s >= watched.due_s and all(before.served for before in self._watched[:position]):
                    self._start(watched, now_s)
            elif watched.part.pid is None:
                self._lost(watched, Input.ENDED, watched.part.failure(), now_s)
            elif watched.state is PartState.STARTING:
                if watched.part.ready():
                    watched.move(Input.SERVES, now_s)
                    if watched.deaths:
                        self._tell(f"{watched.part.name} is ready again (process {watched.part.pid})")
                elif now_s - watched.since_s > START_TIMEOUT_S:
                    watched.part.stop(0.0)
                    self._lost(watched, Input.LATE, Unavailable(f"{watched.part.name} was not ready after {START_TIMEOUT_S:g} s"), now_s)
            elif watched.reload_due:
                watched.reload_due = False
                watched.part.hang_up()
            self._write_pids()

    def _start(self, watched: _Watched, now_s: float) -> None:
        try:
            watched.part.start()
        except BasculeError as error:
            self._lost(watched, Input.ENDED, error, now_s)
        else:
            watched.move(Input.LAUNCHED, now_s)

    def _lost(self, watched: _Watched, seen: Input, error: BasculeError, now_s: float) -> None:
        if not watched.served:
            raise error
        watched.move(seen, now_s)
        self._tell(f"{error}; starting {watched.part.name} again" + (f" in {watched.due_s - now_s:g} s" if watched.due_s > now_s else ""))

    def _write_pids(self) -> None:
        pids = {watched.part.name: watched.part.pid for watched in self._watched}
        if pids != self._pids_written:
            write_json(self._pids_file, pids)
            self._pids_written = pids


def choose_ports(file: Path, wanted: Mapping[str, tuple[int, str, str]]) -> dict[str, int]:
    """Return the port of each listener. ``wanted`` is name -> (port or 0, the setting that chooses it, host).

    If the port is 0, the port of the last run, which ``file`` remembers, is used if it is free. The file keeps the ports of other names.
    Raises PortInUse if a given port is in use.
    """
    try:
        read = json.loads(file.read_text())
    except (OSError, ValueError):
        read = None
    remembered = read if isinstance(read, dict) else {}
    chosen: dict[str, int] = {}
    for name, (port, setting, host) in wanted.items():
        if port:
            check_port(port, name, setting, host)
        chosen[name] = port or _free(remembered.get(name), name, setting, host)
    write_json(file, {**remembered, **chosen})
    return chosen


def _free(remembered: object, name: str, setting: str, host: str) -> int:
    if isinstance(remembered, int) and remembered:
        with suppress(PortInUse):
            check_port(remembered, name, setting, host)
            return remembered
    return free_port(host)


def write_json(file: Path, content: Mapping[str, object]) -> None:
    """Replace a file atomically: a reader sees the old content or the new one."""
    draft = file.with_name(f"{file.name}.{os.getpid()}")
    draft.write_text(json.dumps(content, indent=2) + "\n")
    draft.replace(file)
