"""Pipelines whose position is lost stop and report it; a disabled divert keeps its position; an orderly end leaves no open transaction."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_END, ConsumerGroupTopicPartitions, IsolationLevel, TopicPartition
from confluent_kafka.admin import OffsetSpec

from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory
from bascule.kafka.log import PartitionReader
from bascule.pipelines.positions import Positions
from bascule.pipelines.registry import DivertPlan
from bascule.pipelines.spec import EARLIEST, DivertSpec, PipelinesSpec, StartPosition
from bascule.writer.position import Position, PositionLost, position_key, position_partition
from tests.scenarios.bridge import Bridge, await_end, eventually
from tests.support.journal import SyntheticJournal, text_message
from tests.support.system import paused
from tests.support.usage import MIB, memory_mib

pytestmark = pytest.mark.timeout(900)
ADMIN_TIMEOUT_S = 30


@pytest.fixture
def bridge(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Iterator[Bridge]:
    bridge = Bridge(kafka, topic_prefix, tmp_path)
    yield bridge
    bridge.child.stop(60)


class Journal:
    """A journal with ten messages, and a divert."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str) -> None:
        self.client = {"bootstrap.servers": kafka.bootstrap}
        self.topics = Topics(self.client)
        self.pipelines = PipelinesSpec(
            prefix,
            self.client,
            (DivertSpec("orders", "#", f"{prefix}.orders", start=StartPosition(EARLIEST)),),
            topics=JournalTopics(prefix),
        )
        self.name = self.pipelines.topics.journal
        self.topics.create(self.name, 1, {})
        self.positions = Positions(self.pipelines, "first")
        self.positions.prepare_topics()
        self._written = SyntheticJournal(kafka.bootstrap, self.name)
        self._written.start_epoch()
        self.send(*map(str, range(10)))

    def send(self, *texts: str) -> None:
        for text in texts:
            self._written.send(text_message(text))
        self._written.flush()

    def plan(self, owner: str) -> DivertPlan:
        """Register the pipelines as a driver does at its start."""
        plan = Positions(self.pipelines, owner).take_diverts(self.pipelines.diverts, self.topics.ids([self.name])[self.name])
        assert plan is not None
        return plan

    def take(self, owner: str) -> Position:
        """Register the pipelines, and return the position that the diverts share."""
        return self.plan(owner).common

    def delete(self, topic: str) -> None:
        delete(self.client["bootstrap.servers"], topic)


@pytest.fixture
def journal(kafka: EmbeddedKafka, topic_prefix: str) -> Journal:
    journal = Journal(kafka, topic_prefix)
    assert journal.take("first").offset == 0
    return journal


def delete(servers: str, topic: str) -> None:
    """Return when the topic is deleted, so that another topic may have its name."""
    admin = clients.admin({"bootstrap.servers": servers})
    admin.delete_topics([topic])[topic].result(ADMIN_TIMEOUT_S)
    topics = Topics({"bootstrap.servers": servers})
    eventually(lambda: topic not in topics.partitions(), f"{topic} is deleted", ADMIN_TIMEOUT_S)


def delete_records(servers: str, topic: str, before: int) -> None:
    admin = clients.admin({"bootstrap.servers": servers})
    for future in admin.delete_records([TopicPartition(topic, 0, before)]).values():
        future.result(ADMIN_TIMEOUT_S)


def forget(servers: str, prefix: str, key: str) -> None:
    """Delete the record of a position, as a user might by mistake."""
    producer = clients.producer({"bootstrap.servers": servers})
    producer.produce(f"{prefix}.positions", None, key, position_partition(key))
    assert producer.flush(ADMIN_TIMEOUT_S) == 0


@pytest.mark.on_mock_cluster
def test_diverts_with_deleted_position_do_not_start(journal: Journal) -> None:
    forget(journal.client["bootstrap.servers"], journal.pipelines.topics.prefix, journal.positions.common_key)
    with pytest.raises(PositionLost, match=r"the position of divert 'orders' is lost: the divert has run before. Restore topic"):
        journal.take("second")


