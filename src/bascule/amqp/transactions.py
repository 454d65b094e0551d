"""Messages to a coordinator: declare and discharge (part 4, sections 4.2 and 4.3)."""

from __future__ import annotations

import struct
from typing import Final

from bascule.amqp.codec import Budget, decode, encode, read_descriptor, skip
from bascule.amqp.composite import Composite, dump, load
from bascule.amqp.constructors import DESCRIBED
from bascule.amqp.errors import DecodeError
from bascule.amqp.limits import PERFORMATIVE_ITEMS_MAX
from bascule.amqp.performatives import Declare, Discharge
from bascule.amqp.types import Described, ULong

_AMQP_VALUE: Final = (0x77, "amqp:amqp-value:*")
#: Sections of a message up to its amqp-value: header, two kinds of annotations, properties, and application properties.
_SECTIONS_MAX: Final = 6


def encode_control(control: Declare | Discharge) -> bytes:
    """Return the message with ``control``. ``fail`` is always written, because Artemis does not apply its default of false."""
    value = Described(ULong(control.CODE), [control.txn_id, control.fail]) if isinstance(control, Discharge) else dump(control)
    return encode(Described(ULong(_AMQP_VALUE[0]), value))


def decode_control(payload: bytes) -> Composite:
    """Return the declare or discharge in a message, after any other sections. Raises DecodeError."""
    try:
        start = _value_of(payload)
    except (IndexError, struct.error, ValueError):
        start = -1
    if start >= 0:
        value, _ = decode(payload, start, Budget(PERFORMATIVE_ITEMS_MAX))
        control = load(value)
        if isinstance(control, Declare | Discharge):
            return control
    raise DecodeError("a coordinator link accepts only declare and discharge")


def _value_of(payload: bytes) -> int:
    """Return the position of the value in the section amqp-value, -1 if there is none. Raises IndexError, struct.error, ValueError."""
    position = 0
    for _ in range(_SECTIONS_MAX):
        if payload[position] != DESCRIBED:
            break
        descriptor, start = read_descriptor(payload, position + 1)
        if descriptor in _AMQP_VALUE:
            return start
        position = skip(payload, start)
    return -1
