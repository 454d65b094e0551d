"""The tail of the ingress topic, with a topic in memory and an engine whose journal is in memory."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bascule.broker import ingress_tail
from bascule.broker.containment import ErrorContainment, ErrorKind
from bascule.broker.ingress_tail import CHUNK_BYTES, CHUNKS_MAX, FAILED_RETRY_MS
from bascule.broker.policy import BLOCK, DROP, REJECT, AddressPolicy, Policy
from bascule.config.audit import Audit as AuditSettings
from bascule.core.access import AccessRules
from bascule.core.destination import ADDRESS_MAX, Routing
from bascule.core.errors import Unavailable
from bascule.core.roles import UserRoles
from bascule.core.topics import MESSAGE_BYTES_MAX, RECORD_BYTES_MAX
from bascule.jms.sections import PROPERTIES, section_bytes
from bascule.journal.records import MESSAGES_PER_RECORD_MAX, KafkaOrigin, Kind, Send, SendFlag, encode_record, send_entry
from bascule.server import ingress
from bascule.server.audit import audit_of
from bascule.server.ingress import IngressTail
from bascule.server.ingress_refusals import IngressRefusals
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.support.speed import SLOWNESS

SENDS = 3 * CHUNKS_MAX
WAIT_S = 30.0 * SLOWNESS


class Record:
    """A record of ``bascule.ingress``, for a queue."""

    def __init__(self, offset: int, address: str, content: Any = None, *, damaged: bool = False, count: int = 1, **fields: Any) -> None:
        body = message_bytes(offset if content is None else content)
        send = Send(SendFlag.SOURCE, Routing.ANYCAST, 4, 0, 0, 0, address, (), (), (), KafkaOrigin("topic", 0, offset), body)
        self._offset = offset
        self._value = encode_record(Kind.DATA, 0, 0, count * send_entry(send._replace(**fields)))
        if damaged:
            self._value = self._value[:-1] + b"!"

    def offset(self) -> int:
        return self._offset

    def value(self) -> bytes:
        return self._value

    def headers(self) -> list[tuple[str, bytes]]:
        return [("unbound", b"keep")]


class Reader:
    """A reader that returns one record at a time, so that each is a step."""

    topic_view: int | None = None
    read_topic_id = ""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._position = 0

    def seek(self, offset: int) -> None:
        self._position = offset

    def read_at_once(self, count: int, timeout_s: float) -> list[Record]:
        if self._position == SENDS:
            time.sleep(0.01)
            return []
        self._position += 1
        return [Record(self._position - 1, "bounded" if self._position % 2 else "other")]

    def close(self) -> None:
        pass


class Topics:
    """Topics that report the id of the topic."""

    now = "first"

    def __init__(self, *_: Any) -> None: ...

    def id(self, topic: str, timeout_s: float = 0.0) -> str:
        return self.now


async def until(broker: BrokerInMemory, true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < deadline_s
        broker.settle()
        await asyncio.sleep(0.001)


def run(
    policy: Policy,
    check: Callable[[BrokerInMemory, IngressTail], Awaitable[None]],
    monkeypatch: pytest.MonkeyPatch,
    reader: type[Reader] = Reader,
) -> None:
    monkeypatch.setattr(ingress, "PartitionReader", reader)
    monkeypatch.setattr(ingress, "Topics", Topics)
    monkeypatch.setattr(ingress, "TopicHistory", lambda *_: SimpleNamespace(earliest=lambda: 0, stable=lambda: SENDS, latest=lambda: SENDS))

    async def tailed() -> None:
        broker = BrokerInMemory(policy=policy)
        tail = IngressTail({}, "bascule.ingress", 0, broker.engine, asyncio.get_running_loop())
        try:
            await check(broker, tail)
        finally:
            tail.close()

    asyncio.run(tailed())


class OfUsers(Reader):
    """A reader of one record with the header ``user``."""

    def read_at_once(self, count: int, timeout_s: float) -> list[Record]:
        if self._position:
            return super().read_at_once(count, timeout_s) if self._position == SENDS else []
        self._position += 1
        record = Record(0, "orders")
        record.headers = lambda: [("unbound", b"keep"), ("user", b"stock"), ("x", None)]  # type: ignore[method-assign, list-item]
        return [record]


def test_header_names_the_user_whose_permissions_a_message_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        await until(broker, lambda: "DLQ" in broker.engine.addresses.anycast and bool(broker.engine.queue("DLQ").held_messages))
        (line,) = map(json.loads, file.read_text().splitlines())
        assert (line["who"], line["from"], line["action"], line["on"], line["allowed"]) == ("stock", "ingress", "send", "orders", False)

    file = tmp_path / "audit.jsonl"
    trail = audit_of(AuditSettings(file=file), {})
    made = BrokerInMemory

    def denying(**options: Any) -> BrokerInMemory:
        broker = made(**options)
        access = broker.engine.intake.access
        access.permissions, access.on_refused = AccessRules((), UserRoles({})), IngressRefusals(trail).record
        return broker

    monkeypatch.setattr("tests.unit.server.test_ingress.BrokerInMemory", denying)
    run(Policy(), check, monkeypatch, OfUsers)


@pytest.mark.parametrize("when_full", [BLOCK, REJECT, DROP])
def test_messages_from_kafka_wait_while_their_queue_is_full_and_arrive_in_order(when_full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        await until(broker, lambda: tail.failure != "")
        assert tail.failure == "ingress bascule.ingress waits: queue 'bounded' is full"
        queue, other = broker.engine.queue("bounded"), broker.engine.queue("other")
        broker.settle()
        await asyncio.sleep(0.05)
        assert (queue.held_messages, other.held_messages) == (2, 2)
        receiver = broker.attach(queue, 1)
        await until(broker, lambda: bool(receiver.messages))
        broker.engine.acknowledge(receiver.consumer, receiver.messages[0])
        await until(broker, lambda: other.held_messages == 3)
        assert queue.held_messages == 2
        broker.give(receiver, SENDS)

        def all_taken() -> bool:
            for message in receiver.messages:
                broker.engine.acknowledge(receiver.consumer, message)
            return len(receiver.messages) + other.held_messages == SENDS

        await until(broker, all_taken)
        assert [message.body for message in receiver.messages] == [message_bytes(offset) for offset in range(0, SENDS, 2)]
        assert [message.body for message in other.ready] == [message_bytes(offset) for offset in range(1, SENDS, 2)]
        await until(broker, lambda: tail.failure == "")

    bounded = ("bounded", {"max_messages": 2, "when_full": when_full})
    run(Policy(AddressPolicy(), (bounded,)), check, monkeypatch)


def test_messages_from_kafka_wait_while_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        memory = broker.engine.memory
        memory.shortage = "the disk is full"
        await until(broker, lambda: tail.failure != "")
        assert tail.failure == "ingress bascule.ingress waits: the disk is full"
        taken = memory.messages
        broker.settle()
        assert memory.messages == taken
        assert memory.ingress_bytes > 0
        memory.shortage = ""
        await until(broker, lambda: memory.messages == SENDS)
        assert (tail.failure, memory.ingress_bytes) == ("", 0)

    run(Policy(), check, monkeypatch)


def test_room_freed_within_a_transaction_does_not_split_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        await until(broker, lambda: tail.failure != "")
        engine, queue = broker.engine, broker.engine.queue("bounded")
        receiver = broker.attach(queue, 2)
        await until(broker, lambda: len(receiver.messages) == 2)
        transaction = engine.begin(b"1")
        for message in receiver.messages:
            engine.acknowledge_in(transaction, receiver.consumer, message)
        records, sender = len(broker.log.records), Sender()
        broker.send("third", message_bytes("sent"), sender, 1, transaction=transaction)
        engine.commit(transaction, lambda error: None)
        broker.flush()
        assert len(broker.in_flight) == 1  # the transaction's record: it contains nothing of the ingress, and was not split
        assert engine.ingress_positions == {0: 4}
        await until(broker, lambda: engine.ingress_positions == {0: 8})
        assert len(broker.log.records) > records

    run(Policy(AddressPolicy(), (("bounded", {"max_messages": 2}),)), check, monkeypatch)


def test_intake_continues_when_the_full_queue_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        await until(broker, lambda: tail.failure != "")
        broker.engine.delete_queue(broker.engine.queue("bounded"))
        await until(broker, lambda: broker.engine.ingress_positions == {0: 8})

    run(Policy(AddressPolicy(), (("bounded", {"max_messages": 2}),)), check, monkeypatch)


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (Record(3, "q", damaged=True), "offset 3: checksum"),
        (Record(3, "q", "x" * 2000), "offset 3: the message has 2015 bytes; the journal has room for 1000"),
    ],
    ids=["damaged", "too large"],
)
def test_records_before_a_bad_record_are_taken_and_the_bad_one_is_named(bad: Record, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class AllAtOnce(Reader):
        def read_at_once(self, count: int, timeout_s: float) -> list[Record]:
            return [Record(0, "q"), Record(1, "q"), bad, Record(4, "q")]

    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        queue = broker.engine.queue("q")
        await until(broker, lambda: tail.failure != "" and queue.held_messages == 2)
        assert tail.failure.startswith(f"ingress bascule.ingress has stopped: {reason}")
        assert broker.engine.ingress_positions == {0: 2}

    run(Policy(transaction_bytes_max=1000), check, monkeypatch, AllAtOnce)


class Unreadable(Record):
    """A record whose headers the client cannot decode."""

    def headers(self) -> list[tuple[str, bytes]]:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")


TIME_MAX_MS = (1 << 63) - 1
#: Records that any authorised program may write to the topic, and the number of messages taken from each.
HOSTILE = {
    "an unknown routing": (Record(2, "q", routing=7), 0),
    "no address": (Record(2, ""), 0),
    "too long an address": (Record(2, "a" * (ADDRESS_MAX + 1)), 0),
    "a body that is no message": (Record(2, "q", body=b"\x00\x53\x73\xc0", flags=SendFlag.SOURCE | SendFlag.GROUPED), 0),
    "a body of too many properties": (Record(2, "q", body=section_bytes(PROPERTIES, [None] * 14), flags=SendFlag.GROUPED), 0),
    "no body": (Record(2, "q", body=b""), 1),
    "more messages than a record holds": (Record(2, "q", count=MESSAGES_PER_RECORD_MAX + 1), 0),
    "flags of the broker's own": (Record(2, "q", flags=SendFlag.PIPELINES_ONLY | SendFlag.DIVERTS, diverts=("x",)), 1),
    "queues of its own": (Record(2, "q", queues=(1, 2, 3)), 1),
    "a priority above all": (Record(2, "q", priority=255), 1),
    "an address with a backslash": (Record(2, "\\ud800"), 1),
    "a time before the epoch": (Record(2, "q", expiry_ms=-1, delivery_time_ms=-1, timestamp_ms=-1), 1),
    "a time that never comes": (Record(2, "q", delivery_time_ms=TIME_MAX_MS, expiry_ms=TIME_MAX_MS), 1),
    "headers that are no text": (Unreadable(2, "q"), 1),
}  # fmt: skip


@pytest.mark.parametrize(("hostile", "taken"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_record_is_skipped_or_taken_and_the_records_around_it_are_taken(
    hostile: Record, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AllAtOnce(Reader):
        def read_at_once(self, count: int, timeout_s: float) -> list[Record]:
            found = [Record(0, "q"), Record(1, "q"), hostile, Record(3, "q")][self._position :]
            self._position += len(found)
            if not found:
                time.sleep(0.01)
            return found

    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        broker.engine.queue("q")
        await until(broker, lambda: broker.engine.confirmed_ingress == {0: 4})
        assert tail.failure == ""
        assert tail.foreign == 1 - taken
        for engine in (broker.engine, broker.replay(None).engine):
            assert sum(queue.held_messages for queue in engine.addresses.queues.values()) == 3 + taken

    run(Policy(AddressPolicy(expiry_address="")), check, monkeypatch, AllAtOnce)


def test_chunk_that_cannot_be_journaled_waits_and_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal has no room for a record of its size at first."""
    now_ms = [1_000]
    errors = ErrorContainment(lambda *_: None)
    monkeypatch.setattr(ingress, "PartitionReader", Reader)
    monkeypatch.setattr(ingress, "Topics", Topics)
    monkeypatch.setattr(ingress, "TopicHistory", lambda *_: SimpleNamespace(earliest=lambda: 0, stable=lambda: SENDS, latest=lambda: SENDS))

    async def tailed() -> None:
        broker = BrokerInMemory(errors=errors, clock=lambda: now_ms[0])
        broker.engine.journaling.record_bytes_max = 1
        tail = IngressTail({}, "bascule.ingress", 0, broker.engine, asyncio.get_running_loop())
        try:
            await until(broker, lambda: tail.failure != "")
            assert "could not be journaled: a journal record has" in tail.failure
            assert errors.counts == {ErrorKind.INGRESS: 1}
            broker.engine.journaling.record_bytes_max = RECORD_BYTES_MAX
            broker.send("other", message_bytes("a client's"), Sender(), 1)
            now_ms[0] += FAILED_RETRY_MS
            broker.engine.tick()
            await until(broker, lambda: broker.engine.confirmed_ingress == {0: SENDS})
            assert sum(queue.held_messages for queue in broker.engine.addresses.queues.values()) == SENDS + 1
        finally:
            tail.close()

    asyncio.run(tailed())


