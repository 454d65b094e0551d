"""Contexts of the commands with messages: the address of the broker, the login and the authorities of a context."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import pytest

from bascule.cli.contexts import contexts_path
from bascule.cli.message_file import new_message_file
from bascule.client import ConnectionFactory
from bascule.core.errors import Unavailable
from tests.support.certificates import Authority
from tests.unit.cli.conftest import Bascule

#: Commands that connect to a broker as a client, with what they need.
COMMANDS: Final[dict[str, tuple[str, ...]]] = {
    "send": ("q", "--text", "a"), "receive": ("q",), "browse": ("q",), "bench": (), "export messages": ("q", "new.jsonl"),
    "import messages": ("old.jsonl",),
}  # fmt: skip
BROKER: Final = "amqps://broker.example:5671"
ADMIN: Final = "https://ann@broker.example:8672"


@pytest.fixture(autouse=True)
def _no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BASCULE_CONTEXT", raising=False)
    monkeypatch.setenv("BASCULE_PASSWORD", "of the environment")


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[ConnectionFactory]:
    """Return the factories of the connections that commands try to open. Each attempt fails."""
    found: list[ConnectionFactory] = []

    def connect(self: ConnectionFactory, *_: object) -> None:
        found.append(self)
        raise Unavailable("because of this test")

    monkeypatch.setattr(ConnectionFactory, "connect", connect)
    return found


@pytest.mark.parametrize("command", COMMANDS)
def test_broker_user_password_and_authorities_are_those_of_the_context(
    command: str, opened: list[ConnectionFactory], bascule: Bascule, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("a secret\n")
    with new_message_file(tmp_path / "old.jsonl", "q"):
        pass
    given = ("--password-file", "password", "--ca-file", str(Authority(tmp_path).certificate), "--broker", BROKER)
    assert bascule("context", "add", "one", "--admin", ADMIN, *given).returncode == 0
    done = bascule(*command.split(), *COMMANDS[command], "--context", "one")
    assert (done.returncode, "because of this test" in done.stderr) == (3, True), done
    made = opened[0]
    assert (made.url, made.user, made.password) == (BROKER, "ann", "a secret")
    assert made.tls is not None
    assert len(made.tls.get_ca_certs()) == 1


def test_options_replace_what_the_context_has(opened: list[ConnectionFactory], bascule: Bascule, tmp_path: Path) -> None:
    (tmp_path / "other").write_text("another secret\n")
    authority = Authority(tmp_path).certificate
    bascule("context", "add", "one", "--admin", ADMIN, "--ca-file", "nowhere.pem", "--broker", BROKER, "--use")
    assert "context 'one': ca_file: nowhere.pem" in bascule("browse", "q").stderr.replace(f"{tmp_path}/", "")
    for options in (("--password-file", "other"), ("--user", "bob", "--password-file", "other"), ("--user", "bob")):
        assert bascule("browse", "q", "--ca-file", str(authority), *options).returncode == 3
    assert [(each.user, each.password) for each in opened] == [
        ("ann", "another secret"), ("bob", "another secret"), ("bob", "of the environment"),
    ]  # fmt: skip
    bascule("browse", "q", "--broker", "amqp://127.0.0.1:1")
    assert (opened[-1].url, opened[-1].user, opened[-1].tls) == ("amqp://127.0.0.1:1", None, None)
    Path("other.toml").write_text("[broker]\nport = 7\n")
    bascule("browse", "q", "--config", "other.toml")
    assert (opened[-1].url, opened[-1].user) == ("amqp://127.0.0.1:7", None)


def test_token_of_a_context_is_not_sent_to_the_broker(opened: list[ConnectionFactory], bascule: Bascule, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hush")
    bascule("context", "add", "one", "--admin", "https://broker.example", "--token-file", "token", "--broker", "amqp://broker.example")
    assert bascule("browse", "q", "--context", "one").returncode == 3
    assert (opened[0].url, opened[0].user, opened[0].password, opened[0].token) == ("amqp://broker.example", None, None, None)


def test_current_context_without_the_address_of_a_broker_is_refused(opened: list[ConnectionFactory], bascule: Bascule) -> None:
    """A file of a version without this field is such a file."""
    contexts_path().parent.mkdir(parents=True)
    old = {"url": "https://broker.example:8672", "user": "ann", "password_file": "/p", "token_file": "", "ca_file": "/ca.pem"}
    contexts_path().write_text(json.dumps({"format": 1, "current": "old", "contexts": {"old": old}}))
    contexts_path().chmod(0o600)
    assert json.loads(bascule("context", "show", "-o", "json").stdout)["broker"] == ""
    for command, arguments in COMMANDS.items():
        if command != "import messages":
            done = bascule(*command.split(), *arguments)
            assert (done.returncode, done.stdout) == (2, "")
            assert "context 'old' has no address of a broker; give --broker URL" in done.stderr
    assert opened == []
    assert bascule("browse", "q", "--broker", "amqp://127.0.0.1:1").returncode == 3
    assert bascule("context", "use", "--none").returncode == 0
    assert bascule("browse", "q").returncode == 3
    assert [each.url for each in opened] == ["amqp://127.0.0.1:1", "amqp://127.0.0.1:5672"]


def test_context_without_a_broker_can_be_read_by_older_versions(bascule: Bascule) -> None:
    """They refuse a file with a field that they do not know."""
    bascule("context", "add", "one", "--admin", ADMIN)
    assert json.loads(contexts_path().read_text())["contexts"] == {"one": {"url": "https://broker.example:8672", "user": "ann"}}


@pytest.mark.parametrize(
    ("broker", "error"),
    [
        ("amqp://broker.example", "the login of 'ann' would be sent unencrypted to broker.example:5672; use amqps"),
        ("failover:(amqps://a,amqp://b)", "the login of 'ann' would be sent unencrypted to b:5672; use amqps"),
        ("amqps://bob@broker.example", "the URL must not have a user or a password"),
        ("failover:(amqps://a,amqps://bob:hush@b)", "the URL must not have a user or a password"),
        ("amqps://broker.example?jms.username=bob", "the URL must not have a user or a password"),
        ("https://broker.example", "invalid broker URL 'https://broker.example'; use amqp://"),
    ],
)
def test_broker_to_which_the_login_must_not_go_is_refused(
    broker: str, error: str, opened: list[ConnectionFactory], bascule: Bascule
) -> None:
    refused = bascule("context", "add", "one", "--admin", ADMIN, "--broker", broker)
    assert (refused.returncode, error in refused.stderr, "hush" in refused.stderr) == (2, True, False), refused
    bascule("context", "add", "one", "--admin", ADMIN, "--broker", BROKER)
    contexts_path().write_text(contexts_path().read_text().replace(BROKER, broker))
    refused = bascule("browse", "q", "--context", "one")
    assert (refused.returncode, error in refused.stderr, "hush" in refused.stderr) == (2, True, False), refused
    assert opened == []


def test_user_is_sent_unencrypted_to_this_machine(opened: list[ConnectionFactory], bascule: Bascule) -> None:
    for broker in ("amqp://127.0.0.1:7", "amqp://localhost", "failover:(amqp://[::1]:7,amqps://a)"):
        assert bascule("context", "add", "one", "--admin", ADMIN, "--broker", broker, "--use").returncode == 0
        assert bascule("browse", "q").returncode == 3
    assert [each.user for each in opened] == ["ann"] * 3


def test_broker_and_context_exclude_each_other(bascule: Bascule) -> None:
    bascule("context", "add", "one", "--admin", ADMIN, "--broker", BROKER)
    done = bascule("browse", "q", "--context", "one", "--broker", BROKER)
    assert (done.returncode, "--broker and --context exclude each other" in done.stderr) == (2, True)
