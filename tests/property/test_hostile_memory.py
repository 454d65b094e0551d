"""A peer that is connected makes the broker keep little more memory than the account says, whatever the peer leaves open.

Each attack uses another place where a link, session or answer can keep what the peer has sent. For the memory that is left when such peers
have gone see tests/property/test_hostile_peers.py.
"""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from bascule.broker import memory
from bascule.broker.memory import MemoryPart
from bascule.server.memory import MemoryWatch
from bascule.server.spill import SpillFiles
from tests.property.test_hostile_peers import Peer
from tests.support.costs import held_bytes
from tests.support.hostile import (
    ATTACH,
    BEGIN,
    DETACH,
    DISPOSITION,
    ERROR,
    FALSE,
    FLOW,
    LIST0,
    MODIFIED,
    NULL,
    REJECTED,
    SOURCE,
    TARGET,
    TRANSFER,
    TRUE,
    binary,
    compound,
    described,
    listed,
    mapped,
    performative,
    string,
    symbol,
    uint,
)
from tests.unit.server.served import Client, Served, run_async

#: How much more memory a peer may take than the account says: a factor, and bytes besides.
FACTOR, SLACK_BYTES = 4, 8 << 20
LIST32: Final = 0xD0
#: 16 KB, which are 1 MiB when they are decoded; and a text of 64 KB, which needs as much in a frame of the largest size.
ITEMS = mapped(symbol(b"x-opt-long"), compound(LIST32, [LIST0] * 16_000))
TEXT = mapped(symbol(b"x-opt-long"), string(b"x" * 60_000))
ROUNDS = 60


def to_queue(handle: int) -> bytes:
    target = described(TARGET, listed(string(b"q")))
    return performative(
        ATTACH, string(b"p%d" % handle), uint(handle), FALSE, NULL, NULL, described(SOURCE, LIST0), target, NULL, NULL, uint(0)
    )


def from_queue(handle: int, address: bytes = b"q", name: bytes = b"", channel: int = 0) -> bytes:
    source = described(SOURCE, listed(string(address)))
    return performative(
        ATTACH, string(name or b"c%d" % handle), uint(handle), TRUE, NULL, NULL, source, described(TARGET, LIST0), channel=channel
    )


def flow(handle: int, credit: int, properties: bytes = NULL) -> bytes:
    return performative(
        FLOW, uint(0), uint(100_000), uint(0), uint(100_000), uint(handle), uint(0), uint(credit), NULL, FALSE, FALSE, properties
    )


def flows_of_new_links(long: bytes) -> Iterator[bytes]:
    for handle in range(ROUNDS):
        yield from_queue(handle) + flow(handle, 0, long)


def states_of_unfinished_transfers(long: bytes) -> Iterator[bytes]:
    state = described(REJECTED, listed(described(ERROR, listed(symbol(b"x"), NULL, long))))
    for handle in range(ROUNDS):
        yield to_queue(handle)
        yield performative(TRANSFER, uint(handle), uint(handle), binary(b"%d" % handle), uint(0), FALSE, TRUE, NULL, state)


def sessions_with_properties(long: bytes) -> Iterator[bytes]:
    for channel in range(1, ROUNDS):
        yield performative(BEGIN, NULL, uint(0), uint(1), uint(1), uint(10), NULL, NULL, long, channel=channel)


def attaches_with_properties(long: bytes) -> Iterator[bytes]:
    for handle in range(ROUNDS):
        target = described(TARGET, LIST0)
        source = described(SOURCE, listed(string(b"q")))
        more = [NULL, NULL, NULL, NULL, NULL, NULL, long]
        yield performative(ATTACH, string(b"c%d" % handle), uint(handle), TRUE, NULL, NULL, source, target, *more)


def unanswered_detaches() -> Iterator[bytes]:
    """Attach links that the broker refuses, with names as long as the broker accepts, and do not answer the detaches."""
    for channel in range(2):
        if channel:
            yield performative(BEGIN, NULL, uint(0), uint(1), uint(1), channel=channel)
        for handle in range(800):
            name = "\U0001f600".encode() * 1_900 + b"%d.%d" % (channel, handle)
            yield from_queue(handle, b"$management", name, channel)


def outcomes(long: bytes, *, ranges: bool) -> Iterator[bytes]:
    """Give messages long outcomes that the broker answers: each message its own, or all of them one."""
    yield from_queue(0) + flow(0, ROUNDS)
    for number in range(1 if ranges else ROUNDS):
        state = described(REJECTED, listed(described(ERROR, listed(symbol(b"x"), NULL, long))))
        last = ROUNDS - 1 if ranges else number
        yield performative(DISPOSITION, TRUE, uint(number), uint(last), FALSE, state)


def unsettled_outcomes(long: bytes) -> Iterator[bytes]:
    """The same with outcomes that return the messages, which come again and again."""
    yield from_queue(0) + flow(0, ROUNDS)
    for _ in range(3):
        yield performative(DISPOSITION, TRUE, uint(0), uint(ROUNDS - 1), FALSE, described(MODIFIED, listed(FALSE, FALSE, long)))
        yield flow(0, ROUNDS)


