"""Sections that are read in place, from messages of Qpid JMS and from damaged messages."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from bascule.amqp.codec import encode
from bascule.amqp.types import Byte, Described, Float, Int, Short, Symbol, Timestamp, UByte, UInt, ULong
from bascule.jms.errors import MalformedMessage  # fmt: skip
from bascule.jms.lookup import selector_lookup
from bascule.jms.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    SEQUENCE,
    VALUE,
    application_property,
    group_of,
    head_of,
    header_bytes,
    places,
    scan,
    section_bytes,
)
from bascule.jms.selector import compile_selector
from tests.support.costs import calls_of

#: golden/QpidMessages.java wrote this file, and describes how.
GOLDEN = dict(line.split() for line in (Path(__file__).parent / "golden" / "qpid_messages.txt").read_text().splitlines())
TEXT = bytes.fromhex(GOLDEN["text"])
FULL = bytes.fromhex(GOLDEN["text-all-headers"])


def test_scan_finds_header_fields_of_persistent_text_message() -> None:
    facts = scan(TEXT)
    assert (facts.durable, facts.priority, facts.ttl_ms, facts.first_acquirer, facts.delivery_count) == (True, 4, 0, False, 0)
    assert facts.message_id == encode("ID:golden:1:1:1-1")
    assert (facts.to, facts.user_id, facts.group_id) == ("flights", None, None)
    assert (facts.creation_time_ms, facts.absolute_expiry_ms) == (1_700_000_000_000, 0)
    assert (facts.delivery_time_ms, facts.delivery_delay_ms) == (0, 0)
    assert TEXT[: facts.body_start] == header_bytes(True)


def test_scan_finds_header_fields_of_message_with_all_headers() -> None:
    facts = scan(FULL)
    assert (facts.durable, facts.priority, facts.ttl_ms) == (False, 7, 60_000)
    assert facts.absolute_expiry_ms == 1_700_000_060_000
    assert facts.delivery_time_ms == 1_700_000_005_000
    assert facts.group_id == "g1"
    assert FULL[: facts.body_start] == header_bytes(False, 7, 60_000)


@pytest.mark.parametrize("name", GOLDEN)
def test_delivery_replaces_only_the_header_of_the_message(name: str) -> None:
    sent = bytes.fromhex(GOLDEN[name])
    before = scan(sent)
    after = scan(header_bytes(before.durable, before.priority, before.ttl_ms, False, 3) + sent[before.body_start :])
    assert after._replace(delivery_count=0, body_start=before.body_start) == before
    assert after.delivery_count == 3


def test_delivery_annotations_are_not_forwarded() -> None:
    head = section_bytes(HEADER, [True]) + section_bytes(DELIVERY_ANNOTATIONS, {Symbol("x-opt-hop"): 1})
    body = section_bytes(VALUE, "text")
    assert scan(head + body).body_start == len(head)


@pytest.mark.parametrize("sent", ["none", "header"])
def test_message_without_header_values_has_the_defaults(sent: str) -> None:
    facts = scan((section_bytes(HEADER, []) if sent == "header" else b"") + section_bytes(VALUE, None))
    assert (facts.durable, facts.priority, facts.ttl_ms, facts.delivery_count) == (False, 4, 0, 0)


def test_priority_above_nine_counts_as_nine() -> None:
    assert scan(section_bytes(HEADER, [False, UByte(200)])).priority == 9


def test_message_ids_of_different_types_are_distinct() -> None:
    identities = ["1", ULong(1), b"1", uuid.UUID(int=1)]
    scanned = [scan(section_bytes(PROPERTIES, [identity])).message_id for identity in identities]
    assert scanned == [encode(identity) for identity in identities]
    assert scan(section_bytes(PROPERTIES, [None])).message_id is None


def test_sections_with_symbolic_descriptors_and_wide_encodings_are_scanned() -> None:
    wide = encode(Described(Symbol("amqp:header:list"), [True, UByte(7)])) + encode(
        Described(Symbol("amqp:properties:list"), ["id", b"me", "q" * 300])
    )
    facts = scan(wide + encode(Described(Symbol("amqp:amqp-value:*"), "text")))
    assert (facts.durable, facts.priority, facts.user_id, facts.to) == (True, 7, b"me", "q" * 300)


@pytest.mark.parametrize("value", [5000, Timestamp(5000), UInt(5000), ULong(5000), Int(5000)])
def test_delivery_time_of_any_integer_type_is_accepted(value: int) -> None:
    annotations = {Symbol("x-opt-other"): "x-opt-delivery-time", Symbol("x-opt-delivery-time"): value}
    assert scan(section_bytes(MESSAGE_ANNOTATIONS, annotations)).delivery_time_ms == 5000
    assert scan(section_bytes(MESSAGE_ANNOTATIONS, {Symbol("x-opt-delivery-delay"): value})).delivery_delay_ms == 5000


BROKEN = {
    "no descriptor": (b"\x01", "0x01, not with a descriptor"),
    "cut off descriptor": (b"\x00", "truncated"),
    "unknown section": (b"\x00\x53\x99\x45", "0x99 at byte 0: unknown"),
    "unknown symbol": (b"\x00\xa3\x03foo\x45", "unknown descriptor 'foo'"),
    "header that is no list": (b"\x00\x53\x70\x41", "section header at byte 0: invalid type code 0x41"),
    "header that runs past the end": (b"\x00\x53\x70\xc0\x05\x01\x41", "header at byte 0: runs 3 bytes past the end"),
    "durable that is text": (section_bytes(HEADER, ["x"]), "invalid value 'x'; it must be bool"),
    "priority of a wrong type": (section_bytes(HEADER, [True, UInt(4)]), "invalid value 4; it must be UByte"),
    "properties before the header": (section_bytes(PROPERTIES, []) + section_bytes(HEADER, []), "byte 4: may not follow properties"),
    "a header of six fields": (section_bytes(HEADER, [True, None, None, None, None, "x"]), "header at byte 0: 6 fields; at most 5"),
    "two headers": (section_bytes(HEADER, []) * 2, "may not follow header"),
    "body after the footer": (section_bytes(FOOTER, {}) + section_bytes(VALUE, 1), "may not follow footer"),
    "a value after data": (section_bytes(DATA, b"abc") + section_bytes(VALUE, b"x"), "amqp-value at byte 8: may not follow data"),
    "a sequence after data": (section_bytes(DATA, b"abc") + section_bytes(SEQUENCE, [1]), "amqp-sequence at byte 8: may not follow data"),
    "a value after a sequence": (section_bytes(SEQUENCE, [1]) + section_bytes(VALUE, [1]), "may not follow amqp-sequence"),
    "data after a sequence": (section_bytes(SEQUENCE, [1]) + section_bytes(DATA, b"abc"), "may not follow amqp-sequence"),
    "two values": (section_bytes(VALUE, 1) * 2, "may not follow amqp-value"),
    "an unknown section behind others": (section_bytes(HEADER, []) + b"\x00\x53\x99\x45", "0x99 at byte 4: unknown"),
    "an address that is a number": (section_bytes(PROPERTIES, [None, None, 5]), "at byte 8: int instead of str"),
    "a field too many": (section_bytes(PROPERTIES, [None] * 14), "14 fields"),
    "fields that are fewer than counted": (b"\x00\x53\x73\xc0\x02\x05\x40", "properties at byte 0"),
    "a wrong item count": (b"\x00\x53\x73\xc0\x03\x01\xa1\x7f", "its fields end at byte"),
    "a time that is text": (section_bytes(MESSAGE_ANNOTATIONS, {Symbol("x-opt-delivery-time"): "now"}), "of the delivery time: str"),
    "text that is no UTF-8": (b"\x00\x53\x73\xc0\x06\x03\x40\x40\xa1\x01\xff", "properties at byte 0"),
    "descriptors for ever": (b"\x00\x53\x01" * 5000, "0x1 at byte 0: unknown"),
    "endless descriptors": (b"\x00\x53\x77" + b"\x00\x44" * 5000, "values are nested more than 32 levels deep"),
    "a descriptor that is null": (b"\x00\x53\x77" + b"\x00\x40" * 5000, "the descriptor at byte 4 has type code 0x40"),
    "a list as descriptor": (b"\x00" + encode([None] * 5000), "the descriptor at byte 1 has type code 0xd0"),
    "a value with a list as descriptor": (b"\x00\x53\x77\x00" + encode([None] * 5000) + b"\x40", "at byte 4 has type code 0xd0"),
    "bytes after the body": (TEXT + b"x", "0x78, not with a descriptor"),
}  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize("name", ["endless descriptors", "a list as descriptor", "a value with a list as descriptor"])
def test_refusal_of_a_descriptor_costs_the_same_for_any_size(name: str) -> None:
    def refused() -> None:
        with pytest.raises(MalformedMessage):
            scan(BROKEN[name][0])

    assert calls_of(refused) < 300


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_message_is_refused_with_section_and_byte(name: str) -> None:
    data, reason = BROKEN[name]
    with pytest.raises(MalformedMessage) as caught:
        scan(data)
    assert reason in str(caught.value)
    assert caught.value.condition == "amqp:decode-error"


@pytest.mark.parametrize("section", [DATA, SEQUENCE])
def test_body_may_consist_of_several_sections_of_one_kind(section: int) -> None:
    body = section_bytes(section, b"x" if section == DATA else [1])
    scan(section_bytes(HEADER, []) + body * 3 + section_bytes(FOOTER, {}))


@pytest.mark.parametrize("name", ["mixed body", "subject that is no text"])
def test_stored_message_that_scan_would_now_refuse_is_still_readable(name: str) -> None:
    properties = bytes.fromhex("005373c0110b404040a101ff") + b"\x40" * 6 + b"\xa1\x02g1"
    with pytest.raises(MalformedMessage, match="can't decode byte"):
        scan(properties)
    start = section_bytes(HEADER, [True, None, UInt(5)]) + section_bytes(DELIVERY_ANNOTATIONS, {Symbol("x-opt-hop"): 1})
    message = start + properties + section_bytes(DATA, b"x") + (section_bytes(VALUE, 1) if name == "mixed body" else b"")
    assert group_of(message) == "g1"
    assert head_of(message) == ((True, 4, 5, False, 0), len(start))
    assert group_of(section_bytes(DATA, b"x")) is None
    assert head_of(section_bytes(DATA, b"x")) == ((False, 4, 0, False, 0), 0)


def test_truncated_message_is_refused_unless_cut_between_sections() -> None:
    ends = {end for _, _, end in places(TEXT)} | {0}
    for size in range(len(TEXT)):
        if size in ends:
            scan(TEXT[:size])
        else:
            with pytest.raises(MalformedMessage):
                scan(TEXT[:size])


@pytest.mark.parametrize(
    ("name", "value", "kind"), [("carrier", "UA", str), ("dep_delay", 40, Int), ("late", True, bool), ("none", None, type(None))]
)
def test_application_property_is_found_by_name_with_its_type(name: str, value: object, kind: type) -> None:
    found = application_property(TEXT, name)
    assert found == value
    assert type(found) is kind


def test_name_of_property_inside_a_value_or_body_is_not_matched() -> None:
    data = section_bytes(APPLICATION_PROPERTIES, {"a": "_AMQ_DUPL_ID", "b_AMQ_DUPL_ID": "x"}) + section_bytes(VALUE, "_AMQ_DUPL_ID")
    assert application_property(data, "_AMQ_DUPL_ID") is None
    assert application_property(section_bytes(VALUE, "x"), "_AMQ_DUPL_ID") is None


ASKED = {
    "JMSDeliveryMode": ("PERSISTENT", "NON_PERSISTENT"),
    "JMSPriority": (4, 7),
    "JMSMessageID": ("ID:golden:1:1:1-1", "ID:golden:1:1:1-1"),
    "JMSTimestamp": (1_700_000_000_000, 1_700_000_000_000),
    "JMSCorrelationID": (None, "order-1"),
    "JMSType": (None, "booking"),
    "JMSXGroupID": (None, "g1"),
    "JMSXGroupSeq": (None, 3),
    "JMSXUserID": (None, None),
    "JMSXDeliveryCount": (1, 1),
    "carrier": ("UA", None),
    "dep_delay": (40, None),
    "late": (True, None),
    "missing": (None, None),
}


@pytest.mark.parametrize("name", ASKED)
def test_selector_can_refer_to_header_fields_and_properties(name: str) -> None:
    assert (selector_lookup(TEXT)(name), selector_lookup(FULL)(name)) == ASKED[name]


def test_selector_sees_java_types_of_properties() -> None:
    lookup = selector_lookup(TEXT)
    names = ("row", "gate", "dep_delay", "distance", "weight", "price", "late", "carrier")
    assert [type(lookup(name)) for name in names] == [Byte, Short, Int, int, Float, float, bool, str]
    assert compile_selector("weight = 0.1F AND weight <> 0.1 AND gate / 2 = 3 AND dep_delay > 30 AND carrier IN ('UA')").matches(lookup)


def test_binary_and_uuid_properties_are_null_to_a_selector() -> None:
    data = section_bytes(APPLICATION_PROPERTIES, {"raw": b"x", "id": uuid.UUID(int=1), "none": None})
    assert [selector_lookup(data)(name) for name in ("raw", "id", "none")] == [None, None, None]


def test_selector_lookup_of_message_without_sections_returns_the_defaults() -> None:
    lookup = selector_lookup(section_bytes(DATA, b""))
    assert [lookup(name) for name in ("JMSPriority", "JMSTimestamp", "JMSMessageID", "x")] == [4, 0, None, None]


@pytest.mark.parametrize("facts", [(True, 4, 0, False, 0), (False, 4, 0, False, 0), (True, 9, 5000, True, 70_000), (False, 0, 0, False, 1)])
def test_header_bytes_round_trip_through_scan(facts: tuple[bool, int, int, bool, int]) -> None:
    assert scan(header_bytes(*facts))[:5] == facts
