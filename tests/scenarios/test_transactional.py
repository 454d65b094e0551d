"""The exactly-once writer on a real Kafka: an incarnation that was begun ahead has an effect once or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import pairwise

import pytest
from confluent_kafka import KafkaError

from bascule.core.kafka_records import Output
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients, transactional
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory
from bascule.kafka.transactional import TransactionalWriter, end_open_transactions
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import PipelinesSpec
from bascule.writer.errors import PositionMoved, Unwritable
from bascule.writer.position import Position
from tests.scenarios.topics import Reader
from tests.support.kafka_proxy import DELAY_S, Action, Api, KafkaProxy
from tests.support.system import wait_for

KEY = "divert:a/journal/0"
BEGIN, MIDDLE, END = (Position("journal", "id", 0, offset) for offset in (0, 5, 9))
RECORD_BYTES_MAX = 2000


class Place:
    """A position, and a topic beside it."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str) -> None:
        self.bootstrap, self.topic = kafka.bootstrap, f"{prefix}.out"
        self.pipelines = PipelinesSpec(prefix, {"bootstrap.servers": kafka.bootstrap}, topics=JournalTopics(prefix))
        Topics(self.pipelines.kafka).create(self.topic, 1, {"max.message.bytes": str(RECORD_BYTES_MAX)})
        Positions(self.pipelines, "").prepare_topics()
        with closing(self.writer()) as writer:
            writer.write([], None, BEGIN)

    def writer(self) -> TransactionalWriter:
        return Positions(self.pipelines, "").writer(KEY)

    def outputs(self, *values: str) -> list[Output]:
        return [Output(self.topic, None, value.encode(), []) for value in values]

    def values(self, last: str, *, committed: bool = True) -> list[str]:
        with closing(Reader(self.bootstrap, self.topic, committed=committed)) as reader:
            return reader.read_until(last)


@pytest.fixture
def place(kafka: EmbeddedKafka, topic_prefix: str) -> Place:
    return Place(kafka, topic_prefix)


@pytest.fixture
def writer(place: Place) -> Iterator[TransactionalWriter]:
    with closing(place.writer()) as writer:
        assert writer.current() == BEGIN
        yield writer


def test_records_handed_over_ahead_of_the_write_are_written_once(place: Place, writer: TransactionalWriter) -> None:
    outputs = place.outputs("1", "2")
    writer.ahead(outputs, BEGIN)
    outputs += place.outputs("3")
    writer.ahead(outputs, BEGIN)
    outputs += place.outputs("4")
    writer.write(outputs, BEGIN, MIDDLE)
    assert place.values("4", committed=False) == ["1", "2", "3", "4"]
    assert writer.current() == MIDDLE