ATTACKS = (
    flows_of_new_links, states_of_unfinished_transfers, sessions_with_properties, attaches_with_properties, unsettled_outcomes,
)  # fmt: skip


class Watched(Served):
    """A broker whose account is measured when the test asks."""

    def __init__(self, spill: SpillFiles) -> None:
        super().__init__()
        self._watch = MemoryWatch(self.engine, spill, self.partials, self.connections, self.dispatch)
        self._before = (0, 0)
        self.journal_answers = True

    def account_bytes(self) -> int:
        self._watch.measure(0.0)
        while self.engine.turns.pending:
            self.engine.turns.begin_turn()
            self.engine.turns.go_on()
        return self.engine.memory.used_bytes

    def begin(self) -> None:
        tracemalloc.start()
        self._before = held_bytes(), self.account_bytes()

    def attacked(self, client: Client, octets: Iterator[bytes]) -> None:
        """Check the growth by an attack."""
        self.begin()
        for some in octets:
            self.feed(client, some)
        assert not client.wire.closing
        self.check()

    def check(self) -> None:
        """Check the growth since ``begin``."""
        kept, counted = held_bytes() - self._before[0], self.account_bytes() - self._before[1]
        assert kept <= FACTOR * max(0, counted) + SLACK_BYTES, f"{kept} bytes are kept, {counted} are counted"

    def feed(self, client: Client, octets: bytes) -> None:
        client.connection.data_received(octets)
        while client.connection.behind:
            client.connection.handle_some()
        if self.journal_answers:
            self.broker.settle()
        else:
            self.broker.flush()  # appended, and never confirmed
        self.send_output()
        client.wire.written.clear()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Watched]:
    spill = SpillFiles(tmp_path / "spill")
    try:
        yield Watched(spill)
    finally:
        tracemalloc.stop()
        spill.close()


@pytest.mark.parametrize("long", [ITEMS, TEXT], ids=["items", "text"])
@pytest.mark.parametrize("attack", ATTACKS, ids=[attack.__name__ for attack in ATTACKS])
@run_async
async def test_connected_peer_keeps_no_more_memory_than_the_account_says(
    served: Watched, attack: Callable[[bytes], Iterator[bytes]], long: bytes
) -> None:
    client = Client(served, "peer")
    served.fill("q", ROUNDS)
    served.attacked(client, attack(long))


@run_async
async def test_selectors_of_browsers_are_counted_and_limited(served: Watched) -> None:
    client = Client(served, "peer")
    served.fill("q", 1)
    account = served.engine.memory
    account.limit(64 << 20)
    text = string(b" OR ".join(b"n%d = %d" % (number, number) for number in range(1_000)))
    filters = mapped(symbol(b"selector"), b"\0" + symbol(b"apache.org:selector-filter:string") + text)

    def attach(handle: int) -> bytes:
        source = described(SOURCE, listed(string(b"q"), NULL, NULL, NULL, NULL, NULL, symbol(b"copy"), filters))
        return performative(ATTACH, string(b"b%d" % handle), uint(handle), TRUE, NULL, NULL, source, described(TARGET, LIST0))

    served.attacked(client, map(attach, range(20)))
    assert 2 < len(client.connection.client.links) < 10
    assert account.parts()[MemoryPart.SELECTORS] > 0.7 * memory.SELECTORS_SHARE * account.limit_bytes
    served.feed(client, performative(DETACH, uint(0), TRUE))
    served.feed(client, attach(0))
    client.connection.connection_lost(None)
    served.settle()
    assert account.selectors.chars == 0


@run_async
async def test_links_whose_peer_does_not_answer_detaches_are_counted(served: Watched) -> None:
    client = Client(served, "peer")
    served.attacked(client, unanswered_detaches())
    assert len(client.connection.client.links) == 0


@pytest.mark.parametrize("ranges", [False, True], ids=["one by one", "range"])
@run_async
async def test_answers_that_wait_for_the_journal_keep_no_more_memory_than_the_account_says(served: Watched, ranges: bool) -> None:
    client = Client(served, "peer")
    served.fill("q", ROUNDS)
    served.feed(client, b"")
    served.begin()
    rounds = outcomes(ITEMS, ranges=ranges)
    served.feed(client, next(rounds))
    served.journal_answers = False
    for octets in rounds:
        served.feed(client, octets)
    served.check()
    served.journal_answers = True
    served.feed(client, b"")
    assert served.engine.journaling.actions == 0


@pytest.mark.parametrize("stored_every", [1, 20])
@run_async
async def test_random_peers_that_stay_keep_no_more_memory_than_the_account_says(served: Watched, stored_every: int) -> None:
    served.begin()
    for seed in range(3):
        Peer(served, seed, cost_s_max=math.inf, stored_every=stored_every).talk()
    served.check()
