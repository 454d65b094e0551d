"""The sections of a message, read in place: only what the broker needs of every message (AMQP 1.0 part 3, section 3.2).

A message is decoded on demand only. ``scan`` steps over every section once, by size; it reads the header and properties, looks for a
delivery time in the annotations, and skips application properties and body.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Collection, Container, Iterator, Mapping
from typing import Any, Final, NamedTuple

from bascule.amqp.codec import decode, encode, read_descriptor, skip
from bascule.amqp.constructors import (
    BINARY8,
    BINARY32,
    DESCRIBED,
    LIST0,
    LIST8,
    LIST32,
    MAP8,
    MAP32,
    NULL,
    SMALL_ULONG,
    STRING8,
    STRING32,
    SYMBOL8,
    TIMESTAMP,
)  # fmt: skip
from bascule.amqp.errors import DecodeError
from bascule.amqp.types import Int, UByte, UInt, ULong
from bascule.core.caches import peer_cache
from bascule.jms.checks import (
    BODY_SECTIONS_MAX,
    HEADER_SIZE_BYTES_MAX,
    annotations_of,
    check_application_properties,
    check_text,
    end_of_field,
)
from bascule.jms.errors import MalformedMessage
from bascule.jms.ids import message_id_text

HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, PROPERTIES, APPLICATION_PROPERTIES = range(0x70, 0x75)
DATA, SEQUENCE, VALUE, FOOTER = range(0x75, 0x79)

NAMES: Final = {
    HEADER: "header", DELIVERY_ANNOTATIONS: "delivery-annotations", MESSAGE_ANNOTATIONS: "message-annotations",
    PROPERTIES: "properties", APPLICATION_PROPERTIES: "application-properties",
    DATA: "data", SEQUENCE: "amqp-sequence", VALUE: "amqp-value", FOOTER: "footer",
}  # fmt: skip
_SECTION_OF_SYMBOL: Final = {
    "amqp:header:list": HEADER, "amqp:delivery-annotations:map": DELIVERY_ANNOTATIONS,
    "amqp:message-annotations:map": MESSAGE_ANNOTATIONS, "amqp:properties:list": PROPERTIES,
    "amqp:application-properties:map": APPLICATION_PROPERTIES, "amqp:data:binary": DATA,
    "amqp:amqp-sequence:list": SEQUENCE, "amqp:amqp-value:*": VALUE, "amqp:footer:map": FOOTER,
}  # fmt: skip

#: Bytes of a properties section of which an id is read before the message is checked: decoding more would take more than a millisecond.
PROPERTIES_READ_BYTES_MAX: Final = 64 << 10
#: Delayed delivery: the delivery time (Qpid JMS), or the delay (other clients), both in ms.
DELIVERY_TIME: Final = "x-opt-delivery-time"
DELIVERY_DELAY: Final = "x-opt-delivery-delay"

DEFAULT_PRIORITY: Final = 4
PRIORITY_MAX: Final = 9

#: The end of the year 9999; such a delay plus the current time fits the eight bytes of a time in the journal.
TIME_MAX_MS: Final = 253_402_300_799_999

_LISTS: Final = frozenset({LIST0, LIST8, LIST32})
_MAPS: Final = frozenset({MAP8, MAP32})
#: The allowed types of the value of each section.
_FORMS: Final = {
    HEADER: _LISTS, DELIVERY_ANNOTATIONS: _MAPS, MESSAGE_ANNOTATIONS: _MAPS, PROPERTIES: _LISTS, APPLICATION_PROPERTIES: _MAPS,
    DATA: frozenset({BINARY8, BINARY32}), SEQUENCE: _LISTS, VALUE: range(256), FOOTER: _MAPS,
}  # fmt: skip
#: The sections that may follow each section, or be first: each once and in order, and one kind of body (AMQP 1.0 part 3, section 3.2).
FOLLOWERS: Final[Mapping[int, Container[int]]] = {
    0: range(HEADER, FOOTER + 1), **{section: range(section + 1, FOOTER + 1) for section in NAMES},
    DATA: (DATA, FOOTER), SEQUENCE: (SEQUENCE, FOOTER), VALUE: (FOOTER,),
}  # fmt: skip
_STRINGS: Final = frozenset({STRING8, STRING32})
#: Types with a size in the byte after the constructor code.
_SIZED8: Final = frozenset({BINARY8, STRING8, SYMBOL8, LIST8, MAP8})
#: Types with a size in the four bytes after the constructor code.
_SIZED32: Final = frozenset({BINARY32, STRING32, LIST32, MAP32})
#: Types of the fields of the properties section: message-id, user-id, to, subject, reply-to, correlation-id, content-type,
#: content-encoding, absolute-expiry-time, creation-time, group-id, group-sequence, reply-to-group-id.
_ID: Final = (str, bytes, uuid.UUID, ULong)
_FIELD_TYPES: Final = (_ID, bytes, str, str, str, _ID, str, str, int, int, str, int, str)
_PROPERTIES_MAX: Final = len(_FIELD_TYPES)
_GROUP_ID: Final = 10
#: The type codes of the fields that most messages have.
_USUAL_CODES: Final = (
    STRING8, None, STRING8, STRING8, STRING8, STRING8, None, None, TIMESTAMP, TIMESTAMP, STRING8, None, STRING8,
)  # fmt: skip
#: Maximum size of annotations whose values are cached.
_ANNOTATIONS_CACHED_BYTES_MAX: Final = 512
_ALL_LEFT_OUT: Final = [None] * _PROPERTIES_MAX
#: The errors of reading invalid bytes.
MALFORMED: Final = (IndexError, KeyError, struct.error, ValueError, DecodeError)

_u32 = struct.Struct(">I").unpack_from
_i64 = struct.Struct(">q").unpack_from


class Scan(NamedTuple):
    """The fields of a message for routing and dispatch. Times are ms since the epoch, 0 for none.

    ``body_start`` is the end of header and delivery annotations: a delivery is a new header and the bytes from there on.
    ``message_id`` is the encoded id with its type; it can be compared and hashed, but not displayed. ``delivery_delay_ms`` is relative to
    the time at which the broker accepts the message. ``to`` is the address, used on links without one.
    """

    durable: bool
    priority: int
    ttl_ms: int
    first_acquirer: bool
    delivery_count: int
    body_start: int
    delivery_time_ms: int
    delivery_delay_ms: int
    message_id: bytes | None
    user_id: bytes | None
    to: str | None
    absolute_expiry_ms: int
    creation_time_ms: int
    group_id: str | None


#: Message id, user id, to, absolute expiry time, creation time and group id (AMQP 1.0 part 3, section 3.2.4), as in Scan.
_Properties = tuple[bytes | None, bytes | None, str | None, int, int, str | None]

#: Durable, priority, ttl, first acquirer, delivery count.
_HEADER_MAX: Final = 5
NO_HEADER: Final = (False, DEFAULT_PRIORITY, 0, False, 0)
_NO_PROPERTIES: Final[_Properties] = (None, None, None, 0, 0, None)
_new: Final = tuple.__new__  # makes a Scan, because Scan(...) and Scan._make take several times as long


def scan(data: bytes, *, body_text: bool = True) -> Scan:
    """Return the fields of a new message, which must satisfy every rule. Raises MalformedMessage.

    Without ``body_text``, the text of an amqp-value is not checked: see ``large_texts``. For stored messages use ``head_of`` and
    ``group_of``, because newer rules must not apply to them.
    """
    size = len(data)
    header = NO_HEADER
    properties = _NO_PROPERTIES
    body_start = delivery_time = delay = 0
    position = section = body_sections = 0
    try:
        while position < size:
            before = section
            if data[position] == 0 and data[position + 1] == 0x53:
                section = data[position + 2]
                start = position + 3
            else:
                section, start = _descriptor(data, position)
            if section not in FOLLOWERS[before]:
                raise misplaced(section, before)
            code = data[start]
            if code not in _FORMS[section]:
                raise ValueError(f"invalid type code 0x{code:02x}")
            if code in _SIZED8:  # the usual types, without a call
                end = start + 2 + data[start + 1]
            elif code in _SIZED32:
                end = start + 5 + _u32(data, start + 1)[0]
            else:
                end = skip(data, start)
            if end > size:
                raise ValueError(f"runs {end - size} bytes past the end of the message")
            if section == PROPERTIES:
                properties = _properties(data, start, end)
            elif section == MESSAGE_ANNOTATIONS:
                read = _delivery_times if end - start <= _ANNOTATIONS_CACHED_BYTES_MAX else _read_delivery_times
                delivery_time, delay = read(data[start:end])
            elif section == APPLICATION_PROPERTIES:
                check_application_properties(data, start, end)
            elif section == HEADER:
                if end - start > HEADER_SIZE_BYTES_MAX:
                    raise ValueError(f"{end - start} bytes; at most {HEADER_SIZE_BYTES_MAX} are allowed")
                header = header_fields(data[start:end])
                body_start = end
            elif section == VALUE:
                if code in _STRINGS and body_text:
                    check_text(data[start + (2 if code == STRING8 else 5) : end])
            elif section == DELIVERY_ANNOTATIONS:
                annotations_of(data[start:end])
                body_start = end
            elif section == FOOTER:
                annotations_of(data[start:end])
            else:
                body_sections += 1
                if body_sections > BODY_SECTIONS_MAX:
                    raise ValueError(f"the body has more than {BODY_SECTIONS_MAX} sections")
            position = end
    except MALFORMED as error:
        raise malformed(section, position, error) from None
    return _new(Scan, (*header, body_start, delivery_time, delay, *properties))


def places(data: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield (section, start of its value, end) of each section, on demand. Raises MalformedMessage."""
    position = section = 0
    try:
        while position < len(data):
            if data[position] == 0 and data[position + 1] == 0x53:
                section = data[position + 2]
                start = position + 3
            else:
                section, start = _descriptor(data, position)
            end = skip(data, start)
            if data[start] not in _FORMS[section]:
                raise ValueError(f"invalid type code 0x{data[start]:02x}")
            if end > len(data):
                raise ValueError(f"runs {end - len(data)} bytes past the end of the message")
            yield section, start, end
            position = end
    except MALFORMED as error:
        raise malformed(section, position, error) from None


