"""Kafka in a JTA transaction: a message sent to the address of an exclusive divert becomes one Kafka record or none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bascule.client import Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from tests.scenarios.jta_shop import COMMITTED, MANAGER_PARAMS, OUTCOMES, ROLLED_BACK, Shop
from tests.scenarios.topics import Reader, create
from tests.support.postgres import temporary_postgres
from tests.support.system import System

PREFIX = "java-xa-kafka"
TOPIC = f"{PREFIX}.bills"
CONFIG = f"""
[pipelines]
master = "local[2]"

[[divert]]
name = "bills"
from = "*.bills"
to = "{TOPIC}"
exclusive = true
"""
#: How the application is killed, and the outcome of its transaction.
KILLS = {"jms.prepare.after": ROLLED_BACK, "jms.commit.before": COMMITTED, "jms.commit.after": COMMITTED}

pytestmark = pytest.mark.timeout(280)


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[EmbeddedPostgres]:
    with temporary_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def bridge(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    create(kafka.bootstrap, TOPIC)
    with System(kafka.bootstrap, tmp_path_factory.mktemp("java"), prefix=PREFIX, config=CONFIG) as running:
        running.pipelines.start()
        yield running


@pytest.mark.parametrize("manager", MANAGER_PARAMS)
def test_message_to_an_exclusive_divert_is_one_kafka_record_if_the_transaction_commits(
    manager: str, bridge: System, own_postgres: EmbeddedPostgres, tmp_path: Path, name: str
) -> None:
    shop = Shop(manager, bridge, own_postgres, tmp_path, name)
    paid, failed, killed = shop.order(), shop.order(), {point: shop.order() for point in KILLS}
    assert shop.run("pay", paid) == COMMITTED
    assert shop.run("fail", failed) == ROLLED_BACK
    for point, order in killed.items():
        shop.kill("pay", order, point)
    # Resources commit in the order of their enlistment: the row is there before the record.
    assert shop.outcome(killed["jms.commit.before"])[1] == 1
    bridge.broker.restart()
    shop.recover()
    outcomes = {paid: COMMITTED, failed: ROLLED_BACK, **{order: KILLS[point] for point, order in killed.items()}}
    # No bill waits in its queue: the divert is exclusive.
    assert {order: shop.outcome(order)[:2] for order in outcomes} == {order: OUTCOMES[end][:2] for order, end in outcomes.items()}
    assert [bridge.depth(f"{order}.bills") for order in outcomes] == [0] * len(outcomes)
    with connect(bridge.url) as context:
        context.send(Queue("last.bills"), name)
    reader = Reader(bridge.bootstrap, TOPIC)
    bills = [bill for bill in reader.read_until(name) if bill in outcomes]
    reader.close()
    assert sorted(bills) == sorted(order for order, end in outcomes.items() if end == COMMITTED)