def test_diverts_do_not_start_on_a_recreated_journal(journal: Journal) -> None:
    journal.delete(journal.name)
    journal.topics.create(journal.name, 1, {})
    eventually(lambda: journal.name in journal.topics.ids([journal.name]), "Kafka knows the new topic")
    assert re.search(r"journal' was recreated since pipeline 'diverts' last ran", str(journal.plan("second").common_lost))


@pytest.mark.on_mock_cluster
def test_diverts_do_not_start_when_unread_records_are_deleted(journal: Journal) -> None:
    delete_records(journal.client["bootstrap.servers"], journal.name, 5)
    lost = str(journal.plan("second").common_lost)
    assert re.search(r"is at offset 0 of .*journal-0, and the first record is at offset 5", lost)


@pytest.mark.on_mock_cluster
@pytest.mark.parametrize(("key", "value"), [(b"\xff", b"{}"), (b"somebody's", b"no position")])
def test_error_for_invalid_position_record_names_its_offset_and_key(journal: Journal, key: bytes, value: bytes) -> None:
    partition = position_partition(journal.positions.common_key)
    topic = f"{journal.pipelines.topics.prefix}.positions"
    offset = TopicHistory(journal.client, topic, partition).latest()
    producer = clients.producer(journal.client)
    producer.produce(topic, value, key, partition)
    assert producer.flush(ADMIN_TIMEOUT_S) == 0
    with pytest.raises(PositionLost) as raised:
        journal.take("second")
    assert str(raised.value).startswith(f"{topic}, partition {partition}, offset {offset}, key {key!r}: not a valid position: ")


def config(prefix: str, *ingresses: str, shelved: bool = False, on_error: str = "dead-letter") -> str:
    text = f'on_error = "{on_error}"\ntransaction_records = 100000\n'
    for name, enabled in (("plain", True), ("shelved", not shelved)):
        start = f'enabled = {str(enabled).lower()}\nstart = "earliest"'
        text += f'[[divert]]\nname = "{name}"\nfrom = "orders"\nto = "{prefix}.{name}"\n{start}\n'
    for name in ingresses:
        text += f'[[ingress]]\nname = "{name}"\ntopics = ["{prefix}-in.{name}"]\nto = "{name}"\nbody = "map"\n'
    return text


