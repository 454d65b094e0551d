"""The fast path from AMQP bytes to a Kafka record gives the same result as the general one."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.amqp.types import Byte, Float, Int, Short, Symbol
from bascule.core.caches import kept_bytes
from bascule.jms import octets_to_kafka as direct_module
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.jms.octets_to_kafka import direct
from bascule.jms.record import kafka_headers, record_value
from bascule.jms.sections import MESSAGE_ANNOTATIONS, section_bytes
from bascule.jms.to_kafka import record_of
from tests.support.journal import text_message

texts = st.text(max_size=20) | st.sampled_from(["ID:1", "ID:AMQP_UUID:x", "grüße", "JMSType", "long.x"])
times = st.integers(0, 2**50)
names = st.text(min_size=1, max_size=8) | st.sampled_from(["a", "int.b", "JMSPriority", "body", "traceparent", "baggage"])
values = (
    texts
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.integers(-(2**31), 2**31 - 1).map(Int)
    | st.integers(-128, 127).map(Byte)
    | st.integers(-(2**15), 2**15 - 1).map(Short)
    | st.floats(width=32, allow_nan=False).map(Float)
)
kinds = st.sampled_from([None, "queue", "topic", "temporary-queue"])
bodies = st.tuples(st.just("text"), st.text(max_size=300) | st.none()) | st.tuples(st.just("bytes"), st.binary(max_size=300))
messages = st.builds(
    lambda body, **fields: JmsMessage(body_kind=body[0], body=body[1], **fields),
    body=bodies,
    message_id=st.none() | texts.map(lambda text: f"ID:{text}"),
    correlation_id=st.none() | texts.filter(lambda text: not text.startswith("ID:AMQP")) | st.binary(max_size=5),
    destination=st.none() | texts,
    destination_kind=kinds,
    reply_to=st.none() | texts,
    reply_to_kind=kinds,
    type=st.none() | texts,
    delivery_mode=st.sampled_from(["PERSISTENT", "NON_PERSISTENT"]),
    priority=st.integers(0, 9),
    timestamp_ms=times,
    expiration_ms=st.sampled_from([0, 0, 2**45]),
    delivery_time_ms=st.sampled_from([0, 0, 0, 77]),
    delivery_count=st.sampled_from([1, 1, 3]),
    group_id=st.none() | texts,
    user_id=st.none() | texts,
    properties=st.dictionaries(names, values, max_size=5),
)


@settings(max_examples=300)
@given(messages)
def test_direct_conversion_equals_conversion_by_decoding(message: JmsMessage) -> None:
    data = encode_message(message)
    found = direct(data)
    if found is not None:
        decoded = decode_message(data)
        assert found.headers == kafka_headers(decoded)
        assert found.value == record_value(decoded)
        assert found.timestamp_ms == decoded.timestamp_ms


@given(messages, st.data())
def test_direct_conversion_of_corrupt_bytes_is_declined_or_equals_decoding(message: JmsMessage, draw: st.DataObject) -> None:
    data = bytearray(encode_message(message))
    place = draw.draw(st.integers(0, len(data) - 1))
    data[place] = draw.draw(st.integers(0, 255))
    found = direct(bytes(data))
    if found is not None:
        decoded = decode_message(bytes(data))
        assert found.headers == kafka_headers(decoded)
        assert found.value == record_value(decoded)


def test_usual_message_is_converted_directly() -> None:
    data = text_message("x" * 1000, message_id="ID:1", timestamp_ms=5, destination="q", properties={"a": "b", "n": 3, "d": 1.5, "t": True})
    assert direct(data) is not None


def test_trace_context_in_annotations_is_one_header_and_takes_precedence() -> None:
    plain = text_message("m", message_id="ID:1", properties={"traceparent": "00-of-the-sender", "a": "b"})
    assert direct(plain) is not None
    data = section_bytes(MESSAGE_ANNOTATIONS, {Symbol("x-opt-jms-msg-type"): Byte(5), Symbol("traceparent"): "00-of-a-proxy"})
    record = record_of(data + plain[direct_module._head_end(plain) :], "t", "none", [], 0)
    assert [pair for pair in record.headers if "trace" in pair[0]] == [("traceparent", b"00-of-a-proxy")]
    assert ("jms.a", b"b") in record.headers


def test_long_annotations_of_a_sender_are_not_cached() -> None:
    data = text_message("m", message_id="ID:1")
    rest = data[direct_module._head_end(data) :]

    def annotated(size: int) -> bytes:
        return section_bytes(MESSAGE_ANNOTATIONS, {Symbol("x-opt-jms-msg-type"): Byte(5), Symbol("x-opt-mine"): "u" * size}) + rest

    assert direct(annotated(100)) is not None
    kept = kept_bytes()
    assert direct(annotated(10_000)) is None
    assert kept_bytes() == kept
