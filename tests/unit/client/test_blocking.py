"""The blocking client against a server that does what each test says, on the real protocol engine."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.errors import NOT_FOUND, AmqpError
from bascule.amqp.events import Attached, Flowed, Opened, Transferred
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.amqp.performatives import ACCEPTED, Error, Rejected, Released, Role
from bascule.amqp.sasl import AnonymousServer, PlainServer, SaslServer, ServerMechanism, password_check
from bascule.client.blocking import Address, Client, ConnectionLost, Refused, TimedOut
from bascule.core.errors import InvalidInput, Unavailable

React = Callable[[Connection, Any], None]


def obliging(connection: Connection, event: Any) -> None:
    """Accept everything; a consumer gets as many messages as it asks for, up to three in all."""
    match event:
        case Opened():
            connection.open()
        case Attached():
            event.link.accept()
            if isinstance(event.link, ReceiverLink):
                event.link.flow(1000)
            else:
                event.link.context = iter((b"one", b"two", b"three"))
        case Transferred():
            event.link.settle(event.delivery_id, ACCEPTED)
        case Flowed() if isinstance(event.link, SenderLink):
            while event.link.credit and (data := next(event.link.context, None)):
                event.link.send(data, settled=True)
            event.link.drained()


@contextmanager
def server(react: React) -> Iterator[Address]:
    """One connection, on a thread of its own; a reaction that raises OSError cuts it."""
    mechanisms: dict[str, Callable[[], ServerMechanism]] = {
        "PLAIN": lambda: PlainServer(password_check({"ann": "hush"})),
        "ANONYMOUS": AnonymousServer,
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            peer, _ = listener.accept()
            connection = Connection(Role.SERVER, container_id="server", sasl=SaslServer(mechanisms), require_sasl=True)
            with peer:
                try:
                    while not connection.closed and (data := peer.recv(65536)):
                        for event in connection.receive(data, time.monotonic()):
                            react(connection, event)
                        peer.sendall(connection.data_to_send())
                except OSError:
                    pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address("127.0.0.1", listener.getsockname()[1])
        thread.join(10)
        assert not thread.is_alive()


def test_messages_are_sent_ahead_and_all_accepted_after_a_flush() -> None:
    with server(obliging) as address, Client(address) as client:
        sender = client.sender("q")
        for _ in range(600):
            sender.send(b"x")
        sender.flush()
        assert sender.accepted == 600


def test_messages_are_received_until_there_are_none() -> None:
    with server(obliging) as address, Client(address) as client:
        receiver = client.receiver("q")
        assert [delivery.data for _ in range(3) if (delivery := receiver.receive(5.0))] == [b"one", b"two", b"three"]
        assert receiver.receive(0.05) is None


def test_a_browser_sees_all_and_ends() -> None:
    with server(obliging) as address, Client(address) as client:
        assert [delivery.data for delivery in client.receiver("q", browse=True).drain(2)] == [b"one", b"two", b"three"]


def test_a_refused_link_says_why() -> None:
    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Attached):
            event.link.refuse(AmqpError(NOT_FOUND, "no such place"))
        else:
            obliging(connection, event)

    with server(react) as address, Client(address) as client, pytest.raises(Refused, match="amqp:not-found: no such place"):
        client.sender("q")


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

    with server(react) as address, Client(address) as client:
        sender = client.sender("q")
        sender.send(b"x")
        with pytest.raises(Refused, match=text):
            sender.flush()


def test_a_server_that_does_not_answer_is_given_up() -> None:
    def react(connection: Connection, event: Any) -> None:
        if not isinstance(event, Transferred):
            obliging(connection, event)

    with server(react) as address, Client(address, timeout_s=0.2) as client:
        sender = client.sender("q")
        sender.send(b"x")
        with pytest.raises(TimedOut, match=r"within 0\.2 s"):
            sender.flush()


def test_a_connection_that_breaks_is_told_as_lost() -> None:
    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            raise ConnectionResetError
        obliging(connection, event)

    with server(react) as address, Client(address) as client:
        sender = client.sender("q")
        sender.send(b"x")
        with pytest.raises(ConnectionLost):
            sender.flush()


def test_a_server_that_closes_says_why() -> None:
    def react(connection: Connection, event: Any) -> None:
        obliging(connection, event)
        if isinstance(event, Transferred):
            connection.close(AmqpError("amqp:connection:forced", "going down"))

    with server(react) as address, Client(address) as client:
        sender = client.sender("q")
        sender.send(b"x")
        sender.send(b"y")
        with pytest.raises(ConnectionLost, match="amqp:connection:forced: going down"):
            client.receiver("q")


def test_a_user_is_let_in_with_the_right_password_only() -> None:
    with server(obliging) as address, Client(address._replace(user="ann", password="hush")) as client:
        client.sender("q")
    with server(obliging) as address, pytest.raises(Refused, match="amqp:unauthorized-access"):
        Client(address._replace(user="ann", password="wrong"))


def test_nobody_there_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(Unavailable, match=f"no broker at 127.0.0.1:{port}: Connection refused"):
        Client(Address("127.0.0.1", port))


def test_an_address_is_parsed_with_its_user() -> None:
    assert Address.parse("amqp://ann:h%40sh@broker:1234") == Address("broker", 1234, "ann", "h@sh")
    assert Address.parse("amqp://[::1]") == Address("::1", 5672)
    for wrong in ("http://a", "amqp://", "amqp://a:b", "amqp://a/queue"):
        with pytest.raises(InvalidInput):
            Address.parse(wrong)
