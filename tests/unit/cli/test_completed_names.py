# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""A shell completes names of queues and pipelines, for which the command asks a broker once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from bascule.cli import completed_names
from bascule.cli.completed_names import PLAIN
from tests.unit.cli.conftest import Bascule
from tests.unit.cli.test_administer import Broker, broker, part  # noqa: F401 - a fixture
from tests.unit.cli.test_completion import ARGUMENTS, PROTOCOLS

Complete = Callable[[str], list[str]]
HOSTILE = (
    "orders$(touch x)",
    "orders`x`",
    "orders'",
    'orders"',
    "orders;x",
    "orders x",
    "orders\nx",
    "orders\\.x",
    "orders*",
    "orders:x",
    "",
)


@pytest.fixture
def complete(bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """Return what fish offers after these words. Nothing else is printed."""
    monkeypatch.delenv("BASCULE_CONTEXT", raising=False)

    def completed(words: str) -> list[str]:
        with monkeypatch.context() as patch:
            for name, value in {**PROTOCOLS["fish"], ARGUMENTS: f"bascule {words}"}.items():
                patch.setenv(name, value)
            done = bascule()
        assert done.stderr == ""
        return [line.partition("\t")[0] for line in done.stdout.splitlines() if line]

    return completed


@pytest.fixture
def used(broker: Broker, bascule: Bascule) -> Broker:
    """Return a broker whose context is the current one."""
    broker.answers |= {
        "/list/queues": (200, part(*({"name": name} for name in ("orders", "orders.eu", "late.orders", "Orders", *HOSTILE)))),
        "/diverts": (200, [{"name": "d-one"}, {"name": "d-two"}]), "/ingresses": (200, [{"name": "i-one"}]),
        "/flow": (200, {"diverts": [{"name": "d-one"}], "ingresses": [{"name": "i-one"}]}),
    }  # fmt: skip
    Path("token").write_text("hush\n")
    assert bascule("context", "add", "here", "--admin", broker.url, "--token-file", "token", "--use").returncode == 0
    return broker


@pytest.mark.parametrize(
    "words",
    [
        "queue show ord", "queue purge ord", "queue move ord", "queue move a ord", "queue delete ord", "queue messages ord",
        "queue message ord", "check depth ord", "check consumers ord", "check age ord", "dead-letters list --queue ord",
        "dead-letters return --queue ord", "send ord", "receive ord", "browse ord", "export messages ord",
    ],
)  # fmt: skip
def test_names_of_queues_are_completed(words: str, used: Broker, complete: Complete) -> None:
    assert complete(words) == ["orders", "orders.eu"]
    assert used.asked == [("/list/queues?search=ord&limit=500", None)]
    assert used.token == "Bearer hush"


@pytest.mark.parametrize(
    ("words", "names", "path"),
    [
        *((f"divert {verb} d", ["d-one", "d-two"], "/diverts") for verb in ("show", "status", "pause", "restart", "offsets", "delete")),
        *((f"ingress {verb} ", ["i-one"], "/ingresses") for verb in ("show", "stop", "resume", "offsets", "change")),
        ("check pipelines ", ["d-one", "i-one"], "/flow"),
        ("check pipelines d-one i", ["i-one"], "/flow"),
    ],
)  # fmt: skip
def test_names_of_pipelines_are_completed(words: str, names: list[str], path: str, used: Broker, complete: Complete) -> None:
    assert complete(words) == names
    assert used.asked == [(path, None)]


@pytest.mark.parametrize(
    "words", ["queue create ord", "divert create d", "ingress create i", "send --topic ord", "browse --broker amqp://h ord"]
)
def test_new_names_and_names_at_other_brokers_are_not_asked_for(words: str, used: Broker, complete: Complete) -> None:
    assert complete(words) == []
    assert used.asked == []


def test_broker_of_the_options_is_asked(used: Broker, complete: Complete, bascule: Bascule) -> None:
    bascule("context", "add", "away", "--admin", "http://127.0.0.1:1", "--use")
    assert complete("queue show ord") == []
    assert complete("queue show --context here ord") == ["orders", "orders.eu"]
    assert used.token == "Bearer hush"
    assert complete(f"queue show --admin {used.url} ord") == ["orders", "orders.eu"]
    assert used.token is None
    Path("other.toml").write_text(f"[admin]\nport = {used.server_address[1]}\n")
    assert complete("queue show --config other.toml ord") == ["orders", "orders.eu"]


@pytest.mark.parametrize(
    "answer", [(503, {"error": "no"}), (403, {"error": "no"}), (200, {}), (200, [1]), (200, "<html>"), (200, {"entries": [{}]})]
)
def test_error_offers_nothing(answer: tuple[int, object], used: Broker, complete: Complete) -> None:
    used.answers["/list/queues"] = answer
    assert complete("queue show ord") == []


@pytest.mark.parametrize("words", ["queue show --context nobody o", "queue show --admin ftp:x o", "queue show --config nowhere.toml o"])
def test_wrong_options_offer_nothing(words: str, complete: Complete) -> None:
    assert complete(words) == []


def test_no_password_is_asked_for(used: Broker, complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BASCULE_PASSWORD", raising=False)
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("getpass.getpass", lambda _: pytest.fail("asks for a password"))
    assert complete(f"queue show --admin {used.url.replace('//', '//ann@')} ord") == []
    assert used.asked == []


def test_broker_that_does_not_answer_delays_the_shell_for_a_second(complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    assert completed_names.TIMEOUT_S == 1.0
    monkeypatch.setattr(completed_names, "TIMEOUT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        began_s = time.monotonic()
        assert complete(f"queue show --admin http://127.0.0.1:{silent.getsockname()[1]} ord") == []
        assert time.monotonic() - began_s < 5


def test_broker_that_sends_its_answer_slowly_does_not_hold_the_shell(complete: Complete, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completed_names, "DEADLINE_S", 0.5)
    ended = threading.Event()

    def drip(server: socket.socket) -> None:
        peer, _ = server.accept()
        with peer, suppress(OSError):  # the process of the client may have ended
            peer.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n")
            while not ended.wait(0.1):  # each byte comes before the timeout of a read
                peer.sendall(b" ")

    with socket.create_server(("127.0.0.1", 0)) as slow:
        dripping = threading.Thread(target=drip, args=(slow,), daemon=True)
        dripping.start()
        began_s = time.monotonic()
        assert complete(f"queue show --admin http://127.0.0.1:{slow.getsockname()[1]} ord") == []
        assert time.monotonic() - began_s < 10
        ended.set()
        dripping.join()


def test_file_of_a_token_that_cannot_be_read_to_its_end_does_not_hold_the_shell(
    complete: Complete, bascule: Bascule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completed_names, "DEADLINE_S", 0.2)
    os.mkfifo("token")
    bascule("context", "add", "here", "--admin", "http://127.0.0.1:1", "--token-file", "token", "--use")
    assert complete("queue show ord") == []
    os.close(os.open("token", os.O_WRONLY | os.O_NONBLOCK))  # lets the thread that reads it go on


@pytest.mark.parametrize("name", HOSTILE)
def test_name_that_a_shell_could_run_is_not_plain(name: str) -> None:
    assert PLAIN.fullmatch(name) is None


def test_bash_offers_names_of_queues(used: Broker, tmp_path: Path, bascule: Bascule) -> None:
    script = bascule("completion", "bash").stdout.replace("$1", f"{sys.executable} -m bascule") + (
        f'COMP_WORDS=(bascule queue show --admin {used.url} ord); COMP_CWORD=5; _bascule_completion bascule; echo "${{COMPREPLY[@]}}"\n'
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("orders orders.eu\n", "")
