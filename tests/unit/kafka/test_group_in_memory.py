"""Members of a consumer group on Kafka in memory."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError

from bascule.core.errors import Unavailable
from bascule.kafka import consumer
from bascule.kafka.consumer import GroupConsumer, read_again
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]  # imported fixtures


class Member:
    """A member of a group that records its callbacks."""

    def __init__(self, *topics: str, group: str = "g", **settings: Any) -> None:
        self.callbacks: list[tuple[str, list[tuple[str, int]]]] = []
        self.consumer = GroupConsumer(
            {**SETTINGS, **settings}, group, topics, start="earliest",
            on_assigned=lambda at: self.callbacks.append(("assigned", at)), on_revoked=lambda at: self.callbacks.append(("revoked", at)),
            on_lost=lambda at: self.callbacks.append(("lost", at)),
        )  # fmt: skip


def test_resumed_partition_is_read_and_next_member_continues_at_committed_offset(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    for number in range(4):
        kafka.put("t", bytes([number]), b"k", h=b"1")
    first, second = Member("t"), Member("^t.*")
    assert first.consumer.poll(10, 0) == []
    assert first.callbacks == [("assigned", [("t", 0)])]
    assert first.consumer.hold([("t", 0)])["t", 0].offset == 0
    first.consumer.resume([("t", 0), ("other", 1)])
    records = first.consumer.poll(3, 1)
    assert [(each.offset, each.key, each.value, list(each.headers)) for each in records] == [
        (number, b"k", bytes([number]), [("h", b"1")]) for number in range(3)
    ]
    first.consumer.pause([("t", 0)])
    assert first.consumer.poll(1, 0) == []
    first.consumer.commit({("t", 0): 2})
    first.consumer.close()
    with pytest.raises(Unavailable, match="offsets could not be committed"):
        first.consumer.commit({("t", 0): 3})
    assert second.consumer.poll(1, 0) == []
    second.consumer.resume([("t", 0)])
    assert [each.offset for each in second.consumer.poll(9, 1)] == [2, 3]
    assert second.consumer.read_on(("t", 0), 1) == 1
    assert [each.offset for each in second.consumer.poll(1, 1)] == [1]
    second.consumer.close()


@pytest.mark.parametrize("refused", [False, True])
def test_lost_partition_is_reported(kafka: KafkaInMemory, refused: bool) -> None:
    kafka.create("t")
    member = Member("t")
    member.consumer.poll(1, 0)
    kafka.members["g"][0].expire()
    if refused:
        kafka.fail("incremental_unassign", KafkaError._STATE)
    member.consumer.poll(1, 0)
    assert member.callbacks == [("assigned", [("t", 0)]), ("lost", [("t", 0)])]
    assert member.consumer._consumer.assignment() == []
    member.consumer.close()


def test_revoked_partition_is_reported_while_still_assigned(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    member = Member("t")
    member.consumer.poll(1, 0)
    kafka.members["g"][0].target = set()
    member.consumer.poll(1, 0)
    assert member.callbacks == [("assigned", [("t", 0)]), ("revoked", [("t", 0)])]
    member.consumer.close()


def test_fetch_error_is_raised_after_read_records_and_transient_error_is_ignored(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    kafka.put("t", b"1")
    member = Member("t")
    member.consumer.poll(1, 0)
    member.consumer.resume([("t", 0)])
    kafka.fail("fetch", KafkaError._TRANSPORT)
    kafka.fail("fetch", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    found = member.consumer.poll(5, 0)
    assert [each.value for each in found] == [b"1"]
    with pytest.raises(Unavailable, match="records cannot be read"):
        member.consumer.poll(5, 0)
    for call, ask in (("committed", lambda: member.consumer.hold([("t", 0)])), ("seek", lambda: member.consumer.read_on(("t", 0), 0))):
        kafka.fail(call, KafkaError._TIMED_OUT)
        with pytest.raises(Unavailable):
            ask()
    member.consumer.close()


def test_records_are_read_again_by_offset_when_present(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consumer, "GAP_MAX", 3)
    kafka.create("t")
    for number in range(20):
        kafka.put("t", bytes([number]))
    kafka.partition("t").delete(2)
    assert {at: record.value for at, record in read_again(SETTINGS, "t", 0, [1, 2, 4, 15]).items()} == {2: b"\2", 4: b"\4", 15: b"\x0f"}
    assert read_again(SETTINGS, "t", 0, []) == {}
