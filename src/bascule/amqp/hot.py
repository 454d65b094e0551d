"""Transfer, disposition and flow without the general codec: they are nearly all the frames of a busy connection.

A reader takes the position after the descriptor ``00 53 code`` and the frame's end, and returns None where the encoding is
not one of the usual: the caller then decodes in general, which also finds out what is wrong with it.
"""

from __future__ import annotations

import struct
from typing import Any, Final, NamedTuple

from bascule.amqp.codec import (
    BINARY8,
    DESCRIBED,
    FALSE,
    LIST8,
    LIST32,
    NULL,
    SMALL_UINT,
    SMALL_ULONG,
    TRUE,
    UINT,
    UINT0,
)
from bascule.amqp.performatives import ACCEPTED, RELEASED, Accepted, Composite, Disposition, Flow, Released, TransactionalState, Transfer
from bascule.amqp.performatives import encode_composite as _encode

FLOW, TRANSFER, DISPOSITION = Flow.CODE, Transfer.CODE, Disposition.CODE

_U32 = struct.Struct(">I")
_PAIR32 = struct.Struct(">II")
_u32_from = _U32.unpack_from


class TransferFrame(NamedTuple):
    """What a session needs of a transfer."""

    handle: int
    delivery_id: int | None
    delivery_tag: bytes | None
    message_format: int | None
    settled: bool
    more: bool
    state: Any
    resume: bool
    aborted: bool
    payload: int  # where it begins


def transfer_frame(transfer: Transfer, payload: int) -> TransferFrame:
    """The same from the general decoder."""
    return TransferFrame(
        transfer.handle, transfer.delivery_id, transfer.delivery_tag, transfer.message_format, bool(transfer.settled),
        transfer.more, transfer.state, transfer.resume, transfer.aborted, payload,
    )  # fmt: skip


def _bounds(data: bytes, position: int, end: int) -> tuple[int, int, int] | None:
    """(field count, first field, end of the list)."""
    code = data[position]
    if code == LIST8:
        start, stop, count = position + 3, position + 2 + data[position + 1], data[position + 2]
    elif code == LIST32:
        size, count = _PAIR32.unpack_from(data, position + 1)
        start, stop = position + 9, position + 5 + size
    else:
        return None
    return (count, start, stop) if stop <= end else None


def _txn_state(data: bytes, position: int) -> tuple[TransactionalState, int] | None:
    """A transactional state of a short id and accepted or no outcome, as JMS clients send it."""
    if data[position : position + 4] != b"\x00\x53\x34\xc0" or data[position + 6] != BINARY8:
        return None
    stop = position + 5 + data[position + 4]
    count, size = data[position + 5], data[position + 7]
    after = position + 8 + size
    txn_id = data[position + 8 : after]
    if count == 1 and after == stop:
        return TransactionalState(txn_id), stop
    if count == 2 and after + 4 == stop and data[after:stop] == _ACCEPTED:
        return TransactionalState(txn_id, ACCEPTED), stop
    return None


