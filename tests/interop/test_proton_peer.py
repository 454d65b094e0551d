"""qpid-proton over a loopback socket, both as a client of Bascule's engine and as a server for it."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from bascule.amqp import performatives as p
from bascule.amqp.connection import Connection
from bascule.amqp.errors import NOT_FOUND, AmqpError
from bascule.amqp.events import AttachConfirmed, Attached, ConnectionClosed, Detached, Dispositioned, Event, Flowed, Opened, Transferred
from bascule.amqp.link import ReceiverLink, SenderLink
from bascule.amqp.performatives import ACCEPTED, Modified, Rejected, Released, Role, Source, Target
from bascule.amqp.sasl import AnonymousClient, AnonymousServer, PlainServer, SaslClient, SaslServer, password_check
from bascule.embedded.process import free_port

proton = pytest.importorskip("proton")
from proton import Message  # noqa: E402
from proton.utils import BlockingConnection, LinkDetached  # noqa: E402

TIMEOUT_S = 60.0


class Server(threading.Thread):
    """A small broker with one queue on Bascule's engine, for proton."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"amqp://127.0.0.1:{self.listener.getsockname()[1]}"
        self.queue: list[bytes] = []
        self.outcomes: list[Any] = []
        self.users: list[str | None] = []
        self.errors: list[AmqpError | None] = []
        self.consumers: list[SenderLink] = []

    def run(self) -> None:
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            with peer:
                self.serve(peer)

    def serve(self, peer: socket.socket) -> None:
        mechanisms = SaslServer({"PLAIN": lambda: PlainServer(password_check({"u": "p"})), "ANONYMOUS": AnonymousServer})
        connection = Connection(Role.SERVER, container_id="tiny", sasl=mechanisms, require_sasl=True, max_frame_size=4096)
        self.consumers = []
        while not connection.closed:
            data = peer.recv(65536)
            if not data:
                return
            for event in connection.receive(data, time.monotonic()):
                self.handle(connection, event)
            if connection.login_check is not None:
                connection.login_checked(connection.login_check())
            for link in self.consumers:
                while link.credit and self.queue:
                    link.send(self.queue.pop(0), context="sent")
                link.drained()
            peer.sendall(connection.data_to_send())

    def handle(self, connection: Connection, event: Event) -> None:
        match event:
            case Opened():
                self.users.append(connection.user)
                connection.open(offered_capabilities=("ANONYMOUS-RELAY",))
            case Attached(link=link) if getattr(link.source if isinstance(link, SenderLink) else link.target, "address", "") == "nowhere":
                link.refuse(AmqpError(NOT_FOUND, "no such node"))
            case Attached(link=ReceiverLink() as link):
                link.accept()
                link.flow(50)
            case Attached(link=SenderLink() as link):
                link.accept()
                self.consumers.append(link)
            case Transferred(link=link, payload=payload, settled=settled, delivery_id=delivery_id):
                self.queue.append(payload)
                if not settled:
                    link.settle(delivery_id, ACCEPTED)
                if link.credit < 25:
                    link.flow(50)
            case Dispositioned(session=session, state=state, settled=settled, deliveries=deliveries):
                self.outcomes.append(state)
                if not settled:
                    for delivery in deliveries:
                        session.settle_outgoing(delivery.delivery_id, state)
            case Detached(link=SenderLink() as link) if link in self.consumers:
                self.consumers.remove(link)
            case ConnectionClosed(error=error):
                self.errors.append(error)
            case _:
                pass


@pytest.fixture
def server() -> Iterator[Server]:
    started = Server()
    started.start()
    yield started
    started.listener.close()


@contextmanager
def connected(server: Server, **options: Any) -> Iterator[Any]:
    connection = BlockingConnection(server.url, timeout=TIMEOUT_S, **options)
    yield connection
    connection.close()


def until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never came true"
        threading.Event().wait(0.01)


def test_proton_sends_and_receives(server: Server) -> None:
    bodies = ["text", b"bytes", {"a": 1, "b": [1, 2.5, None, True]}, "x" * 20_000]
    with connected(server, allowed_mechs="ANONYMOUS") as connection:
        sender = connection.create_sender("queue")
        for number, body in enumerate(bodies * 30):
            sender.send(Message(body=body, id=number, properties={"n": number}, durable=True))
        receiver = connection.create_receiver("queue", credit=7)
        for number, body in enumerate(bodies * 30):
            message = receiver.receive(timeout=TIMEOUT_S)
            assert (message.body, message.properties["n"]) == (body, number)
            receiver.accept()
    until(lambda: len(server.errors) == 1)
    assert server.users == ["anonymous"]
    assert server.errors == [None]
    assert set(map(type, server.outcomes)) == {p.Accepted}


