"""Received frames. Frames in their usual encodings go from bytes to the session: most input of a busy connection."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from bascule.amqp import frames, hot
from bascule.amqp.dispositions import take_disposition
from bascule.amqp.errors import FRAMING_ERROR, ConnectionFault, DecodeError, SessionFault
from bascule.amqp.session import Session
from bascule.amqp.states import HEADER_DUE, ConnectionState

if TYPE_CHECKING:
    from bascule.amqp.connection import Connection

#: Enum member of the hot path as a global: an attribute lookup on the class costs as much as a call.
_OPENED: Final = ConnectionState.OPENED
_AMQP_FRAME, _FRAME_HEADER_SIZE, _frame_header_from = frames.AMQP_FRAME, frames.FRAME_HEADER_SIZE, frames.FRAME_HEADER.unpack_from
#: Steps of a frame that the general decoder reads, besides the step of every frame, and its bytes for one more step. The payload of a
#: transfer is not decoded.
_OTHER_FRAME_STEPS: Final = 2
_BYTES_PER_STEP: Final = 1024
_TRANSFER: Final = b"\x00\x53\x14"
#: Reads the fields of a frame from a position; returns None, or raises one of _UNUSUAL, if the general decoder must read the frame.
Read = Callable[[bytes, int, int], Any]
#: Handles the fields of a frame, whose payload ends at a position.
Take = Callable[[Session, Any, bytes, int], None]

_UNUSUAL: Final = (IndexError, struct.error, DecodeError)
#: By the first bytes of the frame's body.
_HOT_FRAMES: Final[dict[bytes, tuple[Read, Take]]] = {
    b"\x00\x53\x13": (hot.read_flow, Session.on_flow),
    _TRANSFER: (hot.read_transfer, Session.on_transfer),
    b"\x00\x53\x15": (hot.read_disposition, take_disposition),
}


def take_frames(connection: Connection, data: bytes, position: int) -> int:
    """Handle the complete frames from ``position``, at most those of one piece of input; return the end of the last one.

    Raises ConnectionFault.
    """
    size, sessions = len(data), connection.sessions
    while size - position >= _FRAME_HEADER_SIZE:
        if connection.steps_left <= 0:
            connection.unfinished = connection.continue_input
            break
        connection.steps_left -= 1
        length, offset, kind, channel = _frame_header_from(data, position)
        if length > connection.frame_limit:
            raise ConnectionFault(FRAMING_ERROR, f"frame of {length} bytes exceeds the limit of {connection.frame_limit}")
        if offset < 2 or length < offset << 2:
            breach = f"frame of {length} bytes has its body at byte {offset << 2}; the body must begin within the frame, at 8 or later"
            raise ConnectionFault(FRAMING_ERROR, breach)
        end = position + length
        if end > size:
            connection.needed_bytes = length
            return position
        start = position + (offset << 2)
        position = end
        if kind == _AMQP_FRAME and connection.state is _OPENED:
            # Handle transfer, flow and disposition in their usual encodings here; the general decoder handles the rest.
            hot_frame, session = _HOT_FRAMES.get(data[start : start + 3]), sessions.get(channel)
            if hot_frame is not None and session is not None:
                read, take = hot_frame
                try:
                    frame = read(data, start + 3, end)
                except _UNUSUAL:
                    frame = None
                if frame is not None:
                    try:
                        take(session, frame, data, end)
                    except SessionFault as fault:
                        session.fail(fault)
                    if connection.unfinished is None:
                        continue
                    break
        connection.steps_left -= _OTHER_FRAME_STEPS
        if data[start : start + 3] != _TRANSFER:
            connection.steps_left -= length // _BYTES_PER_STEP
        connection.take_frame(data[start:end], kind, channel)
        if connection.closed or connection.state in HEADER_DUE or connection.login_check is not None:
            return position
        if connection.unfinished is not None:
            break
    connection.needed_bytes = _FRAME_HEADER_SIZE
    return position
