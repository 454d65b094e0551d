"""Tasks as Spark's workers run them, on the mock cluster: their output, their positions, and the sizes of their transactions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import KafkaError, Message

from bascule.core.errors import BadRecord, Denied, TopicMissing
from bascule.core.kafka_records import KafkaRecord, Output, Place, Taken
from bascule.jms.record_headers import ORIGIN_HEADER
from bascule.journal.records import Kind, Op, decode_send, entries
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory
from bascule.pipelines import carry
from bascule.pipelines.carry import Carrier, NewLeader, Targets, held_position
from bascule.pipelines.divert import journal_header
from bascule.pipelines.spec import EARLIEST, DivertSpec, IngressSpec, PipelinesSpec, StartPosition, TransactionLimits
from bascule.pipelines.tasks import DATA_KEY, DivertTask, IngressTask, KnownDiverts, OpenSource, RowsTask, UnknownDivert
from bascule.writer.claims import Claim
from bascule.writer.lineage import SeenRecord
from bascule.writer.position import COMMON, Position, PositionLost, PositionTaken, position_key
from tests.scenarios.sparkless import Bridge, Rows, workers_end
from tests.support.mock_cluster import MockCluster
from tests.unit.pipelines.test_carry import Lineage

INGRESS = IngressSpec("in", "queue", ("a", "b"), body="text")


def record(topic: str, partition: int, offset: int, value: str, *headers: tuple[str, bytes]) -> KafkaRecord:
    return KafkaRecord(topic, partition, offset, None, value.encode(), headers, 7)


def opened(*records: KafkaRecord, ends: Mapping[Place, int] | None = None) -> OpenSource:
    """Records in two parts, and then ends of partitions. A transaction ends with the second part."""
    half = len(records) // 2
    tails = {(each.topic, each.partition) for each in records}
    return lambda *_: nullcontext([Taken(records[:half]), Taken(records[half:], tails), Taken([], (), ends or {})])


class Worker:
    """The process of a worker, and an ingress whose source partitions a driver has claimed at offset 2."""

    def __init__(self, bridge: Bridge, kafka: MockCluster) -> None:
        self.pipelines = replace(bridge.pipelines, target_partitions=1)
        self.bridge, self.positions = bridge, bridge.positions
        self.positions.prepare_topics()
        self.claims: dict[tuple[str, int], Claim] = {}
        for topic in ("a", "b"):
            kafka.create(topic, 2)
        for source in (("a", 0), ("a", 1), ("b", 0)):
            key = position_key("ingress:in", *source)
            position = Position(source[0], "id", source[1], 2, owner="me")
            self.put(key, position)
            self.claims[source] = self.positions.claim(key, position)

    def put(self, key: str, position: Position | None) -> None:
        writer = self.positions.writer(key)
        writer.write([], writer.current(), position)
        writer.close()

    def run(self, *records: KafkaRecord, ends: Mapping[Place, int] | None = None, **more: Any) -> None:
        IngressTask(replace(self.pipelines, **more), tuple(self.claims.values()), INGRESS).run(opened(*records, ends=ends))

    def written(self) -> list[tuple[str, str]]:
        """Return the source and the body of each message for the broker."""
        found = []
        for message in self.records(self.pipelines.topics.ingress):
            value = bytes(message.value() or b"")
            assert dict(message.headers() or ()) == {"unbound": INGRESS.unbound.encode()}
            for op, start, end in entries(value):
                assert op == Op.SEND
                send = decode_send(value, start, end)
                at: Any = send.source
                found.append((f"{at.topic}-{at.partition}-{at.offset}", send.address))
        return found

    def records(self, topic: str) -> list[Message]:
        history = TopicHistory(self.pipelines.kafka, topic, 0)
        return list(history.records(0, history.latest()))

    def offsets(self) -> dict[tuple[str, int], int]:
        stored = self.positions.stored()
        return {source: stored[claim.key].offset for source, claim in self.claims.items()}


@pytest.fixture
def worker(bridge: Bridge, kafka: MockCluster) -> Iterator[Worker]:
    yield Worker(bridge, kafka)
    workers_end()


def test_each_source_partition_of_task_is_carried_from_its_own_position(worker: Worker) -> None:
    worker.run(
        record("a", 0, 0, "0"), record("a", 0, 1, "1"), record("a", 0, 2, "2"), record("b", 0, 2, "3"), record("a", 0, 3, "4"),
        record("b", 0, 7, "5"), record("a", 1, 5, "6"),
    )  # fmt: skip
    assert sorted(source for source, _ in worker.written()) == ["a-0-2", "a-0-3", "a-1-5", "b-0-2", "b-0-7"]
    assert worker.offsets() == {("a", 0): 4, ("a", 1): 6, ("b", 0): 8}


def test_records_read_twice_are_written_once(worker: Worker) -> None:
    rows = [record("a", 0, offset, str(offset)) for offset in (2, 3)]
    worker.run(*rows)
    worker.run(*rows)
    assert [source for source, _ in worker.written()] == ["a-0-2", "a-0-3"]


def test_records_of_same_bridge_are_skipped_and_position_advances(worker: Worker) -> None:
    own = (ORIGIN_HEADER, worker.pipelines.bridge_id.encode())
    worker.run(record("a", 0, 2, "own", own), record("a", 0, 3, "own", own))
    assert worker.written() == []
    assert worker.offsets()[("a", 0)] == 4


def test_invalid_ingress_record_is_dead_lettered_or_stops_task(worker: Worker) -> None:
    ingress = replace(INGRESS, body="map")
    source = opened(record("a", 0, 2, "no map"))
    stopping = IngressTask(replace(worker.pipelines, stop_on_error=True), tuple(worker.claims.values()), ingress)
    with pytest.raises(BadRecord):
        stopping.run(source)
    assert worker.offsets()[("a", 0)] == 2
    IngressTask(worker.pipelines, tuple(worker.claims.values()), ingress).run(source)
    (letter,) = worker.records(worker.pipelines.topics.dead_letters)
    headers: dict[str, Any] = dict(letter.headers() or ())
    assert letter.value() == b"no map"
    assert {name.removeprefix("__connect.errors."): value for name, value in headers.items()}.items() >= {
        "topic": b"a", "partition": b"0", "offset": b"2", "connector.name": b"in", "stage": b"VALUE_CONVERTER",
    }.items()  # fmt: skip
    assert worker.offsets()[("a", 0)] == 3


def test_task_writes_nothing_when_position_is_held_by_other_driver_or_missing(worker: Worker) -> None:
    claim = worker.claims["a", 0]
    worker.put(claim.key, Position("a", "id", 0, 2, owner="another"))
    with pytest.raises(PositionTaken):
        worker.run(record("a", 0, 2, "2"))
    worker.put(claim.key, None)
    with pytest.raises(PositionLost):
        worker.run(record("a", 0, 2, "2"))
    assert worker.written() == []


def test_idle_source_partition_is_passed_over_to_its_end(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "lineage_of", lambda *_: Lineage())
    worker.run(record("a", 0, 2, "2"), ends={("a", 0): 5, ("b", 0): 9})
    assert worker.offsets() == {("a", 0): 5, ("a", 1): 2, ("b", 0): 9}


def test_transaction_ends_with_record_that_reaches_limit(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[int, int]] = []
    write = carry.TransactionalWriter.write

    def note_write(self: Any, outputs: Sequence[Output], before: Position, after: Position, *more: Any, **named: Any) -> None:
        written.append((len(outputs), after.offset))
        write(self, outputs, before, after, *more, **named)

    monkeypatch.setattr(carry.TransactionalWriter, "write", note_write)
    rows = [record("a", 0, offset, "x" * 100) for offset in range(2, 9)]
    worker.run(*rows, limits=TransactionLimits(records=3))
    assert written == [(3, 5), (3, 8), (1, 9)]
    written.clear()
    worker.run(*(record("b", 0, offset, "") for offset in range(2, 5)), limits=TransactionLimits(age_s=0.0))
    assert written == [(1, 3), (1, 4), (1, 5)]


def test_outputs_are_produced_in_advance_while_transaction_fills(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead: list[tuple[int, int]] = []
    hand = carry.TransactionalWriter.ahead

    def note_ahead(self: Any, outputs: Sequence[Output], before: Position) -> None:
        ahead.append((len(outputs), before.offset))
        hand(self, outputs, before)

    monkeypatch.setattr(carry, "_AHEAD_RECORDS", 2)
    monkeypatch.setattr(carry.TransactionalWriter, "ahead", note_ahead)
    worker.run(*(record("a", 0, offset, "") for offset in range(2, 9)), limits=TransactionLimits(records=6))
    assert ahead == [(2, 2), (4, 2)], "the last records are handed over with the position, while the leader of the source is asked"
    assert len(worker.written()) == 7
    assert worker.offsets()[("a", 0)] == 9


def test_closed_carrier_discards_uncommitted_output(worker: Worker) -> None:
    claim = worker.claims["a", 0]
    with Carrier(worker.pipelines, claim, held_position(worker.pipelines, claim)) as carrier:
        carrier.add(Output("b", None, b"", []), lambda error: pytest.fail(str(error)))
        carrier.commit()
        assert carrier.written == 0, "the source record is incomplete"
    assert worker.offsets()[("a", 0)] == 2


def test_target_topic_is_created_once_and_checked_again_on_request(kafka: MockCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(Topics, "check_writable", lambda _, topic: asked.append(topic))
    targets = Targets(PipelinesSpec("b", kafka.kafka, target_partitions=3))
    targets.ensure("new")
    targets.ensure("new")
    assert Topics(kafka.kafka).partitions()["new"] == 3
    assert asked == ["new"]
    targets.look_again()
    targets.ensure("new")
    assert asked == ["new", "new"]


def test_missing_target_topic_stops_pipeline_and_invalid_topic_name_is_bad_record(
    kafka: MockCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TopicMissing, match=r"pipelines\.target_partitions = 0"):
        Targets(PipelinesSpec("b", kafka.kafka, target_partitions=0)).ensure("missing")

    def refuses(*_: Any, **__: Any) -> bool:
        raise carry.InvalidInput("topic 'a/b' cannot be created: invalid name")

    monkeypatch.setattr(Topics, "create", refuses)
    targets = Targets(PipelinesSpec("b", kafka.kafka))
    for _ in range(2):
        with pytest.raises(BadRecord, match="'a/b' cannot be created"):
            targets.ensure("a/b")


@pytest.fixture
def nothing_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write no record before its transaction is complete: the mock cluster shows records of aborted transactions."""
    monkeypatch.setattr(carry.TransactionalWriter, "ahead", lambda *_: None)


