"""Protocol headers and frames (part 2, sections 2.2 and 2.3)."""

from __future__ import annotations

import dataclasses
import struct
from typing import Final

from bascule.amqp.composite import Composite, encode_composite
from bascule.amqp.errors import FrameTooSmall
from bascule.amqp.performatives import Close, Detach, End, Error, Modified, Open, Rejected, TransactionalState

AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"
TLS_HEADER: Final = b"AMQP\x02\x01\x00\x00"
SASL_HEADER: Final = b"AMQP\x03\x01\x00\x00"
PROTOCOL_HEADER_SIZE: Final = 8

#: size, data offset in words of 4 bytes, type, channel
FRAME_HEADER: Final = struct.Struct(">IBBH")
FRAME_HEADER_SIZE: Final = FRAME_HEADER.size
AMQP_FRAME: Final = 0
SASL_FRAME: Final = 1
EMPTY_FRAME: Final = FRAME_HEADER.pack(8, 2, AMQP_FRAME, 0)


def frame(channel: int, body: bytes, kind: int = AMQP_FRAME) -> bytes:
    """A frame around an encoded body."""
    return FRAME_HEADER.pack(FRAME_HEADER_SIZE + len(body), 2, kind, channel) + body


def frame_head(channel: int, performative: Composite, payload_size_bytes: int) -> bytes:
    """A frame up to its payload."""
    body = encode_composite(performative)
    return FRAME_HEADER.pack(FRAME_HEADER_SIZE + len(body) + payload_size_bytes, 2, AMQP_FRAME, channel) + body


def fitting_frame(channel: int, performative: Composite, size_bytes_max: int) -> bytes:
    """A frame that a peer takes: without properties, and without the end of an error's description, for which it has no room.

    Raises FrameTooSmall.
    """
    encoded = performative_frame(channel, performative)
    if len(encoded) <= size_bytes_max:
        return encoded
    if isinstance(performative, Detach | End | Close) and performative.error is not None:
        error = performative.error
        bare = performative_frame(channel, dataclasses.replace(performative, error=Error(error.condition)))
        shortened = _shortened(error, size_bytes_max - len(bare))
        encoded = performative_frame(channel, dataclasses.replace(performative, error=shortened))
    elif isinstance(performative, Open) and performative.properties:
        properties = dict(performative.properties)
        while properties and len(encoded) > size_bytes_max:
            del properties[max(properties, key=lambda name: len(str(properties[name])))]
            encoded = performative_frame(channel, dataclasses.replace(performative, properties=properties))
    if len(encoded) > size_bytes_max:
        raise FrameTooSmall(f"{performative.SYMBOL} has {len(encoded)} bytes, the peer's max-frame-size is {size_bytes_max}")
    return encoded


def shortened_state(state: Composite, size_bytes_max: int) -> Composite:
    """A delivery state for whose details a peer's frames have no room: without annotations, and with less of a description."""
    if isinstance(state, TransactionalState):
        room = size_bytes_max - len(encode_composite(dataclasses.replace(state, outcome=None)))
        return dataclasses.replace(state, outcome=shortened_state(state.outcome, room))
    if isinstance(state, Rejected) and state.error is not None:
        return Rejected(_shortened(state.error, size_bytes_max - len(encode_composite(Rejected(Error(state.error.condition))))))
    return dataclasses.replace(state, message_annotations=None) if isinstance(state, Modified) else type(state)()


#: A description of more than 255 bytes has a constructor code and four bytes of size, and its lists may need wider sizes, too.
_DESCRIPTION_HEAD_BYTES: Final = 32


def _shortened(error: Error, room_bytes: int) -> Error:
    """The error without details, its description cut to the room that there is."""
    described = (error.description or "").encode()[: max(room_bytes - _DESCRIPTION_HEAD_BYTES, 0)]
    return Error(error.condition, described.decode(errors="ignore") or None)


def performative_frame(channel: int, performative: Composite, kind: int = AMQP_FRAME) -> bytes:
    """A frame without payload."""
    return frame(channel, encode_composite(performative), kind)


class FrameBuffer:
    """Gathers the pieces of a frame that came in several reads. What it keeps costs its bytes and no more, however small the pieces are."""

    __slots__ = ("_kept", "_needed_bytes")

    def __init__(self) -> None:
        self._kept = bytearray()
        self._needed_bytes = 0

    def join(self, data: bytes) -> bytes:
        """What was kept and ``data`` as one, or b"" while the frame is not whole."""
        if not self._kept:
            return data
        self._kept += data
        if len(self._kept) < self._needed_bytes:
            return b""
        data = bytes(self._kept)
        self._kept = bytearray()
        return data

    def keep(self, rest: bytes, needed_bytes: int) -> None:
        """Keep the beginning of what will be whole at ``needed_bytes``."""
        self._kept += rest
        self._needed_bytes = needed_bytes

    @property
    def kept_bytes(self) -> int:
        """What is kept of a frame that is not whole."""
        return len(self._kept)

    @property
    def missing_bytes(self) -> int:
        """What makes the frame whole, 0 where nothing is kept."""
        return max(self._needed_bytes - len(self._kept), 0) if self._kept else 0

    def take(self) -> bytes:
        """Return what was kept, whole or not, and forget it."""
        data = bytes(self._kept)
        self._kept = bytearray()
        return data

    def clear(self) -> None:
        """Forget what was kept."""
        self._kept = bytearray()
