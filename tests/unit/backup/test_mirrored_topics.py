"""Copies of Bascule's topics with other offsets and ids, as MirrorMaker 2 makes them, are refused: docs/guides/disaster-recovery.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from bascule.backup.journal_scan import BackupScan
from bascule.journal.errors import DamagedRecord
from bascule.journal.fence import Fence
from bascule.journal.records import Kind, Op, decode_header, encode_record, json_entry
from bascule.kafka.lineage import PartitionLineage
from bascule.kafka.snapshots import JOURNAL_KEY, SnapshotStore
from bascule.pipelines.losses import loss_of
from bascule.writer.position import Position
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]

PAGE = Path(__file__).parents[3] / "docs" / "guides" / "disaster-recovery.md"
FIRST = 100


def journal() -> list[tuple[int, bytes]]:
    """Return a journal that was trimmed up to the start of its epoch."""
    start = encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {"exclusive": []}))
    records = [encode_record(Kind.STATE, FIRST, sequence, json_entry(Op.SNAPSHOT, {"id": "none"})) for sequence in (41, 42, 43)]
    return list(enumerate([start, *records], FIRST))


def test_journal_with_shifted_offsets_is_refused() -> None:
    fence, shifted = Fence(sequence=-1), Fence(sequence=-1)
    headers = [(offset, decode_header(value)) for offset, value in journal()]
    assert all(fence.admits(*record) for record in headers)
    assert shifted.admits(0, headers[0][1])
    with pytest.raises(DamagedRecord, match="whose start is missing") as refused:
        shifted.admits(1, headers[1][1])
    assert "whose start is missing" in PAGE.read_text()
    assert f"epoch {FIRST}" in str(refused.value)


def test_scan_of_a_journal_finds_its_fence_and_the_next_offset_of_the_ingress() -> None:
    scan = BackupScan(FIRST, 0)
    for offset, value in journal():
        scan.take(offset, value)
    scan.take(FIRST + 4, b"of another program")
    entry = json_entry(Op.INGRESS_TOPIC, {"id": "i", "positions": [(0, 7)]})
    scan.take(FIRST + 5, encode_record(Kind.STATE, FIRST, 44, entry))
    scan.take(
        FIRST + 6, encode_record(Kind.STATE, FIRST - 1, 45, json_entry(Op.INGRESS_TOPIC, {"id": "of a fenced broker", "positions": []}))
    )
    assert scan.fence(None) == (FIRST, 44)
    assert scan.ingress(None) == ("i", 7)


def test_records_of_a_dead_broker_before_the_first_record_of_the_epoch_do_not_count() -> None:
    scan = BackupScan(FIRST, 0)
    for at, (epoch, sequence) in enumerate([(10, 5), (50, 4), (50, 5), (10, 6), (50, 6)]):
        scan.take(FIRST + at, encode_record(Kind.STATE, epoch, sequence, json_entry(Op.SNAPSHOT, {"id": "none"})))
    assert scan.fence(None) == (50, 6)


def test_sequences_of_a_dead_broker_do_not_count_before_the_first_start_of_an_epoch() -> None:
    for stray in (2, 42):
        scan = BackupScan(FIRST, 0)
        state = json_entry(Op.SNAPSHOT, {"id": "none"})
        scan.take(FIRST, encode_record(Kind.STATE, 10, stray, state))
        scan.take(FIRST + 1, encode_record(Kind.EPOCH, 0, 0, json_entry(Op.EPOCH, {})))
        for sequence in (41, 42, 43):
            scan.take(FIRST + sequence, encode_record(Kind.STATE, FIRST + 1, sequence, state))
        assert scan.fence(None) == (FIRST + 1, 43)


def test_id_with_the_snapshots_shows_that_the_journal_is_another_topic(kafka: KafkaInMemory) -> None:
    kafka.create("t.snapshots", cleanup_policy="compact")
    kafka.put("t.snapshots", b"id of the lost journal", JOURNAL_KEY)
    assert SnapshotStore(SETTINGS, "t.snapshots").journal_id("id of the copy") == "id of the lost journal"


def test_position_in_a_copied_topic_is_refused(kafka: KafkaInMemory) -> None:
    copied = kafka.create("t.journal")
    position = Position("t.journal", "id of the lost journal", 0, 0, members=("out",))
    lost = loss_of("diverts", position, copied.id, 0, PartitionLineage(SETTINGS, "t.journal", 0))
    assert "was recreated since pipeline 'diverts' last ran" in str(lost)
    assert "was recreated since pipeline ... last ran" in PAGE.read_text()
