"""Messages as an administrator sees them: described in plain words, and their bodies, without the values of masked properties."""

from __future__ import annotations

import base64
from itertools import islice
from typing import Any, Final, NamedTuple

from bascule.amqp.codec import decode, encode, skip
from bascule.amqp.constructors import BINARY8, BINARY32, STRING8, STRING32
from bascule.amqp.types import Array, Described
from bascule.broker.message import BrokerMessage
from bascule.core.errors import BasculeError, TooLarge
from bascule.core.masking import MASK, PropertyMask
from bascule.jms.message import JmsMessage, decode_message
from bascule.jms.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    MALFORMED,
    SEQUENCE,
    VALUE,
    keys,
    malformed,
    places,
    section_bytes,
)

#: Bytes of a body that are decoded: decoding holds the interpreter, and with it the event loop. Longer texts and bytes are cut, and longer
#: maps and streams are not decoded.
DECODED_BYTES_MAX: Final = 1 << 20
#: Properties, and entries of a map or stream, that an answer shows.
ENTRIES_SHOWN_MAX: Final = 1_000
#: Levels of a nested value, and values of each level, that an answer shows.
NESTED_LEVELS_MAX: Final = 3
NESTED_SHOWN_MAX: Final = 20
#: A property whose value is not shown. No message can be sent with this type.
HIDDEN: Final = {"type": "masked", "value": MASK}
_MORE: Final = "…"
#: Where a binary or string value begins behind its constructor code and its size (AMQP 1.0 part 1, section 1.6).
_VALUE_STARTS: Final = {BINARY8: 2, STRING8: 2, BINARY32: 5, STRING32: 5}
_TYPE_NAMES: Final = {str: "string", bool: "boolean", int: "long", float: "double", bytes: "bytes", type(None): "null"}
#: Maximum number of bytes of a character in UTF-8.
_CHARACTER_BYTES_MAX: Final = 4


class BrowsedMessage(NamedTuple):
    """A message, its bytes, and what the queue knows about it."""

    id: str
    message: BrokerMessage
    body: bytes
    due_ms: int
    failed: int
    matches: bool


def content(data: bytes, mask: PropertyMask) -> bytes:
    """Return the body of an AMQP message: the text of a text message in UTF-8, the bytes of others.

    If the body cannot be read or has no form as bytes, return the whole message. A long text keeps the character set of its sender.
    Raises MalformedMessage if the values that the mask hides cannot be found.
    """
    try:
        readable, cut = _readable(data)
        body = decode_message(readable).body
    except BasculeError:
        return _masked(data, mask)
    if cut:
        return b"".join(data[_value_start(data, start) : end] for section, start, end in places(data) if section in (DATA, VALUE))
    match body:
        case str():
            return body.encode(errors="surrogatepass")
        case bytes():
            return body
    return _masked(data, mask)


def searched_places(data: bytes, mask: PropertyMask) -> list[tuple[int, int]]:
    """Return the places of a message that a text is searched in: all but the values that the mask hides; none if they cannot be found."""
    if not mask:
        return [(0, len(data))]
    found, begin = [], 0
    try:
        for section, start, _ in places(data):
            if section > APPLICATION_PROPERTIES:
                break
            if section == APPLICATION_PROPERTIES:
                for name, value in keys(data, start):
                    if mask.covers(name.decode()):
                        found.append((begin, value))
                        begin = skip(data, value)
    except (BasculeError, *MALFORMED):
        return []
    return [*found, (begin, len(data))]


def _masked(data: bytes, mask: PropertyMask) -> bytes:
    """Return a message with masked values. Raises MalformedMessage."""
    if not mask:
        return data
    begin = 0
    for section, start, end in places(data):
        if section == APPLICATION_PROPERTIES:
            try:
                properties = decode(data, start)[0]
                if any(mask.covers(name) for name in properties):
                    return b"".join((data[:begin], section_bytes(section, mask.shown(properties)), data[end:]))
            except (AttributeError, TypeError, *MALFORMED) as error:
                raise malformed(section, start, error) from None
        begin = end
    return data


def _readable(data: bytes) -> tuple[bytes, bool]:
    """Return a message that can be decoded in a moment, and whether its body is cut. Raises MalformedMessage, TooLarge."""
    pieces, behind, left = [], 0, DECODED_BYTES_MAX
    for section, start, end in places(data):
        size = end - start
        if section not in (DATA, SEQUENCE, VALUE):
            if size > DECODED_BYTES_MAX:
                raise TooLarge(f"a section of the message has {size} bytes; only {DECODED_BYTES_MAX} are decoded")
        elif size <= left:
            left -= size
        elif data[start] in _VALUE_STARTS:
            pieces += [data[behind:start], _beginning(data, start, left)]
            behind, left = end, 0
        else:
            raise TooLarge(f"the body of the message has more than {DECODED_BYTES_MAX} bytes; only {DECODED_BYTES_MAX} are decoded")
    return (b"".join((*pieces, data[behind:])), True) if pieces else (data, False)


def _beginning(data: bytes, start: int, size: int) -> bytes:
    """Return a binary or string value with at most ``size`` bytes, and no part of a character in UTF-8."""
    first = _value_start(data, start)
    value = data[first : first + size]
    for back in range(1, min(_CHARACTER_BYTES_MAX, len(value)) + 1):
        if value[-back] & 0xC0 != 0x80:  # here the last character begins
            value = value[:-back]
            break
    return encode(value if data[start] in (BINARY8, BINARY32) else value.decode(errors="replace"))