def misplaced(section: int, before: int) -> ValueError:
    """Return the error of a section that is not one of the FOLLOWERS of the previous one."""
    return ValueError(f"may not follow {NAMES[before]}" if section in NAMES else "unknown")


def head_of(data: bytes) -> tuple[tuple[bool, int, int, bool, int], int]:
    """Return the header fields of a stored message, and the end of header and delivery annotations. Raises MalformedMessage."""
    header, end = NO_HEADER, 0
    for section, start, behind in places(data):
        if section > DELIVERY_ANNOTATIONS:
            break
        if section == HEADER:
            try:
                header = header_fields(data[start:behind])
            except MALFORMED as error:
                raise malformed(section, start, error) from None
        end = behind
    return header, end


def group_of(data: bytes) -> str | None:
    """Return the group of a stored message. Raises MalformedMessage."""
    for section, start, _ in places(data):
        if section == PROPERTIES:
            try:
                count, position = items(data, start)
                if count <= _GROUP_ID:
                    return None
                for _ in range(_GROUP_ID):
                    position = skip(data, position)
                group: str | None = _typed(data, position, str)
            except MALFORMED as error:
                raise malformed(PROPERTIES, start, error) from None
            return group
    return None


def malformed(section: int, position: int, error: Exception) -> MalformedMessage:
    """Return the error of reading a section, with its place."""
    reason = "truncated" if isinstance(error, IndexError | struct.error) else "unknown" if isinstance(error, KeyError) else error
    return MalformedMessage(f"invalid AMQP message: section {NAMES.get(section, hex(section))} at byte {position}: {reason}")


