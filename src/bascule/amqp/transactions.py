"""Messages to a coordinator: declare and discharge (part 4, sections 4.2 and 4.3)."""

from __future__ import annotations

from typing import Final

from bascule.amqp.codec import decode, encode
from bascule.amqp.composite import Composite, dump, load
from bascule.amqp.errors import DecodeError
from bascule.amqp.performatives import Declare, Discharge
from bascule.amqp.types import Described, ULong

_AMQP_VALUE: Final = (0x77, "amqp:amqp-value:*")


def encode_control(control: Declare | Discharge) -> bytes:
    """Return the message with ``control``. ``fail`` is always written, because Artemis does not apply its default of false."""
    value = Described(ULong(control.CODE), [control.txn_id, control.fail]) if isinstance(control, Discharge) else dump(control)
    return encode(Described(ULong(_AMQP_VALUE[0]), value))


def decode_control(payload: bytes) -> Composite:
    """Return the declare or discharge in a message, after any sections. Raises DecodeError."""
    position = 0
    while position < len(payload):
        section, position = decode(payload, position)
        if type(section) is Described and section.descriptor in _AMQP_VALUE:
            control = load(section.value)
            if isinstance(control, Declare | Discharge):
                return control
            break
    raise DecodeError("a coordinator link accepts only declare and discharge")
