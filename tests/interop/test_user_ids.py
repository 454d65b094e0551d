"""JMSXUserID with the Java client and the Python client: set by the broker, or required of the client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bascule.client import Queue, connect
from bascule.client.errors import MessageRefused
from bascule.embedded.kafka import EmbeddedKafka
from tests.interop.conftest import Connect
from tests.support.qpid import JmsError
from tests.support.system import System

NAMED = "?jms.populateJMSXUserID=true"


def broker(mode: str, kafka: EmbeddedKafka, factory: pytest.TempPathFactory) -> System:
    config = f"""
        [broker]
        users = {{ ann = "hush" }}
        validated_user = "{mode}"
    """
    return System(kafka.bootstrap, factory.mktemp(mode), prefix=f"user-id-{mode}", config=config)


@pytest.fixture(scope="module")
def sets(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with broker("set", kafka, tmp_path_factory) as running:
        yield running


@pytest.fixture(scope="module")
def requires(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with broker("require", kafka, tmp_path_factory) as running:
        yield running


def users_in(system: System, queue: str, count: int) -> list[str | None]:
    with connect(system.url, user="ann", password="hush") as context:
        consumer = context.consumer(Queue(queue))
        return [message.user_id for message in (consumer.receive(30) for _ in range(count)) if message is not None]


@pytest.mark.parametrize("options", ["", NAMED])
def test_broker_sets_the_user_of_the_login(options: str, sets: System, connect_to: Connect, name: str) -> None:
    java = connect_to(f"{sets.url}{options}", user="ann", password="hush").session()
    java.producer(f"queue:{name}").send("of Java")
    with connect(f"{sets.url}{options}", user="ann", password="hush") as context:
        context.send(Queue(name), "of Python")
        with context.transaction():
            context.send(Queue(name), "in a transaction")
    assert users_in(sets, name, 3) == ["ann"] * 3


def test_clients_that_name_their_user_meet_the_requirement(requires: System, connect_to: Connect, name: str) -> None:
    connect_to(f"{requires.url}{NAMED}", user="ann", password="hush").session().producer(f"queue:{name}").send("of Java")
    with connect(f"{requires.url}{NAMED}", user="ann", password="hush") as context:
        sent = context.send(Queue(name), "of Python")
        assert sent.user_id == "ann"
        received = context.consumer(Queue(name)).receive(30)
        assert received is not None
        received.user_id = "mallory"
        context.send(Queue(name), received)
    assert users_in(requires, name, 2) == ["ann"] * 2


def test_clients_that_do_not_name_their_user_are_refused(requires: System, connect_to: Connect, name: str) -> None:
    java = connect_to(requires.url, user="ann", password="hush").session()
    with pytest.raises(JmsError, match="JMSSecurity"):
        java.producer(f"queue:{name}").send("of Java")
    with connect(requires.url, user="ann", password="hush") as context, pytest.raises(MessageRefused, match="names no user"):
        context.send(Queue(name), "of Python")
