"""The view and the actions of an administrator, on a broker in memory with its real connections."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from bascule import __version__
from bascule.amqp.events import ConnectionClosed
from bascule.broker.administration import InUse
from bascule.broker.counters import Counters
from bascule.broker.errors import UnknownAddress, UnknownBranch
from bascule.broker.queue import BrokerQueue
from bascule.broker.send_times import SendTimes
from bascule.config import Settings
from bascule.core.build import build
from bascule.core.destination import Routing
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.permissions import MANAGEMENT_ADDRESS
from bascule.server import actions
from bascule.server.admin_access import LOCAL as ADMIN
from bascule.server.administrator import Administrator
from bascule.server.status import BrokerRole
from bascule.server.uncaught import UncaughtErrorHandler
from bascule.testing.broker import BrokerInMemory
from tests.unit.server.served import TOPIC, Client, Served, run_async


class Node(Served):
    """A node over a broker in memory, whose log stores everything in the next turn of the loop while ``stores`` is true."""

    def __init__(self) -> None:
        super().__init__(BrokerInMemory())
        self.settings = Settings.model_validate({"bridge": {"id": "demo"}, "journal": {"append_timeout_s": 0.05}})
        self.stores = True
        self.serving = True
        self.trouble = ""
        self.tail: Any = None
        self.housekeeping = None
        self.journal_offset = 7
        self.foreign_records = 1
        self.ingress_foreign_records = 0
        self.watches_elected = False
        self.role = BrokerRole.ACTIVE
        self.refused_connections = 0
        self.send_times = SendTimes()
        self.uncaught = UncaughtErrorHandler()
        self.spill: Any = None

    @property
    def loaded_engine(self) -> Any:
        return self.engine

    @property
    def counters(self) -> Counters:
        return self.engine.counters

    def dispatch(self) -> None:
        super().dispatch()
        if self.stores:
            asyncio.get_running_loop().call_soon(self.broker.settle)

    def queued(self, name: str) -> int:
        queue = self.engine.addresses.anycast.get(name)
        return -1 if queue is None else queue.held_messages


def administrator(node: Node) -> Administrator:
    any_node: Any = node
    return Administrator(any_node)


def dead(node: Node, count: int, address: str = "q") -> None:
    """Make dead letters by rejecting messages."""
    node.fill(address, count)
    receiver = node.broker.attach(node.engine.queue(address), count)
    node.broker.settle()
    for message in receiver.messages:
        node.engine.reject(receiver.consumer, message)
    node.engine.detach(receiver.consumer)
    node.broker.settle()


@run_async
async def test_administrator_creates_purges_and_deletes_queues() -> None:
    node = Node()
    admin = administrator(node)
    assert await admin.act(ADMIN, "queues/create", {"name": "q"}) == {"created": "q"}
    with pytest.raises(InvalidInput, match="already exists"):
        await admin.act(ADMIN, "queues/create", {"name": "q"})
    node.fill("q", 3)
    with pytest.raises(InUse, match="3 messages"):
        await admin.act(ADMIN, "queues/delete", {"name": "q"})
    assert await admin.act(ADMIN, "queues/purge", {"name": "q"}) == {"purged": 3}
    assert node.queued("q") == 0
    node.fill("q", 2)
    assert await admin.act(ADMIN, "queues/delete", {"name": "q", "force": True}) == {"deleted": "q", "messages": 2}
    assert node.queued("q") == -1
    node.broker.start()
    assert node.queued("q") == -1, "the journal must not have the queue"


@run_async
async def test_only_messages_that_match_the_selector_are_moved() -> None:
    node = Node()
    node.fill("q", 3)
    answer = await administrator(node).act(ADMIN, "queues/move", {"name": "q", "to": "other", "selector": "JMSPriority = 9"})
    assert (answer, node.queued("q")) == ({"moved": 0, "left": {}}, 3)
    answer = await administrator(node).act(ADMIN, "queues/move", {"name": "q", "to": "other"})
    assert (answer, node.queued("q"), node.queued("other")) == ({"moved": 3, "left": {}}, 0, 3)


@run_async
async def test_no_queue_is_created_at_the_address_of_the_management_node() -> None:
    """No client could consume from such a queue."""
    node = Node()
    node.fill("q", 1)
    for action, arguments in (("queues/move", {"name": "q", "to": MANAGEMENT_ADDRESS}), ("queues/create", {"name": MANAGEMENT_ADDRESS})):
        with pytest.raises(InvalidInput, match="the address of the management node"):
            await administrator(node).act(ADMIN, action, arguments)
    with pytest.raises(InvalidInput, match="the address of the management node"):
        node.engine.queue(MANAGEMENT_ADDRESS)
    assert (node.queued("q"), node.queued(MANAGEMENT_ADDRESS)) == (1, -1)


@run_async
async def test_dead_letters_are_listed_and_returned() -> None:
    node = Node()
    dead(node, 3)
    admin = administrator(node)
    assert [each["address"] for each in (await admin.dead_letters("", 2))] == ["q", "q"]
    assert await admin.act(ADMIN, "dead-letters/return", {}) == {"returned": 3, "left": {}}
    assert (node.queued("DLQ"), node.queued("q")) == (0, 3)
    with pytest.raises(UnknownAddress, match="'none'"):
        await admin.dead_letters("none", 2)


@run_async
async def test_a_subscription_in_use_is_deleted_by_force_only() -> None:
    node = Node()
    client = Client(node)
    client.consumer("news", capabilities=TOPIC, name="sub", durable=2, expiry_policy="never")
    admin = administrator(node)
    assert [(each["name"], each["topic"], each["consumers"]) for each in (await admin.subscriptions())] == [("client.sub", "news", 1)]
    with pytest.raises(InvalidInput, match="is the queue of a subscription"):
        await admin.act(ADMIN, "queues/delete", {"name": "client.sub"})
    with pytest.raises(InUse):
        await admin.act(ADMIN, "subscriptions/delete", {"name": "client.sub"})
    assert (await admin.act(ADMIN, "subscriptions/delete", {"name": "client.sub", "force": True}))["deleted"] == "client.sub"
    assert list(await admin.subscriptions()) == []
    with pytest.raises(UnknownAddress, match="no subscription"):
        await admin.act(ADMIN, "subscriptions/delete", {"name": "client.sub"})


@pytest.mark.parametrize("by", ["127.0.0.1:5672", "client"])
@run_async
async def test_a_connection_is_closed_by_its_address_or_its_client_id(by: str) -> None:
    node = Node()
    client = Client(node)
    admin = administrator(node)
    client.consumer("q", credit=1)
    (listed,) = await admin.clients()
    assert (listed["client_id"], listed["user"], listed["mechanism"]) == ("client", "anonymous", "ANONYMOUS")
    assert (listed["consumers"], listed["producers"]) == (1, 0)
    assert await admin.act(ADMIN, "connections/close", {"id": by}) == {"closed": 1}
    client.run()
    (closed,) = client.events_of(ConnectionClosed)
    assert "administrator" in str(closed.error)
    with pytest.raises(UnknownAddress):
        await admin.act(ADMIN, "connections/close", {"id": "somebody"})


@pytest.mark.parametrize("action", ["branches/commit", "branches/rollback", "branches/forget"])
@run_async
async def test_an_unknown_branch_cannot_be_ended(action: str) -> None:
    with pytest.raises(UnknownBranch):
        await administrator(Node()).act(ADMIN, action, {"xid": "7:67:62"})


@pytest.mark.parametrize(
    ("action", "arguments", "text"),
    [
        ("queues/create", {}, "name must be given"),
        ("queues/create", {"name": "a.#"}, "'#'"),
        ("queues/purge", {"name": "q", "colour": "red"}, "unknown argument 'colour'"),
        ("queues/delete", {"name": "q", "force": "yes"}, "force must be true or false"),
        ("queues/purge", {"name": 7}, "name must be a string"),
        ("queues/purge", {"name": "q", "selector": "x ="}, "column"),
        ("queues/purge", {"name": "none"}, "no queue 'none'"),
        ("queues/move", {"name": "q", "to": "\ud800"}, "to '\\\\ud800' contains half of a surrogate pair"),
        ("queues/move", {"name": "q", "to": "x" * 1001}, "1001 characters; at most 1000"),
        ("queues/move", {"name": "q", "to": "a.#"}, "to: must name one destination"),
        ("queues/create", {"name": "x" * 70_000}, "70000 characters"),
    ],
)
@run_async
async def test_invalid_arguments_of_actions_are_named_in_error(action: str, arguments: dict[str, Any], text: str) -> None:
    node = Node()
    node.fill("q", 1)
    with pytest.raises((InvalidInput, UnknownAddress), match=text):
        await administrator(node).act(ADMIN, action, arguments)
    assert node.queued("q") == 1


@run_async
async def test_a_broker_that_does_not_serve_refuses_actions_with_the_reason() -> None:
    node = Node()
    node.serving, node.trouble = False, "Kafka is away"
    admin = administrator(node)
    with pytest.raises(Unavailable, match="Kafka is away"):
        await admin.act(ADMIN, "queues/create", {"name": "q"})
    with pytest.raises(Unavailable, match="Kafka is away"):
        await admin.queue("q")
    node.serving = True
    with pytest.raises(Unavailable, match="starting"):
        await admin.act(ADMIN, "ingress/reset", {})


@run_async
async def test_an_action_that_is_not_stored_in_time_is_reported_as_decided() -> None:
    node = Node()
    node.stores = False
    with pytest.raises(Unavailable, match=r"not stored the decision within 0\.05 s"):
        await administrator(node).act(ADMIN, "queues/create", {"name": "q"})


@run_async
async def test_a_long_action_waits_while_the_journal_is_congested(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.fill("q", 5)
    monkeypatch.setattr("bascule.broker.administration.STEP_MESSAGES", 1)
    monkeypatch.setattr(actions, "PAUSE_S", 0)
    node.congested = True
    moving = asyncio.ensure_future(administrator(node).act(ADMIN, "queues/move", {"name": "q", "to": "other"}))
    for _ in range(20):
        await asyncio.sleep(0)
    assert node.queued("q") == 4, "more than one step"
    node.congested = False
    assert (await moving)["moved"] == 5


@run_async
async def test_long_action_ends_when_broker_stops_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.fill("q", 5)
    monkeypatch.setattr("bascule.broker.administration.STEP_MESSAGES", 1)
    node.congested = True
    moving = asyncio.ensure_future(administrator(node).act(ADMIN, "queues/purge", {"name": "q"}))
    await asyncio.sleep(0)
    node.serving, node.trouble = False, "fenced"
    with pytest.raises(Unavailable, match="interrupted after up to 1 messages: fenced"):
        await moving
    assert node.queued("q") == 4


@run_async
async def test_status_contains_queues_and_counters() -> None:
    node = Node()
    node.fill("q", 2)
    client = Client(node)
    client.consumer("q", credit=1)
    node.engine.create_queue("sub", "news", Routing.MULTICAST, subscription="sub")
    status = await administrator(node).status()
    assert (status["bridge"], status["state"], status["serving"]) == ("demo", "serving", True)
    assert (status["version"], status["build"]) == (__version__, build())
    assert [(each["name"], each["messages"], each["delivering"]) for each in status["queues"]] == [("q", 1, 1), ("sub", 0, 0)]
    assert status["counters"]["messages_in"] == 2
    assert status["memory"] is not None
    assert (status["memory"]["blocked"], status["memory"]["parts"]["messages"]) == ("", 2 * (320 + 16))
    assert (status["gauges"]["connections"], status["gauges"]["journal_offset"]) == (1, 7)
    detail = await administrator(node).queue("q")
    assert [(each["client_id"], each["unsettled"]) for each in detail["consumer_list"]] == [("client", 1)]


def test_a_queue_is_found_by_the_name_of_its_subscription() -> None:
    node = Node()
    created = node.engine.create_queue("ann.sub", "news", Routing.MULTICAST, subscription="sub")
    found: BrokerQueue = actions.queue_named(node.engine, "ann.sub")
    assert found is created


@run_async
async def test_queue_with_the_name_of_a_subscriptions_queue_hides_neither() -> None:
    node = Node()
    hidden = node.engine.create_queue("shop.news", "news", Routing.MULTICAST, subscription="news")
    node.fill("shop.news", 2)
    node.broker.settle()
    admin = administrator(node)
    assert [(await admin.queue(name))["address"] for name in ("shop.news", "queue://shop.news", "subscription://shop.news")] == [
        "shop.news", "shop.news", "news",
    ]  # fmt: skip
    assert await admin.act(ADMIN, "queues/purge", {"name": "subscription://shop.news"}) == {"purged": 0}
    assert node.queued("shop.news") == 2
    with pytest.raises(InvalidInput, match="is the queue of a subscription"):
        await admin.act(ADMIN, "queues/delete", {"name": "subscription://shop.news"})
    assert await admin.act(ADMIN, "subscriptions/delete", {"name": "subscription://shop.news"}) == {"deleted": "shop.news", "messages": 0}
    assert hidden.deleted
    assert node.queued("shop.news") == 2


@run_async
async def test_queue_whose_name_begins_like_a_prefix_is_found() -> None:
    node = Node()
    node.engine.create_queue("shop.news", "news", Routing.MULTICAST, subscription="news")
    for name in ("subscription://shop.news", "queue://x", "subscription://y"):
        node.fill(name, 1)
    admin = administrator(node)
    for asked, found in (
        ("queue://subscription://shop.news", "subscription://shop.news"), ("queue://x", "queue://x"), ("subscription://y", "subscription://y"),
    ):  # fmt: skip
        assert (await admin.queue(asked))["name"] == found
