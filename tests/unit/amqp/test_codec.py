import struct
import uuid
from typing import Any

import pytest

from bascule.amqp.codec import decode, encode
from bascule.amqp.errors import DecodeError, EncodeError
from bascule.amqp.limits import DEPTH_MAX
from bascule.amqp.types import (
    Array,
    Byte,
    Char,
    Decimal32,
    Decimal64,
    Decimal128,
    Described,
    Float,
    Int,
    Short,
    Symbol,
    Timestamp,
    UByte,
    UInt,
    ULong,
    UShort,
)  # fmt: skip

# Encodings worked out by hand from part 1, section 1.6 of the standard.
GOLDEN: list[tuple[Any, str]] = [
    (None, "40"),
    (True, "41"),
    (False, "42"),
    (UByte(200), "50c8"),
    (UShort(500), "6001f4"),
    (UInt(0), "43"),
    (UInt(255), "52ff"),
    (UInt(256), "7000000100"),
    (ULong(0), "44"),
    (ULong(16), "5310"),
    (ULong(1 << 40), "800000010000000000"),
    (Byte(-1), "51ff"),
    (Short(-2), "61fffe"),
    (Int(-128), "5480"),
    (Int(128), "7100000080"),
    (-1, "55ff"),
    (1 << 33, "810000000200000000"),
    (Float(1.5), "723fc00000"),
    (1.5, "823ff8000000000000"),
    (Char("ä"), "73000000e4"),
    (Timestamp(1), "830000000000000001"),
    (uuid.UUID(int=1), "98" + "00" * 15 + "01"),
    (b"\x01\x02", "a0020102"),
    ("hé", "a10368c3a9"),
    (Symbol("amqp"), "a304616d7170"),
    (Decimal32(b"\x01\x02\x03\x04"), "7401020304"),
    (Decimal64(bytes(8)), "84" + "00" * 8),
    (Decimal128(bytes(16)), "94" + "00" * 16),
    ([], "45"),
    ([1, "a"], "c0060255 01 a10161".replace(" ", "")),
    ({}, "c10100"),
    ({"k": None}, "c10502a1016b40"),
    (Array(0xA3, (Symbol("x"), Symbol("y"))), "e00602a301780179"),
    (Described(ULong(0x24), []), "00532445"),
    (b"x" * 256, "b000000100" + "78" * 256),
]


@pytest.mark.parametrize(("value", "expected"), GOLDEN, ids=lambda item: repr(item)[:30])
def test_values_encode_to_the_octets_of_the_standard(value: Any, expected: str) -> None:
    assert encode(value).hex() == expected
    decoded, position = decode(bytes.fromhex(expected))
    assert (decoded, type(decoded), position) == (value, type(value), len(expected) // 2)


@pytest.mark.parametrize(
    ("encoded", "value"),
    [("5601", True), ("5600", False), ("7000000000", UInt(0)), ("8000000000000000ff", ULong(255)), ("d00000000500000001" + "40", [None])],
)
def test_longer_encodings_of_a_value_are_decoded(encoded: str, value: Any) -> None:
    assert decode(bytes.fromhex(encoded))[0] == value


HOSTILE = {
    "nothing": "",
    "unknown code": "3f",
    "cut number": "7000",
    "cut string": "a105616263",
    "text that is no UTF-8": "a101ff",
    "symbol that is no ASCII": "a301ff",
    "boolean of 2": "5602",
    "char beyond Unicode": "7300110000",
    "list longer than its bytes": "d0000000ff00000001" + "40",
    "list with more items than bytes": "d000000005ffffffff40",
    "list whose size cuts an item": "c00301 7000".replace(" ", ""),
    "list with bytes left": "c003014040",
    "map of an odd number": "c10301" + "4040",
    "map with a list as key": "c103024540",
    "list size 0": "c000",
    "array of a billion nulls": "f0000000053b9aca0040",
    "array without constructor": "e00100",
    "array of described items twice": "e0070100532400532445",
    "deep lists": "c0" + "".join(f"{size:02x}01c0" for size in range(120, 30, -2)) + "0100",
    "deep descriptors": "00" * 100 + "40",
    "symbol of a megabyte": "b300100000" + "61" * (1 << 20),
}


@pytest.mark.parametrize("encoded", HOSTILE.values(), ids=HOSTILE)
def test_invalid_encoding_raises_decode_error(encoded: str) -> None:
    with pytest.raises(DecodeError):
        decode(bytes.fromhex(encoded))


def test_nesting_beyond_the_limit_raises_decode_error() -> None:
    value: Any = []
    for _ in range(DEPTH_MAX):
        value = [value]
    assert decode(encode(value))[0] == value
    with pytest.raises(DecodeError, match="nested"):
        decode(encode([value]))


@pytest.mark.parametrize(
    "value",
    [UByte(256), UInt(-1), 1 << 63, Symbol("ä"), Char("ab"), Decimal32(b"1"), object(), Array(0x52, (UInt(256),)), Array(0xA3, ("text",)),
     Array(0xA1, ("x" * 256,))],
)  # fmt: skip
def test_value_without_encoding_raises_encode_error(value: Any) -> None:
    with pytest.raises(EncodeError):
        encode(value)


def test_consecutive_values_are_decoded_from_one_buffer() -> None:
    buffer = b"".join(encode(value) for value in (1, "two", [3]))
    values, position = [], 0
    while position < len(buffer):
        value, position = decode(buffer, position)
        values.append(value)
    assert values == [1, "two", [3]]


def test_array_of_lists_keeps_its_constructor() -> None:
    array = Array(0xD0, ([1], [], ["x" * 300]))
    assert decode(encode(array))[0] == array


def test_infinity_and_nan_round_trip() -> None:
    assert decode(encode(float("inf")))[0] == float("inf")
    assert struct.pack(">d", decode(encode(float("nan")))[0]) == struct.pack(">d", float("nan"))