@pytest.mark.parametrize("view", [None, 1])
@pytest.mark.parametrize("new_records", [[Record(7, "q")], []], ids=["with records", "with none"])
def test_no_record_of_a_recreated_topic_is_taken(new_records: list[Record], view: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new topic has grown past the position in the old topic. The tail must not continue there as if the topic were the same."""

    class Grown(Reader):
        topic_view = view

        def read_at_once(self, count: int, timeout_s: float) -> list[Record]:
            self._position += 1
            if self._position <= 5:
                return [Record(self._position - 1, "q")]
            monkeypatch.setattr(Topics, "now", "second")
            if view is not None and new_records:
                self.topic_view = view + 1
            return new_records

    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        await until(broker, lambda: not tail._thread.is_alive() and broker.engine.queue("q").held_messages == 5)
        assert tail.failure.startswith("ingress bascule.ingress has stopped: the topic was recreated")
        assert (broker.engine.ingress_topic_id, broker.engine.ingress_positions) == ("first", {0: 5})

    monkeypatch.setattr(ingress_tail, "LOOK_S", 3600.0 if new_records else 0.0)
    run(Policy(), check, monkeypatch, Grown)


def test_a_recreated_topic_can_be_started_once_the_records_of_the_deleted_one_are_journaled(monkeypatch: pytest.MonkeyPatch) -> None:
    class Second(Reader):
        def read_at_once(self, count: int, timeout_s: float) -> list[Record]:
            if Topics.now == "second" or self._position < 4:
                return super().read_at_once(count, timeout_s)
            monkeypatch.setattr(Topics, "now", "second")
            return []

    async def check(broker: BrokerInMemory, tail: IngressTail) -> None:
        await until(broker, lambda: not tail._thread.is_alive())
        with pytest.raises(Unavailable, match=r"from the deleted topic bascule.ingress are not journaled yet: .*: queue 'bounded' is full"):
            await tail.reset()
        queue, other = broker.engine.queue("bounded"), broker.engine.queue("other")
        receiver = broker.attach(queue, SENDS)
        await until(broker, lambda: (len(receiver.messages), other.held_messages) == (1, 1))
        broker.engine.acknowledge(receiver.consumer, receiver.messages[0])
        await until(broker, lambda: (len(receiver.messages), other.held_messages) == (2, 2))
        await tail.reset()

        def all_taken() -> bool:
            for message in receiver.messages:
                broker.engine.acknowledge(receiver.consumer, message)
            return (len(receiver.messages), other.held_messages) == (2 + SENDS // 2, 2 + SENDS // 2)

        await until(broker, all_taken)
        assert (broker.engine.ingress_topic_id, tail.failure) == ("second", "")

    monkeypatch.setattr(ingress_tail, "LOOK_S", 0.0)
    run(Policy(AddressPolicy(), (("bounded", {"max_messages": 1, "when_full": BLOCK}),)), check, monkeypatch, Second)


def test_a_kafka_client_that_cannot_be_created_is_reported_and_retried() -> None:
    async def check() -> None:
        broker = BrokerInMemory()
        tail = IngressTail({"no.such.setting": "1"}, "bascule.ingress", 0, broker.engine, asyncio.get_running_loop())
        try:
            await until(broker, lambda: "could not create a client to read bascule.ingress" in tail.failure)
            assert tail._thread.is_alive()
        finally:
            tail.close()

    asyncio.run(check())


def test_ingress_chunk_and_largest_message_fit_into_one_journal_record() -> None:
    before = Send(SendFlag.SOURCE, Routing.ANYCAST, 4, 0, 0, 0, "a" * 1024, (), (), (), KafkaOrigin("topic", 0, 0), b"x" * CHUNK_BYTES)
    largest = before._replace(body=b"x" * MESSAGE_BYTES_MAX)
    short = before._replace(body=b"")
    assert len(encode_record(Kind.DATA, 0, 0, b"".join(map(send_entry, [before, *[short] * 998, largest])))) < RECORD_BYTES_MAX
