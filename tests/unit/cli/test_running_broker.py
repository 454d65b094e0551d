"""Commands that ask a running broker, with a whole broker on Kafka in memory."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from bascule.cli import lists, why
from bascule.client import Queue
from tests.support.certificates import Authority
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.cli.conftest import Bascule
from tests.unit.cli.test_exports import admin, url
from tests.unit.server.broker_process import Broker, called, kafka, serving, until
from tests.unit.server.served import run_async

__all__ = ["kafka"]

PERMISSIONS: list[dict[str, Any]] = [{"match": "orders.#", "send": ["sales"]}, {"match": "#", "manage": ["all"]}]


async def answer(bascule: Bascule, broker: Broker, *words: str) -> Any:
    """Run a command, and return its output as JSON."""
    done = await called(bascule, *words, "--admin", admin(broker), "--format", "json")
    assert done.returncode == 0, done
    return json.loads(done.stdout)


@run_async
async def test_broker_searches_sorts_and_cuts_its_lists(
    kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "PART", 2)
    async with serving(kafka, tmp_path) as broker:
        for number in range(5):
            await broker.send(f"orders.{number}", *map(str, range(number + 1)))
        await broker.send("bills", "1")

        async def names(*options: str) -> list[str]:
            return [each["name"] for each in await answer(bascule, broker, "queue", "list", *options)]

        assert await names("--search", "ORDERS") == [f"orders.{number}" for number in range(5)]
        assert await names("--search", "orders", "--sort", "messages", "--descending", "--limit", "3") == [
            "orders.4",
            "orders.3",
            "orders.2",
        ]
        assert await names("--limit", "2") == ["bills", "orders.0"]
        assert await names("--search", "none") == []
        wrong = await called(bascule, "queue", "list", "--sort", "colour", "--admin", admin(broker))
        assert (wrong.returncode, "name, address, routing" in wrong.stderr) == (2, True)


@run_async
async def test_subscription_that_is_created_keeps_the_messages_of_its_topic(kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule) -> None:
    async with serving(kafka, tmp_path) as broker:
        words = ("subscription", "create", "kept", "--topic", "news", "--client-id", "a.b", "--selector", "n = 1")
        assert await answer(bascule, broker, *words) == {"created": r"a\.b.kept"}
        for number in ("1", "2"):
            sent = await called(
                bascule, "send", "news", "--topic", "--text", number, "--property", f"n:int={number}", "--broker", url(broker)
            )
            assert sent.returncode == 0, sent
        (found,) = await answer(bascule, broker, "subscription", "list")
        assert (found["name"], found["topic"], found["messages"], found["durable"]) == (r"a\.b.kept", "news", 1, True)
        alone = await called(bascule, "subscription", "create", "kept", "--topic", "news", "--admin", admin(broker))
        assert (alone.returncode, "client_id is missing" in alone.stderr) == (2, True)


@run_async
async def test_settings_and_permissions_are_those_of_the_running_broker(kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule) -> None:
    (tmp_path / "bascule.toml").write_text("[broker]\nmax_delivery_attempts = 9\n")
    users = {"users": {"ann": "a"}, "roles": {"sales": ["ann"], "all": ["ann"]}, "max_delivery_attempts": 4}
    sections = {"broker": users, "permission": PERMISSIONS}
    async with serving(kafka, tmp_path / "broker", **sections) as broker:
        token = (tmp_path / "broker" / "admin.token").read_text().strip()
        (tmp_path / "token").write_text(token)
        (tmp_path / "token").chmod(0o600)
        there = ("--context", "here")
        assert bascule("context", "add", "here", "--admin", admin(broker), "--token-file", str(tmp_path / "token")).returncode == 0
        shown = await called(bascule, "config", "show", "--running", "--format", "csv", *there)
        rows = dict(list(csv.reader(io.StringIO(shown.stdout)))[1:])
        assert rows["broker.max_delivery_attempts"] == "4"
        assert "'a'" not in shown.stdout
        assert '"9"' in (await called(bascule, "config", "show", "--format", "csv")).stdout
        assert (await called(bascule, "config", "show", "--admin", admin(broker))).returncode == 2
        listed = await called(bascule, "permission", "list", *there)
        assert [row.split() for row in listed.stdout.splitlines() if "─" not in row and row.strip()] == [
            ["address", "send", "manage"], ["orders.#", "sales"], ["#", "all"],
        ]  # fmt: skip
        allowed = await called(bascule, "permission", "check", "ann", "send", "orders.eu", *there)
        assert (allowed.returncode, allowed.stdout.startswith("allowed: [[permission]] 'orders.#'")) == (0, True)
        denied = await called(bascule, "permission", "check", "bob", "send", "orders.eu", "-o", "json", *there)
        assert (denied.returncode, json.loads(denied.stdout)["allowed"]) == (1, False)


@run_async
async def test_any_request_can_be_sent(kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule) -> None:
    async with serving(kafka, tmp_path) as broker:
        there = ("--admin", admin(broker))
        created = await called(bascule, "api", "post", "/queues/create", "name=orders", *there)
        assert json.loads(created.stdout) == {"created": "orders"}
        found = await called(bascule, "api", "GET", "/list/queues", "search=ord", "limit=1", *there)
        assert [each["name"] for each in json.loads(found.stdout)["entries"]] == ["orders"]
        assert "bascule_serving 1.0" in (await called(bascule, "api", "GET", "/metrics", *there)).stdout
        deleted = await called(bascule, "api", "POST", "/queues/delete", "name=orders", "force=true", *there)
        assert json.loads(deleted.stdout)["deleted"] == "orders"
        twice = await called(bascule, "api", "GET", "/redrive/letters", "header=a:b", "header=c:d", "header=e:f", *there)
        assert "header" not in twice.stderr
        for words in (
            ("FETCH", "/status"), ("GET", "status"), ("GET", "/status", "x"), ("GET", "/nowhere"), ("GET", "/overview", "x=1"),
            ("GET", "/list/queues?limit=1", "offset=5"), ("POST", "/queues/create", "name=a", "name=b"), ("GET", "/overview", "path=1"),
        ):  # fmt: skip
            refused = await called(bascule, "api", *words, *there)
            assert (refused.returncode, refused.stdout) == (2, ""), words


@run_async
async def test_message_has_all_headers_and_kinds_of_body_that_the_console_can_send(
    kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule
) -> None:
    async with serving(kafka, tmp_path) as broker:
        for words in (
            ("--map", '{"n": {"type": "int", "value": 1}}', "--type", "order", "--reply-to", "answers"),
            ("--no-body", "--delay-ms", "600000"),
        ):
            assert (await called(bascule, "send", "orders", *words, "--broker", url(broker))).returncode == 0
        one, other = await answer(bascule, broker, "queue", "messages", "orders")
        assert (one["state"], one["type"], one["body_kind"]) == ("waiting", "order", "map")
        assert (other["state"], other["body_kind"]) == ("delayed", "message")

        def receive() -> Any:
            with broker.connect() as context, context.consumer(Queue("orders")) as consumer:
                return consumer.receive(10)

        message = await called(receive)
        assert (message.body, message.reply_to) == ({"n": 1}, Queue("answers"))
        wrong = await called(bascule, "send", "orders", "--map", "[]", "--broker", url(broker))
        assert (wrong.returncode, "the JSON is not a map" in wrong.stderr) == (2, True)


@run_async
async def test_broker_tells_what_happened_to_a_message(
    kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(why, "LOOK_S", 0.0)

    def receive() -> None:
        with broker.connect() as context, context.consumer(Queue("orders")) as consumer:
            assert consumer.receive(10) is not None

    async with serving(kafka, tmp_path) as broker:
        await broker.send("orders", "1")
        (found,) = await answer(bascule, broker, "queue", "messages", "orders")
        told = await answer(bascule, broker, "why", found["message_id"], "--since", "1h")
        assert [each["what"] for each in told["events"]] == ["accepted"]
        shown = await called(bascule, "why", found["message_id"], "--admin", admin(broker))
        assert (shown.returncode, "accepted" in shown.stdout, "waiting" in shown.stdout) == (0, True, True)
        assert (await called(bascule, "why", "ID:nobody", "--admin", admin(broker))).returncode == 1
        await called(receive)
        followed = await called(bascule, "why", found["message_id"], "--follow", "--admin", admin(broker), "--format", "json")
        *events, last = (json.loads(line) for line in followed.stdout.splitlines())
        assert (followed.returncode, events, last["ended"]) == (0, last["events"], True)
        assert "left the queue" in [each["what"] for each in events]


@run_async
async def test_topic_and_subscription_are_shown(kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule) -> None:
    async with serving(kafka, tmp_path) as broker:
        for topic in ("news.prices", "news.prices.late"):
            await answer(bascule, broker, "subscription", "create", topic, "--topic", topic, "--shared", "--selector", "n = 1")
        shown = await answer(bascule, broker, "topic", "show", "news.prices")
        (found,) = shown["subscription_list"]
        assert (shown["subscriptions"], found["topic"], found["selector"]) == (1, "news.prices", "n = 1")
        one = await answer(bascule, broker, "subscription", "show", found["name"])
        assert (one["topic"], one["durable"], one["consumer_list"], one["full"]) == ("news.prices", True, [], False)
        assert "deliveries_max" in one["settings"]
        drawn = await called(bascule, "subscription", "show", found["name"], "--admin", admin(broker))
        assert (drawn.returncode, "news.prices" in drawn.stdout, "deliveries_max" in drawn.stdout) == (0, True, True)
        assert (await called(bascule, "topic", "show", "news", "--admin", admin(broker))).returncode == 2


@run_async
async def test_broker_without_a_dead_letter_yet_has_none(kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule) -> None:
    async with serving(kafka, tmp_path) as broker:
        assert await answer(bascule, broker, "dead-letters", "list") == []
        assert await answer(bascule, broker, "dead-letters", "list", "--queue", "DLQ") == []
        assert await answer(bascule, broker, "dead-letters", "return") == {"returned": 0, "left": {}}
        assert await answer(bascule, broker, "queue", "messages", "DLQ") == []
        other = await called(bascule, "dead-letters", "list", "--queue", "ExpiryQueue", "--admin", admin(broker))
        assert (other.returncode, "there is no queue" in other.stderr) == (2, True)


@run_async
async def test_lists_of_a_standby_are_refused_instead_of_empty(kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule) -> None:
    async with serving(kafka, tmp_path / "one") as broker:
        standby = Broker(kafka, tmp_path / "two")
        try:
            await until(lambda: standby.standing_by, "the standby")
            for name in ("queue", "topic", "subscription", "connection", "branch"):
                done = await called(bascule, name, "list", "--admin", admin(standby))
                assert (done.returncode, done.stdout, "ask the active broker" in done.stderr) == (3, "", True), done
                assert (await called(bascule, name, "list", "--admin", admin(broker))).returncode == 0
        finally:
            await standby.stop()


@run_async
async def test_settings_of_a_pipeline_are_shown_before_a_driver_has_reported_them(
    kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule
) -> None:
    async with serving(kafka, tmp_path) as broker:
        words = ("divert", "create", "late", "from=flights", "to=kafka.late", "--wait-s", "0")
        assert (await called(bascule, *words, "--admin", admin(broker))).returncode == 0
        shown = await called(bascule, "divert", "show", "late", "--admin", admin(broker))
        assert ("kafka.late" in shown.stdout, "no driver has reported" in shown.stderr) == (True, True)


@run_async
async def test_commands_with_messages_trust_the_authority_of_a_file(kafka: KafkaInMemory, tmp_path: Path, bascule: Bascule) -> None:
    authority = Authority(tmp_path)
    issued = authority.issue("broker")
    async with serving(kafka, tmp_path / "broker", broker={"tls": {"certificate": issued.certificate, "key": issued.key}}) as broker:
        there, trusting = ("--broker", url(broker).replace("amqp:", "amqps:")), ("--ca-file", str(authority.certificate))
        refused = await called(bascule, "send", "orders", "--text", "1", *there)
        assert (refused.returncode, "certificate" in refused.stderr) == (3, True), refused
        assert (await called(bascule, "send", "orders", "--text", "1", *there, *trusting)).returncode == 0
        assert (await called(bascule, "export", "messages", "orders", "orders.jsonl", *there, *trusting)).stdout == "exported 1\n"
        assert (await called(bascule, "import", "messages", "orders.jsonl", "--to", "copy", *there, *trusting)).returncode == 0
        received = await called(bascule, "receive", "copy", "-o", "json", *there, *trusting)
        assert json.loads(received.stdout)["body"] == "1"
        missing = await called(bascule, "browse", "orders", *there, "--ca-file", "none.pem")
        assert (missing.returncode, "--ca-file" in missing.stderr) == (2, True), missing
