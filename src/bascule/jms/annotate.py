"""A message for another address: the sender's sections, with annotations that state its origin and the reason of the move.

The sender's sections are not decoded and encoded again: they are copied byte by byte, so that a value which this version cannot encode
never prevents a move.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final

from bascule.amqp.codec import encode, skip
from bascule.amqp.constructors import DESCRIBED, LIST8, LIST32, MAP8, MAP32, NULL, SMALL_ULONG, STRING8, STRING32, SYMBOL8, SYMBOL32
from bascule.amqp.limits import ITEMS_MAX
from bascule.amqp.types import Symbol
from bascule.jms.sections import (
    DELIVERY_ANNOTATIONS,
    DELIVERY_DELAY,
    DELIVERY_TIME,
    HEADER,
    MALFORMED,
    MESSAGE_ANNOTATIONS,
    PROPERTIES,
    header_bytes,
    header_fields,
    items,
    malformed,
    places,
)

#: The names of Artemis.
ORIGINAL_ADDRESS: Final = "x-opt-ORIG-ADDRESS"
ORIGINAL_QUEUE: Final = "x-opt-ORIG-QUEUE"
ORIGINAL_ROUTING: Final = "x-opt-ORIG-ROUTING-TYPE"  # 0 for a queue, 1 for a topic
ORIGINAL_MESSAGE_ID: Final = "x-opt-ORIG-MESSAGE-ID"
#: Annotations of Bascule: the reason of the move, its time (ms since the epoch), the failed deliveries before it, and the expiry time.
REASON: Final = "x-opt-bascule-reason"
MOVED_AT: Final = "x-opt-bascule-moved-at"
DELIVERIES: Final = "x-opt-bascule-deliveries"
ORIGINAL_EXPIRY: Final = "x-opt-ORIG-EXPIRATION"

_OWN: Final = (
    ORIGINAL_ADDRESS, ORIGINAL_QUEUE, ORIGINAL_ROUTING, ORIGINAL_MESSAGE_ID, REASON, MOVED_AT, DELIVERIES, ORIGINAL_EXPIRY,
)  # fmt: skip
_NOT_KEPT: Final = frozenset(name.encode() for name in (*_OWN, DELIVERY_TIME, DELIVERY_DELAY))
_MESSAGE_ID, _ABSOLUTE_EXPIRY = 0, 8  # fields of the properties section (AMQP 1.0 part 3, section 3.2.4)
#: Maximum size of an annotation added by a move; a larger one is omitted, because a copy of a long message id could make the message larger
#: than a journal record. An address of 1,000 characters, the maximum, fits.
ANNOTATION_BYTES_MAX: Final = 16 << 10
#: The bytes before the text of a key.
_KEY_HEAD: Final = {STRING8: 2, SYMBOL8: 2, STRING32: 5, SYMBOL32: 5}


def annotated(body: bytes, annotations: Mapping[str, Any]) -> bytes:
    """Return the message with other annotations, and without its expiry and delivery times. Raises MalformedMessage.

    The annotations of an earlier move are replaced; without ``annotations`` the message is as before its first move. An annotation larger
    than ANNOTATION_BYTES_MAX is omitted.
    """
    found: dict[int, tuple[int, int]] = {}
    others: list[bytes] = []
    begin = 0
    for section, start, end in places(body):
        if section in _REPLACED:
            found[section] = (start, end)
        else:
            others.append(body[begin:end])
        begin = end
    section = HEADER
    try:
        start, end = found.get(HEADER, (0, 0))
        header = body[start:end]
        durable, priority, *_ = header_fields(header) if header else (False, 4)
        section = PROPERTIES
        message_id, properties = _without_expiry(body, *found[section]) if section in found else (b"", b"")
        section = MESSAGE_ANNOTATIONS
        kept = list(_pairs(body, *found[section])) if section in found else []
    except MALFORMED as error:
        raise malformed(section, found[section][0], error) from None
    own = dict(_encoded(annotations))
    if annotations and 0 < len(message_id) <= ANNOTATION_BYTES_MAX:
        own[ORIGINAL_MESSAGE_ID] = message_id
    pairs = [pair for name, pair in kept if name not in _NOT_KEPT]
    if 2 * (len(pairs) + len(own)) <= ITEMS_MAX:  # otherwise no peer could read the map
        pairs += [encode(Symbol(name)) + value for name, value in own.items()]
    parts = [header_bytes(durable, priority)]
    if pairs:
        parts.append(section_of(MESSAGE_ANNOTATIONS, compound(MAP8, MAP32, 2 * len(pairs), b"".join(pairs))))
    if properties:
        parts.append(section_of(PROPERTIES, properties))
    return b"".join((*parts, *others))


_REPLACED: Final = frozenset({HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, PROPERTIES})


def _encoded(annotations: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    """Yield each annotation that has a value and an allowed size; characters that UTF-8 cannot encode are escaped."""
    for name, value in annotations.items():
        if value is not None:
            encoded = encode(value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value)
            if len(encoded) <= ANNOTATION_BYTES_MAX:
                yield name, encoded


def _pairs(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield (text of the key, bytes of key and value) of the map at ``start``. The text is empty if the key is not a text."""
    count, position = items(data, start)
    for _ in range(count // 2):
        value = skip(data, position)
        after = skip(data, value)
        head = _KEY_HEAD.get(data[position])
        yield data[position + head : value] if head else b"", data[position:after]
        position = after
    if position != end or count % 2:
        raise ValueError(f"{count} items end at byte {position}, but the section ends at {end}")


def _without_expiry(data: bytes, start: int, end: int) -> tuple[bytes, bytes]:
    """Return the encoded message id, and the properties without the absolute expiry time."""
    count, position = items(data, start)
    at = [position]
    for _ in range(count):
        at.append(skip(data, at[-1]))
    if at[-1] != end:
        raise ValueError(f"its fields end at byte {at[-1]}, but the section ends at {end}")
    message_id = data[at[_MESSAGE_ID] : at[_MESSAGE_ID + 1]] if count and data[at[_MESSAGE_ID]] != NULL else b""
    if count <= _ABSOLUTE_EXPIRY or data[at[_ABSOLUTE_EXPIRY]] == NULL:
        return message_id, data[start:end]
    fields = b"".join((data[at[0] : at[_ABSOLUTE_EXPIRY]], bytes([NULL]), data[at[_ABSOLUTE_EXPIRY + 1] : end]))
    return message_id, compound(LIST8, LIST32, count, fields)


def section_of(section: int, value: bytes) -> bytes:
    """Return a section with an encoded value."""
    return bytes((DESCRIBED, SMALL_ULONG, section)) + value


def compound(code8: int, code32: int, count: int, content: bytes) -> bytes:
    """Return a list or map of encoded items."""
    if len(content) < 255 and count < 256:  # the size byte includes the count byte
        return struct.pack(">BBB", code8, len(content) + 1, count) + content
    return struct.pack(">BII", code32, len(content) + 4, count) + content
