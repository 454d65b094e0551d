"""Access of a selector to the header fields and properties of a message, on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from bascule.amqp.codec import decode, skip
from bascule.amqp.types import Int
from bascule.jms.ids import AmqpId, correlation_id_text, message_id_text
from bascule.jms.sections import (
    APPLICATION_PROPERTIES,
    HEADER,
    MALFORMED,
    NO_HEADER,
    PROPERTIES,
    header_fields,
    keys,
    malformed,
    places,
    property_fields,
    signed_sequence,
)  # fmt: skip

#: Number of properties found in one step.
_PROPERTIES_PER_STEP: Final = 3


class MessageLookup:
    """Reads the values of a selector's identifiers from a message, on demand."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self._places: dict[int, int] | None = None
        self._fields: tuple[Any, ...] | None = None
        self._properties: dict[bytes, int] | None = None

    def __call__(self, name: str) -> object:
        """Return a header field or property. Raises MalformedMessage, DecodeError."""
        field = _HEADER_FIELDS.get(name)
        return field(self) if field is not None else self.application_property(name)

    @property
    def steps(self) -> int:
        """The cost of finding the properties, in steps of about a microsecond."""
        return len(self._properties or ()) // _PROPERTIES_PER_STEP

    def start(self, section: int) -> int | None:
        """Return the position of a section's value, None if the section is missing."""
        if self._places is None:
            found = {}
            for code, start, _ in places(self.data):
                if code > APPLICATION_PROPERTIES:
                    break  # a body may have a thousand sections
                found[code] = start
            self._places = found  # only if all can be read
        return self._places.get(section)

    def header(self) -> tuple[bool, int, int, bool, int]:
        """Return the fields of the header. Raises MalformedMessage."""
        start = self.start(HEADER)
        if start is None:
            return NO_HEADER
        try:
            return header_fields(self.data[start : skip(self.data, start)])
        except MALFORMED as error:
            raise malformed(HEADER, start, error) from None

    def field(self, index: int) -> Any:
        """Return a field of the properties section. Raises MalformedMessage."""
        if self._fields is None:
            start = self.start(PROPERTIES)
            self._fields = property_fields(self.data, start)
        return self._fields[index]

    def application_property(self, name: str) -> object:
        """Return an application property, or None if its type is unknown to selectors. Raises MalformedMessage, DecodeError."""
        start = self.start(APPLICATION_PROPERTIES)
        if start is None:
            return None
        try:
            if self._properties is None:
                self._properties = dict(keys(self.data, start))
            position = self._properties.get(name.encode())
            if position is None:
                return None
            value, _ = decode(self.data, position)
        except MALFORMED as error:
            raise malformed(APPLICATION_PROPERTIES, start, error) from None
        return value if isinstance(value, bool | int | float | str) else None


def _id(index: int, text: Callable[[AmqpId], str]) -> Callable[[MessageLookup], object]:
    def read(lookup: MessageLookup) -> object:
        value = lookup.field(index)
        return None if value is None else text(value)

    return read


def _user(lookup: MessageLookup) -> object:
    value = lookup.field(1)
    return value.decode(errors="replace") if isinstance(value, bytes) else None


def _group_sequence(lookup: MessageLookup) -> object:
    value = lookup.field(11)
    return None if value is None else signed_sequence(value)


_HEADER_FIELDS: Final[dict[str, Callable[[MessageLookup], object]]] = {
    "JMSDeliveryMode": lambda lookup: "PERSISTENT" if lookup.header()[0] else "NON_PERSISTENT",
    "JMSPriority": lambda lookup: Int(lookup.header()[1]),
    "JMSMessageID": _id(0, message_id_text),
    "JMSTimestamp": lambda lookup: int(lookup.field(9) or 0),
    "JMSCorrelationID": _id(5, correlation_id_text),
    "JMSType": lambda lookup: lookup.field(3),
    "JMSXUserID": _user,
    "JMSXGroupID": lambda lookup: lookup.field(10),
    "JMSXGroupSeq": _group_sequence,
    "JMSXDeliveryCount": lambda lookup: Int(lookup.header()[4] + 1),
    "JMS_AMQP_REPLY_TO_GROUP_ID": lambda lookup: lookup.field(12),
}
#: The identifiers of selectors that are not application properties.
HEADER_FIELDS: Final = frozenset(_HEADER_FIELDS)


def selector_lookup(data: bytes) -> MessageLookup:
    """Return a lookup of the header fields and properties of a message, with their types (bytes are not a selector value).

    Values are decoded on demand. The lookup raises MalformedMessage if the sections are invalid, and DecodeError if a value is; neither
    happens for a message that ``scan`` has accepted.
    """
    return MessageLookup(data)
