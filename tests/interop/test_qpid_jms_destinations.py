"""Queues, topics, subscriptions, browsers and temporary destinations, as a JMS client uses them."""

from __future__ import annotations

import pytest

from tests.interop.conftest import Connect
from tests.support.qpid import Consumer, JmsError, Producer
from tests.support.system import System, wait_for


def bodies(consumer: Consumer, count: int) -> list[str]:
    return [message.body for message in consumer.receive_all(count)]


# -- queues ------------------------------------------------------------------------------------------------------------


def test_each_message_of_a_queue_goes_to_one_of_the_competing_consumers(connect: Connect, system: System, queue: str) -> None:
    consumers = [connect(f"{system.url}?jms.prefetchPolicy.all=1").session().consumer(queue) for _ in range(3)]
    for consumer in consumers:
        consumer.listen()
    taken = _shared(connect().session().producer(queue), consumers)
    assert all(part == sorted(part, key=int) for part in taken)


def _shared(producer: Producer, consumers: list[Consumer]) -> list[list[str]]:
    """Send until each consumer has a message: on a busy machine the credit of a consumer may be late. Return the messages of each."""
    taken: list[list[str]] = [[] for _ in consumers]
    sent = 0

    def send_more() -> bool:
        nonlocal sent
        producer.send("{n}", count=20, first=sent)
        sent += 20
        _collect(consumers, taken)
        return all(taken)

    wait_for(send_more, "messages at each consumer")
    wait_for(lambda: _collect(consumers, taken) == sent, "all messages at the consumers")
    assert sorted(int(body) for part in taken for body in part) == list(range(sent))
    return taken


def _collect(consumers: list[Consumer], taken: list[list[str]]) -> int:
    for consumer, part in zip(consumers, taken, strict=True):
        part += [message.body for message in consumer.collect(0, 0)]
    return sum(map(len, taken))


def test_a_queue_keeps_the_order_of_its_producer(connect: Connect, queue: str) -> None:
    connection = connect()
    connection.session().producer(queue).send("{n}", count=300)
    assert bodies(connection.session().consumer(queue), 300) == [str(n) for n in range(300)]


def test_messages_of_higher_priority_overtake_messages_of_lower_priority(connect: Connect, queue: str) -> None:
    connection = connect()
    producer = connection.session().producer(queue)
    for priority in (4, 0, 9, 4, 9):
        producer.send(str(priority), priority=priority)
    assert bodies(connection.session().consumer(queue), 5) == ["9", "9", "4", "4", "0"]


def test_selector_takes_matching_messages_and_leaves_the_rest_in_order(connect: Connect, queue: str) -> None:
    connection = connect()
    connection.session().producer(queue).send("{n}", count=10, properties={"n": ["n", 0], "kind": "flight"})
    odd = connection.session().consumer(queue, selector="kind = 'flight' AND n BETWEEN 3 AND 5")
    assert bodies(odd, 3) == ["3", "4", "5"]
    assert bodies(connection.session().consumer(queue), 7) == ["0", "1", "2", "6", "7", "8", "9"]


def test_jms_browser_sees_all_messages_and_removes_none(connect: Connect, queue: str) -> None:
    connection = connect()
    connection.session().producer(queue).send("{n}", count=25, properties={"n": ["n", 0]})
    session = connection.session()
    assert [message.body for message in session.browse(queue)] == [str(n) for n in range(25)]
    assert [message.body for message in session.browse(queue, "n >= 23")] == ["23", "24"]
    assert bodies(connection.session().consumer(queue), 25) == [str(n) for n in range(25)]
    assert session.browse(queue) == []


def test_receive_no_wait_returns_at_once_with_or_without_a_message(connect: Connect, queue: str) -> None:
    connection = connect()
    consumer = connection.session().consumer(queue)
    assert consumer.receive_many(1, 0) == []
    connection.session().producer(queue).send("there")
    assert [message.body for message in consumer.receive_many(2, 0)] == ["there"]


