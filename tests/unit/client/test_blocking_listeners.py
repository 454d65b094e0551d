"""Listeners, browsers and closing contexts of the blocking API, with a server that has the reactions of each test."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.events import Attached, DeclareReceived, Discharged, Dispositioned
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import ACCEPTED, RELEASED, Error, Modified, Rejected
from bascule.client import (
    Acknowledge,
    ConnectionLost,
    IllegalState,
    InvalidDestination,
    Message,
    Refused,
    TimedOut,
    TransactionRolledBack,
    connect,
    session,
)
from bascule.client.message import encode
from bascule.core.errors import BasculeError
from bascule.jms.sections import SEQUENCE, VALUE, section_bytes
from tests.unit.client.blocking_servers import QUEUE, cut, eventually, failover
from tests.unit.client.server import BODIES, ending_the_first_consumer, obliging, server


def test_browser_returns_all_messages_and_ends() -> None:
    with server(obliging) as url, connect(url) as context:
        assert [message.body for message in context.browse(QUEUE)] == list(BODIES)


def test_listener_receives_all_messages_on_listener_thread_and_owns_context() -> None:
    bodies: list[Any] = []
    with server(obliging) as url, connect(url) as context:
        consumer = context.consumer(QUEUE)
        consumer.listener = lambda message: bodies.append((message.body, threading.current_thread().name))
        eventually(lambda: len(bodies) == 3)
        assert bodies == [(body, "bascule-listener") for body in BODIES]
        with pytest.raises(IllegalState, match="create_context"):
            context.send(QUEUE, "x")
        with pytest.raises(IllegalState, match="listener"):
            consumer.receive(0)


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_message_is_returned_as_failed_when_listener_raises(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    outcomes: list[Any] = []

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Dispositioned):
            outcomes.extend([event.state] * len(event.deliveries))
        obliging(connection, event)

    def fail_on_two(message: Message) -> None:
        if message.body == "two":
            raise error("two")

    with caplog.at_level(logging.CRITICAL, "bascule"), server(react) as url, connect(url) as context:
        context.consumer(QUEUE).listener = fail_on_two
        eventually(lambda: len(outcomes) == 3)
    assert outcomes == [ACCEPTED, Modified(delivery_failed=True), ACCEPTED]


def outcomes_of(react: Any, told: list[Any]) -> Any:
    """React like ``react``, and append the outcomes of all deliveries to a list."""

    def reaction(connection: Connection, event: Any) -> None:
        if isinstance(event, Dispositioned):
            told.extend([event.state] * len(event.deliveries))
        react(connection, event)

    return reaction


@pytest.mark.parametrize("mode", [Acknowledge.AUTO, Acknowledge.DUPS_OK, Acknowledge.CLIENT])
def test_close_waits_for_running_listener_which_can_use_context_until_end(mode: Acknowledge) -> None:
    outcomes: list[Any] = []
    sent: list[Any] = []
    at_work = threading.Event()
    with server(outcomes_of(obliging, outcomes)) as url:
        context = connect(url, acknowledge=mode)
        closing = threading.Thread(target=context.close)

        def listener(message: Message) -> None:
            closing.start()
            at_work.set()
            closing.join(0.2)  # the close must not end yet
            sent.append(context.send(QUEUE, message.body).body)
            if mode is Acknowledge.CLIENT:
                message.acknowledge()

        context.consumer(QUEUE).listener = listener
        assert at_work.wait(10)
        closing.join(10)
    assert (sent, outcomes) == (["one"], [ACCEPTED, RELEASED, RELEASED])  # messages that the application has not seen are released


def test_close_stop_and_consumer_close_wait_for_listener_up_to_timeout() -> None:
    at_work, enough = threading.Event(), threading.Event()
    met: list[BasculeError] = []

    def listener(_: Message) -> None:
        at_work.set()
        enough.wait(30)
        with pytest.raises(IllegalState, match="closed") as caught:
            context.send(QUEUE, "x")
        met.append(caught.value)

    with server(obliging) as url:
        context = connect(url)
        consumer = context.consumer(QUEUE)
        consumer.listener = listener
        assert at_work.wait(10)
        begun_s = time.monotonic()
        for close in (context.stop, consumer.close, context.close):
            with pytest.raises(TimedOut, match="a listener is still running"):
                close(timeout_s=0.1)
        assert time.monotonic() - begun_s < 20
        enough.set()
        assert context._listener_thread is not None
        context._listener_thread.join(10)
    assert len(met) == 1


def test_consumer_close_waits_for_its_listener_unless_listener_closes_it() -> None:
    happened: list[str] = []
    outcomes: list[Any] = []
    at_work = threading.Event()
    with server(outcomes_of(obliging, outcomes)) as url, connect(url) as context:
        first, second = (context.consumer(QUEUE, prefetch=1) for _ in range(2))
        closing = threading.Thread(target=lambda: (first.close(), happened.append("closed")))

        def patient(message: Message) -> None:
            closing.start()
            at_work.set()
            closing.join(0.2)
            happened.append(f"first had {message.body}")

        def last(message: Message) -> None:
            second.close()
            happened.append(f"second had {message.body}")

        first.listener = patient
        assert at_work.wait(10)
        closing.join(10)
        second.listener = last
        eventually(lambda: len(happened) == 3)
    assert happened == ["first had one", "closed", "second had one"]
    assert outcomes.count(ACCEPTED) == 2


@pytest.mark.parametrize("what", ["close", "stop"])
def test_close_or_stop_by_listener_of_same_context_is_refused(what: str) -> None:
    met: list[str] = []
    with server(obliging) as url, connect(url) as context:

        def listener(_: Message) -> None:
            with pytest.raises(IllegalState) as caught:
                getattr(context, what)()
            met.append(str(caught.value))

        context.consumer(QUEUE).listener = listener
        eventually(lambda: len(met) == len(BODIES))
    assert met[0] == f"a listener cannot {what} its own context, because {what}() waits for it; use another thread"


def test_unreadable_message_is_rejected_and_listener_gets_next_message() -> None:
    outcomes: list[Any] = []
    bodies: list[Any] = []

    def react(connection: Connection, event: Any) -> None:
        obliging(connection, event)
        if isinstance(event, Attached):
            event.link.context = iter([section_bytes(SEQUENCE, [1]) + section_bytes(VALUE, 2), encode(Message("two"))])

    with server(outcomes_of(react, outcomes)) as url, connect(url) as context:
        context.consumer(QUEUE).listener = lambda message: bodies.append(message.body)
        eventually(lambda: len(outcomes) == 2)
    assert bodies == ["two"]
    assert outcomes == [Rejected(), ACCEPTED]


def test_listeners_end_with_connection_and_on_exception_is_called() -> None:
    errors: list[BasculeError] = []
    with server(cut(Dispositioned)) as url, connect(url, on_exception=errors.append) as context:
        context.consumer(QUEUE).listener = lambda message: None
        eventually(lambda: len(errors) == 1)
    assert isinstance(errors[0], ConnectionLost)


@pytest.mark.parametrize(("condition", "kind"), [("amqp:resource-deleted", InvalidDestination), ("amqp:illegal-state", Refused)])
def test_consumer_ended_by_broker_is_reported_and_on_exception_can_create_another(condition: str, kind: type[BasculeError]) -> None:
    told: list[BasculeError] = []
    bodies: list[Any] = []

    def recreate_consumer(error: BasculeError) -> None:
        told.append(error)
        with pytest.raises(kind, match="queue 'q' has been deleted"):
            consumer.listener = print
        context.consumer(QUEUE).listener = lambda message: bodies.append(message.body)

    with server(ending_the_first_consumer(condition)) as url, connect(url, on_exception=recreate_consumer) as context:
        consumer = context.consumer(QUEUE, prefetch=0)  # gives credit only when it has a listener
        consumer.listener = lambda message: None
        eventually(lambda: bodies == list(BODIES))
    assert [(type(error), str(error)) for error in told] == [(kind, f"{condition}: queue 'q' has been deleted")]


@pytest.fixture
def no_pause_between_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LISTENERS_REST_S", 0.0)


def one_message(connection: Connection, event: Any) -> None:
    """React like ``obliging``, but send only one message."""
    obliging(connection, event)
    if isinstance(event, Attached) and isinstance(event.link, SenderLink):
        event.link.context = iter([encode(Message(BODIES[0]))])


@pytest.mark.usefixtures("no_pause_between_batches")
def test_listeners_continue_in_next_transaction_after_connection_loss() -> None:
    batch: list[Any] = []
    committed: list[list[Any]] = []
    told: list[BasculeError] = []
    discharges: list[bool] = []

    def second(connection: Connection, event: Any) -> None:
        if isinstance(event, Discharged):
            discharges.append(event.fail)
        obliging(connection, event)

    def drop_batch(error: BasculeError) -> None:
        told.append(error)
        batch.clear()

    with (
        server(cut(Dispositioned, react=one_message), second) as url,
        connect(failover(url), acknowledge=Acknowledge.TRANSACTED, on_exception=drop_batch) as context,
    ):

        def listener(message: Message) -> None:
            batch.append(message.body)
            if len(batch) == len(BODIES):
                context.commit()
                committed.append(list(batch))

        context.consumer(QUEUE).listener = listener
        eventually(lambda: bool(committed))
        assert discharges == [False]
    assert committed == [list(BODIES)]
    assert list(map(type, told)) == [TransactionRolledBack]


@pytest.mark.usefixtures("no_pause_between_batches")
@pytest.mark.parametrize("answers", [True, False])
def test_listeners_continue_after_transaction_that_could_not_begin(caplog: pytest.LogCaptureFixture, *, answers: bool) -> None:
    told: list[BasculeError] = []
    bodies: list[Any] = []
    asked: list[Any] = []

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, DeclareReceived):
            asked.append(event)
            if len(asked) == 1:
                if answers:
                    event.link.settle(event.delivery_id, Rejected(Error("amqp:not-allowed", "not now")))
                return
        obliging(connection, event)

    def tell(error: BasculeError) -> None:
        told.append(error)
        raise ValueError("this does not end them either")

    with (
        caplog.at_level(logging.CRITICAL, "bascule"),
        server(react) as url,
        connect(url, acknowledge=Acknowledge.TRANSACTED, timeout_s=4.0, on_exception=tell) as context,
    ):
        context.consumer(QUEUE).listener = lambda message: bodies.append(message.body)
        eventually(lambda: bodies == list(BODIES))
    assert list(map(type, told)) == [Refused if answers else TimedOut]
