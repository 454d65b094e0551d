"""Conversion between AMQP and JMS messages, in the encoding of Qpid JMS."""

from __future__ import annotations

import encodings
import uuid
from pathlib import Path

import pytest

from bascule.amqp.codec import decode, encode
from bascule.amqp.types import Byte, Char, Float, Int, Short, Symbol, Timestamp, UInt, ULong
from bascule.core.errors import InvalidInput
from bascule.jms.errors import MalformedMessage  # fmt: skip
from bascule.jms.ids import amqp_id, correlation_id_text, message_id_text
from bascule.jms.message import JmsMessage, decode_message, encode_message
from bascule.jms.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    SEQUENCE,
    VALUE,
    places,
    section_bytes,
)

#: golden/QpidMessages.java wrote this file, and describes how.
GOLDEN = dict(line.split() for line in (Path(__file__).parent / "golden" / "qpid_messages.txt").read_text().splitlines())
KIND = Symbol("x-opt-jms-msg-type")


def qpid(name: str) -> JmsMessage:
    return decode_message(bytes.fromhex(GOLDEN[name]))


def compact(data: bytes) -> bytes:
    """Return the message with its properties as a short list. proton-j always writes the long encoding."""
    return b"".join(section_bytes(section, decode(data, start)[0]) if section == PROPERTIES else data[start - 3 : end]
                    for section, start, end in places(data))  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_message_of_qpid_jms_is_encoded_to_the_same_octets(name: str) -> None:
    data = bytes.fromhex(GOLDEN[name])
    assert encode_message(decode_message(data)) == compact(data)


def test_header_fields_of_qpid_jms_are_decoded() -> None:
    assert qpid("text-all-headers") == JmsMessage(
        message_id="ID:golden:1:1:1-1", correlation_id="order-1", destination="news.uk", destination_kind="topic", reply_to="temp-1",
        reply_to_kind="temporary-queue", type="booking", delivery_mode="NON_PERSISTENT", priority=7, timestamp_ms=1_700_000_000_000,
        expiration_ms=1_700_000_060_000, delivery_time_ms=1_700_000_005_000, group_id="g1", group_sequence=3, body_kind="text", body="full",
    )  # fmt: skip


def test_properties_keep_their_types() -> None:
    properties = qpid("text").properties
    assert properties == {
        "carrier": "UA", "dep_delay": 40, "distance": 1400, "price": 99.5, "weight": 0.10000000149011612, "gate": 7,
        "row": -3, "late": True,
    }  # fmt: skip
    kinds = {name: type(value) for name, value in properties.items()}
    assert kinds == {
        "carrier": str, "dep_delay": Int, "distance": int, "price": float, "weight": Float, "gate": Short, "row": Byte, "late": bool,
    }  # fmt: skip


BODIES = {
    "text": ("text", "hello"),
    "text-null": ("text", None),
    "bytes": ("bytes", b"\x00\x01\xff"),
    "map": ("map", {"name": "JFK", "runways": 4, "passengers": 62_000_000_000, "b": 1, "s": 2, "f": 1.5, "d": 40.6413, "open": True,
                    "c": "x", "raw": b"\x01\x02", "none": None}),
    "stream": ("stream", [1, "two", 3.0, b"\x04"]),
    "object": ("object", bytes.fromhex("aced00057400066f7061717565")),
    "object-null": ("object", bytes.fromhex("aced000570")),
    "object-typed": ("object", encode(["a", Int(1), 2])),
    "message": ("message", None),
}  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bodies_of_qpid_jms_are_decoded(name: str) -> None:
    message = qpid(name)
    assert (message.body_kind, message.body) == BODIES[name]


def test_map_items_keep_their_types() -> None:
    assert [type(value) for value in qpid("map").body.values()] == [
        str, Int, int, Byte, Short, Float, float, bool, Char, bytes, type(None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "identity"),
    [
        ("bytes", b"\xca\xfe"),
        ("correlation-uuid", "ID:AMQP_UUID:00000000-0000-0001-0000-000000000002"),
        ("correlation-ulong", "ID:AMQP_ULONG:18446744073709551615"),
    ],
)
def test_binary_uuid_and_ulong_correlation_ids_are_decoded(name: str, identity: object) -> None:
    assert qpid(name).correlation_id == identity


