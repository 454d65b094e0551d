"""Limits on the resources of clients: a request beyond one is refused with a text that names it, and everything else continues."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, AmqpError
from bascule.amqp.events import ConnectionClosed, Detached, Dispositioned, SessionEnded
from bascule.amqp.performatives import Coordinator, Declare, Declared, Discharge, Source, Target
from bascule.amqp.transactions import encode_control
from bascule.broker.policy import Policy
from bascule.core.destination import Routing
from bascule.core.user_limits import LimitRules, UserResource
from bascule.server import client as client_module
from bascule.server.links import PRODUCER_CREDIT
from bascule.server.usage import UsageLimits
from bascule.testing.broker import BrokerInMemory, message_bytes
from tests.unit.server.served import QUEUE, TOPIC, Client, Served, run_async


def limit_text(error: AmqpError | None) -> str:
    """Check that ``error`` is that of a reached limit, and return its text."""
    assert error is not None
    assert error.condition == RESOURCE_LIMIT_EXCEEDED
    return error.description


CONNECTION_LIMITS = {
    "in total": (UsageLimits(connections=2), "the limit of 2 connections is reached (broker.max_connections)"),
    "of an address": (
        UsageLimits(connections_per_address=2),
        "the limit of 2 connections from address 127.0.0.1 is reached (broker.max_connections_per_address)",
    ),
    "of a user": (
        UsageLimits(of_users=LimitRules({UserResource.CONNECTIONS: 2})),
        "the limit of 2 connections of user 'anonymous' is reached (broker.max_connections_per_user)",
    ),
}


@run_async
async def test_user_who_connects_for_each_message_gets_no_new_allowance_each_time() -> None:
    served = Served(usage=UsageLimits(of_users=LimitRules({UserResource.MESSAGES_PER_S: 1})))
    begun_s, given = time.monotonic(), 0
    for number in range(50):
        client = Client(served, f"client {number}")
        producer = client.producer("q")
        if producer.credit:
            given += 1
            producer.send(message_bytes("x"))
            served.settle(client)
        client.connection.connection_lost(None)
    assert 0 < given <= 2 + time.monotonic() - begun_s


@pytest.mark.parametrize(("limits", "text"), CONNECTION_LIMITS.values(), ids=CONNECTION_LIMITS)
@run_async
async def test_connection_beyond_limit_is_opened_and_closed_with_reason(limits: UsageLimits, text: str) -> None:
    served = Served(usage=limits)
    first, second = Client(served, "first"), Client(served, "second")
    third = Client(served, "third", begins=False)
    assert third.amqp.remote_open.properties is not None
    assert third.amqp.remote_open.properties["amqp:connection-establishment-failed"] is True
    (closed,) = third.events_of(ConnectionClosed)
    assert limit_text(closed.error) == text
    assert served.usage.refused == 1
    second.consumer("q", credit=1)
    served.fill("q", 1)
    assert served.engine.addresses.anycast["q"].delivering_count == 1
    first.connection.connection_lost(None)
    assert not Client(served, "fourth").events_of(ConnectionClosed)


@run_async
async def test_frames_of_a_refused_client_behind_its_open_are_ignored() -> None:
    served = Served(usage=UsageLimits(connections=1))
    Client(served, "first")
    refused = Client(served, "second", begins=False, pipelined="left-behind")
    assert refused.events_of(ConnectionClosed)
    assert "left-behind" not in served.engine.addresses


@run_async
async def test_session_beyond_a_limit_is_ended_and_others_continue() -> None:
    served = Served(usage=UsageLimits(of_users=LimitRules({UserResource.SESSIONS: 2})))
    first = Client(served, "first")
    second = Client(served, "second")
    refused = second.amqp.begin()
    link = refused.attach_receiver("unwanted", Source("unwanted", capabilities=QUEUE), Target())
    second.run()
    await asyncio.sleep(0)
    second.run()
    (ended,) = second.events_of(SessionEnded)
    assert ended.session is refused
    assert limit_text(second.events_of(Detached)[0].error) == limit_text(ended.error)
    assert limit_text(ended.error) == "the limit of 2 sessions of user 'anonymous' is reached (broker.max_sessions_per_user)"
    assert not link.attached
    assert "unwanted" not in served.engine.addresses
    assert second.consumer("q").attached
    first.session.end()
    first.run()
    second.amqp.begin()
    second.run()
    assert len(second.events_of(SessionEnded)) == 1


@run_async
async def test_session_beyond_a_limit_without_links_is_ended_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REFUSED_SESSION_S", 0)
    served = Served(usage=UsageLimits(of_users=LimitRules({UserResource.SESSIONS: 1})))
    client = Client(served)
    refused = client.amqp.begin()
    client.run()
    async with asyncio.timeout(20):
        while not client.events_of(SessionEnded):
            await asyncio.sleep(0)
            client.run()
    assert client.events_of(SessionEnded)[0].session is refused


@run_async
async def test_link_beyond_a_limit_is_refused_and_others_continue() -> None:
    served = Served(usage=UsageLimits(of_users=LimitRules({UserResource.LINKS: 2})))
    client = Client(served)
    first = client.consumer("q", name="first")
    client.producer("q", name="second")
    client.consumer("other", name="third")
    (refused,) = client.events_of(Detached)
    assert limit_text(refused.error) == "the limit of 2 links of user 'anonymous' is reached (broker.max_links_per_user)"
    assert "other" not in served.engine.addresses
    first.detach()
    client.run()
    assert client.consumer("q", name="fourth").attached


@run_async
async def test_transaction_beyond_a_limit_is_refused_until_another_one_ends() -> None:
    served = Served(usage=UsageLimits(of_users=LimitRules({UserResource.TRANSACTIONS: 1})))
    client = Client(served)
    coordinator = client.session.attach_sender("coordinator", Source(), Coordinator())
    client.run()

    def ask(control: Declare | Discharge) -> Any:
        before = len(client.events_of(Dispositioned))
        coordinator.send(encode_control(control))
        served.settle(client)
        (answer,) = client.events_of(Dispositioned)[before:]
        return answer.state

    declared = ask(Declare())
    refused = ask(Declare())
    assert "the limit of 1 open transactions of user 'anonymous' is reached" in refused.error.description
    assert refused.error.condition == RESOURCE_LIMIT_EXCEEDED
    for _ in range(PRODUCER_CREDIT):  # a client may try again as often as it likes
        assert ask(Declare()).error == refused.error
    ask(Discharge(declared.txn_id, True))
    assert isinstance(ask(Declare()), Declared)


def limited(resource: UserResource, most: int) -> Served:
    return Served(BrokerInMemory(policy=Policy(user_limits=LimitRules({resource: most}))))


@run_async
async def test_queue_beyond_the_limit_of_a_user_is_refused_and_other_users_continue() -> None:
    served = limited(UserResource.QUEUES, 2)
    client = Client(served)
    there = client.producer("q1", name="first")
    client.consumer("q2", name="second")
    for number, address in enumerate(("q3", "queue://q4")):
        client.producer(address, name=f"refused-{number}")
    client.session.attach_receiver("temporary", Source(None, dynamic=True, capabilities=(*QUEUE[:0], "temporary-queue")), Target())
    client.run()
    refused = client.events_of(Detached)
    assert len(refused) == 3
    assert "the limit of 2 queues and subscriptions of user 'anonymous' is reached (broker.max_queues_per_user)" in limit_text(
        refused[0].error
    )
    assert not served.engine.addresses.temporary
    assert there.attached
    served.engine.create_queue("by-the-administrator", "by-the-administrator", Routing.ANYCAST)


@run_async
async def test_durable_subscription_beyond_user_limit_is_refused_before_and_after_restart() -> None:
    served = limited(UserResource.DURABLE_SUBSCRIPTIONS, 1)
    subscriber = Client(served)
    subscriber.consumer("t", name="first", capabilities=TOPIC, durable=2, expiry_policy="never")
    subscriber.consumer("t", name="second", capabilities=TOPIC, durable=2, expiry_policy="never")
    (refused,) = subscriber.events_of(Detached)
    assert "the limit of 1 durable subscriptions of user 'anonymous' is reached" in limit_text(refused.error)
    subscriber.connection.connection_lost(None)
    served.broker.start()
    again = Client(served)
    again.consumer("t", name="second", capabilities=TOPIC, durable=2, expiry_policy="never")
    assert again.events_of(Detached)
    assert served.engine.addresses.durable_subscriptions_of["anonymous"] == 1


@run_async
async def test_resources_of_clients_are_counted_until_they_disconnect() -> None:
    served = Served()
    clients = [Client(served, f"client-{number}") for number in range(3)]
    for client in clients:
        client.consumer("q")
        client.producer("q")
    usage = served.usage.users["anonymous"]
    assert (usage.connections.count, usage.sessions.count, usage.links.count) == (3, 3, 6)
    for client in clients:
        client.connection.connection_lost(None)
    assert (usage.connections.count, usage.sessions.count, usage.links.count) == (0, 0, 0)
    assert not served.usage.users
    assert served.usage.connections.count == 0
