"""Backups of topics with records of other programs, and of a journal that changes while it is copied."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError

from bascule.backup import taking
from bascule.core.errors import Unavailable
from bascule.core.topics import XA_PREFIX
from bascule.kafka.history import TopicHistory
from bascule.kafka.snapshots import JOURNAL_KEY, SnapshotStore
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.support.kafka_in_memory.state import Stored
from tests.unit.backup.installation import TOPICS, back_up, restored, small_installation
from tests.unit.backup.test_backup_and_restore import busy, serving
from tests.unit.server.broker_process import called, kafka
from tests.unit.server.served import run_async

__all__ = ["kafka"]


class Unreadable:
    """A message with a header whose name is not UTF-8, for which librdkafka's client raises."""

    def headers(self) -> list[tuple[str, bytes]]:
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    def timestamp(self) -> tuple[int, int]:
        return 1, 5

    def __getattr__(self, name: str) -> Any:
        return lambda: {"topic": "t", "partition": 0, "offset": 3, "key": b"k", "value": b"v"}[name]


def test_record_with_unreadable_headers_is_copied_without_them() -> None:
    copied = taking._copied(cast("Any", Unreadable()))
    assert (copied.offset, copied.timestamp_ms, copied.key, copied.value, copied.headers) == (3, 5, b"k", b"v", ())


def test_foreign_records_among_the_snapshots_do_not_prevent_a_backup(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_installation(kafka)
    kafka.create(TOPICS.snapshots, cleanup_policy="compact")
    kafka.put(TOPICS.snapshots, b"id", JOURNAL_KEY)
    for key in (b"x/head", b"\xff/head", b"/", b"x"):
        kafka.put(TOPICS.snapshots, b"junk", key)
    back_up(tmp_path / "backup")
    new = KafkaInMemory(monkeypatch)
    restored(tmp_path / "backup")
    assert SnapshotStore(SETTINGS, TOPICS.snapshots).journal_id("new") == new.topics[TOPICS.journal].id


@run_async
async def test_journal_that_is_trimmed_before_it_is_read_is_copied_again(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(kafka, tmp_path / "old", journal={"snapshot_records": 100}) as broker:
        await busy(broker)
    journal = kafka.partition(TOPICS.journal)
    trimmed = journal.first
    journal.first -= 1  # the broker has not yet trimmed what its snapshot covers
    journal.records[journal.first] = Stored(None, b"foreign", None, 0)
    found = TopicHistory.records

    def records(history: Any, start: int, end: int, **options: bool) -> Any:
        if history._at.topic == TOPICS.journal and start < trimmed:
            journal.delete(trimmed)
        return found(history, start, end, **options)

    monkeypatch.setattr(TopicHistory, "records", records)
    manifest = await called(back_up, tmp_path / "backup")
    copy = manifest.copy_of(TOPICS.journal)
    assert copy is not None
    assert copy.parts[0].first == trimmed


def test_topic_that_is_trimmed_before_it_is_read_is_copied_again(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_installation(kafka)
    ingress, found = kafka.partition(TOPICS.ingress), TopicHistory.records

    def records(history: Any, start: int, end: int, **options: bool) -> Any:
        if history._at.topic == TOPICS.ingress:
            ingress.delete(1)  # the broker has journaled the first message
        return found(history, start, end, **options)

    monkeypatch.setattr(TopicHistory, "records", records)
    copy = back_up(tmp_path / "backup").copy_of(TOPICS.ingress)
    assert copy is not None
    assert (copy.parts[0].first, copy.parts[0].records) == (1, 1)


def test_journal_that_cannot_be_read_ends_the_backup(kafka: KafkaInMemory, tmp_path: Path) -> None:
    small_installation(kafka)

    def fail(topic: str, _: int) -> None:
        if topic == TOPICS.ingress:
            kafka.fail("fetch", KafkaError._BAD_MSG)

    with pytest.raises(Unavailable, match="cannot be read"):
        back_up(tmp_path / "backup", fail)


def test_empty_records_between_others_have_the_times_of_their_neighbours(
    kafka: KafkaInMemory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_installation(kafka)
    side = kafka.create(f"{XA_PREFIX}.side", retention_ms="-1").partitions[0]
    for at in range(5):
        side.append(Stored(None, b"%d" % at, None, 1_000 * (at + 1)))
    del side.records[1], side.records[4]
    back_up(tmp_path / "backup")
    new = KafkaInMemory(monkeypatch)
    restored(tmp_path / "backup")
    found = [record.timestamp_ms for _, record in sorted(new.partition(f"{XA_PREFIX}.side").records.items())]
    assert found == [1_000, 3_000, 3_000, 4_000, 4_000]