@pytest.mark.usefixtures("nothing_ahead")
def test_output_to_topic_denied_later_goes_to_fallback(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    claim, denied = worker.claims["a", 0], list[str]()

    def check(_: Topics, topic: str) -> None:
        if topic in denied:
            raise Denied(topic, "may not be written")

    monkeypatch.setattr(Topics, "check_writable", check)
    write = carry.TransactionalWriter.write

    def note_write(self: Any, outputs: Sequence[Output], *more: Any, **named: Any) -> None:
        if any(output.topic in denied for output in outputs):
            self.abandon()
            raise carry.WriteDenied("a topic")
        write(self, outputs, *more, **named)

    monkeypatch.setattr(carry.TransactionalWriter, "write", note_write)
    with Carrier(worker.pipelines, claim, held_position(worker.pipelines, claim)) as carrier:
        for topic in ("open", "closed"):
            carrier.add(Output(topic, None, topic.encode(), []), lambda error: Output("dead", None, str(error).encode(), []))
        denied.append("closed")
        carrier.reach(SeenRecord(2, None, b""))
        carrier.commit()
    assert [record.value() for record in worker.records("open")] == [b"open"]
    assert b"may not be written" in bytes(worker.records("dead")[0].value() or b"")
    assert worker.offsets()[("a", 0)] == 3


@pytest.mark.usefixtures("nothing_ahead")
def test_divert_record_refused_by_kafka_is_dead_letter_of_this_divert(bridge: Bridge, monkeypatch: pytest.MonkeyPatch) -> None:
    write = carry.TransactionalWriter.write
    target = f"{bridge.pipelines.topics.prefix}.x"

    def note_write(self: Any, outputs: Sequence[Output], *more: Any, **named: Any) -> None:
        if faults := {place: KafkaError(KafkaError.INVALID_RECORD) for place, output in enumerate(outputs) if output.topic == target}:
            self.abandon()
            raise carry.Unwritable(faults)
        write(self, outputs, *more, **named)

    monkeypatch.setattr(carry.TransactionalWriter, "write", note_write)
    bridge.journal.start_epoch()
    bridge.send("1")
    with bridge.running(bridge.divert("x", start=StartPosition(EARLIEST)), bridge.divert("y", start=StartPosition(EARLIEST))) as running:
        running.settle()
    assert (bridge.carried("x"), bridge.carried("y"), bridge.dead()) == ([], ["1"], ["x: 1"])
    headers: dict[str, Any] = dict(bridge.records("dead")[0].headers() or ())
    assert headers["__connect.errors.stage"] == b"KAFKA_PRODUCE"


def test_divert_task_continues_at_its_position_for_any_batch_start(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    bridge.send("1", "2", "3")
    divert = bridge.divert("x", start=StartPosition(EARLIEST))
    with bridge.running(divert) as running:
        running.batch(end=3)
        (task,) = running.query(COMMON).shipped.tasks
        history = TopicHistory(bridge.pipelines.kafka, bridge.pipelines.topics.journal, 0)
        rows = [{"offset": each.offset(), "key": each.key(), "value": each.value()} for each in history.records(0, 4)]
        (report,) = task(iter([pa.RecordBatch.from_pylist(rows)]))
        assert report.to_pydict() == {"records": [4], "written": [1]}
        stored = bridge.stored()[bridge.positions.common_key]
        assert (stored.offset, stored.epoch, stored.sequence) == (4, 0, 3)
        assert list(task(iter([pa.RecordBatch.from_pylist(rows[:2])])))
        assert bridge.stored()[bridge.positions.common_key] == stored, "a batch from before moves nothing back"
    assert bridge.carried("x") == ["1", "2", "3"]


@pytest.mark.parametrize(("name", "epoch", "covers"), [("separate", 9, False), ("gone", 0, True), ("gone", 9, True), ("other", 4, True)])
def test_common_position_covers_removed_diverts_and_diverts_of_earlier_epochs(name: str, epoch: int, covers: bool) -> None:
    assert KnownDiverts(frozenset({"separate"}), frozenset({"gone"}), 5).covers(name, epoch) is covers


@pytest.mark.parametrize("epoch", [5, 6])
def test_unknown_exclusive_divert_stops_task(epoch: int) -> None:
    with pytest.raises(UnknownDivert, match="exclusive divert 'other' of the broker is not configured in these pipelines"):
        KnownDiverts(frozenset({"separate"}), frozenset({"gone"}), 5).covers("other", epoch)


def test_separate_divert_covers_only_itself() -> None:
    claim = Claim("divert:x/journal/0", "journal", "id", 0, "me", ("x",))
    task = DivertTask(PipelinesSpec("bridge", {}), claim, (DivertSpec("x", "#"),))
    assert (task._answers("x", 99), task._answers("y", 0)) == (True, False)


def test_transformation_receives_only_messages_of_data_records(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    bridge.send("1")
    bridge.journal.acknowledge()
    bridge.journal.flush()
    history = TopicHistory(bridge.pipelines.kafka, bridge.pipelines.topics.journal, 0)
    rows = [{"offset": each.offset(), "key": each.key(), "value": each.value()} for each in history.records(0, 3)]
    assert [journal_header(row["key"], row["value"]).kind for row in rows] == [Kind.EPOCH, Kind.DATA, Kind.STATE]
    rows.append({"offset": 3, "key": DATA_KEY, "value": b"foreign"})
    given = RowsTask(DivertSpec("x", "#"))(iter([pa.RecordBatch.from_pylist(rows)]))
    assert [row["text"] for batch in given for row in batch.to_pylist()] == ["1"]


def test_batch_that_spark_may_have_read_from_a_former_leader_is_refused(bridge: Bridge) -> None:
    bridge.journal.start_epoch()
    bridge.send("1")
    bridge.positions.prepare_topics()
    key, topic = bridge.positions.common_key, bridge.pipelines.topics.journal
    position = Position(topic, bridge.topics.id(topic), 0, 0, epoch=-1, sequence=0, members=("x",), owner="me", leader_epoch=4)
    with closing(bridge.positions.writer(key)) as writer:
        writer.write([], writer.current(), position)
    task = DivertTask(bridge.pipelines, bridge.positions.claim(key, position), (bridge.divert("x"),), leader_epoch=3)
    with pytest.raises(NewLeader, match="has a new leader, so the query must read the records again"):
        Rows(bridge.pipelines, 0).run(task, 2)
    assert bridge.stored()[key] == position
    workers_end()
