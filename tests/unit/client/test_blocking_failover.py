"""Failover, transactions and requests of the blocking API, with a server that has the reactions of each test."""

from __future__ import annotations

import logging
import socket
import threading
import time
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.errors import INVALID_FIELD, AmqpError
from bascule.amqp.events import Attached, Discharged, Dispositioned, Event, Opened, Transferred
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import Error, Rejected
from bascule.amqp.types import Symbol
from bascule.client import (
    Acknowledge,
    ConnectionLost,
    IllegalState,
    InvalidClientId,
    Message,
    SecurityDenied,
    TimedOut,
    TransactionInDoubt,
    TransactionRolledBack,
    connect,
    core,
    pump,
)
from bascule.client.message import encode
from bascule.client.thread import ConnectionThread
from bascule.client.url import BrokerUrl, Endpoint, Plan, Reconnect
from bascule.core.errors import BasculeError, Unavailable
from bascule.jms.message import JmsMessage
from tests.support.client import SOON_S, all_bodies
from tests.unit.client.blocking_servers import QUEUE, cut, eventually, failover
from tests.unit.client.server import BODIES, obliging, server, serving


def test_unanswered_sends_are_repeated_in_order_with_same_ids_and_bytes() -> None:
    received: list[list[bytes]] = [[], []]

    def silent(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            received[0].append(event.payload)
            if len(received[0]) == 5:
                raise ConnectionResetError
        else:
            obliging(connection, event)

    def taking(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            received[1].append(event.payload)
        obliging(connection, event)

    with server(silent, taking) as url, connect(failover(url)) as context:
        assert context.producer(QUEUE).send_many(map(str, range(9))) == 9
    assert received[1][:5] == received[0]
    assert len(received[1]) == len(set(received[1])) == 9


@pytest.mark.parametrize("last_word", [None, AmqpError("amqp:connection:forced", "going down")])
def test_client_fails_over_from_stalled_broker_with_full_socket_buffers(
    last_word: AmqpError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()
    last_words = [] if last_word is None else [last_word]

    def stall(connection: Connection) -> list[Event]:
        if last_words:
            connection.close(last_words.pop())
            return []
        left.wait(30)
        raise ConnectionResetError

    def react(connection: Connection, event: Any) -> None:
        obliging(connection, event)
        if isinstance(event, Attached):
            monkeypatch.setattr(connection, "receive", lambda *_: stall(connection))

    monkeypatch.setattr(pump, "LAST_WORDS_S", 0.1)
    monkeypatch.setattr(pump, "TICK_S_MAX", 0.1)
    monkeypatch.setattr(core, "IDLE_TIMEOUT_S", 4.0 if last_word is None else 60.0)
    with server(react, obliging) as url, connect(failover(url)) as context:
        monkeypatch.setattr(core, "IDLE_TIMEOUT_S", 60.0)  # for the next connection
        sent = context.producer(QUEUE).send_async(bytes(32 << 20))
        eventually(lambda: not context.connected)
        left.set()
        assert len(sent.result(SOON_S).body) == 32 << 20


def test_consumer_is_reattached_after_reconnect() -> None:
    with server(cut(Dispositioned), obliging) as url, connect(failover(url)) as context:
        consumer = context.consumer(QUEUE)
        bodies: list[Any] = []
        while bodies.count(BODIES[0]) < 2 or bodies[-1] != BODIES[-1]:  # the second connection sends all messages again
            message = consumer.receive(SOON_S)
            assert message is not None, bodies
            bodies.append(message.body)
    assert bodies[-3:] == list(BODIES)


def test_commit_without_answer_is_in_doubt_and_not_repeated() -> None:
    discharges: list[Any] = []

    def second(connection: Connection, event: Any) -> None:
        if isinstance(event, Discharged):
            discharges.append(event)
        obliging(connection, event)

    with server(cut(Discharged), second) as url, connect(failover(url)) as context:
        with pytest.raises(TransactionInDoubt), context.transaction():
            context.send(QUEUE, "x")
        eventually(lambda: context.connected)
        assert discharges == []
        with context.transaction():
            context.send(QUEUE, "y")
        assert len(discharges) == 1


def test_transaction_with_lost_connection_is_rolled_back() -> None:
    transfers: list[bytes] = []

    def second(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            transfers.append(event.payload)
        obliging(connection, event)

    with server(cut(Transferred), second) as url, connect(failover(url)) as context:

        def work() -> None:
            with context.transaction():
                context.send(QUEUE, "x")
                eventually(lambda: context._thread.core.generation == 2)

        with pytest.raises(TransactionRolledBack, match="do its work again"):
            work()
        assert transfers == []


def test_refused_login_is_not_retried() -> None:
    with server(obliging) as url, connect(url.replace("//", "//ann:hush@")) as context:
        context.send(QUEUE, "x")
    with server(obliging) as url, pytest.raises(SecurityDenied, match="amqp:unauthorized-access"):
        connect(failover(url), user="ann", password="wrong")


def test_client_id_in_use_raises_invalid_client_id() -> None:
    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Opened):
            assert event.open.container_id == "billing"
            connection.open(properties={Symbol("amqp:connection-establishment-failed"): True})
            connection.close(AmqpError(INVALID_FIELD, "connected already", {Symbol("invalid-field"): Symbol("container-id")}))

    with server(react) as url, pytest.raises(InvalidClientId, match="connected already"):
        connect(url, client_id="billing")


def test_unreachable_broker_raises_at_once_or_after_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unavailable, match=f"cannot connect to broker 127.0.0.1:{port}: "):
        connect(f"amqp://127.0.0.1:{port}")
    with pytest.raises(TimedOut, match=f"cannot connect to broker 127.0.0.1:{port}: "):
        connect(failover(f"amqp://127.0.0.1:{port}"), timeout_s=0.2)
    with pytest.raises(Unavailable, match=f"cannot connect to broker 127.0.0.1:{port}: "):
        connect(f"failover:(amqp://127.0.0.1:{port})?failover.maxReconnectAttempts=2&failover.reconnectDelay=1")


@pytest.mark.parametrize(
    "bad",
    [
        Endpoint("broker1..example", 5672),
        Endpoint("127.0.0.1", 70_000),
        Endpoint("127.0.0.1\0", 5672),
        Endpoint(".example", 5671, tls=True),
    ],
)
def test_invalid_address_counts_as_one_attempt_and_next_address_is_tried(bad: Endpoint) -> None:
    with server(obliging) as url:
        client = core.Core(core.ConnectionSettings(), time.monotonic)
        thread = ConnectionThread(client, Plan([bad, *BrokerUrl.parse(url).endpoints], Reconnect(startup_attempts_max=0)), None)
        try:
            thread.run(client.connected(time.monotonic() + 10))
        finally:
            thread.stop()


def test_unresolvable_address_is_reported() -> None:
    with pytest.raises(Unavailable, match=r"cannot connect to broker broker1\.\.example:5672: .*idna"):
        connect("amqp://broker1..example")


def test_error_that_ends_connection_thread_is_reported(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Plan) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Plan, "next", fail)
    with caplog.at_level(logging.CRITICAL, "bascule"), pytest.raises(ConnectionLost, match="ZeroDivisionError"):
        connect("failover:(amqp://127.0.0.1:1)")


def test_nested_transaction_is_refused() -> None:
    with (
        server(obliging) as url,
        connect(url) as context,
        context.transaction(),
        pytest.raises(IllegalState, match="already has an open transaction"),
        context.transaction(),
    ):
        pass


def test_refused_message_in_transaction_rolls_it_back() -> None:
    failed: list[bool] = []

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            event.link.settle(event.delivery_id, Rejected(Error("amqp:not-allowed", "no")))
            return
        if isinstance(event, Discharged):
            failed.append(event.fail)
        obliging(connection, event)

    with (
        server(react) as url,
        connect(url) as context,
        pytest.raises(TransactionRolledBack, match="amqp:not-allowed: no"),
        context.transaction(),
    ):
        context.send(QUEUE, "x")
    assert failed == [True]


def test_messages_received_in_transacted_context_are_acknowledged_in_transaction() -> None:
    txn_ids: list[Any] = []

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Dispositioned):
            txn_ids.extend([event.txn_id] * len(event.deliveries))
        obliging(connection, event)

    with server(react) as url, connect(url, acknowledge=Acknowledge.TRANSACTED) as context, context.consumer(QUEUE) as consumer:
        assert all_bodies(consumer, 3) == list(BODIES)
        context.commit()
    assert txn_ids == [b"txn"] * 3


