"""JMS messages, and their AMQP form: the JMS mapping as Apache Qpid JMS writes and reads it."""

from __future__ import annotations

import codecs
import encodings
import pkgutil
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from encodings import normalize_encoding
from encodings.aliases import aliases
from typing import Any, Final

from bascule.amqp.codec import decode, encode
from bascule.amqp.errors import DecodeError, EncodeError
from bascule.amqp.types import Byte, Symbol, Timestamp, UInt
from bascule.core.caches import peer_cache
from bascule.core.errors import InvalidInput
from bascule.core.trace_context import TRACE_CONTEXT
from bascule.jms.errors import MalformedMessage  # fmt: skip
from bascule.jms.ids import amqp_id, correlation_id_text, message_id_text
from bascule.jms.sections import (
    APPLICATION_PROPERTIES,
    DATA,
    DEFAULT_PRIORITY,
    FOLLOWERS,
    HEADER,
    MALFORMED,
    MESSAGE_ANNOTATIONS,
    NO_HEADER,
    PROPERTIES,
    SEQUENCE,
    VALUE,
    header_bytes,
    header_fields,
    malformed,
    misplaced,
    places,
    property_fields,
    section_bytes,
    signed_sequence,
)

PERSISTENT: Final = "PERSISTENT"
NON_PERSISTENT: Final = "NON_PERSISTENT"

#: Kinds of body, by the number in the annotation x-opt-jms-msg-type.
BODY_KINDS: Final = ("message", "object", "map", "bytes", "stream", "text")
#: Kinds of destination, by the number in x-opt-jms-dest and x-opt-jms-reply-to.
DESTINATION_KINDS: Final = ("queue", "topic", "temporary-queue", "temporary-topic")

_MESSAGE_TYPE: Final = Symbol("x-opt-jms-msg-type")
_TO_TYPE: Final = Symbol("x-opt-jms-dest")
_REPLY_TYPE: Final = Symbol("x-opt-jms-reply-to")
_DELIVERY_TIME: Final = Symbol("x-opt-delivery-time")
_DELIVERY_DELAY: Final = Symbol("x-opt-delivery-delay")
#: Older clients use these annotations, with "queue" or "topic,temporary".
_LEGACY: Final = {_TO_TYPE: Symbol("x-opt-to-type"), _REPLY_TYPE: Symbol("x-opt-reply-type")}

_JAVA_OBJECT: Final = Symbol("application/x-java-serialized-object")
_OCTETS: Final = Symbol("application/octet-stream")
#: A serialized null: the body of an empty ObjectMessage.
_JAVA_NULL: Final = bytes.fromhex("aced000570")
#: A longer time to live means none (AMQP has 32 bits).
_TTL_MAX_MS: Final = 0xFFFFFFFE

#: Provider properties of Qpid JMS that are not application properties in the AMQP message.
REPLY_TO_GROUP: Final = "JMS_AMQP_REPLY_TO_GROUP_ID"
TYPED_ENCODING: Final = "JMS_AMQP_TYPED_ENCODING"


#: Per kind of body: the value of a missing body, and the type of a body.
_EMPTY: Final[dict[str, Callable[[], Any]]] = {
    "message": lambda: None, "object": lambda: _JAVA_NULL, "map": dict, "bytes": bytes, "stream": list, "text": lambda: None,
}  # fmt: skip
_BODY_TYPES: Final[dict[str, Any]] = {
    "message": (type(None),), "object": (bytes,), "map": (dict,), "bytes": (bytes,), "stream": (list,), "text": (str, type(None)),
}  # fmt: skip

_BODY_SECTION: Final = {"text": VALUE, "map": VALUE, "stream": SEQUENCE, "bytes": DATA, "object": DATA}


