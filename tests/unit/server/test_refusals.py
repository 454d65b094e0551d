"""Refusals of a connection, and the effect of a consumer's outcomes on messages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bascule.amqp.errors import (
    INTERNAL_ERROR,
    INVALID_FIELD,
    NOT_ALLOWED,
    NOT_FOUND,
    NOT_IMPLEMENTED,
    RESOURCE_LIMIT_EXCEEDED,
    LimitExceeded,
)
from bascule.amqp.events import ConnectionClosed, Detached, Dispositioned, Transferred
from bascule.amqp.performatives import Accepted, Modified, Rejected, Released, Source, Target
from bascule.amqp.types import Described, Symbol, ULong
from bascule.broker.addresses import TEMPORARY_PREFIX
from bascule.broker.errors import BrokerFault
from bascule.core.destination import ADDRESS_MAX
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.testing.broker import message_bytes
from tests.unit.server.served import QUEUE, TOPIC, Client, Served, run_async

SHARED: Any = (*TOPIC, Symbol("shared"))
DURABLE: Any = {"durable": 2, "expiry_policy": "never"}


def selector(text: Any) -> Any:
    return {Symbol("jms-selector"): Described(Symbol("apache.org:selector-filter:string"), text)}


def produce(address: Any) -> Callable[[Client], None]:
    return lambda client: client.session.attach_sender("producer", Source(), Target(address, capabilities=QUEUE)) and None


def consume(address: Any, capabilities: Any = QUEUE, **source: Any) -> Callable[[Client], None]:
    return lambda client: client.session.attach_receiver("sub", Source(address, capabilities=capabilities, **source), Target()) and None


def beside(first: Callable[[Client], None], second: Callable[[Client], None]) -> Callable[[Client], None]:
    """Attach a link of one session, and then one of another session of the same connection with the same name."""

    def both(client: Client) -> None:
        first(client)
        client.served.settle(client)
        client.session = client.amqp.begin()
        client.run()
        second(client)

    return both


def without_target(client: Client) -> None:
    client.session.attach_sender("producer", Source(), None)


def consume_other(client: Client) -> None:
    client.session.attach_receiver("sub", Described(ULong(0x99), []), Target())  # type: ignore[arg-type]


def nameless(client: Client) -> None:
    client.session.attach_receiver("|global", Source("news", capabilities=SHARED, **DURABLE), Target())


def unsubscribe(client: Client) -> None:
    client.session.attach_receiver("sub", None, Target())


DURABLE_NEWS = consume("news", TOPIC, **DURABLE)
REFUSED: list[tuple[str, Callable[[Client], None], str, str]] = [
    ("an empty address", produce(""), INVALID_FIELD, "not be empty"),
    ("an empty address behind a prefix", produce("queue://"), INVALID_FIELD, "not be empty"),
    ("an address that is a list", consume(["q"]), INVALID_FIELD, "must be a string"),
    ("a source of another type", consume_other, NOT_IMPLEMENTED, "whose source is not amqp:source:list"),
    ("a subscription without a name", nameless, INVALID_FIELD, "contains no subscription name"),
    ("a selector that is no string", consume("q", filter=selector(["x"])), INVALID_FIELD, "must be a string, not list"),
    ("too long an address", produce("a" * (ADDRESS_MAX + 1)), INVALID_FIELD, "characters"),
    ("no target", without_target, NOT_IMPLEMENTED, "without a target"),
    ("a consumer of the management node", consume(MANAGEMENT_ADDRESS), NOT_ALLOWED, "reply-to"),
    ("a consumer of somebody's temporary queue", consume(f"{TEMPORARY_PREFIX}x"), NOT_ALLOWED, "its own connection"),
    ("a selector that is none", consume("q", filter=selector("x =")), INVALID_FIELD, "column"),
    ("a subscription that is not there", unsubscribe, NOT_FOUND, "'sub'"),
    ("a subscription in use", beside(DURABLE_NEWS, unsubscribe), NOT_ALLOWED, "in use"),
    ("a second consumer of a durable subscription", beside(DURABLE_NEWS, DURABLE_NEWS), NOT_ALLOWED, "already has a consumer"),
    ("another topic for one in use", beside(DURABLE_NEWS, consume("sport", TOPIC, **DURABLE)), NOT_ALLOWED, "in use with another"),
    ("an unshared one as shared", beside(DURABLE_NEWS, consume("news", SHARED, **DURABLE)), NOT_ALLOWED, "exists as unshared"),
    ("a shared one as unshared", beside(consume("news", SHARED, **DURABLE), DURABLE_NEWS), NOT_ALLOWED, "exists as shared"),
]


@pytest.mark.parametrize(("does", "condition", "text"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
@run_async
async def test_an_attach_is_refused_with_its_reason(does: Callable[[Client], None], condition: str, text: str) -> None:
    served = Served()
    client = Client(served)
    does(client)
    served.settle(client)
    (refused,) = client.events_of(Detached)
    assert refused.error is not None
    assert (refused.error.condition, text in str(refused.error)) == (condition, True)
    assert client.events_of(ConnectionClosed) == []


@pytest.mark.parametrize(("prefix", "queues"), [("queue://", ["there"]), ("topic://", [])])
@run_async
async def test_a_prefix_of_the_address_selects_queue_or_topic(prefix: str, queues: list[str]) -> None:
    served = Served()
    client = Client(served)
    client.producer(f"{prefix}there", capabilities=())
    assert list(served.engine.addresses.anycast) == queues


@run_async
async def test_an_address_with_only_subscriptions_is_a_topic_by_default() -> None:
    served = Served()
    client = Client(served)
    subscriber = client.consumer("news", credit=10, capabilities=TOPIC)
    client.producer("news", capabilities=()).send(message_bytes("x"))
    served.settle(client)
    assert client.received(subscriber) == 1


OUTCOMES: list[tuple[Any, int, int, int]] = [
    (Accepted(), 0, 0, 0),
    (Rejected(), 0, 1, 0),
    (Released(), 1, 0, 0),
    (Modified(delivery_failed=True), 1, 0, 1),
    (Modified(delivery_failed=False), 1, 0, 0),
    (Modified(undeliverable_here=True), 0, 1, 0),
]


@pytest.mark.parametrize(("outcome", "left", "dead", "count"), OUTCOMES, ids=[str(row[0]) for row in OUTCOMES])
@run_async
async def test_message_is_removed_kept_or_dead_lettered_by_receiver_outcome(outcome: Any, left: int, dead: int, count: int) -> None:
    served = Served()
    served.fill("q", 1)
    client = Client(served)
    link = client.consumer("q", credit=1)
    (delivery,) = client.events_of(Transferred)
    link.settle(delivery.delivery_id, outcome)
    served.settle(client)
    queue = served.engine.queue("q")
    letters = served.engine.addresses.anycast.get("DLQ")
    assert (len(queue.waiting()), 0 if letters is None else letters.held_messages) == (left, dead)
    assert [queue.delivery_count(message) for message in queue.waiting()] == [count] * left


@pytest.mark.interpreted
@run_async
async def test_a_fault_in_one_connection_ends_only_that_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    client, other = Client(served, "one"), Client(served, "other")

    def fails(*_: object) -> None:
        raise RuntimeError("a fault of ours")

    link = client.producer("q")
    kept = other.producer("q")
    with monkeypatch.context() as patched:
        patched.setattr("bascule.server.transfers.scan", fails)
        link.send(message_bytes("x"))
        client.run()
    (closed,) = client.events_of(ConnectionClosed)
    assert closed.error is not None
    assert closed.error.condition == INTERNAL_ERROR
    kept.send(message_bytes("y"))
    served.settle(other)
    assert [event.state for event in other.events_of(Dispositioned)] == [Accepted()]


@pytest.mark.interpreted
@pytest.mark.parametrize("place", ["transfers.scan", "connection.attach"])
@run_async
async def test_fault_of_the_broker_ends_the_epoch_instead_of_refusing_the_request(monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    served = Served()
    client = Client(served, "one")
    link = client.producer("q")
    fault = BrokerFault("an action stopped before its end")

    def fails(*_: object) -> None:
        raise fault

    monkeypatch.setattr(f"bascule.server.{place}", fails)
    if place == "connection.attach":
        client.session.attach_sender("another", Source(), Target("q", capabilities=QUEUE))
    else:
        link.send(message_bytes("x"))
    client.run()
    assert served.epoch_errors == [fault]
    assert (client.events_of(Detached), client.events_of(Dispositioned)) == ([], [])


@pytest.mark.interpreted
@run_async
async def test_error_of_connection_closes_connection_with_condition_of_error(monkeypatch: pytest.MonkeyPatch) -> None:
    served = Served()
    client = Client(served, "one")
    link = client.producer("q")

    def fails(*_: object) -> None:
        raise LimitExceeded("too many of them")

    monkeypatch.setattr("bascule.server.transfers.scan", fails)
    link.send(message_bytes("x"))
    client.run()
    (closed,) = client.events_of(ConnectionClosed)
    assert closed.error is not None
    assert closed.error.condition == RESOURCE_LIMIT_EXCEEDED
    assert served.epoch_errors == []


@run_async
async def test_a_message_of_another_format_is_refused_and_the_link_continues() -> None:
    served = Served()
    client = Client(served)
    link = client.producer("q")
    link.send(message_bytes("x"), message_format=0x80013700)
    link.send(message_bytes("x"))
    served.settle(client)
    states = [event.state for event in client.events_of(Dispositioned)]
    assert [type(state) for state in states] == [Rejected, Accepted]
    assert states[0].error.condition == NOT_IMPLEMENTED
    assert served.engine.addresses.anycast["q"].held_messages == 1
