"""Any JMS message survives the conversion to AMQP, and to Kafka, unchanged and with its types."""

from __future__ import annotations

import string
from contextlib import suppress
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.amqp.codec import encode
from bascule.amqp.types import Byte, Char, Int, Short, Symbol, Timestamp, UByte, UInt, ULong, UShort
from bascule.core.errors import InvalidInput
from bascule.jms.errors import MalformedMessage  # fmt: skip
from bascule.jms.ids import amqp_id, message_id_text
from bascule.jms.lookup import selector_lookup
from bascule.jms.message import DESTINATION_KINDS, JmsMessage, decode_message, encode_message
from bascule.jms.record import body_from_value, from_kafka_headers, kafka_headers, record_value
from bascule.jms.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    SEQUENCE,
    TIME_MAX_MS,
    VALUE,
    places,
    scan,
    section_bytes,
)
from bascule.jms.selector.numbers import single


def integers(kind: type[int], bits: int, *, signed: bool = True) -> st.SearchStrategy[int]:
    low = -(1 << bits - 1) if signed else 0
    return st.integers(low, low + (1 << bits) - 1).map(kind)


TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
SCALARS = (
    st.none() | st.booleans() | TEXT | st.binary(max_size=8) | st.uuids()
    | integers(Byte, 8) | integers(Short, 16) | integers(Int, 32) | integers(int, 64) | integers(Timestamp, 64)
    | integers(UByte, 8, signed=False) | integers(UShort, 16, signed=False) | integers(UInt, 32, signed=False)
    | integers(ULong, 64, signed=False) | st.floats(allow_nan=False) | st.floats(allow_nan=False, width=32).map(single)
    | st.characters(codec="utf-8").map(Char) | st.text(string.ascii_letters, max_size=5).map(Symbol)
)  # fmt: skip
NAMES = TEXT | st.sampled_from(["body", "int.x", "string.", "JMSType", "JMSDestination", "null.", "a.b", "long", "JMSXAppID"])
ITEMS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3), max_leaves=8)
TIMES = st.just(0) | st.integers(1, 1 << 50)
ADDRESSES = st.none() | st.text(string.ascii_letters + "./:", max_size=12).filter(lambda text: "://" not in text)
KINDS = st.none() | st.sampled_from(DESTINATION_KINDS)
BODIES = (
    st.tuples(st.just("message"), st.none())
    | st.tuples(st.just("text"), TEXT)
    | st.tuples(st.just("bytes"), st.binary(max_size=20))
    | st.tuples(st.just("object"), st.binary(min_size=1, max_size=20))
    | st.tuples(st.just("map"), st.dictionaries(TEXT, ITEMS, max_size=5))
    | st.tuples(st.just("stream"), st.lists(ITEMS, max_size=5))
)
#: Ids in the form of AMQP, so that none claims to be of another type.
IDS = (
    TEXT
    | st.sampled_from(["ID:1", "ID:AMQP_UUID:x", "ID:AMQP_NO_PREFIX:"])
    | st.uuids()
    | st.binary(max_size=5)
    | integers(ULong, 64, signed=False)
)


@st.composite
def messages(draw: st.DrawFn) -> JmsMessage:
    kind, body = draw(BODIES)
    correlation = draw(st.none() | st.binary(max_size=5) | TEXT.filter(lambda text: not text.startswith("ID:")))
    destination, reply_to = draw(ADDRESSES), draw(ADDRESSES)
    return JmsMessage(
        message_id=draw(st.none() | IDS.map(message_id_text)),
        correlation_id=correlation,
        destination=destination,
        destination_kind=draw(KINDS) if destination is not None else None,
        reply_to=reply_to,
        reply_to_kind=draw(KINDS) if reply_to is not None else None,
        type=draw(st.none() | TEXT),
        delivery_mode=draw(st.sampled_from(["PERSISTENT", "NON_PERSISTENT"])),
        priority=draw(st.integers(0, 9)),
        timestamp_ms=draw(TIMES),
        expiration_ms=draw(TIMES),
        delivery_time_ms=draw(st.integers(0, TIME_MAX_MS)),
        delivery_count=draw(st.integers(1, 100)),
        group_id=draw(st.none() | TEXT),
        group_sequence=draw(st.integers(-(1 << 31), (1 << 31) - 1)),
        user_id=draw(st.none() | TEXT.filter(bool)),
        properties=draw(st.dictionaries(NAMES, SCALARS, max_size=5)),
        body_kind=kind,
        body=body,
    )


