"""Recognises the message with a wanted JMSMessageID in encoded records, without decoding the other messages: no Kafka."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from bascule.amqp.constructors import SMALL_ULONG, ULONG, ULONG0
from bascule.amqp.types import ULong
from bascule.core.errors import BasculeError, InvalidInput
from bascule.jms.ids import AmqpId, amqp_id, message_id_text
from bascule.jms.sections import property_fields_of

#: Characters of a message id: a longer id cannot be in a command line or a URL.
ID_LENGTH_MAX: Final = 4_000
#: Bytes that one search looks at. A search holds the interpreter, and with it the event loop of a broker: 1 MiB takes a millisecond.
SEARCHED_BYTES: Final = 1 << 20
#: The audit cuts values after this many characters (bascule.server.audit).
AUDITED_LENGTH: Final = 1_000
_PREFIX: Final = "ID:"
_SMALL_ULONG_MAX: Final = 255


def has(value: bytes, needle: bytes, start: int = 0, end: int | None = None) -> bool:
    """Return whether ``value[start:end]`` contains a needle. Searches large values in pieces, so that other threads run between them."""
    end = len(value) if end is None else end
    while end - start > SEARCHED_BYTES:
        if value.find(needle, start, min(end, start + SEARCHED_BYTES + len(needle))) >= 0:
            return True
        start += SEARCHED_BYTES
    return value.find(needle, start, end) >= 0


class WantedId:
    """A JMSMessageID as a user writes it: with or without ``ID:``, and with or without the prefix of its AMQP type."""

    __slots__ = ("_ids", "_texts", "needles", "text")

    def __init__(self, text: str) -> None:
        """Take an id as a user writes it. Raises InvalidInput."""
        if not text or len(text) > ID_LENGTH_MAX:
            raise InvalidInput(f"the message id must have 1 to {ID_LENGTH_MAX} characters; it has {len(text)}")
        self.text = text
        try:
            self._ids = frozenset(_forms(text))
            self._texts = frozenset(map(message_id_text, self._ids))
            #: One of these bytes is in each message with the id.
            self.needles = tuple(sorted({needle for each in self._ids for needle in _needles(each)}))
        except UnicodeEncodeError:
            raise InvalidInput(f"message id {text!r:.100} has characters that UTF-8 cannot encode") from None

    def may_be_in(self, value: bytes, start: int = 0, end: int | None = None) -> bool:
        """Return False if no message in ``value[start:end]`` can have the id."""
        return any(has(value, needle, start, end) for needle in self.needles)

    def is_of(self, body: bytes) -> bool:
        """Return whether an AMQP message has the id. A message that cannot be read has none."""
        try:
            return property_fields_of(body)[0] in self._ids
        except (BasculeError, TypeError):  # TypeError: an earlier version accepted ids of any type
            return False

    @property
    def names_one(self) -> bool:
        """Return whether the text can mean one JMSMessageID only."""
        return len(self._texts) == 1

    def is_written(self, message_id: str) -> bool:
        """Return whether a JMSMessageID, as the broker writes it into the audit, is the wanted one."""
        if len(message_id) < AUDITED_LENGTH:
            return message_id in self._texts
        return any(each.startswith(message_id) for each in self._texts)


def _forms(text: str) -> Iterator[AmqpId]:
    """Yield the AMQP ids that a text can mean."""
    yield text
    for each in (text, text if text.startswith(_PREFIX) else _PREFIX + text):
        yield each
        with suppress(InvalidInput):
            yield amqp_id(each)
    if len(text) == len(str(uuid.UUID(int=0))):
        with suppress(ValueError):
            yield uuid.UUID(text)


def _needles(identity: AmqpId) -> Iterator[bytes]:
    if isinstance(identity, str):
        yield identity.encode()
    elif isinstance(identity, uuid.UUID):
        yield identity.bytes
    elif isinstance(identity, ULong):
        yield bytes([ULONG]) + int(identity).to_bytes(8, "big")
        if identity <= _SMALL_ULONG_MAX:
            yield bytes([SMALL_ULONG, identity])
        if not identity:
            yield bytes([ULONG0])
    elif isinstance(identity, bytes):
        yield identity
