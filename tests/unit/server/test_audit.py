"""The audit: what its lines say, sinks that fail, and what happens then."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bascule.client import ConnectionFactory, Queue, Topic
from bascule.config.audit import Audit as AuditSettings
from bascule.core.errors import BasculeError, InvalidInput, Unavailable
from bascule.server import audit
from bascule.server.admin_access import AdminAccess
from bascule.server.audit import AuditTrail, Done, FileSink, audit_of
from bascule.server.looks import LOOKS
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.server.broker_process import SOON_S, Broker, called, kafka, serving
from tests.unit.server.served import Client, Served, run_async
from tests.unit.server.test_admin import Broker as BrokerStatus
from tests.unit.server.test_admin import get, served
from tests.unit.server.test_admin_access import access_of, basic, send, settings

__all__ = ["kafka"]
RULES: Any = [
    {"match": "orders", "send": ["sales"], "createAddress": ["sales"], "createDurableQueue": ["sales"]},
    {"match": "news", "consume": ["sales"], "createAddress": ["sales"], "createDurableQueue": ["sales"], "deleteDurableQueue": ["sales"]},
]
SETTINGS: dict[str, Any] = {"broker": {"users": {"ann": "a"}, "roles": {"sales": ["ann"]}}, "permission": RULES}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def short(path: Path) -> list[tuple[str, str, str, bool]]:
    return [(each["who"], each["action"], each["on"], each["allowed"]) for each in lines(path)]


def factory(broker: Broker, password: str = "a", **options: Any) -> ConnectionFactory:
    return ConnectionFactory(f"amqp://127.0.0.1:{broker.ready[-1]}", timeout_s=SOON_S, user="ann", password=password, **options)


@run_async
async def test_logins_creations_deletions_and_refusals_are_lines_with_their_user(kafka: KafkaInMemory, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    async with serving(kafka, tmp_path / "data", audit={"file": file}, **SETTINGS) as broker:

        def work() -> None:
            with pytest.raises(BasculeError):
                factory(broker, "wrong").connect()
            with factory(broker, client_id="desk").connect() as context:
                context.send(Queue("orders"), "secret body")
                context.send(Queue("orders"), "secret body")
                with pytest.raises(BasculeError):
                    context.consumer(Queue("orders"))
                with context.durable_consumer(Topic("news"), "kept"):
                    pass
                context.unsubscribe("kept")

        await called(work)
    assert short(file) == [
        ("ann", "login", "", False),
        ("ann", "login", "desk", True),
        ("ann", "create queue", "orders", True),
        ("ann", "consume", "orders", False),
        ("ann", "create queue", "desk.kept", True),
        ("ann", "unsubscribe", "desk.kept", True),
        ("ann", "delete queue", "desk.kept", True),
    ]
    first, second, *others = lines(file)
    assert first["mechanism"] == second["mechanism"] == "SCRAM-SHA-512"
    assert first["from"].startswith("127.0.0.1:")
    assert "wrong password" in first["result"]
    assert others[1]["result"] == "user 'ann' has no permission 'consume' on address 'orders'"
    assert "secret" not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@run_async
async def test_messages_are_lines_only_by_choice(kafka: KafkaInMemory, tmp_path: Path) -> None:
    found = {}
    for messages in (False, True):
        file = tmp_path / f"{messages}.jsonl"
        async with serving(kafka, tmp_path / "data", audit={"file": file, "messages": messages}) as broker:
            await broker.send("q", "a", "b")
            assert await broker.receive("q", 2) == ["a", "b"]
        found[messages] = [each for each in lines(file) if each["action"] in ("send", "receive")]
    assert found[False] == []
    assert [(each["action"], each["on"]) for each in found[True]] == [("send", "q")] * 2 + [("receive", "q")] * 2
    sent, received = ([each["message_id"] for each in found[True] if each["action"] == action] for action in ("send", "receive"))
    assert sent == received
    assert len(set(sent)) == 2
    assert all(each.startswith("ID:") for each in sent)


@run_async
async def test_message_of_a_producer_without_address_is_a_line_with_its_own_address(kafka: KafkaInMemory, tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    async with serving(kafka, tmp_path / "data", audit={"file": file, "messages": True}, **SETTINGS) as broker:

        def work() -> None:
            with factory(broker).connect() as context:
                producer = context.producer()
                producer.send("x", to=Queue("orders"))
                with pytest.raises(BasculeError):
                    producer.send("x", to=Queue("stock"))

        await called(work)
    found = [(each["on"], each["allowed"], each["result"]) for each in lines(file) if each["action"] == "send"]
    assert found == [("orders", True, "ok"), ("stock", False, "user 'ann' has no permission 'send' on address 'stock'")]


@run_async
async def test_lines_go_to_a_topic(kafka: KafkaInMemory, tmp_path: Path) -> None:
    kafka.create("audit", 1)
    async with serving(kafka, tmp_path / "data", audit={"topic": "audit"}) as broker:
        await broker.send("q", "a")
    values = [json.loads(value) for value in kafka.values("audit") if value is not None]
    assert [(each["who"], each["action"]) for each in values] == [("anonymous", "login"), ("anonymous", "create queue")]


@run_async
async def test_without_message_operations_the_ordinary_code_handles_messages() -> None:
    node = Served()
    client = Client(node)
    client.consumer("q", credit=1)
    assert type(client.connection._transfers).__name__ == "Transfers"
    assert {type(link.context).__name__ for link in client.connection.client.links} == {"ConsumerLink"}


@pytest.mark.parametrize("value", ["a\n{}", "\x1b[31m", "\u2028", "\ud800", "x" * 5000, '"},{"'])
def test_values_of_peers_are_escaped_and_cut(tmp_path: Path, value: str) -> None:
    file = tmp_path / "audit"
    written = audit_of(AuditSettings(file=file), {})
    written.record("login", value, who=value, peer="p", result=value)
    written.close()
    assert file.read_text().isascii()
    assert file.read_text().isprintable() or file.read_text().rstrip("\n").isprintable()
    (line,) = lines(file)
    assert (line["on"], line["who"], line["result"]) == (value[:1000],) * 3


def test_file_that_is_moved_away_is_opened_again(tmp_path: Path) -> None:
    file, moved = tmp_path / "audit", tmp_path / "audit.1"
    written = audit_of(AuditSettings(file=file), {})
    written.record("one", "", who="", peer="")
    file.rename(moved)
    written.record("two", "", who="", peer="")
    written.close()
    assert [each["action"] for each in lines(moved) + lines(file)] == ["one", "two"]


def test_file_that_cannot_be_written_is_a_fault_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"audit.file '.*/missing/audit' cannot be written: No such file"):
        audit_of(AuditSettings(file=tmp_path / "missing" / "audit"), {})


def test_lines_that_could_not_be_written_are_written_later_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    file = directory / "audit"
    written = audit_of(AuditSettings(file=file, on_failure="refuse"), {})
    directory.rename(tmp_path / "away")
    for number in range(3):
        written.record(str(number), "", who="", peer="")
    assert "audit.on_failure" in written.blocked
    with pytest.raises(Unavailable):
        written.check()
    written.poll()
    assert written.blocked
    (tmp_path / "away").rename(directory)
    written.poll()
    written.check()
    written.record("3", "", who="", peer="")
    written.close()
    assert [each["action"] for each in lines(file)] == ["0", "1", "2", "3"]
    events = [record.getMessage().partition(" to=")[0] for record in caplog.records]
    assert events == ["audit cannot be written", "audit is written again"]


@pytest.fixture
def size_limit() -> Iterator[Callable[[int], None]]:
    """Return a function that limits the size of files, as a full disk does: a line that does not fit is written in part."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size_bytes: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes or before[0], before[1]))

    yield limit
    limit(0)


