"""The journal's record format, version 1.

A Kafka record of ``bascule.journal`` holds one or more complete JMS actions and is atomic: a reader applies all of its entries or none.
Actions that arrive while an append is prepared share a record (group commit, docs/adr/0001).

    key    one byte: b"E" epoch start, b"D" at least one message, b"S" state only; a reader of messages skips b"S" unread
    value  header (28 bytes, big endian): magic "BJ" | version u8 | kind u8 | epoch u64 | sequence u64 | body CRC-32 u32 | body length u32
           body: entries, each ``op u8 | length u32 | payload``

An epoch is the offset of its own start record (whose epoch and sequence fields are 0). Sequences continue across epochs: the first
record of an epoch has the last valid sequence + 1. The identity of a message is (epoch, sequence, index in the record). Because sequences
never repeat among valid records, ``mid = sequence << 16 | index`` identifies a message as one integer.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Container, Iterable, Iterator
from typing import Any, Final, NamedTuple

from bascule.core.errors import InvalidInput
from bascule.journal.errors import DamagedRecord, ForeignRecord, NewerRecord

MAGIC = b"BJ"
VERSION = 1
HEADER = struct.Struct(">2sBBQQII")
HEADER_SIZE = HEADER.size
INDEX_BITS = 16
#: Maximum number of messages in a record: the index of a message identity has 16 bits.
MESSAGES_PER_RECORD_MAX = 1 << INDEX_BITS
#: The highest index: ``mid_of(sequence, INDEX_MAX)`` is not below any message of a record.
INDEX_MAX = MESSAGES_PER_RECORD_MAX - 1


class Kind(enum.IntEnum):
    """The content of a record, which decides its Kafka key."""

    EPOCH = 1
    DATA = 2
    STATE = 3


KEY_OF_KIND = {Kind.EPOCH: b"E", Kind.DATA: b"D", Kind.STATE: b"S"}


class Op(enum.IntEnum):
    """The operation of an entry."""

    EPOCH = 1  # JSON: who started it, the diverts, and the exclusive ones in force
    SEND = 2  # a message, with the queues and diverts that took it
    ACK = 3  # messages removed from a queue
    COUNT = 4  # failed deliveries of messages of a queue
    RESERVE = 5  # a queue may have delivered messages up to a mid
    QUEUE_CREATED = 6  # JSON
    QUEUE_DELETED = 7
    INGRESS = 8  # next offset to read from a partition of bascule.ingress
    SNAPSHOT = 9  # JSON: an announced snapshot
    PREPARED = 10  # a transaction branch that can be committed: bascule.journal.branches
    ENDED = 11  # the end of a branch; a commit is in the record of its messages and acknowledgements
    INGRESS_TOPIC = 12  # JSON: the id of the topic of the next offsets in INGRESS, and the current next offsets
    SUBSCRIPTION_USE = 13  # JSON: time since which a durable subscription has no consumer, 0 if it has one; its new user, if it changes


class SendFlag:
    """Bits of a SEND entry. Plain integers, because ``&`` of an enum takes a microsecond and every message needs several."""

    DURABLE: Final = 1
    GROUPED: Final = 2  # has a group id (JMSXGroupID)
    FROM_KAFKA: Final = 4  # from an ingress
    PIPELINES_ONLY: Final = 8  # non-persistent: journaled for the diverts only, in no queue's journal
    DUPLICATE_ID: Final = 16  # a 16-byte digest for duplicate detection follows
    SECOND_DUPLICATE_ID: Final = 32  # a second digest follows (_AMQ_DUPL_ID beside the message id)
    DIVERTS: Final = 64  # names of the diverts that took the message follow
    SOURCE: Final = 128  # the Kafka coordinates of its source follow


class Header(NamedTuple):
    """The header of a record, decoded and checked."""

    kind: Kind
    epoch: int
    sequence: int


class KafkaOrigin(NamedTuple):
    """Kafka coordinates of the source of a message."""

    topic: str
    partition: int
    offset: int


class EncodedRoute(NamedTuple):
    """The encoded address and queue ids of a SEND entry, the same for all messages of a route."""

    address_size: int
    queue_count: int
    encoded: bytes

    @classmethod
    def of(cls, address: str, queues: tuple[int, ...]) -> EncodedRoute:
        """Encode the address and the ids of its queues."""
        encoded = address.encode()
        return cls(len(encoded), len(queues), encoded + struct.pack(f">{len(queues)}I", *queues))


class Send(NamedTuple):
    """A SEND entry: a message as its sender encoded it (``body``, all AMQP sections), and the routing decision.

    Times are milliseconds since the epoch, 0 for none. ``queues`` are queue ids. ``address`` has no prefix.
    """

    flags: int
    routing: int
    priority: int
    timestamp_ms: int
    expiry_ms: int
    delivery_time_ms: int
    address: str
    queues: tuple[int, ...]
    duplicate_ids: tuple[bytes, ...]
    diverts: tuple[str, ...]
    source: KafkaOrigin | None
    body: bytes


#: Flags, priority, expiry time and delivery time of a SEND entry, and where its body begins and ends in the record: see Send. A
#: plain tuple, since a load has a million of them.
StoredSend = tuple[int, int, int, int, int, int]
#: Parts of a SEND entry that few messages have.
_RARE_PARTS: Final = SendFlag.DIVERTS | SendFlag.SOURCE


class _Layout(NamedTuple):
    """The layout of an entry: a fixed part, and items of one size."""

    fixed: int
    item: int = 0

    def fits(self, length: int) -> bool:
        """Return whether a payload can have this length."""
        rest = length - self.fixed
        return rest == 0 if not self.item else rest >= 0 and rest % self.item == 0


_ENTRY = struct.Struct(">BI")
_SEND = struct.Struct(">BBBqqqHH")
_SEND_ENTRY = struct.Struct(">BIBBBqqqHH")  # both structures together
_SOURCE = struct.Struct(">Hiq")
_U32 = struct.Struct(">I")
_U64 = struct.Struct(">Q")
_MID_COUNT = struct.Struct(">QH")
_RESERVE = struct.Struct(">IQ")
_INGRESS = struct.Struct(">iq")
DIGEST_SIZE = 16
#: A message in an ACK entry, and an ACK entry with one message.
ACK_BYTES = 8
ACK_ENTRY_BYTES = _ENTRY.size + _U32.size + ACK_BYTES
_LAYOUTS = {
    Op.ACK: _Layout(_U32.size, ACK_BYTES),
    Op.COUNT: _Layout(_U32.size, _MID_COUNT.size),
    Op.RESERVE: _Layout(_RESERVE.size),
    Op.QUEUE_DELETED: _Layout(_U32.size),
    Op.INGRESS: _Layout(_INGRESS.size),
}


def mid_of(sequence: int, index: int) -> int:
    """Return the message id as one integer."""
    return sequence << INDEX_BITS | index


def packed_mid(mid: int) -> bytes:
    """Return the bytes of a mid in the entries that name a message."""
    return _U64.pack(mid)


def encode_record(kind: Kind, epoch: int, sequence: int, *entries: bytes) -> bytes:
    """Return the Kafka value of a record with these entries. The entries are copied once, because a record may have 64 MiB."""
    crc = size_bytes = 0
    for each in entries:
        crc = zlib.crc32(each, crc)
        size_bytes += len(each)
    return b"".join((HEADER.pack(MAGIC, VERSION, kind, epoch, sequence, crc, size_bytes), *entries))


def decode_header(value: bytes | None, *, check: bool = True) -> Header:
    """Decode the header of a Kafka value. ``check=False`` skips the CRC, for a reader that relies on Kafka's.

    Raises ForeignRecord, DamagedRecord or NewerRecord.
    """
    if value is None or len(value) < HEADER_SIZE or value[:2] != MAGIC:
        raise ForeignRecord("not a journal record of Bascule (no magic 'BJ')")
    _, version, kind, epoch, sequence, crc, length = HEADER.unpack_from(value)
    if version > VERSION:
        raise NewerRecord(f"journal format {version}; this version of Bascule reads up to {VERSION}. Upgrade Bascule")
    if version < 1:
        raise DamagedRecord(f"invalid journal format {version}; the first is 1")
    if len(value) != HEADER_SIZE + length:
        raise DamagedRecord(f"body of {len(value) - HEADER_SIZE} bytes, but the header says {length}")
    if check and zlib.crc32(memoryview(value)[HEADER_SIZE:]) != crc:
        raise DamagedRecord("checksum mismatch")
    try:
        return Header(Kind(kind), epoch, sequence)
    except ValueError:
        raise DamagedRecord(f"unknown kind {kind}") from None


def entries(value: bytes, position: int = HEADER_SIZE, size: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield (op, start, end) of each entry of a record's value; the payload is ``value[start:end]``. Raises DamagedRecord.

    ``position`` and ``size`` are the start and the end of the range to read, because entries may be nested in an entry.
    """
    size = len(value) if size is None else size
    while position < size:
        if position + _ENTRY.size > size:
            raise DamagedRecord(f"entry at byte {position} is truncated")
        op, length = _ENTRY.unpack_from(value, position)
        start = position + _ENTRY.size
        position = start + length
        if position > size:
            raise DamagedRecord(f"entry at byte {start} extends beyond the end")
        layout = _LAYOUTS.get(op)
        if layout is not None and not layout.fits(length):
            raise DamagedRecord(f"entry at byte {start}: invalid length: operation {op} with {length} bytes")
        yield op, start, position


