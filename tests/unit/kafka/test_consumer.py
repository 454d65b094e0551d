"""The offsets at which a group without commits starts, and the ownership of partitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicPartition

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import GroupOffset
from bascule.kafka import clients
from bascule.kafka.consumer import BY_MEMBER, GroupConsumer
from bascule.kafka.instance import SameInstance

At = tuple[str, int]
ORDERS: At = ("orders", 0)
RETRY: list[At] = [("retry", 0), ("retry", 1)]
ENDS = (3, 40)


class Failure:
    """A message of the client that reports an error."""

    def __init__(self, code: int) -> None:
        self._code = code

    def error(self) -> KafkaError:
        return KafkaError(self._code)


class Client:
    """The consumer of the client library, and the coordinator of the group."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.offsets = {ORDERS: OFFSET_INVALID, RETRY[0]: OFFSET_INVALID, RETRY[1]: 17}
        self.notes = dict.fromkeys(self.offsets, BY_MEMBER)
        self.refuses: int | None = None
        self.read_from: list[int] = []
        self.says: list[int] = []
        self.closed = False

    def poll(self, timeout_s: float) -> Failure | None:
        return Failure(self.says.pop()) if self.says else None

    def close(self) -> None:
        self.closed = True

    def incremental_assign(self, partitions: list[TopicPartition]) -> None:
        pass

    pause = incremental_assign

    def seek(self, at: TopicPartition) -> None:
        self.read_from.append(at.offset)

    def subscribe(self, topics: list[str], *, on_assign: Any, **_: Any) -> None:
        self.assign = on_assign

    def committed(self, partitions: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        assert timeout > 0
        places = [(each.topic, each.partition) for each in partitions]
        return [TopicPartition(*at, self.offsets[at], self.notes[at]) for at in places]

    def get_watermark_offsets(self, at: TopicPartition, timeout: float) -> tuple[int, int]:
        assert timeout > 0
        return ENDS

    def commit(self, offsets: list[TopicPartition], asynchronous: bool) -> None:
        assert not asynchronous
        if self.refuses is not None:
            raise KafkaException(KafkaError(self.refuses))
        self.offsets |= {(each.topic, each.partition): each.offset for each in offsets}
        self.notes |= {(each.topic, each.partition): each.metadata for each in offsets}


def member(
    monkeypatch: pytest.MonkeyPatch, start: str = "earliest", on_lost: Callable[[list[At]], None] = lambda _: None
) -> tuple[GroupConsumer, Client]:
    monkeypatch.setattr(clients, "consumer", Client)
    made: Any = GroupConsumer(
        {}, "shop", ["orders", "retry"], start=start, whole=["retry"],
        on_assigned=lambda _: None, on_revoked=lambda _: None, on_lost=on_lost,
    )  # fmt: skip
    return made, made._consumer


@pytest.mark.parametrize(("start", "first"), [("latest", 40), ("earliest", 3)])
def test_group_starts_at_configured_offset_and_retry_topic_at_beginning(monkeypatch: pytest.MonkeyPatch, start: str, first: int) -> None:
    """A member may die between the first failure and the first retry. Its retry topic has no commit, and "latest" would skip the record."""
    group, client = member(monkeypatch, start)
    held = {ORDERS: first, RETRY[0]: 3, RETRY[1]: 17}
    assert group.hold(list(held)) == {at: GroupOffset(offset) for at, offset in held.items()}
    assert client.offsets == held
    assert client.settings["auto.offset.reset"] == "earliest"


def test_committed_group_does_not_start_at_end_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group reads the records that arrived while it had no member, or before its first commit."""
    group, client = member(monkeypatch, "latest")
    client.offsets[ORDERS] = 38
    assert group.hold([ORDERS]) == {ORDERS: GroupOffset(38)}
    assert client.settings["auto.offset.reset"] == "earliest"


def test_offset_set_by_operator_is_recognised_until_next_commit_of_member(monkeypatch: pytest.MonkeyPatch) -> None:
    group, client = member(monkeypatch)
    client.offsets[ORDERS], client.notes[ORDERS] = 5, ""
    assert group.hold([ORDERS]) == {ORDERS: GroupOffset(5, by_member=False)}
    assert group.hold([ORDERS]) == {ORDERS: GroupOffset(5, by_member=False)}
    group.commit({ORDERS: 6})
    assert group.hold([ORDERS]) == {ORDERS: GroupOffset(6)}


def test_reading_continues_at_given_offset_or_at_beginning_of_shorter_topic(monkeypatch: pytest.MonkeyPatch) -> None:
    group, client = member(monkeypatch)
    assert [group.read_on(ORDERS, offset) for offset in (39, 40, 41)] == [39, 40, 3]
    assert client.read_from == [39, 40, 3]


def test_removed_member_holds_no_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    group, client = member(monkeypatch, "latest")
    client.refuses = KafkaError.UNKNOWN_MEMBER_ID
    for at in (ORDERS, RETRY[1]):
        with pytest.raises(Unavailable, match="offsets could not be committed"):
            group.hold([at])
    client.refuses = None
    assert group.hold([ORDERS]) == {ORDERS: GroupOffset(40)}


def fence(group: GroupConsumer, client: Client) -> None:
    """Let the client report once that it was fenced; it does not repeat the report."""
    client.assign(client, [TopicPartition(*ORDERS)])
    client.says.append(KafkaError._FATAL)
    assert group.poll(1, 0.0) == []
    group.poll(1, 0.0)


def test_fenced_static_member_rejoins_once_and_reports_lost_partitions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost: list[list[At]] = []
    made: tuple[Any, Client] = member(monkeypatch, on_lost=lost.append)
    group, first = made
    with pytest.raises(Unavailable):
        fence(group, first)
    assert first.closed
    assert group._consumer is not first
    with pytest.raises(SameInstance):
        fence(group, group._consumer)
    assert lost == [[ORDERS], [ORDERS]]
