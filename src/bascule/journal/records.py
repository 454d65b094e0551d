"""The journal's record format, version 1.

One Kafka record of ``bascule.journal`` holds one or more whole JMS actions and is atomic: a reader applies all of its
entries or none. Actions that arrive while an append is prepared share a record (group commit, docs/adr/0001).

    key    one byte: b"E" epoch start, b"D" at least one message, b"S" state only; a reader that wants messages drops b"S" unread
    value  header (28 bytes, big endian): magic "BJ" | version u8 | kind u8 | epoch u64 | sequence u64 | body CRC-32 u32 | body length u32
           body: entries, each ``op u8 | length u32 | payload``

An epoch is the offset of its own start record (whose epoch and sequence fields are 0). Sequences go on across epochs: the first
record of an epoch carries the last valid sequence + 1. A message's identity is (epoch, sequence, index in the record); since sequences
never repeat in the valid history, ``mid = sequence << 16 | index`` names a message in one integer.
"""

from __future__ import annotations

import enum
import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, NamedTuple

from bascule.core.errors import BasculeError, InvalidInput, Scope

MAGIC = b"BJ"
VERSION = 1
HEADER = struct.Struct(">2sBBQQII")
HEADER_SIZE = HEADER.size
INDEX_BITS = 16
#: Messages in one record: the index of a message identity has 16 bits.
MESSAGES_PER_RECORD_MAX = 1 << INDEX_BITS
#: The highest index: ``mid_of(sequence, INDEX_MAX)`` is not below any message of a record.
INDEX_MAX = MESSAGES_PER_RECORD_MAX - 1


class Kind(enum.IntEnum):
    """What a record holds; decides its Kafka key."""

    EPOCH = 1
    DATA = 2
    STATE = 3


KEY_OF_KIND = {Kind.EPOCH: b"E", Kind.DATA: b"D", Kind.STATE: b"S"}


class Op(enum.IntEnum):
    """What an entry says."""

    EPOCH = 1  # JSON: who started it, the diverts, and the exclusive ones in force
    SEND = 2  # a message, with the queues and diverts that took it
    ACK = 3  # messages gone from a queue
    COUNT = 4  # delivery counts of messages of a queue
    RESERVE = 5  # a queue may have delivered messages up to a mid
    QUEUE_CREATED = 6  # JSON
    QUEUE_DELETED = 7
    INGRESS = 8  # next offset to take from a partition of bascule.ingress
    SNAPSHOT = 9  # JSON: a snapshot announced
    PREPARED = 10  # a transaction branch that will commit when it is told to: bascule.journal.branches
    ENDED = 11  # what became of one; of a commit, in the record of its messages and acknowledgements
    INGRESS_TOPIC = 12  # JSON: by its id, the topic whose next offsets INGRESS tells, and those that hold as yet
    SUBSCRIPTION_USE = 13  # JSON: since when a durable subscription has no consumer, 0 where it has one


class SendFlag:
    """Bits of a SEND entry; plain integers, since an enum's ``&`` costs a microsecond and every message has several."""

    DURABLE = 1
    GROUPED = 2  # has a group id (JMSXGroupID)
    FROM_KAFKA = 4  # came in by an ingress
    PIPELINES_ONLY = 8  # non-persistent: journaled for the diverts alone, in no queue's journal
    DUPLICATE_ID = 16  # a 16-byte digest follows, for duplicate detection
    SECOND_DUPLICATE_ID = 32  # a second digest follows (_AMQ_DUPL_ID beside the message id)
    DIVERTS = 64  # names of the diverts that took it follow
    SOURCE = 128  # the Kafka coordinates it came from follow


class RecordError(BasculeError):
    """A journal record that is not what it should be. ``reason`` is one word for metrics."""

    retriable = False
    scope = Scope.PROCESS
    reason: ClassVar[str] = "damaged"


class ForeignRecord(RecordError):
    """Not written by Bascule: ignored and alarmed."""

    scope = Scope.OPERATION

    reason: ClassVar[str] = "foreign"


class DamagedRecord(RecordError):
    """Written by Bascule and broken since: the load stops here."""

    reason: ClassVar[str] = "damaged"


class NewerRecord(RecordError):
    """Written by a newer Bascule: the load stops here."""

    reason: ClassVar[str] = "newer"


class Header(NamedTuple):
    """A record's header, decoded and checked."""

    kind: Kind
    epoch: int
    sequence: int


class KafkaOrigin(NamedTuple):
    """Kafka coordinates a message came from."""

    topic: str
    partition: int
    offset: int


