"""Messages that a peer managed to store, also under an earlier version that checked less: they load, move and are delivered like others."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.amqp.types import Symbol
from bascule.broker import administration, branches
from bascule.broker.errors import RecordTooLarge
from bascule.broker.policy import AddressPolicy, Policy
from bascule.core.errors import TransactionRolledBack
from bascule.core.xid import Xid
from bascule.jms.annotate import ANNOTATION_BYTES_MAX, ORIGINAL_MESSAGE_ID, REASON, annotated
from bascule.jms.sections import (
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    VALUE,
    header_bytes,
    message_annotation,
    places,
    section_bytes,
)
from bascule.journal.branches import Ending
from bascule.journal.records import Kind, Op, Send, SendFlag, encode_record, json_entry, send_entry
from tests.support.faults import Faults
from tests.support.poison import BODY, POISON, raw
from tests.unit.broker.conftest import Bench


class Poisoned(Bench):
    """A broker whose journal has a poisonous message in "q" and in the subscription "sub", and a good one behind each."""

    def __init__(self, body: bytes, **fields: Any) -> None:
        self.faults = Faults()
        super().__init__(Policy(AddressPolicy(deliveries_max=1)), errors=self.faults.errors)
        self.fill("before")
        self.subscription("sub", "t")
        queue = self.queue()
        self.broker.settle()
        engine = self.engine
        send = Send(SendFlag.DURABLE | SendFlag.GROUPED, 0, 4, 0, 0, 0, "q", (), (), (), None, body)._replace(**fields)
        for at in (queue, engine.addresses.subscriptions["sub"]):
            sequence = engine.journaling.sequence + 1
            entry = send_entry(send._replace(address=at.address, routing=at.routing, queues=(at.id,)))
            self.broker.log.append(b"D", encode_record(Kind.DATA, engine.journaling.epoch, sequence, entry))
            engine.journaling.begin(engine.journaling.epoch, sequence)
        self.fill("behind")
        self.fill("behind", to="t")
        self.crash()

    def everywhere(self) -> int:
        return sum(queue.held_messages for queue in self.engine.addresses.queues.values())

    def look(self, seconds: int) -> None:
        for _ in range(3):
            self.now_ms += seconds * 1000
            self.engine.tick()
            self.broker.settle()


@pytest.mark.parametrize("body", POISON.values(), ids=POISON)
def test_malformed_stored_message_is_loaded_and_delivered_with_valid_messages(body: bytes) -> None:
    bench = Poisoned(body)
    for queue in (bench.queue(), bench.engine.addresses.subscriptions["sub"]):
        receiver = bench.consumer(queue)
        assert body in [bench.engine.bodies.read(message) for message in receiver.messages]
        bench.acknowledge(receiver)
        bench.broker.settle()
    assert bench.everywhere() == 0
    assert bench.faults.contained == []


@pytest.mark.parametrize("again", [False, True], ids=["at work", "after a restart"])
@pytest.mark.parametrize("body", POISON.values(), ids=POISON)
def test_malformed_stored_message_is_dead_lettered_and_returned(body: bytes, again: bool) -> None:
    bench = Poisoned(body)
    receiver = bench.consumer()
    for message in receiver.messages:
        bench.engine.reject(receiver.consumer, message)
    bench.broker.settle()
    if again:
        bench.crash()
    held = bench.everywhere()
    dead = bench.queue("DLQ")
    assert (dead.held_messages, bench.queue().held_messages) == (3, 0)
    assert [administration.dead_letter(bench.engine, message)["bytes"] for message in dead.waiting()]
    for progress in administration.return_dead_letters(bench.engine, dead):
        assert progress.done + sum(progress.left.values()) <= 3
    bench.broker.settle()
    assert bench.everywhere() == held
    assert dead.held_messages <= 1
    bench.crash()
    assert bench.everywhere() == held
    assert [kind for kind, _ in bench.faults.contained] == []


@pytest.mark.parametrize("again", [False, True], ids=["at work", "after a restart"])
@pytest.mark.parametrize("body", POISON.values(), ids=POISON)
def test_malformed_stored_message_expires_and_is_moved_by_administrator(body: bytes, again: bool) -> None:
    bench = Poisoned(body, expiry_ms=1)
    bench.look(60)
    if again:
        bench.crash()
    expired = bench.queue("ExpiryQueue")
    assert expired.held_messages == 2
    for _ in administration.move(bench.engine, expired, "elsewhere"):
        pass
    bench.broker.settle()
    bench.crash()
    assert bench.queue("elsewhere").held_messages == 2
    assert bench.everywhere() == 5
    assert bench.faults.contained == []


@pytest.mark.parametrize("body", POISON.values(), ids=POISON)
def test_malformed_stored_message_is_evaluated_by_selectors_and_received_by_branch(body: bytes) -> None:
    bench = Poisoned(body)
    selective = bench.consumer(selector="JMSMessageID = 'x' AND a = 'x' AND JMSXGroupID = 'g'")
    assert selective.messages == []
    bench.engine.detach(selective.consumer)
    receiver = bench.consumer()
    transaction = bench.engine.begin(b"1")
    for message in receiver.messages:
        bench.engine.acknowledge_in(transaction, receiver.consumer, message)
    branches.prepare(bench.engine, transaction, Xid(1, b"a", b"b"), "client", lambda _: None)
    bench.broker.settle()
    bench.crash()
    branches.end(bench.engine, Xid(1, b"a", b"b"), Ending.ROLLED_BACK, lambda: None)
    bench.broker.settle()
    assert bench.everywhere() == 5
    assert bench.faults.contained == []


def test_subscription_with_lone_surrogate_in_name_is_loaded_and_its_messages_expire() -> None:
    bench = Bench(Policy())
    content = {
        "id": 77, "name": "client.\ud800", "address": "t", "routing": 1, "selector": "", "no_local": "\ud800", "subscription": "\ud800",
    }  # fmt: skip
    engine = bench.engine
    record = encode_record(Kind.STATE, engine.journaling.epoch, engine.journaling.sequence + 1, json_entry(Op.QUEUE_CREATED, content))
    bench.broker.log.append(b"S", record)
    bench.crash()
    assert list(bench.engine.addresses.subscriptions) == ["client.\\ud800"]
    bench.fill("short", to="t", ttl_ms=1)
    for _ in range(3):
        bench.now_ms += 60_000
        bench.engine.tick()
        bench.broker.settle()
    (message,) = bench.queue("ExpiryQueue").waiting()
    assert message_annotation(bench.engine.bodies.read(message), "x-opt-ORIG-QUEUE") == "client.\\ud800"


def test_subscription_whose_selector_no_longer_compiles_takes_no_messages_and_does_no_harm() -> None:
    faults = Faults()
    bench = Bench(Policy(), errors=faults.errors)
    bench.subscription("bad", "t", selector="x = ")
    good = bench.subscription("good", "t")
    bench.broker.settle()
    bench.crash()
    bench.fill("a", to="t")
    assert bench.sender.accepted_tokens == ["a"]
    assert [queue.held_messages for queue in bench.engine.addresses.subscriptions.values()] == [0, 1]
    assert good.name == "good"
    assert len(faults.contained) == 1


# -- fields that a move adds --------------------------------------------------------------------------------------------------------


def test_move_copies_sections_of_sender_byte_for_byte() -> None:
    annotations = raw(MESSAGE_ANNOTATIONS, b"\xd1\x00\x00\x00\x0c\x00\x00\x00\x02\xa3\x01a\xe0\x03\x01\x56\x01")
    properties = raw(PROPERTIES, b"\xd0\x00\x00\x00\x07\x00\x00\x00\x01\xa1\x01i")
    moved = annotated(header_bytes(durable=True) + annotations + properties + BODY, {REASON: "expired"})
    assert b"\xa3\x01a\xe0\x03\x01\x56\x01" in moved
    assert properties + BODY in moved
    assert message_annotation(moved, REASON) == "expired"
    assert message_annotation(moved, ORIGINAL_MESSAGE_ID) == "i"
    assert message_annotation(annotated(moved, {}), REASON) is None


def test_move_removes_the_expiry_time_and_keeps_the_bytes_around_it() -> None:
    fields = ["i", b"u", "to", "s", "r", "c", Symbol("text"), None, 12, 13, "g", None, None]
    moved = annotated(section_bytes(PROPERTIES, fields) + BODY, {})
    assert moved == header_bytes(durable=False) + section_bytes(PROPERTIES, [*fields[:8], None, *fields[9:]]) + BODY


@pytest.mark.parametrize(("size", "copied"), [(ANNOTATION_BYTES_MAX - 5, True), (ANNOTATION_BYTES_MAX - 4, False)])
def test_message_id_is_copied_into_annotation_up_to_size_limit(size: int, copied: bool) -> None:
    moved = annotated(section_bytes(PROPERTIES, ["i" * size]) + BODY, {REASON: "expired"})
    assert (message_annotation(moved, ORIGINAL_MESSAGE_ID) == "i" * size) is copied
    assert message_annotation(moved, REASON) == "expired"


def test_annotations_of_repeated_moves_stay_within_limits_of_peers() -> None:
    body = section_bytes(MESSAGE_ANNOTATIONS, {Symbol(f"k{number}"): number for number in range(200)}) + BODY
    for _ in range(3):
        body = annotated(body, {REASON: "expired", "x-opt-ORIG-ADDRESS": "q"})
    assert [section for section, _, _ in places(body)] == [HEADER, MESSAGE_ANNOTATIONS, VALUE]
    assert message_annotation(body, "k199") == 199


# -- records that the journal has no room for ----------------------------------------------------------------------------------------


@pytest.fixture
def narrow(policy: Policy) -> Bench:
    """Return a broker whose journal accepts records of 20,000 bytes."""
    bench = Bench(policy, errors=Faults().errors)
    bench.engine.journaling.record_bytes_max = 20_000
    bench.engine.local_transactions.bytes_max = 10_000
    return bench


def test_message_too_large_for_a_record_with_move_annotations_moves_without_them(narrow: Bench) -> None:
    narrow.fill("x" * 18_000)
    assert len(narrow.encode("x" * 18_000)) < 20_000
    receiver = narrow.consumer()
    narrow.queue("DLQ")
    narrow.broker.settle()
    narrow.engine.journaling.record_bytes_max = len(narrow.encode("x" * 18_000)) + 1024 + 100
    narrow.engine.reject(receiver.consumer, receiver.messages[0])
    narrow.broker.settle()
    (dead,) = narrow.queue("DLQ").waiting()
    assert narrow.engine.bodies.read(dead) == narrow.encode("x" * 18_000)


def test_message_too_large_for_a_record_stays_in_its_queue(narrow: Bench) -> None:
    narrow.fill("x" * 18_000, "small")
    receiver = narrow.consumer()
    narrow.queue("DLQ")
    narrow.broker.settle()
    narrow.engine.journaling.record_bytes_max = 10_000
    for message in receiver.messages:
        narrow.engine.reject(receiver.consumer, message)
    narrow.broker.settle()
    assert narrow.waiting(narrow.queue("DLQ")) == ["small"]
    assert narrow.queue().held_messages == 1
    narrow.crash()
    assert narrow.queue().held_messages == 1


def test_commit_that_grows_beyond_record_size_through_new_subscriptions_is_rolled_back(narrow: Bench) -> None:
    transaction = narrow.engine.begin(b"1")
    for number in range(20):
        narrow.put(number, to="t", transaction=transaction, message_id=str(number))
    for number in range(300):
        narrow.subscription(f"s{number}", "t")
    narrow.broker.settle()
    outcome: list[Any] = []
    narrow.engine.commit(transaction, outcome.append)
    narrow.broker.settle()
    (error,) = outcome
    assert isinstance(error, TransactionRolledBack)
    assert isinstance(error.cause, RecordTooLarge)
    assert sum(queue.held_messages + queue.incoming for queue in narrow.engine.addresses.queues.values()) == 0
    narrow.fill("after", to="t")
    assert narrow.sender.accepted_tokens[-1] == "after"


def test_branch_that_grows_beyond_record_size_stays_prepared_until_it_fits(narrow: Bench) -> None:
    xid, engine = Xid(1, b"a", b"b"), narrow.engine
    transaction = engine.begin(b"1")
    for number in range(20):
        narrow.put(number, to="t", transaction=transaction, message_id=str(number))
    branches.prepare(engine, transaction, xid, "client", lambda _: None)
    queues = [narrow.subscription(f"s{number}", "t") for number in range(300)]
    narrow.broker.settle()
    with pytest.raises(RecordTooLarge):
        branches.end(engine, xid, Ending.COMMITTED, lambda: None)
    for queue in queues[1:]:
        engine.delete_queue(queue)
    ended: list[str] = []
    branches.end(engine, xid, Ending.COMMITTED, lambda: ended.append("committed"))
    narrow.broker.settle()
    assert (ended, queues[0].held_messages) == (["committed"], 20)


def test_non_ascii_addresses_count_with_their_encoded_size(narrow: Bench) -> None:
    transaction = narrow.engine.begin(b"1")
    for _ in range(4):
        narrow.put("x", to="\U0001f40c" * 1000, transaction=transaction)
    outcome: list[Any] = []
    narrow.engine.commit(transaction, outcome.append)
    assert isinstance(outcome[0], TransactionRolledBack)
    assert "commit more often" in str(outcome[0])


def test_move_to_a_queue_that_may_not_be_created_loses_no_message() -> None:
    bench = Bench(Policy(AddressPolicy(auto_create=False), (("q", {"auto_create": True}),)), errors=Faults().errors)
    bench.fill("a", "b")
    with pytest.raises(Exception, match="clients may not create it"):
        administration.move(bench.engine, bench.queue(), "elsewhere")
    assert bench.waiting(bench.queue()) == ["a", "b"]
