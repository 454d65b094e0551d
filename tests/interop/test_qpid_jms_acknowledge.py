"""When a message is removed for a JMS client, when it is redelivered, and how it is marked then."""

from __future__ import annotations

import pytest

from tests.interop.conftest import MAX_DELIVERY_ATTEMPTS, Connect
from tests.support.proxy import Proxy
from tests.support.qpid import Mode, Received
from tests.support.system import System, wait_for


def facts(messages: list[Received]) -> list[tuple[str, bool, int]]:
    return [(message.body, message.redelivered, message.delivery_count) for message in messages]


@pytest.mark.parametrize("mode", ["AUTO", "CLIENT", "DUPS_OK", "INDIVIDUAL"])
def test_acknowledged_messages_are_not_redelivered_in_any_mode(connect: Connect, system: System, name: str, queue: str, mode: Mode) -> None:
    connection = connect()
    connection.session().producer(queue).send("{n}", count=20)
    session = connection.session(mode)
    messages = session.consumer(queue).receive_many(20)
    assert facts(messages) == [(str(n), False, 1) for n in range(20)]
    if mode in ("CLIENT", "INDIVIDUAL"):
        for message in messages if mode == "INDIVIDUAL" else messages[-1:]:
            session.acknowledge(message)
    session.close()  # dups-ok sends its acknowledgements now at the latest
    system.wait_depth(name, 0)
    assert connection.session().consumer(queue).receive_many(1, 0) == []


def test_client_acknowledge_covers_the_jms_session_and_recover_redelivers_the_rest(connect: Connect, queue: str) -> None:
    connection = connect()
    connection.session().producer(queue).send("{n}", count=6)
    session = connection.session("CLIENT")
    consumer = session.consumer(queue)
    first = consumer.receive_many(3)
    session.acknowledge(first[0])
    assert facts(consumer.receive_many(2)) == [("3", False, 1), ("4", False, 1)]
    session.recover()
    assert facts(consumer.receive_many(3)) == [("3", True, 2), ("4", True, 2), ("5", False, 1)]
    session.close()
    assert [message.body for message in connection.session().consumer(queue).receive_many(3)] == ["3", "4", "5"]


def test_individual_acknowledge_of_a_jms_session_covers_one_message(connect: Connect, queue: str) -> None:
    connection = connect()
    connection.session().producer(queue).send("{n}", count=3)
    session = connection.session("INDIVIDUAL")
    messages = session.consumer(queue).receive_many(3)
    session.acknowledge(messages[1])
    session.close()
    rest = connection.session().consumer(queue).receive_all(2)
    assert [(message.body, message.redelivered) for message in rest] == [("0", True), ("2", True)]


def test_each_rollback_redelivers_with_a_higher_delivery_count(connect: Connect, queue: str) -> None:
    connection = connect()
    connection.session().producer(queue).send("{n}", count=2)
    session = connection.session("TRANSACTED")
    consumer = session.consumer(queue)
    for count in (1, 2, 3):
        assert facts(consumer.receive_many(2)) == [("0", count > 1, count), ("1", count > 1, count)]
        session.rollback()
    assert facts(consumer.receive_many(2)) == [("0", True, 4), ("1", True, 4)]
    session.commit()
    assert consumer.receive_many(1, 0) == []


def test_message_failing_too_often_is_dead_lettered_and_blocks_no_other_message(connect: Connect, name: str, queue: str) -> None:
    connection = connect()
    connection.session().producer(queue).send("poison", properties={"origin": name})
    connection.session().producer(queue).send("good")
    session = connection.session("TRANSACTED")
    consumer = session.consumer(queue)
    for _ in range(MAX_DELIVERY_ATTEMPTS):
        message = consumer.receive()
        assert message is not None
        assert message.body == "poison"
        session.rollback()
    message = consumer.receive()
    assert message is not None
    assert message.body == "good"
    session.commit()
    dead = connection.session().consumer("queue:DLQ", selector=f"origin = '{name}'").receive()
    assert dead is not None
    assert dead.body == "poison"


