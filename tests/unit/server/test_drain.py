"""Drains at the broker: a consumer asks for the available messages, and the broker reports when the consumer has them."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.amqp.events import Event, Flowed, Transferred
from bascule.amqp.link import SenderLink
from bascule.server.client import Client
from bascule.server.links import BrowserLink, ConsumerLink
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.unit.amqp.pair import Pair, events_of
from tests.unit.server.served import Served


def broker_with(messages: int) -> tuple[BrokerInMemory, Client]:
    broker = BrokerInMemory()
    for number in range(messages):
        broker.send("q", message_bytes(number), Sender(), number)
    broker.settle()
    return broker, Served(broker).connection().client


def consume(broker: BrokerInMemory, client: Client, link: SenderLink) -> None:
    queue = broker.engine.queue("q")
    port = ConsumerLink(client, link, settled=False)
    port.consumer = broker.engine.attach(queue, port)
    broker.engine.wake(queue)
    broker.settle()


def browse(broker: BrokerInMemory, client: Client, link: SenderLink) -> None:
    link.context = BrowserLink(client, link, broker.engine.queue("q"))
    link.context.pump()


@pytest.mark.parametrize("serve", [consume, browse])
@pytest.mark.parametrize("messages", [0, 1, 2, 3])
def test_a_drain_is_answered_even_if_messages_use_up_its_credit(serve: Any, messages: int) -> None:
    broker, client = broker_with(messages)
    pair = Pair()
    receiver, sender = pair.consumer()
    receiver.flow(2, drain=True)
    pair.run()
    serve(broker, client, sender)
    events: list[Event] = pair.run().at_client
    assert len(events_of(Transferred, events)) == min(messages, 2)
    assert len(events_of(Flowed, events)) == 1
    assert receiver.credit == 0
    assert not receiver.drain