@dataclass(slots=True)
class JmsMessage:
    """A message by its JMS names. Times are ms since the epoch, 0 for none.

    ``destination`` and ``reply_to`` are addresses; their kind is one of DESTINATION_KINDS, None if unknown.
    ``correlation_id`` is bytes if it was set as bytes. ``delivery_count`` is JMSXDeliveryCount; the first delivery has 1.
    ``properties`` keep their AMQP types (Byte, Short, Int, int = long, Float, float = double, str, bool).

    ``body`` by ``body_kind``: text str or None; bytes bytes; map dict; stream list; object bytes (a serialized Java object, or an
    encoded AMQP value if the property JMS_AMQP_TYPED_ENCODING is true); message None.
    """

    message_id: str | None = None
    correlation_id: str | bytes | None = None
    destination: str | None = None
    destination_kind: str | None = None
    reply_to: str | None = None
    reply_to_kind: str | None = None
    type: str | None = None
    delivery_mode: str = PERSISTENT
    priority: int = DEFAULT_PRIORITY
    timestamp_ms: int = 0
    expiration_ms: int = 0
    delivery_time_ms: int = 0
    delivery_count: int = 1
    group_id: str | None = None
    group_sequence: int = 0
    user_id: str | None = None
    properties: dict[str, Any] = field(default_factory=dict)
    body_kind: str = "message"
    body: Any = None

    @property
    def redelivered(self) -> bool:
        """JMSRedelivered."""
        return self.delivery_count > 1


# --- from AMQP -------------------------------------------------------------------------------------------------------------------


def decode_message(data: bytes) -> JmsMessage:
    """Return the JMS message in an AMQP message. Raises MalformedMessage."""
    header = NO_HEADER
    annotations: Mapping[str, Any] = {}
    properties: dict[str, Any] = {}
    fields = property_fields(data, None)
    body: list[tuple[int, int, int]] = []
    for place in places(data):
        section, start, end = place
        try:
            if section == HEADER:
                header = header_fields(data[start:end])
            elif section == MESSAGE_ANNOTATIONS:
                annotations = _annotations(data[start:end])
            elif section == PROPERTIES:
                fields = property_fields(data, start)
            elif section == APPLICATION_PROPERTIES:
                properties = _string_keys(decode(data, start)[0])
            elif section in (DATA, SEQUENCE, VALUE):
                if body and section not in FOLLOWERS[body[-1][0]]:
                    raise misplaced(section, body[-1][0])
                body.append(place)
        except MALFORMED as error:
            raise malformed(section, start, error) from None
    message = _facts(header, annotations, fields)
    message.properties = properties
    for name in TRACE_CONTEXT:
        if isinstance(annotations.get(name), str):  # by an intermediary, which is nearer than the sender
            properties[name] = str(annotations[name])
    if fields[12] is not None:
        properties[REPLY_TO_GROUP] = fields[12]
    try:
        _read_body(message, data, body, annotations, fields[6])
    except MALFORMED as error:
        raise malformed(body[0][0], body[0][1], error) from None
    return message


def _facts(header: tuple[bool, int, int, bool, int], annotations: Mapping[str, Any], fields: tuple[Any, ...]) -> JmsMessage:
    """Return a message with the header fields of JMS."""
    durable, priority, ttl_ms, _, delivery_count = header
    identity, user, to, subject, reply_to, correlation, _, _, expiry, creation, group, sequence, _ = fields
    timestamp_ms = int(creation or 0)
    return JmsMessage(
        message_id=None if identity is None else message_id_text(identity),
        correlation_id=correlation if correlation is None or type(correlation) is bytes else correlation_id_text(correlation),
        destination=to,
        destination_kind=_destination_kind(annotations, _TO_TYPE),
        reply_to=reply_to,
        reply_to_kind=_destination_kind(annotations, _REPLY_TYPE),
        type=subject,
        delivery_mode=PERSISTENT if durable else NON_PERSISTENT,
        priority=priority,
        timestamp_ms=timestamp_ms,
        expiration_ms=int(expiry) if expiry is not None else timestamp_ms + ttl_ms if timestamp_ms and ttl_ms else 0,
        delivery_time_ms=_delivery_time(annotations, timestamp_ms),
        delivery_count=delivery_count + 1,
        group_id=group,
        group_sequence=int(signed_sequence(sequence or 0)),
        user_id=user.decode(errors="replace") if user else None,
    )


@peer_cache(entries=256, entry_bytes=16_384, length_max=1024)
def _annotations(encoded: bytes) -> Mapping[str, Any]:
    """Return the annotations, read-only. The annotations of a sender are mostly the same for all its messages, so they are cached."""
    annotations, _ = decode(encoded)
    return _string_keys(annotations)


def _string_keys(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__}, not a map")
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"invalid type of a map key: {type(key).__name__}")
    return value


def _destination_kind(annotations: Mapping[str, Any], name: Symbol) -> str | None:
    value = annotations.get(name)
    if isinstance(value, int) and 0 <= value < len(DESTINATION_KINDS):
        return DESTINATION_KINDS[value]
    legacy = annotations.get(_LEGACY[name])
    if not isinstance(legacy, str):
        return None
    attributes = {attribute.strip() for attribute in legacy.split(",")}
    kind = "queue" if "queue" in attributes else "topic" if "topic" in attributes else None
    return f"temporary-{kind}" if kind and "temporary" in attributes else kind


