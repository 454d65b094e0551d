"""The broker dies by kill -9 and restarts: everything that it has confirmed is there, once."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from bascule.client import Queue, connect
from tests.scenarios.conftest import Connect
from tests.support.proxy import Proxy
from tests.support.qpid import JmsError, Mode
from tests.support.system import PYTHON_FAILOVER, WAIT_S, System, failover, paused, wait_for


def stored(connect_to: Connect, system: System) -> None:
    """Return when all decisions of the broker are in Kafka.

    No answer confirms that an acknowledgement is stored, so send a message after it, whose confirmation does.
    """
    connect_to(system.url).session().producer("queue:behind.all").send("stored")


def test_queued_messages_survive_broker_kill_in_order_without_redelivered_flag(connect_to: Connect, system: System, queue: str) -> None:
    connect_to(system.url).session().producer(queue).send("{n}", count=500)
    system.broker.restart()
    messages = connect_to(system.url).session().consumer(queue).receive_many(500)
    assert [message.body for message in messages] == [str(n) for n in range(500)]
    assert not any(message.redelivered for message in messages)


def test_broker_kill_loses_non_persistent_messages_only(connect_to: Connect, system: System, queue: str) -> None:
    producer = connect_to(system.url).session().producer(queue)
    producer.send("maybe", persistent=False)
    producer.send("surely")
    system.broker.restart()
    messages = connect_to(system.url).session().consumer(queue).receive_all(1)
    assert [message.body for message in messages] == ["surely"]


def test_non_persistent_message_is_delivered_once_when_connection_or_broker_fails(
    connect_to: Connect, system: System, name: str, queue: str
) -> None:
    destination, bodies = Queue(name), [str(n) for n in range(10)]
    with Proxy(system.port) as proxy:
        with connect(PYTHON_FAILOVER.format(proxy.url)) as context:
            producer = context.producer(destination, persistent=False)
            producer.send_many(bodies[:5])
            proxy.hold_answers()
            with ThreadPoolExecutor(1) as sending:
                unanswered = sending.submit(producer.send_many, bodies[5:])
                system.wait_depth(name, 10)
                proxy.cut()  # they are sent again
                unanswered.result(WAIT_S)
        system.wait_depth(name, 10)
        received = connect_to(proxy.url).session().consumer(queue).receive_many(10)
        assert [message.body for message in received] == bodies
        system.wait_depth(name, 0)
        proxy.cut()
    for _ in range(2):
        assert connect_to(system.url).session().consumer(queue).receive_many(1, 0.5) == []
        system.broker.restart()


@pytest.mark.parametrize("mode", ["AUTO", "CLIENT", "DUPS_OK", "INDIVIDUAL"])
def test_broker_kill_redelivers_unacknowledged_messages_marked_and_no_acknowledged_message(
    connect_to: Connect, system: System, name: str, queue: str, mode: Mode
) -> None:
    connect_to(system.url).session().producer(queue).send("{n}", count=30)
    session = connect_to(system.url).session(mode)
    consumer = session.consumer(queue)
    messages = consumer.receive_many(10)
    if mode in ("CLIENT", "INDIVIDUAL"):
        for message in messages[::2] if mode == "INDIVIDUAL" else messages[-1:]:
            session.acknowledge(message)
    left = [*range(1, 10, 2), *range(10, 30)] if mode == "INDIVIDUAL" else [*range(10, 30)]
    system.wait_depth(name, len(left))
    stored(connect_to, system)
    with paused(system.broker.pid):
        # The client has the messages, and the broker never reads their acknowledgements.
        assert len(consumer.receive_many(5)) == 5
        os.kill(system.broker.pid, signal.SIGKILL)
    system.broker.restart()
    again = connect_to(system.url).session().consumer(queue).receive_many(len(left) + 1, 0.5)
    assert [int(message.body) for message in again] == left
    assert all(message.redelivered and message.delivery_count == 2 for message in again)


def test_delivery_counts_survive_broker_restart(connect_to: Connect, system: System, queue: str) -> None:
    connection = connect_to(system.url)
    connection.session().producer(queue).send("job")
    session = connection.session("TRANSACTED")
    consumer = session.consumer(queue)
    for _ in range(3):
        assert consumer.receive() is not None
        session.rollback()
    connection.close()
    stored(connect_to, system)
    system.broker.restart()
    message = connect_to(system.url).session().consumer(queue).receive()
    assert message is not None
    assert message.delivery_count >= 4


def test_broker_kill_rolls_back_open_transaction_and_keeps_committed_transaction(connect_to: Connect, system: System, name: str) -> None:
    connection = connect_to(system.url)
    for ending in ("committed", "open"):
        connection.session().producer(f"queue:{name}.in").send(ending)
    session = connection.session("TRANSACTED")
    consumer, producer = session.consumer(f"queue:{name}.in"), session.producer()
    assert consumer.receive() is not None
    producer.send("{n}", to=f"queue:{name}.out", count=5)
    session.commit()
    assert consumer.receive() is not None
    producer.send("{n}", to=f"queue:{name}.out", count=5, first=5)
    system.broker.restart()
    reader = connect_to(system.url).session()
    left = reader.consumer(f"queue:{name}.in").receive_all(1)
    assert [(message.body, message.redelivered) for message in left] == [("open", True)]
    moved = reader.consumer(f"queue:{name}.out").receive_all(5)
    assert [message.body for message in moved] == ["0", "1", "2", "3", "4"]


def test_durable_subscriptions_survive_broker_kill_and_other_subscriptions_end(
    connect_to: Connect, system: System, topic: str, name: str
) -> None:
    subscriber = connect_to(system.url, client_id=name)
    session = subscriber.session()
    session.consumer(topic, name="own", durable=True).close()
    session.consumer(topic, name=f"{name}-shared", durable=True, shared=True).close()
    session.consumer(topic)
    connect_to(system.url).session().producer(topic).send("before")
    system.broker.restart()
    assert len([queue for queue in system.status()["queues"] if queue["address"] == name]) == 2
    connect_to(system.url).session().producer(topic).send("after")
    session = connect_to(system.url, client_id=name).session()
    for subscription in ({"name": "own"}, {"name": f"{name}-shared", "shared": True}):
        messages = session.consumer(topic, durable=True, **subscription).receive_all(2)
        assert [message.body for message in messages] == ["before", "after"]


def test_jms_client_with_failover_url_continues_after_broker_kill(connect_to: Connect, system: System, name: str, queue: str) -> None:
    connection = connect_to(system.failover_url)
    producer, consumer = connection.session().producer(queue), connection.session().consumer(queue)
    producer.send("before")
    assert consumer.receive() is not None
    system.wait_depth(name, 0)
    stored(connect_to, system)
    system.broker.kill()
    waiting = producer.submit_send("meanwhile")
    system.broker.start()
    waiting.result(WAIT_S)
    message = consumer.receive()
    assert message is not None
    assert message.body == "meanwhile"
    assert [event["event"] for event in connection.events(2)] == ["interrupted", "restored"]


def test_send_with_lost_answer_is_repeated_by_jms_client_and_stored_once(
    connect_to: Connect, system: System, name: str, queue: str
) -> None:
    with Proxy(system.port) as proxy:
        producer = connect_to(failover(proxy.url)).session().producer(queue)
        producer.send("first")
        proxy.hold_answers()
        unanswered = producer.submit_send("second")
        system.wait_depth(name, 2)
        assert not unanswered.done()
        system.broker.kill()
        proxy.cut()
        system.broker.start()
        unanswered.result(WAIT_S)
        assert proxy.requests.count(b"second") == 2
        producer.send("third")
        messages = connect_to(system.url).session().consumer(queue).receive_all(3)
        assert [message.body for message in messages] == ["first", "second", "third"]


def test_commit_with_lost_answer_fails_in_jms_client_and_is_complete_in_the_broker(
    connect_to: Connect, system: System, name: str, queue: str
) -> None:
    with Proxy(system.port) as proxy:
        connection = connect_to(failover(proxy.url))
        session = connection.session("TRANSACTED")
        producer = session.producer(queue)
        producer.send("{n}", count=3)
        proxy.hold_answers()
        commit = session.submit("commit")
        system.wait_depth(name, 3)
        system.broker.kill()
        proxy.cut()
        system.broker.start()
        with pytest.raises(JmsError):
            commit.result(WAIT_S)
        assert len(connection.events(2)) == 2  # interrupted and restored: a new transaction follows
        session.rollback()
        producer.send("3")
        session.commit()
        messages = connect_to(system.url).session().consumer(queue).receive_all(4)
        assert [message.body for message in messages] == ["0", "1", "2", "3"]


def test_repeated_broker_kills_keep_all_messages(connect_to: Connect, system: System, name: str, queue: str) -> None:
    connect_to(system.url).session().producer(queue).send("{n}", count=50)
    for _ in range(3):
        system.broker.kill()
        system.broker.launch()
        wait_for(system.serves, "a broker that serves")
        assert system.depth(name) == 50
    system.broker.wait_ready()
