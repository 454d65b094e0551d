from __future__ import annotations

import pytest

from bascule.journal.errors import DamagedRecord, ForeignRecord, NewerRecord
from bascule.journal.records import HEADER, HEADER_SIZE, Kind, Op, decode_header, decode_json, decode_send, encode_record, entries, entry
from tests.unit.journal.samples import PLAIN, RECORDS

DATA = RECORDS["data"]


def read(value: bytes) -> None:
    """Decode the header, the entries and the messages of a record."""
    decode_header(value)
    for op, start, end in entries(value):
        if op == Op.SEND:
            decode_send(value, start, end)


@pytest.mark.parametrize("value", [None, b"", b"hello", b"BJ", b"XX" + DATA[2:], DATA[: HEADER_SIZE - 1]])
def test_record_of_another_program_is_foreign(value: bytes | None) -> None:
    with pytest.raises(ForeignRecord, match="not a journal record of Bascule"):
        decode_header(value)


@pytest.mark.parametrize("at", range(HEADER_SIZE, len(DATA)))
def test_flipped_bit_in_the_body_fails_the_checksum(at: int) -> None:
    with pytest.raises(DamagedRecord, match="checksum"):
        decode_header(DATA[:at] + bytes([DATA[at] ^ 0x10]) + DATA[at + 1 :])


@pytest.mark.parametrize("size", [HEADER_SIZE, HEADER_SIZE + 1, len(DATA) - 1])
def test_truncated_record_is_detected_by_its_length(size: int) -> None:
    with pytest.raises(DamagedRecord, match=f"body of {size - HEADER_SIZE} bytes, but the header says {len(DATA) - HEADER_SIZE}"):
        decode_header(DATA[:size])


def test_record_with_excess_bytes_is_detected() -> None:
    with pytest.raises(DamagedRecord, match="header says"):
        decode_header(DATA + b"x")


def test_record_of_newer_format_version_is_refused_with_its_version() -> None:
    with pytest.raises(NewerRecord, match="journal format 9; this version of Bascule reads up to 1"):
        decode_header(DATA[:2] + b"\x09" + DATA[3:])


@pytest.mark.parametrize(("at", "text"), [(2, "journal format 0"), (3, "unknown kind 0")])
def test_invalid_record_header_is_damage(at: int, text: str) -> None:
    with pytest.raises(DamagedRecord, match=text):
        decode_header(DATA[:at] + b"\0" + DATA[at + 1 :])


def test_decode_without_check_skips_the_checksum() -> None:
    assert decode_header(DATA[:-1] + bytes([DATA[-1] ^ 1]), check=False) == (Kind.DATA, 7, 42)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b"\x02", "truncated"),
        (b"\x02\0\0\0\x05abc", "extends beyond the end"),
        (entry(Op.ACK, b"\0\0\0\1" + b"x" * 7), "operation 3 with 11 bytes"),
        (entry(Op.ACK, b"\0\0"), "operation 3 with 2 bytes"),
        (entry(Op.COUNT, b"\0\0\0\1" + b"x" * 9), "operation 4 with 13 bytes"),
        (entry(Op.RESERVE, b"x" * 11), "operation 5 with 11 bytes"),
        (entry(Op.QUEUE_DELETED, b"x" * 5), "operation 7 with 5 bytes"),
        (entry(Op.INGRESS, b""), "operation 8 with 0 bytes"),
        (entry(Op.SEND, b"x" * 20), "send entry"),
        (entry(Op.SEND, b"\0" * 27 + b"\xff\xff\0\0"), "send entry"),
        (entry(Op.SEND, b"\0" * 27 + b"\0\0\xff\xff"), "send entry"),
        (entry(Op.SEND, b"\x10" + b"\0" * 30), "extends beyond its end"),
        (entry(Op.SEND, b"\x40" + b"\0" * 30), "send entry"),
        (entry(Op.SEND, b"\x80" + b"\0" * 30), "send entry"),
        (entry(Op.SEND, b"\0" * 27 + b"\0\1\0\0\xff"), "send entry"),
    ],
)
def test_invalid_entry_under_a_correct_checksum_is_damage(body: bytes, text: str) -> None:
    with pytest.raises(DamagedRecord, match=text):
        read(encode_record(Kind.DATA, 0, 1, body))


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff"])
def test_json_entry_other_than_an_object_is_damage(content: bytes) -> None:
    with pytest.raises(DamagedRecord, match="JSON entry at byte 0"):
        decode_json(content, 0, len(content))


def test_record_header_has_28_bytes_and_begins_with_the_magic() -> None:
    assert HEADER.size == 28
    assert DATA[:2] == b"BJ"
    assert PLAIN.body in DATA