def typed(value: Any) -> Any:
    """Return the value with the types of everything in it; -0.0 is not 0.0."""
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [typed(item) for item in value]
    return type(value), str(value) if isinstance(value, float) else value


def same(a: JmsMessage, b: JmsMessage) -> bool:
    return a == b and typed(a.properties) == typed(b.properties) and typed(a.body) == typed(b.body)


@given(messages())
def test_message_survives_conversion_to_amqp_and_back(message: JmsMessage) -> None:
    data = encode_message(message)
    back = decode_message(data)
    assert same(back, message)
    assert encode_message(back) == data


@given(messages())
def test_message_survives_conversion_to_kafka_and_back(message: JmsMessage) -> None:
    back = from_kafka_headers(kafka_headers(message))
    back.body = body_from_value(back.body_kind, record_value(message))
    assert same(back, message)


@given(messages())
def test_scan_and_selector_lookup_agree_with_the_full_decoder(message: JmsMessage) -> None:
    data = encode_message(message)
    facts, lookup = scan(data), selector_lookup(data)
    assert (facts.durable, facts.priority, facts.delivery_count) == (
        message.delivery_mode == "PERSISTENT", message.priority, message.delivery_count - 1,
    )  # fmt: skip
    assert (facts.to, facts.group_id, facts.creation_time_ms) == (message.destination, message.group_id, message.timestamp_ms)
    assert (facts.absolute_expiry_ms, facts.delivery_time_ms) == (message.expiration_ms, message.delivery_time_ms)
    assert facts.message_id == (None if message.message_id is None else encode(amqp_id(message.message_id)))
    assert facts.user_id == (message.user_id.encode() if message.user_id else None)
    assert (lookup("JMSMessageID"), lookup("JMSType"), lookup("JMSDeliveryMode")) == (
        message.message_id,
        message.type,
        message.delivery_mode,
    )
    for name, value in message.properties.items():
        if name != "JMSType":
            assert typed(lookup(name)) == typed(value if isinstance(value, bool | int | float | str) else None)


@settings(max_examples=300)
@given(messages(), st.data())
def test_mutated_message_bytes_are_decoded_or_refused_with_an_input_error(message: JmsMessage, data: st.DataObject) -> None:
    octets = bytearray(encode_message(message))
    for _ in range(data.draw(st.integers(1, 4))):
        octets[data.draw(st.integers(0, len(octets) - 1))] = data.draw(st.integers(0, 255))
    try:
        scan(bytes(octets))
        kafka_headers(decode_message(bytes(octets)))
    except (MalformedMessage, InvalidInput):
        pass


#: Each section with a valid value, and with any other.
FORMS = {
    HEADER: st.lists(SCALARS, max_size=6),
    MESSAGE_ANNOTATIONS: st.dictionaries(SCALARS | st.just(Symbol("x-opt-jms-msg-type")), integers(Byte, 3) | SCALARS, max_size=3),
    PROPERTIES: st.lists(SCALARS, max_size=14),
    APPLICATION_PROPERTIES: st.dictionaries(TEXT | SCALARS, SCALARS, max_size=3),
    DATA: st.binary(max_size=4),
    SEQUENCE: st.lists(ITEMS, max_size=3),
    VALUE: ITEMS,
    FOOTER: st.dictionaries(SCALARS, SCALARS, max_size=2),
}
ONE_SECTION = st.sampled_from([*FORMS]).flatmap(lambda code: st.builds(section_bytes, st.just(code), FORMS[code] | ITEMS))


@settings(max_examples=500)
@given(st.lists(ONE_SECTION, max_size=5))
def test_decoder_raises_only_invalid_input_for_any_sequence_of_sections(sections: list[bytes]) -> None:
    with suppress(InvalidInput):
        kafka_headers(decode_message(b"".join(sections)))


@settings(max_examples=500)
@given(st.lists(ONE_SECTION, min_size=2, max_size=3).map(b"".join))
def test_message_accepted_by_scan_has_a_body_of_one_kind(octets: bytes) -> None:
    with suppress(MalformedMessage):
        scan(octets)
        bodies = [section for section, _, _ in places(octets) if section in (DATA, SEQUENCE, VALUE)]
        assert len(set(bodies)) < 2
        assert bodies.count(VALUE) < 2
