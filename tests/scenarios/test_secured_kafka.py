"""Broker and pipelines on a Kafka with TLS and passwords."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bascule.embedded.process import NotStarted
from tests.scenarios.conftest import Connect
from tests.scenarios.secured import PASSWORD, USER, SecuredKafka
from tests.scenarios.topics import Reader, create, produce
from tests.support.system import System

pytestmark = pytest.mark.timeout(600)

PIPELINES = """
[pipelines]
master = "local[2]"
[[divert]]
name = "out"
from = "orders"
to = "secured.out"
start = "earliest"
[[ingress]]
name = "in"
topics = ["secured.in"]
to = "payments"
routing = "anycast"
unbound = "keep"
"""


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("secured") / "kafka") as running:
        yield running


def client(kafka: SecuredKafka, password: str) -> str:
    return f"""
[kafka.client]
"security.protocol" = "SASL_SSL"
"ssl.ca.location" = "{kafka.authority.certificate}"
"sasl.mechanism" = "PLAIN"
"sasl.username" = "{USER}"
"sasl.password" = "{password}"
"""


def test_broker_and_pipelines_carry_messages_both_ways_over_kafka_with_tls_and_passwords(
    connect_to: Connect, secured: SecuredKafka, tmp_path: Path
) -> None:
    create(secured.bootstrap, "secured.in", "secured.out")
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    config = client(secured, f"file:{tmp_path / 'password'}") + PIPELINES
    with System(secured.secured, tmp_path / "system", prefix="secured", config=config) as system:
        session = connect_to(system.url).session()
        session.producer("queue:orders").send("an order")
        produce(secured.bootstrap, "secured.in", ["a payment"])
        system.pipelines.start()
        with closing(Reader(secured.bootstrap, "secured.out")) as out:
            assert out.read_until("an order") == ["an order"]
        system.wait_depth("payments", 1)
        (payment,) = session.consumer("queue:payments").receive_many(1)
        assert payment.body == "a payment"
        said = system.pipelines.said() + system.broker.said()
        assert PASSWORD not in said


def test_wrong_kafka_password_is_reported_and_not_logged(secured: SecuredKafka, tmp_path: Path) -> None:
    system = System(secured.secured, tmp_path, prefix="wrong", config=client(secured, "wrong-password"))
    with pytest.raises(NotStarted) as told:
        system.broker.start()
    assert "uthentication" in str(told.value), told.value
    assert "wrong-password" not in system.broker.said()