def read_transfer(data: bytes, position: int, end: int) -> TransferFrame | None:
    """A transfer. Raises IndexError or struct.error where it is cut off."""
    bounds = _bounds(data, position, end)
    if bounds is None:
        return None
    count, p, stop = bounds
    if not 0 < count < 12:
        return None
    delivery_id = tag = message_format = state = None
    settled = more = resume = aborted = False

    code = data[p]
    if code == SMALL_UINT:
        handle = data[p + 1]
        p += 2
    elif code == UINT0:
        handle = 0
        p += 1
    elif code == UINT:
        handle = _u32_from(data, p + 1)[0]
        p += 5
    else:
        return None
    if count > 1:
        code = data[p]
        if code == UINT:
            delivery_id = _u32_from(data, p + 1)[0]
            p += 5
        elif code == SMALL_UINT:
            delivery_id = data[p + 1]
            p += 2
        elif code == UINT0:
            delivery_id = 0
            p += 1
        elif code == NULL:
            p += 1
        else:
            return None
    if count > 2:
        code = data[p]
        if code == BINARY8:
            after = p + 2 + data[p + 1]
            tag = data[p + 2 : after]
            p = after
        elif code == NULL:
            p += 1
        else:
            return None
    if count > 3:
        code = data[p]
        if code == UINT0:
            message_format = 0
            p += 1
        elif code == NULL:
            p += 1
        elif code == UINT:
            message_format = _u32_from(data, p + 1)[0]
            p += 5
        else:
            return None
    if count > 4:
        code = data[p]
        settled = code == TRUE
        if not settled and code != FALSE and code != NULL:
            return None
        p += 1
    if count > 5:
        code = data[p]
        more = code == TRUE
        if not more and code != FALSE and code != NULL:
            return None
        p += 1
    if count > 6:
        if data[p] != NULL:
            return None
        p += 1
    if count > 7:
        if data[p] == DESCRIBED:
            found = _txn_state(data, p)
            if found is None:
                return None
            state, p = found
        elif data[p] == NULL:
            p += 1
        else:
            return None
    if count > 8:
        flags = data[p:stop]
        if len(flags) != count - 8 or flags.strip(b"\x40\x41\x42"):
            return None
        resume = flags[0] == TRUE
        aborted = count > 9 and flags[1] == TRUE
        p = stop
    if p != stop:
        return None
    return TransferFrame(handle, delivery_id, tag, message_format, settled, more, state, resume, aborted, p)


def read_disposition(data: bytes, position: int, end: int) -> Disposition | None:
    """A disposition. Raises IndexError or struct.error where it is cut off."""
    bounds = _bounds(data, position, end)
    if bounds is None:
        return None
    count, p, stop = bounds
    if not 2 <= count <= 6 or data[p] not in _BOOLEANS:
        return None
    role = data[p] == TRUE
    numbers: list[int | None] = []
    p += 1
    for _ in range(min(count, 3) - 1):
        code = data[p]
        if code == UINT:
            numbers.append(_u32_from(data, p + 1)[0])
            p += 5
        elif code == SMALL_UINT:
            numbers.append(data[p + 1])
            p += 2
        elif code == UINT0:
            numbers.append(0)
            p += 1
        elif code == NULL:
            numbers.append(None)
            p += 1
        else:
            return None
    first = numbers[0]
    if first is None:
        return None
    settled, state = False, None
    if count > 3:
        settled = data[p] == TRUE
        if not settled and data[p] != FALSE and data[p] != NULL:
            return None
        p += 1
    if count > 4:
        if data[p] == NULL:
            p += 1
        else:
            state = _OUTCOMES.get(data[p : p + 4])
            if state is not None:
                p += 4
            else:
                found = _txn_state(data, p)
                if found is None:
                    return None
                state, p = found
    if count > 5:
        p += 1  # batchable: a hint that we do not need
    if p != stop:
        return None
    return Disposition(role, first, numbers[1] if len(numbers) > 1 else None, settled, state)


def read_flow(data: bytes, position: int, end: int) -> Flow | None:
    """A flow. Raises IndexError or struct.error where it is cut off."""
    bounds = _bounds(data, position, end)
    if bounds is None:
        return None
    count, p, stop = bounds
    if not 4 <= count <= 10:
        return None
    values: list[Any] = []
    for _ in range(min(count, 8)):
        code = data[p]
        if code == UINT:
            values.append(_u32_from(data, p + 1)[0])
            p += 5
        elif code == SMALL_UINT:
            values.append(data[p + 1])
            p += 2
        elif code == UINT0:
            values.append(0)
            p += 1
        elif code == NULL:
            values.append(None)
            p += 1
        else:
            return None
    if None in values[1:4]:
        return None
    for _ in range(count - 8):
        if data[p] not in _BOOLEANS:
            return None
        values.append(data[p] == TRUE)
        p += 1
    return Flow(*values) if p == stop else None


# --- writing ---------------------------------------------------------------------------------------------------------------------

_ACCEPTED: Final = b"\x00\x53\x24\x45"
_RELEASED: Final = b"\x00\x53\x26\x45"
_OUTCOMES: Final[dict[bytes, Composite]] = {_ACCEPTED: ACCEPTED, _RELEASED: RELEASED}
_BOOLEANS: Final = frozenset({TRUE, FALSE})

