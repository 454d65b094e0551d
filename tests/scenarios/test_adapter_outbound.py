"""Connections of the adapter on a real Kafka: plain, in Kafka transactions, and in the current transaction; blocking and asyncio."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bascule.adapter.outbound import KafkaConnectionFactory, KafkaTransactions, PoolExhausted, PoolLimits, XaSends
from bascule.client import Message, Queue, Topic
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.jms.record import body_from_value, from_kafka_headers
from bascule.kafka.slot import _SlotClients
from bascule.writer.errors import TransactionFault
from bascule.xa import FileLog, TransactionManager
from bascule.xa.errors import NoTransaction, OutOfOrder
from bascule.xa.kafka import KafkaResource
from bascule.xa.postgres import PostgresResource
from tests.scenarios.adapter_topics import Watcher, create


@pytest.fixture
def topic(kafka: EmbeddedKafka, topic_prefix: str) -> str:
    create(kafka.bootstrap, topic_prefix, partitions=1)
    return topic_prefix


@pytest.fixture
def watcher(kafka: EmbeddedKafka, topic: str) -> Iterator[Watcher]:
    watching = Watcher(kafka.bootstrap, topic)
    yield watching
    watching.close()


def test_plain_connection_sends_records_and_refuses_transactions(kafka: EmbeddedKafka, topic: str, watcher: Watcher) -> None:
    factory = KafkaConnectionFactory({"bootstrap.servers": kafka.bootstrap}, limits=PoolLimits(most=1, wait_s=0.05))
    with factory.connection() as connection:
        connection.send(topic, b"one", b"key", headers=[("name", b"value")], timestamp_ms=1000)
        with pytest.raises(PoolExhausted, match="test_plain_connection_sends_records_and_refuses_transactions"):
            factory.connection()
        with pytest.raises(OutOfOrder, match="no transactions"), connection.transaction():
            pass
    assert factory.leases() == []
    with pytest.raises(OutOfOrder, match="returned to its pool"):
        connection.send(topic, b"late")
    assert watcher.wait(1) == ["one"]
    (record,) = watcher.records
    assert (record.key(), record.headers(), record.timestamp()[1]) == (b"key", [("name", b"value")], 1000)
    factory.close()


def test_kafka_transaction_writes_all_its_records_or_none(kafka: EmbeddedKafka, topic: str, watcher: Watcher) -> None:
    factory = KafkaConnectionFactory({"bootstrap.servers": kafka.bootstrap}, transacted=KafkaTransactions(topic))
    with factory.connection() as connection:
        with suppress(ZeroDivisionError), connection.transaction():
            connection.send(topic, b"never")
            raise ZeroDivisionError
        with connection.transaction():
            connection.send(topic, b"one")
            connection.send(topic, b"two")
        with pytest.raises(OutOfOrder, match="outside of a transaction"):
            connection.send(topic, b"outside")
    assert watcher.wait(2) == ["one", "two"]
    factory.close()


def test_unanswered_commit_is_not_repeated_when_another_factory_has_the_same_id(
    kafka: EmbeddedKafka, topic: str, watcher: Watcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = (KafkaConnectionFactory({"bootstrap.servers": kafka.bootstrap}, transacted=KafkaTransactions(topic)) for _ in range(2))
    write = _SlotClients.write

    async def unanswered(*given: Any) -> None:
        monkeypatch.setattr(_SlotClients, "write", write)
        await write(*given)
        with two.connection() as other, other.transaction():
            other.send(topic, b"two")
        raise TransactionFault("no answer")

    monkeypatch.setattr(_SlotClients, "write", unanswered)
    for value in (b"one", b"three"):
        with one.connection() as connection, connection.transaction():
            connection.send(topic, value)
    watcher.wait(3)
    assert sorted(watcher.look(1.0)) == ["one", "three", "two"]
    for each in (one, two):
        each.close()


def test_sends_in_current_transaction_commit_and_roll_back_with_its_rows(
    kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic: str, watcher: Watcher, tmp_path: Path
) -> None:
    table = "outbound_" + "".join(filter(str.isalnum, topic))[-40:]
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        connection.execute(f"CREATE TABLE {table} (id int)")
    database = PostgresResource("db", postgres.conninfo)
    resource = KafkaResource("kafka", {"bootstrap.servers": kafka.bootstrap}, prefix=f"{topic}.xa")
    manager = TransactionManager("out", FileLog(tmp_path / "log"), [database, resource])
    factory = KafkaConnectionFactory({"bootstrap.servers": kafka.bootstrap}, transacted=XaSends(manager, resource))

    def work(number: int) -> None:
        manager.enlist(database).execute(f"INSERT INTO {table} VALUES (%s)", (number,))
        with factory.connection() as connection:
            connection.jms().send(Queue(topic), f"number {number}")

    with manager:
        with pytest.raises(NoTransaction), factory.connection() as outside:
            outside.send(topic, b"outside")
        with suppress(ZeroDivisionError), manager.begin():
            work(1)
            raise ZeroDivisionError
        with manager.begin():
            work(2)
        assert watcher.wait(1) == ["number 2"]
    with psycopg.connect(postgres.conninfo) as connection:
        assert connection.execute(f"SELECT id FROM {table}").fetchall() == [(2,)]
    for each in (factory, database, resource):
        each.close()


def test_jms_message_sent_by_adapter_becomes_the_same_record_as_by_a_divert(kafka: EmbeddedKafka, topic: str, watcher: Watcher) -> None:
    factory = KafkaConnectionFactory({"bootstrap.servers": kafka.bootstrap})
    with factory.connection() as connection:
        session = connection.jms(key="property:order")
        producer = session.producer(Topic(topic))
        sent = producer.send(Message({"amount": 90, "paid": True}, properties={"order": 4711, "region": "EU"}, correlation_id="c1"))
    watcher.wait(1)
    (record,) = watcher.records
    message = from_kafka_headers(record.headers())
    message.body = body_from_value(message.body_kind, record.value())
    assert record.key() == b"4711"
    assert (message.message_id, message.correlation_id, message.properties) == (sent.message_id, "c1", {"order": 4711, "region": "EU"})
    assert (message.destination, message.destination_kind, message.body) == (topic, "topic", {"amount": 90, "paid": True})
    factory.close()
