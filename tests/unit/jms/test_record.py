"""JMS messages as Kafka headers and values, in the format of docs/reference/messages.md."""

from __future__ import annotations

import uuid

import pytest

from bascule.amqp.types import Byte, Char, Float, Int, Short, Symbol, Timestamp, UInt
from bascule.core.errors import InvalidInput
from bascule.jms.message import JmsMessage
from bascule.jms.record import body_from_value, from_kafka_headers, json_body, kafka_headers, map_from_json, record_value, stream_from_json
from bascule.jms.selector.numbers import single
from tests.support.costs import COST_S_MAX, processor_s

MESSAGE = JmsMessage(
    message_id="ID:1", correlation_id=b"\xca\xfe", destination="flights", destination_kind="queue", reply_to="t",
    reply_to_kind="temporary-topic",
    type="car", delivery_mode="NON_PERSISTENT", priority=7, timestamp_ms=1000, expiration_ms=2000, delivery_time_ms=1500, delivery_count=2,
    group_id="g", group_sequence=3, user_id="me", body_kind="text", body="hi",
    properties={
        "carrier": "UA", "late": True, "row": Byte(-3), "gate": Short(7), "dep_delay": Int(40), "distance": 1400, "weight": single(0.1),
        "price": 99.5, "none": None, "int.x": "text", "body": "text", "JMSType": "text", "at": Timestamp(5), "raw": b"\x00",
    },
)  # fmt: skip
HEADERS = [
    ("jms.body", b"text"), ("jms.JMSMessageID", b"ID:1"), ("jms.JMSCorrelationID", b"ID:AMQP_BINARY:CAFE"),
    ("jms.JMSDeliveryMode", b"NON_PERSISTENT"), ("jms.JMSPriority", b"7"), ("jms.JMSTimestamp", b"1000"), ("jms.JMSExpiration", b"2000"),
    ("jms.JMSDeliveryTime", b"1500"), ("jms.JMSType", b"car"), ("jms.JMSXDeliveryCount", b"2"), ("jms.JMSXGroupID", b"g"),
    ("jms.JMSXGroupSeq", b"3"), ("jms.JMSXUserID", b"me"), ("jms.JMSDestination", b"queue://flights"),
    ("jms.JMSReplyTo", b"temporary-topic://t"), ("jms.carrier", b"UA"), ("jms.boolean.late", b"true"), ("jms.byte.row", b"-3"),
    ("jms.short.gate", b"7"), ("jms.int.dep_delay", b"40"), ("jms.long.distance", b"1400"), ("jms.float.weight", b"0.1"),
    ("jms.double.price", b"99.5"), ("jms.null.none", b""), ("jms.string.int.x", b"text"), ("jms.string.body", b"text"),
    ("jms.string.JMSType", b"text"), ("jms.timestamp.at", b"5"), ("jms.bytes.raw", b"AA=="),
]  # fmt: skip


def test_every_header_field_and_property_has_a_kafka_header() -> None:
    assert kafka_headers(MESSAGE) == HEADERS


def test_kafka_headers_round_trip_to_the_same_message_and_types() -> None:
    message = from_kafka_headers(HEADERS)
    message.body = body_from_value(message.body_kind, record_value(MESSAGE))
    assert message == MESSAGE
    assert {name: type(value) for name, value in message.properties.items()} == {
        name: type(value) for name, value in MESSAGE.properties.items()
    }


def test_empty_message_has_kafka_headers_for_body_mode_and_priority_only() -> None:
    assert kafka_headers(JmsMessage()) == [("jms.body", b"message"), ("jms.JMSDeliveryMode", b"PERSISTENT"), ("jms.JMSPriority", b"4")]


def test_foreign_headers_are_ignored_and_null_header_is_an_empty_string() -> None:
    message = from_kafka_headers([("traceparent", b"\xff"), ("jms.empty", None), ("jmsx", b"1")])
    assert message.properties == {"empty": ""}


TRACE = {
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "tracestate": "vendor=1,é", "baggage": "user=a%20b,shop=7",
}  # fmt: skip


def test_trace_context_keeps_its_names_in_both_directions() -> None:
    headers = kafka_headers(JmsMessage(properties={"a": "b", **TRACE}))
    assert headers[3:] == [("jms.a", b"b"), *((name, text.encode()) for name, text in TRACE.items())]
    assert from_kafka_headers(headers).properties == {"a": "b", **TRACE}


def test_trace_context_with_prefix_of_earlier_versions_is_read() -> None:
    old = [(f"jms.{name}", text.encode()) for name, text in TRACE.items()]
    assert from_kafka_headers(old).properties == TRACE


@pytest.mark.parametrize("order", [1, -1])
def test_trace_context_without_prefix_takes_precedence(order: int) -> None:
    headers = [("traceparent", b"new"), ("jms.traceparent", b"old")][::order]
    assert from_kafka_headers(headers).properties == {"traceparent": "new"}


def test_trace_context_that_is_no_string_is_a_property_with_its_type() -> None:
    message = JmsMessage(properties={"traceparent": Int(1), "tracestate": None, "baggage": True})
    headers = kafka_headers(message)
    assert headers[3:] == [("jms.int.traceparent", b"1"), ("jms.null.tracestate", b""), ("jms.boolean.baggage", b"true")]
    assert from_kafka_headers(headers) == message


