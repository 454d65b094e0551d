"""Start positions of pipelines whose driver failed while registering them: the transaction was rolled back and has no effect."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewPartitions

from bascule.core.topics import JournalTopics
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients, transactional
from bascule.kafka.admin import Topics
from bascule.kafka.history import TopicHistory
from bascule.pipelines.positions import Positions
from bascule.pipelines.spec import LATEST, IngressSpec, PipelinesSpec, StartPosition
from bascule.writer.position import Position, PositionLost, PositionTaken, position_partition
from bascule.writer.reading import READ_TIMEOUT_S
from tests.scenarios.operating import KillAt, Killed
from tests.scenarios.sparkless import Bridge, without_spark
from tests.scenarios.test_owners import Run, carried_journal
from tests.scenarios.test_positions import ADMIN_TIMEOUT_S, Journal, forget
from tests.support.crash_points import at_crash_points
from tests.support.system import wait_for

RECORDS = 3


@contextmanager
def killed_by_a_source(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail when the first source partition is taken over."""
    with monkeypatch.context() as patched:
        at_crash_points(patched, KillAt("driver.source.after"))
        with pytest.raises(Killed):
            yield


@contextmanager
def killed_in_a_commit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail when all records of a transaction are stored, and its end is not."""

    class Killing(Producer):
        def commit_transaction(self, *_: Any) -> None:
            assert self.flush(ADMIN_TIMEOUT_S) == 0
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(clients, "producer", Killing)
        with pytest.raises(Killed):
            yield


def test_diverts_start_after_driver_kill_during_their_first_registration(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(kafka, topic_prefix)
    with killed_in_a_commit(monkeypatch):
        journal.take("first")
    assert journal.take("second").offset == 0


def test_divert_keeps_its_position_after_driver_kill_during_the_join(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = carried_journal(kafka, topic_prefix)
    first, second = Run(journal, "first"), Run(journal, "second")
    first.take()
    shared = first.positions.read(first.common)
    with killed_in_a_commit(monkeypatch):
        first.positions.move(first.common, shared, shared, {first.late: None})
    second.take()
    assert second.stored(second.late).offset == 0


@pytest.mark.parametrize(
    "key",
    [
        "diverts/{}/0",
        "ingress:gone/b/0",
        *(pytest.param(key, marks=pytest.mark.slow) for key in ("divert:gone/{}/0", "ingress:shelved/a/0", "ingress:shelved")),
    ],
)
def test_driver_start_ends_the_transaction_that_a_killed_writer_left_open(
    kafka: EmbeddedKafka, topic_prefix: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kafka would end the transaction by itself after five minutes, whatever the driver does."""
    without_spark(monkeypatch)
    bridge, alert = Bridge(kafka, topic_prefix), IngressSpec("shelved", "alerts", topics=("a",))
    bridge.journal.start_epoch()
    with bridge.running(bridge.divert("x"), ingresses=(alert,)):
        pass
    positions, key = bridge.positions, key.format(bridge.pipelines.topics.journal)
    with closing(positions.writer(key)) as writer:
        before = writer.current()
    monkeypatch.setattr(transactional, "TRANSACTION_TIMEOUT_MS", transactional.LONG_TRANSACTION_TIMEOUT_MS)
    with closing(positions.writer(key)) as writer, killed_in_a_commit(monkeypatch):
        writer.write([], before, before or Position("b", "", 0, 0))
    at = TopicHistory(bridge.pipelines.kafka, bridge.pipelines.topics.positions, position_partition(key))
    assert at.stable() < at.latest()
    begun_s = time.monotonic()
    with bridge.running(bridge.divert("x"), ingresses=(replace(alert, enabled=False),)):
        assert time.monotonic() - begun_s < READ_TIMEOUT_S / 2
        # The end of a confirmed commit may not be in the partition yet; the end of an open transaction comes much later.
        wait_for(lambda: at.stable() == at.latest(), "the end of each transaction")


