"""Frames in their usual encodings, from bytes to the session: most input of a busy connection."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final

from bascule.amqp import hot
from bascule.amqp.errors import DecodeError, SessionFault
from bascule.amqp.session import Session


def _hot_frame(
    read: Callable[[bytes, int, int], Any], take: Callable[[Session, Any, bytes, int], None]
) -> Callable[[Session, bytes, int, int], bool]:
    """Return a function that handles a frame in its usual encoding from ``position``, or returns False for the general decoder."""

    def take_frame(session: Session, data: bytes, position: int, end: int) -> bool:
        try:
            frame = read(data, position, end)
        except (IndexError, struct.error, DecodeError):
            return False
        if frame is None:
            return False
        try:
            take(session, frame, data, end)
        except SessionFault as fault:
            session.fail(fault)
        return True

    return take_frame


#: By the first bytes of the frame's body.
HOT_FRAMES: Final = {
    b"\x00\x53\x13": _hot_frame(hot.read_flow, Session.on_flow),
    b"\x00\x53\x14": _hot_frame(hot.read_transfer, Session.on_transfer),
    b"\x00\x53\x15": _hot_frame(hot.read_disposition, Session.on_disposition),
}