def test_full_disk_leaves_no_part_of_a_line_and_no_line_twice(tmp_path: Path, size_limit: Callable[[int], None]) -> None:
    file = tmp_path / "audit"
    written = audit_of(AuditSettings(file=file), {})
    written.record("first", "", who="", peer="")
    size_limit(file.stat().st_size + 40)
    for number in range(3):
        written.record(str(number), "", who="", peer="")
    for _ in range(20):
        written.poll()
    size_limit(0)
    assert [each["action"] for each in lines(file)] == ["first"]
    written.poll()
    written.record("last", "", who="", peer="")
    written.close()
    assert [each["action"] for each in lines(file)] == ["first", "0", "1", "2", "last"]


def test_line_behind_a_part_that_cannot_be_removed_stands_alone(
    tmp_path: Path, size_limit: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "audit"
    written = audit_of(AuditSettings(file=file), {})
    monkeypatch.setattr(audit.os, "ftruncate", lambda *_: os.open(tmp_path / "missing" / "file", os.O_RDONLY))  # raises OSError
    size_limit(40)
    written.record("one", "", who="", peer="")
    size_limit(0)
    written.poll()
    written.close()
    torn, whole = file.read_text().splitlines()
    assert len(torn) == 40
    assert json.loads(whole)["action"] == "one"


@run_async
async def test_lines_that_wait_are_written_although_further_lines_come_fast(kafka: KafkaInMemory, tmp_path: Path) -> None:
    directory, moved = tmp_path / "d", tmp_path / "away"
    directory.mkdir()
    recorded = 300
    async with serving(kafka, tmp_path / "data", audit={"file": directory / "audit", "on_failure": "refuse"}) as broker:
        written = broker.node.audit
        directory.rename(moved)
        for number in range(recorded):
            written.record(str(number), "", who="", peer="")
        moved.rename(directory)
        await until_unblocked(broker)
        for _ in range(audit.WAITING_LINES_MAX // 10 * 2):
            for _ in range(10):
                written.record(str(recorded), "", who="", peer="")
                recorded += 1
            await asyncio.sleep(0)
    assert [each["action"] for each in lines(directory / "audit")] == [str(number) for number in range(recorded)]


def test_end_writes_all_lines_that_wait(tmp_path: Path) -> None:
    file, away = tmp_path / "d" / "audit", tmp_path / "away"
    file.parent.mkdir()
    written = audit_of(AuditSettings(file=file), {})
    file.parent.rename(away)
    for number in range(3 * audit.RETRIED_LINES):
        written.record(str(number), "", who="", peer="")
    away.rename(file.parent)
    written.close()
    assert len(lines(file)) == 3 * audit.RETRIED_LINES


def test_sink_that_fails_later_is_not_polled_without_a_pause() -> None:
    sinks: list[LaterSink] = []

    def make(done: Done) -> LaterSink:
        sinks.append(LaterSink(done))
        return sinks[0]

    written = AuditTrail([make])
    for number in range(2 * audit.RETRIED_LINES):
        written.record(str(number), "", who="", peer="")
    for line in sinks[0].taken:
        sinks[0].done(line, "timed out")
    assert not written.poll(), "nobody knows yet whether the sink takes lines"
    sinks[0].done(sinks[0].taken[-1], None)
    assert written.poll() is False, "these were the last ones"
    assert len(sinks[0].taken) == 4 * audit.RETRIED_LINES


def test_number_of_waiting_lines_is_limited_and_lost_lines_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "WAITING_LINES_MAX", 2)
    written = AuditTrail([lambda done: FileSink(tmp_path / "missing" / "audit", done)])
    for number in range(5):
        written.record(str(number), "", who="", peer="")
    assert written.blocked == "", "the setting is 'continue'"
    written.close()
    assert "lost=5" in caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == logging.ERROR


class LaterSink:
    """A sink that learns of failures later, as the client of Kafka does."""

    name = "later"

    def __init__(self, done: Done) -> None:
        self.taken: list[str] = []
        self.done = done

    def write(self, line: str) -> None:
        self.taken.append(line)

    def poll(self) -> None:
        pass

    def close(self) -> None:
        pass


def test_topic_counts_as_failing_until_a_line_is_stored() -> None:
    sinks: list[LaterSink] = []

    def make(done: Done) -> LaterSink:
        sinks.append(LaterSink(done))
        return sinks[0]

    written = AuditTrail([make], required=True)
    written.record("one", "", who="", peer="")
    (line,) = sinks[0].taken
    assert written.blocked == ""
    sinks[0].done(line, "timed out")
    assert written.blocked
    written.poll()
    assert sinks[0].taken == [line, line]
    assert written.blocked, "nobody knows yet whether the second attempt succeeds"
    sinks[0].done(line, None)
    assert written.blocked == ""


@run_async
async def test_while_the_audit_fails_logins_and_attaches_are_refused_and_work_goes_on(kafka: KafkaInMemory, tmp_path: Path) -> None:
    directory = tmp_path / "d"
    directory.mkdir()
    settings = {"file": directory / "audit", "on_failure": "refuse"}
    async with serving(kafka, tmp_path / "data", audit=settings, **SETTINGS) as broker:

        def work() -> None:
            with factory(broker).connect() as context:
                producer = context.producer(Queue("orders"))
                producer.send("attaches")
                directory.rename(tmp_path / "away")
                with pytest.raises(BasculeError):
                    context.consumer(Queue("orders"))  # its refusal cannot be written
                producer.send("goes on")
                with pytest.raises(BasculeError, match=r"audit\.on_failure"):
                    context.consumer(Queue("orders"))
                with pytest.raises(BasculeError, match=r"audit\.on_failure"):
                    factory(broker).connect()
                assert "audit.on_failure" in broker.node.trouble
                (tmp_path / "away").rename(directory)

        await called(work)
        await until_unblocked(broker)
        await called(lambda: factory(broker).connect().close())


async def until_unblocked(broker: Broker) -> None:
    async with asyncio.timeout(SOON_S):
        while broker.node.audit.blocked:
            await asyncio.sleep(0.01)


def test_administration_is_a_line_with_who_what_and_result(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    written = audit_of(AuditSettings(file=file), {})

    def ask(port: int) -> None:
        send(port, "POST", "/queues/purge", {}, json.dumps({"name": "q", "selector": "x\n"}))
        send(port, "POST", "/queues/delete", {}, json.dumps({"name": "busy"}))
        send(port, "GET", "/dead-letters?queue=late", {})
        send(port, "GET", "/status", {})
        send(port, "GET", "/status", {"host": "evil.example"})

    served(BrokerStatus(), ask, access=AdminAccess(audit=written))
    served(BrokerStatus(), lambda port: send(port, "GET", "/status", {}), access=AdminAccess(restricted=True, audit=written))
    written.close()
    assert short(file) == [
        ("local", "queues/purge", "q", True),
        ("local", "queues/delete", "busy", True),
        ("local", "dead letters", "late", True),
        ("", "administration", "GET /status", False),
        ("", "administration", "GET /status", False),
    ]
    purge, delete, *_, foreign, refused = lines(file)
    assert json.loads(purge["arguments"]) == {"name": "q", "selector": "x\n"}
    assert json.loads(purge["result"]) == {"purged": 3}
    assert delete["result"] == "InUse: has consumers"
    assert "evil.example" in foreign["result"]
    assert "log in with a token" in refused["result"]


def test_refused_request_is_a_line_with_the_name_of_its_sender(tmp_path: Path) -> None:
    file = tmp_path / "audit"
    written = audit_of(AuditSettings(file=file), {})
    access = replace(access_of(settings(tmp_path)), audit=written)
    senders = {
        "admin.view_token": "Bearer view-token", "viewer": basic("viewer", "v"), "nobody": basic("nobody", "n"),
        "guessed": basic("guessed", "x"), "": "Bearer guessed",
    }  # fmt: skip

    def ask(port: int) -> None:
        for credentials in senders.values():
            code, *_ = send(port, "POST", "/queues/purge", {"authorization": credentials}, json.dumps({"name": "q"}))
            assert code in (401, 403)

    served(BrokerStatus(), ask, access=access)
    written.close()
    assert short(file) == [(who, "administration", "POST /queues/purge", False) for who in senders]


def failing(directory: Path) -> AuditTrail:
    """Return an audit that cannot be written, and refuses what it would record."""
    directory.mkdir()
    written = audit_of(AuditSettings(file=directory / "audit", on_failure="refuse"), {})
    shutil.rmtree(directory)
    written.record("one", "", who="", peer="")
    assert written.blocked
    return written


def test_while_the_audit_fails_nobody_logs_in_to_the_console(tmp_path: Path) -> None:
    access = access_of(settings(tmp_path))

    def login(port: int) -> int:
        return send(port, "POST", "/console/login", {"authorization": basic("viewer", "v")}, "{}")[0]

    codes: list[int] = []
    for each in (access, replace(access, audit=failing(tmp_path / "audits"))):
        served(BrokerStatus(), lambda port: codes.append(login(port)), access=each)
    assert codes == [200, 503]


def test_while_the_audit_fails_the_admin_server_shows_no_content_of_messages(tmp_path: Path) -> None:
    written = failing(tmp_path / "audits")
    codes: dict[str, int] = {}

    def ask(port: int) -> None:
        for path in ("/dead-letters", *(f"/{name}" for name, each in LOOKS.items() if each.content), "/status"):
            codes[path], _ = get(port, path)

    served(BrokerStatus(), ask, access=AdminAccess(audit=written))
    assert codes.pop("/status") == 200
    assert set(codes.values()) == {503}, codes
