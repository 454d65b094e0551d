"""A hostile peer of a broker in memory affects at most its own connection, and its accepted messages can be used.

The messages are stored, loaded, shown as JSON, moved and delivered to other clients. `make slow` runs more seeds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from bascule.amqp.errors import INTERNAL_ERROR
from bascule.amqp.states import SessionState
from bascule.broker import administration
from bascule.core.log import LogEvent
from bascule.jms.errors import MalformedMessage
from bascule.jms.sections import scan
from bascule.server.connection import ClientConnection
from bascule.server.status import consumer_status, queue_detail, subscription_status
from bascule.testing.broker import BrokerInMemory, Sender, message_bytes
from tests.support.costs import COST_S_MAX, LEFT_BYTES_MAX, left_bytes, quiet
from tests.support.hostile import END, Hostile, performative
from tests.unit.server.served import Client, Served, Wire

SEEDS_OF_ONE_TEST = 13
SEEDS_LEFT = 8
SEEDS_LATE = 5
WAITING = 500
FRAMES = 40
LONG_AFTER_MS = 10**13


class Complaints(logging.Handler):
    """Collects log lines that cannot be written, and unexpected exceptions in the log."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        str(record.msg).encode()
        if isinstance(record.msg, LogEvent):
            json.dumps(dict(record.msg.fields), default=str)
        if record.exc_info:
            self.found.append(f"{record.msg}: {record.exc_info[1]!r}")


@contextmanager
def complaints() -> Iterator[list[str]]:
    handler, logger = Complaints(), logging.getLogger("bascule")
    logger.addHandler(handler)
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)


class Peer:
    """A hostile peer that begins a new session after its last one has ended."""

    def __init__(
        self, served: Served, seed: int, cost_s_max: float = COST_S_MAX, mechanism: bytes = b"ANONYMOUS", stored_every: int = 1
    ) -> None:  # fmt: skip
        """Connect. The journal stores records only after each ``stored_every`` inputs."""
        self.served = served
        self.stored_every = stored_every
        self.inputs = 0
        self.cost_s_max = cost_s_max
        self.hostile = Hostile(seed, mechanism)
        self.wire = Wire()
        self.connection: ClientConnection = served.connection()
        self.connection.connection_made(self.wire)  # type: ignore[arg-type]

    def talk(self) -> None:
        self.say(self.hostile.opening())
        for piece in self.hostile.session():
            self.say(piece)
        for _ in range(FRAMES):
            session = self.connection.amqp.sessions.get(0)
            if self.wire.closing:
                return
            if session is None or session.state is SessionState.END_SENT:
                for piece in ([] if session is None else [performative(END)]) + self.hostile.session():
                    self.say(piece)
            self.say(self.hostile.frame())

    def say(self, data: bytes) -> None:
        if self.wire.closing:
            return
        began_s = time.process_time()
        self.connection.data_received(data)
        while self.connection.behind:
            self.connection.handle_some()
        self.inputs += 1
        (self.served.broker.flush if self.inputs % self.stored_every else self.served.broker.settle)()
        self.served.send_output()
        assert time.process_time() - began_s < self.cost_s_max, f"{len(data)} bytes: {data[:60].hex()}"  # answers included
        self.check_frames()
        assert self.served.epoch_errors == []
        assert getattr(self.connection.amqp.error, "condition", None) != INTERNAL_ERROR

    def check_frames(self) -> None:
        """Check that the broker respects the peer's max-frame-size."""
        amqp = self.connection.amqp
        data, position = b"".join(self.wire.written), 0
        self.wire.written.clear()
        while position < len(data):
            size = 8 if data[position : position + 4] == b"AMQP" else int.from_bytes(data[position : position + 4], "big")
            assert size <= max(amqp.remote_max_frame_size, 512), data[position : position + 40].hex()
            position += size


def use(broker: BrokerInMemory, clock: list[int]) -> None:
    """Use all accepted messages as brokers do: load, show, move, expire, deliver."""
    broker.start()
    show(broker)
    for queue in list(broker.engine.addresses.queues.values()):
        for _ in administration.move(broker.engine, queue, "moved"):
            broker.settle()
    for _ in administration.return_dead_letters(broker.engine, broker.engine.queue("moved")):
        broker.settle()
    clock[0] += LONG_AFTER_MS
    for _ in range(3):
        broker.engine.tick()
        broker.settle()
        clock[0] += 2_000
    broker.start()
    show(broker)
    deliver(broker, clock[0])


