"""The threads of a blocking connection: which one writes to the socket, and which ones an answer wakes."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.events import Flowed, Transferred
from bascule.client import Context, Queue, TimedOut, connect
from bascule.core.errors import BasculeError
from bascule.jms.message import decode_message
from tests.unit.client.blocking_servers import QUEUE, eventually
from tests.unit.client.server import obliging, server

WAIT_S: Final = 60
#: Exit codes of a forked child.
REFUSED, SENT = 0, 1


class Recording:
    """An obliging server that keeps the bodies of all messages."""

    def __init__(self) -> None:
        self.bodies: list[Any] = []

    def __call__(self, connection: Connection, event: Any) -> None:
        if isinstance(event, Transferred):
            self.bodies.append(decode_message(event.payload).body)
        obliging(connection, event)


@contextmanager
def sender(broker: Recording) -> Iterator[Context]:
    """Return a context that has sent a message, so that its links are attached."""
    with server(broker) as url, connect(url) as context:
        context.send(QUEUE, "first")
        broker.bodies.clear()
        yield context


def wakes(context: Context, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Return a list that grows by each call that wakes the thread of the connection."""
    loop, found = context._thread._loop, list[object]()
    wake = loop.call_soon_threadsafe

    def waking(*call: Any) -> Any:
        found.append(call)
        return wake(*call)

    monkeypatch.setattr(loop, "call_soon_threadsafe", waking)
    return found


def test_synchronous_send_does_not_wake_thread_of_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = Recording()
    with sender(broker) as context:
        woken = wakes(context, monkeypatch)
        for body in "abc":
            context.send(QUEUE, body)
        assert woken == []
    assert broker.bodies == ["a", "b", "c"]


def test_answers_to_one_thread_do_not_wake_another(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = Counter[int]()

    class Counting(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            waits[threading.get_ident()] += 1
            return super().wait(timeout)

    def react(connection: Connection, event: Any) -> None:
        if not (isinstance(event, Flowed) and event.link.source.address == "empty"):
            broker(connection, event)

    broker = Recording()
    with server(react) as url, connect(url) as context, context.create_context() as other:
        monkeypatch.setattr(threading, "Condition", Counting)
        consumer = other.consumer(Queue("empty"))
        receiver = threading.Thread(target=consumer.receive, args=(WAIT_S,))
        receiver.start()
        eventually(lambda: receiver.ident is not None and waits[receiver.ident] == 1)
        for body in "abc":
            context.send(QUEUE, body)
        assert receiver.ident is not None
        assert waits[receiver.ident] == 1
        consumer.close()
        receiver.join(WAIT_S)
        assert not receiver.is_alive()


def test_messages_larger_than_the_socket_takes_arrive_whole_and_in_order() -> None:
    broker = Recording()
    bodies = [letter * (1 << 20) for letter in "abc"]
    with sender(broker) as context, context.create_context() as other:
        wire: Any = context._thread._pump._wire
        wire._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        futures = [context.producer(QUEUE).send_async(body) for body in bodies[:2]]
        context.send(QUEUE, bodies[2])
        other.send(QUEUE, "last")
        assert [each.result(WAIT_S).body for each in futures] == bodies[:2]
    assert broker.bodies == [*bodies, "last"]


def test_forked_child_does_not_write_to_connection_of_its_parent() -> None:
    broker = Recording()
    with sender(broker) as context:
        if (child := os.fork()) == 0:
            code = SENT
            signal.alarm(WAIT_S)
            with suppress(BasculeError):
                try:
                    context.send(QUEUE, "of the child", timeout_s=0.01)
                except TimedOut:
                    code = REFUSED
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == REFUSED
        context.send(QUEUE, "of the parent")
    assert broker.bodies == ["of the parent"]