def _descriptor(data: bytes, position: int) -> tuple[int, int]:
    """Return (section, position of its value) for any form of the descriptor. Raises ValueError and the errors of indexing."""
    if data[position] != 0:
        raise ValueError(f"starts with 0x{data[position]:02x}, not with a descriptor")
    descriptor, start = read_descriptor(data, position + 1)
    section = _SECTION_OF_SYMBOL.get(descriptor) if isinstance(descriptor, str) else descriptor
    if not isinstance(section, int) or section not in NAMES:
        raise ValueError(f"unknown descriptor {descriptor!r:.60}")
    return int(section), start


def items(data: bytes, start: int) -> tuple[int, int]:
    """Return (number of items, position of the first) of the list or map at ``start``."""
    code = data[start]
    if code in (LIST8, MAP8):
        return data[start + 2], start + 3
    if code in (LIST32, MAP32):
        return _u32(data, start + 5)[0], start + 9
    return 0, start + 1


def keys(data: bytes, start: int) -> Iterator[tuple[bytes, int]]:
    """Yield (key, position of its value) of the map at ``start`` with strings or symbols as keys."""
    count, position = items(data, start)
    for _ in range(count // 2):
        value = skip(data, position)
        yield data[position + (2 if data[position] in _SIZED8 else 5) : value], value
        position = skip(data, value)


def find_key(data: bytes, start: int, name: bytes) -> int:
    """Return the position of a key's value in the map at ``start``; -1 if it is missing."""
    for key, value in keys(data, start):
        if key == name:
            return value
    return -1


def _read_delivery_times(encoded: bytes) -> tuple[int, int]:
    """Return the delivery time and the delay in message annotations, after a check. Raises ValueError, DecodeError."""
    annotations = annotations_of(encoded)
    return _milliseconds(annotations.get(DELIVERY_TIME)), _milliseconds(annotations.get(DELIVERY_DELAY))


#: The annotations of a producer are mostly the same for all its messages.
_delivery_times: Final = peer_cache(entries=1024, entry_bytes=1024)(_read_delivery_times)


def _milliseconds(value: Any) -> int:
    """Return a time of any integer type; 0 if it is missing or before the epoch."""
    if value is None:
        return 0
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"invalid type of the delivery time: {type(value).__name__}")
    if value > TIME_MAX_MS:
        raise ValueError(f"invalid delivery time: {value} ms is after the year 9999")
    return max(0, int(value))


