"""Subscriptions of topics, and the clients that own them."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.amqp.events import Detached
from bascule.amqp.link import ReceiverLink
from bascule.amqp.performatives import Source, Target
from bascule.amqp.types import Described, Symbol
from bascule.broker.policy import Policy
from bascule.broker.subscription_names import owner_of, subscription_queue
from bascule.core.destination import Routing
from bascule.testing.broker import BrokerInMemory
from tests.unit.server.served import TOPIC, Client, Served, run_async

SELECTOR_FILTER = Symbol("apache.org:selector-filter:string")
SHARED = (*TOPIC, Symbol("shared"))
TEXT = st.text(alphabet="ab.\\", max_size=6)


def subscribe(
    client: Client, name: str, topic: str = "news", *, durable: bool = True, shared: bool = False, selector: str = ""
) -> ReceiverLink:
    options: dict[str, Any] = {"durable": 2, "expiry_policy": "never"} if durable else {}
    if selector:
        options["filter"] = {SELECTOR_FILTER: Described(SELECTOR_FILTER, selector)}
    return client.consumer(topic, credit=10, name=name, capabilities=SHARED if shared else TOPIC, **options)


def publish(served: Served, count: int, topic: str = "news") -> None:
    served.fill(topic, count, routing=Routing.MULTICAST)


#: (client id, link name, durable): pairs with the same letters, which once had the same queue.
PLACES = [("a", "b.c", True), ("a.b", "c", True), ("x", "a.b.c|global", True), ("volatile", "a.b.c", True), ("a", "b.c|volatile1", False),
          ("a.b", "c|volatile1", False), ("x", "a.b.c|global-volatile1", False), ("a\\", "b.c", True)]  # fmt: skip


@pytest.mark.parametrize(("first_client", "second_client"), list(combinations(PLACES, 2)))
@run_async
async def test_subscriptions_of_two_clients_are_separate(first_client: tuple[str, str, bool], second_client: tuple[str, str, bool]) -> None:
    served = Served()
    links = []
    for (container, name, durable), topic in ((first_client, "news"), (second_client, "other")):
        client = Client(served, container)
        links.append((client, subscribe(client, name, topic, durable=durable, shared="|" in name)))
    publish(served, 3)
    served.settle(*(client for client, _ in links))
    assert [client.received(link) for client, link in links] == [3, 0]
    assert not any(client.events_of(Detached) for client, _ in links)  # no client got the error "has a consumer already"


@run_async
async def test_a_subscription_keeps_its_messages_if_another_client_uses_a_similar_name() -> None:
    served = Served()
    client = Client(served, "a")
    subscribe(client, "b.c").detach(closed=False)
    served.settle(client)
    publish(served, 3)
    other = Client(served, "a.b")
    subscribe(other, "c", "other")
    assert client.received(subscribe(client, "b.c")) == 3
    assert not other.events_of(Detached)


@run_async
async def test_a_subscription_keeps_its_messages_if_its_replacement_is_refused() -> None:
    served = Served()
    client = Client(served, "a")
    subscribe(client, "kept").detach(closed=False)
    served.settle(client)
    publish(served, 3)
    served.engine.memory.selectors.chars_max = 5
    subscribe(client, "kept", selector="priority > 3")
    assert "the selector has 12 characters" in str(client.events_of(Detached)[-1].error)
    assert client.received(subscribe(client, "kept")) == 3


@run_async
async def test_a_subscription_can_be_replaced_by_its_user_at_the_limit() -> None:
    served = Served(BrokerInMemory(policy=Policy(queues_max=1)))
    client = Client(served, "a")
    subscribe(client, "kept").detach(closed=False)
    served.settle(client)
    publish(served, 3)
    link = subscribe(client, "kept", selector="TRUE")
    assert client.received(link) == 0
    assert [each.error for each in client.events_of(Detached)] == [None]  # of the first link
    publish(served, 1)
    served.settle(client)
    assert client.received(link) == 1


@given(st.tuples(st.none() | TEXT, TEXT, st.booleans()), st.tuples(st.none() | TEXT, TEXT, st.booleans()))
def test_subscription_queue_names_are_unique(one: tuple[str | None, str, bool], other: tuple[str | None, str, bool]) -> None:
    names = [subscription_queue(client, name, durable=durable) for client, name, durable in (one, other)]
    assert (names[0] == names[1]) is (one == other)


@given(st.none() | TEXT.filter(bool), TEXT.filter(bool))
def test_client_of_a_durable_subscription_follows_from_the_name_of_its_queue(client: str | None, name: str) -> None:
    assert owner_of(subscription_queue(client, name, durable=True), name) == client


@pytest.mark.parametrize(("container", "name"), list(product(["a", "a.b"], ["c", "c.d", "c|global", "c.d|global"])))
@run_async
async def test_a_subscription_of_an_earlier_version_can_be_used_and_deleted(container: str, name: str) -> None:
    served = Served()
    bare, _, is_shared = name.partition("|")
    then = bare if is_shared else f"{container}.{bare}"
    served.engine.create_queue(then, "news", Routing.MULTICAST, subscription=then, shared=bool(is_shared))
    publish(served, 3)
    served.broker.start()
    client = Client(served, container)
    link = subscribe(client, name, shared=bool(is_shared))
    assert client.received(link) == 3
    link.detach(closed=False)
    served.settle(client)
    ending = client.session.attach_receiver(name, None, Target())
    served.settle(client)
    assert ending.source.address == "news"
    ending.detach()
    served.settle(client)
    assert not served.engine.addresses.subscriptions


@pytest.mark.parametrize("pattern", ["#", "*.*", "*.#"])
@run_async
async def test_no_pattern_matches_a_temporary_topic(pattern: str) -> None:
    served = Served()
    owner, other = Client(served, "owner"), Client(served, "other")
    kind = (Symbol("temporary-topic"),)
    link = owner.session.attach_receiver("own", Source(dynamic=True, capabilities=kind), Target())
    served.settle(owner)
    address = link.source.address
    own_pattern, others = owner.consumer(pattern, 10, name="pattern", capabilities=TOPIC), other.consumer(pattern, 10, capabilities=TOPIC)
    link.flow(10)
    served.settle(owner, other)
    publish(served, 1, address)
    served.settle(owner, other)
    assert [owner.received(link), owner.received(own_pattern), other.received(others)] == [1, 0, 0]
    publish(served, 1, "usual.topic")
    served.settle(owner, other)
    assert [owner.received(link), owner.received(own_pattern), other.received(others)] == [1, 1, 1]


@run_async
async def test_selectors_count_for_the_user_of_the_client() -> None:
    served = Served()
    client = Client(served, "a")
    client.consumer("orders", filter={SELECTOR_FILTER: Described(SELECTOR_FILTER, "n = 1")})
    subscribe(client, "s", selector="n = 22")
    assert served.engine.memory.selectors._chars_of == {"anonymous": 11}
