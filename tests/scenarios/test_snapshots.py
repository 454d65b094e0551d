"""A broker with snapshots loads the newest one, and has the same messages as after reading the whole journal."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import closing

import pytest

from bascule.broker.remembered_ids import Segment
from bascule.broker.snapshot import EncodedSnapshot
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory
from bascule.kafka.log import PartitionReader
from bascule.kafka.snapshots import CHUNK_BYTES, SnapshotStore
from bascule.server.housekeeping import StoredMessages
from tests.scenarios.conftest import Connect
from tests.support.system import System, wait_for

SENT = 400
TAKEN = 150
LATE = 50


@pytest.fixture(scope="module")
def small_steps(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    config = "[broker]\nsession_timeout_s = 30\n[journal]\nsnapshot_records = 100\n"
    with System(kafka.bootstrap, tmp_path_factory.mktemp("snapshots"), prefix="snapshots", config=config) as running:
        yield running


def test_killed_broker_starts_from_its_newest_snapshot(connect_to: Connect, small_steps: System) -> None:
    producer = connect_to(small_steps.url).session().producer("queue:steps")
    session = connect_to(small_steps.url).session("TRANSACTED")
    consumer = session.consumer("queue:steps")
    producer.send("{n}", count=SENT)  # one journal record each: the producer waits for each answer
    taken = consumer.receive_many(TAKEN)
    session.commit()
    assert len(taken) == TAKEN
    wait_for(lambda: small_steps.depth("steps") == SENT - TAKEN, "the commit")
    store = SnapshotStore({"bootstrap.servers": small_steps.bootstrap}, "snapshots.snapshots")
    first = wait_for(store.read, "a snapshot").keys()
    late = 0

    def replaced() -> bool:
        nonlocal late
        producer.send("late", count=LATE)
        late += LATE
        return not first & store.read().keys()

    # A snapshot is valid once the journal announces it; only then older ones are deleted.
    wait_for(replaced, "a snapshot that counts")
    small_steps.broker.restart()
    loads = re.findall(r"loaded from (.*), journal read from offset (\d+)", small_steps.broker.said())
    assert loads[-1][0].startswith("snapshot ")
    assert int(loads[-1][1]) > 0
    left = connect_to(small_steps.url).session().consumer("queue:steps").receive_all(SENT - TAKEN + late)
    assert [message.body for message in left] == [str(number) for number in range(TAKEN, SENT)] + ["late"] * late


def test_snapshot_and_store_topics_are_compacted_in_small_segments(small_steps: System) -> None:
    topics = Topics({"bootstrap.servers": small_steps.bootstrap})
    for name in ("snapshots", "store"):
        settings = topics.config(f"{small_steps.prefix}.{name}")
        assert settings["cleanup.policy"] == "compact"
        assert CHUNK_BYTES < int(settings["segment.bytes"]) < 1 << 28  # Kafka never cleans the newest segment


def test_read_behind_barrier_finds_the_same_snapshots_and_messages(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    client = {"bootstrap.servers": kafka.bootstrap}
    for topic in ("snapshots", "store"):
        Topics(client).create(f"{topic_prefix}.{topic}", 1, {"cleanup.policy": "compact"})
    snapshots, store = SnapshotStore(client, f"{topic_prefix}.snapshots"), StoredMessages(client, f"{topic_prefix}.store")
    snapshots.write("9-7", EncodedSnapshot(b"snapshot", []))
    store.write({1: b"message"})
    for read in range(2):
        assert snapshots.read(behind_barrier=True) == snapshots.read() == {"9-7": b"snapshot"}
        assert StoredMessages(client, f"{topic_prefix}.store").read(behind_barrier=True) == {1: b"message"}
        assert TopicHistory(client, f"{topic_prefix}.store", 0).latest() == 2 + read
    assert store.mids_now() == [1]
    assert snapshots.journal_id("a") == SnapshotStore(client, f"{topic_prefix}.snapshots").journal_id("b") == "a"


def test_snapshot_deletes_older_snapshots_of_every_writer_and_no_newer_snapshot(kafka: EmbeddedKafka, topic_prefix: str) -> None:
    client = {"bootstrap.servers": kafka.bootstrap}
    Topics(client).create(topic_prefix, 1, {"cleanup.policy": "compact"})
    before, now = SnapshotStore(client, topic_prefix), SnapshotStore(client, topic_prefix)
    large = EncodedSnapshot(random.Random(1).randbytes(3 * CHUNK_BYTES), [Segment.of(b"ids")])
    before.write("0-5", large)
    before.write("0-6", large)
    before._send({b"0-7/1": b"left by a broker that was killed"})
    now.write("9-7", large)
    now.delete_older("9-7")
    before.delete_older("0-6")
    assert SnapshotStore(client, topic_prefix).read() == {"9-7": large.joined()}
    with closing(PartitionReader(client, topic_prefix, 0)) as reader:
        reader.seek()
        newest = {message.key(): message.value() for message in reader.to_end()}
    assert {key for key, value in newest.items() if value is not None} == {
        b"9-7/0", b"9-7/1", b"9-7/2", b"9-7/3", b"9-7/head", f"9/{large.segments[0].name.hex()}".encode()
    }  # fmt: skip
