"""Apache Artemis as ``artemis create`` makes it: the broker that benchmarks and tests compare Bascule with.

    python -m bench.artemis DIR        # runs until Ctrl-C

By default, ``artemis create`` chooses the journal: files with fdatasync, written by AIO if the machine has libaio, and by NIO otherwise,
with a buffer timeout tuned to the disk. Other journals are for comparison (``JOURNALS``).
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Self

from bascule.core.errors import Unavailable
from bascule.embedded.jars import JarStore
from bascule.embedded.java import find_jdk
from bascule.embedded.process import Child, free_port

USER = PASSWORD = "bench"
START_TIMEOUT_S = 60.0
#: Only AMQP is measured; ports of other protocols could collide.
OTHER_ACCEPTORS = ("--no-amqp-acceptor", "--no-hornetq-acceptor", "--no-mqtt-acceptor", "--no-stomp-acceptor", "--no-web")


#: The journals of an instance: the option of ``artemis create``, and whether it uses fdatasync. "created" is the choice of the command.
#: With its option --no-fsync the command would choose another kind of journal, MAPPED.
JOURNALS: Final[Mapping[str, tuple[Sequence[str], bool]]] = {
    "created": ((), True),
    "nio": (("--nio",), True),
    "nio-no-fsync": (("--nio",), False),
    "aio": (("--aio",), True),
    "aio-no-fsync": (("--aio",), False),
}
#: The library without which Artemis writes by NIO although its settings demand AIO.
LIBAIO: Final = "libaio.so.1"
_DATASYNC: Final = "<journal-datasync>{}</journal-datasync>"


class JournalUnavailable(Unavailable):
    """Artemis cannot have this journal here: AIO needs libaio."""


class Artemis:
    """An instance in a directory of its own, on a free port."""

    name = "artemis"

    def __init__(self, directory: Path, journal: str = "created") -> None:
        """Create the instance if the directory does not hold one. ``journal`` is one of JOURNALS. Raises JournalUnavailable."""
        self.directory = directory
        self.name = "artemis" if journal == "created" else f"artemis-{journal}"
        options, self._datasync = JOURNALS[journal]
        if "--aio" in options and not has_libaio():
            raise JournalUnavailable(f"Artemis needs {LIBAIO} for AIO")
        self._environment = {"JAVA_HOME": str(find_jdk().home)}
        if not (directory / "etc").exists():
            self._create(options)
        acceptor = re.search(r"tcp://127\.0\.0\.1:(\d+)", self.settings)
        assert acceptor, "artemis create wrote another broker.xml than expected"
        self.port = int(acceptor[1])
        # The launcher of Artemis ends with exec, so the process id of the child is that of the broker.
        self._child = Child(
            [directory / "bin" / "artemis", "run"], log_file=directory / "log" / "run.log", env=self._environment, name="Artemis"
        )

    @property
    def settings(self) -> str:
        """Return the text of its broker.xml."""
        return (self.directory / "etc" / "broker.xml").read_text()

    @property
    def url(self) -> str:
        """Return the URL for AMQP clients."""
        return f"amqp://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Return the process id of the broker."""
        assert self._child.pid is not None, "Artemis does not run"
        return self._child.pid

    @property
    def processes(self) -> dict[str, int]:
        """Return process ids by part."""
        return {"broker": self.pid}

    @property
    def durability(self) -> str:
        """Return what an answer to a sender means, according to the settings of the instance."""
        said = self.journal
        return f"{self.name}: journal {said['type']}, " + ("fdatasync before the answer" if said["datasync"] == "true" else "no fdatasync")

    @property
    def journal(self) -> dict[str, str]:
        """Return the type of the journal, and whether it uses fdatasync, as in broker.xml."""
        return dict(re.findall(r"<journal-(type|datasync)>(\w+)</", self.settings))

    def start(self) -> None:
        """Start it, and return when it accepts connections. Raises NotStarted."""
        self._child.start()
        self._child.wait_ready(self._listens, START_TIMEOUT_S)

    def kill(self) -> None:
        """Kill it as a crash would (SIGKILL)."""
        self._child.kill()

    def stop(self) -> None:
        """Stop it in order."""
        self._child.stop()

    def __enter__(self) -> Self:
        """Start it."""
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop it."""
        self.stop()

    def _create(self, options: Sequence[str]) -> None:
        home = JarStore().unpacked("artemis")
        access = ("--user", USER, "--password", PASSWORD, "--allow-anonymous", "--host", "127.0.0.1", "--default-port", str(free_port()))
        command: list[str | Path] = [home / "bin" / "artemis", "create", "--silent", *access, *OTHER_ACCEPTORS, *options, self.directory]
        made = subprocess.run(command, env={**os.environ, **self._environment}, capture_output=True, text=True, check=False)
        if made.returncode:
            raise Unavailable(f"artemis create failed:\n{made.stdout}{made.stderr}")
        if not self._datasync:
            changed = self.settings.replace(_DATASYNC.format("true"), _DATASYNC.format("false"))
            (self.directory / "etc" / "broker.xml").write_text(changed)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def has_libaio() -> bool:
    """Return whether this machine has the library for AIO."""
    try:
        ctypes.CDLL(LIBAIO)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    with Artemis(Path(sys.argv[1]).absolute()) as broker:
        print(f"ready {broker.url} pid={broker.pid}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