@pytest.mark.slow
def test_pipelines_that_cannot_continue_stop_with_a_reason_and_the_others_run(bridge: Bridge) -> None:
    prefix, journal = bridge.prefix, bridge.journal
    ingresses = ("lost", "anew", "bad", "fine", "swapped", "ended")
    for name in ingresses:
        bridge.topics.create(f"{prefix}-in.{name}", 1, {})
    bridge.configure(config(prefix, *ingresses))

    def put(value: str, *names: str) -> None:
        producer = clients.producer({"bootstrap.servers": bridge.servers})  # a driver that does not notice the deletion of a topic
        for name in names:
            producer.produce(f"{prefix}-in.{name}", value)
        assert producer.flush(60) == 0

    def send(*numbers: int) -> None:
        for number in numbers:
            journal.send(text_message(str(number)), address="orders")
        journal.flush()

    journal.start_epoch()
    put('{"n": 1}', *ingresses)
    transaction = clients.producer({"bootstrap.servers": bridge.servers, "transactional.id": prefix})
    transaction.init_transactions()
    transaction.begin_transaction()
    transaction.produce(f"{prefix}-in.ended", '{"n": 2}')
    transaction.commit_transaction()
    send(0, 1, 2)
    bridge.start()
    taken, plain, shelved = (bridge.reader(f"{prefix}.{name}") for name in ("ingress", "plain", "shelved"))
    taken.wait_for(7)
    assert plain.wait_for(3) == shelved.wait_for(3) == ["0", "1", "2"]
    bridge.child.stop(60)

    # One position is lost, one topic is recreated, one record is bad, one divert is disabled, and all records that one ingress has read are
    # deleted, with the end of their transaction. The other pipelines continue.
    delete_records(bridge.servers, f"{prefix}-in.ended", OFFSET_END)
    forget(bridge.servers, prefix, position_key("ingress:lost", f"{prefix}-in.lost", 0))
    delete(bridge.servers, f"{prefix}-in.anew")
    bridge.topics.create(f"{prefix}-in.anew", 1, {})
    put("no json", "bad")
    put('{"n": 2}', "fine", "ended", "lost", "anew", "swapped")
    bridge.configure(config(prefix, *ingresses, shelved=True, on_error="stop"))
    bridge.start()
    send(3, 4)
    assert plain.wait_for(5) == ["0", "1", "2", "3", "4"]
    taken.wait_for(10)
    # A recreated topic before Spark checks again, already longer than the position of the ingress in the old topic.
    with paused(bridge.jvm()):
        delete(bridge.servers, f"{prefix}-in.swapped")
        bridge.topics.create(f"{prefix}-in.swapped", 1, {})
        for _ in range(5):
            put('{"n": 3}', "swapped")
    eventually(lambda: bridge.said().count("pipeline stopped") == 4, "four of them stop")
    said = {line.split("pipeline=")[1].split()[0]: line for line in bridge.said().splitlines() if "pipeline stopped" in line}
    assert "Restore topic" in said["ingress:lost"]
    assert "was recreated" in said["ingress:anew"]
    assert "was recreated" in said["ingress:swapped"]
    assert "BadRecord: the value is not valid JSON" in said["ingress:bad"]
    assert bridge.child.running
    stored = Positions(PipelinesSpec(prefix, {"bootstrap.servers": bridge.servers}, topics=JournalTopics(prefix)), "").stored()
    kept = stored[position_key("divert:shelved", f"{prefix}.journal", 0)]
    assert kept.offset < stored[position_key("diverts", f"{prefix}.journal", 0)].offset
    assert kept.members == ("shelved",)
    bridge.child.stop(60)

    # A disabled divert continues from its position. An ingress without a topic reports this once, not at each check.
    bridge.configure(config(prefix, "fine", "absent"))
    bridge.start()
    assert shelved.wait_for(5) == ["0", "1", "2", "3", "4"]
    eventually(lambda: "divert joined" in bridge.said(), "the divert joins the others")
    assert bridge.said().count("ingress has no topic yet") == 1

    # An end in the middle of a transaction.
    send(*range(5, 40_000))
    everything = bridge.reader(f"{prefix}.plain", committed=False)
    everything.wait_for(2000)
    bridge.child.stop(120)
    for topic, partition in ((f"{prefix}.plain", 0), *((f"{prefix}.positions", partition) for partition in range(16))):
        # Kafka would abort the transaction by itself after 30 s.
        ended = partial(ends, bridge.servers, topic, partition)
        eventually(lambda ended=ended: ended() == 1, f"no transaction is open in {topic}-{partition}", 10)
    for reader in (taken, plain, shelved, everything):
        reader.close()


@pytest.mark.slow
def test_running_pipeline_stops_when_unread_records_are_deleted_and_the_others_run(bridge: Bridge) -> None:
    """Delete unread records, as the owner's quota of the journal does if a pipeline is stalled."""
    prefix, journal = bridge.prefix, bridge.journal
    bridge.topics.create(f"{prefix}-in.fine", 1, {})
    bridge.configure(config(prefix, "fine"))
    journal.start_epoch()
    journal.send(text_message("read"), address="orders")
    journal.flush()
    bridge.start()
    plain, taken = bridge.reader(f"{prefix}.plain"), bridge.reader(f"{prefix}.ingress")
    assert plain.wait_for(1) == ["read"]
    with paused(bridge.jvm()):
        for number in range(100):
            journal.send(text_message(str(number)), address="orders")
        journal.flush()
        delete_records(bridge.servers, f"{prefix}.journal", 90)
    eventually(lambda: "pipeline stopped" in bridge.said(), "the diverts stop")
    (said,) = (line for line in bridge.said().splitlines() if "pipeline stopped" in line)
    assert "PositionLost: pipeline 'diverts' is at offset 2 of " in said
    assert "and the first record is at offset 90: the records in between were deleted before the pipeline read them" in said
    producer = clients.producer({"bootstrap.servers": bridge.servers})
    producer.produce(f"{prefix}-in.fine", '{"n": 1}')
    producer.flush()
    taken.wait_for(1)
    assert bridge.child.running
    plain.poll()
    assert plain.values() == ["read"]
    for reader in (plain, taken):
        reader.close()


