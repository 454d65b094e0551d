"""Pieces of a client's input and output: after each of them the connection looks at the clock, and other clients may have their turns."""

from __future__ import annotations

from typing import Final

#: Bytes of input before the connection is open. The input behind a login waits for its outcome.
OPENING_PIECE_BYTES: Final = 4 << 10
#: Bytes of a WebSocket's input: hundreds of small frames, or of headers of its request, take some milliseconds.
WEBSOCKET_PIECE_BYTES: Final = 4 << 10
#: Steps of received frames: 43 attaches, or 128 declares, take about 15 ms.
INPUT_STEPS_PER_PIECE: Final = 128
#: Deliveries of one disposition: rejecting a message takes up to 0.1 ms, with many annotations 1 ms.
DELIVERIES_PER_PIECE: Final = 20
#: Bytes of multi-frame messages sent to a client: in frames of 512 bytes this takes about 2 ms.
FRAMES_PER_PIECE_BYTES: Final = 256 << 10
