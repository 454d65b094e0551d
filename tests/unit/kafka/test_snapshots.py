"""The records that a snapshot needs in its topic, and those that may be deleted; with clients on Kafka in memory."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from bascule.broker.remembered_ids import Segment
from bascule.broker.snapshot import EncodedSnapshot
from bascule.core.errors import Unavailable
from bascule.kafka.snapshots import SnapshotKeys, SnapshotStore, joined
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]  # imported fixtures

A, B, C = (Segment.of(letter * 20) for letter in (b"a", b"b", b"c"))
KNOWN = (b"5/" + A.name.hex().encode(), b"5/" + B.name.hex().encode(), b"5/" + C.name.hex().encode())


def snapshot(own: bytes, *segments: Segment) -> EncodedSnapshot:
    return EncodedSnapshot(own, list(segments))


def test_segment_of_earlier_snapshot_in_epoch_is_not_written_again() -> None:
    keys, topic = SnapshotKeys(), dict[bytes, bytes]()
    for snapshot_id, content in (("5-1", snapshot(b"one", A, B)), ("5-2", snapshot(b"two", B, C))):
        records = keys.to_write(snapshot_id, content)
        assert list(records)[-1] == f"{snapshot_id}/head".encode()
        topic |= records
        keys.written(records)
        assert (KNOWN[1] in records) == (snapshot_id == "5-1")
    assert joined(topic) == {"5-1": snapshot(b"one", A, B).joined(), "5-2": snapshot(b"two", B, C).joined()}
    assert set(keys.to_delete("5-2")) == {b"5-1/0", b"5-1/head", KNOWN[0]}


def test_segment_that_may_not_be_stored_is_written_again() -> None:
    keys = SnapshotKeys()
    keys.to_write("5-1", snapshot(b"", A))  # this write failed
    records = keys.to_write("5-2", snapshot(b"", A))
    assert KNOWN[0] in records
    keys.written(records)
    keys.written(keys.to_write("5-3", snapshot(b"")))
    assert KNOWN[0] in keys.to_delete("5-3")  # the deletion may have failed
    assert KNOWN[0] in keys.to_write("5-4", snapshot(b"", A))


def test_segments_of_other_epoch_are_not_reused_and_are_deleted_after_later_snapshot() -> None:
    keys, successor = SnapshotKeys(), SnapshotKeys()
    topic = keys.to_write("5-1", snapshot(b"old", A))
    keys.written(topic)
    successor.add(topic)
    records = successor.to_write("9-2", snapshot(b"new", A))
    topic |= records
    keys.add(topic)
    assert not set(keys.to_delete("5-1")) & set(records)
    deleted = successor.to_delete("9-2")
    assert set(deleted) == {b"5-1/0", b"5-1/head", KNOWN[0]}
    for key in deleted:
        del topic[key]
    assert joined(topic) == {"9-2": snapshot(b"new", A).joined()}


@pytest.mark.parametrize("damage", [b"", b"other bytes"])
def test_snapshot_with_missing_segment_is_ignored(damage: bytes) -> None:
    topic = SnapshotKeys().to_write("5-1", snapshot(b"own", A, B))
    topic[KNOWN[1]] = damage
    assert joined(topic) == {}
    del topic[KNOWN[1]]
    assert joined(topic) == {}


def test_snapshot_with_more_records_than_client_queue_is_stored(kafka: KafkaInMemory) -> None:
    kafka.create("snapshots", cleanup_policy="compact")
    store = SnapshotStore({**SETTINGS, "queue.buffering.max.messages": 2}, "snapshots")
    content = snapshot(bytes(range(250)), A, B, C)
    store.write("5-1", content)
    assert SnapshotStore(SETTINGS, "snapshots").read() == {"5-1": content.joined()}


def test_refused_snapshot_record_is_reported_with_topic(kafka: KafkaInMemory) -> None:
    kafka.create("snapshots", cleanup_policy="compact")
    kafka.fail("delivery", KafkaError.TOPIC_AUTHORIZATION_FAILED)
    with pytest.raises(Unavailable, match=r"snapshot could not be stored in topic snapshots: .*[Aa]uthorization"):
        SnapshotStore(SETTINGS, "snapshots").write("5-1", snapshot(b"own"))
