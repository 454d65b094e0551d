"""Connections, sessions and links have a share of the memory, and one user does not use it up for others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bascule.amqp.events import ConnectionClosed, Detached
from bascule.amqp.performatives import Source, Target
from bascule.broker.errors import ResourceLimit
from bascule.broker.memory import CONNECTIONS_SHARE, MemoryAccount, MemoryPart
from bascule.server.memory import CONNECTION_BYTES, LINK_BYTES, SESSION_BYTES, MemoryWatch
from bascule.server.spill import SpillFiles
from bascule.server.usage import Usage, UsageLimits
from bascule.testing.broker import BrokerInMemory, message_bytes
from tests.unit.server.served import QUEUE, Client, Served, run_async

LIMIT_BYTES = 16 << 20
SHARE_BYTES = CONNECTIONS_SHARE * LIMIT_BYTES


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[SpillFiles]:
    files = SpillFiles(tmp_path / "spill")
    yield files
    files.close()


@pytest.fixture
def usage() -> Usage:
    usage, account = Usage(UsageLimits()), MemoryAccount(LIMIT_BYTES)
    usage.room.account = lambda: account
    return usage


def connect_all(usage: Usage, user: str) -> int:
    """Connect until a connection is refused. Return the number of the user's connections."""
    refusal = ""
    while not refusal:
        try:
            usage.connect(user, "192.0.2.1")
        except ResourceLimit as error:
            refusal = str(error)
    assert "broker.memory_bytes" in refusal
    return usage.users[user].connections.count


def test_connections_of_one_user_leave_room_for_others(usage: Usage) -> None:
    assert connect_all(usage, "mallory") == SHARE_BYTES // CONNECTION_BYTES
    usage.connect("alice", "192.0.2.2")
    assert usage.refused == 1
    assert usage.room.size_bytes == CONNECTION_BYTES * usage.connections.count


def test_a_user_gets_half_of_the_share_while_others_are_connected(usage: Usage) -> None:
    usage.connect("alice", "192.0.2.2")
    assert connect_all(usage, "mallory") == SHARE_BYTES // 2 // CONNECTION_BYTES
    usage.disconnect("alice", "192.0.2.2")
    assert connect_all(usage, "mallory") == SHARE_BYTES // CONNECTION_BYTES


def test_without_a_loaded_state_only_the_limits_on_numbers_count() -> None:
    usage = Usage(UsageLimits(connections=3))
    for _ in range(3):
        usage.connect("ann", "192.0.2.1")
    with pytest.raises(ResourceLimit, match="the limit of 3 connections"):
        usage.connect("ann", "192.0.2.1")


@run_async
async def test_links_and_sessions_beyond_the_share_are_refused_and_producers_go_on(spill: SpillFiles) -> None:
    served = Served(BrokerInMemory(memory_bytes=LIMIT_BYTES // 4))
    watch = MemoryWatch(served.engine, spill, served.partials, served.connections, served.dispatch)
    client = Client(served)
    first = client.producer("q", name="first")
    for number in range(400):
        client.session.attach_sender(str(number), Source(), Target("q", capabilities=QUEUE))
    served.settle(client)
    links = [event.error for event in client.events_of(Detached)]
    assert 100 < len(links) < 300
    assert all("connections, sessions and links use" in str(error) for error in links)
    session = client.amqp.begin()
    served.settle(client)
    session.attach_sender("late", Source(), Target("q", capabilities=QUEUE))
    served.settle(client)
    assert (len(client.events_of(Detached)), len(client.connection.client.sessions)) == (len(links) + 1, 1)
    watch.measure(0.0)
    account = served.engine.memory
    assert account.parts()[MemoryPart.CONNECTIONS] <= 1.05 * SHARE_BYTES / 4
    assert account.blocked == ""
    first.send(message_bytes("x"))
    served.settle(client)
    assert served.engine.addresses.anycast["q"].held_messages == 1


@run_async
async def test_all_memory_is_counted_down_with_the_connection() -> None:
    served = Served(BrokerInMemory(memory_bytes=LIMIT_BYTES))
    clients = [Client(served, f"client {number}") for number in range(3)]
    for client in clients:
        for name in ("a", "b"):
            client.producer("q", name=name)
    clients[0].producer("q", name="c").detach()
    served.settle(*clients)
    assert served.usage.room.size_bytes == 3 * (CONNECTION_BYTES + SESSION_BYTES) + 6 * LINK_BYTES
    for client in clients:
        client.connection.connection_lost(None)
    served.settle()
    assert served.usage.room.size_bytes == 0


@run_async
async def test_connections_beyond_the_share_are_refused() -> None:
    served = Served(BrokerInMemory(memory_bytes=1 << 20))
    clients = [Client(served, f"client {number}") for number in range(12)]
    closed = [event.error for client in clients for event in client.events_of(ConnectionClosed)]
    assert closed
    assert {error.condition for error in closed if error} == {"amqp:resource-limit-exceeded"}
    assert served.usage.refused == len(closed)
