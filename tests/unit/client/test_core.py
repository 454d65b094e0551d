"""A connection without a socket. The tests carry its bytes to the engine of a server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.errors import CONNECTION_FORCED, AmqpError
from bascule.amqp.events import Event, Opened, SessionBegun, SessionEnded, Transferred
from bascule.amqp.limits import DELIVERY_FRAME_SIZE_BYTES_MAX, ConnectionLimits
from bascule.amqp.performatives import Role
from bascule.amqp.sasl import AnonymousServer, SaslServer
from bascule.amqp.types import Symbol
from bascule.client import Message, Queue, TemporaryQueue, TimedOut, TransactionRolledBack
from bascule.client.core import ConnectionSettings, Core
from bascule.client.links import Subscription
from bascule.client.message import SendOptions
from bascule.client.operation import Operation, Wait
from bascule.client.sends import SendCompletion
from bascule.client.session import ClientSession
from bascule.client.session_links import Acknowledge
from bascule.client.url import Endpoint
from bascule.jms.message import decode_message
from tests.unit.client.server import obliging

T = TypeVar("T")


class Wired:
    """A connection that reconnects, and the broker's end of the connection."""

    def __init__(self, limits: ConnectionLimits | None = None) -> None:
        self.bodies: list[Any] = []
        self.core = Core(ConnectionSettings(reconnects=True), lambda: 0.0)
        self._limits = limits
        self.broker = self._broker()

    def _broker(self) -> Connection:
        return Connection(Role.SERVER, container_id="server", sasl=SaslServer({"ANONYMOUS": AnonymousServer}), limits=self._limits)

    def connect(self) -> None:
        self.broker = self._broker()
        self.core.begin(Endpoint("host", 5672, False))
        while not self.core.up:
            self.to_broker()
            self.core.receive(self.broker.data_to_send(), 0.0)

    def to_broker(self) -> list[type[Event]]:
        """Carry bytes to an obliging broker, and return the types of its events."""
        events = list(self.broker.receive(self.core.data_to_send(), 0.0))
        for each in events:
            obliging(self.broker, each)
            if isinstance(each, Transferred):
                self.bodies.append(decode_message(each.payload).body)
        return [type(each) for each in events]

    def lose(self) -> None:
        self.core.lost("cut")

    def serve(self) -> list[Any]:
        """Carry bytes in both directions until none are left, and return the bodies of all messages that the broker has received."""
        while self.to_broker():
            self.core.receive(self.broker.data_to_send(), 0.0)
        return self.bodies

    def open_session(self) -> ClientSession:
        opening = self.core.open_session(Acknowledge.AUTO, 0.0)
        wait = next(opening)
        try:
            while True:
                wait = opening.send(wait.condition())
        except StopIteration as stop:
            session: ClientSession = stop.value
            return session


@pytest.mark.parametrize("tls", [False, True])
def test_offered_address_without_a_scheme_has_tls_if_the_connection_has(tls: bool) -> None:
    wired = Wired()
    offered = [{Symbol("network-host"): name, Symbol("port"): 1, **scheme} for name, scheme in
               (("none", {}), ("plain", {Symbol("scheme"): "amqp"}), ("secure", {Symbol("scheme"): "amqps"}))]  # fmt: skip
    wired.core.begin(Endpoint("host", 5672, tls))
    while not wired.core.other_endpoints:
        for event in wired.broker.receive(wired.core.data_to_send(), 0.0):
            if isinstance(event, Opened):
                wired.broker.open(properties={Symbol("failover-server-list"): offered})
        wired.core.receive(wired.broker.data_to_send(), 0.0)
    assert wired.core.other_endpoints == [Endpoint("none", 1, tls), Endpoint("plain", 1, False), Endpoint("secure", 1, True)]


def test_session_that_timed_out_during_outage_is_not_begun_after_reconnect() -> None:
    wired = Wired()
    first = ClientSession(wired.core, Acknowledge.AUTO)
    wired.core.sessions.append(first)
    for _ in range(1100):  # more sessions than a broker allows
        with pytest.raises(TimedOut):
            wired.open_session()
    assert wired.core.sessions == [first]
    wired.connect()
    assert first.begun


def test_session_that_timed_out_before_answer_is_ended_after_begin() -> None:
    wired = Wired()
    wired.core.sessions.append(ClientSession(wired.core, Acknowledge.AUTO))
    wired.connect()
    with pytest.raises(TimedOut):
        wired.open_session()
    assert wired.to_broker() == [SessionBegun, SessionEnded]
    wired.core.receive(wired.broker.data_to_send(), 0.0)
    assert wired.core.up


