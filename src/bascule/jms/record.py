"""Conversion of a JMS message to the headers and value of a Kafka record, and back. docs/reference/messages.md defines the format.

jms.<header>          a JMS header field: jms.JMSMessageID, jms.JMSTimestamp
jms.<name>            a property that is a string
jms.<type>.<name>     a property of another type: jms.int.dep_delay
jms.body              the kind of body
traceparent, tracestate, baggage    string properties of these names: the trace context, as tracing tools read it
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple

from bascule.core.errors import InvalidInput
from bascule.core.masking import MASK, NO_MASK, PropertyMask
from bascule.core.trace_context import TRACE_CONTEXT
from bascule.jms.ids import amqp_id, correlation_id_text
from bascule.jms.message import BODY_KINDS, DESTINATION_KINDS, NON_PERSISTENT, PERSISTENT, JmsMessage
from bascule.jms.values import BY_CLASS, BY_NAME, from_json, parse, to_json, type_of

PREFIX: Final = "jms."
BODY_HEADER: Final = "jms.body"
_number: Final = BY_NAME["long"].parse


class _Field(NamedTuple):
    """A JMS header field: its attribute of JmsMessage, and its conversion to and from text (raises ValueError or InvalidInput)."""

    attribute: str
    text: Callable[[Any], str]
    parse: Callable[[str], Any]
    always: bool = False  # written even if it has its default value


def _delivery_mode(text: str) -> str:
    if text not in (PERSISTENT, NON_PERSISTENT):
        raise ValueError(text)
    return text


def _priority(text: str) -> int:
    value: int = _number(text)
    if not 0 <= value <= 9:
        raise ValueError(text)
    return value


def _correlation_text(value: str | bytes) -> str:
    return value if isinstance(value, str) else correlation_id_text(value)


def _correlation(text: str) -> str | bytes:
    value = amqp_id(text)
    return value if isinstance(value, bytes) else text


_FIELDS: Final = {
    "JMSMessageID": _Field("message_id", str, str),
    "JMSCorrelationID": _Field(
        "correlation_id", lambda value: value if isinstance(value, str) else correlation_id_text(value), _correlation
    ),
    "JMSDeliveryMode": _Field("delivery_mode", str, _delivery_mode, always=True),
    "JMSPriority": _Field("priority", str, _priority, always=True),
    "JMSTimestamp": _Field("timestamp_ms", str, _number),
    "JMSExpiration": _Field("expiration_ms", str, _number),
    "JMSDeliveryTime": _Field("delivery_time_ms", str, _number),
    "JMSType": _Field("type", str, str),
    "JMSXDeliveryCount": _Field("delivery_count", str, _number),
    "JMSXGroupID": _Field("group_id", str, str),
    "JMSXGroupSeq": _Field("group_sequence", str, _number),
    "JMSXUserID": _Field("user_id", str, str),
}
_WRITTEN: Final = [(PREFIX + name, each, getattr(JmsMessage(), each.attribute)) for name, each in _FIELDS.items()]
#: Header fields with a destination, such as ``queue://name``.
_DESTINATIONS: Final = {"JMSDestination": ("destination", "destination_kind"), "JMSReplyTo": ("reply_to", "reply_to_kind")}
_RESERVED: Final = frozenset({*_FIELDS, *_DESTINATIONS, BODY_HEADER.removeprefix(PREFIX)})


def kafka_headers(message: JmsMessage) -> list[tuple[str, bytes]]:
    """Return all header fields and properties as headers. Raises InvalidInput for a property of a type without a text form."""
    headers = [(BODY_HEADER, message.body_kind.encode())]
    for name, each, default in _WRITTEN:
        value = getattr(message, each.attribute)
        if value != default or each.always:
            headers.append((name, each.text(value).encode()))
    for name, (address, kind) in _DESTINATIONS.items():
        value = getattr(message, address)
        if value is not None:
            scheme = getattr(message, kind)
            headers.append((PREFIX + name, (f"{scheme}://{value}" if scheme else value).encode()))
    for name, value in message.properties.items():
        headers.append(_property_header(name, value))
    return headers


def _property_header(name: str, value: Any) -> tuple[str, bytes]:
    if type(value) is str and name in TRACE_CONTEXT:
        return name, value.encode()
    if type(value) is str and name not in _RESERVED and ("." not in name or name.partition(".")[0] not in BY_NAME):
        return PREFIX + name, value.encode()
    found = BY_CLASS.get(type(value)) or type_of(value, f"property {name}")
    return f"{PREFIX}{found.name}.{name}", found.text(value).encode()


def from_kafka_headers(headers: Iterable[tuple[str, bytes | None]], mask: PropertyMask = NO_MASK) -> JmsMessage:
    """Return the message of the ``jms.`` headers and the trace context, without a body; other headers are ignored.

    A header ``traceparent`` takes precedence over ``jms.traceparent``, which earlier versions wrote. Raises InvalidInput for a header
    with an invalid value, except for a trace context, which is ignored. The error does not show values that ``mask`` covers.
    """
    message = JmsMessage()
    trace: dict[str, str] = {}
    for header, octets in headers:
        if header.startswith(PREFIX):
            name = header.removeprefix(PREFIX)
            try:
                _take(message, name, (octets or b"").decode())
            except (ValueError, InvalidInput) as error:
                if mask.covers(untyped_name(name)):
                    raise InvalidInput(f"invalid value of header {header}: {MASK}") from None
                if isinstance(error, InvalidInput):
                    raise
                raise InvalidInput(f"invalid value of header {header}: {octets!r:.60}") from None
        elif header in TRACE_CONTEXT:
            with suppress(UnicodeDecodeError):
                trace[header] = (octets or b"").decode()
    message.properties |= trace
    return message


def untyped_name(name: str) -> str:
    """Return the name of the property in a header without ``jms.``.

    >>> untyped_name("int.dep_delay"), untyped_name("card.number")
    ('dep_delay', 'card.number')
    """
    type_name, dot, rest = name.partition(".")
    return rest if dot and type_name in BY_NAME else name


def _take(message: JmsMessage, name: str, text: str) -> None:
    """Store one header. Raises ValueError or InvalidInput."""
    type_name, dot, rest = name.partition(".")
    if dot and type_name in BY_NAME:
        message.properties[rest] = parse(type_name, text, f"header {PREFIX}{name}")
    elif name in _FIELDS:
        setattr(message, _FIELDS[name].attribute, _FIELDS[name].parse(text))
    elif name in _DESTINATIONS:
        for attribute, value in zip(_DESTINATIONS[name], destination(text), strict=True):
            setattr(message, attribute, value)
    elif PREFIX + name == BODY_HEADER:
        if text not in BODY_KINDS:
            raise ValueError(text)
        message.body_kind = text
    else:
        message.properties[name] = text


def destination(text: str) -> tuple[str, str | None]:
    """Return (address, kind) of a destination in a header; the kind is None if it has none.

    >>> destination("temporary-queue://temp.1"), destination("orders")
    (('temp.1', 'temporary-queue'), ('orders', None))
    """
    scheme, mark, address = text.partition("://")
    return (address, scheme) if mark and scheme in DESTINATION_KINDS else (text, None)


def json_body(message: JmsMessage) -> bytes:
    """Return the body of a map or stream message as JSON. Raises InvalidInput for an item of a type without a JSON form.

    A map is ``{"name": {"type": "int", "value": 1}}``, a stream ``[{"type": "int", "value": 1}]``.
    """
    if message.body_kind not in ("map", "stream"):
        raise InvalidInput(f"a {message.body_kind} message has no JSON body")
    return json.dumps(to_json(message.body or _empty(message), "body")["value"], ensure_ascii=False, separators=(",", ":")).encode()


def _empty(message: JmsMessage) -> dict[str, Any] | list[Any]:
    return {} if message.body_kind == "map" else []


def map_from_json(value: bytes) -> dict[str, Any]:
    """Return the body of a map message from the JSON form of ``json_body``. Raises InvalidInput."""
    body: dict[str, Any] = _items(value, "map", dict)
    return body


def stream_from_json(value: bytes) -> list[Any]:
    """Return the body of a stream message from the JSON form of ``json_body``. Raises InvalidInput."""
    body: list[Any] = _items(value, "list", list)
    return body


def _items(value: bytes, name: str, kind: type) -> Any:
    try:
        content = json.loads(value)
        if not isinstance(content, kind):
            raise InvalidInput(f"invalid body: the JSON is not a {name}")
        return from_json({"type": name, "value": content}, "body")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"invalid body: not valid JSON: {error}") from None


def record_value(message: JmsMessage) -> bytes:
    """Return the Kafka value of a message's body; never null, which Kafka treats as a deletion. Raises InvalidInput."""
    kind, body = message.body_kind, message.body
    if kind in ("map", "stream"):
        return json_body(message)
    if kind == "text":
        return str(body or "").encode()
    return bytes(body or b"")


def body_from_value(kind: str, value: bytes) -> Any:
    """Return the body of a message of ``kind`` from a Kafka value, the reverse of ``record_value``. Raises InvalidInput."""
    if kind == "map":
        return map_from_json(value)
    if kind == "stream":
        return stream_from_json(value)
    if kind == "text":
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise InvalidInput(f"invalid body: not UTF-8 text: {error.reason} at byte {error.start}") from None
    return None if kind == "message" else value
