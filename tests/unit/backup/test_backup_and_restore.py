"""A backup of a broker on Kafka in memory, restored into another Kafka in memory, by a broker process that then continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError

from bascule.backup.copies import InvalidBackup
from bascule.backup.place import new_backup
from bascule.backup.restoring import Restore
from bascule.backup.taking import Backup
from bascule.core.destination import Routing
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.topics import JournalTopics
from bascule.journal.records import Kind, Op, Send, SendFlag, decode_header, encode_record, entries, send_entry
from bascule.kafka.guards import UnsafeTopic
from bascule.kafka.restore_mark import SETTING as MARK
from bascule.kafka.restore_mark import WRITING
from bascule.testing.broker import message_bytes
from bascule.writer.position import (
    COMMON,
    INGRESS,
    MOVED,
    POSITION_PARTITIONS,
    UNKNOWN_EPOCH,
    MovedMark,
    Position,
    position_key,
    position_partition,
)
from bascule.writer.reading import BARRIER_KEY
from bascule.writer.redrive import POSITION_KEY
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.unit.backup.installation import BRIDGE, TOPICS, back_up, restored, small_installation
from tests.unit.server import broker_process
from tests.unit.server.broker_process import Broker, called, kafka, until
from tests.unit.server.served import run_async

__all__ = ["kafka"]

#: No epoch ends because a busy machine suspends the process.
CALM = {"session_timeout_s": 120}


def serving(kafka: KafkaInMemory, directory: Path, **sections: Any) -> AbstractAsyncContextManager[Broker]:
    return broker_process.serving(kafka, directory, broker=CALM, **sections)


def with_positions(kafka: KafkaInMemory, **positions: Position) -> None:
    """Store positions by pipeline."""
    if TOPICS.positions not in kafka.topics:
        kafka.create(TOPICS.positions, POSITION_PARTITIONS, cleanup_policy="compact")
    for pipeline, position in positions.items():
        key = position_key(pipeline, position.topic, position.partition)
        kafka.put(TOPICS.positions, position.encode(), key.encode(), partition=position_partition(key))


def position_in(kafka: KafkaInMemory, pipeline: str, topic: str) -> Position:
    key = position_key(pipeline, topic, 0)
    records = kafka.partition(TOPICS.positions, position_partition(key)).records
    return next(Position.decode(record.value or b"") for _, record in sorted(records.items(), reverse=True) if record.key == key.encode())


async def busy(broker: Broker) -> None:
    """Cause snapshots, and trim the journal."""
    for _ in range(4):
        await broker.send("busy", *map(str, range(20)))
        await broker.receive("busy", 20)
        await broker.epoch.housekeeping.rounds()
    await until(lambda: broker.kafka.partition(TOPICS.journal).first > 0, "the journal is trimmed")


def from_kafka(*bodies: str) -> list[bytes]:
    """Return records of the ingress topic."""
    found = []
    for body in bodies:
        send = Send(SendFlag.DURABLE, Routing.ANYCAST, 4, 0, 0, 0, "stock", (), (), (), None, message_bytes(body))
        found.append(encode_record(Kind.DATA, 0, 0, send_entry(send)))
    return found


def put_from_kafka(kafka: KafkaInMemory, *bodies: str) -> None:
    """Write messages as an ingress does: in a transaction, whose end takes an offset."""
    transaction = object()
    for record in from_kafka(*bodies):
        kafka.put(TOPICS.ingress, record, transaction=transaction)
    kafka.partition(TOPICS.ingress).mark(transaction, committed=True)


@run_async
async def test_broker_continues_after_restore_of_a_backup_that_was_made_while_it_served(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(kafka, tmp_path / "old", journal={"snapshot_records": 100}) as broker:
        await broker.send("old", "waits since the first snapshot")
        await broker.send("stock", "stock 0")
        put_from_kafka(kafka, "stock 1", "stock 2")
        await until(lambda: broker.epoch.engine.confirmed_ingress.get(0, 0) == 2, "the messages of the ingress are journaled")
        await busy(broker)
        await broker.send("orders", "1", "2", "3")
        assert await broker.receive("orders", 1) == ["1"]
        manifest = await called(back_up, tmp_path / "backup")
        assert manifest.cut.offset > manifest.topics[-1].parts[0].first > 0
        await broker.send("orders", "after the backup")
    first = kafka.partition(TOPICS.journal).first

    new = KafkaInMemory(monkeypatch)
    result = await called(restored, tmp_path / "backup")
    assert result.manifest == manifest
    journal = new.partition(TOPICS.journal)
    assert (journal.first, journal.end) == (manifest.topics[-1].parts[0].first, manifest.cut.offset + 1)
    assert journal.first <= first
    async with serving(new, tmp_path / "new", journal={"snapshot_records": 100}) as broker:
        put_from_kafka(new, "stock 3")
        assert await broker.receive("stock", 4) == ["stock 0", "stock 1", "stock 2", "stock 3"]
        assert await broker.receive("orders", 2) == ["2", "3"]
        await busy(broker)
        await broker.send("orders", "4")
    async with serving(new, tmp_path / "new") as broker:
        assert await broker.receive("old", 1) == ["waits since the first snapshot"]
        assert await broker.receive("orders", 1) == ["4"]


@run_async
async def test_messages_of_ingresses_that_are_not_journaled_are_restored_once(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(kafka, tmp_path / "old") as broker:
        await broker.send("stock", "stock 0")
        put_from_kafka(kafka, "stock 1")
        assert await broker.receive("stock", 2) == ["stock 0", "stock 1"]
    put_from_kafka(kafka, "stock 2", "stock 3")
    rolled_back = object()
    kafka.put(TOPICS.ingress, *from_kafka("rolled back"), transaction=rolled_back)
    kafka.partition(TOPICS.ingress).mark(rolled_back, committed=False)
    put_from_kafka(kafka, "stock 4")
    back_up(tmp_path / "backup")
    new = KafkaInMemory(monkeypatch)
    await called(restored, tmp_path / "backup")
    async with serving(new, tmp_path / "new") as broker:
        put_from_kafka(new, "stock 5")
        assert await broker.receive("stock", 4) == ["stock 2", "stock 3", "stock 4", "stock 5"]


@run_async
async def test_positions_refer_to_the_new_journal_and_to_adopted_topics(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(kafka, tmp_path / "old") as broker:
        await broker.send("orders", "1")
    journal_id, source_id = kafka.topics[TOPICS.journal].id, kafka.create("source").id
    divert = Position(TOPICS.journal, journal_id, 0, 2, epoch=0, sequence=1, members=("out",), owner="a", leader_epoch=7)
    ingress = Position("source", source_id, 0, 5, owner="a", leader_epoch=3)
    with_positions(kafka, **{COMMON: divert, f"{INGRESS}in": ingress})
    back_up(tmp_path / "backup")
    for adopts in (False, True):
        new = KafkaInMemory(monkeypatch)
        new.create("unrelated")
        new_source = new.create("source").id
        result = await called(lambda adopts=adopts: restored(tmp_path / "backup", adopt_sources=adopts))
        moved = replace(divert, topic_id=new.topics[TOPICS.journal].id, leader_epoch=UNKNOWN_EPOCH)
        assert position_in(new, COMMON, TOPICS.journal) == moved
        adopted = replace(ingress, topic_id=new_source, leader_epoch=UNKNOWN_EPOCH)
        assert position_in(new, f"{INGRESS}in", "source") == (adopted if adopts else ingress)
        assert result.recreated == (() if adopts else ("source",))


def test_mark_of_a_refused_request_to_move_positions_is_no_topic(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_installation(kafka)
    kafka.create(TOPICS.positions, POSITION_PARTITIONS, cleanup_policy="compact")
    key, mark = f"{MOVED}{INGRESS}in", MovedMark("request", 0, 3, "topic 'source' was deleted or recreated").position()
    kafka.put(TOPICS.positions, mark.encode(), key.encode(), partition=position_partition(key))
    back_up(tmp_path / "backup")
    new = KafkaInMemory(monkeypatch)
    assert restored(tmp_path / "backup", adopt_sources=True).recreated == ()
    assert new.values(TOPICS.positions, position_partition(key)) == [mark.encode()]


def test_position_of_redrives_does_not_refer_to_the_marks_that_a_backup_leaves_out(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_installation(kafka)
    kafka.create(TOPICS.positions, POSITION_PARTITIONS, cleanup_policy="compact")
    partition = position_partition(POSITION_KEY)
    position = Position(TOPICS.redrive, "id", 0, 7, owner="run")
    kafka.put(TOPICS.positions, position.encode(), POSITION_KEY.encode(), partition=partition)
    back_up(tmp_path / "backup")
    new = KafkaInMemory(monkeypatch)
    restored(tmp_path / "backup")
    assert new.values(TOPICS.positions, partition) == [replace(position, topic="", topic_id="").encode()]


@contextmanager
def interrupted() -> Iterator[Callable[[str, int], None]]:
    """Yield a function that ends a restore within the journal, as a crash does."""

    def end(topic: str, count: int) -> None:
        if topic == TOPICS.journal and count == 2:
            raise Unavailable("crash")

    with pytest.raises(Unavailable, match="crash"):
        yield end


@run_async
async def test_interrupted_restore_is_refused_by_a_broker_and_repeated(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(kafka, tmp_path / "old") as broker:
        await broker.send("orders", *map(str, range(10)))
    back_up(tmp_path / "backup")
    new = KafkaInMemory(monkeypatch)
    with interrupted() as progress:
        await called(Restore(SETTINGS, TOPICS, BRIDGE, tmp_path / "backup", progress=progress).run)
    with pytest.raises(UnsafeTopic, match="repeat `bascule restore`"):
        async with serving(new, tmp_path / "new"):
            pass
    await called(restored, tmp_path / "backup")
    assert new.topics[TOPICS.journal].config[MARK] == "-1"
    assert new.topics[TOPICS.snapshots].config[MARK] != WRITING
    async with serving(new, tmp_path / "new") as broker:
        assert await broker.receive("orders", 10) == list(map(str, range(10)))


@run_async
async def test_restore_deletes_no_topic_that_it_has_not_created(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(kafka, tmp_path / "old") as broker:
        await broker.send("orders", "1")
        kafka.create("bascule.xa.decisions", cleanup_policy="compact")
    back_up(tmp_path / "backup")
    with pytest.raises(InvalidInput, match="deletes none"):
        restored(tmp_path / "backup")
    new = KafkaInMemory(monkeypatch)
    with interrupted() as progress:
        await called(Restore(SETTINGS, TOPICS, BRIDGE, tmp_path / "backup", progress=progress).run)
    new.topics["bascule.xa.decisions"].config[MARK] = "604800000"  # another program has recreated the topic
    with pytest.raises(InvalidInput, match=r"Kafka has bascule\.xa\.decisions"):
        restored(tmp_path / "backup")
    assert TOPICS.journal in new.topics


@run_async
async def test_backup_fails_if_a_pipeline_writes_meanwhile(kafka: KafkaInMemory, tmp_path: Path) -> None:
    async with serving(kafka, tmp_path / "old") as broker:
        await broker.send("orders", "1")
    journal_id = kafka.topics[TOPICS.journal].id
    position = Position(TOPICS.journal, journal_id, 0, 1, members=("out",), owner="a")
    with_positions(kafka, **{COMMON: position})

    def move(topic: str, _: int) -> None:
        if topic == TOPICS.journal:
            with_positions(kafka, **{COMMON: replace(position, offset=2)})

    with pytest.raises(Unavailable, match=r"'test\.positions' has changed"):
        back_up(tmp_path / "backup", move)
    with pytest.raises(InvalidBackup, match="no complete backup"):
        restored(tmp_path / "backup")

    def read(topic: str, _: int) -> None:
        if topic == TOPICS.journal:
            kafka.put(TOPICS.positions, None, BARRIER_KEY, partition=3)

    back_up(tmp_path / "backup", read)  # replaces the incomplete backup


@run_async
async def test_backup_is_repeated_for_a_snapshot_that_was_written_meanwhile(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(kafka, tmp_path / "old", journal={"snapshot_records": 100}) as broker:
        await broker.send("old", "oldest")
        await busy(broker)
        later = {record.key: record.value for record in kafka.partition(TOPICS.snapshots).records.values()}
        rounds: list[str] = []

        def again(topic: str, _: int) -> None:
            if topic == TOPICS.store and len(rounds) < 3:
                rounds.append(topic)
                kafka.put(TOPICS.snapshots, later[b"journal"], b"journal")

        manifest = await called(back_up, tmp_path / "backup", again)
    copied = manifest.copy_of(TOPICS.snapshots)
    assert copied is not None
    assert copied.parts[0].end == kafka.partition(TOPICS.snapshots).end or len(rounds) == 3


@run_async
async def test_last_record_of_a_restored_journal_names_the_new_ingress_topic(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(kafka, tmp_path / "old") as broker:
        await broker.send("stock", "stock 0")
        put_from_kafka(kafka, "stock 1")
        assert await broker.receive("stock", 2) == ["stock 0", "stock 1"]
    manifest = back_up(tmp_path / "backup")
    new = KafkaInMemory(monkeypatch)
    await called(restored, tmp_path / "backup")
    value = new.partition(TOPICS.journal).records[manifest.cut.offset].value or b""
    header = decode_header(value)
    assert (header.epoch, header.sequence) == (manifest.cut.epoch, manifest.cut.sequence + 1)
    assert [op for op, _, _ in entries(value)] == [Op.INGRESS_TOPIC]
    assert new.topics[TOPICS.ingress].id.encode() in value


@run_async
async def test_damaged_file_is_refused_before_anything_is_written(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(kafka, tmp_path / "old") as broker:
        await broker.send("orders", "1")
    manifest = back_up(tmp_path / "backup")
    file = tmp_path / "backup" / manifest.topics[-1].parts[0].file
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    new = KafkaInMemory(monkeypatch)
    with pytest.raises(InvalidBackup, match="SHA-256"):
        restored(tmp_path / "backup")
    assert not new.topics
    file.unlink()
    with pytest.raises(InvalidBackup, match="No such file"):
        restored(tmp_path / "backup")


@run_async
async def test_restore_fails_if_kafka_refuses_a_record(kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(kafka, tmp_path / "old") as broker:
        await broker.send("orders", "1")
    back_up(tmp_path / "backup")
    new = KafkaInMemory(monkeypatch)
    new.fail("delivery", KafkaError.MSG_SIZE_TOO_LARGE)
    with pytest.raises(Unavailable, match="could not be restored"):
        await called(restored, tmp_path / "backup")
    assert new.topics[TOPICS.ingress].config[MARK] == WRITING


def test_backup_of_nothing_and_of_another_installation_is_refused(kafka: KafkaInMemory, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"no topic 'test\.journal'"):
        back_up(tmp_path / "backup")
    kafka.create(TOPICS.journal)
    with pytest.raises(InvalidInput, match="no topic 'audit'"), new_backup(tmp_path / "backup"):
        Backup(SETTINGS, TOPICS, BRIDGE, tmp_path / "backup", others=["audit"]).take()
    back_up(tmp_path / "backup")
    with pytest.raises(InvalidInput, match="use the configuration of the backup"):
        Restore(SETTINGS, JournalTopics("other"), BRIDGE, tmp_path / "backup").run()


def test_side_messages_keep_their_offsets_and_other_topics_their_order(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side, log = "bascule.xa.side", "bascule.xa.log"
    kafka.create(TOPICS.journal, retention_ms="-1")
    kafka.create(side, 2, retention_ms="-1")
    kafka.create(log, cleanup_policy="compact")
    kafka.create("audit")
    for number in range(8):
        kafka.put(side, b"%d" % number, partition=1, target=b"t")
        kafka.put(log, b"%d" % number, b"%d" % (number % 2))
        kafka.put("audit", b"%d" % number)
    kafka.partition(side, 1).delete(3)
    del kafka.partition(side, 1).records[5]
    kafka.partition(log).compact()
    with new_backup(tmp_path / "backup"):
        Backup(SETTINGS, TOPICS, BRIDGE, tmp_path / "backup", others=["audit"]).take().store(tmp_path / "backup")
    new = KafkaInMemory(monkeypatch)
    restored(tmp_path / "backup")
    partition = new.partition(side, 1)
    assert (partition.first, partition.end) == (3, 8)
    assert {offset: record.value for offset, record in partition.records.items()} == {3: b"3", 4: b"4", 5: None, 6: b"6", 7: b"7"}
    assert partition.records[3].headers == [("target", b"t")]
    assert partition.records[3].timestamp_ms == kafka.partition(side, 1).records[3].timestamp_ms
    assert new.values(log) == [b"6", b"7"]
    assert new.values("audit") == [b"%d" % number for number in range(8)]
    assert (new.topics[side].config[MARK], new.topics["audit"].config[MARK]) == ("-1", kafka.topics["audit"].config[MARK])
    with pytest.raises(InvalidInput, match="belongs to the journal"), new_backup(tmp_path / "other"):
        Backup(SETTINGS, TOPICS, BRIDGE, tmp_path / "other", others=[TOPICS.journal]).take()