class EncodedRoute(NamedTuple):
    """The address and the queue ids of a SEND entry, encoded: the same for all messages of a route."""

    address_size: int
    queue_count: int
    encoded: bytes

    @classmethod
    def of(cls, address: str, queues: tuple[int, ...]) -> EncodedRoute:
        """For an address and the queues that take from it."""
        encoded = address.encode()
        return cls(len(encoded), len(queues), encoded + struct.pack(f">{len(queues)}I", *queues))


class Send(NamedTuple):
    """A SEND entry: a message as its sender encoded it (``body``, all AMQP sections), and what was decided about it.

    Times are milliseconds since the epoch, 0 for none. ``queues`` are queue ids. ``address`` is without any prefix.
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


class _Layout(NamedTuple):
    """The bytes that an entry has: a fixed part, and items of one size."""

    fixed: int
    item: int = 0

    def fits(self, length: int) -> bool:
        """Whether a payload can have this length."""
        rest = length - self.fixed
        return rest == 0 if not self.item else rest >= 0 and rest % self.item == 0


_ENTRY = struct.Struct(">BI")
_SEND = struct.Struct(">BBBqqqHH")
_SEND_ENTRY = struct.Struct(">BIBBBqqqHH")  # the two together
_SOURCE = struct.Struct(">Hiq")
_U32 = struct.Struct(">I")
_MID_COUNT = struct.Struct(">QH")
_RESERVE = struct.Struct(">IQ")
_INGRESS = struct.Struct(">iq")
DIGEST_SIZE = 16
#: A message in an ACK entry, and an entry with one.
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
    """The message id in one integer."""
    return sequence << INDEX_BITS | index


def encode_record(kind: Kind, epoch: int, sequence: int, body: bytes) -> bytes:
    """A record's Kafka value."""
    return HEADER.pack(MAGIC, VERSION, kind, epoch, sequence, zlib.crc32(body), len(body)) + body


def decode_header(value: bytes | None, *, check: bool = True) -> Header:
    """The header of a Kafka value. ``check=False`` leaves the CRC out (a reader that trusts Kafka's own).

    Raises ForeignRecord, DamagedRecord or NewerRecord.
    """
    if value is None or len(value) < HEADER_SIZE or value[:2] != MAGIC:
        raise ForeignRecord("no Bascule journal record (no magic 'BJ')")
    _, version, kind, epoch, sequence, crc, length = HEADER.unpack_from(value)
    if version > VERSION:
        raise NewerRecord(f"journal format {version}; this Bascule reads up to {VERSION}")
    if version < 1:
        raise DamagedRecord(f"journal format {version}; the first is 1")
    if len(value) != HEADER_SIZE + length:
        raise DamagedRecord(f"body of {len(value) - HEADER_SIZE} bytes, header says {length}")
    if check and zlib.crc32(memoryview(value)[HEADER_SIZE:]) != crc:
        raise DamagedRecord("checksum does not match")
    try:
        return Header(Kind(kind), epoch, sequence)
    except ValueError:
        raise DamagedRecord(f"unknown kind {kind}") from None


def entries(value: bytes, position: int = HEADER_SIZE, size: int | None = None) -> Iterator[tuple[int, int, int]]:
    """(op, start, end) of each entry of a record's value; the payload is ``value[start:end]``. Raises DamagedRecord.

    ``position`` and ``size`` are the first byte and the end of what to look at: entries may stand within one.
    """
    size = len(value) if size is None else size
    while position < size:
        if position + _ENTRY.size > size:
            raise DamagedRecord(f"entry at byte {position} is cut off")
        op, length = _ENTRY.unpack_from(value, position)
        start = position + _ENTRY.size
        position = start + length
        if position > size:
            raise DamagedRecord(f"entry at byte {start} runs past the end")
        layout = _LAYOUTS.get(op)
        if layout is not None and not layout.fits(length):
            raise DamagedRecord(f"entry at byte {start}: operation {op} with {length} bytes")
        yield op, start, position


def entry(op: Op, payload: bytes) -> bytes:
    """One entry."""
    return _ENTRY.pack(op, len(payload)) + payload


