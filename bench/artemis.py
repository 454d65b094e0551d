"""Apache Artemis with its default settings: the broker that benchmarks and tests compare Bascule with.

    python -m bench.artemis DIR        # runs until Ctrl-C

The journal is the default of ``artemis create``: NIO files with fdatasync, and a buffer timeout tuned to the disk.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Self

from bascule.core.errors import Unavailable
from bascule.embedded.jars import JarStore
from bascule.embedded.java import find_jdk
from bascule.embedded.process import Child, free_port

USER = PASSWORD = "bench"
START_TIMEOUT_S = 60.0
#: Only AMQP is measured; ports of other protocols could collide.
OTHER_ACCEPTORS = ("--no-amqp-acceptor", "--no-hornetq-acceptor", "--no-mqtt-acceptor", "--no-stomp-acceptor", "--no-web")


class Artemis:
    """An instance in a directory of its own, on a free port."""

    name = "artemis"

    def __init__(self, directory: Path) -> None:
        """Create the instance if the directory does not hold one."""
        self.directory = directory
        self._environment = {"JAVA_HOME": str(find_jdk().home)}
        if not (directory / "etc").exists():
            self._create()
        acceptor = re.search(r"tcp://127\.0\.0\.1:(\d+)", self.settings)
        assert acceptor, "artemis create wrote another broker.xml than expected"
        self.port = int(acceptor[1])
        # The launcher of Artemis ends with exec, so the process id of the child is that of the broker.
        self._child = Child(
            [directory / "bin" / "artemis", "run"], log_file=directory / "log" / "run.log", env=self._environment, name="Artemis"
        )

    @property
    def settings(self) -> str:
        """Return the path of its broker.xml."""
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
        said = dict(re.findall(r"<journal-(type|datasync)>(\w+)</", self.settings))
        return f"Artemis: journal {said['type']}, " + ("fdatasync before the answer" if said["datasync"] == "true" else "no fdatasync")

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

    def _create(self) -> None:
        home = JarStore().unpacked("artemis")
        access = ("--user", USER, "--password", PASSWORD, "--allow-anonymous", "--host", "127.0.0.1", "--default-port", str(free_port()))
        command: list[str | Path] = [home / "bin" / "artemis", "create", "--silent", *access, *OTHER_ACCEPTORS, self.directory]
        made = subprocess.run(command, env={**os.environ, **self._environment}, capture_output=True, text=True, check=False)
        if made.returncode:
            raise Unavailable(f"artemis create failed:\n{made.stdout}{made.stderr}")

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


if __name__ == "__main__":
    with Artemis(Path(sys.argv[1]).absolute()) as broker:
        print(f"ready {broker.url} pid={broker.pid}", flush=True)
        signal.sigwait({signal.SIGINT, signal.SIGTERM})
