"""JMSXUserID in an encoded message: the field ``user-id`` of its properties section (AMQP 1.0 part 3, section 3.2.4)."""

from __future__ import annotations

from typing import Final

from bascule.amqp.codec import encode, skip
from bascule.amqp.constructors import LIST8, LIST32, NULL
from bascule.jms.annotate import compound, section_of
from bascule.jms.sections import APPLICATION_PROPERTIES, MALFORMED, PROPERTIES, items, malformed, places

_USER_ID: Final = 1  # the place of the field, behind the message id
_NULL: Final = bytes([NULL])


def with_user_id(body: bytes, user: bytes | None) -> bytes:
    """Return the message with this user id, or without one. All other bytes stay as they are. Raises MalformedMessage."""
    begin = 0  # of the section
    for section, start, end in places(body):
        if section == PROPERTIES:
            try:
                return b"".join((body[:begin], section_of(PROPERTIES, _replaced(body, start, end, user)), body[end:]))
            except MALFORMED as error:
                raise malformed(section, start, error) from None
        if section >= APPLICATION_PROPERTIES:
            break
        begin = end
    if not user:
        return body
    return b"".join((body[:begin], section_of(PROPERTIES, compound(LIST8, LIST32, 2, _NULL + encode(user))), body[begin:]))


def _replaced(data: bytes, start: int, end: int, user: bytes | None) -> bytes:
    """Return the list of properties at ``start`` with this user id."""
    count, first = items(data, start)
    message_id, after = (_NULL, first) if not count else (data[first : skip(data, first)], skip(data, first))
    if count > _USER_ID:
        after = skip(data, after)
    if after > end:
        raise ValueError(f"its fields end at byte {after}, but the section ends at {end}")
    fields = b"".join((message_id, _NULL if not user else encode(user), data[after:end]))
    return compound(LIST8, LIST32, max(count, _USER_ID + 1), fields)
