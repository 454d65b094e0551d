"""JSON of long answers: made in short turns of the event loop, sent in pieces, and never whole in memory."""

from __future__ import annotations

import asyncio
import json
import time
import tracemalloc
from typing import Any

import pytest

from bascule.core.destination import Routing
from bascule.server.admin import STREAMS_AT_ONCE, AdminServer
from bascule.server.in_turns import ENTRIES_PER_TURN
from bascule.server.json_pieces import JSON_PIECE_BYTES, LongList, json_pieces
from tests.support.speed import SLOWNESS
from tests.unit.server.served import run_async
from tests.unit.server.test_admin import Broker, served
from tests.unit.server.test_administrator import Node, administrator

SOON_S = 20.0 * SLOWNESS
#: Limit on a turn of the event loop, in processor time.
TURN_S = 0.05 * SLOWNESS


async def asked(port: int, path: str) -> tuple[bytes, int]:
    """Return the head of an answer and the size of its body as sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    async with asyncio.timeout(SOON_S):
        head = await reader.readuntil(b"\r\n\r\n")
        size = 0
        while data := await reader.read(1 << 16):
            size += len(data)
    writer.close()
    return head, size


CONTENTS: list[Any] = [
    {}, [], "text", 7, None, {"a": []}, {"a": {}}, {"é\"": "é\"\n", "b": [1, [2], {"c": []}], "d": None},
    [{"n": number} for number in range(1_000)], {"first": list(range(350)), "second": tuple(range(100)), "last": True},
]  # fmt: skip


@pytest.mark.parametrize("content", CONTENTS, ids=lambda content: repr(content)[:20])
@run_async
async def test_pieces_are_the_json_of_the_content(content: Any) -> None:
    text = b"".join([piece async for piece in json_pieces(content)]).decode()
    assert text == json.dumps(content, ensure_ascii=False, separators=(",", ":"))


@run_async
async def test_entries_of_long_list_are_described_when_they_are_sent() -> None:
    described: list[int] = []

    def describe(number: int) -> dict[str, object]:
        described.append(number)
        return {"n": number, "text": "x" * 1000}

    count = 5 * JSON_PIECE_BYTES // 1000
    pieces = json_pieces({"before": 1, "entries": LongList(describe, range(count)), "after": [2]})
    first = await anext(pieces)
    assert len(described) < count / 2
    rest = [piece async for piece in pieces]
    assert [each["n"] for each in json.loads(first + b"".join(rest))["entries"]] == described == list(range(count))
    assert max(map(len, (first, *rest))) < 3 * JSON_PIECE_BYTES


@pytest.mark.parametrize(("count", "cost"), [(3 * ENTRIES_PER_TURN, 1), (30, ENTRIES_PER_TURN // 10), (3, 2 * ENTRIES_PER_TURN)])
@run_async
async def test_long_list_takes_as_many_turns_as_its_entries_cost(count: int, cost: int) -> None:
    made = asyncio.ensure_future(anext(json_pieces(LongList(str, range(count), cost))))
    turns = 0
    while not made.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns >= 3
    assert json.loads(made.result()) == list(map(str, range(count)))


@run_async
async def test_answers_about_thousands_of_queues_take_short_turns_and_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    for number in range(4_000):
        node.engine.queue(f"orders.{number:05}.{'n' * 60}")
    for number in range(4_000):
        node.engine.create_queue(f"s{number}", "news", Routing.MULTICAST, subscription=f"s{number}")
    node.broker.settle()
    turns_s = [0.0]
    run = asyncio.events.Handle._run

    def measured(handle: asyncio.Handle) -> None:
        begun_s = time.thread_time()
        run(handle)
        turns_s.append(time.thread_time() - begun_s)

    server = AdminServer(administrator(node), host="127.0.0.1", port=0)
    server.start()
    try:
        for path, least in (("/status", 1_000_000), ("/subscriptions", 400_000), ("/definitions", 500_000)):
            await asked(server.port, path)  # fills caches
            tracemalloc.start()
            try:
                head, size = await asked(server.port, path)
                peak = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
            assert (b"transfer-encoding: chunked" in head.lower(), size > least) == (True, True)
            assert peak < 1_000_000, path
            monkeypatch.setattr(asyncio.events.Handle, "_run", measured)
            await asked(server.port, path)
            monkeypatch.undo()
    finally:
        await server.stop()
    assert max(turns_s) < TURN_S


def test_short_answer_is_sent_whole() -> None:
    def ask(port: int) -> None:
        head, size = asyncio.run(asked(port, "/queues"))
        assert f"content-length: {size}\r\n".encode() in head

    served(Broker(), ask)


class Untold(Broker):
    """A broker with a queue that cannot be described, after ``good`` queues that can."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    async def queues(self) -> Any:
        def describe(number: int) -> str:
            if number == self.good:
                raise ZeroDivisionError
            return "x" * 1000

        return LongList(describe, range(self.good + 1))


@pytest.mark.parametrize("begun", [False, True])
def test_error_while_an_answer_is_made_is_contained_and_the_answer_is_an_error_or_not_complete(begun: bool) -> None:
    broker = Untold(5 * JSON_PIECE_BYTES // 1000 if begun else 0)

    def ask(port: int) -> None:
        for _ in range(STREAMS_AT_ONCE + 1):
            if begun:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    asyncio.run(complete(port))
            else:
                assert b" 500 " in asyncio.run(asked(port, "/queues"))[0]

    served(broker, ask)
    assert broker.contained == [("/queues", "ZeroDivisionError()")] * (STREAMS_AT_ONCE + 1)


async def complete(port: int) -> None:
    """Read an answer in chunks. Raises ConnectionError or IncompleteReadError if it is not complete."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /queues HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        async with asyncio.timeout(SOON_S):
            await reader.readuntil(b"\r\n\r\n")
            while size := int(await reader.readuntil(b"\r\n"), 16):
                await reader.readexactly(size + len(b"\r\n"))
    finally:
        writer.close()
