"""What a client sends at once is handled in short turns, between which others are served."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from bascule.amqp import hot
from bascule.amqp.events import AttachConfirmed
from bascule.amqp.performatives import Source, Target
from bascule.amqp.states import LinkState
from bascule.amqp.types import Symbol
from bascule.broker.policy import DROP, AddressPolicy, Policy
from bascule.server import connection
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.unit.server.served import QUEUE, Client, Served, run_async

LINKS = 300
ACCEPTED, REJECTED, RELEASED = b"\x00\x53\x24\x45", b"\x00\x53\x25\x45", b"\x00\x53\x26\x45"


@run_async
async def test_many_attaches_at_once_take_many_turns_and_others_are_served_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    served = Served()
    busy, other = Client(served, "busy"), Client(served, "other")
    inbox = other.consumer("inbox", credit=10)
    for number in range(LINKS):
        busy.session.attach_sender(f"link-{number}", Source(), Target("q", capabilities=QUEUE))
    busy.connection.data_received(busy.amqp.data_to_send())
    assert busy.connection.behind
    assert not busy.wire.reading
    assert 0 < len(busy.connection.client.links) < LINKS
    served.broker.send("inbox", message_bytes("x"), Sender(), 1)
    served.settle(other)
    assert other.received(inbox) == 1
    turns = 0
    while busy.connection.behind:
        await asyncio.sleep(0)
        turns += 1
    assert turns > 3
    assert busy.wire.reading
    served.settle(busy)
    assert len(busy.told(AttachConfirmed)) == LINKS


@run_async
async def test_nothing_more_is_handled_of_a_client_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    served = Served()
    client = Client(served)
    for number in range(LINKS):
        client.session.attach_sender(f"link-{number}", Source(), Target("q", capabilities=QUEUE))
    client.connection.data_received(client.amqp.data_to_send())
    client.connection.connection_lost(None)
    for _ in range(3):
        await asyncio.sleep(0)
    assert len(client.connection.client.links) == 0
    assert served.engine.addresses.producers == {}
    assert served.contained == []


@pytest.mark.parametrize("role", ["producer", "consumer"])
@run_async
async def test_nothing_long_is_kept_of_an_attach_that_is_answered(role: str) -> None:
    served = Served()
    client = Client(served)
    long = {Symbol("long"): "x" * 60_000}
    if role == "producer":
        client.session.attach_sender("link", Source(), Target("q", capabilities=QUEUE), properties=long)
    else:
        client.session.attach_receiver("link", Source("q", capabilities=QUEUE, dynamic_node_properties=long), Target())
    served.settle(client)
    assert len(client.told(AttachConfirmed)) == 1
    (link,) = client.connection.client.links
    assert link.remote.properties is None
    assert link.remote.source is None
    assert link.local is None


@run_async
async def test_nothing_long_is_kept_of_an_attach_that_is_refused() -> None:
    served = Served()
    client = Client(served)
    client.session.attach_sender("link", Source(), Target("", capabilities=QUEUE), properties={Symbol("long"): "x" * 60_000})
    client.say()
    (link,) = client.connection.amqp.sessions[0].links.values()
    assert link.state is LinkState.DETACH_SENT
    assert link.remote.properties is None
    assert link.local is None


def about(first: int, last: int, state: bytes = ACCEPTED) -> bytes:
    """Return the frame of a receiver that settles a range of deliveries."""
    return hot.disposition(0, True, first, last, True, state)


@pytest.mark.parametrize("state", [ACCEPTED, REJECTED, RELEASED])
@run_async
async def test_wide_disposition_takes_many_turns_and_the_frames_behind_it_wait(monkeypatch: pytest.MonkeyPatch, state: bytes) -> None:
    served = Served()
    busy, other = Client(served, "busy"), Client(served, "other")
    served.fill("q", LINKS)
    inbox, link = other.consumer("inbox", credit=10), busy.consumer("q", credit=LINKS)
    assert busy.received(link) == LINKS
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    link.detach()
    busy.connection.data_received(about(0, LINKS - 1, state) + busy.amqp.data_to_send())
    assert busy.connection.behind
    assert not busy.wire.reading
    (consumer,) = served.engine.queue("q").consumers
    assert len(consumer.unacked) == LINKS - connection.DELIVERIES_PER_PIECE
    served.broker.send("inbox", message_bytes("x"), Sender(), 1)
    served.settle(other)
    assert other.received(inbox) == 1
    turns = 1
    while busy.connection.behind:
        await asyncio.sleep(0)
        turns += 1
    assert turns >= LINKS // connection.DELIVERIES_PER_PIECE
    assert busy.wire.reading
    served.settle(busy)
    queue = served.engine.queue("q")
    assert (len(queue.consumers), queue.held_messages) == (0, LINKS if state is RELEASED else 0)
    assert served.engine.queue("DLQ").held_messages == (LINKS if state is REJECTED else 0)


@run_async
async def test_wide_disposition_does_not_settle_what_is_sent_before_all_of_it_is_handled(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    client = Client(served)
    served.fill("q", LINKS)
    link = client.consumer("q", credit=2 * LINKS)
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    client.connection.data_received(about(0, 10 * LINKS))
    assert client.connection.behind
    served.fill("q", LINKS)
    client.run()
    while client.connection.behind:
        await asyncio.sleep(0)
    assert client.received(link) == 2 * LINKS
    (consumer,) = served.engine.queue("q").consumers
    assert len(consumer.unacked) == LINKS


@run_async
async def test_client_waits_while_a_queue_drops_many_messages_for_its_own() -> None:
    served = Served(BrokerInMemory(policy=Policy(AddressPolicy(when_full=DROP, max_messages=2_000)), turn_steps=1_000))
    busy, other = Client(served, "busy"), Client(served, "other")
    inbox, producer = other.consumer("inbox", credit=10), busy.producer("q")
    for number in range(1_500):
        served.broker.send("q", message_bytes(number, durable=False), Sender(), number)
    served.broker.settle()
    queue = served.engine.queue("q")
    queue.settings = dataclasses.replace(queue.settings, max_messages=10)
    for body in ("first", "second"):
        producer.send(message_bytes(body, durable=False))
    producer.detach()
    busy.connection.data_received(busy.amqp.data_to_send())
    assert busy.connection.behind
    assert not busy.wire.reading
    assert len(busy.connection.client.links) == 1
    served.broker.send("inbox", message_bytes("x"), Sender(), 1)
    served.settle(other)
    assert other.received(inbox) == 1
    while busy.connection.behind:
        served.engine.go_on()
        await asyncio.sleep(0)
    assert busy.wire.reading
    served.settle(busy)
    assert len(busy.connection.client.links) == 0
    assert queue.held_messages == 10
    assert [served.broker.engine.bodies.read(message)[-6:] for message in queue.waiting()][-1] == b"second"


@run_async
async def test_rest_of_a_wide_disposition_is_forgotten_with_its_client(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    client = Client(served)
    served.fill("q", LINKS)
    client.consumer("q", credit=LINKS)
    monkeypatch.setattr(connection, "TURN_S", 0.0)
    client.connection.data_received(about(0, LINKS - 1))
    client.connection.connection_lost(None)
    await asyncio.sleep(0)
    served.broker.settle()
    assert served.engine.queue("q").held_messages == LINKS - connection.DELIVERIES_PER_PIECE
    assert served.contained == []
