"""Messages of the client, on top of bascule.jms.message."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from bascule.amqp.types import Byte, Float, Int, Short
from bascule.client.destination import Destination, destination_of, require_destination
from bascule.client.errors import InvalidDestination
from bascule.core.errors import InvalidInput
from bascule.jms.message import NON_PERSISTENT, PERSISTENT, JmsMessage, encode_message
from bascule.jms.sections import DEFAULT_PRIORITY

Body = str | bytes | dict[str, Any] | list[Any] | None

_KIND_OF_BODY: Final[tuple[tuple[type, str], ...]] = (
    (str, "text"), (bytes, "bytes"), (bytearray, "bytes"), (dict, "map"), (list, "stream"), (tuple, "stream"), (type(None), "message"),
)  # fmt: skip
#: The types of property values that JMS allows; Int, Short, Byte and Float are the types of Java.
_PROPERTY_TYPES: Final = (bool, int, float, str, type(None))
_INT_MIN, _INT_MAX, _LONG_MAX = -(1 << 31), (1 << 31) - 1, (1 << 63) - 1
#: Properties that are fields of a message.
_FIELDS: Final = {"JMSXGroupID": "group_id", "JMSXGroupSeq": "group_sequence"}
_IDENTIFIER: Final = re.compile(r"(?:[^\W\d]|\$)[\w$]*")
_RESERVED: Final = frozenset({"NULL", "TRUE", "FALSE", "NOT", "AND", "OR", "BETWEEN", "LIKE", "IN", "IS", "ESCAPE"})


class Long(int):
    """A 64-bit integer (Java's long), even if the value fits into 32 bits."""

    __slots__ = ()


@dataclass(slots=True, eq=False)
class Message:
    """A message.

    The application sets these fields:

    ``body``: its type decides the kind of the JMS message: str is a text message, bytes a bytes message, dict a map message, list a stream
    message, and None a message without a body. ``kind="object"`` marks bytes as a serialized Java object.
    ``properties``: values are bool, int, float or str. An int of at most 32 bits is sent as Java's int, a larger one as long; Byte, Short,
    Long and Float choose another type.
    ``persistent``, ``priority`` (0-9), ``time_to_live_s`` and ``delivery_delay_s``: None means the value of the producer.

    Sending and receiving set ``message_id``, ``destination`` and the times, in ms since the epoch, 0 for none. ``delivery_count`` is
    JMSXDeliveryCount; the first delivery has 1. ``user_id`` is JMSXUserID.
    """

    body: Body = None
    kind: str | None = None
    properties: dict[str, Any] = field(default_factory=dict)
    correlation_id: str | bytes | None = None
    reply_to: Destination | None = None
    type: str | None = None
    group_id: str | None = None
    group_sequence: int = 0
    persistent: bool | None = None
    priority: int | None = None
    time_to_live_s: float | None = None
    delivery_delay_s: float | None = None

    message_id: str | None = None
    destination: Destination | None = None
    timestamp_ms: int = 0
    expiration_ms: int = 0
    delivery_time_ms: int = 0
    delivery_count: int = 1
    user_id: str | None = None
    _acknowledge: Callable[[], None] | None = field(default=None, repr=False)

    @property
    def redelivered(self) -> bool:
        """JMSRedelivered: whether the message may have been delivered before."""
        return self.delivery_count > 1

    def acknowledge(self) -> None:
        """Acknowledge the message (INDIVIDUAL), or all messages that the context has received (CLIENT). Other modes ignore the call."""
        if self._acknowledge is not None:
            self._acknowledge()

    def answer(self, content: Message | Body) -> tuple[Destination, Message]:
        """Return the destination of the reply, and the reply. Raises InvalidDestination if the message has no ``reply_to``."""
        if self.reply_to is None:
            raise InvalidDestination(f"cannot reply to message {self.message_id}: it has no reply_to")
        answer = Message.of(content)
        answer.correlation_id = self.correlation_id or self.message_id
        return self.reply_to, answer

    @classmethod
    def of(cls, content: Message | Body) -> Message:
        """Return ``content`` if it is a message, otherwise a message with this body."""
        return content if isinstance(content, Message) else cls(content)

    @classmethod
    def received(cls, jms: JmsMessage) -> Message:
        """Return the message that a broker delivered."""
        return cls(
            body=_longs(jms.body) if jms.body_kind in ("map", "stream") else jms.body,
            kind=jms.body_kind,
            properties=_longs(jms.properties),
            correlation_id=jms.correlation_id,
            reply_to=destination_of(jms.reply_to, jms.reply_to_kind),
            type=jms.type,
            group_id=jms.group_id,
            group_sequence=jms.group_sequence,
            persistent=jms.delivery_mode == PERSISTENT,
            priority=jms.priority,
            message_id=jms.message_id,
            destination=destination_of(jms.destination, jms.destination_kind),
            timestamp_ms=jms.timestamp_ms,
            expiration_ms=jms.expiration_ms,
            delivery_time_ms=jms.delivery_time_ms,
            delivery_count=jms.delivery_count,
            user_id=jms.user_id,
        )


@dataclass(frozen=True, slots=True)
class SendOptions:
    """The default values of a producer. Raises InvalidInput for a value out of range."""

    persistent: bool = True
    priority: int = DEFAULT_PRIORITY
    time_to_live_s: float = 0.0
    delivery_delay_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.priority <= 9:
            raise InvalidInput(f"invalid priority {self.priority}: it must be from 0 to 9")
        if self.time_to_live_s < 0 or self.delivery_delay_s < 0:
            times = f"time_to_live_s={self.time_to_live_s:g}, delivery_delay_s={self.delivery_delay_s:g}"
            raise InvalidInput(f"{times}: neither may be negative")

    def of(self, message: Message) -> SendOptions:
        """Return the options of one message: its own values, and the defaults for the others."""
        given = (message.persistent, message.priority, message.time_to_live_s, message.delivery_delay_s)
        own = (self.persistent, self.priority, self.time_to_live_s, self.delivery_delay_s)
        if all(each is None for each in given):
            return self
        return SendOptions(*(mine if asked is None else asked for asked, mine in zip(given, own, strict=True)))  # type: ignore[arg-type]


def stamp(message: Message, destination: Destination, options: SendOptions, message_id: str, now_ms: int) -> None:
    """Set the fields that sending sets (Jakarta Messaging 3.1, section 3.4.11)."""
    chosen = options.of(message)
    message.persistent, message.priority = chosen.persistent, chosen.priority
    message.message_id, message.destination, message.timestamp_ms = message_id, destination, now_ms
    message.delivery_time_ms = now_ms + round(chosen.delivery_delay_s * 1000) if chosen.delivery_delay_s else 0
    # The time to live starts when the message is sent, not at its delivery time (section 3.4.13).
    message.expiration_ms = now_ms + max(round(chosen.time_to_live_s * 1000), 1) if chosen.time_to_live_s else 0
    message.delivery_count = 1


def encode(message: Message) -> bytes:
    """Return the encoded AMQP message. Raises InvalidInput for content that JMS does not allow."""
    if message.reply_to is not None:
        require_destination(message.reply_to)
    kind = message.kind or _kind_of(message.body)
    body: Any = message.body
    if isinstance(body, bytearray):
        body = bytes(body)
    elif kind in ("map", "stream"):
        body = _java_numbers(list(body) if isinstance(body, tuple) else body)
    jms = JmsMessage(
        message_id=message.message_id,
        correlation_id=message.correlation_id,
        destination=message.destination.name if message.destination else None,
        destination_kind=message.destination.kind if message.destination else None,
        reply_to=message.reply_to.name if message.reply_to else None,
        reply_to_kind=message.reply_to.kind if message.reply_to else None,
        type=message.type,
        delivery_mode=NON_PERSISTENT if message.persistent is False else PERSISTENT,
        priority=DEFAULT_PRIORITY if message.priority is None else message.priority,
        timestamp_ms=message.timestamp_ms,
        expiration_ms=message.expiration_ms,
        delivery_time_ms=message.delivery_time_ms,
        group_id=message.group_id,
        group_sequence=message.group_sequence,
        user_id=message.user_id,
        properties={_name(name): _property(name, value) for name, value in message.properties.items()},
        body_kind=kind,
        body=body,
    )
    return encode_message(jms)


def _kind_of(body: object) -> str:
    for type_, kind in _KIND_OF_BODY:
        if isinstance(body, type_):
            return kind
    raise InvalidInput(f"invalid type of a body: {type(body).__name__}; use str, bytes, dict, list or None, or convert it with json.dumps")


def _name(name: str) -> str:
    if name in _FIELDS:
        raise InvalidInput(f"property {name} cannot be set as a property; set the field {_FIELDS[name]} of the message")
    if not isinstance(name, str) or not _IDENTIFIER.fullmatch(name) or name.upper() in _RESERVED:
        raise InvalidInput(f"invalid property name {name!r}: it must be a Java identifier and not a reserved word of selectors")
    return name


def _property(name: str, value: Any) -> Any:
    if not isinstance(value, _PROPERTY_TYPES):
        raise InvalidInput(f"property {name} has the invalid type {type(value).__name__}; use bool, int, float, str or None")
    return _java_number(value)


def _longs(value: Any) -> Any:
    """Mark received ints as Long, so that a message that is sent on keeps its types."""
    if type(value) is int:
        return Long(value)
    if isinstance(value, dict):
        return {key: _longs(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_longs(item) for item in value]
    return value


def _java_number(value: Any) -> Any:
    """Return a Python int as Java's int if it fits, otherwise as long. A reader can get an int as long, but not the reverse."""
    if type(value) is Long:
        return int(value)
    if type(value) is not int:
        return value
    if _INT_MIN <= value <= _INT_MAX:
        return Int(value)
    if not -_LONG_MAX - 1 <= value <= _LONG_MAX:
        raise InvalidInput(f"integer {value} is out of range: a long has 64 bits")
    return value


def _java_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _java_numbers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_java_numbers(item) for item in value]
    return _java_number(value)


__all__ = ["Body", "Byte", "Float", "Int", "Message", "SendOptions", "Short"]