#: frame header; descriptor; list8: size, count; handle; delivery-id; delivery-tag; message-format; settled; more
_TRANSFER = struct.Struct(">IBBHBBBBBBBIBIBBIBIBB")
TRANSFER_HEAD_SIZE: Final = _TRANSFER.size
_pack_transfer = _TRANSFER.pack
_TRANSFER_LIST_SIZE: Final = TRANSFER_HEAD_SIZE - 13  # what follows the list's size byte
#: frame header; descriptor; list8: size, count; role; first; last; settled
_DISPOSITION = struct.Struct(">IBBHBBBBBBBBIBIB")
#: frame header; descriptor; list8: size, count; next-incoming-id; incoming-window; next-outgoing-id; outgoing-window
_SESSION_FLOW = struct.Struct(">IBBHBBBBBBBIBIBIBI")
#: the same; handle; delivery-count; link-credit; available; drain; echo
_LINK_FLOW = struct.Struct(">IBBHBBBBBBBIBIBIBIBIBIBIBIBB")


def transfer_head(channel: int, handle: int, delivery_id: int, message_format: int, settled: bool, more: bool, size_bytes: int) -> bytes:
    """A transfer frame up to its payload of ``size_bytes``. The delivery's id is its tag, too."""
    return _pack_transfer(
        TRANSFER_HEAD_SIZE + size_bytes, 2, 0, channel, DESCRIBED, SMALL_ULONG, TRANSFER, LIST8, _TRANSFER_LIST_SIZE, 6,
        UINT, handle, UINT, delivery_id, BINARY8, 4, delivery_id, UINT, message_format,
        TRUE if settled else FALSE, TRUE if more else FALSE,
    )  # fmt: skip


def state_bytes(state: Composite) -> bytes:
    """A delivery state's encoding."""
    kind = type(state)
    if kind is Accepted:
        return _ACCEPTED
    if kind is Released:
        return _RELEASED
    return _encode(state)


def disposition(channel: int, receiver: bool, first: int, last: int, settled: bool, state: bytes) -> bytes:
    """A disposition frame about the deliveries ``first`` to ``last``; ``state`` as it is encoded, empty for none."""
    if not state:
        state = bytes([NULL])
    size = _DISPOSITION.size + len(state)
    if size - 13 > 255:
        body = bytes([TRUE if receiver else FALSE, UINT]) + _U32.pack(first) + bytes([UINT]) + _U32.pack(last)
        body += bytes([TRUE if settled else FALSE]) + state
        head = bytes([DESCRIBED, SMALL_ULONG, DISPOSITION, LIST32]) + _PAIR32.pack(len(body) + 4, 5)
        return struct.pack(">IBBH", 8 + len(head) + len(body), 2, 0, channel) + head + body
    return _DISPOSITION.pack(
        size, 2, 0, channel, DESCRIBED, SMALL_ULONG, DISPOSITION, LIST8, size - 13, 5,
        TRUE if receiver else FALSE, UINT, first, UINT, last, TRUE if settled else FALSE,
    ) + state  # fmt: skip


def session_flow(channel: int, next_incoming_id: int, incoming_window: int, next_outgoing_id: int, outgoing_window: int) -> bytes:
    """A flow frame of a session alone."""
    size = _SESSION_FLOW.size
    return _SESSION_FLOW.pack(
        size, 2, 0, channel, DESCRIBED, SMALL_ULONG, FLOW, LIST8, size - 13, 4,
        UINT, next_incoming_id, UINT, incoming_window, UINT, next_outgoing_id, UINT, outgoing_window,
    )  # fmt: skip


def link_flow(
    channel: int, windows: tuple[int, int, int, int], handle: int, delivery_count: int, credit: int, available: int, drain: bool, echo: bool
) -> bytes:
    """A flow frame of a link; ``windows`` are the four session fields of session_flow."""
    size = _LINK_FLOW.size
    return _LINK_FLOW.pack(
        size, 2, 0, channel, DESCRIBED, SMALL_ULONG, FLOW, LIST8, size - 13, 10,
        UINT, windows[0], UINT, windows[1], UINT, windows[2], UINT, windows[3],
        UINT, handle, UINT, delivery_count, UINT, credit, UINT, available, TRUE if drain else FALSE, TRUE if echo else FALSE,
    )  # fmt: skip