def test_send_waiting_for_credit_fails_when_its_transaction_is_rolled_back() -> None:
    errors: list[BasculeError | None] = []

    def without_credit(connection: Connection, event: Any) -> None:
        if isinstance(event, Attached) and not event.link.is_coordinator:
            event.link.accept()
        else:
            obliging(connection, event)

    with server(without_credit) as url, connect(url, acknowledge=Acknowledge.TRANSACTED) as context:
        sent = context.producer(QUEUE).send_async("x", on_done=lambda _, error: errors.append(error))
        context.rollback()
        with pytest.raises(TransactionRolledBack, match="the message was not sent"):
            sent.result(10)
        eventually(lambda: errors == [sent.exception()])
        context.commit()


def test_commit_without_transaction_raises_illegal_state() -> None:
    with server(obliging) as url, connect(url) as context, pytest.raises(IllegalState, match="no transaction"):
        context.commit()


def test_request_receives_only_answer_with_its_correlation_id() -> None:
    def answer(link: SenderLink, request: JmsMessage) -> None:
        for correlation_id in ("somebody else's", request.message_id):
            link.send(encode(Message(f"to {correlation_id}", correlation_id=correlation_id)))

    with server(serving(answer)) as url, connect(url, acknowledge=Acknowledge.CLIENT) as context:
        request = Message("?")
        assert context.request(QUEUE, request).body == f"to {request.message_id}"


def test_answer_without_correlation_id_completes_only_pending_request() -> None:
    def answer(link: SenderLink, _: JmsMessage) -> None:
        link.send(encode(Message("!")))

    with server(serving(answer)) as url, connect(url, prefetch=0) as context:
        assert [context.request(QUEUE, "?").body for _ in range(2)] == ["!", "!"]


def test_unreadable_answer_is_rejected_and_request_waits_for_next_answer() -> None:
    rejected: list[Any] = []

    def answer(link: SenderLink, request: JmsMessage) -> None:
        link.send(b"no message")
        link.send(encode(Message("!", correlation_id=request.message_id)))

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Dispositioned) and isinstance(event.state, Rejected):
            rejected.append(event)
        serving_well(connection, event)

    serving_well = serving(answer)
    with server(react) as url, connect(url) as context:
        assert context.request(QUEUE, "?").body == "!"
    assert len(rejected) == 1
