"""Stalled clients: after a time of silence, other clients get the messages that they held."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from bascule.amqp.connection import Connection
from bascule.amqp.limits import ConnectionLimits
from bascule.amqp.performatives import Role, Source, Target
from bascule.amqp.sasl import AnonymousClient, SaslClient
from bascule.testing.broker import message_bytes
from tests.support.speed import SLOWNESS
from tests.unit.server.served import QUEUE, Client, Served, run_async

BODY = "x" * 100_000


@asynccontextmanager
async def stalled_client(served: Served, address: str, credit: int) -> AsyncIterator[None]:
    """Attach a consumer over a socket, and then neither read nor write."""
    loop = asyncio.get_running_loop()
    listener = await loop.create_server(served.connection, "127.0.0.1", 0)
    storing = loop.create_task(store(served))

    def stop() -> socket.socket:
        client = Connection(Role.CLIENT, container_id="hung", sasl=SaslClient([AnonymousClient()]))
        client.open()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(listener.sockets[0].getsockname())
        session = client.begin()
        link = session.attach_receiver("consumer", Source(address, capabilities=QUEUE), Target())
        while not link.attached:
            sock.sendall(client.data_to_send())
            data = sock.recv(65536)
            assert data, "the server has closed the connection"
            client.receive(data, time.monotonic())
        link.flow(credit)
        sock.sendall(client.data_to_send())
        return sock

    sock = await loop.run_in_executor(None, stop)
    try:
        yield
    finally:
        sock.close()
        listener.close()
        storing.cancel()


async def store(served: Served) -> None:
    """Store all records continuously, like Kafka."""
    while True:
        served.broker.settle()
        served.send_output()
        await asyncio.sleep(0.01)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(25 * SLOWNESS):
        while not true():
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("count", "body"), [(300, BODY), (3, "small")], ids=["more-than-buffers-take", "all-of-it-sent"])
@run_async
async def test_messages_of_a_stalled_client_are_released_after_the_idle_timeout(count: int, body: str) -> None:
    served = Served(idle_timeout_s=2.5)  # a shorter timeout would depend on the load of the machine
    served.fill("q", count, body)
    queue = served.engine.addresses.anycast["q"]
    for _ in range(2):
        async with stalled_client(served, "q", credit=1000):
            await until(lambda: queue.delivering_count > 0)
            await until(lambda: not queue.consumers and not queue.delivering_count)
    first, *others = queue.waiting()
    assert len(others) == count - 1
    assert queue.delivery_count(first) == 2
    assert {queue.delivery_count(message) for message in others} <= {
        0,
        1,
    }  # marked as delivered before, but no nearer to the dead-letter address


@run_async
async def test_a_client_that_the_broker_does_not_read_is_not_idle() -> None:
    served = Served(idle_timeout_s=0.1)
    client = Client(served)
    served.congested = True
    client.producer("q").send(message_bytes("x"))
    client.run()
    assert served.held_back == {client.connection: None}
    over = asyncio.Event()
    asyncio.get_running_loop().call_later(1.0, over.set)
    await over.wait()
    client.listen()
    assert not client.amqp.closed
    served.congested, served.held_back = False, {}
    client.connection.read_on()
    await until(lambda: client.wire.closing or client.wire.aborted)
    client.listen()
    assert "sent nothing" in str(client.amqp.error)


@run_async
async def test_a_socket_that_does_not_take_the_close_is_aborted() -> None:
    served = Served(idle_timeout_s=0.1)
    client = Client(served)
    client.connection.amqp.limits = ConnectionLimits(close_timeout_s=0.1)
    await until(lambda: client.wire.aborted)
    client.listen()
    assert client.amqp.closed
    assert "sent nothing" in str(client.amqp.error)


@run_async
async def test_client_that_has_closed_its_side_and_does_not_read_is_aborted() -> None:
    served = Served(idle_timeout_s=3600.0)
    client = Client(served)
    client.connection.amqp.limits = ConnectionLimits(close_timeout_s=0.1)
    client.producer("q")
    assert not client.wire.aborted
    client.connection.eof_received()
    await until(lambda: client.wire.aborted)
