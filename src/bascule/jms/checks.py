"""Checks of a peer's message beyond the order and size of its sections: one pass over the values, without decoding them.

The broker encodes annotations and properties again when it moves a message, shows ids in JSON, and passes properties to selectors and
Kafka. All this works for checked values. The broker does not read bodies, except for the text of an amqp-value.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from bascule.amqp.codec import Budget, decode
from bascule.amqp.constructors import (
    BINARY8,
    BINARY32,
    BOOLEAN,
    BYTE,
    CHAR,
    DECIMAL32,
    DECIMAL64,
    DECIMAL128,
    DESCRIBED,
    DOUBLE,
    FALSE,
    FLOAT,
    INT,
    LIST8,
    LONG,
    MAP8,
    NULL,
    SHORT,
    SMALL_INT,
    SMALL_LONG,
    SMALL_UINT,
    SMALL_ULONG,
    STRING8,
    STRING32,
    SURROGATES,
    SYMBOL8,
    SYMBOL32,
    TIMESTAMP,
    TRUE,
    UBYTE,
    UINT,
    UINT0,
    ULONG,
    ULONG0,
    USHORT,
    UUID,
    WIDTH,
)  # fmt: skip
from bascule.amqp.types import ULong

#: Bytes of an id, address or other text in the properties section, and of the name of an application property. They are copied into
#: headers, indexes and logs; ids of Qpid JMS have 60 bytes, and applications use some hundred.
FIELD_SIZE_BYTES_MAX: Final = 4096
#: Application properties of one message, because a selector may read all of them.
APPLICATION_PROPERTIES_MAX: Final = 1024
#: Bytes of all application properties. Each becomes a header of a Kafka record, and records have their own limit.
APPLICATION_PROPERTIES_SIZE_BYTES_MAX: Final = 1024 * 1024
#: Bytes of annotations and footers: the broker decodes and encodes them when it moves a message.
ANNOTATIONS_SIZE_BYTES_MAX: Final = 64 * 1024
#: Items in annotations, over all nested values: decoding this many takes a millisecond or two.
ANNOTATION_ITEMS_MAX: Final = 4096
#: A header has at most five small fields.
HEADER_SIZE_BYTES_MAX: Final = 64
#: Bytes of all sections before the body: header, two kinds of annotations, the fields of properties, application properties, and some
#: bytes for their descriptors and sizes. A search for an application property ends there, and not behind a body of 64 MiB.
SECTIONS_BEFORE_BODY_BYTES_MAX: Final = (
    HEADER_SIZE_BYTES_MAX + 2 * ANNOTATIONS_SIZE_BYTES_MAX + 16 * FIELD_SIZE_BYTES_MAX + APPLICATION_PROPERTIES_SIZE_BYTES_MAX
)
#: Data and sequence sections of a body: the broker steps over each of them.
BODY_SECTIONS_MAX: Final = 1024

_TEXT: Final = frozenset({STRING8, STRING32})
_SYMBOL: Final = frozenset({SYMBOL8, SYMBOL32})
_BINARY: Final = frozenset({BINARY8, BINARY32})
_UUID_OR_ULONG: Final = frozenset({UUID, ULONG, SMALL_ULONG, ULONG0})
_ID: Final = _TEXT | _BINARY | _UUID_OR_ULONG
_NAME: Final = _SYMBOL | _TEXT
_TIME: Final = frozenset({TIMESTAMP})
#: Types of the fields of the properties section: message-id, user-id, to, subject, reply-to, correlation-id, content-type,
#: content-encoding, absolute-expiry-time, creation-time, group-id, group-sequence, reply-to-group-id. Each may be null.
_FIELDS: Final = (
    ("an id", _ID), ("bytes", _BINARY), ("str", _TEXT), ("str", _TEXT), ("str", _TEXT), ("an id", _ID), ("Symbol", _NAME),
    ("Symbol", _NAME), ("Timestamp", _TIME), ("Timestamp", _TIME), ("str", _TEXT), ("UInt", frozenset({UINT, SMALL_UINT, UINT0})),
    ("str", _TEXT),
)  # fmt: skip
#: Types that allow any value of their width.
_FREE: Final = frozenset({
    NULL, TRUE, FALSE, UBYTE, BYTE, USHORT, SHORT, UINT, SMALL_UINT, UINT0, INT, SMALL_INT, ULONG, SMALL_ULONG, ULONG0, LONG, SMALL_LONG,
    FLOAT, DOUBLE, DECIMAL32, DECIMAL64, DECIMAL128, TIMESTAMP, UUID,
})  # fmt: skip
_FREE_WIDTH: Final = [WIDTH[code] if code in _FREE else -1 for code in range(256)]
_SIZED8: Final = frozenset({STRING8, SYMBOL8, BINARY8})
_u32 = struct.Struct(">I").unpack_from


def check_text(octets: bytes) -> None:
    """Raise ValueError unless the bytes are UTF-8 text without surrogates."""
    if not octets.isascii():
        octets.decode()


def end_of_simple(data: bytes, position: int, size_bytes_max: int) -> int:
    """Return the end of the value at ``position``, which must be valid and of a simple type.

    Raises ValueError, IndexError, struct.error.
    """
    code = data[position]
    if code in _FREE:
        return position + 1 + WIDTH[code]
    if code in _SIZED8:
        start = position + 2
        end = start + data[position + 1]
    elif code in (STRING32, SYMBOL32, BINARY32):
        start = position + 5
        end = start + int(_u32(data, position + 1)[0])
    elif code == BOOLEAN and data[position + 1] < 2:
        return position + 2
    elif code == CHAR and (number := _u32(data, position + 1)[0]) <= 0x10FFFF and number not in SURROGATES:
        return position + 5
    else:
        raise ValueError(f"invalid value at byte {position}: type code 0x{code:02x} or its value is not allowed")
    if end - start > size_bytes_max:
        raise ValueError(f"value at byte {position} has {end - start} bytes; at most {size_bytes_max} are allowed")
    if code in _TEXT:
        check_text(data[start:end])
    elif code in _SYMBOL and not data[start:end].isascii():
        raise ValueError(f"the symbol at byte {position} is not ASCII")
    return end


def end_of_field(data: bytes, position: int, index: int) -> int:
    """Return the end of a field of the properties section, which must have its type. Raises ValueError, IndexError, struct.error."""
    code = data[position]
    if code == NULL:
        return position + 1
    expected, codes = _FIELDS[index]
    if code not in codes:
        compound = code >= LIST8 or code == DESCRIBED
        kind = "a list, map, array or described value" if compound else type(decode(data, position)[0]).__name__
        raise ValueError(f"invalid type at byte {position}: {kind} instead of {expected}")
    return end_of_simple(data, position, FIELD_SIZE_BYTES_MAX)


def check_application_properties(data: bytes, start: int, end: int) -> None:
    """Raise ValueError, IndexError or struct.error unless the map has unique names with simple values."""
    if end - start > APPLICATION_PROPERTIES_SIZE_BYTES_MAX:
        raise ValueError(f"{end - start} bytes; at most {APPLICATION_PROPERTIES_SIZE_BYTES_MAX} are allowed")
    count, position = (data[start + 2], start + 3) if data[start] == MAP8 else (int(_u32(data, start + 5)[0]), start + 9)
    if count % 2 or count > 2 * APPLICATION_PROPERTIES_MAX:
        raise ValueError(f"{count} keys and values; an even number up to {2 * APPLICATION_PROPERTIES_MAX} is allowed")
    names = set()
    for _ in range(count >> 1):
        code = data[position]
        if code == STRING8:  # the usual names and values, without a call
            behind = position + 2 + data[position + 1]
            name = data[position + 2 : behind]
            if not name.isascii():
                name.decode()
        elif code in _NAME:
            behind = end_of_simple(data, position, FIELD_SIZE_BYTES_MAX)
            name = data[position + (2 if code == SYMBOL8 else 5) : behind]
        else:
            raise ValueError(f"the key at byte {position} has type code 0x{code:02x}, not that of a string")
        names.add(name)
        code = data[behind]
        if (width := _FREE_WIDTH[code]) >= 0:
            position = behind + 1 + width
        elif code == STRING8:
            position = behind + 2 + data[behind + 1]
            check_text(data[behind + 2 : position])
        else:
            position = end_of_simple(data, behind, APPLICATION_PROPERTIES_SIZE_BYTES_MAX)
    if position != end:
        raise ValueError(f"its items end at byte {position}, but the section ends at {end}")
    if len(names) < count >> 1:
        raise ValueError("duplicate property")


def annotations_of(encoded: bytes) -> dict[Any, Any]:
    """Return the map of an annotations section or footer. Raises ValueError, DecodeError."""
    if len(encoded) > ANNOTATIONS_SIZE_BYTES_MAX:
        raise ValueError(f"{len(encoded)} bytes; at most {ANNOTATIONS_SIZE_BYTES_MAX} are allowed")
    annotations, end = decode(encoded, 0, Budget(ANNOTATION_ITEMS_MAX))
    if end != len(encoded):
        raise ValueError(f"its items end at byte {end} of {len(encoded)}")
    for key in annotations:
        if not isinstance(key, str | ULong):
            raise ValueError(f"invalid type of a map key: {type(key).__name__}")
    return annotations  # type: ignore[no-any-return]  # the section's type code is that of a map
