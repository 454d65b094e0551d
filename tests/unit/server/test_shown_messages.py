"""What an administrator sees of messages: no value of a masked property, and nothing that would hold the event loop for long."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import pytest

from bascule.amqp.types import Array, Byte, Int
from bascule.config import Settings
from bascule.core.errors import InvalidInput
from bascule.core.masking import MASK
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.jms.sections import DATA, SEQUENCE, section_bytes
from bascule.server import browsing, shown_messages
from bascule.server.shown_messages import DECODED_BYTES_MAX, NESTED_LEVELS_MAX, NESTED_SHOWN_MAX
from bascule.testing.broker import Sender
from tests.unit.server.served import run_async
from tests.unit.server.test_administrator import Node
from tests.unit.server.test_long_pages import turns_of
from tests.unit.server.test_looks import look, send

SECRET = "hunter2"
PROPERTIES = {"colour": "red", "Token": SECRET, "size": Int(7)}
SHOWN = {
    "colour": {"type": "string", "value": "red"}, "Token": {"type": "masked", "value": MASK}, "size": {"type": "int", "value": "7"},
}  # fmt: skip
BODIES = {"text": "x", "bytes": b"x", "map": {"a": "x"}, "stream": ["x"], "message": None}


def masking(*patterns: str) -> Node:
    node = Node()
    node.settings = Settings.model_validate({"admin": {"masked_properties": patterns}})
    return node


def put(node: Node, data: bytes) -> None:
    node.broker.send("q", data, Sender(), 0)
    node.broker.settle()


@pytest.mark.parametrize("kind", BODIES)
@run_async
async def test_value_of_a_masked_property_is_in_no_list_detail_or_download(kind: str) -> None:
    node = masking("*token*")
    send(node, "q", body_kind=kind, body=BODIES[kind], properties=PROPERTIES)
    (listed,) = (await look(node, "messages", queue="q"))["messages"]
    detail = await look(node, "messages/show", queue="q", id=listed["id"])
    assert listed["properties"] == detail["properties"] == SHOWN
    body = await look(node, "messages/body", queue="q", id=listed["id"])
    assert SECRET not in json.dumps([listed, detail])
    assert SECRET.encode() not in body
    if kind not in ("text", "bytes"):  # the download is the whole message
        assert decode_message(body).properties == {**PROPERTIES, "Token": MASK}
        assert decode_message(body).body == BODIES[kind]


@run_async
async def test_unreadable_message_shows_no_masked_value() -> None:
    node = masking("token")
    put(node, encode_message(JmsMessage(body_kind="text", body="x", properties=PROPERTIES)).replace(b"\x51\x05", b"\x51\x02"))
    (message,) = (await look(node, "messages", queue="q"))["messages"]
    body = await look(node, "messages/body", queue="q", id=message["id"])
    assert message["body_kind"] == "unreadable"
    assert (SECRET.encode() in body, b"red" in body, MASK.encode() in body) == (False, True, True)
    assert base64.b64decode(message["body"]["base64"]) == body


@run_async
async def test_search_finds_no_masked_value() -> None:
    node = masking("token")
    send(node, "q", body_kind="text", body="hello", properties=PROPERTIES)
    found = {}
    for text in ("hello", "red", "Token", SECRET, SECRET[:3], "colour"):
        found[text] = len((await look(node, "messages", queue="q", text=text))["messages"])
    assert found == {"hello": 1, "red": 1, "Token": 1, SECRET: 0, SECRET[:3]: 0, "colour": 1}
    assert len((await look(node, "messages", queue="q", selector="colour = 'red' AND JMSType IS NULL"))["messages"]) == 1
    for mark in ("true", "false"):
        with pytest.raises(InvalidInput, match="masked_properties hides the values of property 'token'"):
            await look(node, "messages", queue="q", selector="token LIKE 'h%'", mark=mark)


@run_async
async def test_mask_of_all_properties_leaves_headers_to_selectors() -> None:
    node = masking("*")
    send(node, "q", body_kind="text", body="hello", type="order", properties=PROPERTIES)
    assert len((await look(node, "messages", queue="q", selector="JMSType = 'order'"))["messages"]) == 1


@run_async
async def test_text_is_searched_in_a_long_body_over_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsing, "SEARCHED_BYTES_PER_TURN", 1_000)
    node = Node()
    send(node, "q", body_kind="text", body="x" * 9_996 + "needle" + "x" * 10_000)
    for text, count in (("needle", 1), ("needles", 0), ("xneedle", 1), ("needlex", 1)):
        page, turns = await turns_of(look(node, "messages", queue="q", text=text))
        assert len(page["messages"]) == count
        assert turns >= (10 if count else 20)


@run_async
async def test_message_that_leaves_the_queue_during_the_search_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browsing, "SEARCHED_BYTES_PER_TURN", 1_000)
    node = Node()
    send(node, "q", body_kind="text", body="x" * 10_000 + "needle")
    page = asyncio.ensure_future(look(node, "messages", queue="q", text="needle"))
    await asyncio.sleep(0)
    node.engine.delete_queue(node.engine.queue("q"))
    node.broker.settle()
    assert len((await page)["messages"]) <= 1


@pytest.mark.parametrize("character", ["x", "é", "€", "😀"])
@run_async
async def test_beginning_of_a_long_text_is_shown_and_all_of_it_downloaded(character: str) -> None:
    text = character * (DECODED_BYTES_MAX // len(character.encode()) + 100)
    node = Node()
    send(node, "q", body_kind="text", body=text)
    put(node, section_bytes(0x73, [None] * 6 + ["text/plain"]) + section_bytes(DATA, b"a" + text.encode()) + section_bytes(DATA, b"b" * 9))
    send(node, "q", body_kind="bytes", body=text.encode())
    after = ""
    for start, kind in (("", "text"), ("a", "text"), (None, "bytes")):
        page = await look(node, "messages", queue="q", count="1", after=after)
        (message,), after = page["messages"], page["next"]
        detail = await look(node, "messages/show", queue="q", id=message["id"])
        assert (detail["body_kind"], detail["body"]["cut"]) == (kind, True)
        body = await look(node, "messages/body", queue="q", id=message["id"])
        if start is None:
            assert body == text.encode()
        else:
            assert (start + text).startswith(detail["body"]["text"])
            assert len(detail["body"]["text"]) > browsing.SHOWN_IN_DETAIL_MAX - 9
            assert body == (start + text).encode() + (b"b" * 9 if start else b"")


@run_async
async def test_long_body_is_not_decoded_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    monkeypatch.setattr(browsing, "PAGE_BYTES", 1 << 30)
    monkeypatch.setattr(shown_messages, "decode_message", lambda data: (decoded.append(len(data)), decode_message(data))[1])
    node = Node()
    for kind, body in (("text", "x" * 4_000_000), ("bytes", b"x" * 4_000_000)):
        send(node, "q", body_kind=kind, body=body)
    put(node, section_bytes(DATA, b"x" * 900_000) * 4)
    for message in (await look(node, "messages", queue="q"))["messages"]:
        await look(node, "messages/show", queue="q", id=message["id"])
        assert len(await look(node, "messages/body", queue="q", id=message["id"])) >= 3_600_000
    assert len(decoded) == 9
    assert max(decoded) < DECODED_BYTES_MAX + 1_000


@run_async
async def test_many_sections_of_a_body_are_not_decoded_together() -> None:
    node = Node()
    put(node, section_bytes(SEQUENCE, ["x" * 99] * 6_000) * 3)
    (message,) = (await look(node, "messages", queue="q"))["messages"]
    assert message["body_kind"] == "unreadable"
    assert f"only {DECODED_BYTES_MAX} are decoded" in message["unreadable"]


@run_async
async def test_only_the_beginning_of_a_nested_value_is_made_a_text() -> None:
    deep: Any = 1
    for _ in range(9):
        deep = [deep]
    wide = {
        "list": [[Byte(1)] * 400_000],
        "array": [Array(0x50, tuple([1] * 400_000))],
        "map": [dict.fromkeys(range(50), b"\1")],
        "deep": [deep],
    }
    node = Node()
    for body in wide.values():
        send(node, "q", body_kind="stream", body=body)
    shown = [each["body"]["entries"][0] for each in (await look(node, "messages", queue="q"))["messages"]]
    ones = ", ".join(["1"] * NESTED_SHOWN_MAX)
    assert shown[0] == {"type": "list", "value": f"[{ones}, …]"}
    assert shown[1] == {"type": "array", "value": f"[{ones}, …]"}
    assert shown[2]["value"].startswith("{0: 01, 1: 01, ")
    assert shown[3]["value"] == "[" * NESTED_LEVELS_MAX + "…" + "]" * NESTED_LEVELS_MAX
