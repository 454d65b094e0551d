"""Long pages of the admin server: the event loop describes them in several turns, and another thread makes the text."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from typing import Any

import pytest
from starlette.types import ASGIApp

from bascule.core.destination import Routing
from bascule.server.admin import admin_app
from bascule.server.administrator import MESSAGES_PER_TURN, Administrator
from bascule.server.in_turns import ENTRIES_PER_TURN
from bascule.server.json_pieces import json_pieces
from bascule.server.status import BrokerStatus
from tests.unit.server.served import Client, run_async
from tests.unit.server.test_admin import Broker, get, served
from tests.unit.server.test_administrator import Node, administrator, dead

PIECES = 3


async def turns_of(page: Awaitable[Any]) -> tuple[Any, int]:
    """Return the page, and the number of turns of the event loop that it takes."""
    made = asyncio.ensure_future(page)
    turns = 0
    while not made.done():
        await asyncio.sleep(0)
        turns += 1
    return made.result(), turns


def many_queues(node: Node) -> None:
    for number in range(ENTRIES_PER_TURN * PIECES):
        node.engine.queue(f"q{number}")


def many_subscriptions(node: Node) -> None:
    for number in range(ENTRIES_PER_TURN * PIECES):
        node.engine.create_queue(f"s{number}", "news", Routing.MULTICAST, subscription=f"s{number}")


def many_consumers(node: Node) -> None:
    for _ in range(ENTRIES_PER_TURN * PIECES):
        node.broker.attach(node.engine.queue("q"), 1)


def many_dead_letters(node: Node) -> None:
    dead(node, MESSAGES_PER_TURN * PIECES)


async def text_of(content: object) -> bytes:
    """Return the JSON of an answer."""
    return b"".join([piece async for piece in json_pieces(content)])


async def page_of(answer: Awaitable[Any]) -> Any:
    return json.loads(await text_of(await answer))


PAGES: dict[str, tuple[Callable[[Node], None], Callable[[Administrator], Awaitable[Any]]]] = {
    "queues": (many_queues, lambda admin: page_of(admin.status_page())),
    "metrics": (many_queues, lambda admin: admin.status()),
    "subscriptions": (many_subscriptions, lambda admin: page_of(admin.subscriptions())),
    "consumers": (many_consumers, lambda admin: page_of(admin.queue("q"))),
    "dead letters": (many_dead_letters, lambda admin: admin.dead_letters("", MESSAGES_PER_TURN * PIECES)),
}


@pytest.mark.parametrize("what", PAGES)
@run_async
async def test_long_page_is_made_in_several_turns(what: str) -> None:
    fill, ask = PAGES[what]
    node = Node()
    fill(node)
    page, turns = await turns_of(ask(administrator(node)))
    described = page["queues"] if what in ("queues", "metrics") else page["consumer_list"] if what == "consumers" else page
    assert len(described) == (MESSAGES_PER_TURN if what == "dead letters" else ENTRIES_PER_TURN) * PIECES
    assert turns >= PIECES


@run_async
async def test_queue_deleted_during_listing_is_listed_unchanged_or_omitted() -> None:
    node = Node()
    many_queues(node)
    page = asyncio.ensure_future(text_of(await administrator(node).status_page()))
    await asyncio.sleep(0)
    for queue in list(node.engine.addresses.queues.values()):
        node.engine.delete_queue(queue)
    assert {queue["messages"] for queue in json.loads(await page)["queues"]} == {0}


@run_async
async def test_listing_first_dead_letters_reads_only_requested_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    dead(node, 20)
    queue = node.engine.queue("DLQ")
    asked: list[int] = []
    after = type(queue).after
    monkeypatch.setattr(type(queue), "after", lambda self, place, count: (asked.append(count), after(self, place, count))[1])
    monkeypatch.setattr(type(queue), "waiting", lambda _: pytest.fail("the whole queue is listed"))
    assert len(await administrator(node).dead_letters("", 5)) == 5
    assert asked == [5]


@run_async
async def test_connection_list_of_many_clients_is_built_in_several_turns() -> None:
    node = Node()
    clients = [Client(node) for _ in range(20)]
    page, turns = await turns_of(text_of(await administrator(node).clients()))
    assert (len(json.loads(page)), turns >= PIECES) == (len(clients), True)


class Entries(list[Any]):
    """A list that records the thread that iterates over it."""

    def __init__(self, entries: list[Any]) -> None:
        super().__init__(entries)
        self.threads: list[str] = []

    def __iter__(self) -> Iterator[Any]:
        self.threads.append(threading.current_thread().name)
        return super().__iter__()


def test_text_of_metrics_is_made_off_the_event_loop() -> None:
    broker = Broker()
    queues = broker.now["queues"] = Entries(list(broker.now["queues"]))

    def ask(port: int) -> None:
        code, text = get(port, "/metrics")
        assert code == 200
        assert '"q"' in text

    served(broker, ask)
    assert set(queues.threads) == {"admin"}


@run_async
async def test_pages_are_made_one_at_a_time() -> None:
    class Slow(Broker):
        busy = most = 0

        async def status(self) -> BrokerStatus:
            await self.describe()
            return await super().status()

        async def look(self, name: str, parameters: Mapping[str, str]) -> object:
            await self.describe()
            return await super().look(name, parameters)

        async def describe(self) -> None:
            self.busy += 1
            self.most = max(self.most, self.busy)
            await asyncio.sleep(0)
            self.busy -= 1

    broker = Slow()
    app = admin_app(broker)
    answers = await asyncio.gather(*(asgi_get(app, path) for path in ("/list/queues", "/metrics", "/list/topics") * 3))
    assert answers == [200] * 9
    assert broker.most == 1


async def asgi_get(app: ASGIApp, path: str) -> int:
    """Return the status code of a page, without a socket."""
    codes: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            codes.append(message["status"])

    scope = {"type": "http", "method": "GET", "path": path, "headers": [], "query_string": b"", "client": ("127.0.0.1", 1)}
    await app(scope, receive, send)
    (code,) = codes
    return code