def test_receive_no_wait_without_prefetch_drains_the_link(connect: Connect, system: System, queue: str) -> None:
    connection = connect(f"{system.url}?jms.prefetchPolicy.all=0")
    consumer = connection.session().consumer(queue)
    assert consumer.receive_many(1, 0) == []
    connection.session().producer(queue).send("{n}", count=2)
    assert [message.body for message in consumer.receive_many(3, 0)] == ["0", "1"]


def test_stopped_connection_delivers_nothing_until_started(connect: Connect, queue: str) -> None:
    stopped = connect(start=False)
    consumer = stopped.session().consumer(queue)
    connect().session().producer(queue).send("later")
    assert consumer.receive(0.3) is None
    stopped.start()
    assert bodies(consumer, 1) == ["later"]


# -- topics ------------------------------------------------------------------------------------------------------------


def test_topic_subscriber_gets_every_message_sent_after_its_subscription(connect: Connect, topic: str) -> None:
    connection = connect()
    producer = connection.session().producer(topic)
    producer.send("nobody listens")
    first, second = (connection.session().consumer(topic) for _ in range(2))
    producer.send("{n}", count=10)
    third = connection.session().consumer(topic, selector="n > 1")
    producer.send("last", properties={"n": 2})
    assert bodies(first, 11) == bodies(second, 11) == [*map(str, range(10)), "last"]
    assert bodies(third, 1) == ["last"]


def test_no_local_excludes_messages_of_the_own_connection(connect: Connect, topic: str) -> None:
    connection, other = connect(), connect()
    consumer = connection.session().consumer(topic, no_local=True)
    connection.session().producer(topic).send("own")
    other.session().producer(topic).send("other")
    assert bodies(consumer, 1) == ["other"]


def test_durable_subscription_keeps_messages_of_an_absent_client_until_unsubscribed(connect: Connect, topic: str, name: str) -> None:
    producer = connect().session().producer(topic)
    client = connect(client_id=name)
    client.session().consumer(topic, name="sub", durable=True).close()
    producer.send("{n}", count=3)
    client.close()
    producer.send("{n}", count=2, first=3)
    client = connect(client_id=name)
    session = client.session()
    consumer = session.consumer(topic, name="sub", durable=True)
    assert bodies(consumer, 5) == ["0", "1", "2", "3", "4"]
    with pytest.raises(JmsError):
        session.unsubscribe("sub")  # in use
    consumer.close()
    session.unsubscribe("sub")
    producer.send("nobody listens")
    assert session.consumer(topic, name="sub", durable=True).receive_many(1, 0) == []
    with pytest.raises(JmsError, match="InvalidDestinationException"):
        session.unsubscribe("never was")


def test_durable_subscription_with_a_changed_selector_starts_empty(connect: Connect, topic: str, name: str) -> None:
    producer = connect().session().producer(topic)
    session = connect(client_id=name).session()
    session.consumer(topic, name="sub", durable=True).close()
    producer.send("old")
    consumer = session.consumer(topic, name="sub", durable=True, selector="n = 1")
    producer.send("one", properties={"n": 1})
    producer.send("two", properties={"n": 2})
    assert bodies(consumer, 1) == ["one"]


def test_an_unshared_durable_subscription_has_one_consumer(connect: Connect, topic: str, name: str) -> None:
    connection = connect(client_id=name)
    connection.session().consumer(topic, name="sub", durable=True)
    with pytest.raises(JmsError):
        connection.session().consumer(topic, name="sub", durable=True)


@pytest.mark.parametrize("durable", [False, True])
def test_consumers_of_a_shared_subscription_share_its_messages(
    connect: Connect, system: System, topic: str, name: str, durable: bool
) -> None:
    connections = [connect(f"{system.url}?jms.prefetchPolicy.all=1") for _ in range(2)]  # without client id: shared by all
    consumers = [each.session().consumer(topic, name=name, shared=True, durable=durable) for each in connections]
    alone = connections[0].session().consumer(topic)
    for consumer in consumers:
        consumer.listen()
    sent = sum(map(len, _shared(connect().session().producer(topic), consumers)))
    assert bodies(alone, sent) == [str(n) for n in range(sent)]


