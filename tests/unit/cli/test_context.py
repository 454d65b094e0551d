# ruff: noqa: F811 - a test has the names of its fixtures as parameters
"""Contexts: named brokers with their logins, and which of them a command uses."""

from __future__ import annotations

import base64
import io
import json
import os
import stat
import sys
from pathlib import Path

import pytest
import typer

from bascule.cli.contexts import contexts_path
from bascule.cli.main import app
from tests.unit.cli.conftest import Bascule
from tests.unit.cli.test_administer import Broker, broker, part  # noqa: F401 - a fixture
from tests.unit.cli.test_commands import commands


@pytest.fixture(autouse=True)
def _home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("BASCULE_CONTEXT", raising=False)


@pytest.fixture
def served(broker: Broker) -> Broker:
    broker.answers["/list/queues"] = (200, part())
    return broker


def test_option_exists_for_each_command_that_has_the_address_of_a_server_and_no_other() -> None:
    found = {name: {option for each in command.params for option in each.opts} for name, command in commands(typer.main.get_command(app))}
    with_address = {name for name, options in found.items() if options & {"--admin", "--broker"}} - {"context add", "user certificate"}
    assert {name for name, options in found.items() if "--context" in options} == with_address
    assert len(with_address) > 30


def test_context_is_used_by_option_then_variable_then_choice(served: Broker, bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("one", "two", "three"):
        Path(name).write_text(f"token-of-{name}\n")
        assert bascule("context", "add", name, "--admin", f"{served.url}/", "--token-file", name).returncode == 0
    assert bascule("context", "use", "three").stderr == "current context: three\n"
    bascule("queue", "list")
    assert served.token == "Bearer token-of-three"
    monkeypatch.setenv("BASCULE_CONTEXT", "two")
    bascule("queue", "list")
    assert served.token == "Bearer token-of-two"
    bascule("queue", "list", "--context", "one")
    assert served.token == "Bearer token-of-one"
    bascule("queue", "list", "--admin", served.url)
    assert served.token is None


def test_named_configuration_file_and_empty_variable_come_before_the_current_context(
    served: Broker, bascule: Bascule, monkeypatch: pytest.MonkeyPatch
) -> None:
    bascule("context", "add", "away", "--admin", "http://127.0.0.1:1", "--use")
    Path("other.toml").write_text(f"[admin]\nport = {served.server_address[1]}\ntoken = 'of-the-file'\n")
    assert bascule("queue", "list").returncode == 3
    assert bascule("queue", "list", "--config", "other.toml").returncode == 0
    assert served.token == "Bearer of-the-file"
    monkeypatch.setenv("BASCULE_CONTEXT", "")
    Path("other.toml").rename("bascule.toml")
    assert bascule("queue", "list").returncode == 0
    monkeypatch.delenv("BASCULE_CONTEXT")
    assert bascule("context", "use", "--none").returncode == bascule("queue", "list").returncode == 0


def test_settings_of_the_file_are_not_shown_as_those_of_a_context(bascule: Bascule) -> None:
    bascule("context", "add", "away", "--admin", "http://127.0.0.1:1", "--use")
    refused = bascule("config", "show", "--context", "away")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "add --running" in refused.stderr
    assert bascule("config", "show").returncode == 0


def test_user_of_a_context_logs_in_with_the_password_in_the_file(served: Broker, bascule: Bascule) -> None:
    Path("password").write_text("a secret\n")
    url = served.url.replace("//", "//ann%40shop@")
    assert bascule("context", "add", "one", "--admin", url, "--password-file", "password", "--use").returncode == 0
    assert bascule("queue", "list").returncode == 0
    assert served.token == "Basic " + base64.b64encode(b"ann@shop:a secret").decode()


def test_file_is_private_and_has_a_token_only_if_the_user_asks(bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hush\n"))
    bascule("context", "add", "one", "--admin", "https://broker.example", "--store-token")
    Path("token").write_text("quiet")
    bascule("context", "add", "two", "--admin", "https://broker.example", "--token-file", "token", "--ca-file", "ca.pem")
    path = contexts_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert "hush" in path.read_text()
    assert "quiet" not in path.read_text()
    for command in (("list",), ("list", "-o", "wide"), ("list", "-o", "csv"), ("list", "-o", "json"), ("show", "one")):
        assert "hush" not in bascule("context", *command).stdout
    two = json.loads(bascule("context", "show", "two", "--format", "json").stdout)
    assert (two["token_file"], two["ca_file"], two["current"]) == (str(Path("token").absolute()), str(Path("ca.pem").absolute()), False)
    bascule("context", "use", "two")
    assert bascule("context", "remove", "two").returncode == 0
    assert [(each["name"], each["current"]) for each in json.loads(bascule("context", "list", "-o", "json").stdout)] == [("one", False)]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("context", "add", "a/b", "--admin", "http://h"), "must have 1 to 64 letters"),
        (("context", "add", "a", "--admin", "h:1"), "--admin: h:1 must begin with https:// or http://"),
        (("context", "add", "a", "--admin", "http://ann:x@h"), "must not have a password"),
        (("context", "add", "a", "--admin", "http://h", "--password-file", "p"), "without a user"),
        (("context", "add", "a", "--admin", "http://ann@h", "--token-file", "t"), "give one login"),
        (("context", "add", "a", "--admin", "https://h", "--store-token"), "no token was given"),
        (("context", "add", "a", "--admin", "http://h", "--store-token"), "the login would be sent unencrypted to http://h"),
        (("context", "add", "a", "--admin", "http://h", "--token-file", "t"), "the login would be sent unencrypted to http://h"),
        (("context", "add", "a", "--admin", "http://ann@h"), "the login would be sent unencrypted to http://h"),
        (("context", "use", "a"), "there is no context 'a'; known are: far, lost"),
        (("context", "use"), "give the name of a context, or --none"),
        (("context", "show"), "there is no current context"),
        (("context", "remove", "a"), "there is no context 'a'"),
        (("queue", "list", "--context", "a"), "there is no context 'a'"),
        (("queue", "list", "--context", "far", "--admin", "http://h"), "--admin and --context exclude each other"),
        (("queue", "list", "--context", "far"), "the token of context 'far' would be sent unencrypted to http://192.0.2.1; use https"),
        (("queue", "list", "--context", "lost"), "token_file of context 'lost': /no/where: No such file or directory"),
    ],
)
def test_refused_command_says_why(arguments: tuple[str, ...], error: str, bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("far", "lost"):
        bascule("context", "add", name, "--admin", f"https://{name}", "--token-file", "/no/where")
    contexts_path().write_text(contexts_path().read_text().replace("https://far", "http://192.0.2.1"))
    before = contexts_path().read_bytes()
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    done = bascule(*arguments)
    assert done.returncode == 2
    assert error in done.stderr
    assert contexts_path().read_bytes() == before


def test_user_without_a_home_directory_needs_no_contexts(served: Broker, bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", "")
    monkeypatch.setattr(Path, "home", classmethod(_no_home))
    Path("bascule.toml").write_text(f"[admin]\nport = {served.server_address[1]}\n")
    assert bascule("queue", "list").returncode == 0
    assert "set HOME or XDG_CONFIG_HOME" in bascule("context", "list").stderr


def _no_home(_: type[Path]) -> Path:
    raise RuntimeError("Could not determine home directory.")


@pytest.mark.parametrize(
    ("mode", "token", "error"),
    [
        (0o644, False, ""), (0o640, True, "other users may read the token in it"), (0o604, True, "other users may read the token in it"),
        (0o620, False, "other users may write it"), (0o602, False, "other users may write it"),
    ],
)  # fmt: skip
def test_file_that_other_users_can_change_or_that_shows_them_a_token_is_refused(
    mode: int, token: bool, error: str, served: Broker, bascule: Bascule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hush\n"))
    bascule("context", "add", "one", "--admin", served.url, "--use", *(["--store-token"] if token else []))
    contexts_path().chmod(mode)
    for command in (("queue", "list"), ("context", "use", "one")):
        done = bascule(*command)
        assert (done.returncode, error in done.stderr, "hush" in done.stderr) == (2 if error else 0, True, False)
        contexts_path().chmod(mode)
    assert bool(served.asked) is not bool(error)


def test_file_of_another_user_is_refused(bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    bascule("context", "add", "one", "--admin", "http://127.0.0.1:1")
    if os.geteuid() == 0:  # a file of root is trusted
        os.chown(contexts_path(), 12345, -1)
    monkeypatch.setattr(os, "geteuid", lambda: 12346)
    assert "belongs to another user" in bascule("context", "list").stderr


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000, b"[]", b"\xff", b'{"format": 2, "current": "", "contexts": {}}', b'{"format": 1, "current": "x", "contexts": {}}',
        b'{"format": 1, "current": "", "contexts": {"x": {"url": 1}}}',
        b'{"format": 1, "current": "", "contexts": {"x": {"url": "h", "k": "v"}}}',
        b'{"format": 1, "current": "", "contexts": {"x": 1}}',
    ],
)  # fmt: skip
def test_damaged_file_is_named_and_stops_the_command(content: bytes, bascule: Bascule) -> None:
    path = contexts_path()
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    for command in (("queue", "list"), ("context", "list"), ("context", "add", "a", "--admin", "http://h")):
        done = bascule(*command)
        assert done.returncode == 2
        assert f"error: {path}: " in done.stderr
    assert path.read_bytes() == content
