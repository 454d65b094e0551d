"""Where a group begins that has committed nothing."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_INVALID, TopicPartition

from bascule.kafka import consumer
from bascule.kafka.consumer import GroupConsumer

COMMITTED = {("orders", 0): OFFSET_INVALID, ("retry", 0): OFFSET_INVALID, ("retry", 1): 17}


class Client:
    """The library's consumer, as far as partitions come and go."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.assigned: dict[tuple[str, int], int] = {}

    def subscribe(self, topics: list[str], **calls: Any) -> None:
        calls["on_assign"](self, [TopicPartition(*each) for each in COMMITTED])

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        assert timeout > 0
        return [TopicPartition(each.topic, each.partition, COMMITTED[each.topic, each.partition]) for each in partitions]

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        self.assigned = {(each.topic, each.partition): each.offset for each in partitions}

    def pause(self, partitions: list[TopicPartition]) -> None:
        assert len(partitions) == len(COMMITTED)


@pytest.mark.parametrize(("start", "begun"), [("latest", {("retry", 0): OFFSET_BEGINNING, ("retry", 1): 17}), ("earliest", {})])
def test_what_was_put_into_the_retry_topic_before_it_was_first_read_is_read(
    monkeypatch: pytest.MonkeyPatch, start: str, begun: dict[tuple[str, int], int]
) -> None:
    """As where a member died between the first failure and the first retry: nothing is committed there, and 'latest' is behind it."""
    monkeypatch.setattr(consumer, "Consumer", Client)
    member: Any = GroupConsumer(
        {}, "shop", ["orders", "retry"], start=start, whole=["retry"],
        on_assigned=lambda _: None, on_revoked=lambda _: None, on_lost=lambda _: None,
    )  # fmt: skip
    as_committed = dict.fromkeys(COMMITTED, OFFSET_INVALID)
    assert member._consumer.assigned == as_committed | begun