def test_writer_keeps_its_producer_while_kafka_answers_each_request(
    place: Place, writer: TransactionalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("another producer is made")

    monkeypatch.setattr(clients, "producer", refused)
    positions = [replace(BEGIN, offset=offset) for offset in range(21)]
    for number, (before, after) in enumerate(pairwise(positions)):
        writer.write(place.outputs(f"{number}"), before, after)
    assert place.values("19") == [f"{number}" for number in range(20)]


@pytest.mark.parametrize("in_order", [True, False])
def test_records_of_an_abandoned_transaction_are_not_written(place: Place, writer: TransactionalWriter, in_order: bool) -> None:
    writer.ahead(place.outputs("1", "2"), BEGIN)
    if in_order:
        writer.abandon()
    assert writer.current() == BEGIN
    writer.ahead(place.outputs("1"), BEGIN)
    writer.write(place.outputs("1", "2", "3"), BEGIN, MIDDLE)
    assert place.values("3") == ["1", "2", "3"]
    assert writer.current() == MIDDLE


def test_write_from_another_position_is_refused_and_writes_nothing(place: Place, writer: TransactionalWriter) -> None:
    writer.ahead(place.outputs("1"), MIDDLE)
    with pytest.raises(PositionMoved):
        writer.write(place.outputs("1"), MIDDLE, END)
    writer.write(place.outputs("2"), BEGIN, MIDDLE)
    assert place.values("2", committed=False) == ["2"]


def test_record_refused_by_kafka_is_named_also_when_handed_over_ahead(place: Place, writer: TransactionalWriter) -> None:
    outputs = place.outputs("1", "x" * 2 * RECORD_BYTES_MAX, "3")
    writer.ahead(outputs, BEGIN)
    with pytest.raises(Unwritable) as refused:
        writer.write(outputs, BEGIN, MIDDLE)
    assert {at: fault.code() for at, fault in refused.value.faults.items()} == {1: KafkaError.MSG_SIZE_TOO_LARGE}
    history = TopicHistory(place.pipelines.kafka, place.topic, 0)
    wait_for(lambda: 0 < history.latest() == history.stable(), "what was begun to be ended, though nobody tries again")
    writer.write(place.outputs("1", "2", "3"), BEGIN, MIDDLE)
    assert place.values("3") == ["1", "2", "3"]


@pytest.mark.parametrize("bad", [pytest.param(0, marks=pytest.mark.slow), pytest.param(2500, marks=pytest.mark.slow), 4999])
def test_record_refused_by_kafka_is_named_among_thousands_before_any_time_limit(
    place: Place, writer: TransactionalWriter, bad: int
) -> None:
    outputs = place.outputs(*("x" * (2 * RECORD_BYTES_MAX if each == bad else 1) for each in range(5000)))
    with pytest.raises(Unwritable) as refused:  # a time limit would raise another error
        writer.write(outputs, BEGIN, MIDDLE)
    assert {at: fault.code() for at, fault in refused.value.faults.items()} == {bad: KafkaError.MSG_SIZE_TOO_LARGE}


@pytest.mark.slow
def test_transaction_does_not_time_out_while_kafka_still_accepts_records(
    kafka: EmbeddedKafka, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, most_s = 24, 0.8 * 24 * DELAY_S  # the whole takes longer; no single pause does
    with KafkaProxy(kafka.port) as proxy:
        settings = {"bootstrap.servers": proxy.bootstrap, "batch.num.messages": 1}
        names = place.pipelines.transactional_id(KEY), place.pipelines.topics.positions, KEY
        with closing(TransactionalWriter(settings, *names)) as writer:
            assert writer.current() == BEGIN
            monkeypatch.setattr(transactional, "COORDINATOR_TIMEOUT_S", most_s)
            proxy.inject(Api.PRODUCE, Action.DELAY, times=count)
            writer.write(place.outputs(*map(str, range(count))), BEGIN, MIDDLE)
        assert proxy.passed[Api.INIT_PRODUCER_ID] == 2  # of the writer and of its barrier record: there was no second attempt
    assert place.values(str(count - 1)) == [str(each) for each in range(count)]


def test_writer_detects_that_a_faster_twin_has_committed(place: Place, writer: TransactionalWriter) -> None:
    writer.ahead(place.outputs("1", "2"), BEGIN)
    with closing(place.writer()) as twin:
        assert twin.current() == BEGIN
        twin.write(place.outputs("1", "2", "3"), BEGIN, MIDDLE)
    with pytest.raises(PositionMoved) as moved:
        writer.write(place.outputs("1", "2", "3"), BEGIN, END)
    assert moved.value.found == MIDDLE
    assert place.values("3") == ["1", "2", "3"]


def test_transaction_left_open_by_a_killed_writer_is_ended(place: Place, writer: TransactionalWriter) -> None:
    writer.ahead(place.outputs("1", "2"), BEGIN)
    assert place.values("2", committed=False) == ["1", "2"]
    end_open_transactions(place.pipelines.kafka, [place.pipelines.transactional_id(KEY)])
    # Readers of committed records see it immediately: its transaction does not wait for the others.
    with closing(TransactionalWriter(place.pipelines.kafka, "another", place.pipelines.topics.positions, "another")) as another:
        another.write(place.outputs("3"), None, BEGIN)
    assert place.values("3") == ["3"]
