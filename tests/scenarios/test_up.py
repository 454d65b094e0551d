"""`bascule up` from outside: its ready line, its files, its parts killed and restarted, its end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bascule.client import Context, InvalidSelector, Queue, Topic, connect
from tests.support.client import SOON_S
from tests.support.speed import SLOWNESS
from tests.support.system import PYTHON_FAILOVER, wait_for

COMMAND = [sys.executable, "-m", "bascule.cli"]
#: A broker that was suspended for half of its session steps down, and commands that do not reconnect then fail. A loaded machine can
#: suspend a process for 5 s, so the default session is too short for these tests.
CALM = {"BASCULE_BROKER__SESSION_TIMEOUT_S": "60"}


class Running:
    """Start a `bascule up`, and return when it serves."""

    def __init__(self, process: subprocess.Popen[str], directory: Path, ready: str) -> None:
        self.process = process
        self.directory = directory
        self.ready = ready
        self.ports: dict[str, int] = json.loads((directory / "ports.json").read_text())

    def pid(self, part: str) -> int | None:
        found: int | None = json.loads((self.directory / "pids.json").read_text())[part]
        return found

    def kill(self, part: str) -> None:
        """End a part by SIGKILL. Return when another process has replaced it."""
        before = self.pid(part)
        assert before is not None
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: self.pid(part) not in (None, before), f"another {part}")

    @property
    def url(self) -> str:
        return f"amqp://127.0.0.1:{self.ports['amqp']}"

    def client(self, **user: str) -> Context:
        return connect(self.url, **user)

    def run(self, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
        command = [*COMMAND, *arguments, "--broker", self.url]
        return subprocess.run(command, cwd=self.directory, input=stdin, capture_output=True, text=True, timeout=60 * SLOWNESS, check=False)

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


@contextmanager
def up(directory: Path, *arguments: str) -> Iterator[Running]:
    command = [*COMMAND, "up", "--data-dir", str(directory), "--amqp-port", "0", "--kafka-port", "0", "--admin-port", "0", *arguments]
    directory.mkdir(exist_ok=True)
    with (directory / "up.err").open("a") as errors:
        process = subprocess.Popen(command, cwd=directory, env={**os.environ, **CALM}, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        assert ready, (directory / "up.err").read_text()
        yield Running(process, directory, ready)
    finally:
        if process.poll() is None:
            process.terminate()
        process.communicate(timeout=120)


def texts(client: Context, queue: str, count: int) -> list[Any]:
    """Receive the next messages of a queue."""
    with client.consumer(Queue(queue)) as consumer:
        received = [consumer.receive(SOON_S) for _ in range(count)]
    return [message and message.body for message in received]


def send(client: Context, queue: str, *bodies: str) -> None:
    client.producer(Queue(queue)).send_many(bodies)


def test_up_restarts_killed_parts_and_resumes_its_directory_with_all_messages(data_dir: Path) -> None:
    with up(data_dir, "--no-pipelines") as bascule:
        assert bascule.ready == (
            f"ready amqp://127.0.0.1:{bascule.ports['amqp']} kafka=127.0.0.1:{bascule.ports['kafka']} "
            f"admin=http://127.0.0.1:{bascule.ports['admin']}\n"
        )
        with bascule.client() as client:
            send(client, "q", "1", "2")
        bascule.kill("broker")
        wait_for(lambda: "broker is ready again" in (data_dir / "up.err").read_text(), "the restarted broker to be ready")
        with bascule.client() as client:
            assert texts(client, "q", 1) == ["1"]
            send(client, "behind", "nobody answers an acknowledgement, but a send that is stored behind it")
        bascule.kill("kafka")
        wait_for(lambda: "kafka is ready again" in (data_dir / "up.err").read_text(), "the restarted Kafka to be ready")
        wait_for(lambda: ready_code(bascule.ports["admin"]) == 200, "the broker to serve again")
        # It may still be ready because it has not noticed that Kafka was unavailable for almost as long as a session.
        with connect(PYTHON_FAILOVER.format(bascule.url)) as client:
            send(client, "q", "3")
        ports = bascule.ports
        assert bascule.stop() == 0
        assert bascule.pid("kafka") is None
        assert bascule.pid("broker") is None
    with up(data_dir, "--no-pipelines") as bascule:
        assert bascule.ports == ports
        with bascule.client() as client:
            assert texts(client, "q", 2) == ["2", "3"]


def ready_code(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return int(answer.status)
    except OSError as error:
        code: int = getattr(error, "code", 0)
        return code


@pytest.fixture(scope="module")
def bascule(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Share one `bascule up` among the tests that do not harm it."""
    directory = tmp_path_factory.mktemp("up")
    (directory / "ann-password").write_text("hush\n")
    (directory / "wrong-password").write_text("wrong\n")
    with up(directory, "--no-pipelines", "--user", "ann:file:ann-password") as running:
        yield running


