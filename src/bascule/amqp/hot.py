"""Transfer, disposition and flow without the general codec: these are nearly all frames of a busy connection.

A reader gets the position after the descriptor ``00 53 code`` and the frame's end. If the encoding is not one of the usual ones, it
returns None or raises IndexError or struct.error, and the caller uses the general decoder, which also reports errors.
The part of a frame that repeats from message to message (settled, state, flags) is decoded once by the general decoder and cached.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar, cast

from bascule.amqp.codec import Budget, decode
from bascule.amqp.composite import Composite, load
from bascule.amqp.composite import encode_composite as _encode
from bascule.amqp.constructors import BINARY8, DESCRIBED, FALSE, LIST8, LIST32, NULL, SMALL_UINT, SMALL_ULONG, TRUE, UINT, UINT0
from bascule.amqp.errors import DecodeError
from bascule.amqp.performatives import Accepted, Declared, Disposition, Flow, Released, TransactionalState, Transfer
from bascule.amqp.types import Described, UInt, ULong
from bascule.core import caches
from bascule.core.caches import PeerCache

FLOW, TRANSFER, DISPOSITION = Flow.CODE, Transfer.CODE, Disposition.CODE

_U32 = struct.Struct(">I")
_PAIR32 = struct.Struct(">II")
_u32_from, _pair32_from = _U32.unpack_from, _PAIR32.unpack_from

#: Maximum number of cached frame tails: each transaction adds one or two, used by a few frames only.
_TAILS_REMEMBERED: Final = 256
_TAIL_SIZE_BYTES_MAX: Final = 255
#: Maximum number of items in a cached frame tail, over all nested values. An array of 255 items may have four bytes. Transfers and
#: dispositions of clients have fewer than ten, also with the error of a rejection.
_TAIL_ITEMS_MAX: Final = 64
#: Maximum size of a cached frame tail with its decoded values.
_TAIL_ENTRY_BYTES: Final = 8192


class TransferFrame(NamedTuple):
    """The fields of a transfer that a session needs; on the fast path, a plain tuple in the same order."""

    handle: int
    delivery_id: int | None
    delivery_tag: bytes | None
    payload: int  # where the payload begins
    tail: TransferTail


class TransferTail(NamedTuple):
    """The fields of a transfer from message-format on."""

    fields: int  # number of fields of the transfer
    message_format: int
    settled: bool
    more: bool
    state: Any
    resume: bool
    aborted: bool
    whole: bool  # a message in one frame, without more, resume or abort


#: A plain tuple, because creating a named tuple takes as long as the rest of a transfer.
TransferTuple = tuple[int, int | None, bytes | None, int, TransferTail]


class DispositionFrame(NamedTuple):
    """The fields of a disposition that a session needs; on the fast path, a plain tuple in the same order."""

    by_receiver: bool
    first: int
    last: int
    settled: bool
    state: Any


DispositionTuple = tuple[bool, int, int, bool, Any]


def disposition_frame(disposition: Disposition) -> DispositionFrame:
    """Return the fields of a disposition decoded by the general decoder."""
    last = disposition.first if disposition.last is None else disposition.last
    return DispositionFrame(disposition.role, disposition.first, last, disposition.settled, disposition.state)


def transfer_frame(transfer: Transfer, payload: int) -> TransferFrame:
    """Return the fields of a transfer decoded by the general decoder."""
    return TransferFrame(transfer.handle, transfer.delivery_id, transfer.delivery_tag, payload, _tail_of(transfer, 0))


def _tail_of(transfer: Transfer, fields: int) -> TransferTail:
    return TransferTail(
        fields, transfer.message_format or 0, bool(transfer.settled), transfer.more, transfer.state, transfer.resume, transfer.aborted,
        not (transfer.more or transfer.resume or transfer.aborted),
    )  # fmt: skip


T = TypeVar("T")


#: The state of a delivery in a transaction, up to its list8: size and count of the list, and binary8 with the size of the id follow.
_TRANSACTIONAL: Final = b"\x00\x53\x34\xc0"
_TO_ID: Final = len(_TRANSACTIONAL) + 4


def _transaction_id_in(octets: bytes) -> tuple[int, int] | None:
    """Return where the transaction id in a frame tail begins and ends; None if there is none, or its encoding is not the usual one."""
    at = octets.find(_TRANSACTIONAL)
    start = at + _TO_ID
    if at < 0 or start > len(octets) or octets[start - 2] != BINARY8:
        return None
    end = start + octets[start - 1]
    return (start, end) if end <= len(octets) else None


class _Tails(dict[bytes, T]):
    """A cache of frame tails by their bytes; a missing tail is decoded.

    The tails of different transactions differ only in the id: the general decoder reads one of them, and the others get their own id.
    """

    def __init__(self, read: Callable[[bytes], T], state: Callable[[T], Any], with_state: Callable[[T, Any], T]) -> None:
        super().__init__()
        self._read = read
        self._state = state
        self._with_state = with_state
        self._shapes: dict[bytes, T] = {}  # tails of transactions, by their bytes without the id
        caches.add(PeerCache(self._count, _TAIL_ENTRY_BYTES, self._forget))

    def __missing__(self, octets: bytes) -> T:
        if len(octets) > _TAIL_SIZE_BYTES_MAX:
            raise DecodeError("frame tail is too long for the fast path")
        if self._count() >= _TAILS_REMEMBERED:
            self._forget()
        place = _transaction_id_in(octets)
        tail = self[octets] = self._read(octets) if place is None else self._read_in_transaction(octets, *place)
        return tail

    def _read_in_transaction(self, octets: bytes, start: int, end: int) -> T:
        shape, txn_id = octets[:start] + octets[end:], octets[start:end]
        known = self._shapes.get(shape)
        if known is not None:
            return self._with_state(known, TransactionalState(txn_id, self._state(known).outcome))
        tail = self._read(octets)
        state = self._state(tail)
        if type(state) is TransactionalState and state.txn_id == txn_id:
            self._shapes[shape] = tail
        return tail

    def _count(self) -> int:
        return len(self) + len(self._shapes)

    def _forget(self) -> None:
        self.clear()
        self._shapes.clear()


#: The fields of a disposition from settled on: the number of all fields, settled, and the state.
_DispositionTail = tuple[int, bool, Any]


def _read_transfer_tail(octets: bytes) -> TransferTail:
    fields = _values([UInt(0), None, None], octets)
    return _tail_of(cast(Transfer, load(Described(ULong(TRANSFER), fields))), len(fields))


def _read_disposition_tail(octets: bytes) -> _DispositionTail:
    fields = _values([False, UInt(0), None], octets)
    disposition = cast(Disposition, load(Described(ULong(DISPOSITION), fields)))
    return len(fields), disposition.settled, disposition.state


def _values(values: list[Any], octets: bytes) -> list[Any]:
    """Return ``values`` and the values encoded in ``octets``. Raises DecodeError."""
    position, budget = 0, Budget(_TAIL_ITEMS_MAX)
    while position < len(octets):
        value, position = decode(octets, position, budget)
        values.append(value)
    return values


def _transfer_state(tail: TransferTail) -> Any:
    return tail.state


def _transfer_with(tail: TransferTail, state: Any) -> TransferTail:
    return tail._replace(state=state)


def _disposition_state(tail: _DispositionTail) -> Any:
    return tail[2]


def _disposition_with(tail: _DispositionTail, state: Any) -> _DispositionTail:
    return tail[0], tail[1], state


_transfer_tails = _Tails(_read_transfer_tail, _transfer_state, _transfer_with)
_disposition_tails = _Tails(_read_disposition_tail, _disposition_state, _disposition_with)

#: list8: size, count; handle by its code; delivery-id; size of the delivery-tag
_handle0_from = struct.Struct(">xBBxBIBB").unpack_from
_handle8_from = struct.Struct(">xBBxBBIBB").unpack_from


def read_transfer(data: bytes, position: int, end: int) -> TransferTuple | None:
    """Return a transfer with a delivery id and a tag, as TransferFrame."""
    if data[position] != LIST8:
        return _read_transfer(data, position, end)
    if data[position + 3] == UINT0:
        size, fields, id_code, delivery_id, tag_code, tag_size = _handle0_from(data, position)
        handle, tag_at = 0, position + 11
    else:
        size, fields, handle, id_code, delivery_id, tag_code, tag_size = _handle8_from(data, position)
        if data[position + 3] != SMALL_UINT:
            return _read_transfer(data, position, end)
        tag_at = position + 12
    if id_code != UINT:
        return _read_transfer(data, position, end)
    stop, tail_at = position + 2 + size, tag_at + tag_size
    if tag_code != BINARY8 or not tail_at <= stop <= end:
        return None
    tail = _transfer_tails[data[tail_at:stop]]
    return (handle, delivery_id, data[tag_at:tail_at], stop, tail) if tail[0] == fields else None


def _read_transfer(data: bytes, position: int, end: int) -> TransferTuple | None:
    """Return the transfer in any mixture of encodings, as in the first deliveries of a session and deliveries with a state."""
    if data[position] == LIST8:
        size, fields = data[position + 1], data[position + 2]
        stop, position = position + 2 + size, position + 3
    elif data[position] == LIST32:  # Qpid JMS writes transfers with a state so
        size, fields = _pair32_from(data, position + 1)
        stop, position = position + 5 + size, position + 9
    else:
        return None
    code = data[position]
    if code == SMALL_UINT:
        handle = data[position + 1]
        position += 2
    elif code == UINT0:
        handle = 0
        position += 1
    elif code == UINT:
        handle = _u32_from(data, position + 1)[0]
        position += 5
    else:
        return None
    code = data[position]
    if code == UINT:
        delivery_id = _u32_from(data, position + 1)[0]
        position += 5
    elif code == SMALL_UINT:
        delivery_id = data[position + 1]
        position += 2
    elif code == UINT0:
        delivery_id = 0
        position += 1
    else:
        return None
    tail_at = position + 2 + data[position + 1]
    if data[position] != BINARY8 or not tail_at <= stop <= end:
        return None
    tail = _transfer_tails[data[tail_at:stop]]
    return (handle, delivery_id, data[position + 2 : tail_at], stop, tail) if tail[0] == fields else None


def read_disposition(data: bytes, position: int, end: int) -> DispositionTuple | None:
    """Return a disposition for one delivery or a range, as DispositionFrame."""
    if data[position] == LIST8:
        stop, fields, role = position + 2 + data[position + 1], data[position + 2], data[position + 3]
        position += 4
    elif data[position] == LIST32:  # Qpid JMS writes dispositions with a transactional state so
        size, fields = _pair32_from(data, position + 1)
        stop, role = position + 5 + size, data[position + 9]
        position += 10
    else:
        return None
    code = data[position]
    if code == UINT:
        first = _u32_from(data, position + 1)[0]
        position += 5
    elif code == SMALL_UINT:
        first = data[position + 1]
        position += 2
    elif code == UINT0:
        first = 0
        position += 1
    else:
        return None
    code = data[position]
    if code == UINT:
        last = _u32_from(data, position + 1)[0]
        position += 5
    elif code == SMALL_UINT:
        last = data[position + 1]
        position += 2
    elif code == UINT0:
        last = 0
        position += 1
    elif code == NULL:
        last = first
        position += 1
    else:
        return None
    if role not in _BOOLEANS or not position <= stop <= end:
        return None
    count, settled, state = _disposition_tails[data[position:stop]]
    return (role == TRUE, first, last, settled, state) if count == fields else None


def read_flow(data: bytes, position: int, end: int) -> Flow | None:
    """Return a flow without properties."""
    if data[position] != LIST8:
        return None
    p, stop, count = position + 3, position + 2 + data[position + 1], data[position + 2]
    if stop > end or not 4 <= count <= 10:
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
        if data[p] != NULL and data[p] not in _BOOLEANS:
            return None
        values.append(data[p] == TRUE)
        p += 1
    return Flow(*values) if p == stop else None


# --- writing ---------------------------------------------------------------------------------------------------------------------

_ACCEPTED: Final = b"\x00\x53\x24\x45"
_RELEASED: Final = b"\x00\x53\x26\x45"
_DECLARED: Final = b"\x00\x53\x33\xc0"
#: A transaction id whose state fits a list8; those of the broker are shorter.
_SHORT_ID_BYTES_MAX: Final = 128
_BOOLEANS: Final = frozenset({TRUE, FALSE})

#: frame header; descriptor; list8: size, count; handle; delivery-id; delivery-tag; message-format; settled; more
_TRANSFER = struct.Struct(">IBBHBBBBBBBIBIBBIBIBB")
TRANSFER_HEAD_SIZE: Final = _TRANSFER.size
_pack_transfer = _TRANSFER.pack
_TRANSFER_LIST_SIZE: Final = TRANSFER_HEAD_SIZE - 13  # the size after the list's size byte
#: The same frame as far as it changes from message to message: frame size; delivery_start; delivery-id; TAG_START; delivery-id as tag;
#: SETTLED or UNSETTLED, which also say that the message is complete and has format 0.
_DELIVERY = struct.Struct(">I16sI2sI7s")
pack_delivery = _DELIVERY.pack
_DELIVERY_START_SIZE: Final = 16
TAG_START: Final = bytes([BINARY8, 4])
UNSETTLED: Final = bytes([UINT, 0, 0, 0, 0, FALSE, FALSE])
SETTLED: Final = bytes([UINT, 0, 0, 0, 0, TRUE, FALSE])
#: frame header; descriptor; list8: size, count; role; first; last; settled
_DISPOSITION = struct.Struct(">IBBHBBBBBBBBIBIB")
#: Maximum size of a disposition without its state: the wide form of a list.
DISPOSITION_HEAD_SIZE: Final = _DISPOSITION.size + 6
#: frame header; descriptor; list8: size, count; next-incoming-id; incoming-window; next-outgoing-id; outgoing-window
_SESSION_FLOW = struct.Struct(">IBBHBBBBBBBIBIBIBI")
#: the same; handle; delivery-count; link-credit; available; drain; echo
_LINK_FLOW = struct.Struct(">IBBHBBBBBBBIBIBIBIBIBIBIBIBB")


def transfer_head(channel: int, handle: int, delivery_id: int, message_format: int, settled: bool, more: bool, size_bytes: int) -> bytes:
    """Return a transfer frame up to its payload of ``size_bytes``. The delivery id is also the tag."""
    return _pack_transfer(
        TRANSFER_HEAD_SIZE + size_bytes, 2, 0, channel, DESCRIBED, SMALL_ULONG, TRANSFER, LIST8, _TRANSFER_LIST_SIZE, 6,
        UINT, handle, UINT, delivery_id, BINARY8, 4, delivery_id, UINT, message_format,
        TRUE if settled else FALSE, TRUE if more else FALSE,
    )  # fmt: skip


def delivery_start(channel: int, handle: int) -> bytes:
    """Return the bytes between frame size and delivery id, which are the same for all messages of a link."""
    return transfer_head(channel, handle, 0, 0, False, False, 0)[_U32.size : _U32.size + _DELIVERY_START_SIZE]


def state_bytes(state: Composite) -> bytes:
    """Return the encoding of a delivery state."""
    kind = type(state)
    if kind is Accepted:
        return _ACCEPTED
    if kind is Released:
        return _RELEASED
    if isinstance(state, TransactionalState) and type(state.outcome) is Accepted and len(state.txn_id) <= _SHORT_ID_BYTES_MAX:
        return _with_transaction(_TRANSACTIONAL, 2, state.txn_id, _ACCEPTED)
    if isinstance(state, Declared) and len(state.txn_id) <= _SHORT_ID_BYTES_MAX:
        return _with_transaction(_DECLARED, 1, state.txn_id, b"")
    return _encode(state)


def _with_transaction(start: bytes, fields: int, txn_id: bytes, outcome: bytes) -> bytes:
    size = len(txn_id)
    return start + bytes([3 + size + len(outcome), fields, BINARY8, size]) + txn_id + outcome


def disposition(channel: int, receiver: bool, first: int, last: int, settled: bool, state: bytes) -> bytes:
    """Return a disposition frame for the deliveries ``first`` to ``last``; ``state`` is encoded, empty for none."""
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
    """Return a flow frame of a session only."""
    size = _SESSION_FLOW.size
    return _SESSION_FLOW.pack(
        size, 2, 0, channel, DESCRIBED, SMALL_ULONG, FLOW, LIST8, size - 13, 4,
        UINT, next_incoming_id, UINT, incoming_window, UINT, next_outgoing_id, UINT, outgoing_window,
    )  # fmt: skip


def link_flow(
    channel: int, windows: tuple[int, int, int, int], handle: int, delivery_count: int, credit: int, available: int, drain: bool, echo: bool
) -> bytes:
    """Return a flow frame of a link; ``windows`` are the four session fields of session_flow."""
    size = _LINK_FLOW.size
    return _LINK_FLOW.pack(
        size, 2, 0, channel, DESCRIBED, SMALL_ULONG, FLOW, LIST8, size - 13, 10,
        UINT, windows[0], UINT, windows[1], UINT, windows[2], UINT, windows[3],
        UINT, handle, UINT, delivery_count, UINT, credit, UINT, available, TRUE if drain else FALSE, TRUE if echo else FALSE,
    )  # fmt: skip
