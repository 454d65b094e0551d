"""A broker and pipelines as processes with an existing Kafka, for tests that kill them.

    with System(kafka.bootstrap, directory, prefix="orders") as system:
        ...
        system.broker.kill()
        system.broker.start()

Nothing is restarted automatically, so the test decides which process is dead and when. ``bascule up`` has its own tests.
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
from contextlib import contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, Self

from bascule.core.defaults import OWNER_TOKEN_FILE
from bascule.core.errors import InvalidInput, Unavailable
from bascule.embedded.process import Child, free_port
from tests.support.preloaded import PreloadedChild, possible
from tests.support.speed import SLOWNESS

#: Far above the needs of a loaded machine: a longer wait means a fault.
BROKER_START_S = 60.0 * SLOWNESS
PIPELINES_START_S = 240.0 * SLOWNESS
WAIT_S = 60.0
#: Interval between two checks of a condition: short at first, and then this share of the time that has passed, up to a maximum.
POLL_S = 0.02
POLL_SHARE = 0.05
POLL_MAX_S = 0.25
BROKER = "broker"
#: Timeout of the admin server, also on a loaded machine.
ANSWER_S = 30.0 * SLOWNESS
#: A broker without a standby may wait this long for Kafka, in seconds: longer than any pause of the broker or of Kafka on a busy machine.
#: Brokers with a standby have SHORT_SESSION in their configuration. A busy machine may pause all processes for ten seconds.
LONE_SESSION_S = 120
SESSION_SETTING = "session_timeout_s"
SHORT_SESSION = f"[broker]\n{SESSION_SETTING} = 15\n"
#: An idle query of Spark asks Kafka a hundred times a second, which would delay everything else on few processors.
SELDOM = json.dumps({"spark.sql.streaming.pollingDelay": "100"})
#: Failover options of a Python client that reconnects quickly and without end, and of a Java client, which would otherwise warn of each
#: attempt.
PYTHON_FAILOVER = "failover:({})?failover.reconnectDelay=20&failover.maxReconnectDelay=200"
FAILOVER = f"{PYTHON_FAILOVER}&failover.warnAfterReconnectAttempts=1000"


class Late(Unavailable):
    """Raised when a condition did not become true in time."""


def wait_for(condition: Callable[[], Any], what: str | Callable[[], str], timeout_s: float = WAIT_S) -> Any:
    """Wait until ``condition()`` is true, and return its result. An OSError counts as not yet. Raises Late.

    A function ``what`` is called at the end and says what there is by then. ``timeout_s`` is for a machine of the usual speed.
    """
    timeout_s *= SLOWNESS
    begun_s = time.monotonic()
    while True:
        try:
            if found := condition():
                return found
        except OSError:
            pass  # the server is being started
        passed_s = time.monotonic() - begun_s
        if passed_s > timeout_s:
            raise Late(f"waited {timeout_s:g} s for {what if isinstance(what, str) else what()}")
        time.sleep(min(max(POLL_S, POLL_SHARE * passed_s), POLL_MAX_S))


def failover(url: str) -> str:
    """Return the URL of a client that reconnects whenever it has lost its broker."""
    return FAILOVER.format(url)


class Command:
    """A serving ``bascule`` command that can be started, killed, suspended and restarted."""

    def __init__(self, name: str, *, log_file: Path, env: Mapping[str, str], start_timeout_s: float) -> None:
        self.log_file = log_file
        self._timeout_s = start_timeout_s
        env = {"PYTHONUNBUFFERED": "1", **env}
        self._child = (
            PreloadedChild(name, log_file=log_file, env=env)
            if possible(env)
            else Child([sys.executable, "-m", "bascule.cli", name], log_file=log_file, env=env, name=name)
        )
        self._log_start = 0

    def launch(self) -> None:
        """Start the command without waiting. Raises NotStarted."""
        self._log_start = self.log_file.stat().st_size if self.log_file.exists() else 0
        self._child.start()

    def start(self) -> None:
        """Start the command, and return when it is ready. Raises NotStarted."""
        self.launch()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Return when the command is ready. Raises NotStarted."""
        self._child.wait_ready(lambda: any(line.startswith("ready ") for line in self.said().splitlines()), self._timeout_s)

    def said(self) -> str:
        """Return the output since the last start."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_start)
            return log.read().decode(errors="replace")

    @property
    def pid(self) -> int:
        """Return the process id. Raises Unavailable if the command does not run."""
        if self._child.pid is None:
            raise Unavailable(f"{self._child.name} does not run")
        return self._child.pid

    @property
    def running(self) -> bool:
        """Return True if the command runs."""
        return self._child.running

    def kill(self) -> None:
        """End the command by SIGKILL; return when it is gone."""
        self._child.kill()

    def restart(self) -> None:
        """Kill the command, start it, and return when it is ready."""
        self.kill()
        self.start()

    def stop(self) -> None:
        """Stop the command in an orderly way."""
        self._child.stop()


class System:
    """A broker with its own journal in a Kafka, and the pipelines of its configuration once they are started."""

    def __init__(self, bootstrap: str, directory: Path, *, prefix: str, config: str = "", env: Mapping[str, str] | None = None) -> None:
        """Prepare the system.

        ``config`` is the text of a bascule.toml; bridge, topics, Kafka, ports and directory are set here, or by ``env``.
        """
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
            **({} if SESSION_SETTING in config else {f"BASCULE_BROKER__{SESSION_SETTING.upper()}": str(LONE_SESSION_S)}),
            **(env or {}),
        }
        self.data_dir = Path(chosen["BASCULE_EMBEDDED__DATA_DIR"])
        self.broker = Command(BROKER, log_file=directory / "broker.log", env=chosen, start_timeout_s=BROKER_START_S)
        self.pipelines = Command("pipelines", log_file=directory / "pipelines.log", env=chosen, start_timeout_s=PIPELINES_START_S)

    def __enter__(self) -> Self:
        """Start the broker."""
        self.broker.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the processes that run."""
        self.pipelines.stop()
        self.broker.stop()

    @property
    def url(self) -> str:
        """Return the URL for a client that should notice the broker's end."""
        return f"amqp://127.0.0.1:{self.port}"

    @property
    def failover_url(self) -> str:
        """Return the URL for a client that should reconnect."""
        return failover(self.url)

    def status(self, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        """Return the status of the broker. Raises OSError."""
        found: dict[str, Any] = self._get("status", timeout_s)
        return found

    def serves(self, timeout_s: float = ANSWER_S) -> bool:
        """Return True if the broker reports that it serves clients."""
        return self._says(lambda status: status["serving"], timeout_s)

    def stands_by(self, timeout_s: float = ANSWER_S) -> bool:
        """Return True if the broker reports that it is a standby."""
        return self._says(lambda status: not status["serving"] and "standing by" in status["reason"], timeout_s)

    def _says(self, what: Callable[[dict[str, Any]], Any], timeout_s: float) -> bool:
        try:
            return bool(self.broker.running and what(self.status(timeout_s)))
        except (OSError, http.client.HTTPException):  # it is starting, or has just ended
            return False

    def ask(self, path: str, **parameters: str | int) -> Any:
        """Return what the admin server shows under a path. Raises OSError."""
        return self._get(f"{path}?{urllib.parse.urlencode(parameters)}", ANSWER_S)

    def logins(self) -> list[tuple[str, str]]:
        """Return user and mechanism of each connection. Raises OSError."""
        return [(each["user"], each["mechanism"]) for each in self.ask("connections")]

    def metrics(self, timeout_s: float = ANSWER_S) -> str:
        """Return the metrics from the admin server. Raises OSError."""
        with urllib.request.urlopen(self._request("metrics"), timeout=timeout_s) as answer:
            text: str = answer.read().decode()
        return text

    def _get(self, path: str, timeout_s: float) -> Any:
        with urllib.request.urlopen(self._request(path), timeout=timeout_s) as answer:
            return json.load(answer)

    def act(self, action: str, /, *, timeout_s: float = WAIT_S, **arguments: str | bool) -> dict[str, Any]:
        """Carry out an administrator's action, and return its answer. Raises InvalidInput with the broker's refusal, OSError."""
        request = self._request(action, json.dumps(arguments).encode())
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                done: dict[str, Any] = json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                raise InvalidInput(json.load(error)["error"]) from None
        return done

    def _request(self, path: str, body: bytes | None = None) -> urllib.request.Request:
        """Return a request of the broker's owner, with the token in the data directory if the broker has written one."""
        token = self.data_dir / OWNER_TOKEN_FILE
        headers = {"authorization": f"Bearer {token.read_text()}"} if token.exists() else {}
        return urllib.request.Request(f"http://127.0.0.1:{self.admin_port}/{path}", body, headers)

    def queue(self, name: str) -> dict[str, Any] | None:
        """Return the status of a queue, or of a subscription's queue; None if there is none. Raises OSError."""
        try:
            found: dict[str, Any] = self.ask("queues", name=name)
        except urllib.error.HTTPError as error:
            with error:
                if error.code == HTTPStatus.NOT_FOUND:
                    return None
            # A broker that does not serve tells the status only, which names all queues.
            return next((queue for queue in self.status()["queues"] if queue["name"] == name), None)
        return found

    def depth(self, name: str) -> int:
        """Return the number of messages in a queue, waiting or with consumers. Raises OSError."""
        queue = self.queue(name)
        return 0 if queue is None else int(queue["messages"]) + int(queue["delivering"])

    def wait_depth(self, name: str, count: int) -> None:
        """Return when a queue has ``count`` messages. Raises Late."""
        wait_for(lambda: self.depth(name) == count, f"{count} messages in queue {name}")


def suspend(pid: int) -> None:
    """Suspend a process (SIGSTOP), and return when none of its threads runs. Raises Late, ProcessLookupError."""
    os.kill(pid, signal.SIGSTOP)
    # On a busy machine its threads run for some more milliseconds, until each has had its turn.
    wait_for(lambda: all(stands_still(task) for task in Path(f"/proc/{pid}/task").iterdir()), f"process {pid} to stand still")


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """Suspend a process (SIGSTOP). The block may kill it."""
    try:
        suspend(pid)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def stands_still(task: Path) -> bool:
    """Return True if a process or a thread, by its directory in /proc, is suspended. Raises OSError."""
    return (task / "stat").read_text().rpartition(")")[2].split()[0] in "Tt"


class Descendant(NamedTuple):
    """A process below another one."""

    parent: int
    command: str


def descendants(pid: int) -> dict[int, str]:
    """Return process id and command line of all descendants of a process."""
    return {below: found.command for below, found in family(pid).items()}


def family(pid: int) -> dict[int, Descendant]:
    """Return all descendants of a process by their process ids."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with suppress(OSError, IndexError):  # the process has just ended
            children.setdefault(int(_read(name, "stat").rpartition(b")")[2].split()[1]), []).append(int(name))
    found: dict[int, Descendant] = {}
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        for child in children.get(parent, ()):
            with suppress(OSError):
                found[child] = Descendant(parent, _read(child, "cmdline").replace(b"\0", b" ").decode(errors="replace"))
                waiting.append(child)
    return found


def _read(pid: int | str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