AS_ANN = ("--user", "ann", "--password-file", "ann-password")


def test_messages_sent_by_command_are_browsed_and_received_by_command(bascule: Running) -> None:
    sent = bascule.run("send", "cli", "--text", '{"n": 1}', "--property", "n:int=45", "--property", "who=ann", "--count", "2", *AS_ANN)
    assert (sent.returncode, sent.stdout, sent.stderr) == (0, "sent 2\n", "")
    browsed = bascule.run("browse", "cli", "--selector", "n > 44", "--format", "json", *AS_ANN)
    assert [json.loads(each)["properties"] for each in browsed.stdout.splitlines()] == [{"n": 45, "who": "ann"}] * 2
    assert bascule.run("browse", "cli", "--selector", "n > 45", "--format", "json", *AS_ANN).stdout == ""
    received = bascule.run("receive", "cli", "--count", "2", "--timeout-s", str(SOON_S), "--format", "json", *AS_ANN)
    assert (received.returncode, received.stderr) == (0, "")
    none = bascule.run("receive", "cli", "--timeout-s", "0.5", *AS_ANN)
    assert (none.returncode, none.stderr) == (1, "received 0 of 1\n")
    assert [json.loads(each)["body"] for each in received.stdout.splitlines()] == ['{"n": 1}'] * 2
    assert "{" not in bascule.run("browse", "cli", *AS_ANN).stdout


def test_each_line_of_standard_input_is_a_message(bascule: Running) -> None:
    assert bascule.run("send", "lines", "--lines", "--format", "json", *AS_ANN, stdin="a\nb\n").stdout == '{"sent": 2}\n'
    received = bascule.run("receive", "lines", "--count", "2", *AS_ANN)
    assert received.returncode == 0
    assert [row.split()[-1] for row in received.stdout.splitlines() if row.strip().startswith("ID:")] == ["a", "b"]


def test_a_topic_reaches_every_subscriber(bascule: Running) -> None:
    with bascule.client(user="ann", password="hush") as client:
        first, second = (client.consumer(Topic("news")) for _ in range(2))
        assert bascule.run("send", "news", "--topic", "--text", "hello", *AS_ANN).returncode == 0
        for consumer in (first, second):
            message = consumer.receive(SOON_S)
            assert message is not None
            assert message.body == "hello"


def test_missing_or_wrong_password_is_reported_as_unauthorized(bascule: Running) -> None:
    for user in ((), ("--user", "ann", "--password-file", "wrong-password")):
        done = bascule.run("send", "q", "--text", "a", *user)
        assert done.returncode == 2
        assert done.stderr.startswith("error: amqp:unauthorized-access: ")


def test_invalid_selector_of_a_consumer_is_refused_with_its_column(bascule: Running) -> None:
    with bascule.client(user="ann", password="hush") as client, pytest.raises(InvalidSelector, match="column 5"):
        client.consumer(Queue("q"), selector="n > > 1")


def test_status_is_shown_as_a_table_and_as_json(bascule: Running) -> None:
    bascule.run("send", "shown", "--text", "a", *AS_ANN)
    command = [*COMMAND, "status", "--admin", f"http://127.0.0.1:{bascule.ports['admin']}"]
    environment = {**os.environ, "BASCULE_EMBEDDED__DATA_DIR": str(bascule.directory)}  # the broker's token is there
    done = subprocess.run([*command, "--format", "json"], env=environment, capture_output=True, text=True, timeout=60, check=True)
    queue = next(queue for queue in json.loads(done.stdout)["queues"] if queue["name"] == "shown")
    assert (queue["messages"], queue["routing"]) == (1, "anycast")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "shown" in done.stdout


def test_up_refuses_a_data_directory_or_port_in_use(bascule: Running, tmp_path: Path) -> None:
    taken = str(bascule.ports["amqp"])
    for arguments, text in (
        (["--data-dir", str(bascule.directory)], f"error: {bascule.directory} is in use by another"),
        (
            ["--data-dir", str(tmp_path), "--amqp-port", taken, "--kafka-port", "0"],
            f"error: port {taken} for amqp on 127.0.0.1 cannot be used",
        ),
    ):
        done = subprocess.run([*COMMAND, "up", *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith(text)


def test_without_java_the_start_fails_with_one_message(tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "up", "--data-dir", str(tmp_path / "data"), "--kafka-port", "0", "--amqp-port", "0", "--admin-port", "0"],
        env=os.environ | {"JAVA_HOME": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("error: JAVA_HOME is ")
    assert "Traceback" not in done.stderr