def entry(op: Op, payload: bytes) -> bytes:
    """Encode an entry."""
    return _ENTRY.pack(op, len(payload)) + payload


def json_entry(op: Op, content: dict[str, Any]) -> bytes:
    """Encode an entry of a rare kind as JSON, readable in a dump."""
    return entry(op, json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def send_entry(send: Send) -> bytes:
    """Encode a SEND entry.

    ``flags`` must name the optional parts. Raises InvalidInput if the flags have a source and the message has none.
    """
    options = list(send.duplicate_ids)
    if send.flags & SendFlag.DIVERTS:
        options.append(encode_diverts(send.diverts))
    if send.flags & SendFlag.SOURCE:
        if send.source is None:
            raise InvalidInput("the flags of a SEND entry have SendFlag.SOURCE, but source is not set; set source or clear the flag")
        topic = send.source.topic.encode()
        options.append(_SOURCE.pack(len(topic), send.source.partition, send.source.offset) + topic)
    return routed_send_entry(
        send.flags, send.routing, send.priority, send.timestamp_ms, send.expiry_ms, send.delivery_time_ms,
        EncodedRoute.of(send.address, send.queues), b"".join(options), send.body,
    )  # fmt: skip


def encode_diverts(names: tuple[str, ...]) -> bytes:
    """Encode the names of diverts of a SEND entry."""
    parts = [bytes([len(names)])]
    for name in names:
        encoded = name.encode()
        parts.append(bytes([len(encoded)]) + encoded)
    return b"".join(parts)


def routed_send_entry(
    flags: int, routing: int, priority: int, timestamp_ms: int, expiry_ms: int, delivery_time_ms: int,
    target: EncodedRoute, options: bytes, body: bytes,
) -> bytes:  # fmt: skip
    """Encode a SEND entry as :func:`send_entry` does, from encoded parts: the fast path of every message of a client."""
    address_size, queue_count, encoded = target
    size = _SEND.size + len(encoded) + len(options) + len(body)
    head = _SEND_ENTRY.pack(
        Op.SEND, size, flags, routing, priority, timestamp_ms, expiry_ms, delivery_time_ms, address_size, queue_count
    )  # fmt: skip
    return b"".join((head, encoded, options, body))


def decode_send(value: bytes, start: int, end: int) -> Send:
    """Decode the SEND entry with the payload ``value[start:end]``. Raises DamagedRecord."""
    try:
        flags, routing, priority, timestamp, expiry, delivery_time, address_size, queue_count = _SEND.unpack_from(value, start)
        position = start + _SEND.size
        address = value[position : position + address_size].decode()
        position += address_size
        queues: tuple[int, ...] = ()
        if queue_count:
            queues = struct.unpack_from(f">{queue_count}I", value, position)
            position += 4 * queue_count
        duplicate_ids: list[bytes] = []
        for flag in (SendFlag.DUPLICATE_ID, SendFlag.SECOND_DUPLICATE_ID):
            if flags & flag:
                duplicate_ids.append(value[position : position + DIGEST_SIZE])
                position += DIGEST_SIZE
        diverts: list[str] = []
        if flags & SendFlag.DIVERTS:
            count = value[position]
            position += 1
            for _ in range(count):
                size = value[position]
                diverts.append(value[position + 1 : position + 1 + size].decode())
                position += 1 + size
        source = None
        if flags & SendFlag.SOURCE:
            size, partition, offset = _SOURCE.unpack_from(value, position)
            position += _SOURCE.size
            source = KafkaOrigin(value[position : position + size].decode(), partition, offset)
            position += size
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise DamagedRecord(f"send entry at byte {start}: {error}") from error
    if position > end:
        raise DamagedRecord(f"send entry at byte {start} extends beyond its end")
    return Send(
        flags, routing, priority, timestamp, expiry, delivery_time, address, queues,
        tuple(duplicate_ids), tuple(diverts), source, value[position:end],
    )  # fmt: skip


def flags_and_address(value: bytes, start: int) -> tuple[int, bytes]:
    """Return the flags of the SEND entry whose payload begins at ``start``, and its encoded address. Raises DamagedRecord."""
    try:
        flags, _, _, _, _, _, address_size, _ = _SEND.unpack_from(value, start)
    except struct.error as error:
        raise DamagedRecord(f"send entry at byte {start}: {error}") from error
    position = start + _SEND.size
    return flags, value[position : position + address_size]


def decode_stored(value: bytes, start: int, end: int) -> StoredSend:
    """Decode the parts of a SEND entry that a broker needs if its snapshot names the queues of the message. Raises DamagedRecord."""
    try:
        flags, _, priority, _, expiry_ms, delivery_time_ms, address_size, queue_count = _SEND.unpack_from(value, start)
    except struct.error as error:
        raise DamagedRecord(f"send entry at byte {start}: {error}") from error
    if flags & _RARE_PARTS:
        return flags, priority, expiry_ms, delivery_time_ms, end - len(decode_send(value, start, end).body), end
    position = start + _SEND.size + address_size + 4 * queue_count
    if flags & SendFlag.DUPLICATE_ID:
        position += DIGEST_SIZE
    if flags & SendFlag.SECOND_DUPLICATE_ID:
        position += DIGEST_SIZE
    if position > end:
        raise DamagedRecord(f"send entry at byte {start} extends beyond its end")
    return flags, priority, expiry_ms, delivery_time_ms, position, end


def stored_sends(value: bytes, first: int, wanted: Container[int]) -> list[tuple[int, StoredSend]]:
    """Return the wanted messages of a record's value by mid, as :func:`decode_stored` does. ``first`` is the mid of its first message.

    Raises DamagedRecord. This is one loop, because a broker that starts may load a million messages.
    """
    found: list[tuple[int, StoredSend]] = []
    position, size, mid = HEADER_SIZE, len(value), first
    unpack, send_head = _SEND_ENTRY.unpack_from, _SEND_ENTRY.size
    while position + send_head <= size:
        op, length, flags, _, priority, _, expiry_ms, delivery_time_ms, address_size, queue_count = unpack(value, position)
        end = position + _ENTRY.size + length
        if op != Op.SEND or end > size or flags & _RARE_PARTS:
            break
        if mid in wanted:
            start = position + send_head + address_size + 4 * queue_count
            if flags & SendFlag.DUPLICATE_ID:
                start += DIGEST_SIZE
            if flags & SendFlag.SECOND_DUPLICATE_ID:
                start += DIGEST_SIZE
            if start > end:
                break
            found.append((mid, (flags, priority, expiry_ms, delivery_time_ms, start, end)))
        mid += 1
        position = end
    for op, start, end in entries(value, position):  # from the first unusual entry on
        if op == Op.SEND:
            if mid in wanted:
                found.append((mid, decode_stored(value, start, end)))
            mid += 1
    return found


def ack_entry(queue: int, mids: list[int]) -> bytes:
    """Encode the removal of messages from a queue."""
    return _ENTRY.pack(Op.ACK, 4 + 8 * len(mids)) + struct.pack(f">I{len(mids)}Q", queue, *mids)


def decode_ack(value: bytes, start: int, end: int) -> tuple[int, tuple[int, ...]]:
    """Return (queue id, mids) of an ACK entry."""
    queue, *mids = struct.unpack_from(f">I{(end - start - 4) // 8}Q", value, start)
    return queue, tuple(mids)


def count_entry(queue: int, counts: list[tuple[int, int]]) -> bytes:
    """Encode delivery counts: (mid, failed deliveries so far) of messages of a queue."""
    return packed_count_entry(queue, packed_counts(counts))


def packed_counts(counts: Iterable[tuple[int, int]]) -> bytes:
    """Encode some messages of such an entry."""
    return b"".join([_MID_COUNT.pack(mid, min(count, 0xFFFF)) for mid, count in counts])


def packed_count_entry(queue: int, packed: bytes | bytearray) -> bytes:
    """Encode a COUNT entry as :func:`count_entry` does, from its encoded parts."""
    return entry(Op.COUNT, _U32.pack(queue) + packed)


def decode_count(value: bytes, start: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """Return (queue id, [(mid, count)]) of a COUNT entry."""
    (queue,) = _U32.unpack_from(value, start)
    return queue, list(_MID_COUNT.iter_unpack(value[start + 4 : end]))


def reserve_entry(queue: int, mid: int) -> bytes:
    """Encode that messages of the queue up to ``mid`` may be delivered from now on; after a crash they are marked redelivered."""
    return entry(Op.RESERVE, _RESERVE.pack(queue, mid))


def decode_reserve(value: bytes, start: int) -> tuple[int, int]:
    """Return (queue id, mid) of a RESERVE entry."""
    queue, mid = _RESERVE.unpack_from(value, start)
    return queue, mid


def queue_deleted_entry(queue: int) -> bytes:
    """Encode the deletion of a queue and its messages."""
    return entry(Op.QUEUE_DELETED, _U32.pack(queue))


def decode_queue_deleted(value: bytes, start: int) -> int:
    """Return the queue id of a QUEUE_DELETED entry."""
    return int(_U32.unpack_from(value, start)[0])


def ingress_entry(partition: int, next_offset: int) -> bytes:
    """Encode the next offset of bascule.ingress, for the record of the messages read before it."""
    return entry(Op.INGRESS, _INGRESS.pack(partition, next_offset))


def decode_ingress(value: bytes, start: int) -> tuple[int, int]:
    """Return (partition, next offset) of an INGRESS entry."""
    partition, offset = _INGRESS.unpack_from(value, start)
    return partition, offset


def decode_json(value: bytes, start: int, end: int) -> dict[str, Any]:
    """Return the content of a JSON entry. Raises DamagedRecord."""
    try:
        content = json.loads(value[start:end])
    except ValueError as error:
        raise DamagedRecord(f"JSON entry at byte {start}: {error}") from error
    if not isinstance(content, dict):
        raise DamagedRecord(f"JSON entry at byte {start} is not an object")
    return content
