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

#: size, data offset in 4-byte words, type, channel
FRAME_HEADER: Final = struct.Struct(">IBBH")
FRAME_HEADER_SIZE: Final = FRAME_HEADER.size
AMQP_FRAME: Final = 0
SASL_FRAME: Final = 1
EMPTY_FRAME: Final = FRAME_HEADER.pack(8, 2, AMQP_FRAME, 0)


def frame(channel: int, body: bytes, kind: int = AMQP_FRAME) -> bytes:
    """Return a frame with an encoded body."""
    return FRAME_HEADER.pack(FRAME_HEADER_SIZE + len(body), 2, kind, channel) + body


def frame_head(channel: int, performative: Composite, payload_size_bytes: int) -> bytes:
    """Return a frame up to its payload."""
    body = encode_composite(performative)
    return FRAME_HEADER.pack(FRAME_HEADER_SIZE + len(body) + payload_size_bytes, 2, AMQP_FRAME, channel) + body


def fitting_frame(channel: int, performative: Composite, size_bytes_max: int) -> bytes:
    """Return a frame within the size limit; properties and the end of an error's description are dropped if needed.

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
        raise FrameTooSmall(f"{performative.SYMBOL} of {len(encoded)} bytes exceeds the peer's max-frame-size of {size_bytes_max}")
    return encoded


def shortened_state(state: Composite, size_bytes_max: int) -> Composite:
    """Return a delivery state without annotations and with a shortened description, to fit the peer's frames."""
    if isinstance(state, TransactionalState):
        room = size_bytes_max - len(encode_composite(dataclasses.replace(state, outcome=None)))
        return dataclasses.replace(state, outcome=shortened_state(state.outcome, room))
    if isinstance(state, Rejected) and state.error is not None:
        return Rejected(_shortened(state.error, size_bytes_max - len(encode_composite(Rejected(Error(state.error.condition))))))
    return dataclasses.replace(state, message_annotations=None) if isinstance(state, Modified) else type(state)()


#: A description of more than 255 bytes has a constructor code and a 4-byte size, and its lists may need wider sizes.
_DESCRIPTION_HEAD_BYTES: Final = 32


def _shortened(error: Error, room_bytes: int) -> Error:
    """Return the error without details, with its description cut to the available room."""
    described = (error.description or "").encode()[: max(room_bytes - _DESCRIPTION_HEAD_BYTES, 0)]
    return Error(error.condition, described.decode(errors="ignore") or None)


def performative_frame(channel: int, performative: Composite, kind: int = AMQP_FRAME) -> bytes:
    """Return a frame without payload."""
    return frame(channel, encode_composite(performative), kind)


class FrameBuffer:
    """Received data that waits for the rest of a frame, or for the next piece.

    The memory is the size of the data, however small the parts are.
    """

    __slots__ = ("_needed_bytes", "kept")

    def __init__(self) -> None:
        self.kept = bytearray()  # the stored data
        self._needed_bytes = 0

    def join(self, data: bytes) -> bytes:
        """Return the stored data and ``data`` joined, or b"" if the frame is incomplete."""
        if not self.kept:
            return data
        self.kept += data
        if len(self.kept) < self._needed_bytes:
            return b""
        data = bytes(self.kept)
        self.kept = bytearray()
        return data

    def keep(self, rest: bytes, needed_bytes: int) -> None:
        """Store data whose first frame is complete with ``needed_bytes``."""
        self.kept += rest
        self._needed_bytes = needed_bytes

    def take(self) -> bytes:
        """Return and remove the stored data, complete or not."""
        data = bytes(self.kept)
        self.kept = bytearray()
        return data

    def clear(self) -> None:
        """Remove the stored data."""
        self.kept = bytearray()