def test_context_closed_before_its_session_begins_again_is_ended() -> None:
    wired = Wired()
    first, second = (ClientSession(wired.core, Acknowledge.AUTO) for _ in range(2))
    wired.core.sessions += [first, second]
    wired.core.begin(Endpoint("host", 5672, False))
    while not wired.core.opened:
        wired.to_broker()
        wired.core.receive(wired.broker.data_to_send(), 0.0)
    assert list(second.close(0.0)) == []
    assert wired.to_broker().count(SessionEnded) == 1


def test_failed_begin_of_last_session_closes_connection() -> None:
    wired = Wired()
    with pytest.raises(TimedOut):
        wired.open_session()
    assert wired.core.closing


# --- two tasks, one destination --------------------------------------------------------------------------------------------------


def give_up(operation: Operation[Any], how: str) -> None:
    if how == "cancelled":
        operation.close()
    else:
        with pytest.raises(TimedOut):
            operation.send(False)


def result_of(operation: Operation[T], wait: Wait) -> T:
    """Return the result of an operation whose conditions are all true."""
    try:
        while True:
            assert wait.condition()
            wait = operation.send(True)
    except StopIteration as stop:
        result: T = stop.value
        return result


def session_of(wired: Wired, mode: Acknowledge = Acknowledge.AUTO) -> ClientSession:
    session = ClientSession(wired.core, mode)
    wired.core.sessions.append(session)
    wired.connect()
    wired.serve()
    return session


def send(session: ClientSession, body: str) -> tuple[Operation[Message], Wait]:
    sending = session.send(Queue("q"), body, SendOptions(), 5.0)
    return sending, next(sending)


@pytest.mark.parametrize("how", ["timed out", "cancelled"])
def test_queued_message_is_sent_after_reconnect_when_task_that_requested_link_gave_up(how: str) -> None:
    wired = Wired()
    session = session_of(wired)
    wired.lose()
    first, _ = send(session, "one")
    assert list(session.send(Queue("q"), "two", SendOptions(), 5.0, SendCompletion(wait=False))) == []
    give_up(first, how)
    wired.connect()
    assert wired.serve() == ["two"]
    assert list(session.flush(5.0)) == []


@pytest.mark.parametrize("how", ["timed out", "cancelled"])
def test_task_gets_link_requested_by_task_that_gave_up(how: str) -> None:
    wired = Wired()
    session = session_of(wired)
    first, _ = send(session, "one")
    second, wait = send(session, "two")
    give_up(first, how)
    wired.serve()
    assert wait.condition()
    wait = second.send(True)
    assert wired.serve() == ["two"]
    assert result_of(second, wait).body == "two"


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize("how", ["timed out", "cancelled"])
def test_link_request_is_dropped_when_last_waiting_task_gives_up(how: str, *, connected: bool) -> None:
    wired = Wired()
    session = session_of(wired)
    if not connected:
        wired.lose()
    tasks = [send(session, body)[0] for body in ("one", "two", "three")]
    for task in tasks:
        assert len(session.senders) == 1
        give_up(task, how)
    assert session.senders == {}
    if not connected:
        wired.connect()
    assert wired.serve() == []
    assert list(session.flush(5.0)) == []


def test_link_to_temporary_queue_is_requested_again_after_reconnect() -> None:
    wired = Wired()
    session = session_of(wired)
    sending = session.send(TemporaryQueue("temp.1"), "one", SendOptions(), 5.0)
    wait = next(sending)
    wired.lose()
    wired.connect()
    wired.serve()
    wait = sending.send(wait.condition())
    assert wired.serve() == ["one"]
    assert result_of(sending, wait).body == "one"


def _send(session: ClientSession) -> Operation[Any]:
    return session.send(Queue("other"), "one", SendOptions(), 5.0)


def _send_in_a_transaction(session: ClientSession) -> Operation[Any]:
    session.begin()
    return _send(session)


