"""Commands as their users see them: help, formats, errors and exit codes."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperOption

from bascule.amqp.verifiers import Verifier
from bascule.cli.login import credentials
from bascule.cli.main import app
from bascule.cli.tree import command_tree
from bascule.config import Settings, users_file
from bascule.core.errors import InvalidInput
from bascule.core.log import LogSettings, configured
from tests.unit.cli.conftest import Bascule, Done


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each command and each group of commands, by its name."""
    for name, command in group.commands.items():
        yield f"{prefix}{name}", command
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")


COMMANDS = dict(commands(typer.main.get_command(app)))


def plain(text: str) -> str:
    return "".join(text.replace("`", "").replace("│", "").split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_shows_an_example_and_each_text_with_its_brackets(command: str, bascule: Bascule) -> None:
    done = bascule(*command.split(), "--help")
    assert done.returncode == 0
    assert f"bascule {command}" in done.stdout.partition("Example:")[2]
    shown, described = plain(done.stdout), COMMANDS[command]
    texts = [described.help, described.epilog, *(parameter.help for parameter in described.params)]
    assert [text for text in texts if not text or plain(text) not in shown] == []


def seen(command: Any) -> dict[str, Any]:
    """What a user sees of a command or a group, except the commands of the group."""
    fields = {name: value for name, value in vars(command).items() if name not in {"commands", "callback", "params"}}
    of_parameters = ("name", "opts", "secondary_opts", "help", "default", "required", "multiple", "metavar", "hidden", "is_eager")
    return fields | {"parameters": [{name: getattr(each, name, None) for name in of_parameters} for each in command.params]}


def test_commands_built_on_demand_are_those_of_the_whole_tree() -> None:
    whole, on_demand = typer.main.get_command(app), command_tree(app)
    assert seen(on_demand) == seen(whole)
    assert [(name, seen(command)) for name, command in commands(on_demand)] == [(name, seen(command)) for name, command in commands(whole)]


def test_command_builds_no_other_commands() -> None:
    """All commands of the tree take longer than most commands run."""
    tree: Any = command_tree(app)
    with pytest.raises(SystemExit):
        tree(["queue", "list", "--help"])
    assert tree.commands.built() == {"queue"}
    assert tree.commands["queue"].commands.built() == {"list"}


def test_defaults_in_the_help_of_options_are_those_of_the_settings() -> None:
    helps = [parameter.help or "" for command in COMMANDS.values() for parameter in command.params if isinstance(parameter, TyperOption)]
    found = {key: value for text in helps for key, value in re.findall(r"\(default: (\w+\.\w+), ([^)]+)\)", text)}
    settings = Settings()
    assert found == {key: str(reduce(getattr, key.split("."), settings)) for key in found}
    assert found.keys() == {"broker.port", "embedded.port", "admin.port", "embedded.data_dir"}


def test_help_imports_no_spark_kafka_client_or_server(tmp_path: Path) -> None:
    program = (
        "import sys; from bascule.cli.main import app, main; app(['up', '--help'], standalone_mode=False); "
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'pyspark', 'confluent_kafka', 'pydantic_settings', 'uvicorn'}))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


def test_no_garbage_is_collected_at_the_end_of_a_command(tmp_path: Path) -> None:
    program = (
        "import atexit, gc, sys; from bascule.cli.main import main; sys.argv = ['bascule', '--version']; "
        "atexit.register(lambda: print(len(gc.get_objects())));"
        "main()"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.splitlines()[-1]) < 1000  # the objects that are not frozen


def test_config_check_reports_valid_settings(tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "bascule.toml").write_text('[[divert]]\nname = "a"\nfrom = "b"\n')
    assert (
        bascule("config", "check").stdout
        == "bascule.toml: valid (1 diverts, 0 ingresses, no permission rules: every client may do everything)\n"
    )
    done = bascule("config", "check", "--format", "json")
    assert json.loads(done.stdout) == {"file": "bascule.toml", "diverts": ["a"], "ingresses": [], "permissions": []}


def test_invalid_settings_are_reported_on_stderr_without_traceback_and_exit_code_is_2(tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "bascule.toml").write_text("[broker]\nprot = 1\n")
    for command in (["config", "check"], ["up"], ["broker"]):
        done = bascule(*command)
        assert done.returncode == 2
        assert done.stdout == ""
        assert done.stderr == "error: bascule.toml:2: broker.prot: unknown setting; did you mean 'port'?\n"


