"""``bascule export`` and ``bascule import`` with brokers on Kafka in memory."""

from __future__ import annotations

import errno
import json
import os
import stat
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from bascule.amqp.codec import encode
from bascule.amqp.types import Described, Symbol, UByte, UInt, ULong
from bascule.cli import exports
from bascule.cli.admin import AdminApiClient
from bascule.cli.exports import export_definitions, export_messages, import_definitions, import_messages
from bascule.cli.message_file import check_message_file, messages_in, new_message_file
from bascule.client import ConnectionFactory, Queue, Topic, encoded
from bascule.client.encoded import EncodedSender, browse_encoded
from bascule.client.errors import ConnectionLost
from bascule.client.links import ConsumerState
from bascule.client.message import Message
from bascule.client.pump import Pump
from bascule.client.session import ClientSession
from bascule.core.destination import ADDRESS_MAX
from bascule.core.errors import InvalidInput
from bascule.jms.message import JmsMessage, encode_message
from tests.support.kafka_in_memory import KafkaInMemory
from tests.unit.cli.conftest import Bascule
from tests.unit.server.broker_process import SOON_S, Broker, called, kafka, serving
from tests.unit.server.served import run_async

__all__ = ["kafka"]


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))


def url(broker: Broker) -> str:
    return f"amqp://127.0.0.1:{broker.ready[-1]}"


def admin(broker: Broker) -> str:
    assert broker.node.admin is not None
    return f"http://127.0.0.1:{broker.node.admin.port}"


def foreign_message() -> bytes:
    """Return a message that JMS has no words for: annotations, a footer, values of unusual types, a body of nested described values."""
    sections = [
        (0x70, [True, UByte(7), None, None, UInt(0)]),
        (0x71, {Symbol("x-delivery"): Symbol("once")}),
        (0x72, {Symbol("x-opt-note"): {"deep": [1, None, b"\x00\xff"]}, Symbol("x-opt-jms-dest"): 0}),
        (0x73, ["foreign-1", b"ann", None, "subject"]),
        (0x74, {"symbol": Symbol("s"), "ulong": ULong(7), "none": None}),
        (0x77, Described(Symbol("com.example:value"), [1, {"a": b"\xf0"}])),
        (0x78, {Symbol("crc"): 9}),
    ]
    return b"".join(b"\x00\x53" + bytes([code]) + encode(value) for code, value in sections)


def sent(broker: Broker, queue: str, *messages: bytes) -> None:
    with ConnectionFactory(url(broker), timeout_s=SOON_S).connect() as context:
        sender = EncodedSender(context, Queue(queue))
        sendings = [sender.send(each) for each in messages]
        sender.flush()
        assert [(each.done, each.error) for each in sendings] == [(True, None)] * len(messages)


def waiting(broker: Broker, queue: str) -> list[bytes]:
    with ConnectionFactory(url(broker), timeout_s=SOON_S).connect() as context:
        return list(browse_encoded(context, Queue(queue)))


def jms_messages(count: int, start: int = 0, body: Any = "text") -> list[bytes]:
    return [encode_message(JmsMessage(message_id=f"ID:{number}", body_kind="text", body=body)) for number in range(start, start + count)]


def of_each_kind(broker: Broker) -> None:
    with ConnectionFactory(url(broker), timeout_s=SOON_S).connect() as context:
        for body in ("text", b"bytes", {"a": 1}, ["a", 1.5], None):
            message = Message(body, properties={"n": 1}, type="t", group_id="g", correlation_id="c", reply_to=Queue("r"), priority=8)
            message.time_to_live_s = 3600
            context.send(Queue("orders"), message)


@run_async
async def test_messages_of_every_kind_arrive_bit_by_bit_and_stay_in_their_queue(kafka: KafkaInMemory, tmp_path: Path) -> None:
    file = tmp_path / "orders.jsonl"
    async with serving(kafka, tmp_path / "data") as broker:
        await called(of_each_kind, broker)
        await called(sent, broker, "orders", foreign_message())
        before = await called(waiting, broker, "orders")
        assert len(before) == 6
        assert foreign_message() in before
        await called(partial(export_messages, "orders", file, broker=url(broker)))
        assert await called(waiting, broker, "orders") == before
        await called(partial(import_messages, file, to="copy", broker=url(broker)))
        assert await called(waiting, broker, "copy") == before
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [each.data for each in messages_in(file)] == before
    assert list(tmp_path.glob("*.part")) == []


