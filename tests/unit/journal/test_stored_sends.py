"""The messages of a record that a load wants, read in one loop: as the readers of single entries read them."""

from __future__ import annotations

import random

import pytest

from bascule.journal.errors import DamagedRecord
from bascule.journal.records import (
    HEADER_SIZE,
    KafkaOrigin,
    Kind,
    Op,
    Send,
    SendFlag,
    ack_entry,
    decode_send,
    decode_stored,
    encode_record,
    entries,
    json_entry,
    mid_of,
    send_entry,
    stored_sends,
)

FIRST = mid_of(7, 0)


def send(random_: random.Random) -> bytes:
    flags, digests = int(SendFlag.DURABLE), 0
    diverts: tuple[str, ...] = ()
    source: KafkaOrigin | None = None
    if random_.random() < 0.5:
        flags |= SendFlag.DUPLICATE_ID
        digests = 1
        if random_.random() < 0.5:
            flags |= SendFlag.SECOND_DUPLICATE_ID
            digests = 2
    if random_.random() < 0.1:
        flags |= SendFlag.DIVERTS
        diverts = ("d1", "d2")
    if random_.random() < 0.1:
        flags |= SendFlag.SOURCE
        source = KafkaOrigin("topic", 3, 99)
    body = random_.randbytes(random_.randrange(50))
    queues = tuple(range(random_.randrange(4)))
    return send_entry(
        Send(flags, 1, random_.randrange(10), 1, random_.randrange(3), random_.randrange(3), "é" * random_.randrange(4), queues,
             (bytes(16),) * digests, diverts, source, body)
    )  # fmt: skip


def record(seed: int, count: int) -> bytes:
    random_ = random.Random(seed)
    others = (ack_entry(1, [4, 5]), json_entry(Op.SNAPSHOT, {"id": "1-2"}))
    parts = [random_.choice(others) if random_.random() < 0.1 else send(random_) for _ in range(count)]
    return encode_record(Kind.DATA, 1, 7, *parts)


@pytest.mark.parametrize("seed", range(20))
def test_wanted_messages_are_those_that_readers_of_single_entries_find(seed: int) -> None:
    value = record(seed, 40)
    sends = [(start, end) for op, start, end in entries(value) if op == Op.SEND]
    every = [(FIRST + index, decode_stored(value, start, end)) for index, (start, end) in enumerate(sends)]
    assert stored_sends(value, FIRST, range(FIRST, FIRST + 100)) == every
    few = {mid for mid, _ in every if mid % 3 == seed % 3}
    assert stored_sends(value, FIRST, few) == [each for each in every if each[0] in few]
    bodies = [decode_send(value, start, end).body for start, end in sends]
    assert [value[start:end] for _, (*_, start, end) in every] == bodies


@pytest.mark.parametrize("cut", range(1, 60))
def test_cut_record_is_damaged_or_ends_between_entries(cut: int) -> None:
    value = record(3, 6)
    ends = {end for _, _, end in entries(value)} | {HEADER_SIZE}
    short = value[: len(value) - cut]
    if len(short) in ends:
        stored_sends(short, FIRST, range(FIRST, FIRST + 100))
    else:
        with pytest.raises(DamagedRecord):
            stored_sends(short, FIRST, range(FIRST, FIRST + 100))


def test_parts_longer_than_their_entry_are_damage() -> None:
    entry = send_entry(Send(SendFlag.DURABLE, 1, 4, 0, 0, 0, "address", (1,), (), (), None, b""))
    damaged = bytearray(encode_record(Kind.DATA, 1, 7, entry))
    damaged[HEADER_SIZE + 5 + 27 : HEADER_SIZE + 5 + 29] = b"\xff\xff"  # the length of the address
    with pytest.raises(DamagedRecord, match="extends beyond its end"):
        stored_sends(bytes(damaged), FIRST, {FIRST})
