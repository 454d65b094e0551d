"""Source topics written in transactions: the marker that ends a transaction is not a record, and is deleted with the records before it."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
from confluent_kafka import OFFSET_END, TopicPartition

from bascule.core.errors import Unavailable
from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.history import LagMirror, TopicHistory
from bascule.pipelines import positions as module
from bascule.pipelines.carry import Carrier, held_position
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import EARLIEST, PipelinesSpec, StartPosition
from bascule.writer.errors import PositionMoved
from bascule.writer.lineage import SeenRecord
from bascule.writer.position import Position, PositionLost, position_key
from tests.scenarios.test_positions import delete, delete_records
from tests.support.system import wait_for

PIPELINE = "ingress:in"
RECORDS = 3


class Source:
    """A topic of one partition that is written in transactions, and an ingress of this topic."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str) -> None:
        self.pipelines = PipelinesSpec(prefix, {"bootstrap.servers": kafka.bootstrap, "log_level": 2}, topics=JournalTopics(prefix))
        self.topic = f"{prefix}-in"
        self.topics = Topics(self.pipelines.kafka)
        self.topics.create(self.topic, 1, {})
        self.positions = Positions(self.pipelines, "first")
        self.positions.prepare_topics()
        self.key = position_key(PIPELINE, self.topic, 0)
        self._producer = clients.producer({**self.pipelines.kafka, "transactional.id": prefix})
        self._producer.init_transactions()

    def put(self, *, commit: bool = True) -> None:
        begun = self.end()
        self._producer.begin_transaction()
        for _ in range(RECORDS):
            self._producer.produce(self.topic, b"")
        self._producer.flush()
        if commit:
            self._producer.commit_transaction()
        else:
            self._producer.abort_transaction()
        # The end marker reaches the partition a moment after the answer.
        wait_for(lambda: self.end() == begun + RECORDS + 1, "the end of the transaction")

    def end(self) -> int:
        return TopicHistory(self.pipelines.kafka, self.topic, 0).latest()

    def take(self, owner: str) -> Position:
        """Register the ingress as a driver does at its start."""
        ids = self.topics.ids([self.topic])
        (position,) = Positions(self.pipelines, owner).take_sources(PIPELINE, {(self.topic, 0): ids[self.topic]}, StartPosition(EARLIEST))
        return position

    def carry(self, position: Position, offset: int) -> Position:
        """Carry records up to a number, as a task does."""
        with closing(self.positions.writer(self.key)) as writer:
            after = replace(position, offset=offset)
            writer.write([], position, after)
        return after

    def pass_over(self, position: Position) -> int:
        """Let a driver find the source idle. Return the position of the partition after that."""
        self.positions.pass_over({self.positions.claim(self.key, position): None})
        return self.positions.stored()[self.key].offset


@pytest.fixture
def source(kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch) -> Source:
    for limit in ("IDLE_TIMEOUT_S", "PASSED_WITHIN_S"):  # no other pipeline needs attention here
        monkeypatch.setattr(module, limit, 60.0)
    return Source(kafka, topic_prefix)


@pytest.mark.parametrize("rolled_back", [False, True])
def test_ingress_continues_after_all_records_it_read_are_deleted_from_kafka(source: Source, rolled_back: bool) -> None:
    source.put()
    if rolled_back:
        source.put(commit=False)
    position = source.carry(source.take("first"), RECORDS)
    assert position.offset < source.end()
    assert source.pass_over(position) == source.end()
    delete_records(source.pipelines.kafka["bootstrap.servers"], source.topic, OFFSET_END)
    assert source.take("second").offset == source.end()


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize("taken", [0, RECORDS])
def test_advance_of_an_idle_source_skips_no_record(source: Source, taken: int) -> None:
    source.put()
    source.put()
    position = source.carry(source.take("first"), taken)
    assert source.pass_over(position) == (RECORDS + 1 if taken else 0)
    delete_records(source.pipelines.kafka["bootstrap.servers"], source.topic, OFFSET_END)
    assert source.pass_over(source.positions.stored()[source.key]) < source.end()
    shown = LagMirror(source.pipelines.kafka, source.positions.group(PIPELINE))
    shown._consumer.commit(offsets=[TopicPartition(source.topic, 0, 2)], asynchronous=False)
    shown.close()
    with pytest.raises(PositionLost, match=r"deleted before the pipeline read them\. Consumer group .* had reached offset 2"):
        source.take("second")


@pytest.mark.parametrize("offset", [RECORDS - 1, RECORDS + 2])
def test_task_fails_if_position_is_not_between_its_claim_and_its_first_record(source: Source, offset: int) -> None:
    source.put()
    source.put()
    position = source.carry(source.take("first"), RECORDS)
    claim = source.positions.claim(source.key, position)
    with Carrier(source.pipelines, claim, held_position(source.pipelines, claim)) as task:
        source.carry(position, offset)
        task.reach(SeenRecord(RECORDS + 1, None, b""))
        task.reach(SeenRecord(RECORDS + 2, None, b""))
        with pytest.raises(PositionMoved):
            task.commit()
    assert source.positions.stored()[source.key].offset == offset


@pytest.mark.on_mock_cluster
def test_source_read_to_its_end_is_not_queried(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    source.put()
    position = source.carry(source.take("first"), source.end())
    monkeypatch.setattr(Positions, "_next_record", lambda *_: pytest.fail("it is asked"))
    claim = source.positions.claim(source.key, position)
    assert source.positions.pass_over({claim: source.end()}) == [claim]


@pytest.mark.on_mock_cluster
def test_position_taken_by_another_driver_is_not_advanced(source: Source) -> None:
    source.put()
    position = source.carry(source.take("first"), RECORDS)
    source.take("second")
    assert source.pass_over(position) == RECORDS


def test_deleted_and_unavailable_topics_do_not_block_an_idle_source(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    gone, away = f"{source.topic}-gone", f"{source.topic}-away"
    for topic in (gone, away):
        source.topics.create(topic, 1, {})
    source.topics.await_visible([gone, away])
    source.put()
    sources = {(topic, 0): topic_id for topic, topic_id in source.topics.ids([gone, away, source.topic]).items()}
    positions = source.positions.take_sources(PIPELINE, sources, StartPosition(EARLIEST))
    claims = [source.positions.claim(position_key(PIPELINE, at.topic, 0), at) for at in positions]
    source.carry(next(at for at in positions if at.topic == source.topic), RECORDS)
    delete(source.pipelines.kafka["bootstrap.servers"], gone)
    ask = Positions._next_record
    asked: list[str] = []

    def next_record(positions: Positions, position: Position) -> int:
        asked.append(position.topic)
        if position.topic == away:
            raise Unavailable("its leader is away")
        return ask(positions, position)

    monkeypatch.setattr(Positions, "_next_record", next_record)
    assert [claim.topic for claim in source.positions.pass_over(dict.fromkeys(claims))] == [source.topic]
    assert gone not in asked  # without an answer, the driver would wait for the whole time
    assert source.positions.stored()[source.key].offset == source.end()
