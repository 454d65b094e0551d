"""Java clients that continue through crashes (java/Storm.java), and the history that they write."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Self

from bascule.core.errors import Unavailable
from bascule.embedded.java import find_jdk
from tests.support.java import java_command
from tests.support.operations import Operation, operations_in

END_TIMEOUT_S = 120.0
#: Lines of the history of a stalled client that a report shows.
LAST_LINES = 12


class Storm:
    """A JVM with one or more clients: ``send:A``, ``send-tx:A``, ``move:A>B``, ``take:B``. They begin at once."""

    def __init__(self, url: str, directory: Path, *clients: str, name: str = "storm", **options: object) -> None:
        """Start the clients, and return when all are connected. Options are those of Storm.java, ``quiet_s`` for --quiet-s."""
        self._name = name
        self.history_file = directory / f"{name}.history"
        arguments = ["--url", url, "--history", str(self.history_file), "--clients", " ".join(clients), "--name", name]
        for option, value in options.items():
            arguments += [f"--{option.replace('_', '-')}", str(value)]
        with (directory / f"{name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                java_command("Storm", *arguments), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        self._senders_ended = False
        self._operations: list[Operation] = []
        self._read_bytes = 0
        self._read("ready")

    def __enter__(self) -> Self:
        """Return the storm, which runs already."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the JVM, if it has not ended."""
        if self._process.poll() is None:
            self.kill()
        self._process.communicate()

    @property
    def pid(self) -> int:
        """Return the process id of the JVM."""
        return self._process.pid

    def kill(self) -> None:
        """End the JVM with all clients by SIGKILL."""
        self._process.kill()
        self._process.wait()

    def stop_senders(self) -> None:
        """Stop the senders, and return when they have ended; the other clients continue. Call ``stop`` after this. Raises Unavailable."""
        self._tell("stop-senders")
        self._read("senders-ended")
        self._senders_ended = True

    def stop(self) -> dict[str, Any]:
        """Stop all clients, receivers once nothing has come for ``quiet_s``. Return the numbers of messages by outcome.

        Raises Unavailable.
        """
        if not self._senders_ended:
            self.stop_senders()
        self._tell("stop")
        counts = self._read("end")
        self._process.wait(END_TIMEOUT_S)
        return counts

    def standing(self) -> str:
        """Return the last lines of each client that has not ended, and the current stacks of its threads and of those that reconnect."""
        jstack = [str(find_jdk().home / "bin" / "jstack"), str(self.pid)]
        threads = subprocess.run(jstack, capture_output=True, text=True, timeout=END_TIMEOUT_S, check=False).stdout.split("\n\n")
        stacks = [(thread.partition('"')[2].partition('"')[0], thread) for thread in threads]
        lines = self.history_file.read_text().splitlines()
        said = []
        for name, stack in stacks:
            if name.startswith(f"{self._name}-"):
                said += [*[line for line in lines if f'"client":"{name}"' in line][-LAST_LINES:], stack]
            elif name.startswith("FailoverProvider"):
                said.append(stack)
        return "\n".join(said)

    def history(self) -> list[Operation]:
        """Return the operations so far. Only the new lines are read."""
        with self.history_file.open("rb") as file:
            file.seek(self._read_bytes)
            lines, newline, _ = file.read().rpartition(b"\n")
        self._operations += operations_in(lines)
        self._read_bytes += len(lines) + len(newline)
        return [*self._operations]

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def _read(self, event: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise Unavailable(f"the storm ended with {self._process.wait()} before its {event!r}")
        said: dict[str, Any] = json.loads(line)
        return said
