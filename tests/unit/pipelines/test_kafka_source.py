"""Source partitions of a pipeline, read from the mock cluster."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from bascule.core.errors import BadRecord, Unavailable
from bascule.core.kafka_records import Place, SourceStart, Taken
from bascule.kafka import clients, source
from bascule.kafka.admin import Topics
from bascule.kafka.source import KafkaSource
from bascule.kafka.topic_view import TopicViewLog
from bascule.pipelines import transforming_task
from bascule.pipelines.ingress import IngressEngine
from bascule.pipelines.spec import IngressSpec
from bascule.pipelines.transforming_task import FurtherRecords
from tests.support.mock_cluster import MockCluster
from tests.support.system import wait_for

PLACES: tuple[Place, ...] = (("a", 0), ("a", 1))


def produce(kafka: MockCluster, *values: str, partition: int = 0) -> None:
    producer = clients.producer(kafka.kafka)
    for value in values:
        producer.produce("a", value.encode(), partition=partition)
    assert producer.flush(10) == 0


@pytest.fixture
def topic(kafka: MockCluster, monkeypatch: pytest.MonkeyPatch) -> MockCluster:
    monkeypatch.setattr(source, "END_LASTS_S", 0.0)
    kafka.create("a", 2)
    return kafka


class End:
    """What the client says about the end of a partition."""

    def __init__(self, offset: int) -> None:
        self._offset = offset

    def error(self) -> End:
        return self

    def code(self) -> int:
        return int(KafkaError._PARTITION_EOF)

    def topic(self) -> str:
        return PLACES[0][0]

    def partition(self) -> int:
        return PLACES[0][1]

    def offset(self) -> int:
        return self._offset


def test_end_behind_markers_that_follow_each_other_is_reported(topic: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """A topic that gets nothing but aborted transactions has no record, and a new end every half a second."""
    monkeypatch.setattr(source, "END_LASTS_S", 0.9)
    with closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(0)}, committed=True)) as opened:
        for now_s, end, reported in ((0.0, 2, {}), (0.5, 4, {}), (1.0, 6, {PLACES[0]: 6}), (1.5, 8, {}), (2.5, 10, {PLACES[0]: 10})):
            monkeypatch.setattr(source.time, "monotonic", lambda now_s=now_s: now_s)
            assert opened._taken([cast(Any, End(end))]).ends == reported
        monkeypatch.undo()


def taken_until(found: Iterator[Taken], place: Place, end: int) -> list[Taken]:
    """What is taken until the end of a partition is reported."""
    seen: list[Taken] = []
    for taken in found:
        seen.append(taken)
        if taken.ends.get(place) == end:
            return seen
    raise AssertionError("the source has ended")


def values(seen: list[Taken], place: Place) -> list[bytes | None]:
    return [record.value for taken in seen for record in taken.records if (record.topic, record.partition) == place]


def test_source_yields_records_from_its_offsets_and_the_ends_of_its_partitions(topic: MockCluster) -> None:
    produce(topic, "0", "1", "2")
    produce(topic, "other", partition=1)
    with closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(1), PLACES[1]: SourceStart(1)}, committed=True)) as opened:
        found = iter(opened)
        seen = taken_until(found, PLACES[0], 3)
        assert values(seen, PLACES[0]) == [b"1", b"2"]
        assert values(seen, PLACES[1]) == []
        produce(topic, "later", partition=1)
        assert values(taken_until(found, PLACES[1], 2), PLACES[1]) == [b"later"]


def test_end_is_reported_once_and_only_if_no_record_follows_for_a_while(topic: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a source that is written in transactions would cost two transactions for each of its own: one for the marker."""
    monkeypatch.setattr(source, "PAUSE_S", 0.01)
    monkeypatch.setattr(source, "END_LASTS_S", 3600.0)
    with closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(0)}, committed=True)) as opened:
        found = iter(opened)
        seen: list[Taken] = []
        for number in range(3):
            produce(topic, str(number))
            while opened._ends.get(PLACES[0], (0, 0.0))[0] <= number and not any(taken.ends for taken in seen):
                seen.append(next(found))
        assert values(seen, PLACES[0]) == [b"0", b"1", b"2"]
        assert [taken.ends for taken in seen if taken.ends] == []
        monkeypatch.setattr(source, "END_LASTS_S", 0.0)
        seen = [next(found) for _ in range(3)]
    assert [taken.ends for taken in seen if taken.ends] == [{PLACES[0]: 3}]


def test_partition_is_a_tail_when_its_records_are_gathered(topic: MockCluster) -> None:
    produce(topic, "0")
    asked = iter([0.01, 0.01, 0.01])
    with closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(0)}, committed=True, gather=lambda _: next(asked, 0.0))) as opened:
        found = iter(opened)
        seen = [next(found)]
        assert values(seen, PLACES[0]) == [b"0"]
        assert seen[0].tails == set()
        produce(topic, "1")
        while not seen[-1].tails:
            seen.append(next(found))
    assert next(asked, None) is None
    assert seen[-1].tails == {PLACES[0]}


def test_partition_with_few_records_left_is_a_tail_and_one_with_a_backlog_is_none(
    topic: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "TAKEN_MAX", 10)
    monkeypatch.setattr(source, "BACKLOG_RECORDS", 25)
    produce(topic, *map(str, range(100)))
    with closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(0)}, committed=True)) as opened:
        seen = taken_until(iter(opened), PLACES[0], 100)
    assert values(seen, PLACES[0]) == [str(number).encode() for number in range(100)]
    reached = 0
    for taken in seen:
        reached += len(taken.records)
        if taken.tails:
            assert reached > 100 - 25
    assert sum(len(taken.records) for taken in seen if taken.tails) > 0


