"""The looks of an administrator at a broker in memory: parts of lists, messages, and what a console shows."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from bascule.broker.errors import UnknownAddress
from bascule.broker.queue import BrokerQueue
from bascule.config import Settings
from bascule.core.access import AccessRules, CurrentPermissions
from bascule.core.destination import Routing
from bascule.core.errors import InvalidInput, Unavailable
from bascule.core.roles import UserRoles
from bascule.jms.message import JmsMessage, encode_message
from bascule.server import browsing, listing, looks
from bascule.server.admin_access import LOCAL as ADMIN
from bascule.server.admin_access import AdminRole, NotAdministrator, Principal
from bascule.server.json_pieces import json_pieces
from bascule.server.looks import LOOKS
from bascule.server.policies import permissions_of
from bascule.server.status import QueueStatus, queue_status
from bascule.testing.broker import Sender
from tests.unit.server.served import Client, run_async
from tests.unit.server.test_administrator import Node, administrator, dead
from tests.unit.server.test_long_pages import turns_of

HOSTILE = "<img src=x onerror=alert(1)>"


async def look(node: Node, name: str, **parameters: str) -> Any:
    found = await administrator(node).look(name, parameters)
    return found if isinstance(found, bytes) else json.loads(b"".join([piece async for piece in json_pieces(found)]))


def send(node: Node, address: str, **fields: Any) -> None:
    data = encode_message(JmsMessage(**fields))
    node.broker.send(address, data, Sender(), 0)
    node.broker.settle()


def many_queues(node: Node, count: int) -> None:
    for number in range(count):
        node.engine.queue(f"orders.{number:05}")
    node.broker.settle()


@run_async
async def test_part_of_ten_thousand_queues_is_searched_and_sorted_by_the_server_in_turns() -> None:
    node = Node()
    many_queues(node, 10_000)
    node.fill("orders.00007", 3)
    node.fill("orders.09999", 5)
    page = look(node, "list/queues", search="ORDERS.", sort="messages", order="descending", limit="2")
    found, turns = await turns_of(page)
    assert [each["name"] for each in found["entries"]] == ["orders.09999", "orders.00007"]
    assert (found["found"], found["total"], len(found["entries"])) == (10_000, 10_000, 2)
    assert turns >= 20
    last = await look(node, "list/queues", offset="9999", limit="50")
    assert [each["name"] for each in last["entries"]] == ["orders.09999"]
    few = await look(node, "list/queues", search="0999")
    assert (few["found"], [each["name"] for each in few["entries"]][:2]) == (11, ["orders.00999", "orders.09990"])


@run_async
async def test_part_of_ten_thousand_queues_describes_the_queues_of_the_part_only(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    many_queues(node, 10_000)
    described: list[str] = []

    def status(queue: BrokerQueue) -> QueueStatus:
        described.append(queue.name)
        return queue_status(queue)

    monkeypatch.setattr(looks, "queue_status", status)
    for parameters in ({}, {"sort": "messages", "order": "descending"}, {"search": "0999"}, {"offset": "9950"}):
        described.clear()
        page = await look(node, "list/queues", **parameters)
        assert described == [each["name"] for each in page["entries"]]
        assert len(described) <= listing.PART_ENTRIES


@pytest.mark.parametrize("name", ["queues", "subscriptions"])
@pytest.mark.parametrize("search", ["", "s1"])
@run_async
async def test_every_column_sorts_in_both_orders(name: str, search: str) -> None:
    node = Node()
    columns = {"queues": looks.QUEUE_COLUMNS, "subscriptions": looks.SUBSCRIPTION_COLUMNS}[name]
    for number in (3, 10, 2, 11, 1):
        node.engine.create_queue(f"s{number}", f"t{number % 3}", Routing.MULTICAST, subscription=f"s{number}")
        node.fill(f"a{number % 4}", number)
    node.broker.settle()
    assert columns.sortable
    for column in columns.sortable:
        rows = [row for row in (await look(node, f"list/{name}"))["entries"] if search in row["name"]]
        for order in ("ascending", "descending"):
            found = (await look(node, f"list/{name}", sort=column, order=order, search=search, limit="5"))["entries"]
            assert [row[column] for row in found] == sorted((row[column] for row in rows), reverse=order == "descending")[:5]
            assert all(row in rows for row in found)


@pytest.mark.parametrize(
    ("parameters", "why"),
    [
        ({"sort": "no"}, "sort 'no' must be one of "), ({"order": "up"}, "order 'up' must be ascending or descending"),
        ({"limit": "0"}, "limit '0' must be a number from 1 to 500"), ({"limit": "9" * 5000}, "limit '9999"),
        ({"offset": "-1"}, "offset '-1' must be a number"), ({"offset": "²"}, "offset '²' must be a number"),
        ({"search": "x" * 201}, "search has 201 characters; at most 200"), ({"page": "1"}, "unknown parameter 'page'; known are search, "),
    ],
)  # fmt: skip
@run_async
async def test_part_with_a_wrong_parameter_is_refused(parameters: dict[str, str], why: str) -> None:
    for name in ("queues", "topics", "subscriptions", "connections", "branches"):
        with pytest.raises(InvalidInput, match=why):
            await look(Node(), f"list/{name}", **parameters)


@run_async
async def test_topics_subscriptions_and_connections_are_listed() -> None:
    node = Node()
    node.settings = Settings.model_validate({"topic": [{"name": "unused"}]})
    for number in range(2):
        node.engine.create_queue(f"s{number}", "news", Routing.MULTICAST, subscription=f"s{number}")
    node.broker.settle()
    topics = await look(node, "list/topics")
    assert [(each["name"], each["subscriptions"]) for each in topics["entries"]] == [("news", 2), ("unused", 0)]
    found = await look(node, "list/subscriptions", search="s1")
    assert [each["name"] for each in found["entries"]] == ["s1"]
    _client = Client(node)
    found = await look(node, "list/connections")
    assert found["total"] == 1
    links = await look(node, "connections/links", id=found["entries"][0]["id"])
    assert links["links"] == []
    with pytest.raises(UnknownAddress, match="there is no connection with the address 'nobody'"):
        await look(node, "connections/links", id="nobody")
    with pytest.raises(InvalidInput, match="id must be given"):
        await look(node, "connections/links")


@run_async
async def test_overview_has_sums_in_place_of_lists() -> None:
    node = Node()
    node.fill("q", 3)
    dead(node, 2, "other")
    found = await look(node, "overview")
    assert found["sums"] | {"bytes": 0} == {"messages": 5, "bytes": 0, "delivering": 0, "delayed": 0, "consumers": 0}
    assert (found["dead_letters"], found["gauges"]["queues"]) == (2, 3)
    assert found["sends"]["count"] == node.send_times.count
    assert not {"queues", "branches", "users"} & found.keys()


@run_async
async def test_page_of_messages_goes_on_where_the_last_one_ended() -> None:
    node = Node()
    for number in range(7):
        send(node, "q", body_kind="text", body=f"number {number}", priority=4 + number % 2, message_id=f"ID:{number}")
    seen, after = [], ""
    while True:
        page = await look(node, "messages", queue="q", count="3", after=after)
        seen += [each["message_id"] for each in page["messages"]]
        after = page["next"]
        if not after:
            break
    assert seen == ["ID:1", "ID:3", "ID:5", "ID:0", "ID:2", "ID:4", "ID:6"]
    assert node.queued("q") == 7


@run_async
async def test_messages_are_found_by_selector_and_text_or_marked() -> None:
    node = Node()
    for colour in ("red", "blue", "red"):
        send(node, "q", body_kind="text", body=f"it is {colour}", properties={"colour": colour})
    page = await look(node, "messages", queue="q", selector="colour = 'blue'")
    assert [each["body"]["text"] for each in page["messages"]] == ["it is blue"]
    page = await look(node, "messages", queue="q", text="is red")
    assert (len(page["messages"]), page["looked_at"]) == (2, 3)
    page = await look(node, "messages", queue="q", selector="colour = 'blue'", mark="true")
    assert [each["matches"] for each in page["messages"]] == [False, True, False]
    with pytest.raises(InvalidInput, match="selector: column"):
        await look(node, "messages", queue="q", selector="colour =")


@run_async
async def test_each_kind_of_body_is_described_and_downloaded() -> None:
    node = Node()
    bodies: dict[str, Any] = {
        "text": HOSTILE, "bytes": b"\0\xff", "map": {"a": 2**60, "b": True, "c": b"\1"}, "stream": ["x", 1.5], "message": None,
    }  # fmt: skip
    for kind, body in bodies.items():
        send(node, "q", body_kind=kind, body=body, properties={HOSTILE: HOSTILE}, type=HOSTILE)
    page = (await look(node, "messages", queue="q"))["messages"]
    assert [each["body"] for each in page] == [
        {"text": HOSTILE, "cut": False},
        {"base64": base64.b64encode(b"\0\xff").decode(), "cut": False},
        {"entries": [{"name": "a", "type": "long", "value": str(2**60)}, {"name": "b", "type": "boolean", "value": "true"},
                     {"name": "c", "type": "bytes", "value": "01"}], "cut": False},
        {"entries": [{"type": "string", "value": "x"}, {"type": "double", "value": "1.5"}], "cut": False},
        {"cut": False},
    ]  # fmt: skip
    assert {each["type"] for each in page} == {HOSTILE}
    assert page[0]["properties"] == {HOSTILE: {"type": "string", "value": HOSTILE}}
    assert await look(node, "messages/body", queue="q", id=page[0]["id"]) == HOSTILE.encode()
    assert await look(node, "messages/body", queue="q", id=page[1]["id"]) == b"\0\xff"


@run_async
async def test_long_body_is_cut_in_the_list_and_whole_in_the_download() -> None:
    node = Node()
    send(node, "q", body_kind="text", body="x" * 300_000)
    (message,) = (await look(node, "messages", queue="q"))["messages"]
    assert (len(message["body"]["text"]), message["body"]["cut"]) == (browsing.SHOWN_MAX, True)
    shown = await look(node, "messages/show", queue="q", id=message["id"])
    assert (len(shown["body"]["text"]), shown["body"]["cut"]) == (browsing.SHOWN_IN_DETAIL_MAX, True)
    assert len(await look(node, "messages/body", queue="q", id=message["id"])) == 300_000


@run_async
async def test_unreadable_message_is_described_with_its_bytes() -> None:
    node = Node()
    data = encode_message(JmsMessage(body_kind="text", body="x")).replace(b"\x51\x05", b"\x51\x02")  # a map without a map
    node.broker.send("q", data, Sender(), 0)
    node.broker.settle()
    (message,) = (await look(node, "messages", queue="q"))["messages"]
    assert (message["body_kind"], message["body"]) == ("unreadable", {"base64": base64.b64encode(data).decode(), "cut": False})
    assert "a map message cannot have a body of type str" in message["unreadable"]
    assert await look(node, "messages/body", queue="q", id=message["id"]) == data


@run_async
async def test_large_map_is_not_decoded_and_large_text_is() -> None:
    node = Node()
    send(node, "q", body_kind="map", body={str(number): "x" * 100 for number in range(11_000)})
    send(node, "q", body_kind="text", body="x" * 2_000_000)
    large, text = (await look(node, "messages", queue="q"))["messages"]
    assert (large["body_kind"], large["body"]["cut"]) == ("unreadable", True)
    assert "only 1048576 are decoded" in large["unreadable"]
    assert text["body_kind"] == "text"
    assert len(await look(node, "messages/body", queue="q", id=text["id"])) == 2_000_000


@run_async
async def test_page_ends_at_its_bytes_and_at_the_messages_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Node()
    node.fill("q", 10, "x" * 100)
    monkeypatch.setattr(browsing, "PAGE_BYTES", 250)
    assert len((await look(node, "messages", queue="q"))["messages"]) == 3
    monkeypatch.setattr(browsing, "LOOKED_AT_MAX", 4)
    page = await look(node, "messages", queue="q", text="nothing has this")
    assert (page["messages"], page["looked_at"]) == ([], 4)
    assert (await look(node, "messages", queue="q", text="nothing has this", after=page["next"]))["looked_at"] == 4


@run_async
async def test_chosen_messages_are_purged_moved_and_returned_and_no_others() -> None:
    node = Node()
    node.fill("q", 5)
    ids = [each["id"] for each in (await look(node, "messages", queue="q"))["messages"]]
    admin = administrator(node)
    assert await admin.act(ADMIN, "queues/purge", {"name": "q", "ids": ids[1]}) == {"purged": 1, "left": {}}
    assert await admin.act(ADMIN, "queues/move", {"name": "q", "to": "other", "ids": f"{ids[0]} {ids[0]} {ids[4]}"}) == {
        "moved": 2,
        "left": {},
    }
    assert [each["id"] for each in (await look(node, "messages", queue="q"))["messages"]] == ids[2:4]
    gone = await admin.act(ADMIN, "queues/purge", {"name": "q", "ids": ids[1]})
    assert gone == {"purged": 0, "left": {"not in the queue any more, or held by a consumer": 1}}
    assert await admin.act(ADMIN, "queues/purge", {"name": "q", "ids": " "}) == {"purged": 0, "left": {}}, "no message was chosen"
    with pytest.raises(InvalidInput, match="give either selector or ids"):
        await admin.act(ADMIN, "queues/purge", {"name": "q", "ids": ids[2], "selector": "TRUE"})
    dead(node, 2, "letters")
    letters = [each["id"] for each in (await look(node, "messages"))["messages"]]
    assert await admin.act(ADMIN, "dead-letters/return", {"ids": letters[1]}) == {"returned": 1, "left": {}}
    assert (node.queued("q"), node.queued("other"), node.queued("letters")) == (2, 2, 1)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "is not an id"), ("1-waiting-4", "is not an id"), ("x-waiting-4-1", "is not an id"), ("0-held-4-1", "is not an id"),
        ("0-waiting-10-1", "is not an id"), ("0-waiting-4-" + "9" * 5000, "is not an id"), ("7-waiting-4-1", "an earlier epoch"),
    ],
)  # fmt: skip
@run_async
async def test_wrong_id_of_a_message_is_refused(text: str, why: str) -> None:
    node = Node()
    node.fill("q", 1)
    with pytest.raises(InvalidInput, match=why):
        await look(node, "messages/show", queue="q", id=text)


@run_async
async def test_message_that_is_gone_and_unknown_queue_are_reported() -> None:
    node = Node()
    node.fill("q", 1)
    (message,) = (await look(node, "messages", queue="q"))["messages"]
    await administrator(node).act(ADMIN, "queues/purge", {"name": "q"})
    with pytest.raises(UnknownAddress, match="no longer has the message"):
        await look(node, "messages/show", queue="q", id=message["id"])
    with pytest.raises(UnknownAddress, match="there is no queue 'none'"):
        await look(node, "messages", queue="none")
    node.serving = False
    with pytest.raises(Unavailable):
        await look(node, "messages", queue="q")


@run_async
async def test_message_is_sent_with_headers_properties_and_each_kind_of_body() -> None:
    node = Node()
    admin = administrator(node)
    body = json.dumps({"n": {"type": "int", "value": 5}})
    for kind, text in (("text", "hello"), ("bytes", "AP8="), ("map", body), ("message", "")):
        arguments = {
            "to": "q", "kind": kind, "body": text, "type": "t", "priority": 7, "group_id": "g", "correlation_id": "c", "reply_to": "r",
            "properties": {"plain": "x", "n": {"type": "int", "value": "5"}, "b": {"type": "boolean", "value": "true"}},
        }  # fmt: skip
        answer = await admin.act(ADMIN, "messages/send", arguments)
        assert answer["sent"].startswith("ID:")
    page = (await look(node, "messages", queue="q"))["messages"]
    assert [each["body"] for each in page] == [
        {"text": "hello", "cut": False}, {"base64": "AP8=", "cut": False},
        {"entries": [{"name": "n", "type": "int", "value": "5"}], "cut": False}, {"cut": False},
    ]  # fmt: skip
    first = page[0]
    assert [first[name] for name in ("type", "priority", "group_id", "correlation_id", "reply_to", "destination")] == [
        "t",
        7,
        "g",
        "c",
        "r",
        "q",
    ]
    assert first["properties"] == {
        "plain": {"type": "string", "value": "x"}, "n": {"type": "int", "value": "5"}, "b": {"type": "boolean", "value": "true"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"kind": "object"}, "kind 'object' must be one of"), ({"kind": "bytes", "body": "?"}, "body must be base64"),
        ({"kind": "map", "body": "[1]"}, "body must be a JSON object"), ({"kind": "message", "body": "x"}, "body must be empty"),
        ({"priority": 10}, "priority 10 must be"), ({"ttl_ms": -1}, "ttl_ms -1 must be"), ({"delay_ms": 10**18}, "delay_ms 1000"),
        ({"priority": "4"}, "priority must be an integer"), ({"priority": True}, "priority must be an integer"),
        ({"properties": []}, "properties must be an object"), ({"properties": {"a": 1}}, "property 'a' must be a string, or"),
        ({"properties": {"a": {"type": "byte", "value": "128"}}}, "'128' is not of type byte"),
        ({"properties": {"a": {"type": "boolean", "value": "yes"}}}, "'yes' is not of type boolean"),
        ({"properties": {"a": "\ud800"}}, "surrogates not allowed"), ({"body": "\ud800"}, "half of a surrogate pair"),
        ({"to": "$management"}, "the address of the management node"),
    ],
)  # fmt: skip
@run_async
async def test_message_with_a_wrong_argument_is_refused(arguments: dict[str, Any], why: str) -> None:
    node = Node()
    with pytest.raises(InvalidInput, match=why):
        await administrator(node).act(ADMIN, "messages/send", {"to": "q", **arguments})
    assert node.queued("q") == -1


@pytest.mark.parametrize(
    ("mode", "of_user", "of_token"),
    [("off", None, None), ("check", "ann", None), ("require", "ann", "refused"), ("set", "ann", None)],
)
@run_async
async def test_sent_message_names_its_sender_as_the_setting_says(mode: str, of_user: str | None, of_token: str | None) -> None:
    node = Node()
    node.validated_user = mode
    users = {"ann": Principal("ann", AdminRole.EDIT, is_user=True), "token": Principal("admin.edit_token", AdminRole.EDIT)}
    found: dict[str, str | None] = {}
    for name, sender in users.items():
        try:
            await administrator(node).act(sender, "messages/send", {"to": name})
        except NotAdministrator as error:
            found[name] = "refused" if "admin.edit_token is not a user, and each message must name the user" in str(error) else str(error)
        else:
            found[name] = (await look(node, "messages", queue=name))["messages"][0]["user_id"]
    assert found == {"ann": of_user, "token": of_token}
    assert (node.queued("token") == -1) == (of_token == "refused"), "a refused message creates no queue"


@run_async
async def test_sent_message_that_kafka_does_not_store_in_time_is_reported() -> None:
    node = Node()
    node.engine.queue("q")
    node.broker.settle()
    node.stores = False
    with pytest.raises(Unavailable, match="Kafka has not stored the message within 0"):
        await administrator(node).act(ADMIN, "messages/send", {"to": "q", "body": "x"})


@run_async
async def test_settings_and_permissions_are_shown_as_they_hold() -> None:
    node = Node()
    node.settings = Settings.model_validate({
        "broker": {"users": {"ann": "hidden-password"}, "roles": {"sales": ["ann"]}},
        "permission": [{"match": "orders.#", "send": ["sales"]}],
    })  # fmt: skip
    permissions: Any = permissions_of(node.settings, UserRoles({"sales": ["ann"]}))
    assert isinstance(permissions, AccessRules)
    node.permissions = CurrentPermissions(permissions)
    shown = json.dumps(await look(node, "settings"))
    assert "broker.max_message_bytes" in shown
    assert "hidden-password" not in shown
    found = await look(node, "permissions", user="ann", permission="send", address="orders.eu")
    assert (found["rules"], found["decision"]["allowed"]) == ([{"match": "orders.#", "roles": {"send": ["sales"]}}], True)
    assert (await look(node, "permissions", user="eve", permission="send", address="orders.eu"))["decision"]["allowed"] is False
    with pytest.raises(InvalidInput, match="permission 'fly' must be one of"):
        await look(node, "permissions", user="ann", permission="fly", address="x")


def test_looks_that_show_content_of_messages_need_the_role_to_edit() -> None:
    assert {name for name, each in LOOKS.items() if each.content} == {"messages", "messages/show", "messages/body", "messages/life"}
    assert {each.role.word for each in LOOKS.values() if each.content} == {"edit"}
