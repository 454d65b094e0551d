"""Endpoints in transactions on a real Kafka and broker, with a model of a database that fails on demand."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bascule.adapter.inbound import Activation, ActivationSpec, Backoff, InboundLog, Record, Xa
from bascule.client import Queue, connect
from bascule.core.errors import Unavailable
from bascule.embedded.kafka import EmbeddedKafka
from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.xa import TransactionManager
from bascule.xa.errors import ResourceFailed
from bascule.xa.jms import JmsResource
from bascule.xa.kafka import KafkaResource
from bascule.xa.resource import Resource
from tests.scenarios.adapter_topics import Watcher, create, produce
from tests.scenarios.inbound_endpoints import HANGS_S
from tests.support.system import PYTHON_FAILOVER, System, wait_for


class Shop:
    """A manager over a model of a database and a real Kafka. ``fail`` has the calls that fail, and how often."""

    def __init__(self, kafka: EmbeddedKafka, prefix: str, *more: Resource[Any]) -> None:
        create(kafka.bootstrap, prefix, f"{prefix}.receipts", partitions=1)
        settings = {"bootstrap.servers": kafka.bootstrap}
        self.settings, self.topic, self.receipts = settings, prefix, f"{prefix}.receipts"
        self.fail: dict[str, int] = {}
        self.rows = DurableBranches()
        self.database = ModelResource("db", self.rows, watch=self._watch)
        self.kafka = KafkaResource("kafka", settings, prefix=f"{prefix}.xa")
        self.log = InboundLog("inbound", settings, group=prefix)
        self.manager = TransactionManager("shop", ModelLog(watch=self._watch), [self.log, self.database, self.kafka, *more])

    def _watch(self, point: str) -> None:
        if self.fail.get(point, 0) > 0:
            self.fail[point] -= 1
            raise Unavailable("the log is away") if point.startswith("log.") else ResourceFailed("the database is away")

    def work(self, record: Record) -> None:
        self.manager.enlist(self.database).append((record.value or b"").decode())
        self.manager.enlist(self.kafka).send(self.receipts, record.value, record.key)

    @contextmanager
    def active(self, endpoint: Callable[[Record], None], **fields: Any) -> Iterator[Activation]:
        spec = ActivationSpec(
            **{"topics": (self.topic,), "group": self.topic, "backoff": Backoff(0.05, 2.0, 0.2), **fields},
            transacted=Xa(self.manager, self.log, self.kafka),
        )
        activation = Activation(self.settings, spec, endpoint)
        with self.manager:
            activation.start()
            try:
                yield activation
            finally:
                activation.stop(5.0)

    def done(self, *values: str) -> None:
        """Check that each record is in both places once, and that nothing is in flight."""
        wait_for(lambda: set(self.rows.committed) >= set(values), lambda: f"rows {values}; there are {self.rows.committed}", 90)
        wait_for(lambda: self.log.all_flights() == {}, "nothing in flight")
        watcher = Watcher(self.settings["bootstrap.servers"], self.receipts)
        assert Counter(watcher.wait(len(values))) == Counter(self.rows.committed) == Counter(values)
        watcher.close()


@pytest.fixture
def shop(kafka: EmbeddedKafka, topic_prefix: str) -> Iterator[Shop]:
    shop = Shop(kafka, topic_prefix)
    yield shop
    shop.log.close()
    shop.kafka.close()


@pytest.mark.slow
def test_late_work_of_a_hung_worker_has_no_effect(shop: Shop, kafka: EmbeddedKafka) -> None:
    go_on = threading.Event()

    def work(record: Record) -> None:
        shop.work(record)
        if record.failures == 0:
            go_on.wait(6 * HANGS_S)
            shop.work(record)

    with shop.active(work, workers=1, delivery_timeout_s=HANGS_S) as activation:
        produce(kafka.bootstrap, shop.topic, ["one"])
        wait_for(lambda: shop.rows.committed == ["one"], "the second try")
        assert activation.status().hanging != ()
        go_on.set()
        wait_for(lambda: not activation.status().hanging, "the late one to end")
        shop.done("one")
        assert activation.status().counts["hung"] == 1


def test_unavailable_resource_does_not_count_as_failure_of_the_record(shop: Shop, kafka: EmbeddedKafka) -> None:
    shop.fail = {"db.start.before": 2, "db.prepare.before": 1}
    with shop.active(shop.work, retries=0) as activation:
        produce(kafka.bootstrap, shop.topic, ["one"])
        shop.done("one")
        wait_for(lambda: activation.status().counts["delivered"], "the record to be counted")
        counts = activation.status().counts
    assert (counts["failed"], counts["dead_lettered"], counts["delivered"]) == (0, 0, 1)


@pytest.mark.slow
def test_broker_kill_during_handling_does_not_count_as_failure_of_the_record(
    kafka: EmbeddedKafka, topic_prefix: str, system: System
) -> None:
    queue, kills = Queue(topic_prefix), iter(range(2))
    asked, killed = threading.Semaphore(0), threading.Semaphore(0)
    broker = JmsResource("jms", PYTHON_FAILOVER.format(system.url))
    shop = Shop(kafka, topic_prefix, broker)

    def work(record: Record) -> None:
        shop.work(record)
        shop.manager.enlist(broker).send(queue, "receipt")
        if next(kills, None) is not None:
            asked.release()
            assert killed.acquire(timeout=60)

    with shop.active(work, retries=0) as activation, connect(PYTHON_FAILOVER.format(system.url)) as context:
        produce(kafka.bootstrap, shop.topic, ["one"])
        for _ in range(2):
            assert asked.acquire(timeout=60)
            system.broker.restart()  # not by the worker: the broker would end with that thread, and other tests need it
            killed.release()
        shop.done("one")
        wait_for(lambda: activation.status().counts["delivered"], "the record to be counted")
        counts = activation.status().counts
        assert [message.body for message in context.browse(queue)] == ["receipt"]
    assert (counts["failed"], counts["dead_lettered"], counts["delivered"]) == (0, 0, 1)
    for each in (shop.log, shop.kafka, broker):
        each.close()


@pytest.mark.parametrize("at", ["log.decide.before", "log.decide.after"])
def test_record_with_transaction_in_doubt_waits_for_the_outcome(shop: Shop, kafka: EmbeddedKafka, at: str) -> None:
    shop.fail = {at: 1}
    with shop.active(shop.work):
        produce(kafka.bootstrap, shop.topic, ["one"])
        wait_for(lambda: shop.fail[at] == 0, "the doubt")
        produce(kafka.bootstrap, shop.topic, ["two"])
        shop.done("one", "two")


def test_failed_record_is_written_to_retry_topic_once_per_failure_and_its_rows_roll_back(shop: Shop, kafka: EmbeddedKafka) -> None:
    def work(record: Record) -> None:
        shop.work(record)
        if record.failures < 2:
            raise ValueError("not yet")

    shop.fail = {"db.rollback.before": 1}
    with shop.active(work):
        produce(kafka.bootstrap, shop.topic, ["one"])
        shop.done("one")
    tries = Watcher(kafka.bootstrap, f"{shop.topic}.retry")
    tries.wait(2)
    assert [dict(each.headers())["bascule.retry.count"] for each in sorted(tries.records, key=lambda each: each.headers())] == [b"1", b"2"]
    tries.close()
