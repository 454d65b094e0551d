"""Messages to a coordinator: declare and discharge (part 4, sections 4.2 and 4.3)."""

from __future__ import annotations

import struct
from typing import Final

from bascule.amqp.codec import Budget, decode, encode, read_descriptor, skip
from bascule.amqp.composite import Composite, dump, load
from bascule.amqp.constructors import BINARY8, DESCRIBED, FALSE, TRUE
from bascule.amqp.errors import DecodeError
from bascule.amqp.limits import PERFORMATIVE_ITEMS_MAX
from bascule.amqp.performatives import Declare, Discharge
from bascule.amqp.types import Described, ULong

_AMQP_VALUE: Final = (0x77, "amqp:amqp-value:*")
#: The messages of Qpid JMS and most other clients: a value with a declare, and a value with a discharge up to the size of its list8.
_DECLARE: Final = b"\x00\x53\x77\x00\x53\x31\x45"
_DISCHARGE: Final = b"\x00\x53\x77\x00\x53\x32\xc0"
#: Bytes of such a discharge besides the id: size and count of the list, binary8 and the size of the id, and fail.
_ID_AT: Final = len(_DISCHARGE) + 4
#: Sections of a message up to its amqp-value: header, two kinds of annotations, properties, and application properties.
_SECTIONS_MAX: Final = 6


def encode_control(control: Declare | Discharge) -> bytes:
    """Return the message with ``control``. ``fail`` is always written, because Artemis does not apply its default of false."""
    value = Described(ULong(control.CODE), [control.txn_id, control.fail]) if isinstance(control, Discharge) else dump(control)
    return encode(Described(ULong(_AMQP_VALUE[0]), value))


def decode_control(payload: bytes) -> Composite:
    """Return the declare or discharge in a message, after any other sections. Raises DecodeError."""
    if payload == _DECLARE:
        return Declare()
    if (discharge := _usual_discharge(payload)) is not None:
        return discharge
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


def _usual_discharge(payload: bytes) -> Discharge | None:
    """Return the discharge in a message with the usual encoding, otherwise None."""
    fail_at = len(payload) - 1
    if fail_at < _ID_AT or not payload.startswith(_DISCHARGE):
        return None
    size, fields, id_code, id_size = payload[_ID_AT - 4], payload[_ID_AT - 3], payload[_ID_AT - 2], payload[_ID_AT - 1]
    whole = size == len(payload) - len(_DISCHARGE) - 1 and fields == 2 and id_code == BINARY8 and id_size == fail_at - _ID_AT
    if not whole or payload[fail_at] not in (TRUE, FALSE):
        return None
    return Discharge(payload[_ID_AT:fail_at], payload[fail_at] == TRUE)


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
