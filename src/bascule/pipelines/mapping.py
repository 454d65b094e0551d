"""JMS message to Kafka record: topic, key, value, headers."""

from __future__ import annotations

import re
from string import Template

from bascule.core.errors import BasculeError
from bascule.jms.message import JmsMessage
from bascule.jms.record import kafka_headers, record_value
from bascule.kafka.transactional import Headers, Output

#: The bridge that wrote a record: an ingress of the same bridge leaves it out.
ORIGIN_HEADER = "bascule.origin"
#: epoch-sequence-index of the journal: what the audit compares.
ID_HEADER = "bascule.id"
DIVERT_HEADER = "bascule.divert"
_LEGAL_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}")


class BadRecord(BasculeError):
    """A message or record that cannot be carried, and why."""


def target_topic(template: str, address: str) -> str:
    """The Kafka topic for a message of ``address``. Raises BadRecord for a name that Kafka does not allow."""
    topic = Template(template).safe_substitute(address=address)
    if not _LEGAL_TOPIC.fullmatch(topic) or topic in {".", ".."}:
        raise BadRecord(f"{topic!r} is no name for a Kafka topic")
    return topic


def record_key(choice: str, message: JmsMessage) -> bytes | None:
    """The record key by the divert's choice; None where the message has no such thing."""
    value: object
    match choice:
        case "none":
            return None
        case "message-id":
            value = message.message_id
        case "correlation-id":
            value = message.correlation_id
        case "group-id":
            value = message.group_id
        case _:
            value = message.properties.get(choice.removeprefix("property:"))
    if value is None:
        return None
    return bytes(value) if isinstance(value, bytes | bytearray | memoryview) else text_of(value).encode()


def text_of(value: object) -> str:
    """A property's value as text; booleans as JMS writes them."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def record_of(message: JmsMessage, topic: str, key: str, marks: Headers, timestamp_ms: int) -> Output:
    """The Kafka record of a message. ``marks`` are Bascule's own headers; ``timestamp_ms`` is used where the message has none."""
    return Output(
        topic, record_key(key, message), record_value(message), [*kafka_headers(message), *marks], message.timestamp_ms or timestamp_ms
    )


def error_headers(
    pipeline: str, topic: str, partition: int, offset: int, stage: str, error: BaseException
) -> Headers:
    """Why a record is in the dead-letter topic, under the names of Kafka Connect."""
    said = {
        "topic": topic,
        "partition": str(partition),
        "offset": str(offset),
        "connector.name": pipeline,
        "task.id": str(partition),
        "stage": stage,
        "exception.class.name": type(error).__name__,
        "exception.message": str(error),
    }
    return [(f"__connect.errors.{name}", value.encode()) for name, value in said.items()]
