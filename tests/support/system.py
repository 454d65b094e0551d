"""A broker, and pipelines, as processes against a Kafka that is there: for tests that kill them.

    with System(kafka.bootstrap, directory, prefix="orders") as system:
        ...
        system.broker.kill()
        system.broker.start()

Nothing is started again by itself, so a test says what is dead and when. ``bascule up`` has its own tests.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from bascule.core.errors import InvalidInput, Unavailable
from bascule.embedded.process import Child, free_port
from tests.support.speed import SLOWNESS

#: Far above what a loaded machine needs: a test that waits longer has found something.
BROKER_START_S = 60.0 * SLOWNESS
PIPELINES_START_S = 240.0 * SLOWNESS
WAIT_S = 60.0
POLL_S = 0.02
#: Of the admin server, also on a loaded machine.
ANSWER_S = 30.0 * SLOWNESS
#: Where nothing comes, a query of Spark asks Kafka a hundred times a second; on few processors all others wait for that.
SELDOM = json.dumps({"spark.sql.streaming.pollingDelay": "100"})
#: A Python client that comes back at once, as long as it takes; and a Java one, which would else warn of each attempt.
PYTHON_FAILOVER = "failover:({})?failover.reconnectDelay=20&failover.maxReconnectDelay=200"
FAILOVER = f"{PYTHON_FAILOVER}&failover.warnAfterReconnectAttempts=1000"


class Late(Unavailable):
    """A condition did not come true in time."""


def wait_for(condition: Callable[[], Any], what: str, timeout_s: float = WAIT_S) -> Any:
    """Look until ``condition()`` is true, and return what it gave. An OSError counts as not yet. Raises Late.

    ``timeout_s`` is for a machine of the usual speed.
    """
    timeout_s *= SLOWNESS
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if found := condition():
                return found
        except OSError:
            pass  # who would answer is being started
        if time.monotonic() > deadline:
            raise Late(f"waited {timeout_s:g} s for {what}")
        time.sleep(POLL_S)


def failover(url: str) -> str:
    """The URL of a client that connects again whenever it has lost its broker."""
    return FAILOVER.format(url)


class Command:
    """A ``bascule`` command that serves: started, killed, stopped for a while, started again."""

    def __init__(self, name: str, *, log_file: Path, env: Mapping[str, str], start_timeout_s: float) -> None:
        self.log_file = log_file
        self._timeout_s = start_timeout_s
        self._child = Child([sys.executable, "-m", "bascule.cli", name], log_file=log_file, env={"PYTHONUNBUFFERED": "1", **env}, name=name)
        self._log_start = 0

    def launch(self) -> None:
        """Start it; do not wait. Raises NotStarted."""
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        self._child.start()

    def start(self) -> None:
        """Start it, and return when it serves. Raises NotStarted."""
        self.launch()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Return when it serves. Raises NotStarted."""
        self._child.wait_ready(lambda: any(line.startswith("ready ") for line in self.said().splitlines()), self._timeout_s)

    def said(self) -> str:
        """What it has said since its last start."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    @property
    def pid(self) -> int:
        """Its process id. Raises Unavailable when it does not run."""
        if self._child.pid is None:
            raise Unavailable(f"{self._child.name} does not run")
        return self._child.pid

    @property
    def running(self) -> bool:
        """Whether it runs."""
        return self._child.running

    def kill(self) -> None:
        """End it by SIGKILL; returns when it is gone."""
        self._child.kill()

    def restart(self) -> None:
        """Kill it, start it, and return when it serves."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """End it in order."""
        self._child.stop()


class System:
    """A broker with a journal of its own in a Kafka, and the pipelines of its configuration when they are started."""

    def __init__(self, bootstrap: str, directory: Path, *, prefix: str, config: str = "", env: Mapping[str, str] | None = None) -> None:
        """``config`` is the text of a bascule.toml; bridge, topics, Kafka, ports and directory are chosen here, or by ``env``."""
        directory.mkdir(parents=True, exist_ok=True)
        self.bootstrap = bootstrap
        self.prefix = prefix
        self.port, self.admin_port = free_port(), free_port()
        file = directory / "bascule.toml"
        file.write_text(config)
        chosen = {
            "BASCULE_CONFIG": str(file),
            "BASCULE_BRIDGE__ID": prefix,
            "BASCULE_JOURNAL__PREFIX": prefix,
            "BASCULE_KAFKA__BOOTSTRAP_SERVERS": bootstrap,
            "BASCULE_EMBEDDED__DATA_DIR": str(directory),
            "BASCULE_BROKER__PORT": str(self.port),
            "BASCULE_ADMIN__PORT": str(self.admin_port),
            "BASCULE_PIPELINES__SPARK": SELDOM,
            **(env or {}),
        }
        self.broker = Command("broker", log_file=directory / "broker.log", env=chosen, start_timeout_s=BROKER_START_S)
        self.pipelines = Command("pipelines", log_file=directory / "pipelines.log", env=chosen, start_timeout_s=PIPELINES_START_S)

    def __enter__(self) -> Self:
        """Start the broker."""
        self.broker.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop what runs."""
        self.pipelines.stop()
        self.broker.stop()

    @property
    def url(self) -> str:
        """For a client that is to notice the broker's end."""
        return f"amqp://127.0.0.1:{self.port}"

    @property
    def failover_url(self) -> str:
        """For a client that is to live on."""
        return failover(self.url)

    def status(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """What the broker says of itself. Raises OSError."""
        found: dict[str, Any] = self._get("status", timeout_s)
        return found

    def serves(self, timeout_s: float = ANSWER_S) -> bool:
        """Whether the broker says that it serves clients."""
        return self._says(lambda status: status["serving"], timeout_s)

    def stands_by(self, timeout_s: float = ANSWER_S) -> bool:
        """Whether the broker says that it is the standby of another."""
        return self._says(lambda status: not status["serving"] and "standing by" in status["reason"], timeout_s)

    def _says(self, what: Callable[[dict[str, Any]], Any], timeout_s: float) -> bool:
        try:
            return bool(self.broker.running and what(self.status(timeout_s)))
        except (OSError, http.client.HTTPException):  # it starts, or has just died
            return False

    def ask(self, path: str, **parameters: str | int) -> Any:
        """What the admin server shows under a path. Raises OSError."""
        return self._get(f"{path}?{urllib.parse.urlencode(parameters)}", ANSWER_S)

    def metrics(self, timeout_s: float = ANSWER_S) -> str:
        """What the admin server shows a scraper. Raises OSError."""
        with urllib.request.urlopen(f"{self._admin}/metrics", timeout=timeout_s) as answer:
            text: str = answer.read().decode()
        return text

    def _get(self, path: str, timeout_s: float) -> Any:
        with urllib.request.urlopen(f"{self._admin}/{path}", timeout=timeout_s) as answer:
            return json.load(answer)

    def act(self, action: str, /, *, timeout_s: float = WAIT_S, **arguments: str | bool) -> dict[str, Any]:
        """An administrator's action, and what it says it did. Raises InvalidInput with the broker's refusal, OSError."""
        request = urllib.request.Request(f"{self._admin}/{action}", json.dumps(arguments).encode(), method="POST")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                done: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise InvalidInput(json.load(error)["error"]) from None
        return done

    @property
    def _admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def queue(self, name: str) -> dict[str, Any] | None:
        """How a queue, or the queue of a subscription, stands; None when there is none. Raises OSError."""
        return next((queue for queue in self.status()["queues"] if queue["name"] == name), None)

    def depth(self, name: str) -> int:
        """Messages in a queue, waiting or handed out. Raises OSError."""
        queue = self.queue(name)
        return 0 if queue is None else int(queue["messages"]) + int(queue["delivering"])

    def wait_depth(self, name: str, count: int) -> None:
        """Return when a queue holds so many messages. Raises Late."""
        wait_for(lambda: self.depth(name) == count, f"{count} messages in queue {name}")


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """A process that does nothing for a while (SIGSTOP)."""
    os.kill(pid, signal.SIGSTOP)
    try:
        # On a busy machine its threads go on for some milliseconds, until each has had its turn.
        wait_for(lambda: all(stands_still(task) for task in Path(f"/proc/{pid}/task").iterdir()), f"process {pid} to stand still")
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def stands_still(task: Path) -> bool:
    """Whether a process or a thread, by its directory in /proc, is stopped. Raises OSError."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0] in "Tt"


def descendants(pid: int) -> dict[int, str]:
    """Process id and command line of all children of a process, and of theirs."""
    children: dict[int, list[int]] = {}
    commands: dict[int, str] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((directory / "stat").read_text().rpartition(")")[2].split()[1])
            commands[int(directory.name)] = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (OSError, IndexError):
            continue  # it has just ended
        children.setdefault(parent, []).append(int(directory.name))
    found: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found[child] = commands[child]
            waiting.append(child)
    return found
