"""A restore that is interrupted, or that cannot write: nothing starts on its topics, and it can be repeated."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from bascule.backup.copies import CopiedRecord, InvalidBackup, Manifest, RecordFileWriter
from bascule.backup.restoring import Restore
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.topics import DECISIONS
from bascule.journal.errors import NewerRecord
from bascule.journal.records import Kind, Op, encode_record, entries
from bascule.kafka import own_topics
from bascule.kafka.admin import Topics
from bascule.kafka.guards import TopicRole, UnsafeTopic, findings, guard
from bascule.kafka.restore_mark import SETTING, WRITING, is_marked
from bascule.kafka.rewriting import fill
from bascule.writer.position import POSITION_PARTITIONS, Position, PositionLost, position_key, position_partition
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.unit.backup.installation import AUDIT, BRIDGE, TOPICS, back_up, restored, small_installation
from tests.unit.server.broker_process import kafka

__all__ = ["kafka"]

#: The restored topics of the small installation. The mark of the ingress is set twice, when all is written and at the end.
CREATED = (TOPICS.journal, TOPICS.ingress, DECISIONS, AUDIT)


@pytest.fixture
def saved(kafka: KafkaInMemory, tmp_path: Path) -> Path:
    small_installation(kafka)
    back_up(tmp_path / "backup", lambda *_: None, AUDIT)
    return tmp_path / "backup"


@pytest.fixture
def new(saved: Path, monkeypatch: pytest.MonkeyPatch) -> KafkaInMemory:
    return KafkaInMemory(monkeypatch)


def die_at_setting(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the process die before it changes the settings of a topic for the n-th time."""
    change, left = Topics.set, [number]

    def changed(topics: Topics, topic: str, settings: dict[str, str | None]) -> None:
        if not left[0]:
            monkeypatch.setattr(Topics, "set", change)
            raise Unavailable("died")
        left[0] -= 1
        change(topics, topic, settings)

    monkeypatch.setattr(Topics, "set", changed)


def check_complete(new: KafkaInMemory) -> None:
    assert not [name for name in new.topics if is_marked(new.topics[name].config)]
    assert {name: new.topics[name].config[SETTING] for name in (TOPICS.journal, TOPICS.ingress, AUDIT)} == {
        TOPICS.journal: "-1", TOPICS.ingress: "-1", AUDIT: "1000",
    }  # fmt: skip
    assert (new.partition(TOPICS.journal).end, new.values(TOPICS.ingress)) == (3, [b"waits"])
    assert (new.values(DECISIONS), new.values(AUDIT)) == ([b"commit"], [b"line"])


