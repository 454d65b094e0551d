"""The ingress engine: Kafka records in, records of ``bascule.ingress`` out. Pure: no Spark, no Kafka, no clock.

What it writes are journal records (epoch and sequence 0) with one SEND entry; the broker journals them under its own epoch. The Kafka
header ``unbound`` says what becomes of a message whose address has neither a queue nor a subscription: ``keep`` or ``drop``.
"""

from __future__ import annotations

import base64
import enum
import json
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from bascule.amqp.types import Int
from bascule.core import crash
from bascule.core.destination import Routing
from bascule.core.errors import BasculeError
from bascule.core.topics import MESSAGE_BYTES_MAX
from bascule.jms.message import PERSISTENT, JmsMessage, encode_message
from bascule.jms.record import BODY_HEADER, PREFIX, body_from_value, destination, from_kafka_headers, map_from_json
from bascule.journal.records import Kind, Send, SendFlag, Source, encode_record, send_entry
from bascule.kafka.admin import Denied, TopicMissing
from bascule.kafka.transactional import Headers, Output
from bascule.pipelines.mapping import ORIGIN_HEADER, BadRecord, error_headers, said_by
from bascule.pipelines.spec import Ingress

UNBOUND_HEADER = "unbound"
INGRESS_FLAGS = SendFlag.DURABLE | SendFlag.FROM_KAFKA | SendFlag.SOURCE
_DESTINATION_KIND = {Routing.ANYCAST: "queue", Routing.MULTICAST: "topic"}
_ROUTING_OF_KIND = {
    "queue": Routing.ANYCAST, "temporary-queue": Routing.ANYCAST, "topic": Routing.MULTICAST, "temporary-topic": Routing.MULTICAST,
}  # fmt: skip
_PLACEHOLDER = re.compile(r"\$\{(topic|header:([^}]*))\}")
#: The journal has two bytes for the length of an address; nobody needs a hundredth of that.
ADDRESS_BYTES_MAX = 1024
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9_$]")


class KafkaRecord(NamedTuple):
    """A record as it was read."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class IngressViolation(enum.StrEnum):
    """Rules of an ingress that a test may break."""

    OWN_RECORDS_TAKEN = "an ingress takes records that its own bridge wrote"


class IngressEngine:
    """Kafka records to JMS messages for one ingress."""

    def __init__(
        self,
        ingress: Ingress,
        bridge_id: str,
        ingress_topic: str,
        dead_letter_topic: str | None,
        message_bytes_max: int = MESSAGE_BYTES_MAX,
        *,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """Without a dead-letter topic a record that cannot be carried raises BadRecord, also one that makes too large a message."""
        self._ingress = ingress
        self._takes_own = IngressViolation.OWN_RECORDS_TAKEN in violations
        self._own = (ORIGIN_HEADER, bridge_id.encode())
        self._ingress_topic = ingress_topic
        self._dead_letter_topic = dead_letter_topic
        self._message_bytes_max = message_bytes_max
        self._headers: Headers = [(UNBOUND_HEADER, ingress.unbound.encode())]

    def output(self, record: KafkaRecord) -> Output | None:
        """The record for the broker, or for the dead-letter topic; None for one that this bridge wrote itself."""
        if self._own in record.headers and not self._takes_own:
            return None
        try:
            value = self._encoded(record)
        except (BasculeError, ValueError) as error:
            return self.dead_letter(record, "VALUE_CONVERTER", error)
        return Output(self._ingress_topic, None, value, self._headers, 0)

    def dead_letter(self, record: KafkaRecord, stage: str, error: Exception) -> Output:
        """The record as it was, for the dead-letter topic. Raises BadRecord where there is none: the pipeline stops."""
        if isinstance(error, Denied | TopicMissing):
            raise error  # no record's fault: they all go to the broker's topic
        crash.point("ingress.dead_letter")
        if self._dead_letter_topic is None:
            raise BadRecord(said_by(error)) from None
        said = error_headers(self._ingress.name, record.topic, record.partition, record.offset, stage, error)
        headers = [(name, value or b"") for name, value in record.headers]
        return Output(self._dead_letter_topic, record.key, record.value or b"", [*headers, self._own, *said], record.timestamp_ms)

    def _encoded(self, record: KafkaRecord) -> bytes:
        ingress = self._ingress
        message = from_kafka_headers(record.headers)
        message.body_kind, message.body = _BODIES[ingress.body](record)
        address, routing = self._direct(message, record)
        message.delivery_mode, message.delivery_count, message.delivery_time_ms = PERSISTENT, 1, 0
        message.timestamp_ms = message.timestamp_ms or max(record.timestamp_ms, 0)
        message.message_id = message.message_id or f"ID:kafka:{record.topic}:{record.partition}:{record.offset}"
        _add_properties(message, record, ingress.key_as)
        flags = INGRESS_FLAGS | (SendFlag.GROUPED if message.group_id else 0)
        send = Send(
            flags, routing, message.priority, message.timestamp_ms, message.expiration_ms, 0, address, (), (), (),
            Source(record.topic, record.partition, record.offset), encode_message(message),
        )  # fmt: skip
        return ingress_record(send, self._message_bytes_max)

    def _direct(self, message: JmsMessage, record: KafkaRecord) -> tuple[str, Routing]:
        """Sets where the message goes and where an answer to it does. A header that says ``queue://`` or so decides the routing."""
        ingress = self._ingress
        address, kind = destination(_filled(ingress.target, record))
        routing = ingress.routing if kind is None else _ROUTING_OF_KIND[kind]
        message.destination, message.destination_kind = address, kind or _DESTINATION_KIND[routing]
        if ingress.reply_to:
            with suppress(HeaderMissing):  # whoever names no place for an answer wants none
                message.reply_to, kind = destination(_filled(ingress.reply_to, record))
                message.reply_to_kind = kind or _DESTINATION_KIND[Routing.ANYCAST]
        return address, routing


