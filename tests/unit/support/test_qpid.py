from typing import Any

import pytest

from tests.support.qpid import JmsError, _plain, _received

HEADERS = {
    "tag": 1,
    "message_id": "ID:1",
    "correlation_id": None,
    "destination": "queue:q",
    "reply_to": None,
    "jms_type": None,
    "persistent": True,
    "priority": 4,
    "timestamp_ms": 1,
    "expiration_ms": 0,
    "delivery_time_ms": 1,
    "redelivered": False,
    "properties": {"JMSXDeliveryCount": ["int", 1]},
}


@pytest.mark.parametrize(
    ("kind", "body", "json"),
    [
        ("text", "hello", "hello"),
        ("bytes", b"\x00\xff", "AP8="),
        (
            "map",
            {"short": ("short", 1), "none": None, "octets": b"\x01"},
            {"short": ("short", 1), "none": ["null", None], "octets": ["bytes", "AQ=="]},
        ),
        ("stream", [1, b"\x01", None], [1, ["bytes", "AQ=="], ["null", None]]),
    ],
)
def test_body_is_sent_with_its_types(kind: Any, body: Any, json: Any) -> None:
    assert _plain(body, kind) == json


@pytest.mark.parametrize(
    ("fields", "body", "types"),
    [
        ({"type": "text", "body": "hello"}, "hello", None),
        ({"type": "bytes", "body": "AP8="}, b"\x00\xff", None),
        ({"type": "map", "body": {"a": ["short", 1], "b": ["bytes", "AQ=="]}}, {"a": 1, "b": b"\x01"}, {"a": "short", "b": "bytes"}),
        ({"type": "stream", "body": [["double", 1.5], ["null", None]]}, [1.5, None], ["double", "null"]),
        ({"type": "object", "body": ["string", "x"]}, "x", "string"),
        ({"type": "message"}, None, None),
    ],
)
def test_received_body_has_plain_values_and_separate_types(fields: dict[str, Any], body: Any, types: Any) -> None:
    received = _received({**HEADERS, **fields})
    assert (received.body, received.body_types) == (body, types)
    assert received.delivery_count == 1


def test_listener_error_on_unreadable_message_fails_the_collecting_call() -> None:
    with pytest.raises(JmsError, match="MessageFormatException: bad"):
        _received({"error": "MessageFormatException", "message": "bad", "linked": []})