def _value_start(data: bytes, start: int) -> int:
    return start + _VALUE_STARTS[data[start]]


def described(found: list[BrowsedMessage], shown_max: int, mask: PropertyMask) -> list[dict[str, Any]]:
    """Return messages as JSON can hold them; texts have at most ``shown_max`` characters."""
    return [_description(each, shown_max, mask) for each in found]


def _description(found: BrowsedMessage, shown_max: int, mask: PropertyMask) -> dict[str, Any]:
    message = found.message
    shown: dict[str, Any] = {
        "id": found.id, "bytes": message.size_bytes, "state": "delayed" if found.due_ms else "waiting", "due_ms": found.due_ms,
        "failed_deliveries": found.failed, "stored": message.mid >= 0, "matches": found.matches, "unreadable": "",
    }  # fmt: skip
    try:
        data, cut = _readable(found.body)
        fields = _fields(decode_message(data), shown_max, mask)
        fields["body"]["cut"] |= cut
        return shown | fields
    except BasculeError as error:
        unreadable = {"unreadable": plain(str(error), shown_max), "properties": {}, "body_kind": "unreadable"}
        return shown | unreadable | {"body": _as_bytes(found.body, shown_max, mask)}


def _as_bytes(data: bytes, shown_max: int, mask: PropertyMask) -> dict[str, Any]:
    """Return the encoded message; nothing of it if the values that the mask hides cannot be found."""
    try:
        return _encoded(_masked(data, mask), shown_max)
    except BasculeError:
        return {"cut": True}


def _fields(message: JmsMessage, shown_max: int, mask: PropertyMask) -> dict[str, Any]:
    def text(value: str | None) -> str | None:
        return None if value is None else plain(value, shown_max)

    correlation = message.correlation_id
    properties = {
        plain(name, shown_max): HIDDEN if mask.covers(name) else _value(value, shown_max)
        for name, value in islice(message.properties.items(), ENTRIES_SHOWN_MAX)
    }
    return {
        "message_id": text(message.message_id),
        "correlation_id": text(correlation.hex() if isinstance(correlation, bytes) else correlation),
        "destination": text(message.destination), "destination_kind": message.destination_kind,
        "reply_to": text(message.reply_to), "reply_to_kind": message.reply_to_kind, "type": text(message.type),
        "delivery_mode": message.delivery_mode, "priority": message.priority, "timestamp_ms": message.timestamp_ms,
        "expiration_ms": message.expiration_ms, "group_id": text(message.group_id), "group_sequence": message.group_sequence,
        "user_id": text(message.user_id), "properties": properties,
        "body_kind": message.body_kind, "body": _body(message.body, shown_max),
    }  # fmt: skip


def _body(body: Any, shown_max: int) -> dict[str, Any]:
    """Return a body by its kind: ``text``, ``base64``, or ``entries`` of a map or stream. ``cut`` says that not all of it is there."""
    match body:
        case str():
            return {"text": plain(body, shown_max), "cut": len(body) > shown_max}
        case bytes():
            return _encoded(body, shown_max)
        case dict():
            entries = [
                {"name": plain(name, shown_max), **_value(value, shown_max)} for name, value in islice(body.items(), ENTRIES_SHOWN_MAX)
            ]
            return {"entries": entries, "cut": len(body) > len(entries)}
        case list():
            entries = [_value(value, shown_max) for value in body[:ENTRIES_SHOWN_MAX]]
            return {"entries": entries, "cut": len(body) > len(entries)}
    return {"cut": False}


def _encoded(data: bytes, shown_max: int) -> dict[str, Any]:
    return {"base64": base64.b64encode(data[:shown_max]).decode(), "cut": len(data) > shown_max}


def _value(value: Any, shown_max: int) -> dict[str, str]:
    """Return a value with the name of its type. The value is a text, because JSON in a browser has no integers of 64 bits."""
    kind = _TYPE_NAMES.get(type(value)) or type(value).__name__.lower()
    return {"type": kind, "value": plain(_text(value, shown_max), shown_max)}


def _text(value: Any, shown_max: int, levels: int = NESTED_LEVELS_MAX) -> str:
    """Return a value as a text. Of nested values only the first ones: the text of all of them would hold the interpreter."""
    match value:
        case bool():
            return "true" if value else "false"
        case bytes():
            return value[:shown_max].hex()
        case Described():
            return _text(value.value, shown_max, levels)
        case Array():
            return _text(list(value.items[: NESTED_SHOWN_MAX + 1]), shown_max, levels)
        case list() | dict() if not levels:
            return _MORE
        case list():
            texts = [_text(each, shown_max, levels - 1) for each in value[:NESTED_SHOWN_MAX]]
        case dict():
            first = islice(value.items(), NESTED_SHOWN_MAX)
            texts = [f"{_text(name, shown_max, levels - 1)}: {_text(each, shown_max, levels - 1)}" for name, each in first]
        case _:
            return str(value)
    listed = ", ".join(texts if len(value) <= NESTED_SHOWN_MAX else [*texts, _MORE])
    return f"[{listed}]" if isinstance(value, list) else f"{{{listed}}}"


def plain(text: str, length_max: int) -> str:
    """Return a text that JSON can hold, truncated."""
    return text[:length_max].encode(errors="backslashreplace").decode()