def test_config_show_prints_sources_and_masks_secrets(tmp_path: Path, bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASCULE_ADMIN__PORT", "1")
    (tmp_path / "bascule.toml").write_text("[broker.users]\nann = 'hush'\n")
    done = bascule("config", "show", "--format", "json")
    shown = {each["key"]: each for each in json.loads(done.stdout)}
    assert shown["broker.users.ann"] == {"key": "broker.users.ann", "value": "********", "source": "bascule.toml:2"}
    assert shown["admin.port"] == {"key": "admin.port", "value": 1, "source": "environment BASCULE_ADMIN__PORT"}
    assert "hush" not in bascule("config", "show").stdout


def test_user_hash_fits_the_password_and_has_a_new_salt_each_time(bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    for _ in range(2):
        monkeypatch.setattr(sys, "stdin", io.StringIO("pässword\n"))
        shown.append(bascule("user", "hash", "--iterations", "4096").stdout.strip())
    assert all(Verifier.parse(each).fits("pässword") for each in shown)
    assert shown[0] != shown[1]


def test_user_hash_without_password_is_refused(bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(""))
    assert bascule("user", "hash") == (2, "", "error: no password was given\n")


def test_config_check_finds_unusable_certificate(tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "bascule.toml").write_text("[broker.tls]\ncertificate = 'server.pem'\n")
    assert bascule("config", "check").stderr == "error: broker.tls.certificate: server.pem: No such file or directory\n"


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ('"no.such.key" = 1', 'No such configuration property: "no.such.key"'),
        ('"security.protocol" = "SASL_SSL"\n"sasl.mechanism" = "GSSAPI"', "No provider for SASL mechanism GSSAPI"),
        ('"security.protocol" = "SSL"\n"ssl.ca.location" = "missing.pem"', "ssl.ca.location failed"),
    ],
)
def test_config_check_finds_settings_that_the_client_of_kafka_refuses(setting: str, reason: str, tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "bascule.toml").write_text(f"[kafka]\nbootstrap_servers = '127.0.0.1:1'\n[kafka.client]\n{setting}\n")
    done = bascule("config", "check")
    assert done.returncode == 2
    assert done.stderr.startswith("error: kafka.client: librdkafka refuses the settings: ")
    assert reason in done.stderr


@pytest.mark.parametrize("arguments", [["--user", "ann:hush"], ["--broker", "amqp://ann:hush@127.0.0.1:1"]], ids=["user", "url"])
def test_password_on_the_command_line_causes_a_warning_without_it(bascule: Bascule, arguments: list[str]) -> None:
    done = bascule("browse", "q", "--broker", "amqp://127.0.0.1:1", *arguments)
    assert done.returncode == 3
    assert done.stderr.startswith("warning: every user of this machine can see the password in --")
    assert "hush" not in done.stderr


def test_password_of_a_user_comes_from_the_file_then_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "password").write_text("of the file\n")
    monkeypatch.setenv("BASCULE_PASSWORD", "of the environment")
    assert credentials("ann", tmp_path / "password") == ("ann", "of the file")
    assert credentials("ann", None) == ("ann", "of the environment")
    assert credentials(None, None) is None
    monkeypatch.delenv("BASCULE_PASSWORD")
    monkeypatch.setattr("sys.stdin", io.StringIO("of standard input"))
    with pytest.raises(InvalidInput, match="no password of 'ann': use --password-file, or set BASCULE_PASSWORD"):
        credentials("ann", None)


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["status", "--admin", "http://127.0.0.1:1"], 3, "no broker answers at http://127.0.0.1:1/status: "),
        (["queue", "purge", "q", "--admin", "http://127.0.0.1:1"], 3, "no broker answers at http://127.0.0.1:1/queues/purge: "),
        (["dead-letters", "list", "--admin", "ftp:x"], 2, "address of the admin server: ftp:x must begin with https:// or http://"),
        (["receive", "q", "--broker", "amqp://127.0.0.1:1"], 3, "cannot connect to broker 127.0.0.1:1: "),
        (
            ["receive", "q", "--broker", "http://127.0.0.1"],
            2,
            "invalid broker URL 'http://127.0.0.1'; use amqp://[USER:PASSWORD@]HOST[:PORT]",
        ),
        (["browse", "q", "--password-file", "p"], 2, "--password-file is given without --user"),
        (["browse", "q", "--user", "ann", "--password-file", "nowhere"], 2, "--password-file: nowhere: No such file or directory"),
        (["browse", "q", "--user", "ann:a", "--password-file", "p"], 2, "--user has a password, and --password-file is given"),
        (["browse", "q", "--user", ":a"], 2, "--user must begin with the name of a user"),
        (["send", "q"], 2, "give one of --text, --file, --lines, --map and --no-body"),
        (["send", "q", "--text", "a", "--property", "n:int=x"], 2, "--property 'n:int=x': 'x' is not of type int"),
        (["send", "q", "--text", "a", "--property", "n"], 2, "--property 'n': must be NAME=VALUE or NAME:TYPE=VALUE"),
        (["broker"], 2, "kafka.bootstrap_servers is not set"),
        (["pipelines"], 2, "kafka.bootstrap_servers is not set"),
        (["up", "--user", "ann"], 2, "--user 'ann'...: must be NAME:file:PATH"),
        (["up", "--config", "nowhere.toml"], 2, "nowhere.toml: No such file or directory"),
        (
            ["up", "--data-dir", "/proc/nowhere", "--kafka-port", "0", "--amqp-port", "0"],
            2,
            "the data directory /proc/nowhere cannot be used: ",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_error_is_one_message_with_its_exit_code(arguments: list[str], code: int, text: str, bascule: Bascule) -> None:
    done = bascule(*arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(f"error: {text}")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("adapter", "status", "--group", "g"),
        ("adapter", "dead-letters", "list", "--group", "g"),
        ("adapter", "dead-letters", "return", "--group", "g"),
        ("verify",),
    ],
    ids=" ".join,
)
def test_kafka_commands_configure_their_log_from_settings(bascule: Bascule, arguments: tuple[str, ...]) -> None:
    Path("bascule.toml").write_text('[log]\nlevel = "debug"\n')
    assert bascule(*arguments, "--log-format", "json").stderr.startswith("error: ")
    assert configured() == LogSettings("json", "debug")
    Path("bascule.toml").unlink()
    bascule(*arguments)
    assert configured() == LogSettings("text", "warning")