def show(broker: BrokerInMemory) -> None:
    engine = broker.engine
    for queue in engine.addresses.queues.values():
        said = [
            queue_detail(queue),
            [consumer_status(each) for each in queue.consumers],
            subscription_status(queue),
            *(administration.dead_letter(engine, each) for each in queue.waiting()),
        ]
        json.dumps(said, allow_nan=False).encode()


def deliver(broker: BrokerInMemory, now_ms: int) -> None:
    """Deliver to consumers on links of the real protocol engine, twice, so that headers are written again.

    A delivery time may be as late as the year 9999, and such a message is not delivered.
    """
    served = Served(broker)
    client = Client(served, "reader")
    for number, queue in enumerate(list(broker.engine.addresses.anycast.values())):
        expected = queue.held_messages - sum(queue.delayed.due_ms(message) > now_ms for message in queue.delayed)
        link = client.consumer(queue.name, expected + 1, name=f"reader-{number}")
        assert client.received(link) == expected
        client.session.end()
        served.settle(client)
        client.session = client.amqp.begin()
        client.run()


def work(seed: int, stored_every: int = 1) -> None:
    clock = [1_000]
    broker = BrokerInMemory(clock=lambda: clock[0])
    served = Served(broker)

    async def run() -> None:
        with complaints() as found:
            canary = Client(served, "canary")
            link = canary.consumer("canary", 10)
            served.fill("n1", WAITING)  # the queue of the peer's consumer, so that a range of dispositions concerns many deliveries
            peer = Peer(served, seed, stored_every=stored_every)
            peer.talk()
            broker.settle()
            broker.send("canary", message_bytes("alive"), Sender(), 1)
            served.settle(canary)
            assert canary.received(link) == 1
            peer.connection.connection_lost(None)
            canary.connection.connection_lost(None)
            broker.settle()
            use(broker, clock)
        assert found == []

    with quiet():
        asyncio.run(run())


@pytest.mark.parametrize("first", range(0, 4 * SEEDS_OF_ONE_TEST, SEEDS_OF_ONE_TEST))
def test_hostile_peer_harms_only_its_own_connection_and_its_accepted_messages_are_usable(first: int) -> None:
    for seed in range(first, first + SEEDS_OF_ONE_TEST):
        work(seed)


@pytest.mark.parametrize("stored_every", [3, 20])
def test_hostile_peer_harms_only_its_own_connection_while_the_journal_answers_late(stored_every: int) -> None:
    for seed in range(SEEDS_LATE):
        work(seed, stored_every)


def test_disconnected_hostile_peers_leave_no_memory_behind() -> None:
    served = Served()
    broker = served.broker

    async def talk() -> None:
        for seed in range(SEEDS_LEFT):
            peer = Peer(served, seed, cost_s_max=math.inf)  # memory is traced, which takes time
            peer.talk()
            peer.connection.connection_lost(None)
            await asyncio.sleep(0)  # the turns that the loop still owes the connection
            broker.settle()
        for queue in list(broker.engine.addresses.queues.values()):
            administration.delete(broker.engine, queue, force=True)
        broker.settle()

    async def run() -> None:
        assert await left_bytes(talk, broker.log) < LEFT_BYTES_MAX
        assert broker.engine.memory.used_bytes == 0

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_hostile_peers_harm_only_their_own_connections() -> None:
    """BASCULE_HOSTILE_SEEDS is the number of seeds, BASCULE_HOSTILE_FIRST the first of them."""
    first = int(os.environ.get("BASCULE_HOSTILE_FIRST", str(4 * SEEDS_OF_ONE_TEST)))
    for seed in range(first, first + int(os.environ.get("BASCULE_HOSTILE_SEEDS", "2000"))):
        work(seed)


def test_more_than_half_of_the_generated_hostile_messages_are_accepted() -> None:
    taken = 0
    for seed in range(200):
        hostile = Hostile(seed)
        with suppress(MalformedMessage):
            scan(hostile.message())
            taken += 1
    assert taken > 100