def test_shared_durable_subscription_outlives_its_consumers_and_non_durable_does_not(connect: Connect, topic: str, name: str) -> None:
    connection = connect()
    session = connection.session()
    session.consumer(topic, name=f"{name}-durable", shared=True, durable=True).close()
    session.consumer(topic, name=f"{name}-volatile", shared=True).close()
    connection.session().producer(topic).send("meanwhile")
    assert session.consumer(topic, name=f"{name}-volatile", shared=True).receive_many(1, 0) == []
    durable = session.consumer(topic, name=f"{name}-durable", shared=True, durable=True)
    assert bodies(durable, 1) == ["meanwhile"]
    durable.close()
    session.unsubscribe(f"{name}-durable")


def test_queue_and_topic_of_the_same_name_are_separate(connect: Connect, name: str) -> None:
    connection = connect()
    on_queue, on_topic = (connection.session().consumer(f"{kind}:{name}") for kind in ("queue", "topic"))
    anonymous = connection.session().producer()
    anonymous.send("q", to=f"queue:{name}")
    anonymous.send("t", to=f"topic:{name}")
    assert bodies(on_queue, 1) == ["q"]
    assert bodies(on_topic, 1) == ["t"]


# -- temporary destinations --------------------------------------------------------------------------------------------


def test_a_request_is_answered_by_a_temporary_queue(connect: Connect, queue: str) -> None:
    client = connect().session()
    reply_to = client.temporary_queue()
    client.producer(queue).send("question", reply_to=reply_to.address, correlation_id="42")
    server = connect().session()
    request = server.consumer(queue).receive()
    assert request is not None
    assert request.reply_to == reply_to.address
    server.producer().send("answer", to=request.reply_to, correlation_id=request.correlation_id)
    answer = client.consumer(reply_to.address).receive()
    assert answer is not None
    assert (answer.body, answer.correlation_id) == ("answer", "42")


def test_a_temporary_topic_serves_its_connection(connect: Connect) -> None:
    connection = connect()
    session = connection.session()
    temporary = session.temporary_topic()
    consumer = session.consumer(temporary.address)
    connection.session().producer(temporary.address).send("news")
    assert bodies(consumer, 1) == ["news"]


def test_temporary_queue_with_messages_is_deleted_when_its_connection_closes(connect: Connect, system: System) -> None:
    owner = connect()
    address = owner.session().temporary_queue().address
    connect().session().producer().send("lost", to=address, persistent=False)
    queue = address.partition(":")[2]
    wait_for(lambda: system.queue(queue), "the temporary queue")
    owner.close()
    wait_for(lambda: system.queue(queue) is None, "the temporary queue's end")


# -- connections -------------------------------------------------------------------------------------------------------


def test_client_id_in_use_is_refused_until_its_connection_closes(connect: Connect, name: str) -> None:
    first = connect(client_id=name)
    with pytest.raises(JmsError, match="InvalidClientIDException"):
        connect(client_id=name)
    first.close()
    assert connect(client_id=name).client_id == name


def test_a_user_needs_the_right_password(connect: Connect, queue: str) -> None:
    connect(user="ann", password="hush").session().producer(queue).send("hello")
    for user, password in (("ann", "wrong"), ("bob", "hush")):
        with pytest.raises(JmsError, match="JMSSecurity"):
            connect(user=user, password=password)


def test_connection_metadata_has_jms_version_and_property_names(connect: Connect) -> None:
    said = connect().metadata()
    assert said["jms"].startswith("3.")
    assert "JMSXDeliveryCount" in said["jmsx"]