def ingress_record(send: Send, message_bytes_max: int = MESSAGE_BYTES_MAX) -> bytes:
    """A record of ``bascule.ingress``. Raises BadRecord for a message that the broker would have no room for in its journal."""
    if not 0 < len(send.address.encode()) <= ADDRESS_BYTES_MAX:
        raise BadRecord(f"an address has 1 to {ADDRESS_BYTES_MAX} bytes, {send.address!r:.60} does not")
    if len(send.body) > message_bytes_max:
        raise BadRecord(f"a message of {len(send.body)} bytes; it may have {message_bytes_max}")
    return encode_record(Kind.DATA, 0, 0, send_entry(send))


class HeaderMissing(BadRecord):
    """A header that a setting names is not there."""


def _filled(template: str, record: KafkaRecord) -> str:
    """A template with ``${topic}`` and ``${header:NAME}`` of a record. Raises HeaderMissing, BadRecord."""

    def value(found: re.Match[str]) -> str:
        name = found[2]
        if name is None:
            return record.topic
        octets = next((octets for header, octets in reversed(record.headers) if header == name), None)
        if not octets:
            raise HeaderMissing(f"the record has no header {name!r}, from which {template!r} is filled in")
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
    """A header's name as a JMS property's: a Java identifier outside the names that JMS keeps for itself."""
    name = _NOT_IN_A_NAME.sub("_", header)
    if not name or name[0].isdigit() or name.upper().startswith("JMS"):
        name = f"kafka_{name}"
    return name


def _add_text(properties: dict[str, Any], name: str, octets: bytes) -> None:
    # JMS has no property of bytes: what is no text is carried as base64, under a name that says so.
    try:
        properties[name] = octets.decode()
    except UnicodeDecodeError:
        properties[f"{name}_base64"] = base64.b64encode(octets).decode()


def _text(octets: bytes, what: str) -> str:
    try:
        return octets.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(f"{what} is no UTF-8 text: {error.reason} at byte {error.start}") from None


def _text_body(record: KafkaRecord) -> tuple[str, Any]:
    return "text", None if record.value is None else body_from_value("text", record.value)


def _bytes_body(record: KafkaRecord) -> tuple[str, Any]:
    return "bytes", record.value or b""


def _map_body(record: KafkaRecord) -> tuple[str, Any]:
    if record.value is None:
        return "map", {}
    if (BODY_HEADER, b"map") in record.headers:
        # Written by a divert: the items say their types.
        return "map", map_from_json(record.value)
    try:
        content = json.loads(record.value)
    except (ValueError, RecursionError) as error:
        raise BadRecord(f"the value is no JSON that is of use: {error}") from None
    if not isinstance(content, dict):
        raise BadRecord("the value is no JSON object")
    for name, item in content.items():
        if isinstance(item, dict | list):
            raise BadRecord(f"item {name!r} is nested; a JMS map holds plain values only")
    return "map", content


_BODIES: dict[str, Callable[[KafkaRecord], tuple[str, Any]]] = {"text": _text_body, "bytes": _bytes_body, "map": _map_body}
