"""Connections, sessions and links have a share of the memory, and one user does not use it up for others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bascule.amqp.events import ConnectionClosed, Detached
from bascule.amqp.performatives import Source, Target
from bascule.broker.errors import ResourceLimit
from bascule.broker.memory import CONNECTIONS_SHARE, MemoryAccount, MemoryPart
from bascule.config.settings import Settings
from bascule.server.memory import CONNECTION_BYTES, FRAMES_SHARE, LINK_BYTES, SESSION_BYTES, UNREAD_S, MemoryWatch
from bascule.server.spill import SpillFiles
from bascule.server.usage import Usage, UsageLimits
from bascule.testing.broker import BrokerInMemory, message_bytes
from tests.support.hostile import ATTACH, NULL, SOURCE, TARGET, TRUE, described, frame, listed, performative, string, uint
from tests.unit.server.served import QUEUE, Client, Served, Wire, run_async

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


def test_a_user_leaves_a_quarter_of_the_share_while_others_are_connected(usage: Usage) -> None:
    usage.connect("monitor", "192.0.2.2")
    assert connect_all(usage, "app") + 1 == SHARE_BYTES * 3 // 4 // CONNECTION_BYTES
    usage.disconnect("monitor", "192.0.2.2")
    assert connect_all(usage, "app") == SHARE_BYTES // CONNECTION_BYTES


def test_the_default_limits_on_connections_and_links_fit_into_the_share() -> None:
    broker, share_bytes = Settings().broker, CONNECTIONS_SHARE * Settings().broker.memory_bytes
    jms_client_bytes = CONNECTION_BYTES + 2 * SESSION_BYTES + 2 * LINK_BYTES
    assert broker.max_connections * jms_client_bytes < share_bytes
    assert broker.max_links_per_user * LINK_BYTES < share_bytes
    assert broker.max_sessions_per_user * SESSION_BYTES < share_bytes


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
    for number in range(800):
        client.session.attach_sender(str(number), Source(), Target("q", capabilities=QUEUE))
    served.settle(client)
    links = [event.error for event in client.events_of(Detached)]
    assert 200 < len(links) < 400
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
    clients = [Client(served, f"client {number}") for number in range(24)]
    closed = [event.error for client in clients for event in client.events_of(ConnectionClosed)]
    assert closed
    assert {error.condition for error in closed if error} == {"amqp:resource-limit-exceeded"}
    assert served.usage.refused == len(closed)


class Watched(Served):
    """A broker whose memory is measured when the test asks."""

    def __init__(self, spill: SpillFiles, memory_bytes: int) -> None:
        super().__init__(BrokerInMemory(memory_bytes=memory_bytes))
        self._watch = MemoryWatch(self.engine, spill, self.partials, self.connections, self.dispatch)

    def feed(self, client: Client, octets: bytes) -> None:
        client.connection.data_received(octets)
        while client.connection.behind:
            client.connection.handle_some()
        self.settle()
        client.wire.written.clear()  # which the peer reads, and does not answer

    def measure(self, now_s: float = 0.0) -> None:
        self._watch.measure(now_s)
        while self.engine.turns.pending:
            self.engine.turns.begin_turn()
            self.engine.turns.go_on()


def refused_attach(handle: int) -> bytes:
    """Return an attach that the broker refuses."""
    terminus = (described(SOURCE, listed(string(b"$management"))), described(TARGET, listed()))
    return performative(ATTACH, string(b"%d" % handle + b"n" * 500), uint(handle), TRUE, NULL, NULL, *terminus)


@run_async
async def test_peers_that_answer_no_detach_lose_their_connections_once_their_user_has_no_room(spill: SpillFiles) -> None:
    served = Watched(spill, 8 << 20)
    account, peers, peak_bytes = served.engine.memory, [Client(served, f"peer {number}") for number in range(8)], 0
    honest = Client(served, "honest")
    for handle in range(300):
        for peer in peers:
            if not peer.wire.closing:
                served.feed(peer, refused_attach(handle))
        honest.session.attach_receiver(f"{handle}", Source("$management"), Target())
        served.settle(honest)
        if not handle % 10:
            served.measure()
            peak_bytes = max(peak_bytes, account.parts()[MemoryPart.CONNECTIONS])
    assert len(honest.events_of(Detached)) == 300
    assert not honest.wire.closing
    assert all(peer.wire.aborted for peer in peers)
    assert 0.9 < peak_bytes / account.connections_max_bytes < 1.2


@run_async
async def test_what_the_peers_of_a_user_leave_unanswered_keeps_no_other_user_out(spill: SpillFiles) -> None:
    served = Watched(spill, 8 << 20)
    peer = Client(served, "peer")
    for handle in range(850):
        served.feed(peer, refused_attach(handle))
    served.measure()
    room = served.usage.users["anonymous"].room
    assert room.size_bytes > 0.9 * served.engine.memory.connections_max_bytes
    for _ in range(20):
        served.usage.connect("alice", "192.0.2.2")
    with pytest.raises(ResourceLimit, match="connections, sessions and links use"):
        served.usage.connect("anonymous", "192.0.2.1")
    peer.connection.connection_lost(None)
    served.settle()
    assert room.size_bytes == 0
    room.measured(1 << 20)  # a measurement that began before
    assert served.usage.room.size_bytes == 20 * CONNECTION_BYTES


@run_async
async def test_peers_without_a_login_take_no_room_from_others(spill: SpillFiles) -> None:
    served = Watched(spill, 1 << 20)
    for _ in range(100):
        wire: Any = Wire()
        served.connection().connection_made(wire)
    served.measure()
    assert served.engine.memory.parts()[MemoryPart.CONNECTIONS] >= 100 * CONNECTION_BYTES
    assert served.usage.room.size_bytes == 0


def incomplete_frame(size_bytes: int) -> bytes:
    """Return the beginning of a frame of the largest size."""
    return frame(bytes(127 << 10))[:size_bytes]


@run_async
async def test_peers_that_do_not_end_their_frames_are_dropped_once_they_hold_too_much(spill: SpillFiles) -> None:
    served = Watched(spill, 8 << 20)
    clients = [Client(served, f"client {number}") for number in range(20)]
    for number, client in enumerate(clients):
        served.feed(client, incomplete_frame(100 << 10 if number < 10 else 1_000))
    for now_s in range(0, 9, 3):
        served.measure(now_s)
    assert served.engine.memory.parts()[MemoryPart.PARTIAL] > FRAMES_SHARE * (8 << 20)
    assert not any(client.wire.closing for client in clients)
    served.measure(UNREAD_S)
    left_bytes = sum(len(client.connection.amqp.buffer.kept) for client in clients if not client.wire.closing)
    assert left_bytes <= FRAMES_SHARE * (8 << 20)
    assert not all(client.wire.closing for client in clients)


@run_async
async def test_peers_that_end_their_frames_are_kept_however_much_they_send(spill: SpillFiles) -> None:
    served = Watched(spill, 1 << 20)
    client = Client(served, "uploads")
    for now_s in range(0, 60, 5):
        served.feed(client, incomplete_frame((100 << 10) - now_s))
        served.measure(now_s)
        client.connection.amqp.buffer.clear()
    assert not client.wire.closing