def test_reference_page_names_every_option_of_every_command() -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "cli.md").read_text()
    common = {"--help", "-h", "--install-completion", "--show-completion", "--version"}
    assert "queue purge" in COMMANDS
    for name, command in COMMANDS.items():
        assert f"bascule {name}" in page
        missing = [option for parameter in command.params for option in parameter.opts if option.startswith("-") and option not in page]
        assert set(missing) <= common, f"bascule {name}"


def test_user_can_explains_which_rule_allows_or_denies(tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "bascule.toml").write_text(
        "[broker.roles]\nsales = ['ann']\n[[permission]]\nmatch = 'orders.#'\nsend = ['sales']\n", encoding="utf-8"
    )
    done = bascule("user", "can", "ann", "send", "orders.eu")
    assert (done.returncode, done.stdout) == (0, "allowed: [[permission]] 'orders.#' gives 'send' to sales; user 'ann' has sales\n")
    denied = bascule("user", "can", "ann", "createDurableQueue", "orders.eu", "--format", "json")
    assert (denied.returncode, json.loads(denied.stdout)["rule"], json.loads(denied.stdout)["allowed"]) == (1, "orders.#", False)
    assert bascule("user", "can", "ann", "sned", "orders.eu").returncode == 2


def test_checks_tell_what_the_users_of_pipelines_may_not_do(tmp_path: Path, bascule: Bascule) -> None:
    text = """
        [broker.roles]
        sales = ["ann"]
        [[permission]]
        match = "orders.#"
        send = ["sales"]
        [[permission]]
        match = "stock"
        consume = ["sales"]
        [[divert]]
        name = "orders"
        from = "orders.#"
        user = "ann"
        [[divert]]
        name = "stock"
        from = "stock"
        user = "ann"
        [[ingress]]
        name = "new"
        topics = ["t"]
        to = "queue://orders.new"
        user = "ann"
        [[ingress]]
        name = "others"
        topics = ["t"]
        user = "ann"
        """
    (tmp_path / "bascule.toml").write_text(text, encoding="utf-8")
    done = bascule("config", "check")
    stopped = "warning: divert 'orders' will be stopped: user 'ann' has no permission 'consume' on address 'orders.#'\n"
    assert (done.returncode, done.stderr) == (0, stopped)
    told = bascule("user", "can", "ann", "consume", "stock").stdout
    assert "pipelines that act as the user: divert orders, divert stock, ingress new, ingress others\n" in told
    (tmp_path / "bascule.toml").write_text(text.replace('send = ["sales"]', ""), encoding="utf-8")
    refused = "messages of ingress 'new' will be dead letters: user 'ann' has no permission 'send' on address 'orders.new'"
    assert refused in bascule("config", "check").stderr
    (tmp_path / "bascule.toml").write_text(text.replace('user = "ann"', 'user = "bob"', 1), encoding="utf-8")
    done = bascule("config", "check")
    assert done.returncode == 2
    assert 'bascule.toml:13: divert["orders"].user = "bob": there is no user \'bob\' with a password or a role' in done.stderr


