"""Broker and pipelines on a Kafka with TLS, and passwords, tokens of a provider, or client certificates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from bascule.embedded.process import NotStarted
from tests.scenarios.conftest import Connect
from tests.scenarios.secured import PASSWORD, USER, SecuredKafka
from tests.scenarios.topics import Reader, create, produce
from tests.support.provider import TOKEN_PATH, Provider
from tests.support.system import System

pytestmark = pytest.mark.timeout(600)

#: Of the client at the provider.
SECRET = "whispered"
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
def provider() -> Iterator[Provider]:
    with Provider() as running:
        running.clients["bridge"] = SECRET
        yield running


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> Iterator[SecuredKafka]:
    with SecuredKafka(tmp_path_factory.mktemp("secured") / "kafka", provider) as running:
        running.add_scram_user()
        yield running


def client(kafka: SecuredKafka, password: str, mechanism: str = "PLAIN") -> str:
    return f"""
[kafka.client]
"security.protocol" = "SASL_SSL"
"ssl.ca.location" = "{kafka.authority.certificate}"
"sasl.mechanism" = "{mechanism}"
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


def with_tokens(kafka: SecuredKafka, provider: Provider, secret: str) -> str:
    return f"""
[kafka.client]
"security.protocol" = "SASL_SSL"
"ssl.ca.location" = "{kafka.authority.certificate}"
"sasl.mechanism" = "OAUTHBEARER"
"sasl.oauthbearer.method" = "oidc"
"sasl.oauthbearer.client.id" = "bridge"
"sasl.oauthbearer.client.secret" = "{secret}"
"sasl.oauthbearer.token.endpoint.url" = "{provider.issuer}{TOKEN_PATH}"
"""


def with_certificate(kafka: SecuredKafka) -> str:
    certificate = kafka.authority.issue("bridge")
    return f"""
[kafka.client]
"security.protocol" = "SSL"
"ssl.ca.location" = "{kafka.authority.certificate}"
"ssl.certificate.location" = "{certificate.certificate}"
"ssl.key.location" = "{certificate.key}"
"""


def check_transformation(connect_to: Connect, system: System, bootstrap: str, topic: str) -> None:
    """Send a message, and read it transformed from the topic. Broker and driver use librdkafka, and Spark uses Kafka's Java client."""
    connect_to(system.url).session().producer("queue:orders").send("an order")
    system.pipelines.start()
    with closing(Reader(bootstrap, topic)) as out:
        assert out.read_until("AN ORDER") == ["AN ORDER"]


def transforming(topic: str) -> str:
    return f"""
[pipelines]
master = "local[2]"
[[divert]]
name = "out"
from = "orders"
to = "{topic}"
start = "earliest"
select = ["upper(text) AS value"]
"""


def test_broker_and_transformation_log_in_to_kafka_with_tokens_of_a_provider(
    connect_to: Connect, secured: SecuredKafka, provider: Provider, tmp_path: Path
) -> None:
    create(secured.bootstrap, "tokens.out")
    (tmp_path / "secret").write_text(f"{SECRET}\n")
    config = with_tokens(secured, provider, f"file:{tmp_path / 'secret'}") + transforming("tokens.out")
    with System(secured.secured, tmp_path / "system", prefix="tokens", config=config) as system:
        check_transformation(connect_to, system, secured.bootstrap, "tokens.out")
        assert TOKEN_PATH in provider.requests
        assert SECRET not in system.pipelines.said() + system.broker.said()


@pytest.mark.parametrize("transformed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("way", ["scram-sha-512", "certificate"])
def test_broker_and_transformation_log_in_to_kafka_by_scram_or_certificate(
    way: str, transformed: bool, connect_to: Connect, secured: SecuredKafka, tmp_path: Path
) -> None:
    if way == "certificate":
        config, bootstrap = with_certificate(secured), secured.mutual
    else:
        config, bootstrap = client(secured, PASSWORD, "SCRAM-SHA-512"), secured.secured
    prefix = f"{way}-{transformed}"
    create(secured.bootstrap, f"{prefix}.out")
    config += transforming(f"{prefix}.out") if transformed else ""
    with System(bootstrap, tmp_path / "system", prefix=prefix, config=config) as system:
        if transformed:
            check_transformation(connect_to, system, secured.bootstrap, f"{prefix}.out")
        else:
            session = connect_to(system.url).session()
            session.producer("queue:orders").send("an order")
            (order,) = session.consumer("queue:orders").receive_many(1)
            assert order.body == "an order"


def test_wrong_secret_of_the_provider_is_reported_and_not_logged(secured: SecuredKafka, provider: Provider, tmp_path: Path) -> None:
    system = System(secured.secured, tmp_path, prefix="wrong-secret", config=with_tokens(secured, provider, "wrong-secret"))
    with pytest.raises(NotStarted) as told:
        system.broker.start()
    assert "invalid_client" in str(told.value), told.value
    assert "wrong-secret" not in system.broker.said().replace("wrong-secret.", "")


def test_wrong_kafka_password_is_reported_and_not_logged(secured: SecuredKafka, tmp_path: Path) -> None:
    system = System(secured.secured, tmp_path, prefix="wrong", config=client(secured, "wrong-password"))
    with pytest.raises(NotStarted) as told:
        system.broker.start()
    assert "uthentication" in str(told.value), told.value
    assert "wrong-password" not in system.broker.said()