def _delivery_time(annotations: Mapping[str, Any], timestamp_ms: int) -> int:
    value, delay = annotations.get(_DELIVERY_TIME), annotations.get(_DELIVERY_DELAY)
    if isinstance(value, int):
        return int(value)
    return timestamp_ms + delay if isinstance(delay, int) and timestamp_ms else 0


def _read_body(
    message: JmsMessage, data: bytes, body: list[tuple[int, int, int]], annotations: Mapping[str, Any], content_type: str | None
) -> None:
    """Set kind and body. Raises the errors of reading invalid bytes."""
    section = body[0][0] if body else None
    values = [decode(data, start)[0] for _, start, _ in body]
    value: Any = values[0] if values else None
    if section == DATA:
        value = b"".join(values)
    elif section == SEQUENCE:
        value = [item for each in values for item in each]
    charset = "utf-8"
    number = annotations.get(_MESSAGE_TYPE)
    if number is None:
        message.body_kind, charset = _foreign_kind(section, value, content_type)
    elif isinstance(number, int) and 0 <= number < len(BODY_KINDS):
        message.body_kind = BODY_KINDS[number]
    else:
        raise MalformedMessage(f"invalid AMQP message: {_MESSAGE_TYPE} {number!r:.40} is not a kind of JMS message")
    kind = message.body_kind
    if kind == "object":
        if content_type != _JAVA_OBJECT:
            message.properties[TYPED_ENCODING] = True
            value = encode(value) if len(body) > 1 else data[body[0][1] : body[0][2]] if body else encode(None)
    elif kind == "text" and section == DATA:
        value = value.decode(charset)
    elif kind == "message":
        value = None
    message.body = _EMPTY[kind]() if value is None else value
    if not isinstance(message.body, _BODY_TYPES[kind]):
        raise ValueError(f"a {kind} message cannot have a body of type {type(message.body).__name__}")
    if kind == "map":
        _string_keys(message.body)


def _foreign_kind(section: int | None, value: Any, content_type: str | None) -> tuple[str, str]:
    """Return (kind of body, charset) of a message that no JMS client wrote, by the rules of Qpid JMS."""
    if section == VALUE:
        return "text" if value is None or type(value) is str else "bytes" if isinstance(value, bytes) else "object", "utf-8"
    if section == SEQUENCE:
        return "object", "utf-8"
    if content_type == _JAVA_OBJECT:
        return "object", "utf-8"
    if content_type in (None, _OCTETS):
        return "bytes", "utf-8"
    charset = _charset(content_type)
    if charset is not None:
        return "text", charset
    return "message" if section is None else "bytes", "utf-8"


_MEDIA_TYPE: Final = re.compile(r"\s*(?P<type>[^/;\s]+)\s*/\s*(?P<subtype>[^;\s]+)\s*(?P<parameters>;.*)?", re.DOTALL)
_CHARSET: Final = re.compile(r";\s*charset\s*=\s*\"?([^\s;\"]+)")
#: Codecs whose time grows with the square of the text. They are for names of hosts, and Java does not have them.
_SLOW_CODECS: Final = frozenset({"idna", "punycode"})
#: The names of Python's other codecs. Python keeps each name that it has looked up for ever, so it is asked for no other name.
_CODECS: Final = frozenset({*aliases, *(module.name for module in pkgutil.iter_modules(encodings.__path__))}) - _SLOW_CODECS
_TEXT_SUBTYPE: Final = re.compile(r"xml|json|javascript|ecmascript|xml-dtd|.*\+xml|.*\+json")


def _charset(content_type: str | None) -> str | None:
    """Return the charset of a textual content type; None if it is not textual or its charset is unknown (``hex`` is not a charset)."""
    match = _MEDIA_TYPE.fullmatch((content_type or "").lower())
    if match is None or not (match["type"] == "text" or (match["type"] == "application" and _TEXT_SUBTYPE.fullmatch(match["subtype"]))):
        return None
    given = _CHARSET.search(match["parameters"] or "")
    name = normalize_encoding(given[1] if given else "utf-8")
    if name not in _CODECS:
        return None
    try:
        with suppress(UnicodeError):
            b"?".decode(name)
        return codecs.lookup(name).name
    except LookupError:
        return None


