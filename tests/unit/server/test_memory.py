"""Memory shortage as clients see it: producers get no credit, consumers are served."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from bascule.amqp.events import AttachConfirmed, Dispositioned
from bascule.amqp.frames import frame_head
from bascule.amqp.limits import ConnectionLimits
from bascule.amqp.performatives import Coordinator, Declare, Declared, Discharge, Source, Target, Transfer
from bascule.amqp.transactions import encode_control
from bascule.amqp.types import Symbol
from bascule.broker.memory import ACTION_BYTES, MEASURED_AT_ONCE, MemoryPart
from bascule.broker.message import BrokerMessage
from bascule.broker.policy import AddressPolicy, Policy
from bascule.core import caches
from bascule.core.caches import kept_bytes
from bascule.core.destination import Routing
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.server import memory
from bascule.server.client_links import ATTACH_MEMORY, ATTACHES_BYTES_MAX, ATTACHES_SHORT_BYTES_MAX
from bascule.server.connection import WRITE_BUFFER_BYTES
from bascule.server.epoch import is_congested
from bascule.server.memory import UNREAD_S, MemoryWatch
from bascule.server.spill import SpillFiles
from bascule.testing.broker import BrokerInMemory, message_bytes
from tests.support.hostile import ATTACH, NULL, SOURCE, TARGET, TRUE, described, listed, performative, string, uint
from tests.support.speed import SLOWNESS
from tests.unit.server.served import Client, Served, run_async

LIMIT_BYTES = 16 << 20
BODY = "x" * 100_000


@pytest.fixture
def spill(tmp_path: Path) -> Iterator[SpillFiles]:
    files = SpillFiles(tmp_path / "spill")
    yield files
    files.close()


class Watched(Served):
    """A broker with little memory, which is measured when the test decides."""

    def __init__(self, spill: SpillFiles) -> None:
        super().__init__(BrokerInMemory(memory_bytes=LIMIT_BYTES))
        self.engine.bodies.store = spill
        self.watch = MemoryWatch(self.engine, spill, self.partials, self.connections, self.dispatch)
        self.now_s = 0.0

    def measure(self, later_s: float = 1.0) -> None:
        self.now_s += later_s
        self.watch.measure(self.now_s)

    def shortage(self, text: str) -> None:
        self.engine.memory.shortage = text
        self.dispatch()


@run_async
async def test_producers_get_no_credit_while_memory_is_short_and_resume_automatically(spill: SpillFiles) -> None:
    served = Watched(spill)
    client = Client(served)
    before = client.producer("q", name="before")
    served.shortage("too much")
    late = client.producer("q", name="late")
    anonymous = client.session.attach_sender("relay", Source(), Target())
    served.settle(client)
    assert before.credit > 0
    assert (late.credit, anonymous.credit) == (0, 0)
    while before.credit:
        before.send(message_bytes("x"))
    served.settle(client)
    assert before.credit == 0
    assert served.engine.addresses.anycast["q"].held_messages > 100, "the broker accepts messages for granted credit"
    served.shortage("")
    served.settle(client)
    assert min(before.credit, late.credit, anonymous.credit) > 0


@run_async
async def test_consumers_and_requests_that_end_transactions_are_served_while_memory_is_short(spill: SpillFiles) -> None:
    served = Watched(spill)
    served.fill("q", 3)
    served.shortage("too much")
    client = Client(served)
    link = client.consumer("q", credit=10)
    assert client.received(link) == 3
    assert client.producer(MANAGEMENT_ADDRESS).credit > 0


@run_async
async def test_a_detached_producer_is_forgotten_and_takes_no_share_of_the_credit(spill: SpillFiles) -> None:
    served = Watched(spill)
    memory = served.engine.memory
    served.shortage("too much")
    client = Client(served)
    client.producer("q", name="detached").detach()
    client.producer("q", name="cut off")
    served.settle(client)
    assert memory.producers == 1
    client.connection.connection_lost(None)
    assert memory.producers == 0
    assert not memory.waiting


@run_async
async def test_partial_messages_of_a_lost_client_are_not_kept(spill: SpillFiles) -> None:
    served = Watched(spill)
    client = Client(served)
    link = client.producer("q")
    client.amqp.out.append(frame_head(client.session.channel, Transfer(link.handle, 0, b"0", more=True), 1000) + b"x" * 1000)
    client.say()
    served.measure()
    assert served.engine.memory.parts()[MemoryPart.PARTIAL] == 1000
    client.connection.connection_lost(None)
    served.measure()
    assert served.engine.memory.parts()[MemoryPart.PARTIAL] == 0


@run_async
async def test_a_full_queue_forgets_a_detached_producer() -> None:
    served = Served(BrokerInMemory(policy=Policy(AddressPolicy(max_messages=1))))
    served.fill("q", 1)
    queue = served.engine.addresses.anycast["q"]
    client = Client(served)
    link = client.producer("q")
    assert (link.credit, len(queue.blocked)) == (0, 1)
    link.detach()
    served.settle(client)
    assert not queue.blocked


class CountedCache:
    """A cache that counts how often it is emptied, and reports it."""

    def __init__(self) -> None:
        self.emptied = 0
        self.now_empty = asyncio.Event()

    def clear(self) -> None:
        self.emptied += 1
        asyncio.get_running_loop().call_soon(self.now_empty.set)  # routes are forgotten in the same turn


@pytest.fixture
def cache() -> Iterator[CountedCache]:
    counted = CountedCache()
    caches.add(caches.PeerCache(lambda: 0, 0, counted.clear))
    yield counted
    caches._CACHES.pop()


@run_async
async def test_no_cache_keeps_data_of_a_lost_client(spill: SpillFiles, cache: CountedCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "FORGET_S", 0.01)
    served = Watched(spill)
    client = Client(served, "a client with a name")
    client.producer("q").send(message_bytes("x", message_id="ID:1"))
    client.consumer("q", credit=1)
    served.settle(client)
    assert kept_bytes() > 0
    assert served.engine.addresses.routes_bytes > 0
    client.connection.connection_lost(None)
    await asyncio.wait_for(cache.now_empty.wait(), 10)
    assert kept_bytes() == 0
    assert served.engine.addresses.routes_bytes == 0


@run_async
async def test_spill_files_with_few_needed_bodies_are_compacted_between_turns(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path / "files", limit_bytes=32 << 20)
    served = Watched(files)
    served.engine.turns.steps = 10_000
    served.engine.memory.bodies_max_bytes = 0
    for _ in range(20):
        served.fill("left", 1, BODY)
        served.fill("gone", 10, BODY)
    served.engine.delete_queue(served.engine.queue("gone"))
    served.broker.settle()
    before_bytes = files.used_bytes
    served.measure()
    assert served.engine.turns.pending, "the rest is left to later turns"
    served.broker.settle()
    assert files.used_bytes < before_bytes // 2
    left = list(served.engine.queue("left").ready)
    assert [served.engine.bodies.read(message) for message in left] == [message_bytes(BODY)] * 20
    files.close()


@run_async
async def test_caches_are_not_emptied_for_each_closed_client(
    spill: SpillFiles, cache: CountedCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "FORGET_S", 0.2)
    served = Watched(spill)
    for number in range(50):
        Client(served, f"client {number}").connection.connection_lost(None)
    assert cache.emptied == 0
    await asyncio.wait_for(cache.now_empty.wait(), 10)
    assert cache.emptied == 1


@run_async
async def test_memory_account_counts_link_names(spill: SpillFiles) -> None:
    served = Served()
    watch = MemoryWatch(served.engine, spill, served.partials, served.connections, served.dispatch)
    client, counted_bytes = Client(served), []
    for name in ("short", "\N{GRINNING FACE}" * 2_000):
        link = client.producer("q", name=name)
        watch.measure(0.0)
        counted_bytes.append(served.engine.memory.parts()[MemoryPart.CONNECTIONS])
        link.detach()
        served.settle(client)
    assert counted_bytes[1] - counted_bytes[0] > 7_900
    assert client.connection.client.links.names_bytes == 0


@run_async
async def test_client_that_does_not_read_is_disconnected_when_unread_buffers_exceed_limit(spill: SpillFiles) -> None:
    served = Watched(spill)
    served.fill("q", 200, BODY)
    reading, hung = Client(served, "reading"), [Client(served, f"hung {number}") for number in range(3)]
    for client in hung:
        link = client.consumer("q", name="c")
        link.flow(100)
        client.say()
        served.broker.settle()
        served.send_output()
        client.connection.pause_writing()
    served.measure()
    assert served.engine.memory.parts()[MemoryPart.BUFFERS] > LIMIT_BYTES // 8
    served.measure(UNREAD_S / 2)
    hung[0].wire.written.pop()  # this client has read something
    served.measure(UNREAD_S / 2)
    assert [client.wire.aborted for client in hung] == [False, True, False], "no more clients than needed"
    served.measure(UNREAD_S)
    link = reading.consumer("q", credit=1)
    assert reading.received(link) == 1


@run_async
async def test_output_for_a_client_with_closed_windows_is_limited(spill: SpillFiles) -> None:
    served = Watched(spill)
    served.fill("q", 100, BODY * 3)
    client = Client(served, limits=ConnectionLimits(incoming_window_frames=1))
    sessions = [client.session, *(client.amqp.begin() for _ in range(20))]
    served.settle(client)
    links = [session.attach_receiver("consumer", Source("q"), Target()) for session in sessions]
    served.settle(client)
    for link in links:  # all windows are open, and close within the first message
        link.flow(10)
    client.say()
    for _ in sessions:
        served.broker.settle()
        served.send_output()
        await asyncio.sleep(0)
    assert client.connection.amqp.outgoing.kept_bytes < 2 * (WRITE_BUFFER_BYTES + 3 * len(BODY))
    served.measure()
    assert served.engine.memory.parts()[MemoryPart.BUFFERS] > WRITE_BUFFER_BYTES // 2


@run_async
async def test_many_queues_and_connections_are_measured_over_several_turns(spill: SpillFiles) -> None:
    served = Watched(spill)
    clients = [Client(served, f"client {number}") for number in range(20)]
    for number in range(2 * MEASURED_AT_ONCE):
        served.engine.queue(f"q{number}")
    served.broker.settle()
    account = served.engine.memory
    served.measure()
    before = account.parts()
    for number in range(20):
        clients[number].producer("q", name="x" * 1000)
    served.broker.settle()
    served.engine.turns.steps = 100
    served.engine.turns.begin_turn()
    served.measure()
    assert account.parts() == before
    clients[-1].connection.connection_lost(None)  # while others are measured
    turns = 0
    while served.engine.pending:
        served.engine.go_on()
        turns += 1
    assert turns > 2
    assert account.parts()[MemoryPart.CONNECTIONS] > before[MemoryPart.CONNECTIONS]
    assert account.parts()[MemoryPart.QUEUES] > before[MemoryPart.QUEUES]
    assert served.contained == []


def attach_until_not_read(client: Client, size: int, most: int = 2_000) -> int:
    """Attach consumers with large attaches until the broker reads no more. Return how many."""
    for number in range(most):
        if not client.wire.reading:
            return number
        client.session.attach_receiver(
            f"{size} {number}", Source("q", capabilities=("queue",)), Target(), properties={Symbol("large"): "x" * size}
        )
        client.run()
    return most


@run_async
async def test_attaches_that_wait_for_the_journal_are_counted_and_not_read_without_limit(spill: SpillFiles) -> None:
    served = Watched(spill)
    client = Client(served)
    served.measure()
    before_bytes = served.engine.memory.parts()[MemoryPart.CONNECTIONS]
    few = attach_until_not_read(client, 50_000)
    links = client.connection.client.links
    assert 4 <= few <= ATTACHES_BYTES_MAX // ATTACH_MEMORY // 50_000 + 1
    served.measure()
    assert served.engine.memory.parts()[MemoryPart.CONNECTIONS] - before_bytes > ATTACHES_BYTES_MAX
    client.connection.read_on()
    assert not client.wire.reading
    served.settle(client)
    assert (links.attach_bytes, links.full, client.wire.reading) == (0, False, True)
    assert len(client.events_of(AttachConfirmed)) == few
    served.engine.create_queue("other", "other", Routing.ANYCAST)  # its record is not stored yet
    served.shortage("the disk is full")
    assert attach_until_not_read(client, 5_000) <= ATTACHES_SHORT_BYTES_MAX // ATTACH_MEMORY // 5_000 + 1
    served.shortage("")
    client.amqp.close()
    client.run()
    served.settle(client)
    assert links.attach_bytes == 0


@run_async
async def test_links_that_leave_before_they_are_answered_are_counted_no_more(spill: SpillFiles) -> None:
    served = Watched(spill)
    client = Client(served)
    served.engine.create_queue("other", "other", Routing.ANYCAST)  # its record is not stored yet
    attached = [
        client.session.attach_receiver(name, Source("q", capabilities=("queue",)), Target(), properties={Symbol("large"): "x" * 1_000})
        for name in ("a", "b")
    ]
    client.run()
    links = client.connection.client.links
    assert links.attach_bytes > 2 * ATTACH_MEMORY * 1_000
    attached[0].detach()
    client.session.end()
    client.run()
    assert (len(links), links.attach_bytes) == (0, 0)
    served.settle(client)
    assert links.attach_bytes == 0


@run_async
async def test_large_bodies_are_spilled_in_short_turns(tmp_path: Path) -> None:
    files = SpillFiles(tmp_path / "files")
    served = Watched(files)
    engine = served.engine
    served.watch.start()
    engine.turns.steps = 10_000
    engine.memory.bodies_max_bytes = 0
    body = b"x" * (48 << 20)
    message = BrokerMessage(body)
    since_s = time.process_time()
    engine.bodies.hold(message)
    longest_s = time.process_time() - since_s
    assert (message.body, engine.bodies.read(message)) == (None, body)
    served.measure()
    assert engine.memory.parts()[MemoryPart.BUFFERS] >= len(body)
    turns = 0
    while engine.turns.pending:
        since_s = time.process_time()
        engine.turns.begin_turn()
        engine.turns.go_on()
        longest_s = max(longest_s, time.process_time() - since_s)
        turns += 1
    assert turns > 5
    assert longest_s < 0.025 * SLOWNESS
    served.measure()
    assert engine.memory.parts()[MemoryPart.BUFFERS] == 0
    assert engine.bodies.read(message) == body
    served.watch.stop()
    files.close()


@run_async
async def test_commits_of_empty_transactions_that_wait_for_the_journal_are_counted_and_not_read_without_limit(spill: SpillFiles) -> None:
    served = Watched(spill)
    client = Client(served)
    coordinator = client.session.attach_sender("tx", Source(), Coordinator())
    served.settle(client)
    served.engine.create_queue("other", "other", Routing.ANYCAST)  # its record is not stored yet
    rounds = 0
    while client.wire.reading and rounds < 100:
        rounds += 1
        for _ in range(100):
            coordinator.send(encode_control(Declare()))
        client.events.clear()
        client.run()
        states = [event.state for event in client.events_of(Dispositioned)]
        for declared in states:
            assert isinstance(declared, Declared)
            coordinator.send(encode_control(Discharge(declared.txn_id, False)))
        served.congested = is_congested(served.engine)
        client.run()
    assert rounds * 100 <= served.engine.memory.actions_max + 100
    assert not client.wire.reading
    served.measure()
    assert served.engine.memory.parts()[MemoryPart.JOURNAL] >= served.engine.journaling.actions * ACTION_BYTES > 0
    client.events.clear()
    served.settle(client)
    assert served.engine.journaling.actions == 0
    assert not is_congested(served.engine)


@run_async
async def test_refused_links_use_memory_until_the_client_answers_their_detach() -> None:
    served = Served()
    client = Client(served, "hostile")
    before_bytes = memory._held_bytes(client.connection)
    name = "\U0001f600" * 900
    for handle in range(100):
        terminus = (described(SOURCE, listed(string(b"$management"))), described(TARGET, listed()))
        attach = performative(ATTACH, string(f"{name}{handle}".encode()), uint(handle), TRUE, NULL, NULL, *terminus)
        client.connection.data_received(attach)
        while client.connection.behind:
            client.connection.handle_some()
        served.settle()
    assert len(client.connection.client.links) == 0
    assert memory._held_bytes(client.connection) - before_bytes > 100 * (memory.LINK_BYTES + 4 * len(name))
