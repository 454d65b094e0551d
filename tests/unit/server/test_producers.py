"""The credit and the answers of a producer's link."""

from __future__ import annotations

import asyncio

import pytest

from bascule.amqp.events import Dispositioned
from bascule.amqp.frames import frame_head
from bascule.amqp.performatives import Rejected, Source, Target, Transfer
from bascule.broker.policy import AddressPolicy, Policy
from bascule.jms.message import JmsMessage, encode_message
from bascule.server import links
from bascule.server.links import PRODUCER_CREDIT
from bascule.testing.broker import BrokerInMemory, message_bytes
from tests.unit.server.served import Client, Served, run_async


@run_async
async def test_a_producer_that_aborts_messages_gets_credit_again() -> None:
    served = Served()
    client = Client(served)
    link = client.producer("q")
    for number in range(PRODUCER_CREDIT):
        assert link.credit > 0
        link.credit -= 1
        link.delivery_count += 1
        client.session._next_outgoing_id += 2
        begun = Transfer(link.handle, number, b"%d" % number, more=True)
        client.amqp.out += [
            frame_head(client.session.channel, begun, 1) + b"x",
            frame_head(client.session.channel, Transfer(link.handle, aborted=True), 0),
        ]
        served.settle(client)
    assert link.credit >= PRODUCER_CREDIT // 2


def relay(client: Client, address: str) -> None:
    """Send a message that names its queue over a link without an address."""
    link = client.session.attach_sender(f"relay to {address}", Source(), Target())
    client.served.settle(client)
    link.send(encode_message(JmsMessage(destination=address, destination_kind="queue", body_kind="text", body="x")))
    client.served.settle(client)


@run_async
async def test_message_of_an_anonymous_producer_is_refused_if_its_queue_is_full() -> None:
    served = Served(BrokerInMemory(policy=Policy(AddressPolicy(max_messages=1))))
    client = Client(served)
    for address in ("q", "q", "other"):
        relay(client, address)
    assert [served.engine.queue(address).held_messages for address in ("q", "other")] == [1, 1]
    refused = [event.state for event in client.events_of(Dispositioned) if isinstance(event.state, Rejected)]
    assert [str(state.error.condition) for state in refused] == ["amqp:resource-limit-exceeded"]


@pytest.mark.parametrize("consumed", [True, False])
@run_async
async def test_producer_faster_than_consumers_gets_delayed_credit(consumed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "OUTRUN_MESSAGES", 5)
    monkeypatch.setattr(links, "YIELD_S", 0.0)
    served = Served()
    served.fill("q", 6)
    client = Client(served)
    if consumed:
        client.consumer("q")
    producer = client.producer("q")
    left = producer.credit // 4
    while producer.credit > left:
        producer.send(message_bytes("x"), settled=True)
    served.settle(client)
    assert (producer.credit == left) is consumed, "a queue that nobody consumes from may be filled"
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    served.settle(client)
    assert producer.credit > left


@run_async
async def test_clients_are_not_read_while_the_journal_is_congested() -> None:
    served = Served()
    client = Client(served)
    served.congested = True
    producer = client.producer("q")
    assert not client.wire.reading
    assert list(served.held_back) == [client.connection]
    served.congested, served.held_back = False, {}
    client.connection.read_on()
    assert client.wire.reading
    producer.send(message_bytes("x"))
    served.settle(client)
    assert served.engine.queue("q").held_messages == 1
