"""The whole adapter on Kafka in memory: groups, inbound log, retries, dead letters, transactions and outbound connections."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from confluent_kafka import KafkaError

from bascule.adapter.inbound import ActivationSpec, Backoff, InboundLog, Record, ResourceAdapter, Xa, log_topic
from bascule.adapter.inbound.dead_letters import DeadLetters
from bascule.adapter.inbound.state import Place, Ref
from bascule.adapter.outbound import KafkaConnectionFactory, KafkaTransactions, XaSends
from bascule.client import Message, Queue, Topic
from bascule.core.errors import InvalidInput
from bascule.kafka import incarnation
from bascule.kafka.consumer import BY_MEMBER
from bascule.xa import TransactionManager
from bascule.xa.errors import NoTransaction, OutOfOrder
from bascule.xa.file_log import FileLog
from bascule.xa.kafka import KafkaResource
from tests.support.kafka_in_memory import SETTINGS, KafkaInMemory
from tests.support.system import wait_for

GROUP = "shop"
SPEC = ActivationSpec(topics=("payments",), group=GROUP, workers=2, retries=1, backoff=Backoff(0, 1, 0))


@pytest.fixture
def kafka(monkeypatch: pytest.MonkeyPatch) -> KafkaInMemory:
    monkeypatch.setattr(incarnation, "SETTLE_S", 0.0)
    cluster = KafkaInMemory(monkeypatch)
    cluster.create("payments")
    cluster.create("orders")
    return cluster


class Endpoint:
    """An endpoint that keeps its records. ``act`` may raise an error or wait."""

    def __init__(self, act: Callable[[Record], None] = lambda _: None) -> None:
        self.records: list[Record] = []
        self._act = act

    def on_record(self, record: Record) -> None:
        self.records.append(record)
        self._act(record)

    @property
    def values(self) -> list[bytes | None]:
        return [record.value for record in self.records]


@contextmanager
def at_work(endpoint: Endpoint, spec: ActivationSpec = SPEC) -> Iterator[ResourceAdapter]:
    """Run an adapter with one endpoint."""
    adapter = ResourceAdapter(SETTINGS)
    adapter.activate(spec, endpoint.on_record)
    with adapter:
        yield adapter


def in_flight() -> list[int]:
    """Return the offsets of all records that the inbound log of the group has in flight."""
    with closing(InboundLog("look", SETTINGS, group=GROUP)) as log:
        return sorted(offset for flights in log.all_flights().values() for offset in flights.keys)


def done(adapter: ResourceAdapter, **counts: int) -> bool:
    found = adapter.status()[0].counts
    return all(found[name] == count for name, count in counts.items())


def test_each_record_is_delivered_once_across_restart(kafka: KafkaInMemory) -> None:
    endpoint = Endpoint()
    for value in (b"1", b"2"):
        kafka.put("payments", value, b"key", tag=b"header")
    with at_work(endpoint) as adapter:
        wait_for(lambda: done(adapter, delivered=2), "two records to be delivered")
    kafka.put("payments", b"3")
    with at_work(endpoint) as adapter:
        wait_for(lambda: done(adapter, delivered=1), "the third record to be delivered")
    assert sorted(endpoint.values) == [b"1", b"2", b"3"]
    first = endpoint.records[0]
    assert (first.topic, first.partition, first.key, first.header("tag")) == ("payments", 0, b"key", b"header")
    assert in_flight() == []


def test_record_that_fails_too_often_becomes_dead_letter_and_can_be_returned(
    kafka: KafkaInMemory, caplog: pytest.LogCaptureFixture
) -> None:
    repaired = threading.Event()

    def act(record: Record) -> None:
        if record.value == b"bad" and not repaired.is_set():
            raise ValueError("no price")

    endpoint = Endpoint(act)
    kafka.put("payments", b"good")
    kafka.put("payments", b"bad", b"key")
    letters = DeadLetters(SETTINGS, GROUP)
    with at_work(endpoint) as adapter:
        wait_for(lambda: done(adapter, delivered=1, failed=2, retried=1, dead_lettered=1), "a dead letter")
        assert [record.failures for record in endpoint.records if record.value == b"bad"] == [0, 1]
        (letter,) = letters.waiting()
        assert (letter.origin, letter.failures, letter.key, letter.size_bytes) == ("payments/0/1", 2, b"key", 3)
        assert letter.error == "ValueError: no price"
        assert caplog.text.count("ValueError: no price") == 2
        assert (letter.partition, letter.offset, letters.count()) == (0, 0, 1)
        repaired.set()
        assert letters.send_back() == 1
        wait_for(lambda: done(adapter, delivered=2), "the record to be delivered")
    last = endpoint.records[-1]
    assert (last.value, last.topic, last.offset, last.failures) == (b"bad", "payments", 1, 0)
    assert (letters.waiting(), letters.count(), letters.send_back()) == ([], 0, 0)
    assert in_flight() == []


def test_oldest_dead_letters_are_returned_up_to_requested_count(kafka: KafkaInMemory) -> None:
    def act(_: Record) -> None:
        raise ValueError

    for value in (b"1", b"2", b"3"):
        kafka.put("payments", value)
    with at_work(Endpoint(act), ActivationSpec(topics=("payments",), group=GROUP, workers=1, retries=0)) as adapter:
        wait_for(lambda: done(adapter, dead_lettered=3), "three dead letters")
    letters = DeadLetters(SETTINGS, GROUP)
    assert letters.send_back(2) == 2
    assert [letter.origin for letter in letters.waiting()] == ["payments/0/2"]


def test_record_is_delivered_once_when_its_log_entry_was_not_stored(kafka: KafkaInMemory) -> None:
    endpoint = Endpoint()
    with at_work(endpoint) as adapter:
        wait_for(lambda: list(adapter.status()[0].partitions.values()).count("ready") > 1, "the partitions to be taken over")
        kafka.fail("delivery", KafkaError._MSG_TIMED_OUT)
        kafka.put("payments", b"1")
        wait_for(lambda: done(adapter, delivered=1), "the record to be delivered")
        wait_for(lambda: not kafka.faults["delivery"], "the fault to strike")
        kafka.put("payments", b"2")
        wait_for(lambda: done(adapter, delivered=2), "the next record to be delivered")
    assert endpoint.values == [b"1", b"2"]
    assert in_flight() == []


def test_record_in_progress_at_member_that_lost_partition_is_redelivered_by_next_member(kafka: KafkaInMemory) -> None:
    released = threading.Event()
    slow, quick = Endpoint(lambda _: released.wait(30) and None), Endpoint()
    with at_work(slow) as first:
        kafka.put("payments", b"1")
        wait_for(lambda: slow.records, "the record to be at work")
        with at_work(quick) as second:
            kafka.members[GROUP][0].expire()
            wait_for(lambda: quick.records, "the record to be delivered by the other member")
            wait_for(lambda: done(second, delivered=1), "the record to be done")
            kafka.put("payments", b"2")
            wait_for(lambda: done(second, delivered=2, redelivered=1), "the next record to be delivered")
            assert [record.redelivered for record in quick.records] == [True, False]
            assert first.status()[0].partitions == {}
            released.set()
    assert slow.values == [b"1"]
    assert in_flight() == []


def test_deleted_record_in_flight_is_counted_as_vanished(kafka: KafkaInMemory) -> None:
    kafka.put("payments", b"1")
    place = Place("payments", 0)
    with closing(InboundLog("inbound", SETTINGS, group=GROUP)) as log:
        token = log.take(place, log.owner(place))
        log.schedule([Ref(place, token, 0)])
        log.advance([Ref(place, token, 1)])
    kafka.offsets[GROUP]["payments", 0] = (1, BY_MEMBER)
    kafka.partition("payments").delete(1)
    endpoint = Endpoint()
    with at_work(endpoint) as adapter:
        wait_for(lambda: done(adapter, vanished=1), "the record to be missed")
    assert endpoint.records == []
    assert in_flight() == []


@contextmanager
def transactions(directory: Path) -> Iterator[Xa]:
    """Make the objects that a program needs to deliver each record in its own transaction."""
    log = InboundLog("inbound", SETTINGS, group=GROUP)
    resource = KafkaResource("kafka", SETTINGS, prefix="xa", instance="one")
    with closing(log), closing(resource), TransactionManager("shop", FileLog(directory / "log"), [log, resource]) as manager:
        yield Xa(manager, log, resource)


@pytest.mark.parametrize("fails", [False, True], ids=["committed", "dead-lettered"])
def test_record_and_sends_of_its_endpoint_are_one_transaction(kafka: KafkaInMemory, tmp_path: Path, fails: bool) -> None:
    with transactions(tmp_path) as xa, closing(KafkaConnectionFactory(SETTINGS, transacted=XaSends(xa.manager, xa.kafka))) as factory:

        def act(record: Record) -> None:
            with factory.connection() as connection:
                connection.send("orders", b"order", b"key", headers=[("name", b"header")], timestamp_ms=7)
            assert kafka.values("orders") == []
            if fails:
                raise ValueError("no price")

        spec = ActivationSpec(topics=("payments",), group=GROUP, transacted=xa, retries=1, backoff=Backoff(0, 1, 0))
        kafka.put("payments", b"1")
        with at_work(Endpoint(act), spec) as adapter:
            if fails:
                wait_for(lambda: done(adapter, dead_lettered=1, failed=2, retried=1), "a dead letter")
            else:
                wait_for(lambda: done(adapter, delivered=1), "the record to be delivered")
            letters = [(each.origin, each.failures, each.error) for each in DeadLetters(SETTINGS, GROUP).waiting()]
            assert letters == ([("payments/0/0", 2, "ValueError: no price")] if fails else [])
        if not fails:
            (stored,) = [record for record in kafka.partition("orders").records.values() if record.value is not None]
            assert (stored.value, stored.key, stored.headers, stored.timestamp_ms) == (b"order", b"key", [("name", b"header")], 7)
        assert xa.log.recover() == []
    assert len(kafka.values("orders")) == (0 if fails else 1)
    assert in_flight() == []


def test_xa_connection_requires_transaction_of_manager_and_has_no_own_transactions(kafka: KafkaInMemory, tmp_path: Path) -> None:
    with transactions(tmp_path) as xa, closing(KafkaConnectionFactory(SETTINGS, transacted=XaSends(xa.manager, xa.kafka))) as factory:
        connection = factory.connection()
        with pytest.raises(NoTransaction):
            connection.send("orders", b"1")
        with pytest.raises(OutOfOrder, match="transactions of the transaction manager"), connection.transaction():
            pass
        connection.close()
        with pytest.raises(InvalidInput, match="resource 'kafka' does not belong to transaction manager 'shop'"):
            XaSends(xa.manager, KafkaResource("kafka", SETTINGS, prefix="xa", instance="other"))


def test_flush_of_plain_connection_waits_until_sends_are_stored(kafka: KafkaInMemory) -> None:
    with closing(KafkaConnectionFactory(SETTINGS)) as factory, factory.connection() as connection:
        connection.send("orders", b"1", b"key", headers=[("name", b"header")], timestamp_ms=7)
        connection.flush()
        (stored,) = kafka.partition("orders").records.values()
        assert (stored.value, stored.key, stored.headers, stored.timestamp_ms) == (b"1", b"key", [("name", b"header")], 7)
        assert len(factory.leases()) == 1
        with pytest.raises(OutOfOrder, match="have no transactions"), connection.transaction():
            pass


def test_jms_message_becomes_record_of_topic_for_its_destination(kafka: KafkaInMemory) -> None:
    before_ms = time.time_ns() // 1_000_000
    with closing(KafkaConnectionFactory(SETTINGS)) as factory, factory.connection() as connection:
        message_id = connection.jms().send(Queue("orders"), "text").message_id or ""
        connection.jms(key="property:number", topic="payments").producer(Topic("any")).send(Message("text", properties={"number": 7}))
    (order,), (payment,) = (kafka.partition(topic).records.values() for topic in ("orders", "payments"))
    assert (order.value, order.key) == (b"text", message_id.encode())
    assert before_ms <= order.timestamp_ms <= time.time_ns() // 1_000_000
    assert payment.key == b"7"


def test_inbound_log_is_trimmed_to_oldest_needed_entry(kafka: KafkaInMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_topic, "TRIM_RECORDS_MIN", 1)
    with closing(InboundLog("inbound", SETTINGS, group=GROUP)) as log:
        place = Place("payments", 0)
        partition = kafka.topics[log.topic].partitions[log_topic.partition_of(place)] if log.owner(place) is None else None
        assert partition is not None
        token = log.take(place, None)
        first, second = Ref(place, token, 1), Ref(place, token, 2)
        log.schedule([first, second])
        log.advance([Ref(place, token, 3)])
        log.housekeep()
        assert partition.first == 0
        assert log.flights(place).keys.keys() == {1, 2}
        successor = log.take(place, token)
        log.done(place, log.flights(place).keys[1], wait=True)
        log.housekeep()
        assert 0 < partition.first < partition.end
        flights = log.flights(place)
        assert (flights.keys.keys(), flights.read_to) == ({2}, 3)
        assert log.owner(place) == successor


def test_sends_in_local_kafka_transaction_are_visible_after_commit_only(kafka: KafkaInMemory) -> None:
    with closing(KafkaConnectionFactory(SETTINGS, transacted=KafkaTransactions("shop", instance="one"))) as factory:
        with factory.connection() as connection:
            with connection.transaction():
                connection.send("orders", b"1")
                assert kafka.values("orders") == []
            assert kafka.values("orders") == [b"1"]

            def fail() -> None:
                with connection.transaction():
                    connection.send("orders", b"2")
                    raise ValueError("undone")

            with pytest.raises(ValueError, match="undone"):
                fail()
            with pytest.raises(OutOfOrder, match="outside of a transaction"):
                connection.send("orders", b"3")
            with connection.transaction():
                connection.send("orders", b"4")
        assert kafka.values("orders") == [b"1", b"4"]
