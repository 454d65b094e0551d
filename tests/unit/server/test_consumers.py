"""Deliveries to a consumer's link, and their time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bascule.amqp import hot
from bascule.amqp.events import Detached, Dispositioned, SessionEnded
from bascule.amqp.limits import ConnectionLimits
from bascule.amqp.performatives import Source, Target
from bascule.server.actions import ACTIONS
from bascule.server.admin_access import LOCAL
from bascule.server.connection import UNREAD_ANSWERS_BYTES, WRITE_BUFFER_BYTES
from bascule.testing.broker import message_bytes
from tests.unit.server.served import QUEUE, Client, Served, run_async

BODY = "x" * 100_000


@pytest.mark.parametrize("drain", [False, True], ids=["credit", "drain"])
@run_async
async def test_credit_granted_with_the_attach_counts(drain: bool) -> None:
    served = Served()
    served.fill("q", 3)
    client = Client(served)
    served.engine.queue("another")  # in flight to the journal: the answer to the attach follows it
    link = client.session.attach_receiver("consumer", Source("q", capabilities=QUEUE), Target())
    link.credit, link.drain = 5, drain
    windows = (0, 100, 0, 100)
    client.amqp.out.append(hot.link_flow(client.session.channel, windows, link.handle, 0, link.credit, 0, drain, False))
    served.settle(client)
    assert client.received(link) == 3
    assert link.credit == (0 if drain else 2)


@run_async
async def test_deleting_a_queue_ends_only_its_consumer_even_if_its_window_is_full() -> None:
    served = Served()
    served.fill("q", 20)
    client = Client(served, limits=ConnectionLimits(incoming_window_frames=4))
    link, other = client.consumer("q"), client.consumer("another", credit=1, name="other")
    link.flow(20)
    client.say()  # the client does not read yet: 4 messages are in flight, the others wait for the window
    served.broker.settle()
    served.engine.delete_queue(served.engine.addresses.anycast["q"])
    served.settle(client)
    assert not client.events_of(SessionEnded)
    assert [event.link for event in client.events_of(Detached)] == [link]
    served.fill("another", 1)
    served.settle(client)
    assert client.received(other) == 1


@pytest.mark.parametrize("mode", ["move", "copy"])
@run_async
async def test_deliveries_to_a_connection_are_limited_by_its_unwritten_output(mode: str) -> None:
    served = Served()
    served.fill("q", 60, BODY)
    client = Client(served)
    link = client.consumer("q", distribution_mode=mode)
    link.flow(100, drain=True)
    client.say()
    turns, read = 0, 0
    while turns < 100 and client.received(link) < 60:
        served.broker.settle()
        served.send_output()
        written = sum(map(len, client.wire.written))
        assert written < WRITE_BUFFER_BYTES + 2 * len(BODY)
        if turns == 2:
            client.connection.pause_writing()
        client.listen()
        if turns == 20:
            assert client.received(link) == read
            client.connection.resume_writing()
            client.listen()
        read = client.received(link)
        assert link.drain or read == 60  # the broker answers the drain when the queue has no more messages
        turns += 1
        await asyncio.sleep(0)
    assert 20 < turns < 40
    served.settle(client)
    assert client.received(link) == 60
    assert (link.credit, link.drain) == (0, False)


@run_async
async def test_a_client_that_does_not_read_its_answers_is_no_longer_read() -> None:
    served = Served()
    client = Client(served)
    link = client.consumer("q")
    client.connection.pause_writing()
    while client.wire.reading:
        for _ in range(100):
            link.send_flow(echo=True)
        client.say()
        assert sum(map(len, client.wire.written)) < UNREAD_ANSWERS_BYTES + 10_000
    served.held_back[client.connection] = None
    client.connection.resume_writing()
    assert not client.wire.reading  # the broker has no room
    served.held_back.clear()
    client.connection.read_on()
    assert client.wire.reading
    client.connection.pause_writing()
    client.say()
    assert client.wire.reading


@run_async
async def test_a_broker_that_may_have_been_replaced_ignores_client_requests() -> None:
    served = Served()
    served.fill("q", 1)
    client = Client(served)
    consumer, producer = client.consumer("q"), client.producer("direct")
    waiting = client.consumer("direct", credit=1, name="waiting")
    served.up = False  # the process was suspended, and these are in its socket when it wakes
    consumer.flow(1)
    for durable in (True, False):
        producer.send(message_bytes("x", durable=durable))
    client.session.attach_receiver("late", Source("q", capabilities=QUEUE), Target())
    appended = len(served.broker.log.records)
    client.say()
    client.listen()
    served.broker.settle()
    assert not client.listen()
    assert client.received(consumer) == client.received(waiting) == 0
    assert not client.events_of(Dispositioned)
    assert len(served.broker.log.records) == appended


@run_async
async def test_a_broker_that_may_have_been_replaced_delivers_no_messages_freed_by_an_administrator() -> None:
    served = Served()
    served.fill("q", 1)
    holding, waiting = Client(served, "holding"), Client(served, "waiting")
    holding.consumer("q", credit=1)
    consumer = waiting.consumer("q", credit=1)
    served.up = False  # the process was suspended in the middle of that
    node: Any = served
    await ACTIONS["connections/close"].run(node, LOCAL, id="holding")
    waiting.run()
    assert waiting.received(consumer) == 0


@run_async
async def test_a_broker_that_may_have_been_replaced_delivers_no_messages_of_a_lost_client() -> None:
    served = Served()
    served.fill("q", 1)
    holder, other = Client(served, "holder"), Client(served, "other")
    assert holder.received(holder.consumer("q", credit=1)) == 1
    link = other.consumer("q", credit=1)
    served.up = False
    holder.connection.connection_lost(None)
    other.listen()
    assert not other.received(link)