@pytest.mark.parametrize("step", range(len(CREATED) + 1))
def test_restore_that_is_interrupted_at_its_end_is_refused_by_a_start_and_completed(
    new: KafkaInMemory, saved: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    die_at_setting(step, monkeypatch)
    with pytest.raises(Unavailable, match="died"):
        restored(saved)
    ids = {name: new.topics[name].id for name in CREATED}
    with pytest.raises(UnsafeTopic, match=rf"'{TOPICS.ingress}' .* repeat `bascule restore`"):
        guard(Topics(SETTINGS), {TOPICS.ingress: (TopicRole.LOG, 1)})
    restored(saved)
    check_complete(new)
    # Topics without a mark may be used by other programs already: once all records are written, a repeated restore deletes nothing.
    assert step == 0 or ids == {name: new.topics[name].id for name in CREATED}


def test_another_restore_does_not_complete_the_interrupted_one(new: KafkaInMemory, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    die_at_setting(3, monkeypatch)  # the audit and the decisions have their settings
    with pytest.raises(Unavailable, match="died"):
        restored(saved)
    with pytest.raises(InvalidInput, match=rf"Kafka has {AUDIT}, {DECISIONS}\. .* interrupted here.* delete these topics"):
        restored(saved, adopt_sources=True)
    Topics(SETTINGS).delete([AUDIT, DECISIONS])
    restored(saved, adopt_sources=True)
    check_complete(new)


def test_no_topic_of_bascule_is_usable_until_the_restore_is_complete(
    new: KafkaInMemory, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    die_at_setting(0, monkeypatch)
    with pytest.raises(Unavailable, match="died"):
        restored(saved)
    assert {name: new.topics[name].config[SETTING] for name in new.topics} == dict.fromkeys(CREATED, WRITING)
    for name, facts in Topics(SETTINGS).facts(CREATED).items():
        for role in TopicRole:
            (found,) = findings(name, role, facts, None)
            assert found.breaks
            assert "set -1" not in str(found)
    with pytest.raises(InvalidInput, match="repeat `bascule restore`"):
        back_up(saved.parent / "incomplete")
    # A transaction manager would take missing decisions for rollbacks.
    with pytest.raises(UnsafeTopic, match=DECISIONS):
        own_topics.ensure(SETTINGS, {DECISIONS: own_topics.DECISIONS})


def test_topic_that_somebody_keeps_for_ever_has_no_mark() -> None:
    for value in ("-1", "604800000", str((1 << 63) - 1), str((1 << 62) - 1), ""):
        assert not is_marked({SETTING: value})
    assert not is_marked({})


def test_record_that_the_client_refuses_ends_the_restore_which_can_be_repeated(new: KafkaInMemory, saved: Path) -> None:
    def refuse(*_: object) -> None:
        if restore.begun:
            new.fail("produce", KafkaError.MSG_SIZE_TOO_LARGE)

    restore = Restore(SETTINGS, TOPICS, BRIDGE, saved, progress=refuse)
    with pytest.raises(Unavailable, match="could not be restored"):
        restore.run()
    assert restore.begun
    new.faults.clear()
    restored(saved)
    check_complete(new)


def test_client_that_cannot_connect_is_reported(new: KafkaInMemory) -> None:
    new.create("t")
    new.fail("list_topics", KafkaError._TRANSPORT)
    with pytest.raises(Unavailable, match=r"'t' could not be restored"):
        fill(SETTINGS, "t", 0, 1, lambda _: None)


def test_client_that_refuses_empty_records_is_reported(new: KafkaInMemory) -> None:
    new.create("t")
    new.fail("produce", KafkaError._FATAL)
    with pytest.raises(Unavailable, match=r"'t' could not be restored"):
        fill(SETTINGS, "t", 0, 1, lambda _: None)


def rewritten(saved: Path, topic: str, partition: int, record: CopiedRecord) -> None:
    """Replace the copy of a partition, as if the backup were of another version of Bascule."""
    manifest = Manifest.load(saved)
    copies = list(manifest.topics)
    at, copy = next((at, copy) for at, copy in enumerate(copies) if copy.name == topic)
    with RecordFileWriter(saved, copy.parts[partition].file) as file:
        file.write(record)
        part = file.copied(partition, record.offset, record.offset + 1)
    copies[at] = replace(copy, parts=(*copy.parts[:partition], part, *copy.parts[partition + 1 :]))
    replace(manifest, topics=tuple(copies)).store(saved)


def test_journal_of_a_newer_version_is_refused_before_anything_is_written(new: KafkaInMemory, saved: Path) -> None:
    newer = bytearray(encode_record(Kind.STATE, 0, 1))
    newer[2] = 200  # the version
    rewritten(saved, TOPICS.journal, 0, CopiedRecord(0, 0, b"S", bytes(newer)))
    with pytest.raises(NewerRecord, match="Upgrade Bascule"):
        restored(saved)
    assert not new.topics


def test_position_of_a_newer_version_is_refused_before_anything_is_written(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_installation(kafka)
    kafka.create(TOPICS.positions, POSITION_PARTITIONS, cleanup_policy="compact")
    key = position_key("ingress:in", "source", 0)
    number = position_partition(key)
    kafka.put(TOPICS.positions, Position("source", "id", 0, 5).encode(), key.encode(), partition=number)
    back_up(tmp_path / "backup")
    rewritten(tmp_path / "backup", TOPICS.positions, number, CopiedRecord(0, 0, key.encode(), b'{"version": 99}'))
    new = KafkaInMemory(monkeypatch)
    with pytest.raises(PositionLost, match="Upgrade Bascule"):
        restored(tmp_path / "backup")
    assert not new.topics


def test_file_with_settings_is_checked_too(new: KafkaInMemory, saved: Path) -> None:
    manifest = Manifest.load(saved)
    replace(manifest, files={"settings.json": "0"}).store(saved)
    with pytest.raises(InvalidBackup, match=r"settings\.json"):
        restored(saved)
    assert not new.topics


def test_broker_of_a_journal_without_the_id_of_the_ingress_topic_begins_at_its_start(new: KafkaInMemory, saved: Path) -> None:
    assert Manifest.load(saved).cut.ingress_topic_id == ""
    restored(saved)
    value = new.partition(TOPICS.journal).records[2].value or b""
    assert [op for op, _, _ in entries(value)] == [Op.INGRESS_TOPIC]
    assert new.values(TOPICS.ingress) == [b"waits"]