@peer_cache(entries=1024, entry_bytes=512)
def header_fields(encoded: bytes) -> tuple[bool, int, int, bool, int]:
    """Return the fields of a header section. Headers of a sender repeat, so results are cached."""
    fields, _ = decode(encoded)
    if len(fields) > _HEADER_MAX:
        raise ValueError(f"{len(fields)} fields; at most {_HEADER_MAX} are allowed")
    durable, priority, ttl_ms, first_acquirer, delivery_count = (*fields, *(None,) * _HEADER_MAX)[:_HEADER_MAX]
    given = ((durable, bool), (priority, UByte), (ttl_ms, UInt), (first_acquirer, bool), (delivery_count, UInt))
    for value, kind in given:
        if value is not None and type(value) is not kind:
            raise ValueError(f"invalid value {value!r:.60}; it must be {kind.__name__}")
    return (
        bool(durable),
        DEFAULT_PRIORITY if priority is None else min(int(priority), PRIORITY_MAX),
        int(ttl_ms or 0),
        bool(first_acquirer),
        int(delivery_count or 0),
    )


def _properties(data: bytes, start: int, end: int) -> _Properties:
    count, first = (data[start + 2], start + 3) if data[start] == LIST8 else items(data, start)
    if count > _PROPERTIES_MAX:
        raise ValueError(f"{count} fields; at most {_PROPERTIES_MAX} are allowed")
    position = first
    values: list[Any] = []
    for usual in _USUAL_CODES[:count]:  # the usual fields, without a call
        code = data[position]
        if code == NULL:
            values.append(None)
            position += 1
        elif code != usual:
            behind = end_of_field(data, position, len(values))
            values.append(decode(data, position)[0])
            position = behind
        elif code == STRING8:
            behind = position + 2 + data[position + 1]
            values.append(data[position + 2 : behind].decode())
            position = behind
        else:
            values.append(_i64(data, position + 1)[0])
            position += 9
    if position != end:
        raise ValueError(f"its fields end at byte {position}, but the section ends at {end}")
    identity, user_id, to, _, _, _, _, _, expiry_ms, created_ms, group_id, _, _ = values + _ALL_LEFT_OUT[count:]
    return (
        None if identity is None else data[first : first + 2 + data[first + 1] if data[first] == STRING8 else skip(data, first)],
        user_id, to, expiry_ms or 0, created_ms or 0, group_id,
    )  # fmt: skip


def _typed(data: bytes, position: int, kind: type) -> Any:
    """Return a field of the required type, or None."""
    code = data[position]
    if code == NULL:
        return None
    if code == STRING8 and kind is str:
        return data[position + 2 : position + 2 + data[position + 1]].decode()
    if code == TIMESTAMP and kind is int:
        return _i64(data, position + 1)[0]
    value, _ = decode(data, position)
    if not isinstance(value, kind):
        raise ValueError(f"invalid type at byte {position}: {type(value).__name__} instead of {kind.__name__}")
    return value


