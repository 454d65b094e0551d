"""Source topics that lose their last records when another replica becomes the leader, on Kafka in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Gather, KafkaRecord, Place, SourceStart, Taken
from bascule.core.topics import JournalTopics
from bascule.jms.message import decode_message
from bascule.journal.records import Op, decode_send, entries
from bascule.kafka.lineage import PartitionLineage
from bascule.kafka.topic_view import TopicViewLog
from bascule.pipelines import carry
from bascule.pipelines.carry import Carrier, NewLeader, held_position
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import EARLIEST, IngressSpec, PipelinesSpec, StartPosition
from bascule.pipelines.tasks import IngressTask
from bascule.writer.lineage import SeenRecord
from bascule.writer.position import INGRESS, UNKNOWN_EPOCH, Position, PositionLost, position_key
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.support.kafka_in_memory.state import readable
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]  # imported fixtures

TOPIC = "orders"
PIPELINE = f"{INGRESS}in"
KEY = position_key(PIPELINE, TOPIC, 0)


class Source:
    """A topic with ten records, and an ingress that has read some of them."""

    def __init__(self, kafka: KafkaInMemory) -> None:
        self.kafka = kafka
        kafka.create("__transaction_state", 1)
        self.pipelines = PipelinesSpec("b1", SETTINGS, topics=JournalTopics("bascule"))
        kafka.create(TOPIC)
        Positions(self.pipelines, "").prepare_topics()
        self.put(10)

    def put(self, count: int) -> None:
        for number in range(count):
            self.kafka.put(TOPIC, b"%d" % number)

    def take(self) -> Position:
        positions = Positions(self.pipelines, "driver")
        (taken,) = positions.take_sources(PIPELINE, {(TOPIC, 0): positions.topics.id(TOPIC)}, StartPosition(EARLIEST))
        return taken

    def carry(self, position: Position, count: int, *, meanwhile: int | None = None) -> None:
        """Carry ``count`` records and move the position. ``meanwhile`` is the end of a replica that leads before the commit."""
        claim = Positions(self.pipelines, "").claim(KEY, position)
        at = self.kafka.partition(TOPIC)
        with Carrier(self.pipelines, claim, held_position(self.pipelines, claim)) as carrier:
            for offset in range(position.offset, position.offset + count):
                record = at.records[offset]
                carrier.reach(SeenRecord(offset, record.key, record.value, record.timestamp_ms))
            if meanwhile is not None:
                at.new_leader(meanwhile)
                self.put(10)
            carrier.commit()

    def stored(self) -> Position:
        return Positions(self.pipelines, "").stored()[KEY]


@pytest.fixture
def source(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    monkeypatch.setattr(carry, "_kept", carry._Tools())
    yield Source(kafka)
    for writer in carry._kept.idle.values():
        writer.close()


@pytest.mark.parametrize("grown", [0, 1, 20])
def test_topic_that_lost_its_tail_is_reported_after_it_has_grown_again(source: Source, grown: int) -> None:
    source.carry(source.take(), 8)
    source.kafka.partition(TOPIC).new_leader(5)
    source.put(grown)
    with pytest.raises(PositionLost, match=rf"'{PIPELINE}' cannot continue: {TOPIC}-0 has lost its tail: records up to offset 8"):
        source.take()


def test_stale_source_end_of_former_leader_is_read_again(source: Source) -> None:
    source.carry(source.take(), 8)
    source.kafka.partition(TOPIC).new_leader()
    source.kafka.former[TOPIC, 0].extend([{"offset": 5, "leader_epoch": 0}] * 2)
    assert source.take().offset == 8


def test_leader_epoch_of_new_leader_is_stored_in_position(source: Source) -> None:
    source.carry(source.take(), 4)
    assert source.stored().leader_epoch == 0
    source.kafka.partition(TOPIC).new_leader()
    source.carry(source.take(), 4)
    assert (source.stored().offset, source.stored().leader_epoch) == (8, 1)
    source.carry(source.take(), 2, meanwhile=10)
    assert (source.stored().offset, source.stored().leader_epoch) == (10, 2)


def test_records_lost_while_carried_are_read_again(source: Source) -> None:
    position = source.take()
    with pytest.raises(Unavailable, match=f"the record at offset 7 of {TOPIC}-0 has changed"):
        source.carry(position, 8, meanwhile=5)
    assert source.stored().offset == 0
    again = source.take()
    source.carry(again, 15)
    assert (source.stored().offset, source.stored().leader_epoch) == (15, 1)


@pytest.mark.parametrize("unseen", [False, True], ids=["reader knows its leader", "reader may have read from any leader"])
def test_first_records_of_a_log_that_lost_its_tail_and_has_grown_beyond_the_position_are_not_carried(
    source: Source, *, unseen: bool
) -> None:
    """The task has begun, and has read nothing before the leader changes: the new leader has every record that the task reads."""
    source.carry(source.take(), 8)
    position, at = source.take(), source.kafka.partition(TOPIC)
    claim = Positions(source.pipelines, "").claim(KEY, position)
    with Carrier(source.pipelines, claim, held_position(source.pipelines, claim), unseen=unseen) as carrier:
        at.new_leader(5)
        source.put(20)
        record = at.records[8]
        carrier.reach(SeenRecord(8, record.key, record.value, record.timestamp_ms))
        with pytest.raises(PositionLost, match=rf"{TOPIC}-0 has lost its tail: records up to offset 8 \(leader epoch 0\) were read"):
            carrier.commit()
    assert source.stored() == position


def test_former_leader_that_another_client_asks_does_not_say_which_records_the_log_has(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.carry(source.take(), 8)
    position, at = source.stored(), source.kafka.partition(TOPIC)
    record, lineage = at.records[7], PartitionLineage(SETTINGS, TOPIC, 0)
    last = SeenRecord(7, record.key, record.value, record.timestamp_ms)
    at.new_leader()
    assert run_blocking(lineage.has(last, 1)) is True
    assert run_blocking(lineage.reached(8, 0, 1)) is True
    assert run_blocking(lineage.has(last._replace(value=b"other"), 1)) is False
    assert run_blocking(lineage.has(last._replace(offset=10), 1)) is False
    monkeypatch.setattr(TopicViewLog, "first_leader_epoch", lambda *_: 0)
    assert run_blocking(lineage.has(last, 1)) is None
    assert run_blocking(lineage.reached(8, 0, 1)) is None
    with pytest.raises(Unavailable, match="stale end offset"):
        lineage.check_tail(position, timeout_s=0.0)
    assert run_blocking(lineage.has(last, 0)) is True


def test_idle_position_does_not_advance_in_log_that_lost_its_tail(source: Source) -> None:
    source.carry(source.take(), 10)
    transaction = object()
    source.kafka.put(TOPIC, b"rolled back", transaction=transaction)
    source.kafka.partition(TOPIC).mark(transaction, committed=False)
    position = source.stored()
    positions = Positions(source.pipelines, "driver")
    claim = positions.claim(KEY, position)
    assert positions.pass_over({claim: None}) == [claim]
    assert source.stored().offset == 12
    source.kafka.partition(TOPIC).new_leader(6)
    source.put(9)
    assert positions.pass_over({claim: None}) == []
    assert source.stored().offset == 12


def test_end_that_a_former_leader_has_reported_is_not_passed_over(source: Source) -> None:
    """The new leader has lost the aborted records before this end, and has other records in their place."""
    source.carry(source.take(), 10)
    transaction = object()
    source.kafka.put(TOPIC, b"rolled back", transaction=transaction)
    source.kafka.partition(TOPIC).mark(transaction, committed=False)
    claim = Positions(source.pipelines, "").claim(KEY, source.stored())

    def carrier() -> Carrier:
        return Carrier(source.pipelines, claim, held_position(source.pipelines, claim))

    with carrier() as carrying:
        source.kafka.partition(TOPIC).new_leader(10)
        source.put(5)
        with pytest.raises(Unavailable, match="new leader"):
            carrying.pass_over(12)
    assert (source.stored().offset, source.stored().leader_epoch) == (10, 1)
    with carrier() as carrying:
        carrying.pass_over(15)
    assert source.stored().offset == 15


def test_position_without_leader_epoch_is_kept_when_topic_reaches_it(source: Source) -> None:
    lineage = PartitionLineage(SETTINGS, TOPIC, 0)
    assert lineage.check_tail(Position(TOPIC, "id", 0, 10)) == 0
    with pytest.raises(PositionLost):
        lineage.check_tail(Position(TOPIC, "id", 0, 11), timeout_s=0.0)


def record_at(source: Source, offset: int) -> KafkaRecord:
    found = source.kafka.partition(TOPIC).records[offset]
    return KafkaRecord(TOPIC, 0, offset, found.key, found.value, (), found.timestamp_ms)


def written(source: Source) -> list[str]:
    """Return the texts of the messages for the broker, without those of aborted transactions."""
    ingress = source.kafka.partition(source.pipelines.topics.ingress)
    values = [each.value or b"" for offset, each in ingress.records.items() if readable(ingress, offset, each, committed=True)]
    sends = [decode_send(value, start, end) for value in values for op, start, end in entries(value) if op == Op.SEND]
    return [str(decode_message(send.body).body) for send in sends]


def test_records_that_a_former_leader_returned_are_not_carried_once_the_position_names_the_new_leader(source: Source) -> None:
    """The last record of a transaction shows that the log has the records before it, and nothing about those behind it."""
    position = source.take()
    claim = Positions(source.pipelines, "").claim(KEY, position)
    read = [record_at(source, offset) for offset in range(10)]
    with Carrier(source.pipelines, claim, held_position(source.pipelines, claim)) as carrier:

        def carry_up_to(end: int) -> None:
            for record in read[carrier.position.offset : end]:
                carrier.reach(SeenRecord(record.offset, record.key, record.value, record.timestamp_ms))
            carrier.commit()

        carry_up_to(3)
        source.kafka.partition(TOPIC).new_leader(6)
        source.put(20)
        carry_up_to(5)
        with pytest.raises(NewLeader, match=f"{TOPIC}-0 has a new leader, so it must be read again"):
            carry_up_to(10)
    assert (source.stored().offset, source.stored().leader_epoch) == (5, 1)


@pytest.mark.parametrize("old", [False, True], ids=["known epoch", "position without epoch"])
def test_task_reads_again_what_a_former_leader_returned_and_carries_what_the_new_leader_has(source: Source, *, old: bool) -> None:
    position = source.take()
    if old:  # of an earlier release, or of a restored backup
        Positions(source.pipelines, "driver").move(KEY, position, position := replace(position, leader_epoch=UNKNOWN_EPOCH), {})
    claim = Positions(source.pipelines, "").claim(KEY, position)
    starts: list[SourceStart] = []

    def taken(start: int) -> Iterator[Taken]:
        read = [record_at(source, offset) for offset in range(start, source.kafka.partition(TOPIC).end)]
        for number, end in enumerate((3, 5, len(read))):
            if number == 1 and len(starts) == 1:
                source.kafka.partition(TOPIC).new_leader(6)
                source.put(20)
            yield Taken([record for record in read[:end] if record.offset >= start + (0, 3, 5)[number]], [(TOPIC, 0)])

    def opened(start: Mapping[Place, SourceStart], _gather: Gather) -> AbstractContextManager[Iterator[Taken]]:
        starts.append(start[TOPIC, 0])
        return nullcontext(taken(start[TOPIC, 0].offset))

    IngressTask(source.pipelines, (claim,), IngressSpec("in", "queue", (TOPIC,), body="text")).run(opened)
    assert starts == [SourceStart(0, position.topic_id, 0), SourceStart(5, position.topic_id, 1)]
    assert (source.stored().offset, source.stored().leader_epoch) == (26, 1)
    assert written(source) == [str(number) for number in (*range(6), *range(20))]
