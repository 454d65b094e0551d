"""Messages as an application writes them, and their encoding on the wire."""

from __future__ import annotations

from typing import Any

import pytest

from bascule.amqp.types import Byte, Int
from bascule.client import InvalidDestination, Long, Message, Queue, TemporaryQueue, Topic
from bascule.client.message import SendOptions, encode, stamp
from bascule.core.errors import InvalidInput
from bascule.jms.message import JmsMessage, decode_message


def on_the_wire(message: Message) -> JmsMessage:
    return decode_message(encode(message))


@pytest.mark.parametrize(
    ("body", "kind"),
    [("a", "text"), (b"a", "bytes"), (bytearray(b"a"), "bytes"), ({"a": 1}, "map"), ([1], "stream"), ((1,), "stream"), (None, "message")],
)
def test_python_type_of_body_determines_message_kind(body: Any, kind: str) -> None:
    assert on_the_wire(Message(body)).body_kind == kind


def test_python_int_is_sent_as_java_int_or_long() -> None:
    sent = Message({"nested": [1, Long(2)]}, properties={"small": 1, "large": 1 << 31, "long": Long(1), "byte": Byte(1), "truth": True})
    found = on_the_wire(sent)
    assert {name: type(value) for name, value in found.properties.items()} == {
        "small": Int, "large": int, "long": int, "byte": Byte, "truth": bool,
    }  # fmt: skip
    assert list(map(type, found.body["nested"])) == [Int, int]
    assert on_the_wire(Message.received(found)) == found


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (Message(1.5), "invalid type of a body: float"),  # type: ignore[arg-type]
        (Message("a", kind="map"), "a map message cannot have a body of type str"),
        (Message(properties={"a b": 1}), "property name 'a b'"),
        (Message(properties={"": 1}), "property name ''"),
        (Message(properties={"like": 1}), "property name 'like'"),
        (Message(properties={"a": [1]}), "property a has the invalid type list"),
        (Message(properties={"a": 1 << 64}), "64 bits"),
        (Message(properties={"JMSXGroupID": "g"}), "field group_id"),
    ],
)
def test_message_that_jms_cannot_express_is_refused(message: Message, text: str) -> None:
    with pytest.raises(InvalidInput, match=text):
        encode(message)


def test_options_of_message_override_options_of_producer() -> None:
    options = SendOptions(persistent=False, priority=2, time_to_live_s=1.0, delivery_delay_s=0.5)
    message, own = Message("a"), Message("b", persistent=True, priority=9, time_to_live_s=0.0, delivery_delay_s=0.0)
    for each in (message, own):
        stamp(each, Queue("q"), options, "ID:1", 1_000)
    assert (message.persistent, message.priority, message.expiration_ms, message.delivery_time_ms) == (False, 2, 2_000, 1_500)
    assert (own.persistent, own.priority, own.expiration_ms, own.delivery_time_ms) == (True, 9, 0, 0)


@pytest.mark.parametrize("wrong", [{"priority": 10}, {"priority": -1}, {"time_to_live_s": -1.0}, {"delivery_delay_s": -0.1}])
def test_invalid_send_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput):
        SendOptions(**wrong)


def test_destinations_are_equal_by_type_and_name() -> None:
    assert Queue("a") == Queue("a") != Topic("a")
    assert Queue("a") != TemporaryQueue("a")
    assert len({Queue("a"), Queue("a"), Topic("a")}) == 2
    with pytest.raises(InvalidInput, match="invalid name of a"):
        Queue("")


def test_answer_goes_to_reply_to_destination_with_correlation_id() -> None:
    request = Message("?", message_id="ID:1", reply_to=Queue("answers"))
    to, answer = request.answer("!")
    assert (to, answer.correlation_id) == (Queue("answers"), "ID:1")
    with pytest.raises(InvalidDestination):
        Message("?").answer("!")
