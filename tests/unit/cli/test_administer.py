"""Commands that act on a broker, with an admin server that gives the answers of a test."""

from __future__ import annotations

import base64
import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from bascule.cli.main import main

QUEUE = {
    "name": "q", "address": "q", "routing": "anycast", "messages": 3, "bytes": 30, "delivering": 1, "delayed": 0, "consumers": 1,
    "durable": True,
}  # fmt: skip
DETAIL = {
    **QUEUE, "auto_created": True, "selector": "", "full": False, "settings": {"max_messages": 7},
    "consumer_list": [{"connection": "127.0.0.1:5", "client_id": "c", "selector": "", "unsettled": 1, "credit": 9}],
}  # fmt: skip
XID = "7:gtrid:bqual"
BRANCH = {"xid": XID, "state": "prepared", "since_ms": 1769846400000, "sent": 2, "received": 1, "bytes": 99, "user": "shop"}
PIN = {
    "keeper": "pipeline", "name": "divert:idle", "offset": 7, "records": 12, "bytes": 34, "reason": "disabled", "released": False
}  # fmt: skip
STATUS = {
    "bridge": "demo", "version": "1", "build": "compiled", "state": "waiting", "serving": False, "reason": "Kafka is away",
    "queues": [QUEUE], "branches": [BRANCH], "pins": [PIN, PIN | {"name": "divert:large", "bytes": 5 << 20, "released": True}],
    "memory": {
        "limit_bytes": 8 << 20, "used_bytes": 148_914, "blocked": "too much", "parts": {"bodies": 2 << 20, "queues": 0}, "spilled_bytes": 0,
        "spill_bytes": 0, "spill_limit_bytes": 10 << 20,
    },
    "gauges": {"connections": 2, "memory_bodies_bytes": 3 << 20}, "counters": {"messages_in": 1234567},
}  # fmt: skip
DEAD = {
    "message_id": "ID:1", "address": "orders", "queue": "orders", "routing": "anycast", "reason": "rejected", "deliveries": 3,
    "moved_at_ms": 1769846400000, "bytes": 10,
}  # fmt: skip


def part(*entries: dict[str, Any], found: int | None = None) -> dict[str, Any]:
    """Return a part of a list."""
    return {"entries": list(entries), "found": len(entries) if found is None else found, "total": len(entries), "serving": True}