@peer_cache(entries=4096, entry_bytes=512)
def header_bytes(
    durable: bool, priority: int = DEFAULT_PRIORITY, ttl_ms: int = 0, first_acquirer: bool = False, delivery_count: int = 0
) -> bytes:
    """Return a header section. Fields with their default value are omitted, except durable."""
    fields: list[Any] = [
        durable,
        None if priority == DEFAULT_PRIORITY else UByte(priority),
        UInt(ttl_ms) if ttl_ms else None,
        first_acquirer or None,
        UInt(delivery_count) if delivery_count else None,
    ]
    while fields[-1] is None:
        fields.pop()
    return section_bytes(HEADER, fields)


def section_bytes(section: int, value: Any) -> bytes:
    """Return an encoded section. Raises EncodeError."""
    return bytes((DESCRIBED, SMALL_ULONG, section)) + encode(value)


def application_property(data: bytes, name: str) -> Any:
    """Return an application property, None if the message does not have it. Raises MalformedMessage."""
    return _named(data, APPLICATION_PROPERTIES, name)


def message_annotation(data: bytes, name: str) -> Any:
    """Return a message annotation, None if the message does not have it. Raises MalformedMessage."""
    return _named(data, MESSAGE_ANNOTATIONS, name)


def message_annotations(data: bytes, names: Collection[str]) -> dict[str, Any]:
    """Return the message annotations with these names, found in one pass. Raises MalformedMessage."""
    wanted = {name.encode(): name for name in names}
    found: dict[str, Any] = {}
    for section, start, end in places(data):
        if section == MESSAGE_ANNOTATIONS:
            if not any(data.find(key, start, end) >= 0 for key in wanted):
                break
            try:
                for key, value in keys(data, start):
                    if (name := wanted.get(key)) is not None:
                        found[name] = decode(data, value)[0]
            except MALFORMED as error:
                raise malformed(section, start, error) from None
        if section >= MESSAGE_ANNOTATIONS:
            break
    return found


def _named(data: bytes, wanted: int, name: str) -> Any:
    for section, start, end in places(data):
        if section == wanted:
            key = name.encode()
            if data.find(key, start, end) < 0:
                return None
            try:
                position = find_key(data, start, key)
                return decode(data, position)[0] if position >= 0 else None
            except MALFORMED as error:
                raise malformed(section, start, error) from None
    return None


def property_fields(data: bytes, start: int | None) -> tuple[Any, ...]:
    """Return all fields of the properties section at ``start``, None for missing ones. Raises MalformedMessage."""
    if start is None:
        return (None,) * _PROPERTIES_MAX
    try:
        fields, _ = decode(data, start)
        if len(fields) > _PROPERTIES_MAX:
            raise ValueError(f"{len(fields)} fields; at most {_PROPERTIES_MAX} are allowed")
        for index, value in enumerate(fields):
            if value is not None and not isinstance(value, _FIELD_TYPES[index]):
                raise ValueError(f"field {index} is of type {type(value).__name__}")
    except MALFORMED as error:
        raise malformed(PROPERTIES, start, error) from None
    return (*fields, *(None,) * (_PROPERTIES_MAX - len(fields)))


def property_fields_of(data: bytes) -> tuple[Any, ...]:
    """Return all fields of the properties section of a message. Raises MalformedMessage."""
    return property_fields(data, next((start for section, start, _ in places(data) if section == PROPERTIES), None))


def message_id_of(data: bytes) -> str:
    """Return the JMSMessageID of a message that nobody has checked, "" if it has none, or none that can be read."""
    try:
        for section, start, end in places(data):
            if section > PROPERTIES or (section == PROPERTIES and end - start > PROPERTIES_READ_BYTES_MAX):
                break
            if section == PROPERTIES:
                identity = property_fields(data, start)[0]
                return message_id_text(identity) if isinstance(identity, str | bytes | int | uuid.UUID) else ""
    except (MalformedMessage, *MALFORMED):
        pass
    return ""


def signed_sequence(value: int) -> Int:
    """Return a group-sequence as an int: JMSXGroupSeq is signed, AMQP's field is unsigned, so 2^31 and more becomes negative."""
    return Int(value - (1 << 32) if value >= 1 << 31 else value)