@pytest.mark.parametrize(
    "ask",
    [
        _send,
        _send_in_a_transaction,
        lambda session: session.temporary(TemporaryQueue("temporary"), 5.0),
        lambda session: session.consumer(Subscription(Queue("q")), None, 1, 5.0),
        lambda session: session.core.open_session(Acknowledge.AUTO, 5.0),
    ],
    ids=["send", "send in a transaction", "temporary", "consumer", "session"],
)
def test_requests_between_close_of_broker_and_end_of_socket_are_done_on_next_connection(
    ask: Callable[[ClientSession], Operation[Any]],
) -> None:
    wired = Wired()
    session = session_of(wired)
    wired.broker.close(AmqpError(CONNECTION_FORCED, "closed by an administrator"))
    wired.core.receive(wired.broker.data_to_send(), 0.0)
    asked = ask(session)
    wait = next(asked)
    assert not wait.condition()
    wired.lose()
    wired.connect()
    ended = False
    while not ended:
        wired.serve()
        assert wait.condition()
        try:
            wait = asked.send(True)
        except StopIteration:
            ended = True


# --- transactions ----------------------------------------------------------------------------------------------------------------


def test_transaction_declared_just_before_connection_loss_is_declared_again() -> None:
    wired = Wired()
    session = session_of(wired)
    session.begin()
    sending = session.send(Queue("q"), "one", SendOptions(), 5.0)
    wait = next(sending)
    wired.serve()
    wait = sending.send(wait.condition())
    wired.serve()
    assert wait.condition()  # the transaction is declared, but the sender has not continued yet
    wired.lose()
    wired.connect()
    wired.serve()
    wait = sending.send(True)
    assert session.transaction is not None
    assert session.transaction.id is None
    while session.transaction.id is None:
        wired.serve()
        wait = sending.send(wait.condition())


# --- listeners -------------------------------------------------------------------------------------------------------------------


def test_listener_leaves_lost_transaction_to_block_of_other_task() -> None:
    wired = Wired()
    session = session_of(wired)
    consuming = session.consumer(Subscription(Queue("q")), None, 1, 5.0)
    wait = next(consuming)
    wired.serve()
    consumer = result_of(consuming, wait)
    block = session.begin()
    sending = session.send(Queue("other"), "half", SendOptions(), 5.0)
    wait = next(sending)
    while not session.transaction.state.txn_id:
        wired.serve()
        wait = sending.send(wait.condition())
    wired.lose()
    wired.connect()
    wired.serve()
    consumer.listener = lambda _: None
    listening = session.next_for_listener()
    wait = next(listening)
    assert wait.condition()
    wait = listening.send(True)
    assert not wait.condition()
    with pytest.raises(TransactionRolledBack):
        list(session.end(block, 5.0, failed=False))
    assert wait.condition()


# --- transactions that the broker or another task ends ------------------------------------------------------------------------------------


def result_while_serving(wired: Wired, operation: Operation[T]) -> T:
    """Return the result of an operation while the broker serves. The last bytes of the operation are not carried."""
    try:
        wait = next(operation)
        while True:
            wired.serve()
            assert wait.condition()
            wait = operation.send(True)
    except StopIteration as stop:
        result: T = stop.value
        return result


def test_transaction_is_handed_over_after_all_message_frames_are_written() -> None:
    wired = Wired(ConnectionLimits(incoming_window_frames=4))
    session = session_of(wired, Acknowledge.TRANSACTED)
    large = "x" * 10 * DELIVERY_FRAME_SIZE_BYTES_MAX
    result_while_serving(wired, session.send(Queue("q"), large, SendOptions(), 5.0))
    handing_over = session.hand_over(5.0, answered=False)
    wait = next(handing_over)  # a request on another session would overtake the last frames
    assert not wait.condition()
    while not wired.bodies:
        wired.to_broker()
        wired.core.receive(wired.broker.data_to_send(), 0.0)
    transaction = result_of(handing_over, wait)
    assert transaction is not None
    assert result_while_serving(wired, session.refusal(transaction, 5.0)) is None
    assert wired.bodies == [large]


@pytest.mark.parametrize("answered", [True, False])
def test_transaction_declared_in_advance_is_declared_again_after_reconnect(*, answered: bool) -> None:
    wired = Wired()
    session = session_of(wired, Acknowledge.TRANSACTED)
    result_while_serving(wired, session.send(Queue("q"), "one", SendOptions(), 5.0))
    assert result_while_serving(wired, session.hand_over(5.0, answered=True)) is not None
    session.declare_ahead()
    if answered:
        wired.serve()
    wired.lose()
    session.declare_ahead()  # without a link, nothing is declared
    wired.connect()
    result_while_serving(wired, session.send(Queue("q"), "two", SendOptions(), 5.0))
    result_while_serving(wired, session.commit(5.0))
    assert wired.bodies == ["one", "two"]
