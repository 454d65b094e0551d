"""Conversion of a Kafka record to a JMS message: destination, properties, body."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bascule.amqp.types import Int
from bascule.core.destination import Routing
from bascule.core.errors import BadRecord
from bascule.core.kafka_records import KafkaRecord
from bascule.core.masking import NO_MASK, PropertyMask
from bascule.jms.errors import HeaderMissing
from bascule.jms.message import PERSISTENT, JmsMessage
from bascule.jms.record import BODY_HEADER, PREFIX, body_from_value, destination, from_kafka_headers, map_from_json, untyped_name

_DESTINATION_KIND = {Routing.ANYCAST: "queue", Routing.MULTICAST: "topic"}
_ROUTING_OF_KIND = {
    "queue": Routing.ANYCAST, "temporary-queue": Routing.ANYCAST, "topic": Routing.MULTICAST, "temporary-topic": Routing.MULTICAST,
}  # fmt: skip
_PLACEHOLDER = re.compile(r"\$\{(topic|header:([^}]*))\}")
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_$]")


def message_of(
    record: KafkaRecord,
    body: str,
    target: str,
    routing: Routing,
    *,
    reply_to: str = "",
    key_as: str = "none",
    mask: PropertyMask = NO_MASK,
) -> tuple[JmsMessage, str, Routing]:
    """Return the message of a record, its address and its routing.

    ``body`` is the kind of the body: ``text``, ``bytes`` or ``map``. ``target`` and ``reply_to`` (JMSReplyTo; empty = as in the record's
    headers) are templates with ``${topic}`` and ``${header:NAME}``; a scheme such as ``queue://`` in them takes precedence over
    ``routing``. ``key_as`` is where the record's key is stored in addition to ``kafka_key``: ``correlation-id``, ``group-id``,
    ``property:NAME`` or ``none``. Errors do not show the values of properties that ``mask`` covers.
    Raises BadRecord or InvalidInput for a record that cannot be converted.
    """
    message = from_kafka_headers(record.headers, mask)
    message.body_kind, message.body = _BODIES[body](record)
    address, kind = destination(_filled(target, record))
    if kind is not None:
        routing = _ROUTING_OF_KIND[kind]
    message.destination, message.destination_kind = address, kind or _DESTINATION_KIND[routing]
    if reply_to:
        with suppress(HeaderMissing):  # a record without that header expects no reply
            message.reply_to, kind = destination(_filled(reply_to, record))
            message.reply_to_kind = kind or _DESTINATION_KIND[Routing.ANYCAST]
    message.delivery_mode, message.delivery_count, message.delivery_time_ms = PERSISTENT, 1, 0
    message.timestamp_ms = message.timestamp_ms or max(record.timestamp_ms, 0)
    message.message_id = message.message_id or f"ID:kafka:{record.topic}:{record.partition}:{record.offset}"
    _add_properties(message, record, key_as)
    return message, address, routing


def _filled(template: str, record: KafkaRecord) -> str:
    """Fill a template with ``${topic}`` and ``${header:NAME}`` of a record. Raises HeaderMissing, BadRecord."""

    def value(found: re.Match[str]) -> str:
        name = found[2]
        if name is None:
            return record.topic
        octets = next((octets for header, octets in reversed(record.headers) if header == name), None)
        if not octets:
            raise HeaderMissing(f"the record has no header {name!r}, which the template {template!r} uses")
        return _text(octets, f"header {name!r}")

    return _PLACEHOLDER.sub(value, template)


def _add_properties(message: JmsMessage, record: KafkaRecord, key_as: str) -> None:
    properties = message.properties
    for name, octets in record.headers:
        if not name.startswith(PREFIX):
            _add_text(properties, property_name(name), octets or b"")
    properties["kafka_topic"] = record.topic
    properties["kafka_partition"] = Int(record.partition)
    properties["kafka_offset"] = record.offset
    properties["kafka_timestamp"] = record.timestamp_ms
    if record.value is None:
        properties["kafka_tombstone"] = True
    if record.key is None:
        return
    _add_text(properties, "kafka_key", record.key)
    if key_as == "correlation-id":
        message.correlation_id = _text(record.key, "the key")
    elif key_as == "group-id":
        message.group_id = _text(record.key, "the key")
    elif key_as.startswith("property:"):
        _add_text(properties, key_as.removeprefix("property:"), record.key)


def property_name(header: str) -> str:
    """Return a header's name as the name of a JMS property: a Java identifier that JMS does not reserve."""
    name = _NOT_IN_A_NAME.sub("_", header)
    if not name or name[0].isdigit() or name.upper().startswith("JMS"):
        name = f"kafka_{name}"
    return name


def property_of(header: str) -> str:
    """Return the name of the property that a header of a record becomes."""
    return untyped_name(header.removeprefix(PREFIX)) if header.startswith(PREFIX) else property_name(header)


def _add_text(properties: dict[str, Any], name: str, octets: bytes) -> None:
    # JMS has no property type for bytes, so bytes that are not text become base64, under a name with a suffix.
    try:
        properties[name] = octets.decode()
    except UnicodeDecodeError:
        properties[f"{name}_base64"] = base64.b64encode(octets).decode()


def _text(octets: bytes, what: str) -> str:
    try:
        return octets.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(f"{what} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _text_body(record: KafkaRecord) -> tuple[str, Any]:
    return "text", None if record.value is None else body_from_value("text", record.value)


def _bytes_body(record: KafkaRecord) -> tuple[str, Any]:
    return "bytes", record.value or b""


def _map_body(record: KafkaRecord) -> tuple[str, Any]:
    if record.value is None:
        return "map", {}
    if (BODY_HEADER, b"map") in record.headers:
        # Written by a divert: the items have their types.
        return "map", map_from_json(record.value)
    try:
        content = json.loads(record.value)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"the value is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise BadRecord("the value is not a JSON object")
    for name, item in content.items():
        if isinstance(item, dict | list):
            raise BadRecord(f"item {name!r} is nested; a JMS map message allows only plain values")
    return "map", content


_BODIES: dict[str, Callable[[KafkaRecord], tuple[str, Any]]] = {"text": _text_body, "bytes": _bytes_body, "map": _map_body}