IDS = [
    ("ID:1", "ID:1", "ID:1"),
    ("plain", "ID:AMQP_NO_PREFIX:plain", "plain"),
    ("", "ID:AMQP_NO_PREFIX:", ""),
    (ULong(7), "ID:AMQP_ULONG:7", "ID:AMQP_ULONG:7"),
    (b"\xca\xfe", "ID:AMQP_BINARY:CAFE", "ID:AMQP_BINARY:CAFE"),
    (uuid.UUID(int=1), f"ID:AMQP_UUID:{uuid.UUID(int=1)}", f"ID:AMQP_UUID:{uuid.UUID(int=1)}"),
    ("ID:AMQP_UUID:x", "ID:AMQP_STRING:ID:AMQP_UUID:x", "ID:AMQP_STRING:ID:AMQP_UUID:x"),
    ("ID:AMQP_OTHER:x", "ID:AMQP_OTHER:x", "ID:AMQP_OTHER:x"),
    ("AMQP_UUID:x", "ID:AMQP_NO_PREFIX:AMQP_UUID:x", "AMQP_UUID:x"),
]


@pytest.mark.parametrize(("identity", "message_id", "correlation_id"), IDS)
def test_amqp_ids_round_trip_through_their_jms_text(identity: object, message_id: str, correlation_id: str) -> None:
    assert message_id_text(identity) == message_id  # type: ignore[arg-type]
    assert correlation_id_text(identity) == correlation_id  # type: ignore[arg-type]
    for text in (message_id, correlation_id):
        assert amqp_id(text) == identity
        assert type(amqp_id(text)) is type(identity)


@pytest.mark.parametrize(
    "text", ["ID:AMQP_UUID:x", "ID:AMQP_ULONG:-1", f"ID:AMQP_ULONG:{1 << 64}", "ID:AMQP_BINARY:ABC", "ID:AMQP_BINARY:XY"]
)
def test_id_text_with_invalid_content_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="message id"):
        amqp_id(text)


JSON = Symbol("application/json; charset=utf-8")
LATIN = Symbol("text/plain;charset=ISO-8859-1")
JAVA = Symbol("application/x-java-serialized-object")
OCTETS = Symbol("application/octet-stream")
FOREIGN = [
    (None, [], "bytes", b""),
    (OCTETS, [], "bytes", b""),
    (JSON, [], "text", None),
    (Symbol("image/png"), [], "message", None),
    (JAVA, [], "object", bytes.fromhex("aced000570")),
    (None, [(DATA, b"a"), (DATA, b"b")], "bytes", b"ab"),
    (OCTETS, [(DATA, b"a")], "bytes", b"a"),
    (JSON, [(DATA, "{é}".encode())], "text", "{é}"),
    (LATIN, [(DATA, b"\xe9")], "text", "é"),
    (Symbol("text/plain;charset=klingon"), [(DATA, b"a")], "bytes", b"a"),
    (Symbol("text/plain;charset=hex"), [(DATA, b"61")], "bytes", b"61"),
    (Symbol("text/plain;charset=rot13"), [(DATA, b"a")], "bytes", b"a"),
    (Symbol("text/plain;charset=punycode"), [(DATA, b"a-")], "bytes", b"a-"),
    (Symbol("text/plain;charset=IDNA"), [(DATA, b"a")], "bytes", b"a"),
    (Symbol("text/plain;charset=KOI8-R"), [(DATA, b"\xc1")], "text", "\u0430"),
    (Symbol("text/plain;charset=utf.8"), [(DATA, b"a")], "bytes", b"a"),
    (Symbol("image/png"), [(DATA, b"a")], "bytes", b"a"),
    (Symbol("application/atom+xml"), [(DATA, b"<a/>")], "text", "<a/>"),
    (JAVA, [(DATA, b"a")], "object", b"a"),
    (None, [(VALUE, None)], "text", None),
    (JSON, [(VALUE, "text")], "text", "text"),
    (None, [(VALUE, b"a")], "bytes", b"a"),
    (None, [(VALUE, {"a": 1})], "object", encode({"a": 1})),
    (None, [(VALUE, Symbol("a"))], "object", encode(Symbol("a"))),
    (None, [(SEQUENCE, [1]), (SEQUENCE, [2])], "object", encode([1, 2])),
]


def test_names_of_unknown_character_sets_are_not_kept() -> None:
    for number in range(50):
        content_type = Symbol(f"text/plain;charset=unknown-{number}")
        decode_message(section_bytes(PROPERTIES, [None] * 6 + [content_type]) + section_bytes(DATA, b"a"))
    assert not [name for name in encodings._cache if "unknown" in name]


@pytest.mark.parametrize(("content_type", "sections", "kind", "body"), FOREIGN)
def test_messages_of_other_clients_are_classified_as_in_qpid_jms(
    content_type: object, sections: list[tuple[int, object]], kind: str, body: object
) -> None:
    data = section_bytes(PROPERTIES, [None] * 6 + [content_type]) + b"".join(section_bytes(*each) for each in sections)
    message = decode_message(data)
    assert (message.body_kind, message.body) == (kind, body)
    assert message.properties == (TYPED if kind == "object" and content_type != JAVA else {})
    assert decode_message(encode_message(message)) == message