@pytest.fixture
def typed(bascule: Bascule, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """Run a command with a file of users, and a password on standard input."""
    Path("bascule.toml").write_text("[broker]\nusers_file = 'users'\nusers = {conrad = 'x'}\n[broker.roles]\nfinance = ['ann']\n")

    def run(*arguments: str, password: str = "hush") -> Done:
        monkeypatch.setattr(sys, "stdin", io.StringIO(password + "\n"))
        return bascule("user", *arguments)

    return run


def test_user_commands_change_the_file_and_list_shows_the_result(typed: Callable[..., Done]) -> None:
    assert typed("add", "ann", "--role", "sales", "--role", "sales", "--iterations", "4096") == (0, "", "user 'ann' added to users\n")
    assert typed("add", "bob", "--role", "a", "--iterations", "5000").returncode == 0
    Path("secret").write_text("new\n")
    assert typed("passwd", "ann", "--password-file", "secret", "--iterations", "4096").returncode == 0
    assert typed("roles", "ann", "shipping", "sales").stderr == "user 'ann' has shipping, sales in users\n"
    assert typed("roles", "ann").stdout == "shipping\nsales\n"
    assert typed("roles", "bob", "--none").stderr == "user 'bob' has no role in users\n"
    found = users_file.read(Path("users"))
    assert all(each.fits("new") for each in found.users["ann"].verifiers.values())
    assert all(each.fits("hush") for each in found.users["bob"].verifiers.values())
    assert json.loads(typed("list", "--format", "json").stdout) == [
        {"user": "ann", "roles": ["finance", "sales", "shipping"], "source": "users", "iterations": 4096},
        {"user": "bob", "roles": [], "source": "users", "iterations": 5000},
        {"user": "conrad", "roles": [], "source": "broker.users", "iterations": None},
    ]
    assert "ann" in typed("list").stdout
    in_file = json.loads(typed("list", "--file", "users", "--format", "json").stdout)
    assert [(each["user"], each["roles"]) for each in in_file] == [("ann", ["sales", "shipping"]), ("bob", [])]
    assert typed("remove", "ann").returncode == 0
    assert users_file.read(Path("users")).users.keys() == {"bob"}
    assert users_file.read(Path("users")).secret == found.secret


@pytest.mark.parametrize(
    ("arguments", "password", "error"),
    [
        (("add", "ann"), "x", "user 'ann' exists; change the password with `bascule user passwd`"),
        (("add", "conrad"), "x", "user 'conrad' is in the settings (broker.users)"),
        (("add", "anonymous"), "x", "'anonymous' is the user of a client without a login"),
        (("add", "bob", "--role", "*"), "x", "'*' stands for all clients"),
        (("add", "bob"), "", "no password was given"),
        (("add", "bob"), "x" * 1001, "a password must have at most 1000 characters"),
        (("add", "bob"), "a\tb", "a password must have at most 1000 characters, all printable"),
        (("add", "bob", "--password-file", "nowhere"), "", "nowhere: No such file or directory"),
        (("add", "bob", "--iterations", "1"), "x", "4096"),
        (("passwd", "bob"), "x", "there is no user 'bob' in users"),
        (("remove", "bob"), "", "there is no user 'bob' in users"),
        (("roles", "bob", "a"), "", "there is no user 'bob' in users"),
        (("roles", "ann", "a", "--none"), "", "--none excludes roles"),
        (("remove", "ann", "--file", "nowhere"), "", "nowhere: No such file or directory"),
        (("add", "bob", "--file", "no/where"), "x", "no/where.lock: No such file or directory"),
    ],
)
def test_refused_user_command_says_why_and_changes_nothing(
    arguments: tuple[str, ...], password: str, error: str, typed: Callable[..., Done]
) -> None:
    typed("add", "ann", "--iterations", "4096")
    before = Path("users").read_bytes()
    done = typed(*arguments, password=password)
    assert done.returncode == 2
    assert error in done.stderr
    assert Path("users").read_bytes() == before


def test_user_command_without_a_file_says_what_to_set(bascule: Bascule) -> None:
    assert "no file of users is set; set users_file" in bascule("user", "remove", "ann").stderr


def test_config_check_and_user_can_read_the_file_of_users(typed: Callable[..., Done], bascule: Bascule) -> None:
    typed("add", "ann", "--role", "sales", "--iterations", "4096")
    with Path("bascule.toml").open("a") as file:
        file.write("[[permission]]\nmatch = '#'\nsend = ['sales', 'salez']\nconsume = ['finance']\n")
    done = bascule("config", "check")
    assert (done.returncode, done.stderr) == (0, "warning: permission[\"#\"].send: there is no role 'salez'; known are finance, sales\n")
    assert bascule("user", "can", "ann", "send", "x").returncode == bascule("user", "can", "ann", "consume", "x").returncode == 0
    Path("users").write_text("junk")
    for command in (("config", "check"), ("user", "can", "ann", "send", "x"), ("user", "list"), ("user", "remove", "ann")):
        refused = bascule(*command)
        assert (refused.returncode, refused.stderr[:28]) == (2, "error: users:1: not valid JS")
