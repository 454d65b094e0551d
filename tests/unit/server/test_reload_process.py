"""Reload of the settings of a whole broker process, and of a standby, over HTTP."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bascule.client import ConnectionFactory, Queue
from bascule.config import load
from bascule.config.users_file import User, Users
from bascule.server import key_set
from bascule.server.reload import ReloadSource
from tests.support.kafka_in_memory import KafkaInMemory
from tests.support.provider import SigningKey
from tests.unit.server.broker_process import PREFIX, SOON_S, Broker, called, kafka, until
from tests.unit.server.served import run_async

__all__ = ["kafka"]

TEXT = f"""
[kafka]
bootstrap_servers = "memory"
[journal]
prefix = "{PREFIX}"
retention_s = 0
[broker]
port = 0
"""
TOKEN = '[admin]\nport = 0\ntoken = "one"\n'


def source(directory: Path, text: str) -> ReloadSource:
    directory.mkdir()
    file = directory / "bascule.toml"
    file.write_text(text)
    read = partial(load, file, flags={"embedded": {"data_dir": str(directory)}})
    return ReloadSource(read(), read)


def ask(port: int, path: str, token: str, method: str = "POST") -> tuple[int, Any]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", b"{}" if method == "POST" else None, method=method)
    request.add_header("authorization", f"Bearer {token}")
    try:
        with urllib.request.urlopen(request, timeout=SOON_S) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def send(port: int, count: int) -> None:
    with ConnectionFactory(f"amqp://127.0.0.1:{port}", timeout_s=SOON_S).connect() as context:
        for _ in range(count):
            context.send(Queue("q"), "x")


@run_async
async def test_administrator_reloads_a_broker_and_its_standby(kafka: KafkaInMemory, tmp_path: Path) -> None:
    text = f'{TEXT}allow_anonymous = true\nmax_message_bytes = 1000000\n{TOKEN}[audit]\nfile = "{tmp_path}/audit"\n'
    sources = [source(tmp_path / each, text) for each in ("1", "2")]
    active = Broker(kafka, tmp_path / "1", reload_source=sources[0])
    await active.serves()
    standby = Broker(kafka, tmp_path / "2", reload_source=sources[1])
    await until(lambda: standby.standing_by, "it stands by")
    await called(send, active.ready[-1], 3)
    changed = text.replace('"one"', '"two"').replace("1000000", "2000000") + '[[address]]\nmatch = "q"\nmax_messages = 7\n'
    for each in ("1", "2"):
        (tmp_path / each / "bascule.toml").write_text(changed)
    for broker in (active, standby):
        port = broker.life._admin_port
        assert (await called(ask, port, "config/reload", "wrong"))[0] == 401
        code, answer = await called(ask, port, "config/reload", "one")
        assert code == 200
        assert [each["setting"] for each in answer["applied"]] == ["admin.token", 'address["q"].max_messages', 'address["q"].match']
        assert answer["needs_restart"] == [{"setting": "broker.max_message_bytes", "before": 1_000_000, "after": 2_000_000}]
        assert (await called(ask, port, "config/reload", "one"))[0] == 401
        assert (await called(ask, port, "config/reload", "two"))[1]["applied"] == []
    (tmp_path / "1" / "bascule.toml").write_text("[broker]\nprot = 1\n")
    code, answer = await called(ask, active.life._admin_port, "config/reload", "two")
    assert code == 400
    assert "broker.prot: unknown setting; did you mean 'port'?" in answer["error"]
    audited = [json.loads(each) for each in (tmp_path / "audit").read_text().splitlines()]
    reloads = [each for each in audited if each["action"] == "config/reload"]
    assert [each.get("applied", "")[:11] for each in reloads] == ["admin.token", "", "admin.token", "", ""]
    assert "ConfigError" in reloads[-1]["result"]
    assert active.node.engine.queue("q").settings.max_messages == 7
    await active.stop()
    await standby.serves()
    assert standby.node.engine.queue("q").settings.max_messages == 7, "the standby follows its new settings when it serves"
    await standby.stop()


@run_async
async def test_reload_reads_the_key_set_of_tokens_again_and_the_audit_has_a_changed_file_of_users(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_set, "READ_INTERVAL_S", 0.05)
    keys, audit, users = tmp_path / "keys.json", tmp_path / "audit", tmp_path / "users"
    keys.write_text(json.dumps({"keys": [SigningKey("first", "ES256").public]}))
    made = Users.none().with_user(User.of("ann", "x", iterations=4096))
    users.write_text(made.text())
    oidc = f'users_file = "{users}"\n[broker.oidc]\nissuer = "https://login.example"\naudience = ["bascule"]\njwks_file = "{keys}"\n'
    started = source(tmp_path / "1", f'{TEXT}{oidc}{TOKEN}[audit]\nfile = "{audit}"\n')
    broker = Broker(kafka, tmp_path / "1", reload_source=started)
    await broker.serves()
    assert broker.node.tokens is not None
    found = broker.node.tokens.keys
    await until(lambda: bool(found.find("first", "ES256")), "the first key is known")
    keys.write_text(json.dumps({"keys": [SigningKey("second", "ES256").public]}))
    assert (await called(ask, broker.life._admin_port, "config/reload", "one"))[1]["applied"] == []
    await until(lambda: bool(found.find("second", "ES256")), "the second key is known")
    assert found.find("first", "ES256") == []
    users.write_text(made.without("ann").text())

    def read() -> list[dict[str, Any]]:
        return [line for each in audit.read_text().splitlines() if (line := json.loads(each))["action"] == "users/read"]

    await until(lambda: bool(read()), "the audit has the change of the users")
    assert [(each["who"], each["on"], each["ended"]) for each in read()] == [("", str(users), 1)]
    await broker.stop()