def test_message_is_redelivered_to_a_listener_that_threw(connect: Connect, queue: str) -> None:
    connection = connect()
    connection.session().producer(queue).send("once more")
    consumer = connection.session().consumer(queue)
    consumer.listen(fail_first=1)
    # The client releases the message. AMQP does not count this as a delivery (section 3.4.4), so the redelivery is not marked.
    assert [message.body for message in consumer.collect(2)] == ["once more", "once more"]


MODES: list[Mode] = ["AUTO", "DUPS_OK", "CLIENT", "TRANSACTED"]


@pytest.mark.parametrize("closed", ["session", "connection"])
@pytest.mark.parametrize("received", [0, 2])
@pytest.mark.parametrize("mode", MODES)
def test_after_close_only_messages_seen_by_the_application_are_marked_redelivered(
    connect: Connect, system: System, name: str, queue: str, mode: Mode, received: int, closed: str
) -> None:
    connect().session().producer(queue).send("{n}", count=5)
    connection = connect()
    session = connection.session(mode)
    assert len(session.consumer(queue).receive_many(received)) == received
    held = 5 - received if mode in ("AUTO", "DUPS_OK") else 5
    wait_for(lambda: (found := system.queue(name)) and found["delivering"] == held, "everything prefetched")
    (session if closed == "session" else connection).close()
    seen = [(str(n), True, 2) for n in range(received)] if mode in ("CLIENT", "TRANSACTED") else []
    unseen = [(str(n), False, 1) for n in range(received, 5)]
    assert facts(connect().session().consumer(queue).receive_all(5 - received + len(seen))) == seen + unseen


def test_after_commit_and_close_prefetched_messages_are_not_marked_redelivered(
    connect: Connect, system: System, name: str, queue: str
) -> None:
    connect().session().producer(queue).send("{n}", count=5)
    connection = connect()
    session = connection.session("TRANSACTED")
    session.consumer(queue).receive_many(2)
    session.commit()
    wait_for(lambda: (found := system.queue(name)) and found["delivering"] == 3, "everything prefetched")
    connection.close()
    assert facts(connect().session().consumer(queue).receive_all(3)) == [(str(n), False, 1) for n in range(2, 5)]


def test_messages_received_on_a_broken_connection_are_marked_redelivered(connect: Connect, system: System, name: str, queue: str) -> None:
    connect().session().producer(queue).send("{n}", count=5)
    with Proxy(system.port) as proxy:
        session = connect(proxy.url).session("CLIENT")
        assert len(session.consumer(queue).receive_many(3)) == 3
        wait_for(lambda: (found := system.queue(name)) and found["delivering"] == 5, "everything prefetched")
        proxy.cut()
    again = connect().session().consumer(queue).receive_many(5)
    assert [message.body for message in again] == [str(n) for n in range(5)]
    assert all(message.redelivered for message in again[:3])


def test_message_that_kills_its_clients_is_dead_lettered_and_prefetched_messages_are_not(
    connect: Connect, system: System, name: str, queue: str
) -> None:
    connect().session().producer(queue).send("{n}", count=5, properties={"origin": name})
    for count in range(1, MAX_DELIVERY_ATTEMPTS + 1):
        with Proxy(system.port) as proxy:
            assert facts(connect(proxy.url).session("CLIENT").consumer(queue).receive_many(1)) == [("0", count > 1, count)]
            wait_for(lambda: (found := system.queue(name)) and found["delivering"] == 5, "everything prefetched")
            proxy.cut()
        wait_for(lambda: (found := system.queue(name)) and found["delivering"] == 0, "everything back")
    session = connect().session()
    assert [message.body for message in session.consumer("queue:DLQ", selector=f"origin = '{name}'").receive_all(1)] == ["0"]
    assert [message.body for message in session.consumer(queue).receive_all(4)] == ["1", "2", "3", "4"]
