"""Permissions of roles, with the Java client and the Python client: a refusal is a security exception."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from bascule.client import Queue, connect
from bascule.core.errors import BasculeError
from bascule.embedded.kafka import EmbeddedKafka
from tests.interop.conftest import Connect
from tests.interop.exchanges import security_refusal
from tests.support.qpid import JmsError, Session
from tests.support.system import System

CONFIG = """
[broker]
users = { ann = "a", bob = "b" }
allow_anonymous = true

[broker.roles]
sales = ["ann"]
shipping = ["bob"]
guests = ["anonymous"]

[[permission]]
match = "orders.#"
send = ["sales"]
consume = ["shipping"]
browse = ["sales", "shipping"]
createAddress = ["sales"]
createDurableQueue = ["sales"]

[[permission]]
match = "news"
send = ["sales"]
consume = ["*"]
createAddress = ["*"]
createDurableQueue = ["*"]
deleteDurableQueue = ["*"]
createNonDurableQueue = ["sales"]

[[permission]]
match = "open"
send = ["guests"]
consume = ["guests"]
createAddress = ["guests"]
createDurableQueue = ["guests"]

[[limit]]
roles = ["guests"]
max_connections = 1
max_messages_per_s = 50
"""
RATE_SLICE = 5  # messages that a guest may send at once


@pytest.fixture(scope="module")
def guarded(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("guarded"), prefix="guarded", config=CONFIG) as running:
        yield running


def test_roles_decide_who_may_send_consume_and_browse(guarded: System, connect_to: Connect) -> None:
    ann, bob = (connect_to(guarded.url, user=user, password=user[0]).session() for user in ("ann", "bob"))
    ann.producer("queue:orders.eu").send("first")
    assert [message.body for message in ann.browse("queue:orders.eu")] == ["first"]
    assert bob.consumer("queue:orders.eu").receive().body == "first"


@pytest.mark.parametrize(
    ("user", "does", "missing"),
    [
        ("ann", lambda session: session.consumer("queue:orders.us"), "'consume' on address 'orders.us'"),
        ("bob", lambda session: session.producer("queue:orders.us"), "'send' on address 'orders.us'"),
        ("bob", lambda session: session.producer().send("x", to="queue:orders.us"), "'send' on address 'orders.us'"),
        ("bob", lambda session: session.consumer("queue:orders.new"), "'createAddress' on address 'orders.new'"),
        ("ann", lambda session: session.producer("queue:stock"), "'send' on address 'stock'"),
        ("bob", lambda session: session.consumer("topic:news"), "'createNonDurableQueue' on address 'news'"),
        ("ann", lambda session: session.temporary_queue(), "'createAddress' on address"),
        ("ann", lambda session: session.producer("queue:open"), "'send' on address 'open'"),
    ],
)
def test_operation_without_permission_raises_a_security_exception_that_names_it(
    user: str, does: Callable[[Session], object], missing: str, guarded: System, connect_to: Connect
) -> None:
    session = connect_to(guarded.url, user=user, password=user[0]).session()
    assert f"user '{user}' has no permission {missing}" in security_refusal(does, session)


def test_client_without_a_login_has_the_roles_of_user_anonymous(guarded: System, connect_to: Connect) -> None:
    session = connect_to(guarded.url).session()
    session.producer("queue:open").send("hello")
    assert session.consumer("queue:open").receive().body == "hello"
    with pytest.raises(JmsError, match="JMSSecurity"):
        session.producer("queue:orders.eu")


def test_durable_subscription_is_refused_to_another_user_with_the_same_client_id(guarded: System, connect_to: Connect) -> None:
    url = f"{guarded.url}?jms.clientID=shared-desk"
    first = connect_to(url, user="ann", password="a")
    first.session().consumer("topic:news", name="desk", durable=True).close()
    first.close()
    with pytest.raises(JmsError, match="JMSSecurity"):
        connect_to(url, user="bob", password="b")
    session = connect_to(url, user="ann", password="a").session()
    session.producer("topic:news").send("for ann")
    assert session.consumer("topic:news", name="desk", durable=True).receive().body == "for ann"


def test_python_client_gets_an_error_that_names_the_permission(guarded: System) -> None:
    with (
        connect(guarded.url, user="bob", password="b") as context,
        pytest.raises(BasculeError, match=r"user 'bob' has no permission 'send' on address 'orders\.eu'"),
    ):
        context.send(Queue("orders.eu"), "x")


def test_connection_beyond_the_limit_of_a_role_is_refused_with_the_name_of_the_table(guarded: System, connect_to: Connect) -> None:
    with (
        connect(guarded.url),
        pytest.raises(JmsError, match=r"the limit of 1 connections .* \(max_connections in \[\[limit\]\] of role 'guests'\)"),
    ):
        connect_to(guarded.url)


def test_producer_faster_than_its_users_rate_waits_and_loses_nothing(guarded: System, connect_to: Connect) -> None:
    connection = connect_to(guarded.url)
    session = connection.session()
    consumer, producer = session.consumer("queue:open"), session.producer("queue:open")
    sent = [str(number) for number in range(3 * RATE_SLICE)]
    for body in sent:
        producer.send(body)
    assert [consumer.receive().body for _ in sent] == sent
    connection.close()