class Source:
    """A topic with a few records in each partition, and drivers of an ingress that starts after them."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str) -> None:
        self.pipelines = PipelinesSpec(prefix, {"bootstrap.servers": kafka.bootstrap}, topics=JournalTopics(prefix))
        self.topic = f"{prefix}-in"
        self.topics = Topics(self.pipelines.kafka)
        self.topics.create(self.topic, 2, {})
        self.drivers = [Positions(self.pipelines, name) for name in ("first", "second")]
        self.drivers[0].prepare_topics()
        self.put(0, 1)

    def put(self, *partitions: int) -> None:
        producer = clients.producer(self.pipelines.kafka)
        for partition in partitions:
            for _ in range(RECORDS):
                producer.produce(self.topic, b"", partition=partition)
        assert producer.flush(ADMIN_TIMEOUT_S) == 0

    def create_anew(self) -> None:
        admin = clients.admin(self.pipelines.kafka)
        admin.delete_topics([self.topic])[self.topic].result(ADMIN_TIMEOUT_S)
        wait_for(lambda: self.topic not in self.topics.partitions(), "the deletion of the topic")
        self.topics.create(self.topic, 2, {})
        self.topics.await_visible([self.topic])
        self.put(0, 1)

    def grow(self, partitions: int) -> None:
        admin = clients.admin(self.pipelines.kafka)
        admin.create_partitions([NewPartitions(self.topic, partitions)])[self.topic].result(ADMIN_TIMEOUT_S)
        wait_for(lambda: self.topics.partitions()[self.topic] == partitions, "the new partitions")
        self.put(*range(2, partitions))

    def take(self, positions: Positions, partitions: int = 2) -> list[int]:
        """Register the ingress as a driver does at its start. Return the position of each partition."""
        topic_id = self.topics.ids([self.topic])[self.topic]
        sources = {(self.topic, partition): topic_id for partition in range(partitions)}
        return [position.offset for position in positions.take_sources("ingress:in", sources, StartPosition(LATEST))]

    def stored(self) -> dict[str, Position]:
        return {key: position for key, position in self.drivers[0].stored().items() if position.topic == self.topic}


@pytest.fixture
def source(kafka: EmbeddedKafka, topic_prefix: str) -> Source:
    return Source(kafka, topic_prefix)


@pytest.mark.parametrize("killed", [killed_by_a_source, killed_in_a_commit])
def test_ingress_starts_as_new_after_driver_kill_during_its_first_start(
    source: Source, killed: Callable[[pytest.MonkeyPatch], AbstractContextManager[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = source.drivers
    with killed(monkeypatch):
        source.take(first)
    assert source.take(second) == [RECORDS, RECORDS]


def test_known_ingress_reads_a_later_partition_from_its_first_record(source: Source) -> None:
    first, second = source.drivers
    assert source.take(first) == [RECORDS, RECORDS]
    source.put(0)
    source.grow(3)
    assert source.take(second, 3) == [RECORDS, RECORDS, 0]
    assert source.take(second, 3) == [RECORDS, RECORDS, 0]


def test_replaced_driver_takes_neither_its_old_sources_nor_new_partitions(source: Source) -> None:
    first, second = source.drivers
    source.take(first)
    source.take(second)
    source.grow(3)
    taken = source.stored()
    assert len(taken) == 2
    with pytest.raises(PositionTaken, match="'ingress:in' is held by another driver of the bridge, 'second"):
        source.take(first, 3)
    assert source.stored() == taken


def test_ingress_continues_after_loss_of_its_registration_record(source: Source) -> None:
    for name in ("before", "first"):
        assert source.take(Positions(source.pipelines, name)) == [RECORDS, RECORDS]
    forget(source.pipelines.kafka["bootstrap.servers"], source.pipelines.topics.prefix, "ingress:in")
    source.grow(3)
    assert source.take(source.drivers[1], 3) == [RECORDS, RECORDS, 0]


def test_driver_paused_while_taking_sources_takes_none_from_its_successor(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = source.drivers
    source.take(Positions(source.pipelines, "before"))
    take = Positions._take_source

    def take_later(positions: Positions, pipeline: str, partition: tuple[str, int], topic_id: str) -> Position | None:
        if positions is first and partition == (source.topic, 0):
            source.take(second)
        return take(positions, pipeline, partition, topic_id)

    monkeypatch.setattr(Positions, "_take_source", take_later)
    with pytest.raises(PositionTaken, match="is held by another driver of the bridge, 'second"):
        source.take(first)
    assert all(position.owner.startswith("second") for position in source.stored().values())


def test_ingress_with_recreated_topic_starts_again_after_one_run_without_the_ingress(source: Source) -> None:
    first, second = source.drivers
    source.take(first)
    source.create_anew()
    with pytest.raises(PositionLost, match=r"recreated .* start the pipelines once without the ingress"):
        source.take(second)
    third = Positions(source.pipelines, "third")
    assert third.removed_ingresses({"in"}) == set()
    assert third.removed_ingresses({"other"}) == {"ingress:in"}
    third.take_sources("ingress:in", {}, StartPosition(LATEST), lambda topic: topic != source.topic)
    assert third.removed_ingresses({"other"}) == set()
    assert source.take(Positions(source.pipelines, "fourth")) == [0, 0]


@pytest.mark.slow
def test_ingress_continues_in_a_topic_that_was_temporarily_removed_from_its_configuration(source: Source) -> None:
    first, second = source.drivers
    assert source.take(first) == [RECORDS, RECORDS]
    second.take_sources("ingress:in", {}, StartPosition(LATEST), lambda topic: topic != source.topic)
    assert all(position.vacant for position in source.stored().values())
    source.put(0, 1)
    assert source.take(Positions(source.pipelines, "third")) == [RECORDS, RECORDS]


def test_ingress_started_before_its_topic_exists_reads_the_topic_from_the_first_record(
    kafka: EmbeddedKafka, topic_prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_spark(monkeypatch)
    bridge = Bridge(kafka, topic_prefix)
    ingress = IngressSpec("in", "queue", (f"{topic_prefix}-in",), start=StartPosition(LATEST))
    with bridge.running(ingresses=(ingress,)) as running:
        assert running.query("ingress:in") is None
    source = Source(kafka, topic_prefix)
    with bridge.running(ingresses=(ingress,)) as running:
        assert running.query("ingress:in").active
    assert [position.offset for position in source.stored().values()] == [0, 0]