# --- to AMQP ---------------------------------------------------------------------------------------------------------------------


def encode_message(message: JmsMessage) -> bytes:
    """Return the AMQP message of ``message``, as Qpid JMS would send it. Raises InvalidInput for content that AMQP cannot represent."""
    if message.body_kind not in BODY_KINDS:
        raise InvalidInput(f"unknown body kind {message.body_kind!r}; the kinds are {', '.join(BODY_KINDS)}")
    properties = dict(message.properties)
    typed = bool(properties.pop(TYPED_ENCODING, False)) and message.body_kind == "object"
    reply_to_group = properties.pop(REPLY_TO_GROUP, None)
    try:
        return b"".join((
            _encode_header(message),
            section_bytes(MESSAGE_ANNOTATIONS, _annotations_of(message)),
            section_bytes(PROPERTIES, _fields_of(message, typed, reply_to_group)),
            section_bytes(APPLICATION_PROPERTIES, properties) if properties else b"",
            _encode_body(message, typed),
        ))  # fmt: skip
    except EncodeError as error:
        raise InvalidInput(f"message {message.message_id or ''}: {error.description}") from None


def _encode_header(message: JmsMessage) -> bytes:
    durable = message.delivery_mode == PERSISTENT
    ttl_ms = message.expiration_ms - message.timestamp_ms if message.expiration_ms and message.timestamp_ms else 0
    ttl_ms = ttl_ms if 0 < ttl_ms <= _TTL_MAX_MS else 0
    facts = (durable, message.priority, ttl_ms, False, message.delivery_count - 1)
    return b"" if facts == NO_HEADER else header_bytes(*facts)


def _annotations_of(message: JmsMessage) -> dict[Symbol, Any]:
    annotations: dict[Symbol, Any] = {}
    if message.reply_to_kind is not None:
        annotations[_REPLY_TYPE] = Byte(_number(message.reply_to_kind))
    if message.delivery_time_ms:
        annotations[_DELIVERY_TIME] = int(message.delivery_time_ms)
    if message.destination_kind is not None:
        annotations[_TO_TYPE] = Byte(_number(message.destination_kind))
    annotations[_MESSAGE_TYPE] = Byte(BODY_KINDS.index(message.body_kind))
    return annotations


def _number(kind: str) -> int:
    if kind not in DESTINATION_KINDS:
        raise InvalidInput(f"unknown destination kind {kind!r}; the kinds are {', '.join(DESTINATION_KINDS)}")
    return DESTINATION_KINDS.index(kind)


def _fields_of(message: JmsMessage, typed: bool, reply_to_group: Any) -> list[Any]:
    correlation = message.correlation_id
    content_type = {"bytes": _OCTETS, "object": None if typed else _JAVA_OBJECT}.get(message.body_kind)
    fields: list[Any] = [
        None if message.message_id is None else amqp_id(message.message_id),
        message.user_id.encode() if message.user_id else None,
        message.destination,
        message.type,
        message.reply_to,
        amqp_id(correlation) if isinstance(correlation, str) else correlation,
        content_type,
        None,
        Timestamp(message.expiration_ms) if message.expiration_ms else None,
        Timestamp(message.timestamp_ms) if message.timestamp_ms else None,
        message.group_id,
        UInt(message.group_sequence & 0xFFFFFFFF) if message.group_sequence else None,
        reply_to_group,
    ]
    while fields and fields[-1] is None:
        fields.pop()
    return fields


def _encode_body(message: JmsMessage, typed: bool) -> bytes:
    kind, body = message.body_kind, message.body
    if body is None:
        body = encode(None) if typed else _EMPTY[kind]()
    if not isinstance(body, _BODY_TYPES[kind]):
        raise InvalidInput(f"a {kind} message cannot have a body of type {type(body).__name__}")
    if kind == "message":
        return b""
    if typed:
        return section_bytes(VALUE, _typed_object(body))
    return section_bytes(_BODY_SECTION[kind], body)


def _typed_object(body: bytes) -> Any:
    """Return the value of an object body that is an encoded AMQP value. The body may be untrusted, so it is checked."""
    try:
        value, end = decode(body)
    except DecodeError as error:
        raise InvalidInput(f"invalid object body: {error}") from None
    if end != len(body):
        raise InvalidInput(f"invalid object body: {len(body) - end} bytes after the AMQP value")
    return value
