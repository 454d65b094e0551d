"""Kafka transactions of connections, with a model of Kafka: a commit in doubt is reported, and the next attempt finds its outcome."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

import pytest

from bascule.adapter.outbound import CommitInDoubt, KafkaConnectionFactory, KafkaTransactions
from bascule.adapter.outbound.factory import COMMITTED_TOPIC, MARKS_KEPT_MS
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.kafka.compacted import Stored
from bascule.writer.errors import RecordRefused
from bascule.xa.errors import OutOfOrder

Make = Callable[[Mapping[bytes, Stored]], Sequence[Outgoing]]


class Kafka:
    """A model of Kafka. ``fail`` is called in place of the answer to a commit."""

    def __init__(self) -> None:
        self.table: dict[bytes, Stored] = {}
        self.records: list[bytes | None] = []
        self.fail: Callable[[Make], None] = lambda _: None
        self.looked_at: list[str] = []

    def transact(self, make: Make) -> None:
        for record in make(dict(self.table)):
            if record.topic != COMMITTED_TOPIC:
                self.records.append(record.value)
            elif record.value is None:
                del self.table[record.key or b""]
            else:
                self.table[record.key or b""] = Stored(record.value, record.partition, 0)
        self.fail(make)

    def look(self, _settings: object, topics: Mapping[str, object]) -> None:
        self.looked_at += topics

    def prepare(self) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> Kafka:
    kafka = Kafka()
    monkeypatch.setattr("bascule.adapter.outbound.factory.Slot", lambda *_: kafka)
    monkeypatch.setattr("bascule.adapter.outbound.factory.Topics", lambda _: kafka)
    monkeypatch.setattr("bascule.kafka.own_topics.prepare", kafka.look)
    return kafka


def factory() -> KafkaConnectionFactory:
    return KafkaConnectionFactory({}, transacted=KafkaTransactions("shop", instance="one"))


def send(factory: KafkaConnectionFactory, *values: bytes) -> None:
    with factory.connection() as connection, connection.transaction():
        for value in values:
            connection.send("orders", value)


def test_unanswered_commit_is_recognised_when_other_factory_shares_instance_id(kafka: Kafka) -> None:
    one, two = factory(), factory()
    send(two, b"1")

    def unanswered(make: Make) -> None:
        kafka.fail = lambda _: None
        send(two, b"3")
        send(two, b"4")
        kafka.transact(make)

    kafka.fail = unanswered
    send(one, b"2")
    assert kafka.records == [b"1", b"2", b"3", b"4"]


def test_each_connection_keeps_one_commit_mark_and_old_marks_are_deleted(kafka: Kafka) -> None:
    old_ms = int(time.time() * 1000) - MARKS_KEPT_MS - 1000
    kafka.table = {b"old": Stored(old_ms.to_bytes(8, "big"), 0, 0), b"young": Stored((old_ms + 60_000).to_bytes(8, "big"), 0, 0)}
    connections = factory()
    for _ in range(3):
        send(connections, b"1")
    assert len(kafka.table) == 2
    assert b"young" in kafka.table


def test_unknown_commit_outcome_raises_commit_in_doubt(kafka: Kafka) -> None:
    def fail(_: Make) -> None:
        raise Unavailable("Kafka did not commit")

    kafka.fail = fail
    with pytest.raises(CommitInDoubt, match="may or may not be committed"):
        send(factory(), b"1")


@pytest.mark.parametrize("refused", [False, True])
def test_commit_that_certainly_failed_is_not_in_doubt(kafka: Kafka, monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    def transact(make: Make) -> None:
        if refused:
            make({})
            raise RecordRefused("too large")
        raise Unavailable("no transaction can be started")

    monkeypatch.setattr(kafka, "transact", transact)
    with pytest.raises(Unavailable) as raised:
        send(factory(), b"1")
    assert not isinstance(raised.value, CommitInDoubt)
    assert kafka.records == []


def test_each_factory_checks_commit_mark_topic_once(kafka: Kafka) -> None:
    connections = factory()
    with connections.connection(), connections.connection():
        assert kafka.looked_at == [COMMITTED_TOPIC]


def test_calls_out_of_order_with_transaction_are_refused_without_effect(kafka: Kafka) -> None:
    with factory().connection() as connection:
        with pytest.raises(OutOfOrder, match="send outside of a transaction"):
            connection.send("orders", b"outside")
        with connection.transaction():
            connection.send("orders", b"1")
            with pytest.raises(OutOfOrder, match="transactions do not nest"), connection.transaction():
                pass
            with pytest.raises(OutOfOrder, match="the transaction has not ended"):
                connection.flush()
        connection.flush()
    with pytest.raises(OutOfOrder, match="the connection was returned to its pool"):
        connection.send("orders", b"late")
    connection.close()
    assert kafka.records == [b"1"]


def test_transaction_without_sends_writes_nothing_to_kafka(kafka: Kafka) -> None:
    send(factory())
    assert (kafka.records, kafka.table) == ([], {})


class ManualAppender:
    """An appender whose appends the test answers."""

    def __init__(self) -> None:
        self.asked: list[Future[int]] = []

    def append(self, _record: Outgoing) -> Future[int]:
        self.asked.append(Future())
        return self.asked[-1]

    def close(self) -> None: ...


def test_only_failed_sends_of_connection_are_kept_in_memory(kafka: Kafka, monkeypatch: pytest.MonkeyPatch) -> None:
    """A service may keep one connection and never flush it."""
    appending = ManualAppender()
    monkeypatch.setattr("bascule.adapter.outbound.factory.Appender", lambda _: appending)
    connection = KafkaConnectionFactory({}).connection()
    for _ in range(3):
        connection.send("orders", b"1")
    kept = weakref.ref(appending.asked[0])
    for number, future in enumerate(appending.asked):
        if number == 1:
            future.set_exception(Unavailable("timed out"))
        else:
            future.set_result(number)
    del future
    appending.asked.clear()
    gc.collect()
    assert kept() is None
    with pytest.raises(Unavailable, match="1 of 3 records are not confirmed and may or may not be stored: timed out"):
        connection.flush()
    connection.close()
