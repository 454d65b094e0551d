"""The life of a message, read from the journal of a broker in memory."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import count

import pytest

from bascule.broker import administration, branches
from bascule.broker.addresses import Diverts, ExclusiveDivert
from bascule.broker.administration import Progress
from bascule.broker.store_move import stored_record
from bascule.core.errors import InvalidInput
from bascule.core.xid import Xid
from bascule.journal.branches import Ending
from bascule.journal.errors import ForeignRecord
from bascule.journal.fence import Fence
from bascule.journal.records import KafkaOrigin, Kind, Send, SendFlag, ack_entry, encode_record, send_entry
from bascule.testing.broker import message_bytes
from bascule.timeline import life as life_module
from bascule.timeline.facts import Fate, What
from bascule.timeline.life import MessageLife
from bascule.timeline.story import NO_REASON, NOT_FOUND, MessageStory
from bascule.timeline.wanted import WantedId
from tests.unit.broker.conftest import START_MS, Bench, bench, policy

__all__ = ["bench", "policy"]
ID = "ID:wanted"
XID = Xid(1, b"g", b"b")


def life_of(bench: Bench, wanted: str = ID, start: int = 0) -> MessageLife:
    life = MessageLife(WantedId(wanted), Fence(sequence=0 if not start else -1))
    for offset, value in list(enumerate(bench.values()))[start:]:
        try:
            life.take(offset, START_MS + offset, value)
        except ForeignRecord:
            continue
    return life


def story_of(life: MessageLife) -> MessageStory:
    return MessageStory(life, "journal", 0, 0, 0, diverts_ended=True)


def fates(life: MessageLife) -> list[tuple[str, str, Fate]]:
    return [
        (message.address, life.queue_name(stay.queue), stay.fate) for message in life.messages.values() for stay in message.stays.values()
    ]


def carry_out(bench: Bench, action: partial[Iterator[Progress]]) -> None:
    for _ in action():
        bench.broker.settle()
    bench.broker.settle()


def test_acknowledged_message_has_left_its_queue_and_others_are_ignored(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    bench.fill("b", message_id="ID:other")
    life = life_of(bench)
    assert fates(life) == [("q", "q", Fate.WAITING)]
    assert not life.ended
    receiver = bench.consumer()
    bench.acknowledge(receiver)
    bench.broker.settle()
    life = life_of(bench)
    assert fates(life) == [("q", "q", Fate.REMOVED)]
    assert [event.what for event in life.events] == [What.ACCEPTED, What.DELIVERABLE, What.LEFT]
    assert life.ended
    assert NO_REASON in story_of(life).unrecorded()


def test_restart_marks_a_message_that_may_have_been_delivered(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    bench.consumer()
    bench.crash()
    bench.broker.settle()
    life = life_of(bench)
    (message,) = life.messages.values()
    (stay,) = message.stays.values()
    assert (stay.deliverable, stay.redelivered, stay.held) == (True, True, True)
    assert life.events[-1].what is What.RESTARTED


def test_dead_letter_names_its_reason_and_returns(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    receiver = bench.consumer()
    bench.engine.reject(receiver.consumer, receiver.messages[0])
    bench.broker.settle()
    carry_out(bench, partial(administration.return_dead_letters, bench.engine, bench.queue("DLQ")))
    life = life_of(bench)
    original, dead, back = life.messages.values()
    assert [fate for _, _, fate in fates(life)] == [Fate.DEAD_LETTERED, Fate.RETURNED, Fate.WAITING]
    assert (dead.copied_from, dead.reason, back.copied_from) == (original.identity, "rejected", dead.identity)


def test_expired_message_is_told_from_a_moved_one(bench: Bench) -> None:
    bench.fill("a", message_id=ID, ttl_ms=10)
    bench.now_ms += 10_000
    bench.broker.settle()
    bench.engine.tick()
    bench.broker.settle()
    assert [fate for _, _, fate in fates(life_of(bench))] == [Fate.EXPIRED, Fate.WAITING]
    carry_out(bench, partial(administration.move, bench.engine, bench.queue("ExpiryQueue"), "elsewhere"))
    assert [fate for _, _, fate in fates(life_of(bench))] == [Fate.EXPIRED, Fate.MOVED, Fate.WAITING]


def test_message_of_a_topic_has_a_life_in_each_subscription(bench: Bench) -> None:
    first, second = bench.subscription("one"), bench.subscription("two")
    bench.fill("a", to="t", message_id=ID)
    receiver = bench.consumer(first)
    bench.acknowledge(receiver)
    bench.broker.settle()
    bench.engine.delete_queue(second)
    bench.broker.settle()
    assert fates(life_of(bench)) == [("t", "one", Fate.REMOVED), ("t", "two", Fate.DELETED)]


@pytest.mark.parametrize("ending", [None, Ending.COMMITTED, Ending.FORCED_ROLLBACK])
def test_branch_in_doubt_holds_what_it_received_and_sends(bench: Bench, ending: Ending | None) -> None:
    bench.fill("a", message_id=ID)
    receiver = bench.consumer()
    transaction = bench.engine.begin(b"1")
    bench.engine.acknowledge_in(transaction, receiver.consumer, receiver.messages[0])
    bench.put("b", to="out", transaction=transaction, message_id="ID:sent")
    branches.prepare(bench.engine, transaction, XID, "client", lambda _: None)
    bench.broker.settle()
    if ending is not None:
        branches.end(bench.engine, XID, ending, lambda: None)
    bench.broker.settle()
    received, sent = life_of(bench), life_of(bench, "ID:sent")
    expected = {None: Fate.IN_BRANCH, Ending.COMMITTED: Fate.ACKNOWLEDGED, Ending.FORCED_ROLLBACK: Fate.WAITING}[ending]
    assert [fate for _, _, fate in fates(received)] == [expected]
    assert sent.branches[XID].ending is ending
    assert [message.xid for message in sent.messages.values()] == ([XID] if ending is Ending.COMMITTED else [])
    assert sent.ended is False
    if ending is None:
        assert NOT_FOUND not in story_of(sent).unrecorded()
    if ending is Ending.FORCED_ROLLBACK:
        assert sent.branches[XID].forced
        assert next(iter(received.messages.values())).stays.popitem()[1].failed == 1


def test_repeated_send_is_one_message_and_the_same_id_of_another_client_a_second_one(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    bench.fill("a", message_id=ID)
    bench.fill("a", message_id=ID, container="other")
    life = life_of(bench)
    assert len(life.messages) == 2
    assert all(message.flagged(SendFlag.DUPLICATE_ID) for message in life.messages.values())
    assert all(not message.copied_from for message in life.messages.values())


def test_exclusive_divert_takes_the_message_instead_of_the_queue(bench: Bench) -> None:
    bench.queue("q")
    bench.use(Diverts(exclusive=(ExclusiveDivert("only", "q", lambda _: True),)))
    bench.fill("a", message_id=ID)
    (message,) = life_of(bench).messages.values()
    assert (message.exclusive, message.stays) == (("only",), {})


def test_message_of_an_ingress_names_its_kafka_record() -> None:
    origin = KafkaOrigin("orders", 3, 17)
    body = message_bytes("a", message_id="ID:kafka:orders:3:17")
    flags = SendFlag.DURABLE | SendFlag.FROM_KAFKA | SendFlag.SOURCE
    send = Send(flags, 0, 4, 1, 0, 0, "q", (1,), (), (), origin, body)
    life = MessageLife(WantedId("ID:kafka:orders:3:17"), Fence())
    life.take(1, 5, encode_record(Kind.DATA, 0, 1, send_entry(send)))
    assert next(iter(life.messages.values())).source == origin
    assert "orders-3 offset 17" in life.events[0].detail


def test_records_of_a_fenced_broker_do_not_count(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    epoch = bench.engine.journaling.epoch
    bench.crash()
    life = life_of(bench)
    (mid,) = life.messages
    queue = next(iter(life.messages[mid].stays))
    sequence = bench.engine.journaling.sequence + 1
    life.take(99, 99, encode_record(Kind.STATE, epoch, sequence, ack_entry(queue, [mid])))
    assert not life.ended


def test_message_in_the_store_is_found_without_its_journal_record(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    queue = bench.queue()
    (message,) = queue.ready
    record, start = stored_record(bench.engine, message, queue), len(bench.values())
    receiver = bench.consumer()
    bench.acknowledge(receiver)
    bench.broker.settle()
    life = MessageLife(WantedId(ID), Fence(sequence=-1))
    life.take_stored(message.mid, 5, record)
    assert [event.what for event in life.events] == [What.STORED]
    for offset, value in list(enumerate(bench.values()))[start:]:
        life.take(offset, START_MS, value)
    assert [fate for _, _, fate in fates(life)] == [Fate.REMOVED]
    assert life.ended


def test_message_removed_from_the_store_has_ended(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    (message,) = bench.queue().ready
    life = MessageLife(WantedId(ID), Fence(sequence=-1))
    life.take_stored(message.mid, 5, stored_record(bench.engine, message, bench.queue()))
    life.take_stored(message.mid, 6, None)
    assert life.ended


def test_messages_beyond_the_limit_are_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_module, "MESSAGES_MAX", 2)
    for number in range(4):
        bench.fill("a", message_id=ID, container=f"client {number}")
    life = life_of(bench)
    assert (len(life.messages), life.more_messages) == (2, 2)
    assert any("2 more messages" in sentence for sentence in story_of(life).unrecorded())


def test_events_beyond_the_limit_are_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_module, "EVENTS_MAX", 1)
    bench.fill("a", message_id=ID)
    bench.consumer()
    life = life_of(bench)
    assert (len(life.events), life.more_events) == (1, 1)


def test_names_of_queues_are_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_module, "NAMES_MAX", 3)
    bench.fill("a", message_id=ID)
    for number in range(10):
        bench.queue(f"more{number}")
        bench.broker.settle()
    life = life_of(bench)
    assert len(life.names) <= 4
    assert fates(life) == [("q", "q", Fate.WAITING)]


def test_answer_is_json_with_unknown_queue_names_as_numbers(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    start = next(offset for offset in count() if b"wanted" in bench.values()[offset])
    life = life_of(bench, start=start)
    if bench.queue().id not in life.names:
        assert story_of(life).as_dict()["messages"][0]["queues"][0]["queue"] == f"queue number {bench.queue().id}"


def test_empty_id_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1 to"):
        WantedId("")
