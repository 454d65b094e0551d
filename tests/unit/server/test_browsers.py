"""Browsers, and consumers whose messages are settled when they are sent."""

from __future__ import annotations

from typing import Any

from bascule.amqp.events import Transferred
from bascule.amqp.link import ReceiverLink
from bascule.amqp.performatives import SenderSettleMode, Source, Target
from bascule.amqp.types import Described, Symbol
from bascule.jms.message import decode_message
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.unit.server.served import QUEUE, Client, Served, run_async

SELECTOR = Symbol("apache.org:selector-filter:string")


class Clock:
    """A clock that the test advances, in milliseconds."""

    now_ms = 1_000

    def __call__(self) -> int:
        return self.now_ms


def send(served: Served, *bodies: str, **options: Any) -> None:
    for body in bodies:
        served.broker.send("q", message_bytes(body, **options), Sender(), 0)
    served.broker.settle()


def shown(client: Client, link: ReceiverLink) -> list[Any]:
    return [decode_message(event.payload).body for event in client.events_of(Transferred) if event.link is link]


@run_async
async def test_browser_sees_neither_expired_messages_nor_messages_sent_after_its_start() -> None:
    clock = Clock()
    served = Served(BrokerInMemory(clock=clock))
    send(served, "short", ttl_ms=5)
    send(served, "1", "2", "3")
    clock.now_ms += 10
    client = Client(served)
    browser = client.consumer("q", 1, distribution_mode="copy")
    send(served, "late")
    browser.flow(10)
    served.settle(client)
    assert shown(client, browser) == ["1", "2", "3"]
    assert shown(client, client.consumer("q", 10)) == ["1", "2", "3", "late"], "a browser removes nothing from the queue"


@run_async
async def test_browser_sees_only_messages_that_match_its_selector() -> None:
    served = Served()
    for colour in ("red", "blue", "red"):
        send(served, colour, properties={"colour": colour})
    client = Client(served)
    wanted = {SELECTOR: Described(SELECTOR, "colour = 'red'")}
    assert shown(client, client.consumer("q", 10, distribution_mode="copy", filter=wanted)) == ["red", "red"]


@run_async
async def test_message_is_removed_when_it_is_sent_settled() -> None:
    served = Served()
    send(served, "1", "2")
    client = Client(served)
    link = client.session.attach_receiver("c", Source("q", capabilities=QUEUE), Target(), snd_settle_mode=SenderSettleMode.SETTLED)
    served.settle(client)
    link.flow(1)
    served.settle(client)
    assert shown(client, link) == ["1"]
    client.connection.connection_lost(None)
    served.broker.settle()
    other = Client(served, "other")
    assert shown(other, other.consumer("q", 10)) == ["2"]
