"""A server on the real protocol engine, with the reactions of a test."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from bascule.amqp.connection import Connection
from bascule.amqp.errors import AmqpError
from bascule.amqp.events import Attached, Flowed, Opened, Transferred
from bascule.amqp.events import DeclareReceived as DeclareAsked
from bascule.amqp.events import Discharged as DischargeAsked
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.amqp.performatives import ACCEPTED, Declared, Role, TransactionalState
from bascule.amqp.sasl import AnonymousServer, PlainServer, SaslServer, ServerMechanism, password_check
from bascule.client.message import Message, encode
from bascule.jms.message import JmsMessage, decode_message

React = Callable[[Connection, Any], None]
BODIES = ("one", "two", "three")


def obliging(connection: Connection, event: Any) -> None:
    """Accept everything. A consumer gets as many messages as it has credit for, at most three in total."""
    match event:
        case Opened():
            connection.open()
        case Attached():
            event.link.accept()
            if isinstance(event.link, ReceiverLink):
                event.link.flow(10_000)
            else:
                event.link.context = iter([encode(Message(body)) for body in BODIES])
        case DeclareAsked():
            event.link.settle(event.delivery_id, Declared(b"txn"))
        case DischargeAsked():
            event.link.settle(event.delivery_id, ACCEPTED)
        case Transferred():
            event.link.settle(event.delivery_id, ACCEPTED if event.txn_id is None else TransactionalState(event.txn_id, ACCEPTED))
        case Flowed() if isinstance(event.link, SenderLink):
            while event.link.credit and (data := next(event.link.context, None)):
                event.link.send(data)
            event.link.drained()


def ending_the_first_consumer(condition: str) -> React:
    """React like ``obliging``, but detach the first consumer when it gives credit."""
    ended: list[SenderLink] = []

    def react(connection: Connection, event: Any) -> None:
        if isinstance(event, Flowed) and isinstance(event.link, SenderLink) and not ended:
            ended.append(event.link)
            event.link.detach(AmqpError(condition, "queue 'q' has been deleted"))
        elif not (isinstance(event, Flowed) and event.link in ended):
            obliging(connection, event)

    return react


def serving(answer: Callable[[SenderLink, JmsMessage], None]) -> React:
    """React like ``obliging``, with one temporary queue. ``answer`` gets each request, and the link for its answer."""

    def react(connection: Connection, event: Any) -> None:
        match event:
            case Attached() if getattr(event.link.target, "dynamic", False):
                assert connection.context is None
                event.link.target.address = "temp.1"
                event.link.accept(target=event.link.target)
                event.link.flow(1)
            case Attached() if isinstance(event.link, SenderLink):
                event.link.accept()
                event.link.context = iter(())
                connection.context = event.link
            case Transferred():
                request = decode_message(event.payload)
                assert (request.reply_to, request.reply_to_kind) == ("temp.1", "temporary-queue")
                answer(connection.context, request)
                event.link.settle(event.delivery_id, ACCEPTED)
            case _:
                obliging(connection, event)

    return react


@contextmanager
def server(
    *reactions: React, tls: ssl.SSLContext | None = None, mechanisms: dict[str, Callable[[], ServerMechanism]] | None = None
) -> Iterator[str]:
    """Run a server in a thread and yield its URL.

    The server accepts one connection at a time, each with the next reaction. A reaction that raises OSError breaks the connection.
    """
    mechanisms = mechanisms or {
        "PLAIN": lambda: PlainServer(password_check({"ann": "hush"})),
        "ANONYMOUS": AnonymousServer,
    }
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            for react in reactions:
                peer, _ = listener.accept()
                connection = Connection(Role.SERVER, container_id="server", sasl=SaslServer(mechanisms), require_sasl=True)
                with peer:
                    try:
                        if tls is not None:
                            peer = tls.wrap_socket(peer, server_side=True)
                        while not connection.closed and (data := peer.recv(65536)):
                            for event in connection.receive(data, time.monotonic()):
                                react(connection, event)
                            if connection.login_check is not None:
                                connection.login_checked(connection.login_check())
                            peer.sendall(connection.data_to_send())
                    except OSError:
                        pass
                    finally:
                        peer.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"{'amqp' if tls is None else 'amqps'}://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(30)
        assert not thread.is_alive()
