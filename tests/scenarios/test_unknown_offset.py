"""Kafka confirms a record without its offset, as it does for a repeated request after a change of leaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Message

from bascule.adapter.inbound import InboundLog
from bascule.adapter.inbound.state import Place, Ref
from bascule.client import Queue, connect
from bascule.core.errors import Unavailable
from bascule.core.kafka_records import Outgoing
from bascule.embedded.kafka import EmbeddedKafka
from bascule.kafka import clients
from bascule.kafka.appender import Appender, OffsetUnknown, await_stored
from bascule.kafka.log import APPEND_SETTINGS
from bascule.xa.kafka_log import KafkaLog
from bascule.xa.log import Decision, Outcome
from tests.scenarios.topics import Reader, create
from tests.support.client import all_in
from tests.support.kafka_proxy import Action, Api, KafkaProxy
from tests.support.system import PYTHON_FAILOVER, System, wait_for

PLACE = Place("payments", 0)


@pytest.fixture
def proxy(kafka: EmbeddedKafka) -> Iterator[KafkaProxy]:
    with KafkaProxy(kafka.port) as running:
        yield running


def test_librdkafka_reports_success_without_offset_and_continues(kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str) -> None:
    create(kafka.bootstrap, topic_prefix)
    producer = clients.producer({**APPEND_SETTINGS, "bootstrap.servers": proxy.bootstrap})
    offsets: list[int | None] = []

    def told(error: object, message: Message) -> None:
        assert error is None
        offsets.append(message.offset())

    for value in ("a", "b", "c"):
        if value == "b":
            lost = proxy.inject(Api.PRODUCE, Action.SEQUENCE_KNOWN, topic=topic_prefix)
        producer.produce(topic_prefix, value.encode(), partition=0, on_delivery=told)
        assert producer.flush(30) == 0
    assert lost.hit
    assert offsets == [0, None, 2]
    with closing(Reader(kafka.bootstrap, topic_prefix)) as reader:
        assert reader.read_until("c") == ["a", "b", "c"]


def test_appender_tells_unknown_offset_apart_from_failure(kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str) -> None:
    create(kafka.bootstrap, topic_prefix)
    with closing(Appender({"bootstrap.servers": proxy.bootstrap})) as appender:
        assert appender.append(Outgoing(topic_prefix, None, b"a")).result(30) == 0
        proxy.inject(Api.PRODUCE, Action.SEQUENCE_KNOWN, topic=topic_prefix)
        unknown = appender.append(Outgoing(topic_prefix, None, b"b"))
        await_stored(unknown, 30)
        assert isinstance(unknown.exception(), OffsetUnknown)
        assert appender.append(Outgoing(topic_prefix, None, b"c")).result(30) == 2


def test_first_decision_stands_though_its_offset_is_unknown(kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str) -> None:
    topic = f"{topic_prefix}.decisions"
    with (
        closing(KafkaLog({"bootstrap.servers": proxy.bootstrap}, topic=topic)) as first,
        closing(KafkaLog({"bootstrap.servers": kafka.bootstrap}, topic=topic)) as second,
    ):
        first.read()
        lost = proxy.inject(Api.PRODUCE, Action.SEQUENCE_KNOWN, topic=topic)
        assert first.decide(Decision(b"transaction", Outcome.COMMIT, ("db",), 0, "first")).by == "first"
        assert lost.hit
        assert second.decide(Decision(b"transaction", Outcome.ROLLBACK, ("db",), 0, "second")).by == "first"
        assert second.read().decisions[b"transaction"].outcome is Outcome.COMMIT


def test_record_scheduled_at_unknown_offset_is_in_flight(kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str) -> None:
    with closing(InboundLog("inbound", {"bootstrap.servers": proxy.bootstrap}, group=topic_prefix)) as log:
        token = log.take(PLACE, None)
        scheduling = proxy.inject(Api.PRODUCE, Action.SEQUENCE_KNOWN, topic=log.topic)
        log.schedule([Ref(PLACE, token, 7)])
        assert scheduling.hit
        assert set(log.flights(PLACE).keys) == {7}


def test_takeover_of_a_partition_at_unknown_offset_counts(kafka: EmbeddedKafka, proxy: KafkaProxy, topic_prefix: str) -> None:
    with closing(InboundLog("inbound", {"bootstrap.servers": proxy.bootstrap}, group=topic_prefix)) as log:
        before = log.take(PLACE, None)
        log.schedule([Ref(PLACE, before, 7)])
        taking = proxy.inject(Api.PRODUCE, Action.SEQUENCE_KNOWN, topic=log.topic)
        token = log.take(PLACE, before)
        assert taking.hit
        assert log.owner(PLACE) == token
        assert set(log.flights(PLACE).keys) == {7}
        taking = proxy.inject(Api.PRODUCE, Action.SEQUENCE_KNOWN, topic=log.topic)
        with pytest.raises(Unavailable, match="was taken over by another member"):
            log.take(PLACE, before)
        assert taking.hit
        assert log.owner(PLACE) == token


def test_broker_starts_new_epoch_after_journal_append_at_unknown_offset(kafka: EmbeddedKafka, tmp_path: Path, name: str) -> None:
    """Nothing is lost or duplicated, and no process restarts."""
    queue, bodies = Queue(name), [str(number) for number in range(40)]
    with (
        KafkaProxy(kafka.port) as proxy,
        System(proxy.bootstrap, tmp_path / "broker", prefix=name) as system,
        connect(PYTHON_FAILOVER.format(system.url), timeout_s=120.0) as context,
    ):
        producer = context.producer(queue)
        producer.send_many(bodies[:10])
        before, pid = system.status()["gauges"]["epoch"], system.broker.pid
        for start in (10, 20):
            lost = proxy.inject(Api.PRODUCE, Action.SEQUENCE_KNOWN, topic=f"{name}.journal")
            producer.send_many(bodies[start : start + 10])
            assert lost.hit
        wait_for(lambda: system.status()["serving"], "the broker to serve")
        assert system.status()["gauges"]["epoch"] > before
        assert system.broker.pid == pid
        producer.send_many(bodies[30:])
        assert all_in(context, queue, len(bodies)) == bodies
        wait_for(lambda: system.depth(name) == 0, "the acknowledgements")
