"""Actions of an administrator on a running broker, and settings of addresses, as a JMS client sees them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bascule.core.errors import InvalidInput
from bascule.embedded.kafka import EmbeddedKafka
from tests.interop.conftest import Connect
from tests.support.qpid import JmsError
from tests.support.system import System, wait_for

#: Time for a message of 60 MiB, on a busy machine.
SEND_S = 200.0
CONFIG = """
    [journal]
    append_timeout_s = 60  # for the one message of 60 MiB, on a busy machine

    [[address]]
    match = "admin.#"
    max_delivery_attempts = 2

    [[address]]
    match = "admin.small"
    max_messages = 3
    when_full = "reject"

    [[address]]
    match = "admin.known.#"
    auto_create = false

    [[queue]]
    name = "admin.known.queue"

    [[topic]]
    name = "admin.known.topic"
"""


@pytest.fixture(scope="module")
def broker(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("administered"), prefix="administered", config=CONFIG) as running:
        yield running


def test_purge_removes_only_messages_that_match_the_selector(broker: System, connect_to: Connect, name: str) -> None:
    producer = connect_to(broker.url).session().producer(f"queue:{name}")
    producer.send("{n}", count=10, properties={"n": ["n", 0]})
    assert broker.act("queues/purge", name=name, selector="n >= 3") == {"purged": 7}
    assert broker.depth(name) == 3
    broker.broker.restart()
    assert broker.depth(name) == 3
    assert broker.act("queues/purge", name=name) == {"purged": 3}


def test_moved_messages_stay_moved_after_broker_restart(broker: System, connect_to: Connect, name: str) -> None:
    connect_to(broker.url).session().producer(f"queue:{name}").send("{n}", count=2500)
    assert broker.act("queues/move", name=name, to=f"{name}.2") == {"moved": 2500, "left": {}}
    broker.broker.restart()
    assert (broker.depth(name), broker.depth(f"{name}.2")) == (0, 2500)
    consumer = connect_to(broker.url).session().consumer(f"queue:{name}.2")
    assert [message.body for message in consumer.receive_many(2500, 20)] == [str(n) for n in range(2500)]


def test_dead_letter_names_its_origin_and_can_be_returned(broker: System, connect_to: Connect, name: str) -> None:
    queue = f"admin.{name}"
    connection = connect_to(broker.url)
    connection.session().producer(f"queue:{queue}").send("poison", properties={"case": name})
    session = connection.session("TRANSACTED")
    consumer = session.consumer(f"queue:{queue}")
    for _ in range(2):
        assert consumer.receive().body == "poison"
        session.rollback()
    (letter,) = wait_for(lambda: [each for each in broker.ask("dead-letters") if each["queue"] == queue], "the dead letter")
    assert (letter["address"], letter["routing"], letter["reason"], letter["deliveries"]) == (queue, "anycast", "delivery-attempts", 2)
    assert broker.act("dead-letters/return", selector=f"case = '{name}'") == {"returned": 1, "left": {}}
    again = consumer.receive()
    assert (again.body, again.redelivered, again.properties["case"]) == ("poison", False, name)
    session.commit()
    assert broker.depth("DLQ") == 0


def test_full_queue_refuses_sends_until_there_is_room(broker: System, connect_to: Connect) -> None:
    connection = connect_to(broker.url)
    producer = connection.session().producer("queue:admin.small")
    producer.send("{n}", count=3)
    with pytest.raises(JmsError, match="ResourceAllocation"):
        producer.send("too many")
    assert broker.ask("queues", name="admin.small")["full"] is True
    connection.session().consumer("queue:admin.small").receive()
    wait_for(lambda: broker.depth("admin.small") == 2, "room")
    producer.send("fits")


def test_unknown_destination_is_refused_where_automatic_creation_is_off(broker: System, connect_to: Connect) -> None:
    session = connect_to(broker.url).session()
    session.producer("queue:admin.known.queue").send("a")
    session.producer("topic:admin.known.topic").send("a")
    for destination in ("queue:admin.known.other", "topic:admin.known.other"):
        with pytest.raises(JmsError, match="InvalidDestination"):
            session.producer(destination).send("a")
    broker.act("queues/create", name="admin.known.other")
    session.producer("queue:admin.known.other").send("a")


def test_administrator_deletes_a_queue_with_messages_only_by_force(broker: System, connect_to: Connect, name: str) -> None:
    connect_to(broker.url).session().producer(f"queue:{name}").send("a")
    with pytest.raises(InvalidInput, match="has 1 messages"):
        broker.act("queues/delete", name=name)
    assert broker.act("queues/delete", name=name, force=True) == {"deleted": name, "messages": 1}
    assert broker.queue(name) is None
    with pytest.raises(InvalidInput, match="there is no queue"):
        broker.act("queues/purge", name=name)


def test_a_subscription_is_listed_and_deleted(broker: System, connect_to: Connect, name: str) -> None:
    connection = connect_to(broker.url, client_id=name)
    connection.session().consumer(f"topic:{name}", name="sub", durable=True).close()
    connection.session().producer(f"topic:{name}").send("a")
    (subscription,) = [each for each in broker.ask("subscriptions") if each["topic"] == name]
    queue = name.replace(".", r"\.") + ".sub"  # the broker must distinguish the dots of the client id from those of the subscription
    assert (subscription["name"], subscription["durable"], subscription["messages"]) == (queue, True, 1)
    assert broker.act("subscriptions/delete", name=queue) == {"deleted": queue, "messages": 1}
    assert [each for each in broker.ask("subscriptions") if each["topic"] == name] == []


def test_connection_is_listed_and_closed_and_its_client_reconnects(broker: System, connect_to: Connect, name: str) -> None:
    connection = connect_to(broker.failover_url, client_id=name)
    consumer = connection.session().consumer(f"queue:{name}")
    (client,) = [each for each in broker.ask("connections") if each["client_id"] == name]
    assert (client["user"], client["consumers"]) == ("anonymous", 1)
    assert broker.act("connections/close", id=client["id"]) == {"closed": 1}

    def others() -> list[str]:
        return [each["id"] for each in broker.ask("connections") if each["client_id"] == name and each["id"] != client["id"]]

    wait_for(others, "the client's return")
    connection.session().producer(f"queue:{name}").send("a")
    assert consumer.receive().body == "a"


def test_counters_count_messages_and_transactions(broker: System, connect_to: Connect, name: str) -> None:
    before = broker.status()["counters"]
    session = connect_to(broker.url).session("TRANSACTED")
    session.producer(f"queue:{name}").send("{n}", count=5)
    session.commit()
    consumer = session.consumer(f"queue:{name}")
    consumer.receive()
    session.rollback()

    def grown() -> dict[str, int]:
        return {key: value - before[key] for key, value in broker.status()["counters"].items() if key in before}

    wait_for(lambda: grown()["messages_out"] >= 5, "all messages to be delivered")  # the client asks for as many as there are
    assert grown()["messages_in"] == 5
    assert (grown()["transactions_committed"], grown()["transactions_rolled_back"]) == (1, 1)


def test_message_of_60_mib_is_accepted_and_message_of_64_mib_is_refused(broker: System, connect_to: Connect, name: str) -> None:
    session = connect_to(broker.url).session()
    body = "x" * (60 << 20)
    session.producer(f"queue:{name}").send(body, timeout_s=SEND_S)
    assert session.consumer(f"queue:{name}").receive(SEND_S).body == body
    with pytest.raises(JmsError):
        session.producer(f"queue:{name}").send(body + "y" * (4 << 20), timeout_s=SEND_S)