def backlog(bridge: Bridge, messages: int, batch: int, memory_bytes: int, timeout_s: float) -> None:
    """A divert starts far behind. It is killed on its way, loses the state in Spark and in Kafka's groups, and restarts."""
    prefix, journal, checkpoints = bridge.prefix, bridge.journal, bridge.directory / "checkpoints"
    bridge.configure(
        f'transaction_records = {batch}\ncheckpoint_dir = "{checkpoints}"\n'
        f'[[divert]]\nname = "all"\nfrom = "orders"\nto = "{prefix}.all"\nstart = "earliest"\n'
    )
    journal.start_epoch()
    sent = 0

    def send(count: int) -> None:
        nonlocal sent
        for number in range(sent, sent + count):
            journal.send(text_message(str(number)), address="orders")
        journal.flush()
        sent += count

    send(messages)
    bridge.start()
    written = bridge.reader(f"{prefix}.all")
    written.wait_for(messages // 4, timeout_s)
    client = {"bootstrap.servers": bridge.servers}
    admin, at = clients.admin(client), TopicPartition(f"{prefix}.journal", 0, 0)
    group = Positions(PipelinesSpec(prefix, client, topics=JournalTopics(prefix)), "").group("diverts")

    def shown() -> int:
        found = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions(group)])[group].result(ADMIN_TIMEOUT_S)
        return max((each.offset for each in found.topic_partitions), default=-1)

    eventually(lambda: shown() > 0, "the lag is shown to monitors")
    used = max(map(peak_bytes, bridge.workers()))
    spark = [bridge.jvm(), *bridge.workers()]
    bridge.child.kill()
    await_end(spark)
    assert list(checkpoints.iterdir()) != []
    shutil.rmtree(checkpoints)
    admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, [at])])[group].result(ADMIN_TIMEOUT_S)
    assert shown() == 0
    send(batch)  # leaves work for this driver and the next one, however fast the previous one was
    bridge.start()
    written.wait_for(messages // 2, timeout_s)
    bridge.child.stop(60)
    admin.delete_consumer_groups([group])[group].result(ADMIN_TIMEOUT_S)
    send(batch)
    bridge.start()
    assert written.wait_for(sent, timeout_s) == list(map(str, range(sent)))
    used = max(used, *map(peak_bytes, bridge.workers()))
    bridge.child.stop(60)
    written.poll()
    assert len(written.seen) == sent
    written.close()
    steps = [after - before for before, after in pairwise(positions_of(bridge.servers, prefix))]
    assert 0 < max(steps) <= batch
    assert used < memory_bytes


def peak_bytes(pid: int) -> int:
    """Return the largest memory that a process has had; 0 after its end."""
    with suppress(OSError):
        return int(memory_mib(pid, "VmHWM") * MIB)
    return 0


def positions_of(servers: str, prefix: str) -> list[int]:
    """Return every offset of the positions of diverts that compaction has left."""
    key = position_key("diverts", f"{prefix}.journal", 0)
    reader = PartitionReader({"bootstrap.servers": servers}, f"{prefix}.positions", position_partition(key), committed_only=True)
    found: list[int] = []
    try:
        low, _ = reader.range()
        reader.seek(low)
        while not reader.at_end:
            found += [Position.decode(message.value() or b"").offset for message in reader.read() if message.key() == key.encode()]
    finally:
        reader.close()
    return found


@pytest.mark.slow
def test_backlog_is_carried_in_bounded_steps_despite_lost_checkpoint_and_group_offsets(bridge: Bridge) -> None:
    backlog(bridge, 40_000, 4_000, 400 << 20, 300.0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_backlog_of_a_million_messages_is_carried_once_in_bounded_memory(bridge: Bridge) -> None:
    backlog(bridge, 1_000_000, 50_000, 500 << 20, 1200.0)


def ends(servers: str, topic: str, partition: int) -> int:
    """Return the number of different ends of a partition: while a transaction is open, last stable offset and high watermark differ."""
    admin, at = clients.admin({"bootstrap.servers": servers}), TopicPartition(topic, partition)
    found = (admin.list_offsets({at: OffsetSpec.latest()}, isolation_level=level)[at].result() for level in IsolationLevel)
    return len({result.offset for result in found})