@pytest.mark.parametrize(
    ("header", "octets"),
    [
        ("jms.int.x", b"abc"), ("jms.int.x", b"2147483648"), ("jms.byte.x", b"1.0"), ("jms.boolean.x", b"yes"), ("jms.float.x", b"1,5"),
        ("jms.carrier", b"\xff"), ("jms.JMSPriority", b"10"), ("jms.JMSTimestamp", b"noon"), ("jms.JMSDeliveryMode", b"2"),
        ("jms.body", b"xml"), ("jms.bytes.x", b"?"), ("jms.uuid.x", b"1"), ("jms.char.x", b"ab"), ("jms.null.x", b"1"),
        ("jms.JMSCorrelationID", b"ID:AMQP_UUID:x"),
    ],
)  # fmt: skip
def test_header_whose_value_contradicts_its_type_is_refused(header: str, octets: bytes) -> None:
    with pytest.raises(InvalidInput):
        from_kafka_headers([(header, octets)])


@pytest.mark.interpreted
def test_long_text_of_a_number_is_refused_in_a_time_proportional_to_its_length() -> None:
    def refused() -> None:
        with pytest.raises(InvalidInput, match="is not a valid double"):
            from_kafka_headers([("jms.double.x", b"1" * 60_000 + b"x")])

    assert processor_s(refused) < COST_S_MAX


@pytest.mark.parametrize("text", ["1", "1.", "1.5", ".5", "-1.e3", "+.5E-2"])
def test_decimal_numbers_are_those_of_java(text: str) -> None:
    assert from_kafka_headers([("jms.double.x", text.encode())]).properties == {"x": float(text)}


def test_property_without_text_form_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match="property x: a value of type list"):
        kafka_headers(JmsMessage(properties={"x": [1]}))


MAP = {"name": "JFK", "runways": Int(4), "open": True, "ratio": single(0.1), "at": 40.6413, "nan": float("inf"), "raw": b"\x01",
       "none": None, "c": Char("x"), "s": Symbol("y"), "u": UInt(1), "id": uuid.UUID(int=1),
       "inner": {"list": [Short(1), "é"]}}  # fmt: skip
MAP_JSON = (
    '{"name":{"type":"string","value":"JFK"},"runways":{"type":"int","value":4},"open":{"type":"boolean","value":true},'
    '"ratio":{"type":"float","value":0.1},"at":{"type":"double","value":40.6413},"nan":{"type":"double","value":"Infinity"},'
    '"raw":{"type":"bytes","value":"AQ=="},"none":{"type":"null","value":null},"c":{"type":"char","value":"x"},'
    '"s":{"type":"symbol","value":"y"},"u":{"type":"uint","value":1},"id":{"type":"uuid","value":"00000000-0000-0000-0000-000000000001"},'
    '"inner":{"type":"map","value":{"list":{"type":"list","value":[{"type":"short","value":1},{"type":"string","value":"é"}]}}}}'
)


def test_map_body_is_typed_json() -> None:
    assert json_body(JmsMessage(body_kind="map", body=MAP)).decode() == MAP_JSON
    back = map_from_json(MAP_JSON.encode())
    assert back == MAP
    assert [type(value) for value in back.values()] == [type(value) for value in MAP.values()]


def test_stream_body_is_a_typed_json_list() -> None:
    value = json_body(JmsMessage(body_kind="stream", body=[Byte(1), "two"]))
    assert value == b'[{"type":"byte","value":1},{"type":"string","value":"two"}]'
    assert stream_from_json(value) == [Byte(1), "two"]


@pytest.mark.parametrize("kind", ["message", "object", "map", "bytes", "stream", "text"])
def test_kafka_value_of_empty_body_is_never_null(kind: str) -> None:
    assert record_value(JmsMessage(body_kind=kind)) == {"map": b"{}", "stream": b"[]"}.get(kind, b"")


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"", "not valid JSON"), (b"[]", "not a map"), (b"{", "not valid JSON"), (b'{"a":1}', "body.a: expected"),
        (b'{"a":{"type":"int"}}', "body.a: expected"),
        (b'{"a":{"type":"int","value":"x"}}', "body.a: 'x' is not a valid int"), (b'{"a":{"type":"int","value":true}}', "not a valid int"),
        (b'{"a":{"type":"tree","value":1}}', "unknown type 'tree'"), (b'{"a":{"type":"byte","value":128}}', "not a valid byte"),
        (b'{"a":{"type":"map","value":[]}}', "unknown type 'map'"), (b"[" * 100_000, "not valid JSON"), (b"\xff", "not valid JSON"),
    ],
)  # fmt: skip
def test_json_other_than_a_map_body_is_refused_with_its_position(value: bytes, reason: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        map_from_json(value)
    assert reason in str(caught.value)


def test_text_body_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(InvalidInput, match="not UTF-8 text: invalid start byte at byte 1"):
        body_from_value("text", b"a\xff")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.1, b"0.1"), (1e10, b"1e+10"), (16777216.0, b"16777216.0"), (3.4028235e38, b"3.4028235e+38"), (float("inf"), b"Infinity")],
)
def test_float_property_is_written_in_shortest_round_trip_form(value: float, text: bytes) -> None:
    assert kafka_headers(JmsMessage(properties={"x": single(value)}))[-1] == ("jms.float.x", text)


def test_nan_float_property_round_trips() -> None:
    ((_, text),) = kafka_headers(JmsMessage(properties={"x": Float("nan")}))[3:]
    found = from_kafka_headers([("jms.float.x", text)]).properties["x"]
    assert (text, type(found), found != found) == (b"NaN", Float, True)