def test_outcomes_sent_by_proton_are_understood(server: Server) -> None:
    with connected(server, allowed_mechs="ANONYMOUS") as connection:
        sender = connection.create_sender("queue")
        for _ in range(3):
            sender.send(Message(body="x"))
        receiver = connection.create_receiver("queue", credit=3)
        for answer in (receiver.reject, lambda: receiver.release(delivered=False), lambda: receiver.release(delivered=True)):
            receiver.receive(timeout=TIMEOUT_S)
            answer()
    until(lambda: len(server.outcomes) == 3)
    assert {type(outcome) for outcome in server.outcomes} == {Rejected, Released, Modified}


def test_proton_receives_the_reason_of_a_refused_link(server: Server) -> None:
    with connected(server, allowed_mechs="ANONYMOUS") as connection:
        for create in (connection.create_sender, connection.create_receiver):
            with pytest.raises(LinkDetached, match="no such node"):
                create("nowhere")
        connection.create_sender("queue").send(Message(body="still here"))


def test_bascule_engine_as_client_exchanges_messages_with_a_proton_server() -> None:
    """A small broker like the one in proton's examples: messages to an address go to its consumers."""
    from proton.handlers import MessagingHandler
    from proton.reactor import Container

    class Echo(MessagingHandler):
        def __init__(self) -> None:
            super().__init__(auto_accept=True, prefetch=20)
            self.port = 0
            self.out: Any = None
            self.waiting: list[Any] = []
            self.ready = threading.Event()

        def on_start(self, event: Any) -> None:
            self.port = free_port()
            self.acceptor = event.container.listen(f"127.0.0.1:{self.port}")
            self.ready.set()

        def on_link_opening(self, event: Any) -> None:
            event.link.source.address = event.link.remote_source.address
            event.link.target.address = event.link.remote_target.address
            if event.link.is_sender:
                self.out = event.link

        def on_message(self, event: Any) -> None:
            self.waiting.append(event.message)
            self.pump()

        def on_sendable(self, event: Any) -> None:
            self.pump()

        def pump(self) -> None:
            while self.out is not None and self.out.credit and self.waiting:
                self.out.send(self.waiting.pop(0))

        def on_connection_closing(self, event: Any) -> None:
            self.acceptor.close()

    echo = Echo()
    container = Container(echo)
    thread = threading.Thread(target=container.run, daemon=True)
    thread.start()
    assert echo.ready.wait(TIMEOUT_S)
    messages = [bytes(Message(body=f"message {number}" * (1000 if number % 10 == 0 else 1)).encode()) for number in range(50)]
    received, outcomes = [], 0
    connection = Connection(Role.CLIENT, container_id="ours", sasl=SaslClient([AnonymousClient()]), max_frame_size=2048)
    connection.open(hostname="127.0.0.1")
    session = connection.begin()
    receiver = session.attach_receiver("in", Source("queue"), Target())
    sender = session.attach_sender("out", Source(), Target("queue"))
    waiting = list(messages)
    deadline_s = time.monotonic() + TIMEOUT_S
    with socket.create_connection(("127.0.0.1", echo.port), timeout=TIMEOUT_S) as peer:
        while not connection.closed:
            peer.sendall(connection.data_to_send())
            assert time.monotonic() < deadline_s
            for event in connection.receive(peer.recv(65536), time.monotonic()):
                match event:
                    case AttachConfirmed() if event.link is receiver:
                        receiver.flow(100)
                    case Flowed():
                        while sender.credit and waiting:
                            sender.send(waiting.pop(0))
                    case Dispositioned(state=p.Accepted(), deliveries=deliveries):
                        outcomes += len(deliveries)
                    case Transferred():
                        received.append(event.payload)
                        receiver.settle(event.delivery_id, ACCEPTED)
                    case _:
                        pass
            if len(received) == outcomes == len(messages):
                connection.close()
    assert [_body(payload) for payload in received] == [_body(payload) for payload in messages]
    assert connection.error is None
    thread.join(TIMEOUT_S)


def _body(encoded: bytes) -> Any:
    message = Message()
    message.decode(encoded)
    return message.body
