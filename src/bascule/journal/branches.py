"""Journal entries of transaction branches (XA): prepared, and ended.

    xid       format id u32 | size of gtrid u8 | size of bqual u8 | gtrid | bqual
    PREPARED  xid | prepared at i64 ms since the epoch | size of container id u16 | container id | entries
              If bit 15 of the size is set, the container id is followed by: size of user u16 | user. The branch then
              belongs to this user.
              entries: each as in a record's body. SEND: a message as its client sent it, without queues and diverts: it is
              not routed yet. COUNT: messages of a queue that the branch has received and reserved, each with its number
              of failed deliveries. A rollback adds one failed delivery to each.
    ENDED     xid | Ending u8 | ended at i64 ms since the epoch | user, only of a branch that an administrator has ended

The record of a commit holds ENDED and the branch's messages and acknowledgements as ordinary SEND and ACK entries. A reader that does not
know branches, such as a pipeline, therefore sees them at the commit, all at once.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from bascule.core.xid import Xid
from bascule.journal.errors import DamagedRecord
from bascule.journal.records import Op, Send, count_entry, decode_count, decode_send, entries, entry, send_entry

_XID = struct.Struct(">IBB")
_PREPARED = struct.Struct(">qH")
_ENDED = struct.Struct(">Bq")
_USER = struct.Struct(">H")
#: In the size of a container id, which has at most some thousand bytes: the branch has a user.
_HAS_USER = 1 << 15


class Ending(enum.IntEnum):
    """How a branch ended."""

    COMMITTED = 1
    ROLLED_BACK = 2
    FORCED_COMMIT = 3  # by an administrator, without its manager; kept until FORGOTTEN
    FORCED_ROLLBACK = 4
    FORGOTTEN = 5


#: Endings by an administrator.
FORCED = frozenset((Ending.FORCED_COMMIT, Ending.FORCED_ROLLBACK))


#: Messages that a branch has received from a queue: the queue id, and (mid, failed deliveries) of each.
Received = tuple[int, list[tuple[int, int]]]


class PreparedEntry(NamedTuple):
    """A PREPARED entry. ``container`` is the client that sent the messages, ``user`` is its user; "" if the branch belongs to nobody."""

    xid: Xid
    since_ms: int
    container: str
    sends: tuple[Send, ...]
    received: tuple[Received, ...]
    user: str = ""


class Ended(NamedTuple):
    """An ENDED entry. ``user`` is the user of a branch that an administrator has ended."""

    xid: Xid
    ending: Ending
    at_ms: int
    user: str = ""


def prepared_entry(xid: Xid, since_ms: int, container: str, sends: Iterable[Send], received: Iterable[Received], user: str = "") -> bytes:
    """Encode a PREPARED entry. The sends have neither queues nor diverts."""
    parts = [send_entry(send) for send in sends]
    parts += [count_entry(queue, counts) for queue, counts in received]
    return branch_entry(xid, since_ms, container, parts, user)


def branch_entry(xid: Xid, since_ms: int, container: str, parts: Iterable[bytes], user: str = "") -> bytes:
    """Encode a PREPARED entry as :func:`prepared_entry` does, from encoded message entries."""
    name, owner = container.encode(), user.encode()
    size, owned = (len(name) | _HAS_USER, _USER.pack(len(owner)) + owner) if owner else (len(name), b"")
    return entry(Op.PREPARED, b"".join((encoded_xid(xid), _PREPARED.pack(since_ms, size), name, owned, *parts)))


def decode_prepared(value: bytes, start: int, end: int) -> PreparedEntry:
    """Decode the PREPARED entry with the payload ``value[start:end]``. Raises DamagedRecord."""
    xid, since_ms, container, user, position = _prepared_head(value, start, end)
    sends: list[Send] = []
    received: list[Received] = []
    for op, inner, inner_end in entries(value, position, end):
        if op == Op.SEND:
            sends.append(decode_send(value, inner, inner_end))
        elif op == Op.COUNT:
            received.append(decode_count(value, inner, inner_end))
        else:
            raise DamagedRecord(f"prepared branch at byte {start}: operation {op} is not allowed in one")
    return PreparedEntry(xid, since_ms, container, tuple(sends), tuple(received), user)


def prepared_sends(value: bytes, start: int, end: int) -> tuple[str, Iterator[Send]]:
    """Return the container of the PREPARED entry with the payload ``value[start:end]``, and an iterator over its messages.

    Raises DamagedRecord.
    """
    _, _, container, _, position = _prepared_head(value, start, end)
    return container, _sends(value, position, end)


def _sends(value: bytes, position: int, end: int) -> Iterator[Send]:
    for op, inner, inner_end in entries(value, position, end):
        if op == Op.SEND:
            yield decode_send(value, inner, inner_end)


def _prepared_head(value: bytes, start: int, end: int) -> tuple[Xid, int, str, str, int]:
    """Return the xid, time, container and user, and the position of the entries."""
    try:
        xid, position = _xid(value, start)
        since_ms, size = _PREPARED.unpack_from(value, position)
        position += _PREPARED.size
        after = position + (size & ~_HAS_USER)
        container, user = value[position:after].decode(), ""
        if size & _HAS_USER:
            (user_size,) = _USER.unpack_from(value, after)
            position, after = after + _USER.size, after + _USER.size + user_size
            user = value[position:after].decode()
    except (struct.error, UnicodeDecodeError) as error:
        raise DamagedRecord(f"prepared branch at byte {start}: {error}") from error
    if after > end:
        raise DamagedRecord(f"prepared branch at byte {start} runs past its end")
    return xid, since_ms, container, user, after


def ended_entry(xid: Xid, ending: Ending, at_ms: int, user: str = "") -> bytes:
    """Encode an ENDED entry. Only a forced ending has a user."""
    return entry(Op.ENDED, encoded_xid(xid) + _ENDED.pack(ending, at_ms) + user.encode())


def decode_ended(value: bytes, start: int, end: int) -> Ended:
    """Decode the ENDED entry with the payload ``value[start:end]``. Raises DamagedRecord."""
    try:
        xid, position = _xid(value, start)
        ending, at_ms = _ENDED.unpack_from(value, position)
        position += _ENDED.size
        if position > end or (position < end and ending not in FORCED):
            raise DamagedRecord(f"end of a branch at byte {start}: invalid length of {end - start} bytes")
        return Ended(xid, Ending(ending), at_ms, value[position:end].decode())
    except (struct.error, ValueError) as error:
        raise DamagedRecord(f"end of a branch at byte {start}: {error}") from error


def encoded_xid(xid: Xid) -> bytes:
    """Encode an xid as it is in both entries."""
    return _XID.pack(xid.format_id, len(xid.gtrid), len(xid.bqual)) + xid.gtrid + xid.bqual


def _xid(value: bytes, start: int) -> tuple[Xid, int]:
    format_id, gtrid_size, bqual_size = _XID.unpack_from(value, start)
    middle = start + _XID.size + gtrid_size
    return Xid(format_id, value[start + _XID.size : middle], value[middle : middle + bqual_size]), middle + bqual_size
