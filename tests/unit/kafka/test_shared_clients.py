"""Clients that short-lived readers and writers share, on Kafka in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from confluent_kafka import KafkaError

from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing, Output
from bascule.kafka import clients
from bascule.kafka.appender import Appender
from bascule.kafka.history import TopicHistory
from bascule.kafka.positions import PositionReaders
from bascule.kafka.transactional import TransactionalWriter
from bascule.writer.position import Position, position_partition
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory, MemoryConsumer
from tests.support.system import wait_for
from tests.unit.kafka.in_memory import kafka

__all__ = ["kafka"]  # imported fixtures

FIRST, SECOND = (Position("source", "id", 0, offset) for offset in (0, 5))
PLACE = [position_partition("key")]


@pytest.fixture
def readers(kafka: KafkaInMemory) -> Iterator[PositionReaders]:
    kafka.create("positions", 16, cleanup_policy="compact")
    made = PositionReaders(SETTINGS, "positions")
    yield made
    made.close()


def moved(readers: PositionReaders, before: Position | None, after: Position) -> Position | None:
    """Take a position with a new writer, move it, and return what the writer found."""
    with closing(TransactionalWriter(SETTINGS, "id", "positions", "key", readers=readers)) as writer:
        found = writer.current()
        writer.write([Output("positions", b"other", b"", [])], before, after)
        return found


def test_writers_one_after_the_other_share_all_clients_but_their_producer(kafka: KafkaInMemory, readers: PositionReaders) -> None:
    assert moved(readers, None, FIRST) is None
    before = len(kafka.made)
    assert moved(readers, FIRST, SECOND) == FIRST
    with readers.reading(PLACE) as reader:
        assert reader.read_behind_barrier()["key"] == SECOND
    assert [kind for kind, _ in kafka.made[before:]] == ["producer"]
    with readers.reading([(PLACE[0] + 1) % 16]) as reader:
        assert reader.read_behind_barrier() == {}
    assert [kind for kind, _ in kafka.made[before:]] == ["producer", "consumer"]


def test_two_users_at_once_have_two_readers_and_one_is_kept(kafka: KafkaInMemory, readers: PositionReaders) -> None:
    with readers.reading(PLACE) as one, readers.reading(PLACE) as other:
        assert one is not other
        assert one.read_behind_barrier() == other.read_behind_barrier() == {}
    wait_for(lambda: kafka.open_clients().count("consumer") == 1, "the second reader to be closed")


def test_reader_that_has_failed_is_not_used_again(kafka: KafkaInMemory, readers: PositionReaders) -> None:
    kafka.fail("fetch", KafkaError._AUTO_OFFSET_RESET)
    with pytest.raises(Unavailable), readers.reading(PLACE) as failed:
        failed.read_behind_barrier()
    with readers.reading(PLACE) as reader:
        assert reader is not failed
        assert reader.read_behind_barrier() == {}


def test_reader_that_is_kept_does_not_know_the_positions_of_a_topic_that_was_recreated(
    kafka: KafkaInMemory, readers: PositionReaders
) -> None:
    """The barrier record is in the new topic, before the end of what was read of the old one."""
    moved(readers, None, FIRST)
    moved(readers, FIRST, SECOND)
    with readers.reading(PLACE) as kept:
        assert kept.read_behind_barrier()["key"] == SECOND
    clients.admin(SETTINGS).delete_topics(["positions"])["positions"].result()
    kafka.create("positions", 16, cleanup_policy="compact")
    with pytest.raises(Unavailable, match="it was recreated, or has lost records"), readers.reading(PLACE) as reader:
        reader.read_behind_barrier()
    with readers.reading(PLACE) as reader:
        assert reader is not kept
        assert reader.read_behind_barrier() == {}


def test_closed_readers_leave_no_client(kafka: KafkaInMemory, readers: PositionReaders) -> None:
    moved(readers, None, FIRST)
    readers.close()
    wait_for(lambda: kafka.open_clients() == [], "all clients to be freed")


def test_client_of_an_appender_ends_when_nobody_uses_it_and_its_records_are_stored(kafka: KafkaInMemory) -> None:
    kafka.create("t")
    kafka.held["list_topics"] = held = threading.Event()  # the first call of its thread
    future = Appender(SETTINGS).append(Outgoing("t", None, b"value", partition=0))
    assert kafka.open_clients() == ["producer"]
    held.set()
    assert future.result(30) == 0
    wait_for(lambda: kafka.open_clients() == [], "the client to be freed")


def test_read_of_a_range_waits_only_for_its_first_record(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Markers have offsets, too: a client that waits for as many records as there are offsets waits for nothing."""
    kafka.create("t")
    for value in (b"1", b"2"):
        kafka.put("t", value)
    transaction = object()
    kafka.put("t", b"3", transaction=transaction)
    kafka.partition("t").mark(transaction, committed=True)
    consume, waits = MemoryConsumer.consume, []

    def noted(consumer: MemoryConsumer, count: int = 1, timeout: float = -1) -> object:
        waits.append(count > 1 and timeout != 0)
        return consume(consumer, count, timeout)

    monkeypatch.setattr(MemoryConsumer, "consume", noted)
    assert [record.value() for record in TopicHistory(SETTINGS, "t", 0, 30).records(0, 4)] == [b"1", b"2", b"3"]
    assert waits
    assert not any(waits)
