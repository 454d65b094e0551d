"""A message as it goes on to another address: the sender's sections, with annotations that say where it was and why it left."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bascule.amqp.codec import decode
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
    malformed,
    places,
    section_bytes,
)

#: As Artemis names them.
ORIGINAL_ADDRESS: Final = "x-opt-ORIG-ADDRESS"
ORIGINAL_QUEUE: Final = "x-opt-ORIG-QUEUE"
ORIGINAL_ROUTING: Final = "x-opt-ORIG-ROUTING-TYPE"  # 0 a queue, 1 a topic
ORIGINAL_MESSAGE_ID: Final = "x-opt-ORIG-MESSAGE-ID"
#: Bascule's own: why it was moved, when (ms since the epoch), after how many failed deliveries, and when it had to expire.
REASON: Final = "x-opt-bascule-reason"
MOVED_AT: Final = "x-opt-bascule-moved-at"
DELIVERIES: Final = "x-opt-bascule-deliveries"
ORIGINAL_EXPIRY: Final = "x-opt-ORIG-EXPIRATION"

_OWN: Final = (
    ORIGINAL_ADDRESS, ORIGINAL_QUEUE, ORIGINAL_ROUTING, ORIGINAL_MESSAGE_ID, REASON, MOVED_AT, DELIVERIES, ORIGINAL_EXPIRY,
)  # fmt: skip
_NOT_KEPT: Final = (*_OWN, DELIVERY_TIME.decode(), DELIVERY_DELAY.decode())
_MESSAGE_ID, _ABSOLUTE_EXPIRY = 0, 8  # fields of the properties section (AMQP 1.0 part 3, section 3.2.4)


def annotated(body: bytes, annotations: Mapping[str, Any]) -> bytes:
    """The message with other annotations, and without what would make it expire or wait again. Raises MalformedMessage.

    Annotations of an earlier move and the delivery time give way; without ``annotations`` it is as before the first move.
    """
    found = {section: (start, end) for section, start, end in places(body)}
    section = HEADER
    try:
        header = body[slice(*found[HEADER])] if HEADER in found else b""
        durable, priority, *_ = header_fields(header) if header else (False, 4)
        section = MESSAGE_ANNOTATIONS
        kept: dict[Any, Any] = dict(decode(body, found[section][0])[0]) if section in found else {}
        section = PROPERTIES
        properties = list(decode(body, found[section][0])[0]) if section in found else []
    except MALFORMED as error:
        raise malformed(section, found[section][0], error) from None
    kept = {name: value for name, value in kept.items() if name not in _NOT_KEPT}
    kept |= {Symbol(name): value for name, value in annotations.items() if value is not None}
    if annotations and properties and properties[_MESSAGE_ID] is not None:
        kept[Symbol(ORIGINAL_MESSAGE_ID)] = properties[_MESSAGE_ID]
    if len(properties) > _ABSOLUTE_EXPIRY:
        properties[_ABSOLUTE_EXPIRY] = None
    parts = [header_bytes(durable, priority)]
    if kept:
        parts.append(section_bytes(MESSAGE_ANNOTATIONS, kept))
    if properties:
        parts.append(section_bytes(PROPERTIES, properties))
    replaced = (HEADER, DELIVERY_ANNOTATIONS, MESSAGE_ANNOTATIONS, PROPERTIES)
    rest = max((end for section, (_, end) in found.items() if section in replaced), default=0)
    return b"".join((*parts, body[rest:]))