def json_entry(op: Op, content: dict[str, Any]) -> bytes:
    """An entry of the rare kinds, readable by eye."""
    return entry(op, json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def send_entry(send: Send) -> bytes:
    """A SEND entry. ``flags`` must say which optional parts are there. Raises InvalidInput if they name a source and there is none."""
    options = list(send.duplicate_ids)
    if send.flags & SendFlag.DIVERTS:
        options.append(encode_diverts(send.diverts))
    if send.flags & SendFlag.SOURCE:
        if send.source is None:
            raise InvalidInput("the flags of a SEND entry say that it has a source, and it has none: set source, or clear SendFlag.SOURCE")
        topic = send.source.topic.encode()
        options.append(_SOURCE.pack(len(topic), send.source.partition, send.source.offset) + topic)
    return routed_send_entry(
        send.flags, send.routing, send.priority, send.timestamp_ms, send.expiry_ms, send.delivery_time_ms,
        EncodedRoute.of(send.address, send.queues), b"".join(options), send.body,
    )  # fmt: skip


def encode_diverts(names: tuple[str, ...]) -> bytes:
    """The names of diverts in a SEND entry."""
    parts = [bytes([len(names)])]
    for name in names:
        encoded = name.encode()
        parts.append(bytes([len(encoded)]) + encoded)
    return b"".join(parts)


def routed_send_entry(
    flags: int, routing: int, priority: int, timestamp_ms: int, expiry_ms: int, delivery_time_ms: int,
    target: EncodedRoute, options: bytes, body: bytes,
) -> bytes:  # fmt: skip
    """As :func:`send_entry`, of parts that are encoded already: the way of every message that a client sends."""
    address_size, queue_count, encoded = target
    size = _SEND.size + len(encoded) + len(options) + len(body)
    head = _SEND_ENTRY.pack(
        Op.SEND, size, flags, routing, priority, timestamp_ms, expiry_ms, delivery_time_ms, address_size, queue_count
    )  # fmt: skip
    return b"".join((head, encoded, options, body))


def decode_send(value: bytes, start: int, end: int) -> Send:
    """The SEND entry whose payload is ``value[start:end]``. Raises DamagedRecord."""
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
        raise DamagedRecord(f"send entry at byte {start} runs past its end")
    return Send(
        flags, routing, priority, timestamp, expiry, delivery_time, address, queues,
        tuple(duplicate_ids), tuple(diverts), source, value[position:end],
    )  # fmt: skip


def ack_entry(queue: int, mids: list[int]) -> bytes:
    """Messages gone from a queue for good."""
    return _ENTRY.pack(Op.ACK, 4 + 8 * len(mids)) + struct.pack(f">I{len(mids)}Q", queue, *mids)


def decode_ack(value: bytes, start: int, end: int) -> tuple[int, tuple[int, ...]]:
    """(queue id, mids) of an ACK entry."""
    queue, *mids = struct.unpack_from(f">I{(end - start - 4) // 8}Q", value, start)
    return queue, tuple(mids)


def count_entry(queue: int, counts: list[tuple[int, int]]) -> bytes:
    """Delivery counts: (mid, deliveries that have failed so far) of messages of a queue."""
    return packed_count_entry(queue, packed_counts(counts))


def packed_counts(counts: Iterable[tuple[int, int]]) -> bytes:
    """A part of such an entry: some of its messages."""
    return b"".join([_MID_COUNT.pack(mid, min(count, 0xFFFF)) for mid, count in counts])


def packed_count_entry(queue: int, packed: bytes | bytearray) -> bytes:
    """As :func:`count_entry`, of its parts one behind the other."""
    return entry(Op.COUNT, _U32.pack(queue) + packed)


def decode_count(value: bytes, start: int, end: int) -> tuple[int, list[tuple[int, int]]]:
    """(queue id, [(mid, count)]) of a COUNT entry."""
    (queue,) = _U32.unpack_from(value, start)
    return queue, list(_MID_COUNT.iter_unpack(value[start + 4 : end]))


def reserve_entry(queue: int, mid: int) -> bytes:
    """From here on messages of the queue up to ``mid`` may have been delivered: after a crash they are marked redelivered."""
    return entry(Op.RESERVE, _RESERVE.pack(queue, mid))


def decode_reserve(value: bytes, start: int) -> tuple[int, int]:
    """(queue id, mid) of a RESERVE entry."""
    queue, mid = _RESERVE.unpack_from(value, start)
    return queue, mid


def queue_deleted_entry(queue: int) -> bytes:
    """A queue and what it holds are gone."""
    return entry(Op.QUEUE_DELETED, _U32.pack(queue))


def decode_queue_deleted(value: bytes, start: int) -> int:
    """The queue id of a QUEUE_DELETED entry."""
    return int(_U32.unpack_from(value, start)[0])


def ingress_entry(partition: int, next_offset: int) -> bytes:
    """What of bascule.ingress has been taken, in the same record as the messages taken."""
    return entry(Op.INGRESS, _INGRESS.pack(partition, next_offset))


def decode_ingress(value: bytes, start: int) -> tuple[int, int]:
    """(partition, next offset) of an INGRESS entry."""
    partition, offset = _INGRESS.unpack_from(value, start)
    return partition, offset


def decode_json(value: bytes, start: int, end: int) -> dict[str, Any]:
    """The content of a JSON entry. Raises DamagedRecord."""
    try:
        content = json.loads(value[start:end])
    except ValueError as error:
        raise DamagedRecord(f"JSON entry at byte {start}: {error}") from error
    if not isinstance(content, dict):
        raise DamagedRecord(f"JSON entry at byte {start} is no object")
    return content