def test_announced_records_that_do_not_come_make_a_tail_soon(topic: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka holds them back while an earlier transaction of their partition is open."""
    monkeypatch.setattr(source, "BACKLOG_RECORDS", 0)
    produce(topic, "0")
    with closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(0)}, committed=True)) as opened:
        found = iter(opened)
        seen = [next(found)]
        while not seen[-1].tails:
            seen.append(next(found))
    assert [len(taken.records) for taken in seen if taken.tails] == [0]
    assert seen[-1].tails == {PLACES[0]}


def test_partition_whose_records_are_held_up_does_not_wait_for_a_busy_partition(
    topic: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "BACKLOG_RECORDS", 0)
    monkeypatch.setattr(source, "TAKEN_MAX", 1)
    produce(topic, "0", partition=1)
    with closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(0), PLACES[1]: SourceStart(0)}, committed=True)) as opened:
        found = iter(opened)
        seen: list[Taken] = []
        while not any(PLACES[1] in taken.tails for taken in seen):
            produce(topic, "busy")
            seen.append(next(found))
    assert values(seen, PLACES[1]) == [b"0"]


def test_idle_source_yields_nothing_from_time_to_time(topic: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "PAUSE_S", 0.01)
    with closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(0)}, committed=True)) as opened:
        found = iter(opened)
        taken_until(found, PLACES[0], 0)
        assert next(found) == Taken([], set())


def test_deleted_records_end_the_source_with_an_error_that_names_the_partition(topic: MockCluster) -> None:
    with (
        closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(7)}, committed=True)) as opened,
        pytest.raises(Unavailable, match="a-0 cannot be read"),
    ):
        for _ in opened:
            pass


def test_source_whose_client_cannot_be_made_is_unavailable() -> None:
    with pytest.raises(Unavailable, match="could not create a client to read sources"):
        KafkaSource({"bootstrap.servers": "127.0.0.1:1", "no.such.setting": "x"}, {PLACES[0]: SourceStart(0)}, committed=True)


class Unreadable:
    """A record with a header whose name the client cannot decode."""

    def error(self) -> None:
        return None

    def headers(self) -> list[tuple[str, bytes]]:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    def timestamp(self) -> tuple[int, int]:
        return 1, 7

    def __getattr__(self, name: str) -> Any:
        return lambda: {"topic": "a", "partition": 0, "offset": 0, "key": None, "value": b"v"}[name]


def test_record_with_unreadable_headers_is_dead_lettered_and_does_not_end_the_source(topic: MockCluster) -> None:
    with closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(0)}, committed=True)) as opened:
        (record,) = opened._taken([cast("Any", Unreadable())]).records
    output = IngressEngine(IngressSpec("in", "queue", ("a",)), "bridge", "ingress", "dead").output(record)
    assert output is not None
    assert (output.topic, output.value) == ("dead", b"v")
    with pytest.raises(BadRecord, match="the name of a header is no text"):
        IngressEngine(IngressSpec("in", "queue", ("a",)), "bridge", "ingress", None).output(record)


def test_source_that_a_task_with_transformations_reads_rests_at_its_end(topic: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is reported between the records and the look for further ones. A source that gathers for ever would never yield again."""
    monkeypatch.setattr(source, "PAUSE_S", 0.05)
    monkeypatch.setattr(transforming_task, "FURTHER_S", 0.3)
    monkeypatch.setattr(source, "_DEFAULTS", {**source._DEFAULTS, "fetch.wait.max.ms": 10})
    further, seen = FurtherRecords(), list[Taken]()
    with closing(KafkaSource(topic.kafka, {PLACES[0]: SourceStart(0)}, committed=True, gather=further.gathers_s)) as opened:

        def read() -> None:
            for taken in opened:
                seen.append(taken)
                further.carried(taken)
                if len(values(seen, PLACES[0])) == 2 and not any(each.records or each.ends for each in seen[-2:]):
                    return

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        produce(topic, "0")
        wait_for(lambda: any(taken.ends for taken in seen), "the end")
        produce(topic, "1")
        thread.join(30)
        assert not thread.is_alive()
    assert values(seen, PLACES[0]) == [b"0", b"1"]


@pytest.mark.parametrize(("now", "said"), [("another", "topic 'a' was recreated: its id is another"), ("", "topic 'a' no longer exists")])
def test_source_whose_client_does_not_know_the_topic_asks_kafka_after_each_read(
    topic: MockCluster, now: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Kafka before 3.1 has fetches that name no id, and a later client may write other lines."""
    monkeypatch.setattr(TopicViewLog, "topic_id", lambda *_: "")
    start = SourceStart(0, Topics(topic.kafka).id("a"))
    produce(topic, "0")
    with closing(KafkaSource(topic.kafka, {PLACES[0]: start}, committed=True)) as opened:
        found = iter(opened)
        assert values(taken_until(found, PLACES[0], 1), PLACES[0]) == [b"0"]
        topic.ids["a"] = now
        produce(topic, "1")
        with pytest.raises(Unavailable, match=said):
            taken_until(found, PLACES[0], 2)
