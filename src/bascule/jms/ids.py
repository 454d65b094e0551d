"""Message and correlation ids: conversion between AMQP's four types and the strings of JMS, without loss.

The encoding is the JMS mapping's, as in Qpid JMS: a JMSMessageID starts with ``ID:``, and an id of another type or form has its type after
the prefix (``ID:AMQP_UUID:...``), so that a client can set it as the correlation id of a reply.
"""

from __future__ import annotations

import re
import uuid
from typing import Final

from bascule.amqp.types import ULong
from bascule.core.errors import InvalidInput

#: The types of message-id and correlation-id in AMQP (part 3, sections 3.2.11 to 3.2.14).
AmqpId = str | bytes | uuid.UUID | int

_PREFIX: Final = "ID:"
_UUID, _ULONG, _BINARY, _STRING, _NO_PREFIX = "AMQP_UUID:", "AMQP_ULONG:", "AMQP_BINARY:", "AMQP_STRING:", "AMQP_NO_PREFIX:"
_ENCODED: Final = (_UUID, _ULONG, _BINARY, _STRING, _NO_PREFIX)
_ULONG_MAX: Final = (1 << 64) - 1
_UUID_FORM: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def message_id_text(value: AmqpId) -> str:
    """Return the JMSMessageID of an AMQP message-id."""
    if isinstance(value, str) and not value.startswith(_PREFIX):
        return _PREFIX + _NO_PREFIX + value
    return correlation_id_text(value)


def correlation_id_text(value: AmqpId) -> str:
    """Return the JMSCorrelationID of an AMQP correlation-id."""
    if isinstance(value, str):
        return _PREFIX + _STRING + value if value.startswith(_ENCODED, len(_PREFIX)) and value.startswith(_PREFIX) else value
    if isinstance(value, uuid.UUID):
        return f"{_PREFIX}{_UUID}{value}"
    if isinstance(value, int):
        return f"{_PREFIX}{_ULONG}{value:d}"
    return _PREFIX + _BINARY + value.hex().upper()


def amqp_id(text: str) -> AmqpId:
    """Return the AMQP id of a JMS id. Raises InvalidInput if the id has a type prefix but no valid value of this type."""
    if not text.startswith(_PREFIX):
        return text
    kind = next((kind for kind in _ENCODED if text.startswith(kind, len(_PREFIX))), "")
    content = text[len(_PREFIX) + len(kind) :]
    try:
        if kind == _UUID and _UUID_FORM.fullmatch(content):
            return uuid.UUID(content)
        if kind == _ULONG and content.isdecimal() and int(content) <= _ULONG_MAX:
            return ULong(content)
        if kind == _BINARY and not content.strip("0123456789abcdefABCDEF"):
            return bytes.fromhex(content)
    except ValueError:
        pass
    else:
        if kind in ("", _STRING, _NO_PREFIX):
            return content if kind else text
    raise InvalidInput(f"invalid message id {text[:100]!r}: the text after {kind} is not a valid value")
