"""Everything that the admin server does over HTTP, a command does, too: each is run, and a server notes the requests that it gets."""

from __future__ import annotations

import re
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

import pytest

from bascule.server.operation_commands import BROWSERS_ONLY, COMMANDS
from bascule.server.operations import OPERATIONS
from tests.unit.cli.test_administer import Broker, _elsewhere, broker, run
from tests.unit.cli.test_commands import COMMANDS as SHOWN
from tests.unit.server.test_console_requests import REQUESTS, requests_of, scripts

__all__ = ["_elsewhere", "broker"]  # fixtures

#: What a command takes besides its own words.
ARGUMENTS: Final[dict[str, list[str]]] = {
    "queue show": ["q"], "queue create": ["q"], "queue purge": ["q"], "queue move": ["q", "r"], "queue delete": ["q"],
    "queue messages": ["q"], "queue message": ["q", "17"], "queue message --body": ["q", "17"], "why": ["ID:1"],
    "subscription create": ["s", "--topic", "t", "--shared"], "subscription delete": ["s"], "connection show": ["c"],
    "connection close": ["c"],
    "branch commit": ["1:a:b"], "branch rollback": ["1:a:b"], "branch forget": ["1:a:b"], "redrive show": ["0:7"],
    "redrive run": ["--all"], "redrive discard": ["--all", "--yes"], "top": ["--once", "--interval-s", "0.2"],
}  # fmt: skip
OF_A_PIPELINE: Final[dict[str, list[str]]] = {
    "create": ["p", "from=a", "to=b"], "show": ["p"], "delete": ["p"], "change": ["p", "to=b"], "status": ["p"], "pause": ["p"],
    "resume": ["p"], "stop": ["p"], "restart": ["p"], "offsets": ["p"], "offsets --to": ["earliest"], "offsets --reset": [], "list": [],
}  # fmt: skip
#: Requests that a command replaces by others: the whole list by its parts, and a message over HTTP by one over AMQP.
OTHERWISE: Final = {
    ("GET", "/subscriptions"): ("GET", "/list/subscriptions"),
    ("GET", "/connections"): ("GET", "/list/connections"),
    ("POST", "/messages/send"): None,
}
#: Answers that a command needs before it sends the request of a test.
ANSWERS: Final[dict[str, Any]] = {
    "/definitions": {"queues": [], "subscriptions": []},
    "/diverts/p": {"config": {}, "revision": 1},
    "/ingresses/p": {"config": {}, "revision": 1},
    "/redrive/letters": {"letters": [], "upto": "", "next": "", "complete": True},
}


def words_of(command: str) -> list[str]:
    """Return the words of a command with the arguments that it needs."""
    kind, _, verb = command.partition(" ")
    if kind in ("divert", "ingress") and verb in OF_A_PIPELINE:
        before = ["p"] if verb.startswith("offsets -") else []
        first, *options = verb.split()
        return [kind, first, *before, *options, *OF_A_PIPELINE[verb]]
    return [*command.split(), *ARGUMENTS.get(command, [])]


def test_every_operation_has_a_command() -> None:
    assert {*COMMANDS, *BROWSERS_ONLY} == set(OPERATIONS)
    assert not BROWSERS_ONLY & COMMANDS.keys()


def test_every_request_of_the_console_has_a_command() -> None:
    asked = set(requests_of(scripts()[REQUESTS]))
    assert asked - COMMANDS.keys() == {("GET", "/console/session"), ("POST", "/console/login"), ("POST", "/console/logout")}


@pytest.fixture
def methods(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return the requests that the server of a test gets, with their methods."""
    found: list[tuple[str, str]] = []

    def parse_request(self: BaseHTTPRequestHandler) -> bool:
        parsed = plain(self)
        found.append((self.command, self.path.partition("?")[0]))
        return parsed

    plain = BaseHTTPRequestHandler.parse_request
    monkeypatch.setattr(BaseHTTPRequestHandler, "parse_request", parse_request)
    return found


@pytest.mark.parametrize("operation", [each for each in COMMANDS if OTHERWISE.get(each, each)], ids=" ".join)
def test_command_sends_its_request(
    operation: tuple[str, str], broker: Broker, methods: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.answers = Refusing({path: (200, content) for path, content in ANSWERS.items()})
    method, path = OTHERWISE.get(operation) or operation
    assert run(monkeypatch, *words_of(COMMANDS[operation]), "--admin", broker.url) in (0, 2, 3)
    template = re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(path)))
    assert [each for each in methods if each[0] == method and template.fullmatch(each[1])], (COMMANDS[operation], methods)


class Refusing(dict[str, tuple[int, Any]]):
    """Answers of a broker that refuses what it does not know."""

    def __missing__(self, path: str) -> tuple[int, Any]:
        return 503, {"error": "because of this test"}


def test_message_over_amqp_can_have_all_that_one_over_http_has() -> None:
    schema = OPERATIONS["POST", "/messages/send"].arguments
    options = {
        "to": "DESTINATION", "topic": "--topic", "kind": "--map", "body": "--text", "properties": "--property",
        "correlation_id": "--correlation-id", "reply_to": "--reply-to", "type": "--type", "group_id": "--group-id",
        "priority": "--priority", "ttl_ms": "--ttl-ms", "delay_ms": "--delay-ms", "persistent": "--non-persistent",
    }  # fmt: skip
    assert schema.keys() == options.keys()
    known = {name for each in SHOWN["send"].params for name in (*each.opts, each.metavar)}
    assert set(options.values()) <= known