def test_destination_kinds_in_words_of_older_clients_are_decoded() -> None:
    annotations = {Symbol("x-opt-to-type"): "topic", Symbol("x-opt-reply-type"): "temporary, queue"}
    message = decode_message(section_bytes(MESSAGE_ANNOTATIONS, annotations) + section_bytes(VALUE, "x"))
    assert (message.destination_kind, message.reply_to_kind) == ("topic", "temporary-queue")


def test_expiration_without_absolute_expiry_is_creation_time_plus_ttl() -> None:
    fields = [None] * 9 + [Timestamp(1000)]
    data = section_bytes(HEADER, [None, None, UInt(500)]) + section_bytes(PROPERTIES, fields) + section_bytes(VALUE, "x")
    assert decode_message(data).expiration_ms == 1500


def test_message_with_earlier_delivery_is_redelivered() -> None:
    message = decode_message(section_bytes(HEADER, [True, None, None, None, UInt(2)]) + section_bytes(VALUE, "x"))
    assert (message.delivery_count, message.redelivered) == (3, True)
    assert not JmsMessage().redelivered


BROKEN = {
    "text in a list": (section_bytes(MESSAGE_ANNOTATIONS, {KIND: Byte(5)}) + section_bytes(VALUE, [1]), "a text message cannot"),
    "map of text": (section_bytes(MESSAGE_ANNOTATIONS, {KIND: Byte(2)}) + section_bytes(VALUE, "x"), "a map message cannot"),
    "map with number keys": (section_bytes(MESSAGE_ANNOTATIONS, {KIND: Byte(2)}) + section_bytes(VALUE, {1: 2}), "of a map key: int"),
    "text that is no UTF-8": (section_bytes(MESSAGE_ANNOTATIONS, {KIND: Byte(5)}) + section_bytes(DATA, b"\xff"), "section data"),
    "unknown kind": (section_bytes(MESSAGE_ANNOTATIONS, {KIND: Byte(9)}), "x-opt-jms-msg-type 9"),
    "properties with a list": (section_bytes(PROPERTIES, [["id"]]), "field 0 is of type list"),
    "property names that are none": (section_bytes(APPLICATION_PROPERTIES, {1: "x"}), "of a map key: int"),
    "data that is text": (section_bytes(DATA, "abc"), "section data at byte 0: invalid type code 0xa1"),
    "a sequence that is a number": (section_bytes(SEQUENCE, 5), "section amqp-sequence at byte 0: invalid type code"),
    "a value after data": (section_bytes(DATA, b"abc") + section_bytes(VALUE, "x"), "amqp-value at byte 11: may not follow data"),
    "a binary value after data": (section_bytes(DATA, b"abc") + section_bytes(VALUE, b"x"), "may not follow data"),
    "a sequence after data": (section_bytes(DATA, b"abc") + section_bytes(SEQUENCE, [1]), "may not follow data"),
    "a value after a sequence": (section_bytes(SEQUENCE, [1]) + section_bytes(VALUE, True), "may not follow amqp-sequence"),
    "two values": (section_bytes(VALUE, 1) * 2, "may not follow amqp-value"),
    "cut off value": (b"\x00\x53\x74\xc1\x04\x02\xa1\x05a", "application-properties"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_invalid_jms_message_is_refused(name: str) -> None:
    data, reason = BROKEN[name]
    with pytest.raises(MalformedMessage) as caught:
        decode_message(data)
    assert reason in str(caught.value)


TYPED = {"JMS_AMQP_TYPED_ENCODING": True}
INVALID = {
    "text of bytes": (JmsMessage(body_kind="text", body=b"x"), "a text message cannot have a body of type bytes"),
    "unknown kind": (JmsMessage(body_kind="xml"), "body kind 'xml'"),
    "unknown destination kind": (JmsMessage(destination="q", destination_kind="list"), "destination kind 'list'"),
    "property of a type that AMQP has not": (JmsMessage(properties={"x": {1, 2}}), "cannot encode a set"),
    "number beyond its type": (JmsMessage(properties={"x": Int(1 << 40)}), "Int"),
    "typed object that is no value": (JmsMessage(body_kind="object", body=b"\xc0\xff", properties=TYPED), "object body"),
    "typed object with more behind": (JmsMessage(body_kind="object", body=b"\x40\x40", properties=TYPED), "1 bytes after"),
}  # fmt: skip


@pytest.mark.parametrize("name", INVALID)
def test_message_that_amqp_cannot_carry_is_refused(name: str) -> None:
    message, reason = INVALID[name]
    with pytest.raises(InvalidInput) as caught:
        encode_message(message)
    assert reason in str(caught.value)