class Broker(HTTPServer):
    """An admin server that keeps its requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, Any]] = []
        self.token: str | None = None
        self.answers: dict[str, tuple[int, Any]] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Broker

    def do_GET(self) -> None:
        self.server.asked.append((self.path, None))
        self._answer()

    def do_POST(self) -> None:
        self.server.asked.append((self.path, json.loads(self.rfile.read(int(self.headers["content-length"])))))
        self._answer()

    do_PUT = do_PATCH = do_DELETE = do_POST  # noqa: N815 - the name in the standard library

    def _answer(self) -> None:
        self.server.token = self.headers.get("authorization")
        code, content = self.server.answers.get(self.path) or self.server.answers[self.path.partition("?")[0]]
        self.send_response(code)
        self.end_headers()
        self.wfile.write(content.encode() if isinstance(content, str) else json.dumps(content).encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def broker() -> Iterator[Broker]:
    with Broker() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BASCULE_CONFIG", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("NO_COLOR", "1")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["bascule", *arguments])
    try:
        main()
    except SystemExit as ended:
        return int(str(ended.code or 0))
    return 0


ACTIONS = [
    (["queue", "create", "q"], "/queues/create", {"name": "q"}),
    (["queue", "purge", "q", "--selector", "n = 1"], "/queues/purge", {"name": "q", "selector": "n = 1"}),
    (["queue", "purge", "q", "--id", "a", "--id", "b"], "/queues/purge", {"name": "q", "selector": "", "ids": "a b"}),
    (["queue", "move", "q", "r"], "/queues/move", {"name": "q", "to": "r", "selector": ""}),
    (["queue", "delete", "q", "--force"], "/queues/delete", {"name": "q", "force": True}),
    (["dead-letters", "return", "--queue", "d"], "/dead-letters/return", {"queue": "d", "selector": ""}),
    (
        ["subscription", "create", "s", "--topic", "t", "--client-id", "c", "--no-local", "--user", "ann"], "/subscriptions/create",
        {"name": "s", "topic": "t", "client_id": "c", "selector": "", "no_local": True, "shared": False, "user": "ann"},
    ),
    (["subscription", "delete", "s"], "/subscriptions/delete", {"name": "s", "force": False}),
    (["connection", "close", "c"], "/connections/close", {"id": "c"}),
    *((["branch", what, XID], f"/branches/{what}", {"xid": XID}) for what in ("commit", "rollback", "forget")),
    (["ingress", "reset"], "/ingress/reset", {}),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "path", "content"), ACTIONS, ids=lambda value: value if isinstance(value, str) else "")
def test_administrative_command_posts_its_action_to_the_broker(
    arguments: list[str], path: str, content: Any, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers[path] = (200, {"done": 3})
    assert run(monkeypatch, *arguments, "--admin", broker.url) == 0
    assert broker.asked == [(path, content)]
    assert capsys.readouterr().out == "done 3\n"


@pytest.mark.parametrize(("needs_restart", "code"), [([], 0), ([{"setting": "broker.port", "before": 5672, "after": None}], 1)])
def test_reload_shows_changes_and_its_exit_code_says_whether_one_needs_a_restart(
    needs_restart: list[Any], code: int, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    applied = [
        {"setting": "log.level", "before": "info", "after": "debug", "effect": "at once"},
        {"setting": "broker.failover", "before": [], "after": ["one:1"], "effect": "new"},
    ]
    answer = {"applied": applied, "needs_restart": needs_restart, "unchanged": ["broker.host", "admin.host"]}
    broker.answers["/config/reload"] = (200, answer)
    assert run(monkeypatch, "config", "reload", "--admin", broker.url) == code
    assert broker.asked == [("/config/reload", {})]
    assert capsys.readouterr().out.splitlines() == [
        'applied: log.level ("info" -> "debug")',
        'applied: broker.failover ([] -> ["one:1"]); for what begins from now on',
        *(["needs a restart: broker.port (5672 -> unset)"] if needs_restart else []),
        "unchanged: 2 settings",
    ]
    assert run(monkeypatch, "config", "reload", "--admin", broker.url, "--format", "json") == code
    assert json.loads(capsys.readouterr().out) == answer


def test_command_reports_messages_left_behind_and_exits_with_1(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers["/dead-letters/return"] = (200, {"returned": 1, "left": {"queue 'q' is full": 2}})
    assert run(monkeypatch, "dead-letters", "return", "--admin", broker.url) == 1
    assert capsys.readouterr() == ("returned 1\n", "left 2: queue 'q' is full\n")


@pytest.mark.parametrize(("status", "code"), [(400, 2), (403, 2), (404, 2), (409, 2), (503, 3)])
def test_error_text_of_the_broker_is_the_error_of_the_command(
    status: int, code: int, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers["/queues/purge"] = (status, {"error": "because of this"})
    assert run(monkeypatch, "queue", "purge", "q", "--admin", broker.url) == code
    assert capsys.readouterr() == ("", "error: because of this\n")


def test_command_sends_admin_token_from_settings(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("bascule.toml").write_text(f"[admin]\nport = {broker.server_address[1]}\ntoken = 'hush'\n")
    broker.answers["/list/queues"] = (200, part())
    assert run(monkeypatch, "queue", "list") == 0
    assert broker.token == "Bearer hush"


def test_administrative_output_is_a_table_or_json(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers |= {
        "/list/queues": (200, part(QUEUE)), "/list/subscriptions": (200, part()), "/list/connections": (200, part()),
        "/dead-letters": (200, [DEAD]), "/list/branches": (200, part(BRANCH)), "/status": (200, STATUS),
    }  # fmt: skip

    def shown(*arguments: str) -> str:
        assert run(monkeypatch, *arguments, "--admin", broker.url) == 0
        return capsys.readouterr().out

    assert json.loads(shown("queue", "list", "--format", "json")) == [QUEUE]
    assert shown("queue", "list").split()[-8:] == ["q", "q", "anycast", "3", "30", "1", "0", "1"]
    assert "2026-01-31T08:00:00Z" in shown("dead-letters", "list")
    assert shown("subscription", "list").split()[:7] == ["name", "topic", "durable", "selector", "messages", "delivering", "consumers"]
    assert "client id" in shown("connection", "list")
    assert shown("branch", "list").split()[-7:] == [XID, "prepared", "2026-01-31T08:00:00Z", "2", "1", "99", "shop"]
    text = shown("status")
    assert text.startswith("demo: waiting (Kafka is away), Bascule 1 (compiled)\n")
    assert "1,234,567" in text
    assert "3.0 MiB" in text
    assert "\nmemory: 148,914 bytes of 8.0 MiB; producers are blocked: too much\n" in text
    rows = [line.split() for line in text.splitlines() if line.strip().startswith("pipeline")]
    assert rows[0] == ["pipeline", "divert:idle", "7", "12", "34", "bytes", "disabled"]
    assert " ".join(rows[1]) == "pipeline divert:large 7 12 5.0 MiB disabled; exceeds journal.pinned_bytes, unread records are deleted"
    small = STATUS["memory"] | {"used_bytes": 45372}  # type: ignore[operator]
    broker.answers["/status"] = (200, STATUS | {"memory": small})
    assert "memory: 45,372 bytes of 8.0 MiB; producers are blocked: too much\n" in shown("status")
    broker.answers["/queues"] = (200, DETAIL)
    text = shown("queue", "show", "a b")
    assert broker.asked[-1][0] == "/queues?name=a+b"
    assert "max_messages" in text
    assert "127.0.0.1:5" in text


def test_user_in_the_url_logs_in_with_the_password_of_the_environment(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASCULE_PASSWORD", "a:secret")
    broker.answers["/list/queues"] = 200, part()
    assert run(monkeypatch, "queue", "list", "--admin", broker.url.replace("//", "//ann%40shop@")) == 0
    assert broker.token == "Basic " + base64.b64encode(b"ann@shop:a:secret").decode()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://ann@192.0.2.1:1", "use https"),
        ("http://ann:secret@127.0.0.1:1", "must not have a password"),
        ("http://ann@127.0.0.1:1", "or set BASCULE_PASSWORD"),
    ],
)
def test_password_is_neither_sent_unencrypted_nor_taken_from_the_command_line(
    url: str, error: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    if error == "use https":
        monkeypatch.setenv("BASCULE_PASSWORD", "secret")
    assert run(monkeypatch, "queue", "list", "--admin", url) == 2
    said = capsys.readouterr().err
    assert error in said
    assert "secret" not in said


def test_command_of_the_owner_sends_token_of_data_directory(broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.answers["/list/queues"] = 200, part()
    monkeypatch.setenv("BASCULE_EMBEDDED__DATA_DIR", str(tmp_path))
    (tmp_path / "admin.token").write_text("owner-token")
    assert run(monkeypatch, "queue", "list", "--admin", broker.url) == 0
    assert broker.token == "Bearer owner-token"
    monkeypatch.setenv("BASCULE_ADMIN__VIEW_TOKEN", "v")
    assert run(monkeypatch, "queue", "list", "--admin", broker.url) == 0
    assert broker.token == "Bearer v"
