"""What `bascule why` says if it has not read everything, or if records have parts that look alike: nothing that may be false."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from bascule.broker import branches
from bascule.broker.store_move import stored_record
from bascule.core.xid import Xid
from bascule.journal.branches import Ended, Ending, ended_entry
from bascule.journal.errors import ForeignRecord
from bascule.journal.fence import Fence
from bascule.journal.records import Kind, Send, SendFlag, ack_entry, encode_record, reserve_entry, send_entry
from bascule.testing.broker import message_bytes
from bascule.timeline import life as life_module
from bascule.timeline.facts import Fate, What
from bascule.timeline.life import MessageLife
from bascule.timeline.story import SAME_ID, MessageStory
from bascule.timeline.wanted import WantedId
from tests.unit.broker.conftest import START_MS, Bench, bench, policy
from tests.unit.timeline.test_life import ID, XID, life_of, story_of

__all__ = ["bench", "policy"]


def stay_of(story: MessageStory) -> dict[str, Any]:
    (message,) = story.as_dict()["messages"]
    stay: dict[str, Any] = message["queues"][0]
    return stay


def send(message_id: str = ID, *queues: int, multicast: bool = False) -> bytes:
    body = message_bytes("a", message_id=message_id)
    return send_entry(Send(SendFlag.DURABLE, int(multicast), 4, 1, 0, 0, "q", queues or (1,), (), (), None, body))


def test_message_is_not_called_waiting_if_the_end_of_the_journal_was_not_read(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    life = life_of(bench)
    assert stay_of(story_of(life))["state"] == "waiting"
    stay = stay_of(MessageStory(life, "journal", 0, 0, 0, complete=False))
    assert (stay["state"], stay["held"], stay["may_have_been_delivered"]) == (Fate.UNKNOWN, None, None)


def test_part_that_was_trimmed_during_the_search_makes_message_and_branch_unknown(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    receiver = bench.consumer()
    transaction = bench.engine.begin(b"1")
    bench.put("b", to="out", transaction=transaction, message_id=ID)
    branches.prepare(bench.engine, transaction, XID, "client", lambda _: None)
    bench.broker.settle()
    life = life_of(bench)
    life.lose_track()
    story = story_of(life)
    assert (stay_of(story)["state"], story.as_dict()["branches"][0]["outcome"]) == (Fate.UNKNOWN, Fate.UNKNOWN)
    assert not story.ended
    before = len(bench.values())
    bench.acknowledge(receiver)
    bench.broker.settle()
    for offset, value in list(enumerate(bench.values()))[before:]:
        life.take(offset, START_MS, value)
    assert stay_of(story_of(life))["state"] == Fate.REMOVED


def test_delivery_is_unknown_if_a_record_before_the_search_may_have_allowed_it() -> None:
    later = MessageLife(WantedId(ID), Fence(0, 4), from_start=False)
    later.take(5, 5, encode_record(Kind.DATA, 0, 5, send()))
    assert stay_of(story_of(later))["may_have_been_delivered"] is None
    later.take(6, 6, encode_record(Kind.EPOCH, 0, 5))
    later.take(7, 7, encode_record(Kind.DATA, 6, 6, send()))
    assert [stay.reservations_known for message in later.messages.values() for stay in message.stays.values()] == [False, True]
    whole = MessageLife(WantedId(ID), Fence(0, 0))
    whole.take(1, 1, encode_record(Kind.DATA, 0, 1, send()))
    assert stay_of(story_of(whole))["may_have_been_delivered"] is False
    whole.take(2, 2, encode_record(Kind.STATE, 0, 2, reserve_entry(1, 1 << 40)))
    assert stay_of(story_of(whole))["may_have_been_delivered"] is True


def test_message_of_the_store_has_no_epoch_and_the_journal_replaces_it(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    (message,) = bench.queue().ready
    record = stored_record(bench.engine, message, bench.queue())
    life = MessageLife(WantedId(ID), Fence(sequence=0))
    life.take_stored(message.mid, 5, record)
    life.take_stored(message.mid, 6, None)
    assert next(iter(life.messages.values())).identity.startswith("*-")
    for offset, value in enumerate(bench.values()):
        life.take(offset, START_MS, value)
    assert {event.what for event in life.events} == {What.ACCEPTED}
    assert not next(iter(life.messages.values())).identity.startswith("*")


def test_message_of_a_topic_in_the_store_has_not_ended_with_its_first_subscription() -> None:
    life = MessageLife(WantedId(ID), Fence(0, 8), from_start=False)
    mid = 3 << 20
    life.take_stored(mid, 5, encode_record(Kind.DATA, 0, mid >> 20, send(ID, 1, multicast=True)))
    (mid,) = life.messages
    life.take(9, 9, encode_record(Kind.STATE, 0, 9, ack_entry(1, [mid])))
    assert not life.ended
    life.take(10, 10, encode_record(Kind.STATE, 0, 10, ack_entry(2, [mid])))
    assert [stay.fate for stay in next(iter(life.messages.values())).stays.values()] == [Fate.REMOVED, Fate.REMOVED]
    life.take_stored(mid, 6, None)
    assert life.ended


@pytest.mark.parametrize("record", [b"BJ", encode_record(Kind.STATE, 0, 1), encode_record(Kind.STATE, 0, 1, ack_entry(1, [1]))])
def test_record_of_the_store_without_a_message_is_skipped(record: bytes) -> None:
    life = MessageLife(WantedId("ID:AMQP_ULONG:0"), Fence())
    with suppress(ForeignRecord):
        life.take_stored(1, 5, record)
    assert not life.messages


def test_send_of_another_client_in_the_record_of_a_commit_is_not_attributed_to_the_branch(bench: Bench) -> None:
    transaction = bench.engine.begin(b"1")
    bench.put("b", to="q", transaction=transaction, message_id=ID)
    branches.prepare(bench.engine, transaction, XID, "client", lambda _: None)
    bench.broker.settle()
    life = life_of(bench)
    sequence, epoch = life.fence.sequence + 1, life.fence.epoch
    ended = ended_entry(*Ended(XID, Ending.COMMITTED, 1))
    life.take(90, 90, encode_record(Kind.DATA, epoch, sequence, ended, send(), send()))
    assert [message.xid for message in life.messages.values()] == [None, None]


def test_delivery_that_is_given_back_is_no_failure(bench: Bench) -> None:
    bench.fill("a", message_id=ID)
    life = life_of(bench)
    (message,) = life.messages.values()
    (stay,) = message.stays.values()
    record = life_module._Record(1, 1, 0)
    life._failed(record, message, stay, 1)
    life._failed(record, message, stay, 1)
    assert [event.what for event in life.events[-2:]] == [What.FAILED, What.GIVEN_BACK]


def test_branches_beyond_the_limit_are_counted(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_module, "BRANCHES_MAX", 1)
    for number in (b"1", b"2"):
        transaction = bench.engine.begin(number)
        bench.put("b", to="q", transaction=transaction, message_id=ID)
        branches.prepare(bench.engine, transaction, Xid(1, number, b"b"), "client", lambda _: None)
        bench.broker.settle()
    life = life_of(bench)
    assert (len(life.branches), life.more_branches, life.ended) == (1, 1, False)
    assert any("1 more prepared transactions" in sentence for sentence in story_of(life).unrecorded())


def test_messages_with_different_ids_that_match_are_told_apart() -> None:
    life = MessageLife(WantedId("a"), Fence())
    life.take(1, 1, encode_record(Kind.DATA, 0, 1, send("ID:a"), send("a")))
    story = story_of(life)
    assert [message["id"] for message in story.as_dict()["messages"]] == ["ID:a", "ID:AMQP_NO_PREFIX:a"]
    assert SAME_ID in story.unrecorded()


def test_message_that_is_not_kept_has_not_ended(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(life_module, "MESSAGES_MAX", 1)
    bench.fill("a", message_id=ID)
    bench.acknowledge(bench.consumer())
    bench.fill("a", message_id=ID, container="other")
    assert not life_of(bench).ended
