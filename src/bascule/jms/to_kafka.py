"""Conversion of a JMS message to a Kafka record: topic, key, value, headers."""

from __future__ import annotations

import re
from functools import lru_cache
from string import Template

from bascule.core.errors import BadRecord
from bascule.core.kafka_records import Headers, Output
from bascule.jms.message import JmsMessage, decode_message
from bascule.jms.octets_to_kafka import EncodedRecord, direct
from bascule.jms.record import kafka_headers, record_value

_PROPERTY = "property:"
#: Names with two leading underscores belong to Kafka.
_LEGAL_TOPIC = re.compile(r"(?!__)[A-Za-z0-9._-]{1,249}")


@lru_cache(maxsize=1024)
def target_topic(template: str, address: str, source: str = "#", own: frozenset[str] = frozenset()) -> str:
    """Return the Kafka topic for a message of ``address``, which the pattern ``source`` matches.

    Raises BadRecord for a name that Kafka does not allow, and for one of Bascule's ``own`` topics.
    """
    topic = Template(template).safe_substitute(address=address, rest=rest_of(source, address))
    if not _LEGAL_TOPIC.fullmatch(topic) or topic in {".", ".."}:
        raise BadRecord(f"{topic!r} is not a valid name of a Kafka topic")
    if topic in own:
        raise BadRecord(f"{topic!r} is one of Bascule's own topics")
    return topic


def rest_of(source: str, address: str) -> str:
    """Return the words of an address that match the ``#`` at the end of a pattern; "" if the pattern has none there.

    >>> rest_of("kafka.reply.#", "kafka.reply.rates.eu")
    'rates.eu'
    """
    *before, last = source.split(".")
    return ".".join(address.split(".")[len(before) :]) if last == "#" else ""


def record_key(choice: str, message: JmsMessage) -> bytes | None:
    """Return the record key chosen by the divert, a property's value as in its header; None if the message does not have it."""
    match choice:
        case "none":
            return None
        case "message-id":
            return _octets(message.message_id)
        case "correlation-id":
            return _octets(message.correlation_id)
        case "group-id":
            return _octets(message.group_id)
    name = choice.removeprefix(_PROPERTY)
    if message.properties.get(name) is None:
        return None
    return kafka_headers(JmsMessage(properties={name: message.properties[name]}))[-1][1]


def _octets(value: str | bytes | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def text_of(value: object) -> str:
    """Return a property's value as text; booleans as JMS writes them."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def record_of(body: bytes, topic: str, key: str, marks: Headers, timestamp_ms: int) -> Output:
    """Return the Kafka record of an AMQP message. ``marks`` are Bascule's headers; ``timestamp_ms`` is used if the message has no time.

    Raises InvalidInput if the bytes are not an AMQP message or have values that no header can represent.
    """
    short = direct(body)
    if short is not None:
        return Output(topic, _short_key(key, short), short.value, [*short.headers, *marks], short.timestamp_ms or timestamp_ms)
    message = decode_message(body)
    headers: Headers = [*kafka_headers(message), *marks]
    return Output(topic, record_key(key, message), record_value(message), headers, message.timestamp_ms or timestamp_ms)


def _short_key(choice: str, short: EncodedRecord) -> bytes | None:
    if choice.startswith(_PROPERTY):
        found = short.properties.get(choice.removeprefix(_PROPERTY).encode())
        return None if found is None else found[1]
    by_choice = {"message-id": short.message_id, "correlation-id": short.correlation_id, "group-id": short.group_id}
    return by_choice.get(choice)