@run_async
async def test_repeated_import_stores_each_message_once_unless_duplicates_are_allowed(kafka: KafkaInMemory, tmp_path: Path) -> None:
    file = tmp_path / "file"
    with new_message_file(file, "orders") as writer:
        for data in jms_messages(3):
            writer.add(data)
    async with serving(kafka, tmp_path / "data") as broker:
        for _ in range(2):
            await called(partial(import_messages, file, broker=url(broker)))
        assert len(await called(waiting, broker, "orders")) == 3
        await called(partial(import_messages, file, allow_duplicates=True, broker=url(broker)))
        assert len(await called(waiting, broker, "orders")) == 6
        for other in ("other", "# odd: Größe|*", "q" * ADDRESS_MAX):
            await called(partial(import_messages, file, to=other, from_line=4, broker=url(broker)))
            assert await called(waiting, broker, other) == jms_messages(1, 2)


def lines_of(file: Path) -> list[bytes]:
    return file.read_bytes().splitlines(keepends=True)


def changed(line: bytes, **fields: Any) -> bytes:
    return json.dumps({**json.loads(line), **fields}).encode() + b"\n"


BROKEN: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "cut in a line": (lambda lines: [*lines[:2], lines[2][:9]], "line 3: the line is cut or too long: the file is incomplete"),
    "cut between lines": (lambda lines: lines[:-1], "line 5: the file ends here without its last line"),
    "without a line": (lambda lines: [lines[0], *lines[2:]], "line 4: the last line does not fit the 2 messages"),
    "in another order": (lambda lines: [lines[0], lines[2], lines[1], *lines[3:]], "line 5: the last line does not fit the 3 messages"),
    "longer": (lambda lines: [*lines, lines[1]], "line 6: there are lines behind the end"),
    "not json": (lambda lines: [lines[0], b"{\n", *lines[2:]], "line 2: is not JSON"),
    "deep json": (lambda lines: [lines[0], b"[" * 100_000 + b"\n", *lines[2:]], "line 2: is not JSON"),
    "no name": (lambda lines: [changed(lines[0], queue=None), *lines[1:]], 'line 1: "queue" is not a string'),
    "no object": (lambda lines: [lines[0], b"[]\n", *lines[2:]], "line 2: is not a JSON object"),
    "no message": (lambda lines: [lines[0], b"{}\n", *lines[2:]], 'line 2: there is no "message"'),
    "no base64": (lambda lines: [lines[0], changed(lines[1], message="?"), *lines[2:]], 'line 2: "message" is not base64'),
    "no amqp": (
        lambda lines: [lines[0], changed(lines[1], message="AAAA"), *lines[2:]],
        'line 2: "message" is not an encoded AMQP message',
    ),
    "another version": (lambda lines: [changed(lines[0], version=2), *lines[1:]], "line 1: has version 2; this program reads version 1"),
    "another format": (lambda lines: lines[1:], "line 1: is not the head of a file of messages"),
    "empty": (lambda lines: [], "line 1: is not the head of a file of messages"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_file_that_is_not_complete_is_refused_with_the_line_before_anything_is_sent(name: str, tmp_path: Path) -> None:
    change, why = BROKEN[name]
    file = tmp_path / "file"
    with new_message_file(file, "orders") as writer:
        for data in jms_messages(3):
            writer.add(data)
    assert check_message_file(file) == ("orders", 3, 0)
    file.write_bytes(b"".join(change(lines_of(file))))
    with pytest.raises(InvalidInput) as raised:
        import_messages(file, broker="amqp://127.0.0.1:1")  # nobody listens there
    assert f"{file}, {why}" in str(raised.value)


def test_export_that_fails_leaves_no_file_and_replaces_none(tmp_path: Path) -> None:
    file = tmp_path / "file"
    failing = new_message_file(file, "q")
    failing.__enter__().add(jms_messages(1)[0])
    assert not failing.__exit__(InvalidInput, InvalidInput("went wrong"), None)
    assert list(tmp_path.iterdir()) == []
    file.write_text("mine")
    with pytest.raises(InvalidInput, match="exists; choose another name"), new_message_file(file, "q"):
        pass
    file.unlink()
    with pytest.raises(InvalidInput, match="exists; choose another name"), new_message_file(file, "q"):
        file.write_text("mine")
    assert (file.read_text(), list(tmp_path.iterdir())) == ("mine", [file])


@run_async
async def test_refused_message_is_named_by_its_line_with_what_is_stored(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exports, "BATCH_MESSAGES", 2)
    file = tmp_path / "file"
    large = jms_messages(1, 3, "x" * 2000)
    with new_message_file(file, "orders") as writer:
        for data in (*jms_messages(3), *large, *jms_messages(2, 4)):
            writer.add(data)
    async with serving(kafka, tmp_path / "data", broker={"max_message_bytes": "1000"}) as broker:
        with pytest.raises(InvalidInput, match=rf"{file}, line 5: .*3 messages are stored; to continue, add --from-line 5"):
            await called(partial(import_messages, file, broker=url(broker)))
        assert await called(waiting, broker, "orders") == jms_messages(3)
        await called(partial(import_messages, file, from_line=6, broker=url(broker)))
        assert await called(waiting, broker, "orders") == [*jms_messages(3), *jms_messages(2, 4)]


@run_async
async def test_import_notices_refused_messages_without_the_thread_that_calls_callbacks(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pump, "report", lambda _pump: None)  # as late as it can be
    file = tmp_path / "file"
    with new_message_file(file, "orders") as writer:
        for data in (*jms_messages(2), *jms_messages(1, 2, "x" * 2000)):
            writer.add(data)
    async with serving(kafka, tmp_path / "data", broker={"max_message_bytes": "1000"}) as broker:
        with pytest.raises(InvalidInput, match=rf"{file}, line 4: .*2 messages are stored; to continue, add --from-line 4"):
            await called(partial(import_messages, file, broker=url(broker)))


@run_async
async def test_messages_with_the_same_id_are_refused_unless_duplicates_are_allowed(kafka: KafkaInMemory, tmp_path: Path) -> None:
    file, same = tmp_path / "file", [*jms_messages(2), *jms_messages(1, body="a copy for another subscription")]
    with new_message_file(file, "DLQ") as writer:
        for data in same:
            writer.add(data)
    async with serving(kafka, tmp_path / "data") as broker:
        with pytest.raises(InvalidInput, match=rf"{file}, line 4: the message has the same message id as that of line 2"):
            await called(partial(import_messages, file, broker=url(broker)))
        await called(partial(import_messages, file, allow_duplicates=True, broker=url(broker)))
        assert await called(waiting, broker, "DLQ") == same


def test_messages_that_the_broker_may_take_for_repetitions_are_counted(bascule: Bascule, tmp_path: Path) -> None:
    with new_message_file(tmp_path / "file", "orders") as writer:
        writer.add(jms_messages(1)[0])
        writer.add(encode_message(JmsMessage(message_id="ID:x", body_kind="text", body="x", properties={"_AMQ_DUPL_ID": "7"})))
    assert "up to 1 messages have the property _AMQ_DUPL_ID" in bascule("import", "messages", "file", "--dry-run").stderr


def read_and_close(broker: Broker) -> None:
    with ConnectionFactory(f"failover:({url(broker)})", timeout_s=SOON_S, client_id="reader").connect() as context:
        found = browse_encoded(context, Queue("orders"))
        assert next(found) == jms_messages(1)[0]
        AdminApiClient(admin(broker), None).act("connections/close", id="reader")
        with pytest.raises(ConnectionLost, match="before the last message of queue 'orders'"):
            list(found)


@run_async
async def test_export_that_loses_its_connection_fails_with_failover_too(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path / "data") as broker:
        await called(sent, broker, "orders", *jms_messages(20))
        await called(read_and_close, broker)


@pytest.mark.parametrize("there", [False, True])
def test_file_on_a_file_system_without_links_is_complete_and_replaces_none(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        if there:
            file.write_text("mine")
        raise PermissionError(errno.EPERM, "no links")

    monkeypatch.setattr(os, "link", refused)
    file = tmp_path / "file"
    if there:
        with pytest.raises(InvalidInput, match="exists; choose another name"), new_message_file(file, "q"):
            pass
        assert file.read_text() == "mine"
    else:
        with new_message_file(file, "q") as writer:
            writer.add(jms_messages(1)[0])
        assert (check_message_file(file).messages, stat.S_IMODE(file.stat().st_mode)) == (1, 0o600)
    assert list(tmp_path.iterdir()) == [file]


USERS = {"users": {"ann": "a", "bob": "b"}, "roles": {"all": ["ann"], "see": ["bob"]}}
RULES = [{"match": "#", "browse": ["all", "see"], "send": ["all"], "createAddress": ["all"], "createDurableQueue": ["all"]}]


@run_async
async def test_export_needs_the_permission_to_browse_and_import_that_to_send(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, again = tmp_path / "file", tmp_path / "again"
    with new_message_file(file, "orders") as writer:
        writer.add(jms_messages(1)[0])
    async with serving(kafka, tmp_path / "data", broker=dict(USERS), permission=RULES) as broker:
        monkeypatch.setenv("BASCULE_PASSWORD", "b")
        with pytest.raises(InvalidInput, match=r"'bob'.*'send'"):
            await called(partial(import_messages, file, broker=url(broker), user="bob"))
        monkeypatch.setenv("BASCULE_PASSWORD", "a")
        await called(partial(import_messages, file, broker=url(broker), user="ann"))
        monkeypatch.setenv("BASCULE_PASSWORD", "b")
        await called(partial(export_messages, "orders", again, broker=url(broker), user="bob"))
        assert [each.data for each in messages_in(again)] == jms_messages(1)


def test_file_is_written_and_read_message_by_message(tmp_path: Path) -> None:
    file, message = tmp_path / "file", jms_messages(1, body="x" * 100_000)[0]
    tracemalloc.start()
    try:
        with new_message_file(file, "q") as writer:
            for _ in range(60):
                writer.add(message)
        assert check_message_file(file).messages == 60
        assert sum(len(each.data) for each in messages_in(file)) == 60 * len(message)
        assert tracemalloc.get_traced_memory()[1] < 3_000_000 < file.stat().st_size
    finally:
        tracemalloc.stop()


@run_async
async def test_export_reads_few_large_messages_ahead(kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoded, "AHEAD_BYTES", 30_000)
    held: list[int] = []
    browsed = ClientSession.browse_encoded

    def noted(session: ClientSession, consumer: ConsumerState, until_s: float, ahead: int) -> Any:
        found = yield from browsed(session, consumer, until_s, ahead)
        held.append(len(consumer.buffer))
        return found

    monkeypatch.setattr(ClientSession, "browse_encoded", noted)
    async with serving(kafka, tmp_path / "data") as broker:
        await called(sent, broker, "orders", *jms_messages(20, body="x" * 10_000))
        assert await called(waiting, broker, "orders") == jms_messages(20, body="x" * 10_000)
    assert 0 < max(held) <= 2


# -- definitions -------------------------------------------------------------------------------------------------------


def subscribe(broker: Broker) -> None:
    factory = partial(ConnectionFactory, url(broker), timeout_s=SOON_S)
    with factory(client_id="a.b").connect() as context:
        context.durable_consumer(Topic("news"), "sub.1", selector="n > 1", no_local=True).close()
        context.shared_durable_consumer(Topic("news"), "team").close()
        context.consumer(Topic("news"))
        context.temporary_queue()
        context.send(Queue("used"), "x")
        with factory().connect() as other:
            other.shared_durable_consumer(Topic("news"), "all").close()


async def defined(broker: Broker, file: Path) -> dict[str, Any]:
    await called(partial(export_definitions, file, admin=admin(broker)))
    return dict(json.loads(file.read_text()))


@run_async
async def test_definitions_of_one_broker_are_those_of_another_after_an_import(
    kafka: KafkaInMemory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    async with serving(kafka, tmp_path / "data") as broker:
        await called(subscribe, broker)
        await called(partial(AdminApiClient(admin(broker), None).act, "queues/create", name="kept"))
        found = await defined(broker, one)
    assert (found["format"], found["version"]) == ("bascule-definitions", 2)
    assert {(each["name"], each["auto_created"]) for each in found["queues"]} >= {("kept", False), ("used", True)}
    assert {(each["client_id"], each["name"], each["shared"], each["no_local"], each["selector"]) for each in found["subscriptions"]} == {
        ("a.b", "sub.1", False, True, "n > 1"), ("a.b", "team", True, False, ""), ("", "all", True, False, ""),
    }  # fmt: skip
    async with serving(kafka, tmp_path / "second", journal={"prefix": "second"}) as broker:
        await called(partial(import_definitions, one, dry_run=True, admin=admin(broker)))
        assert (await defined(broker, other))["subscriptions"] == []
        capsys.readouterr()
        await called(partial(import_definitions, one, admin=admin(broker)))
        assert capsys.readouterr().out.startswith("queues 1  subscriptions 3  diverts 0  ingresses 0  existing")
        imported = await defined(broker, other)
        assert sorted(imported["subscriptions"], key=str) == sorted(found["subscriptions"], key=str)
        assert {"kept"} <= {each["name"] for each in imported["queues"]}
        assert "used" not in {each["name"] for each in imported["queues"]}
        await called(subscribe, broker)  # the clients find their subscriptions
        assert sorted((await defined(broker, other))["subscriptions"], key=str) == sorted(found["subscriptions"], key=str)
        await called(partial(import_definitions, one, auto_created=True, admin=admin(broker)))
        assert "queues 0  subscriptions 0" in capsys.readouterr().out


@run_async
async def test_subscription_with_another_definition_stops_an_import_before_it_creates_anything(
    kafka: KafkaInMemory, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    async with serving(kafka, tmp_path / "data") as broker:
        await called(subscribe, broker)
        found = await defined(broker, file)
        found["queues"].append({"name": "new"})
        found["subscriptions"][0]["selector"] = "n > 2"
        file.write_text(json.dumps(found))
        with pytest.raises(InvalidInput, match=r"exists with another selector: 'n > 1' instead of 'n > 2'\. Nothing was created"):
            await called(partial(import_definitions, file, admin=admin(broker)))
        assert "new" not in {each["name"] for each in (await defined(broker, tmp_path / "after"))["queues"]}


HEAD = {"format": "bascule-definitions", "version": 1}
WRONG: list[tuple[Any, str]] = [
    ([], "has no definitions"), ({**HEAD, "version": 3}, "has version 3"), ({**HEAD, "queues": {}}, "queues is not a list"),
    ({**HEAD, "queues": [1]}, r"queues\[0\] is not an object"), ({**HEAD, "queues": [{"name": "q"}, {}]}, r"queues\[1\] has no name"),
    ({**HEAD, "queues": [{"name": "q", "x": 1}]}, r"queues\[0\] has an unknown field 'x'"),
    ({**HEAD, "subscriptions": [{"name": "s", "shared": 1}]}, r"subscriptions\[0\].shared must be true or false"),
    ({**HEAD, "subscriptions": [{"name": 1}]}, r"subscriptions\[0\].name must be a string"),
]  # fmt: skip


def test_deeply_nested_definitions_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("[" * 100_000)
    with pytest.raises(InvalidInput, match="is not JSON"):
        import_definitions(file, admin="http://127.0.0.1:1")


@pytest.mark.parametrize(("content", "why"), WRONG)
def test_wrong_file_of_definitions_is_refused_with_the_place(content: Any, why: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text(json.dumps(content))
    with pytest.raises(InvalidInput, match=why):
        import_definitions(file, admin="http://127.0.0.1:1")


def test_commands_have_the_exit_codes_of_all_commands(bascule: Bascule, tmp_path: Path) -> None:
    with new_message_file(tmp_path / "file", "orders") as writer:
        writer.add(jms_messages(1)[0])
    assert bascule("import", "messages", "file", "--dry-run", "--format", "json")[:2] == (0, '{"messages": 1, "to": "orders"}\n')
    assert bascule("import", "messages", "file", "--broker", "amqp://127.0.0.1:1").returncode == 3
    assert bascule("export", "messages", "orders", "file", "--broker", "amqp://127.0.0.1:1").returncode != 0
    assert bascule("import", "messages", "none").returncode == 2
    assert bascule("import", "definitions", "none").returncode == 2
