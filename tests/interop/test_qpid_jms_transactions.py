"""Local transactions of a JMS session: all of it, or none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.interop.conftest import MAX_MESSAGE_BYTES, Connect
from tests.support.proxy import Proxy
from tests.support.qpid import Consumer, JmsError, Session
from tests.support.system import System


def bodies(consumer: Consumer, count: int) -> list[str]:
    return [message.body for message in consumer.receive_many(count)]


def test_messages_of_a_transaction_become_visible_at_all_destinations_on_commit(connect: Connect, name: str) -> None:
    connection = connect()
    readers = [connection.session().consumer(f"{kind}:{name}") for kind in ("queue", "topic")]
    session = connection.session("TRANSACTED")
    producer = session.producer()
    for kind in ("queue", "topic"):
        producer.send("{n}", to=f"{kind}:{name}", count=3)
    assert [reader.receive_many(1, 0) for reader in readers] == [[], []]
    session.commit()
    assert [bodies(reader, 3) for reader in readers] == [["0", "1", "2"]] * 2


def test_rollback_discards_sent_messages_and_returns_received_messages(connect: Connect, system: System, name: str) -> None:
    connection = connect()
    connection.session().producer(f"queue:{name}.in").send("job")
    session = connection.session("TRANSACTED")
    consumer, producer = session.consumer(f"queue:{name}.in"), session.producer(f"queue:{name}.out")
    for final in (False, True):
        assert bodies(consumer, 1) == ["job"]
        producer.send("done")
        (session.commit if final else session.rollback)()
        assert (system.depth(f"{name}.in"), system.depth(f"{name}.out")) == ((0, 1) if final else (1, 0))


@pytest.mark.parametrize("persistent", [True, False])
def test_a_transaction_of_many_messages_keeps_their_order(connect: Connect, queue: str, persistent: bool) -> None:
    connection = connect()
    session = connection.session("TRANSACTED")
    session.producer(queue).send("{n}", count=1500, persistent=persistent)  # more than a producer's credit
    session.commit()
    assert bodies(connection.session().consumer(queue), 1500) == [str(n) for n in range(1500)]


def test_broken_connection_rolls_back_its_open_transaction(connect: Connect, system: System, name: str) -> None:
    connect().session().producer(f"queue:{name}.in").send("job")
    with Proxy(system.port) as proxy:
        session = connect(proxy.url).session("TRANSACTED")
        assert bodies(session.consumer(f"queue:{name}.in"), 1) == ["job"]
        session.producer(f"queue:{name}.out").send("done")
        proxy.cut()
    again = connect().session().consumer(f"queue:{name}.in").receive()
    assert again is not None
    assert (again.body, again.redelivered, again.delivery_count) == ("job", True, 2)
    assert system.depth(f"{name}.out") == 0


def test_a_session_serves_one_transaction_after_another(connect: Connect, queue: str) -> None:
    connection = connect()
    session = connection.session("TRANSACTED")
    producer, consumer = session.producer(queue), connection.session("TRANSACTED")
    for number in range(50):
        producer.send(str(number))
        (session.rollback if number % 5 == 4 else session.commit)()
    reader = consumer.consumer(queue)
    for number in (number for number in range(50) if number % 5 != 4):
        assert bodies(reader, 1) == [str(number)]
        consumer.commit()


def test_closing_session_does_not_affect_transactions_of_other_sessions(connect: Connect, name: str) -> None:
    connection = connect()
    closing, staying = connection.session("TRANSACTED"), connection.session("TRANSACTED")
    closing.producer(f"queue:{name}").send("forgotten")
    staying.producer(f"queue:{name}").send("kept")
    closing.close()
    staying.commit()
    assert [message.body for message in connection.session().consumer(f"queue:{name}").receive_all(1)] == ["kept"]


def to_a_full_queue(session: Session, name: str) -> None:
    session.producer(f"queue:full.{name}").send("refused")


def to_a_full_queue_with_a_completion_listener(session: Session, name: str) -> None:
    producer = session.producer(f"queue:full.{name}")
    producer.send_async("refused")
    assert "error" in producer.completions(1)[0]


def to_a_full_queue_that_the_message_names(session: Session, name: str) -> None:
    session.producer().send("refused", to=f"queue:full.{name}")


def too_large(session: Session, name: str) -> None:
    session.producer(f"queue:{name}.large").send("x" * (MAX_MESSAGE_BYTES + 1))


def request_to_the_broker(session: Session, name: str) -> None:
    session.producer().send("refused", to="queue:$management")


@pytest.mark.parametrize("options", ["", "?jms.forceAsyncSend=true"], ids=["default", "asynchronous"])
@pytest.mark.parametrize(
    "send",
    [
        to_a_full_queue,
        to_a_full_queue_with_a_completion_listener,
        to_a_full_queue_that_the_message_names,
        too_large,
        request_to_the_broker,
    ],
)
def test_jms_commit_of_a_transaction_with_a_refused_message_is_rolled_back(
    connect: Connect, system: System, name: str, send: Callable[[Session, str], None], options: str
) -> None:
    plain = connect().session()
    plain.producer(f"queue:full.{name}").send("first")
    plain.producer(f"queue:{name}.in").send("job")
    session = connect(f"{system.url}{options}").session("TRANSACTED")
    consumer, producer = session.consumer(f"queue:{name}.in"), session.producer(f"queue:{name}.out")
    assert bodies(consumer, 1) == ["job"]
    producer.send("done")
    send(session, name)
    producer.send("after")
    with pytest.raises(JmsError) as raised:
        session.commit()
    assert raised.value.name == "TransactionRolledBackException"
    assert "a message of the transaction was refused" in raised.value.message
    assert system.depth(f"{name}.out") == 0
    again = consumer.receive()
    assert again is not None
    assert (again.body, again.redelivered, again.delivery_count) == ("job", True, 2)
    producer.send("done")
    session.commit()
    assert (system.depth(f"{name}.in"), system.depth(f"{name}.out")) == (0, 1)
