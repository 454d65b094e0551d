"""Commands that look at a broker as the console does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bascule.server.listing import SEARCH_MAX
from tests.unit.cli.test_administer import DETAIL, Broker, _elsewhere, broker, part, run

__all__ = ["_elsewhere", "broker"]  # fixtures

MESSAGE = {
    "id": "0-waiting-4-1", "state": "waiting", "message_id": "ID:1", "type": None, "body_kind": "text", "body": {"text": "x" * 100},
    "bytes": 9,
}  # fmt: skip
TOPIC = {"name": "news", "subscriptions": 2, "messages": 5, "consumers": 1}
SUBSCRIPTION = {
    "name": "billing.prices", "topic": "news", "durable": True, "selector": "n = 1", "messages": 3, "delivering": 0, "consumers": 1,
    "unused_since_ms": 0,
}  # fmt: skip
LINK = {"role": "consumer", "address": "orders", "queue": "orders", "selector": "n = 1", "unsettled": 0, "credit": 9}
STATE = {"origin": "runtime", "enabled": True, "state": "waiting for coverage", "wanted": "running", "records_per_s": 1.5, "error": ""}
FLOW = {
    "diverts": [
        {"name": "d", "from": "a", "to": "t", "pin": {"records": 7}, "lag": None, **STATE},
        {"name": "e", "from": "b", "to": "u", "pin": None, "lag": 8, **STATE},
    ],
    "ingresses": [{"name": "i", "topics": ["k"], "pattern": "", "to": "q", "lag": 9, **STATE}], "addresses": {}, "trouble": "",
}  # fmt: skip

COMMANDS: dict[str, tuple[list[str], str, Any, list[str]]] = {
    "messages": (["queue", "messages", "q", "--text", "x"], "/messages", {"messages": [MESSAGE], "next": ""}, ["0-waiting-4-1", "x…"]),
    "topics": (["topic", "list"], "/list/topics", part(TOPIC), ["news"]),
    "no topics": (["topic", "list"], "/list/topics", part(), ["subscriptions"]),
    "links": (["connection", "show", "c"], "/connections/links", {"links": [LINK]}, ["consumer", "n = 1"]),
    "flow": (["flow"], "/flow", FLOW, ["divert", "7", "8", "ingress", "9", "runtime", "waiting for coverage", "1.5"]),
    "one message": (["queue", "message", "q", "0-waiting-4-1"], "/messages/show", MESSAGE, ["ID:1"]),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_look_shows_the_answer_of_the_broker(
    name: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, path, answer, shown = COMMANDS[name]
    broker.answers[path] = (200, answer)
    assert run(monkeypatch, *command, "--admin", broker.url) == 0
    said = capsys.readouterr().out
    assert [each for each in shown if each not in said] == []
    if name != "one message":
        assert run(monkeypatch, *command, "--admin", broker.url, "--format", "json") == 0
        assert json.loads(capsys.readouterr().out) is not None


def test_flow_says_what_is_missing_without_kafka(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers["/flow"] = (200, {**FLOW, "trouble": "Kafka is away"})
    assert run(monkeypatch, "flow", "--admin", broker.url) == 0
    assert "pipelines that are defined at run time, are missing: Kafka is away" in capsys.readouterr().err


def test_body_of_a_message_is_written_as_bytes(broker: Broker, monkeypatch: pytest.MonkeyPatch, capfdbinary: Any) -> None:
    broker.answers["/messages/body"] = (200, "text")
    assert run(monkeypatch, "queue", "message", "q", "0-waiting-4-1", "--body", "--admin", broker.url) == 0
    assert capfdbinary.readouterr().out == b"text"


def test_answer_that_is_not_json_is_reported(broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(json, "dumps", lambda *_, **__: "<html>")
    broker.answers["/flow"] = (200, None)
    assert run(monkeypatch, "flow", "--admin", broker.url) == 2
    assert "is not the admin server of a broker: its answer is not JSON" in capsys.readouterr().err


def test_topic_is_shown_with_its_subscriptions_alone(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    others = SUBSCRIPTION | {"name": "news", "topic": "news.late"}, SUBSCRIPTION | {"name": "x", "topic": "NEWS"}
    broker.answers |= {
        "/list/topics": (200, part(TOPIC | {"name": "NEWS", "messages": 77}, TOPIC)),
        "/list/subscriptions": (200, part(SUBSCRIPTION, *others)),
    }
    assert run(monkeypatch, "topic", "show", "news", "--admin", broker.url, "-o", "json") == 0
    assert json.loads(capsys.readouterr().out) == {**TOPIC, "subscription_list": [SUBSCRIPTION]}
    assert [path for path, _ in broker.asked] == [f"/list/{kind}?offset=0&limit=500&search=news" for kind in ("topics", "subscriptions")]
    assert run(monkeypatch, "topic", "show", "news", "--admin", broker.url) == 0
    said = capsys.readouterr().out
    assert [each for each in ("news", "5", "billing.prices", "n = 1") if each not in said] == []
    assert "news.late" not in said
    assert run(monkeypatch, "topic", "show", "new", "--admin", broker.url) == 2
    assert "there is no topic 'new': it has no subscription, and is not in the settings" in capsys.readouterr().err


def test_subscription_is_shown_with_the_consumers_and_settings_of_its_queue(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broker.answers |= {
        "/list/subscriptions": (200, part(SUBSCRIPTION | {"name": "billing.prices.late"}, SUBSCRIPTION)),
        "/queues?name=subscription%3A%2F%2Fbilling.prices": (200, DETAIL),
    }
    assert run(monkeypatch, "subscription", "show", "billing.prices", "--admin", broker.url, "-o", "json") == 0
    more = {field: DETAIL[field] for field in ("bytes", "delayed", "full", "consumer_list", "settings")}
    assert json.loads(capsys.readouterr().out) == {**SUBSCRIPTION, **more}
    assert run(monkeypatch, "subscription", "show", "billing.prices", "--admin", broker.url) == 0
    said = capsys.readouterr().out
    assert [each for each in ("billing.prices", "news", "127.0.0.1:5", "max_messages") if each not in said] == []
    assert run(monkeypatch, "subscription", "show", "billing", "--admin", broker.url) == 2
    assert "there is no subscription 'billing'" in capsys.readouterr().err


def test_name_that_is_longer_than_a_search_is_found(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "n" * 300
    broker.answers |= {"/list/topics": (200, part(TOPIC | {"name": name})), "/list/subscriptions": (200, part())}
    assert run(monkeypatch, "topic", "show", name, "--admin", broker.url) == 0
    assert broker.asked[0][0] == f"/list/topics?offset=0&limit=500&search={'n' * SEARCH_MAX}"
