"""The broker refuses messages that are invalid or too expensive, with the section and the reason."""

from __future__ import annotations

import re
import uuid
from typing import Any

import pytest

from bascule.amqp.types import Char, Decimal128, Described, Symbol, Timestamp, UInt, ULong
from bascule.jms.annotate import REASON, annotated
from bascule.jms.checks import (
    ANNOTATION_ITEMS_MAX,
    ANNOTATIONS_SIZE_BYTES_MAX,
    APPLICATION_PROPERTIES_MAX,
    APPLICATION_PROPERTIES_SIZE_BYTES_MAX,
    BODY_SECTIONS_MAX,
    FIELD_SIZE_BYTES_MAX,
)
from bascule.jms.errors import MalformedMessage
from bascule.jms.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    DELIVERY_ANNOTATIONS,
    FOOTER,
    HEADER,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    VALUE,
    message_annotation,
    scan,
    section_bytes,
)
from tests.support import hostile as raw
from tests.support.costs import COST_S_MAX, processor_s

BODY = section_bytes(VALUE, "x")
NULL = raw.NULL


def properties(index: int, value: bytes) -> bytes:
    return raw.described(PROPERTIES, raw.listed(*[NULL] * index, value)) + BODY


def property_named(name: bytes, value: bytes) -> bytes:
    return raw.described(APPLICATION_PROPERTIES, raw.mapped(name, value)) + BODY


TOO_LONG = b"x" * (FIELD_SIZE_BYTES_MAX + 1)
REFUSED: dict[str, tuple[bytes, str]] = {
    "id of 36 MiB": (properties(0, raw.string(b"x" * (36 << 20))), f"at most {FIELD_SIZE_BYTES_MAX}"),
    "id that is a list": (properties(0, raw.listed(NULL)), "instead of an id"),
    "correlation id that is too long": (properties(5, raw.binary(TOO_LONG)), f"at most {FIELD_SIZE_BYTES_MAX}"),
    "group id that is too long": (properties(10, raw.string(TOO_LONG)), f"at most {FIELD_SIZE_BYTES_MAX}"),
    "user id that is too long": (properties(1, raw.binary(TOO_LONG)), f"at most {FIELD_SIZE_BYTES_MAX}"),
    "subject with a surrogate": (properties(3, raw.string(b"\xed\xa0\x80")), "can't decode"),
    "reply address that is a map": (properties(4, raw.mapped()), "at byte 16: a list, map, array or described value instead of str"),
    "content type that is not ASCII": (properties(6, raw.symbol("é".encode())), "is not ASCII"),
    "expiry beyond 63 bits": (properties(8, raw.ulong((1 << 64) - 1)), "instead of Timestamp"),
    "group sequence that is negative": (properties(11, b"\x54\xff"), "instead of UInt"),
    "property with a list": (property_named(raw.string(b"a"), raw.listed(NULL)), "or its value is not allowed"),
    "property with a described value": (property_named(raw.string(b"a"), raw.described(0x24, NULL)), "or its value is not allowed"),
    "property with half of a surrogate pair": (property_named(raw.string(b"a"), b"\x73\x00\x00\xd8\x00"), "or its value is not allowed"),
    "property with a boolean of 2": (property_named(raw.string(b"a"), b"\x56\x02"), "or its value is not allowed"),
    "property whose name is a number": (property_named(raw.uint(1), NULL), "not that of a string"),
    "property with a long name": (property_named(raw.string(TOO_LONG), NULL), f"at most {FIELD_SIZE_BYTES_MAX}"),
    "property twice": (raw.described(APPLICATION_PROPERTIES, raw.mapped(raw.string(b"a"), NULL, raw.string(b"a"), NULL)), "duplicate"),
    "properties without number": (
        section_bytes(APPLICATION_PROPERTIES, {str(number): None for number in range(APPLICATION_PROPERTIES_MAX + 1)}),
        f"up to {2 * APPLICATION_PROPERTIES_MAX}",
    ),
    "properties without end": (
        section_bytes(APPLICATION_PROPERTIES, {"a": "x" * APPLICATION_PROPERTIES_SIZE_BYTES_MAX}),
        f"at most {APPLICATION_PROPERTIES_SIZE_BYTES_MAX}",
    ),
    "annotations with a number as key": (raw.described(MESSAGE_ANNOTATIONS, raw.mapped(raw.uint(1), NULL)), "of a map key: UInt"),
    "annotation twice": (raw.described(MESSAGE_ANNOTATIONS, raw.mapped(raw.symbol(b"a"), NULL, raw.symbol(b"a"), NULL)), "duplicate"),
    "annotations that are too large": (
        section_bytes(MESSAGE_ANNOTATIONS, {Symbol("a"): "x" * ANNOTATIONS_SIZE_BYTES_MAX}), f"at most {ANNOTATIONS_SIZE_BYTES_MAX}",
    ),
    "annotations of many items": (
        section_bytes(MESSAGE_ANNOTATIONS, {Symbol("a"): [None] * ANNOTATION_ITEMS_MAX}), "items more than allowed",
    ),
    "delivery annotations that are none": (raw.described(DELIVERY_ANNOTATIONS, raw.mapped(raw.listed(), NULL)), "of a map key"),
    "footer that is none": (BODY + raw.described(FOOTER, raw.mapped(raw.listed(), NULL)), "of a map key"),
    "header that is too large": (raw.described(HEADER, raw.listed(*[NULL] * 100_000)), "at most 64"),
    "text with a surrogate": (raw.described(VALUE, raw.string(b"\xed\xa0\x80")), "can't decode"),
    "body in too many sections": (section_bytes(DATA, b"") * (BODY_SECTIONS_MAX + 1), f"more than {BODY_SECTIONS_MAX} sections"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_unusable_message_is_refused_in_little_time(name: str) -> None:
    data, reason = REFUSED[name]

    def refuse() -> None:
        with pytest.raises(MalformedMessage, match=re.escape(reason)) as caught:
            scan(data)
        assert caught.value.condition == "amqp:decode-error"

    assert processor_s(refuse) < COST_S_MAX


ODD: dict[Symbol, Any] = {
    Symbol("x-a"): Described(Symbol("odd"), [ULong(1), {"k": Char("\uffff")}]), Symbol("x-b"): Timestamp(-(1 << 63)),
    Symbol("x-c"): Decimal128(bytes(16)), Symbol("x-d"): uuid.UUID(int=0), Symbol("x-e"): float("nan"),
}  # fmt: skip


def test_unusual_valid_values_are_accepted_and_survive_a_move() -> None:
    message = (
        section_bytes(MESSAGE_ANNOTATIONS, ODD)
        + section_bytes(PROPERTIES, [ULong((1 << 64) - 1), b"\xff", *[None] * 6, Timestamp((1 << 63) - 1), Timestamp(-1)])
        + section_bytes(APPLICATION_PROPERTIES, {"é": Char("\U0010ffff"), "b": b"\xff", "n": UInt(0), "d": Decimal128(bytes(16)), "": None})
        + section_bytes(VALUE, {"body": [1]})
    )
    assert scan(message).creation_time_ms == -1
    moved = annotated(message, {REASON: "expired"})
    scan(moved)
    assert message_annotation(moved, "x-a") == ODD[Symbol("x-a")]
    assert message_annotation(moved, REASON) == "expired"
