"""Outcomes and states as long as a frame: the broker neither repeats them for each delivery nor keeps them."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from tests.support.hostile import (
    ATTACH,
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

LIST32 = 0xD0
#: 1 MiB when it is decoded.
LONG = mapped(symbol(b"x-opt-long"), compound(LIST32, [LIST0] * 16_000))
MESSAGES, LINKS = 100, 20
CONSUMER = performative(
    ATTACH, string(b"l"), uint(0), TRUE, NULL, NULL, described(SOURCE, listed(string(b"q"))), described(TARGET, listed())
)


def feed(served: Served, client: Client, octets: bytes) -> int:
    """Let the broker handle frames, and return the number of octets that it sends."""
    client.connection.data_received(octets)
    while client.connection.behind:
        client.connection.handle_some()
    served.broker.settle()
    served.send_output()
    sent = sum(map(len, client.wire.written))
    client.wire.written.clear()
    return sent


@pytest.mark.parametrize(
    "outcome",
    [described(MODIFIED, listed(TRUE, FALSE, LONG)), described(REJECTED, listed(described(ERROR, listed(symbol(b"x"), NULL, LONG))))],
    ids=["modified", "rejected"],
)
@run_async
async def test_answers_to_a_range_do_not_repeat_a_long_outcome(outcome: bytes) -> None:
    served = Served()
    client = Client(served, "peer")
    served.fill("q", MESSAGES)
    feed(
        served,
        client,
        CONSUMER + performative(FLOW, uint(0), uint(10_000), uint(0), uint(10_000), uint(0), uint(0), uint(MESSAGES), NULL, FALSE, FALSE),
    )
    answered = feed(served, client, performative(DISPOSITION, TRUE, uint(0), uint(MESSAGES - 1), FALSE, outcome))
    assert MESSAGES <= answered < len(outcome) + 100 * MESSAGES


@pytest.mark.parametrize("kind", ["flow with the attach", "state of an unfinished transfer"])
@run_async
async def test_links_keep_no_long_state(kind: str) -> None:
    served = Served()
    client = Client(served, "peer")
    feed(served, client, b"")
    gc.collect()
    tracemalloc.start()
    try:
        for handle in range(LINKS):
            name, number = string(b"l%d" % handle), uint(handle)
            if kind.startswith("flow"):
                octets = performative(
                    ATTACH, name, number, TRUE, NULL, NULL, described(SOURCE, listed(string(b"q"))), described(TARGET, listed())
                )
                octets += performative(FLOW, uint(0), uint(100), uint(0), uint(100), number, uint(0), uint(0), NULL, FALSE, FALSE, LONG)
            else:
                state = described(REJECTED, listed(described(ERROR, listed(symbol(b"x"), NULL, LONG))))
                octets = performative(
                    ATTACH,
                    name,
                    number,
                    FALSE,
                    NULL,
                    NULL,
                    described(SOURCE, listed()),
                    described(TARGET, listed(string(b"q"))),
                    NULL,
                    NULL,
                    uint(0),
                )
                feed(served, client, octets)  # which grants credit
                octets = performative(TRANSFER, number, number, binary(b"%d" % handle), uint(0), FALSE, TRUE, NULL, state, payload=b"")
            feed(served, client, octets)
        gc.collect()
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(client.connection.client.links) == LINKS
    assert kept < LINKS * 100_000
