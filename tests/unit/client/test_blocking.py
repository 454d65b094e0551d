"""The blocking API, with a server that has the reactions of each test."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.errors import INTERNAL_ERROR, INVALID_FIELD, NOT_FOUND, AmqpError
from bascule.amqp.events import Attached, Flowed, Transferred
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import Error, Rejected, Released
from bascule.amqp.sasl import AnonymousServer
from bascule.client import (
    Acknowledge,
    ConnectionLost,
    IllegalState,
    InvalidDestination,
    InvalidSelector,
    Message,
    MessageRefused,
    Queue,
    Refused,
    SecurityDenied,
    TimedOut,
    connect,
    session_links,
)
from bascule.client.message import encode
from bascule.client.pump import Pump
from bascule.core.errors import BasculeError, InvalidInput, Unavailable
from tests.support.client import all_bodies
from tests.unit.client.blocking_servers import QUEUE, cut, eventually, failover
from tests.unit.client.server import BODIES, ending_the_first_consumer, obliging, server


def test_send_many_pipelines_messages_and_waits_for_all_answers() -> None:
    with server(obliging) as url, connect(url) as context:
        assert context.producer(QUEUE).send_many("x" for _ in range(2_600)) == 2_600


def test_send_returns_message_with_generated_headers() -> None:
    with server(obliging) as url, connect(url) as context:
        message = context.producer(QUEUE, priority=7, time_to_live_s=60).send("x")
        assert (message.destination, message.priority, message.persistent) == (QUEUE, 7, True)
        assert message.message_id is not None
        assert message.message_id.startswith("ID:")
        assert message.expiration_ms - message.timestamp_ms == 60_000


def test_send_async_reports_completion() -> None:
    answers: list[tuple[Any, BasculeError | None]] = []
    with server(obliging) as url, connect(url) as context:
        future = context.producer(QUEUE).send_async("x", on_done=lambda message, error: answers.append((message.body, error)))
        assert future.result(10).body == "x"
        eventually(lambda: answers == [("x", None)])


def test_consumer_receives_all_messages() -> None:
    with server(obliging) as url, connect(url) as context:
        consumer = context.consumer(QUEUE)
        assert all_bodies(consumer, 3) == list(BODIES)


def test_consumer_without_prefetch_requests_each_message() -> None:
    with server(obliging) as url, connect(url, prefetch=0) as context:
        consumer = context.consumer(QUEUE)
        assert [message.body for message in consumer.messages(0.2)] == list(BODIES)


def silent_at_no_credit(connection: Connection, event: Any) -> None:
    """A broker that does not answer a drain if its messages have used up the credit."""
    if isinstance(event, Flowed) and isinstance(event.link, SenderLink):
        while event.link.credit and (data := next(event.link.context, None)):
            event.link.send(data)
        if event.link.credit:
            event.link.drained()
    else:
        obliging(connection, event)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("broker", [obliging, silent_at_no_credit])
def test_consumer_receives_remaining_messages_after_receive_no_wait(broker: Any, prefetch: int) -> None:
    with server(broker) as url, connect(url, prefetch=prefetch) as context:
        consumer = context.consumer(QUEUE)
        first = consumer.receive_no_wait()
        assert first is not None
        assert [first.body, *all_bodies(consumer, 2)] == list(BODIES)


def test_drain_forgotten_by_broker_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_links, "DRAIN_AGAIN_S", 0.05)
    forgotten = 0

    def forgetful(connection: Connection, event: Any) -> None:
        nonlocal forgotten
        if isinstance(event, Flowed) and event.link.drain and forgotten < 2:
            forgotten += 1
        else:
            obliging(connection, event)

    with server(forgetful) as url, connect(url, prefetch=0) as context:
        assert [message.body for message in context.browse(QUEUE)] == list(BODIES)
        assert forgotten == 2


def late(connection: Connection, event: Any) -> None:
    """A broker that sends messages only at a drain."""
    if not (isinstance(event, Flowed) and isinstance(event.link, SenderLink) and not event.link.drain):
        obliging(connection, event)


@pytest.mark.parametrize("prefetch", [0, 1, 10])
def test_receive_drains_broker_before_it_returns_none(prefetch: int) -> None:
    with server(late) as url, connect(url, prefetch=prefetch) as context:
        consumer = context.consumer(QUEUE)
        assert [message.body for message in consumer.messages(0.01)] == list(BODIES)


@pytest.mark.parametrize("broker", [obliging, silent_at_no_credit])
def test_consumer_credit_is_restored_after_rollback_that_used_it_up(broker: Any) -> None:
    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Flowed) and event.link.drain:  # a message that was on its way when the drain arrived
            event.link.send(encode(Message("at the last moment")))
        broker(connection, event)

    with server(react) as url, connect(url, acknowledge=Acknowledge.TRANSACTED, prefetch=4) as context:
        consumer = context.consumer(QUEUE)
        assert consumer.receive(10)
        context.rollback()
        eventually(lambda: consumer.state.link.credit == 4)


def test_concurrent_use_of_context_by_two_threads_is_refused() -> None:
    with server(obliging) as url, connect(url) as context:
        consumer = context.consumer(Queue("q"))
        for _ in BODIES:
            assert consumer.receive(10)
        waiting = threading.Thread(target=consumer.receive, args=(10,))
        waiting.start()
        try:
            eventually(lambda: consumer.state.waiting)
            with pytest.raises(IllegalState, match="another thread"):
                context.send(QUEUE, "x")
        finally:
            consumer.close()
            waiting.join()


def refusing(error: AmqpError) -> Any:
    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Attached):
            event.link.refuse(error)
        else:
            obliging(connection, event)

    return react


@pytest.mark.parametrize(
    ("error", "kind", "selector"),
    [
        (AmqpError(NOT_FOUND, "no such place"), InvalidDestination, ""),
        (AmqpError(INVALID_FIELD, "column 3"), InvalidSelector, "a >"),
        (AmqpError("amqp:unauthorized-access", "not yours"), SecurityDenied, ""),
    ],
)
def test_refused_consumer_raises_error_with_reason(error: AmqpError, kind: type[BasculeError], selector: str) -> None:
    with server(refusing(error)) as url, connect(url) as context, pytest.raises(kind, match=error.description):
        context.consumer(QUEUE, selector=selector)


def test_refused_producer_raises_error_and_context_stays_usable() -> None:
    with server(refusing(AmqpError(NOT_FOUND, "no such place"))) as url, connect(url) as context:
        for _ in range(2):
            with pytest.raises(InvalidDestination, match="amqp:not-found: no such place"):
                context.send(QUEUE, "x")


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Rejected(Error("amqp:link:message-size-exceeded", "too large")), "refused the message: .*too large"),
        (Released(), "did not accept the message; outcome: released"),
    ],
)
def test_rejected_or_released_message_raises_message_refused(outcome: Any, text: str) -> None:
    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            event.link.settle(event.delivery_id, outcome)
        else:
            obliging(connection, event)

    with server(react) as url, connect(url) as context:
        with pytest.raises(MessageRefused, match=text):
            context.send(QUEUE, "x")
        with pytest.raises(MessageRefused, match=text):
            context.producer(QUEUE).send_many(["x", "y"])


def test_send_many_raises_refusal_before_completion_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    flushed, report = threading.Event(), Pump.report

    def late(pump: Pump) -> None:
        if pump.core.completed:
            flushed.wait(10)
        report(pump)

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            event.link.settle(event.delivery_id, Rejected(Error(INTERNAL_ERROR, "no room")))
        else:
            obliging(connection, event)

    with server(react) as url, connect(url) as context:
        producer = context.producer(QUEUE)
        monkeypatch.setattr(Pump, "report", late)
        try:
            with pytest.raises(MessageRefused, match="no room"):
                producer.send_many(["x"])
        finally:
            flushed.set()


def test_send_without_answer_times_out_as_in_doubt() -> None:
    def react(connection: Connection, event: Any) -> None:
        if not isinstance(event, Transferred):
            obliging(connection, event)

    with server(react) as url, connect(url) as context:
        with pytest.raises(TimedOut, match=r"may or may not be stored, send it again with repeat\(\)"):
            context.send(QUEUE, "x", timeout_s=1.0)
        with pytest.raises(TimedOut):
            context.close(timeout_s=0.1)


def silent_at_sends(connection: Connection, event: Any) -> None:
    """A broker that does not answer sends."""
    if not isinstance(event, Transferred):
        obliging(connection, event)


@pytest.mark.parametrize("reaction", [silent_at_sends, cut(Transferred)])
def test_pending_send_is_failed_when_context_closes_without_answer(reaction: Any) -> None:
    answers: list[BasculeError | None] = []
    with server(reaction) as url:
        context = connect(failover(url))
        sent = context.producer(QUEUE).send_async("x", on_done=lambda _, error: answers.append(error))
        if reaction is not silent_at_sends:
            eventually(lambda: not context.connected)
        with pytest.raises(TimedOut):
            context.close(timeout_s=0.1)
        with pytest.raises(ConnectionLost, match="closed before the broker's answer"):
            sent.result(10)
        eventually(lambda: answers == [sent.exception()])


def test_close_of_context_without_answers_does_not_affect_other_contexts() -> None:
    with server(silent_at_sends) as url, connect(url) as context:
        other = context.create_context()
        sent = other.producer(QUEUE).send_async("x")
        with pytest.raises(TimedOut):
            other.close(timeout_s=0.1)
        with pytest.raises(ConnectionLost):
            sent.result(10)
        assert context.consumer(QUEUE).receive(10)


def test_broken_connection_without_failover_raises_connection_lost() -> None:
    with server(cut(Transferred)) as url, connect(url) as context:
        with pytest.raises(ConnectionLost):
            context.send(QUEUE, "x")
        with pytest.raises(ConnectionLost):
            context.consumer(QUEUE)


def test_waiting_receive_raises_error_that_ended_its_consumer() -> None:
    with server(ending_the_first_consumer("amqp:illegal-state")) as url, connect(url) as context:
        consumer = context.consumer(QUEUE, prefetch=0)
        for _ in range(2):
            with pytest.raises(Refused, match="amqp:illegal-state: queue 'q' has been deleted"):
                consumer.receive()


def test_connection_closed_by_server_raises_reason() -> None:
    def react(connection: Connection, event: Any) -> None:
        obliging(connection, event)
        if isinstance(event, Transferred):
            connection.close(AmqpError("amqp:connection:forced", "going down"))

    with server(react) as url, connect(url) as context:
        context.send(QUEUE, "x")
        eventually(lambda: not context.connected)
        with pytest.raises(ConnectionLost, match="amqp:connection:forced: going down"):
            context.consumer(QUEUE)


@pytest.mark.parametrize("wrong", ["orders", None])
def test_destination_that_is_only_a_name_is_refused_with_the_classes_to_use(wrong: Any) -> None:
    with server(obliging) as url, connect(url) as context:
        for call in (
            lambda: context.send(wrong, "x"),
            lambda: context.producer(wrong).send("x", to=wrong),
            lambda: context.consumer(wrong),
            lambda: context.send(QUEUE, Message("x", reply_to=wrong or "orders")),
        ):
            with pytest.raises(InvalidInput, match=r"^(invalid destination: .*; use Queue\(.+\) or Topic\(|the producer has no)"):
                call()


def test_user_for_a_broker_without_users_is_refused_with_the_remedy() -> None:
    with (
        server(obliging, mechanisms={"ANONYMOUS": AnonymousServer}) as url,
        pytest.raises(SecurityDenied, match=r"the server offers ANONYMOUS; it has no users: connect without user and password$"),
    ):
        connect(url, user="ann", password="hush")


@contextmanager
def other_protocol(answer: bytes) -> Iterator[str]:
    """The URL of a port that is no AMQP port: it reads the first bytes, sends an answer, and closes the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(100)
                peer.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        thread.join()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_port_of_another_protocol_is_named_with_what_to_check(answer: bytes) -> None:
    with (
        other_protocol(answer) as address,
        pytest.raises(ConnectionLost, match=f"^{address}: .*; check that this is the AMQP port of a broker, and that the URL begins"),
    ):
        connect(f"amqp://{address}")


def test_tls_url_of_a_port_without_tls_is_named_with_the_url_to_use() -> None:
    with (
        other_protocol(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address,
        pytest.raises(Unavailable, match=r"^cannot connect to broker .*: the port does not use TLS; use amqp:// in place of amqps://"),
    ):
        connect(f"amqps://{address}")
