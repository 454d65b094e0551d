"""The blocking face against a server that does what each test says."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.errors import INVALID_FIELD, NOT_FOUND, AmqpError
from bascule.amqp.events import Attached, DeclareReceived, Discharged, Dispositioned, Event, Flowed, Opened, Transferred
from bascule.amqp.link import SenderLink
from bascule.amqp.performatives import ACCEPTED, Error, Modified, Rejected, Released
from bascule.amqp.types import Symbol
from bascule.client import (
    Acknowledge,
    ConnectionLost,
    IllegalState,
    InvalidClientId,
    InvalidDestination,
    InvalidSelector,
    Message,
    MessageRefused,
    Queue,
    Refused,
    SecurityDenied,
    TimedOut,
    TransactionInDoubt,
    TransactionRolledBack,
    connect,
    core,
    pump,
    session,
    session_links,
)
from bascule.client.message import encode
from bascule.client.thread import ConnectionThread
from bascule.client.url import BrokerUrl, Endpoint, Plan, Reconnect
from bascule.core.errors import BasculeError, Unavailable
from bascule.jms.message import JmsMessage
from bascule.jms.sections import SEQUENCE, VALUE, section_bytes
from tests.support.client import SOON_S, all_bodies
from tests.unit.client.server import BODIES, ending_the_first_consumer, obliging, server, serving

QUEUE = Queue("q")


def failover(url: str) -> str:
    return f"failover:({url})?failover.reconnectDelay=1&failover.maxReconnectDelay=10"


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def cut(when: type, after: int = 1, react: Any = obliging) -> Any:
    """Like another reaction, but the connection breaks at the so-manyeth event of a type."""
    seen: list[Any] = []

    def reaction(connection: Connection, event: Any) -> None:
        if isinstance(event, when):
            seen.append(event)
            if len(seen) == after:
                raise ConnectionResetError
        react(connection, event)

    return reaction


def test_messages_are_sent_ahead_and_all_accepted_at_the_end() -> None:
    with server(obliging) as url, connect(url) as context:
        assert context.producer(QUEUE).send_many("x" for _ in range(2_600)) == 2_600


def test_a_send_gives_the_message_with_what_sending_fills_in() -> None:
    with server(obliging) as url, connect(url) as context:
        message = context.producer(QUEUE, priority=7, time_to_live_s=60).send("x")
        assert (message.destination, message.priority, message.persistent) == (QUEUE, 7, True)
        assert message.message_id is not None
        assert message.message_id.startswith("ID:")
        assert message.expiration_ms - message.timestamp_ms == 60_000


def test_an_async_send_is_told_when_it_is_done() -> None:
    told: list[tuple[Any, BasculeError | None]] = []
    with server(obliging) as url, connect(url) as context:
        future = context.producer(QUEUE).send_async("x", on_done=lambda message, error: told.append((message.body, error)))
        assert future.result(10).body == "x"
        eventually(lambda: told == [("x", None)])


def test_messages_are_received_until_there_are_none() -> None:
    with server(obliging) as url, connect(url) as context:
        consumer = context.consumer(QUEUE)
        assert all_bodies(consumer, 3) == list(BODIES)


def test_without_prefetch_each_message_is_asked_for() -> None:
    with server(obliging) as url, connect(url, prefetch=0) as context:
        consumer = context.consumer(QUEUE)
        assert [message.body for message in consumer.messages(0.2)] == list(BODIES)


def silent_at_no_credit(connection: Connection, event: Any) -> None:
    """A broker that does not answer a drain whose credit its messages have used up."""
    if isinstance(event, Flowed) and isinstance(event.link, SenderLink):
        while event.link.credit and (data := next(event.link.context, None)):
            event.link.send(data)
        if event.link.credit:
            event.link.drained()
    else:
        obliging(connection, event)


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("broker", [obliging, silent_at_no_credit])
def test_a_consumer_goes_on_after_a_message_that_it_did_not_wait_for(broker: Any, prefetch: int) -> None:
    with server(broker) as url, connect(url, prefetch=prefetch) as context:
        consumer = context.consumer(QUEUE)
        first = consumer.receive_no_wait()
        assert first is not None
        assert [first.body, *all_bodies(consumer, 2)] == list(BODIES)


def test_a_drain_that_the_broker_forgets_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
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
    """A broker whose messages come when it is asked for what it has."""
    if not (isinstance(event, Flowed) and isinstance(event.link, SenderLink) and not event.link.drain):
        obliging(connection, event)


@pytest.mark.parametrize("prefetch", [0, 1, 10])
def test_the_broker_is_asked_before_a_receive_says_that_there_is_nothing(prefetch: int) -> None:
    with server(late) as url, connect(url, prefetch=prefetch) as context:
        consumer = context.consumer(QUEUE)
        assert [message.body for message in consumer.messages(0.01)] == list(BODIES)


@pytest.mark.parametrize("broker", [obliging, silent_at_no_credit])
def test_a_consumer_goes_on_after_a_rollback_that_found_its_credit_used_up(broker: Any) -> None:
    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Flowed) and event.link.drain:  # what was on its way when the drain came
            event.link.send(encode(Message("at the last moment")))
        broker(connection, event)

    with server(react) as url, connect(url, acknowledge=Acknowledge.TRANSACTED, prefetch=4) as context:
        consumer = context.consumer(QUEUE)
        assert consumer.receive(10)
        context.rollback()
        eventually(lambda: consumer.state.link.credit == 4)


def test_a_browser_sees_all_and_ends() -> None:
    with server(obliging) as url, connect(url) as context:
        assert [message.body for message in context.browse(QUEUE)] == list(BODIES)


def test_a_listener_gets_every_message_on_a_thread_that_the_context_is_then_for() -> None:
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
def test_a_message_on_which_a_listener_raises_is_given_back_as_failed(error: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
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
    """Like another reaction, and the outcomes of all deliveries go to a list."""

    def reaction(connection: Connection, event: Any) -> None:
        if isinstance(event, Dispositioned):
            told.extend([event.state] * len(event.deliveries))
        react(connection, event)

    return reaction


@pytest.mark.parametrize("mode", [Acknowledge.AUTO, Acknowledge.DUPS_OK, Acknowledge.CLIENT])
def test_a_close_waits_for_the_listener_at_work_which_has_its_context_until_then(mode: Acknowledge) -> None:
    outcomes: list[Any] = []
    sent: list[Any] = []
    at_work = threading.Event()
    with server(outcomes_of(obliging, outcomes)) as url:
        context = connect(url, acknowledge=mode)
        closing = threading.Thread(target=context.close)

        def listener(message: Message) -> None:
            closing.start()
            at_work.set()
            closing.join(0.2)  # it does not end
            sent.append(context.send(QUEUE, message.body).body)
            if mode is Acknowledge.CLIENT:
                message.acknowledge()

        context.consumer(QUEUE).listener = listener
        assert at_work.wait(10)
        closing.join(10)
    assert (sent, outcomes) == (["one"], [ACCEPTED])


def test_a_close_waits_so_long_for_a_listener_and_no_longer() -> None:
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
            with pytest.raises(TimedOut, match="a listener is still at work"):
                close(timeout_s=0.1)
        assert time.monotonic() - begun_s < 20
        enough.set()
        assert context._listener_thread is not None
        context._listener_thread.join(10)
    assert len(met) == 1


def test_a_consumer_that_closes_waits_for_its_listener_unless_that_is_who_closes_it() -> None:
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
def test_a_listener_cannot_wait_for_itself(what: str) -> None:
    met: list[str] = []
    with server(obliging) as url, connect(url) as context:

        def listener(_: Message) -> None:
            with pytest.raises(IllegalState) as caught:
                getattr(context, what)()
            met.append(str(caught.value))

        context.consumer(QUEUE).listener = listener
        eventually(lambda: len(met) == len(BODIES))
    assert met[0] == f"a listener cannot {what} its own context: it would wait for itself"


def test_a_message_that_cannot_be_read_is_rejected_and_its_listener_gets_the_next() -> None:
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


def test_two_threads_at_once_are_refused() -> None:
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
def test_a_refused_consumer_says_why(error: AmqpError, kind: type[BasculeError], selector: str) -> None:
    with server(refusing(error)) as url, connect(url) as context, pytest.raises(kind, match=error.description):
        context.consumer(QUEUE, selector=selector)


def test_a_refused_producer_says_why_and_the_context_lives_on() -> None:
    with server(refusing(AmqpError(NOT_FOUND, "no such place"))) as url, connect(url) as context:
        for _ in range(2):
            with pytest.raises(InvalidDestination, match="amqp:not-found: no such place"):
                context.send(QUEUE, "x")


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (Rejected(Error("amqp:link:message-size-exceeded", "too large")), "message refused: .*too large"),
        (Released(), "message not taken: released"),
    ],
)
def test_a_message_not_taken_is_an_error_of_the_sender(outcome: Any, text: str) -> None:
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


def test_a_server_that_does_not_answer_is_told_as_in_doubt_after_the_time() -> None:
    def react(connection: Connection, event: Any) -> None:
        if not isinstance(event, Transferred):
            obliging(connection, event)

    with server(react) as url, connect(url) as context:
        with pytest.raises(TimedOut, match=r"not known: repeat\(\)"):
            context.send(QUEUE, "x", timeout_s=1.0)
        with pytest.raises(TimedOut):
            context.close(timeout_s=0.1)


def silent_at_sends(connection: Connection, event: Any) -> None:
    """A broker that answers no send."""
    if not isinstance(event, Transferred):
        obliging(connection, event)


@pytest.mark.parametrize("reaction", [silent_at_sends, cut(Transferred)])
def test_whoever_waits_for_a_send_is_told_when_its_context_closes_without_the_answer(reaction: Any) -> None:
    told: list[BasculeError | None] = []
    with server(reaction) as url:
        context = connect(failover(url))
        sent = context.producer(QUEUE).send_async("x", on_done=lambda _, error: told.append(error))
        if reaction is not silent_at_sends:
            eventually(lambda: not context.connected)
        with pytest.raises(TimedOut):
            context.close(timeout_s=0.1)
        with pytest.raises(ConnectionLost, match="closed before the broker's answer"):
            sent.result(10)
        eventually(lambda: told == [sent.exception()])


def test_a_context_that_closes_without_its_answers_leaves_its_neighbour_alone() -> None:
    with server(silent_at_sends) as url, connect(url) as context:
        other = context.create_context()
        sent = other.producer(QUEUE).send_async("x")
        with pytest.raises(TimedOut):
            other.close(timeout_s=0.1)
        with pytest.raises(ConnectionLost):
            sent.result(10)
        assert context.consumer(QUEUE).receive(10)


def test_a_connection_that_breaks_is_told_as_lost_where_it_is_not_to_be_made_again() -> None:
    with server(cut(Transferred)) as url, connect(url) as context:
        with pytest.raises(ConnectionLost):
            context.send(QUEUE, "x")
        with pytest.raises(ConnectionLost):
            context.consumer(QUEUE)


def test_listeners_end_with_the_connection_and_say_so() -> None:
    errors: list[BasculeError] = []
    with server(cut(Dispositioned)) as url, connect(url, on_exception=errors.append) as context:
        context.consumer(QUEUE).listener = lambda message: None
        eventually(lambda: len(errors) == 1)
    assert isinstance(errors[0], ConnectionLost)


@pytest.mark.parametrize(("condition", "kind"), [("amqp:resource-deleted", InvalidDestination), ("amqp:illegal-state", Refused)])
def test_a_listener_whose_consumer_the_broker_ends_is_told_why_and_may_make_another(condition: str, kind: type[BasculeError]) -> None:
    told: list[BasculeError] = []
    bodies: list[Any] = []

    def make_anew(error: BasculeError) -> None:
        told.append(error)
        with pytest.raises(kind, match="queue 'q' has been deleted"):
            consumer.listener = print
        context.consumer(QUEUE).listener = lambda message: bodies.append(message.body)

    with server(ending_the_first_consumer(condition)) as url, connect(url, on_exception=make_anew) as context:
        consumer = context.consumer(QUEUE, prefetch=0)  # which asks for messages when there is a listener
        consumer.listener = lambda message: None
        eventually(lambda: bodies == list(BODIES))
    assert [(type(error), str(error)) for error in told] == [(kind, f"{condition}: queue 'q' has been deleted")]


def test_a_receive_that_waits_raises_what_the_broker_ends_its_consumer_with() -> None:
    with server(ending_the_first_consumer("amqp:illegal-state")) as url, connect(url) as context:
        consumer = context.consumer(QUEUE, prefetch=0)
        for _ in range(2):
            with pytest.raises(Refused, match="amqp:illegal-state: queue 'q' has been deleted"):
                consumer.receive()


@pytest.fixture
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "LISTENERS_REST_S", 0.0)


def one_message(connection: Connection, event: Any) -> None:
    """Like ``obliging``, with fewer messages."""
    obliging(connection, event)
    if isinstance(event, Attached) and isinstance(event.link, SenderLink):
        event.link.context = iter([encode(Message(BODIES[0]))])


@pytest.mark.usefixtures("no_rest")
def test_listeners_go_on_in_the_next_transaction_after_the_connection_took_one_with_it() -> None:
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


@pytest.mark.usefixtures("no_rest")
@pytest.mark.parametrize("answers", [True, False])
def test_listeners_go_on_after_a_transaction_that_could_not_begin(caplog: pytest.LogCaptureFixture, *, answers: bool) -> None:
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


def test_a_server_that_closes_says_why() -> None:
    def react(connection: Connection, event: Any) -> None:
        obliging(connection, event)
        if isinstance(event, Transferred):
            connection.close(AmqpError("amqp:connection:forced", "going down"))

    with server(react) as url, connect(url) as context:
        context.send(QUEUE, "x")
        eventually(lambda: not context.connected)
        with pytest.raises(ConnectionLost, match="amqp:connection:forced: going down"):
            context.consumer(QUEUE)


# --- failover --------------------------------------------------------------------------------------------------------------------


def test_unanswered_sends_are_repeated_in_order_under_the_same_ids_and_bytes() -> None:
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
def test_a_client_leaves_a_broker_that_stands_still_with_more_on_its_way_than_sockets_take(
    last_word: AmqpError | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = threading.Event()
    last_words = [] if last_word is None else [last_word]

    def stand_still(connection: Connection) -> list[Event]:
        if last_words:
            connection.close(last_words.pop())
            return []
        left.wait(30)
        raise ConnectionResetError

    def react(connection: Connection, event: Any) -> None:
        obliging(connection, event)
        if isinstance(event, Attached):
            monkeypatch.setattr(connection, "receive", lambda *_: stand_still(connection))

    monkeypatch.setattr(pump, "LAST_WORDS_S", 0.1)
    monkeypatch.setattr(pump, "TICK_S_MAX", 0.1)
    monkeypatch.setattr(core, "IDLE_TIMEOUT_S", 4.0 if last_word is None else 60.0)
    with server(react, obliging) as url, connect(failover(url)) as context:
        monkeypatch.setattr(core, "IDLE_TIMEOUT_S", 60.0)  # of the next connection
        sent = context.producer(QUEUE).send_async(bytes(32 << 20))
        eventually(lambda: not context.connected)
        left.set()
        assert len(sent.result(SOON_S).body) == 32 << 20


def test_a_consumer_is_attached_again_after_a_reconnect() -> None:
    with server(cut(Dispositioned), obliging) as url, connect(failover(url)) as context:
        consumer = context.consumer(QUEUE)
        bodies: list[Any] = []
        while bodies.count(BODIES[0]) < 2 or bodies[-1] != BODIES[-1]:  # the second one begins anew
            message = consumer.receive(SOON_S)
            assert message is not None, bodies
            bodies.append(message.body)
    assert bodies[-3:] == list(BODIES)


def test_a_commit_without_an_answer_is_in_doubt_and_not_repeated() -> None:
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


def test_a_transaction_that_lost_its_connection_is_rolled_back_and_says_so() -> None:
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


def test_a_client_that_is_refused_is_not_tried_again() -> None:
    with server(obliging) as url, connect(url.replace("//", "//ann:hush@")) as context:
        context.send(QUEUE, "x")
    with server(obliging) as url, pytest.raises(SecurityDenied, match="amqp:unauthorized-access"):
        connect(failover(url), user="ann", password="wrong")


def test_a_client_id_in_use_is_told_so() -> None:
    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Opened):
            assert event.open.container_id == "billing"
            connection.open(properties={Symbol("amqp:connection-establishment-failed"): True})
            connection.close(AmqpError(INVALID_FIELD, "connected already", {Symbol("invalid-field"): Symbol("container-id")}))

    with server(react) as url, pytest.raises(InvalidClientId, match="connected already"):
        connect(url, client_id="billing")


def test_nobody_there_is_told_at_once_or_when_time_is_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unavailable, match=f"no broker at 127.0.0.1:{port}: "):
        connect(f"amqp://127.0.0.1:{port}")
    with pytest.raises(TimedOut, match=f"no broker at 127.0.0.1:{port}: "):
        connect(failover(f"amqp://127.0.0.1:{port}"), timeout_s=0.2)
    with pytest.raises(Unavailable, match=f"no broker at 127.0.0.1:{port}: "):
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
def test_an_address_that_leads_nowhere_is_one_attempt_and_the_next_is_tried(bad: Endpoint) -> None:
    with server(obliging) as url:
        client = core.Core(core.ConnectionSettings(), time.monotonic)
        thread = ConnectionThread(client, Plan([bad, *BrokerUrl.parse(url).endpoints], Reconnect(startup_attempts_max=0)), None)
        try:
            thread.run(client.connected(time.monotonic() + 10))
        finally:
            thread.stop()


def test_an_address_that_can_be_none_is_told() -> None:
    with pytest.raises(Unavailable, match=r"no broker at broker1\.\.example:5672: .*idna"):
        connect("amqp://broker1..example")


def test_what_ends_the_thread_of_a_connection_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Plan) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Plan, "next", fail)
    with caplog.at_level(logging.CRITICAL, "bascule"), pytest.raises(ConnectionLost, match="ZeroDivisionError"):
        connect("failover:(amqp://127.0.0.1:1)")


# --- transactions ----------------------------------------------------------------------------------------------------------------


def test_transactions_do_not_nest() -> None:
    with (
        server(obliging) as url,
        connect(url) as context,
        context.transaction(),
        pytest.raises(IllegalState, match="do not nest"),
        context.transaction(),
    ):
        pass


def test_a_message_refused_within_a_transaction_rolls_it_back() -> None:
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


def test_what_a_transacted_context_receives_is_acknowledged_in_the_transaction() -> None:
    txn_ids: list[Any] = []

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Dispositioned):
            txn_ids.extend([event.txn_id] * len(event.deliveries))
        obliging(connection, event)

    with server(react) as url, connect(url, acknowledge=Acknowledge.TRANSACTED) as context, context.consumer(QUEUE) as consumer:
        assert all_bodies(consumer, 3) == list(BODIES)
        context.commit()
    assert txn_ids == [b"txn"] * 3


def test_a_send_that_waited_for_credit_when_its_transaction_was_rolled_back_is_told_so() -> None:
    told: list[BasculeError | None] = []

    def without_credit(connection: Connection, event: Any) -> None:
        if isinstance(event, Attached) and not event.link.is_coordinator:
            event.link.accept()
        else:
            obliging(connection, event)

    with server(without_credit) as url, connect(url, acknowledge=Acknowledge.TRANSACTED) as context:
        sent = context.producer(QUEUE).send_async("x", on_done=lambda _, error: told.append(error))
        context.rollback()
        with pytest.raises(TransactionRolledBack, match="before it was sent"):
            sent.result(10)
        eventually(lambda: told == [sent.exception()])
        context.commit()


def test_only_a_transaction_is_committed() -> None:
    with server(obliging) as url, connect(url) as context, pytest.raises(IllegalState, match="no transaction"):
        context.commit()


def test_a_request_takes_its_own_answer_and_no_other() -> None:
    def answer(link: SenderLink, request: JmsMessage) -> None:
        for correlation_id in ("somebody else's", request.message_id):
            link.send(encode(Message(f"to {correlation_id}", correlation_id=correlation_id)))

    with server(serving(answer)) as url, connect(url, acknowledge=Acknowledge.CLIENT) as context:
        request = Message("?")
        assert context.request(QUEUE, request).body == f"to {request.message_id}"


def test_an_answer_without_a_correlation_id_is_that_of_the_only_request() -> None:
    def answer(link: SenderLink, _: JmsMessage) -> None:
        link.send(encode(Message("!")))

    with server(serving(answer)) as url, connect(url, prefetch=0) as context:
        assert [context.request(QUEUE, "?").body for _ in range(2)] == ["!", "!"]


def test_an_answer_that_cannot_be_read_is_rejected_and_the_request_waits_for_another() -> None:
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
