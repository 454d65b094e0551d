"""Endpoints that receive and send over JMS in their transactions, on a real Kafka, broker and PostgreSQL."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from bascule.adapter.inbound import Record
from bascule.adapter.outbound import JmsConnectionFactory
from bascule.client import Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.xa.jms import JmsResource
from tests.scenarios.adapter_topics import produce
from tests.scenarios.test_adapter_kills import Group
from tests.scenarios.test_adapter_xa import Shop
from tests.support.client import SOON_S
from tests.support.system import PYTHON_FAILOVER, System, wait_for

#: Points between the first prepare and the last commit of the branches: inbound log, database, Kafka and broker.
PREPARED = [
    *(f"xa.prepare.after:{branch}" for branch in (1, 2, 3, 4)),
    "xa.decide.before:1",
    "xa.decide.after:1",
    *(f"xa.finish.after:{branch}" for branch in (1, 2, 3)),
]
#: The points of the default suite: the broker's branch is the last to be prepared and the last to be committed.
SHORT = ["xa.prepare.after:4", "xa.decide.after:1", "xa.finish.after:2"]


def bodies(url: str, queue: Queue) -> list[object]:
    with connect(url) as context:
        return [message.body for message in context.browse(queue)]


def test_endpoint_commits_received_message_row_record_and_sent_message_in_one_transaction(
    kafka: EmbeddedKafka, topic_prefix: str, system: System
) -> None:
    url = PYTHON_FAILOVER.format(system.url)
    vouchers, bills = Queue(f"{topic_prefix}.vouchers"), Queue(f"{topic_prefix}.bills")
    broker = JmsResource("jms", url, timeout_s=SOON_S)
    shop = Shop(kafka, topic_prefix, broker)
    factory = JmsConnectionFactory(broker, shop.manager)
    seen: list[tuple[object, bool]] = []

    def work(record: Record) -> None:
        shop.work(record)
        with factory.connect() as context:
            voucher = context.consumer(vouchers).receive(SOON_S)
            assert voucher is not None
            seen.append((voucher.body, voucher.redelivered))
            context.send(bills, f"bill of {(record.value or b'').decode()}")
        if record.failures == 0:
            raise ValueError("not yet")

    with closing(factory), connect(url) as context:
        context.send(vouchers, "voucher")
        with shop.active(work):
            produce(kafka.bootstrap, shop.topic, ["one"])
            shop.done("one")
    assert seen == [("voucher", False), ("voucher", True)]
    assert (bodies(url, vouchers), bodies(url, bills)) == ([], ["bill of one"])
    for each in (shop.log, shop.kafka, broker):
        each.close()


class Billing:
    """A group whose members receive a voucher and send a bill for each record."""

    def __init__(self, group: Group, url: str) -> None:
        self.group, self._url = group, url

    def send(self, count: int) -> None:
        """Produce records, and send a voucher for each."""
        with connect(self._url) as context:
            context.producer(self.group.where.vouchers).send_many(["voucher"] * count)
        self.group.send(*["plain"] * count)

    def check(self) -> None:
        """Check that each record has one row, one receipt and one bill, and has used one voucher."""
        self.group.await_handled()
        self.group.check()
        wait_for(lambda: len(bodies(self._url, self.group.where.bills)) >= len(self.group.sent), "the bills")
        assert Counter(bodies(self._url, self.group.where.bills)) == Counter(self.group.sent)
        assert bodies(self._url, self.group.where.vouchers) == []


@pytest.fixture
def billing(kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path, system: System) -> Iterator[Billing]:
    url = PYTHON_FAILOVER.format(system.url)
    group = Group(kafka, postgres, topic_prefix, tmp_path, url)
    group.where = replace(group.where, workers=1)
    yield Billing(group, url)
    group.close()


def kill_at(billing: Billing, points: list[str]) -> None:
    for point in points:
        billing.send(2)
        assert billing.group.start(armed=point).ended() == -signal.SIGKILL, point
    billing.send(1)
    billing.group.start()
    billing.check()


@pytest.mark.slow
def test_member_kill_at_selected_commit_points_keeps_messages_rows_and_records_exactly_once(billing: Billing) -> None:
    kill_at(billing, SHORT)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_member_kill_at_every_commit_point_keeps_messages_rows_and_records_exactly_once(billing: Billing) -> None:
    kill_at(billing, PREPARED)
