"""At a terminal, a command asks before it deletes messages or positions, or decides a branch. A script is not asked."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.cli.test_administer import Broker, _elsewhere, broker, run

__all__ = ["_elsewhere", "broker"]  # fixtures

XID = "7:gtrid:bqual"
#: Commands that ask, a text of the consequence that they name, and the request that follows.
ASKING = [
    (("queue", "purge", "orders"), "all messages of queue 'orders'", "/queues/purge"),
    (("queue", "purge", "orders", "--selector", "a = 1"), "the chosen messages of queue 'orders'", "/queues/purge"),
    (("queue", "delete", "orders", "--force"), "queue 'orders' will be deleted", "/queues/delete"),
    (("subscription", "delete", "news"), "subscription 'news' will be deleted", "/subscriptions/delete"),
    (("branch", "commit", XID), "will be committed", "/branches/commit"),
    (("branch", "rollback", XID), "will be rolled back", "/branches/rollback"),
    (("branch", "forget", XID), "will be forgotten", "/branches/forget"),
    (("ingress", "reset"), "will be lost", "/ingress/reset"),
    (("divert", "delete", "late", "--wait-s", "0"), "messages that only this divert has", "/diverts/late"),
    (("ingress", "delete", "stock", "--wait-s", "0"), "ingress 'stock' stops", "/ingresses/stock"),
]


class Terminal(io.StringIO):
    """A terminal where somebody types."""

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _answers(broker: Broker) -> None:
    broker.answers |= {path: (200, {}) for _, _, path in ASKING}


@pytest.mark.parametrize(("words", "consequence", "path"), ASKING, ids=[" ".join(words) for words, *_ in ASKING])
def test_command_at_a_terminal_names_the_consequence_and_does_nothing_without_a_yes(
    words: tuple[str, ...], consequence: str, path: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (*words, "--admin", broker.url)
    for typed, code in (("n\n", 1), ("\n", 1), ("y\n", 0)):
        monkeypatch.setattr("sys.stdin", Terminal(typed))
        assert run(monkeypatch, *command) == code
        said = capsys.readouterr()
        assert consequence in said.err
        assert ("nothing was changed" in said.err) == (code == 1)
        assert "?" not in said.out
        assert [asked for asked, _ in broker.asked] == ([path] if code == 0 else [])


@pytest.mark.parametrize(
    ("words", "path"), [(words, path) for words, _, path in ASKING], ids=lambda each: " ".join(each) if isinstance(each, tuple) else ""
)
def test_script_and_option_yes_are_not_asked(words: tuple[str, ...], path: str, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    command = (*words, "--admin", broker.url)
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert run(monkeypatch, *command, "--yes") == 0
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert run(monkeypatch, *command) == 0
    assert [asked for asked, _ in broker.asked] == [path, path]


def test_queue_without_force_is_deleted_without_a_question_since_the_broker_refuses_one_with_messages(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(""))
    assert run(monkeypatch, "queue", "delete", "orders", "--admin", broker.url) == 0


def test_question_appears_on_a_real_terminal(broker: Broker, tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "bascule", "queue", "purge", "orders", "--admin", broker.url]
    with subprocess.Popen(command, cwd=tmp_path, stdin=theirs, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        os.close(theirs)
        os.write(ours, b"n\n")
        out, err = process.communicate(timeout=60)
        os.close(ours)
    assert (process.returncode, out) == (1, "")
    assert "Delete them? [y/N]" in err
    assert broker.asked == []
