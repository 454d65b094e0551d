"""Message and correlation ids: AMQP's four types as the strings of JMS, and back, without loss.

This is the JMS mapping's encoding as Qpid JMS has it: a JMSMessageID starts with ``ID:``, and what is no plain string of that
form says after the prefix what it is (``ID:AMQP_UUID:...``), so that a client may set it as the correlation id of an answer.
"""

from __future__ import annotations

import re
import uuid
from typing import Final

from bascule.amqp.types import ULong
from bascule.core.errors import InvalidInput

#: What AMQP allows as message-id and correlation-id (part 3, section 3.2.11 to 3.2.14).
AmqpId = str | bytes | uuid.UUID | int

_PREFIX: Final = "ID:"
_UUID, _ULONG, _BINARY, _STRING, _NO_PREFIX = "AMQP_UUID:", "AMQP_ULONG:", "AMQP_BINARY:", "AMQP_STRING:", "AMQP_NO_PREFIX:"
_ENCODED: Final = (_UUID, _ULONG, _BINARY, _STRING, _NO_PREFIX)
_ULONG_MAX: Final = (1 << 64) - 1
_UUID_FORM: Final = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")


def message_id_text(value: AmqpId) -> str:
    """The JMSMessageID of an AMQP message-id."""
    if isinstance(value, str) and not value.startswith(_PREFIX):
        return _PREFIX + _NO_PREFIX + value
    return correlation_id_text(value)


def correlation_id_text(value: AmqpId) -> str:
    """The JMSCorrelationID of an AMQP correlation-id."""
    if isinstance(value, str):
        return _PREFIX + _STRING + value if value.startswith(_ENCODED, len(_PREFIX)) and value.startswith(_PREFIX) else value
    if isinstance(value, uuid.UUID):
        return f"{_PREFIX}{_UUID}{value}"
    if isinstance(value, int):
        return f"{_PREFIX}{_ULONG}{value:d}"
    return _PREFIX + _BINARY + value.hex().upper()


def amqp_id(text: str) -> AmqpId:
    """The AMQP id that a JMS id stands for. Raises InvalidInput where the id says what it is and is not."""
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
    raise InvalidInput(f"message id {text[:100]!r}: what follows {kind} is none")
