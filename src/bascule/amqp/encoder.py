"""Encoding of AMQP 1.0 values (part 1, sections 1.2 to 1.6), by a table over Python types."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from typing import Any, Final

from bascule.amqp.constructors import (
    ARRAY8,
    ARRAY32,
    BINARY8,
    BINARY32,
    BOOLEAN,
    BYTE,
    CHAR,
    DECIMAL32,
    DECIMAL64,
    DECIMAL128,
    DESCRIBED,
    DOUBLE,
    FALSE,
    FLOAT,
    INT,
    LIST0,
    LIST8,
    LIST32,
    LONG,
    MAP8,
    MAP32,
    NULL,
    SHORT,
    SMALL_INT,
    SMALL_LONG,
    SMALL_UINT,
    SMALL_ULONG,
    STRING8,
    STRING32,
    SURROGATES,
    SYMBOL8,
    SYMBOL32,
    TIMESTAMP,
    TRUE,
    UBYTE,
    UINT,
    UINT0,
    ULONG,
    ULONG0,
    USHORT,
    UUID,
    ZERO_WIDTH,
)  # fmt: skip
from bascule.amqp.errors import EncodeError
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
)

Writer = Callable[[Any, bytearray], None]

_U32 = struct.Struct(">I")
_PAIR8 = struct.Struct(">BB")
_PAIR32 = struct.Struct(">II")


def encode(value: Any) -> bytes:
    """Return the shortest usual encoding of a value. Raises EncodeError."""
    out = bytearray()
    write(value, out)
    return bytes(out)


def write(value: Any, out: bytearray) -> None:
    """Append the encoding of a value. Raises EncodeError."""
    try:
        _WRITERS[type(value)](value, out)
    except KeyError:
        raise EncodeError(f"cannot encode a {type(value).__name__}: it has no AMQP type") from None
    except (struct.error, UnicodeEncodeError) as error:
        raise EncodeError(f"{type(value).__name__} {value!r:.60}: {error}") from None


def _packed(code: int, layout: str) -> Writer:
    pack = struct.Struct(f">B{layout}").pack

    def write_fixed(value: Any, out: bytearray) -> None:
        out += pack(code, value)

    return write_fixed


def _integer(zero: int | None, small: int, small_range: range, wide: int, wide_layout: str) -> Writer:
    """Return the writer of an integer type with a shorter form for small values."""
    pack_small = struct.Struct(">BB" if small_range.start == 0 else ">Bb").pack
    pack_wide = struct.Struct(f">B{wide_layout}").pack

    def write_integer(value: int, out: bytearray) -> None:
        if value == 0 and zero is not None:
            out.append(zero)
        elif value in small_range:
            out += pack_small(small, value)
        else:
            out += pack_wide(wide, value)

    return write_integer


def _write_variable(octets: bytes | bytearray | memoryview, out: bytearray, code8: int, code32: int) -> None:
    size = len(octets)
    if size < 256:
        out.append(code8)
        out.append(size)
    else:
        out.append(code32)
        out += _U32.pack(size)
    out += octets


def _write_null(_value: None, out: bytearray) -> None:
    out.append(NULL)


def _write_boolean(value: bool, out: bytearray) -> None:
    out.append(TRUE if value else FALSE)


def _write_string(value: str, out: bytearray) -> None:
    _write_variable(value.encode(), out, STRING8, STRING32)


def _write_symbol(value: Symbol, out: bytearray) -> None:
    _write_variable(value.encode("ascii"), out, SYMBOL8, SYMBOL32)


def _write_binary(value: bytes | bytearray | memoryview, out: bytearray) -> None:
    _write_variable(value, out, BINARY8, BINARY32)


def _write_char(value: Char, out: bytearray) -> None:
    if len(value) != 1 or ord(value) in SURROGATES:
        raise EncodeError(f"invalid char {value!r:.20}: it must be one Unicode character")
    out.append(CHAR)
    out += _U32.pack(ord(value))


def _raw(code: int, size: int) -> Writer:
    def write_raw(value: bytes, out: bytearray) -> None:
        if len(value) != size:
            raise EncodeError(f"{type(value).__name__} has {len(value)} bytes; it must have {size}")
        out.append(code)
        out += value

    return write_raw


def _write_uuid(value: uuid.UUID, out: bytearray) -> None:
    out.append(UUID)
    out += value.bytes


def _compound(content: bytearray, count: int, out: bytearray, code8: int, code32: int) -> None:
    if len(content) < 255 and count < 256:  # the size byte includes the count byte
        out.append(code8)
        out += _PAIR8.pack(len(content) + 1, count)
    else:
        out.append(code32)
        out += _PAIR32.pack(len(content) + 4, count)
    out += content


def _write_list(value: list[Any] | tuple[Any, ...], out: bytearray) -> None:
    if not value:
        out.append(LIST0)
        return
    content = bytearray()
    for item in value:
        write(item, content)
    _compound(content, len(value), out, LIST8, LIST32)


def _write_map(value: dict[Any, Any], out: bytearray) -> None:
    content = bytearray()
    for key, item in value.items():
        write(key, content)
        write(item, content)
    _compound(content, 2 * len(value), out, MAP8, MAP32)


def _write_described(value: Described, out: bytearray) -> None:
    out.append(DESCRIBED)
    write(value.descriptor, out)
    write(value.value, out)


def _write_array(value: Array, out: bytearray) -> None:
    content = bytearray()
    if value.descriptor is not None:
        content.append(DESCRIBED)
        write(value.descriptor, content)
    content.append(value.code)
    for item in value.items:
        content += element(value.code, item)
    _compound(content, len(value.items), out, ARRAY8, ARRAY32)


_LAYOUT_OF_CODE: Final = {
    UBYTE: ">B", BYTE: ">b", SMALL_UINT: ">B", SMALL_ULONG: ">B", SMALL_INT: ">b", SMALL_LONG: ">b", BOOLEAN: ">B", USHORT: ">H",
    SHORT: ">h", UINT: ">I", INT: ">i", FLOAT: ">f", ULONG: ">Q", LONG: ">q", DOUBLE: ">d", TIMESTAMP: ">q",
}  # fmt: skip
#: The wide form of a code whose elements have a size field.
_WIDE_OF_CODE: Final = {BINARY8: BINARY32, STRING8: STRING32, SYMBOL8: SYMBOL32, LIST8: LIST32, MAP8: MAP32, ARRAY8: ARRAY32}
_WIDE: Final = frozenset(_WIDE_OF_CODE.values())


def element(code: int, value: Any) -> bytes:
    """Return a value as an item of an array with the constructor ``code``. Raises EncodeError."""
    if code in ZERO_WIDTH:
        return b""
    layout = _LAYOUT_OF_CODE.get(code)
    if layout is not None:
        return struct.pack(layout, value)
    encoded = encode(value)
    if encoded[0] == code:
        return encoded[1:]
    if code in _WIDE and _WIDE_OF_CODE.get(encoded[0]) == code:
        if encoded[0] in (LIST8, MAP8, ARRAY8):
            return _PAIR32.pack(encoded[1] + 3, encoded[2]) + encoded[3:]
        return _U32.pack(encoded[1]) + encoded[2:]
    if encoded[0] == LIST0 and code in (LIST8, LIST32):
        return b"\x01\x00" if code == LIST8 else _PAIR32.pack(4, 0)
    raise EncodeError(f"{value!r:.60} does not fit into an array of type 0x{code:02x}")


def symbol_array(symbols: tuple[Symbol, ...] | list[Symbol]) -> Array:
    """Return symbols as the array that fields with ``multiple=true`` use."""
    return Array(SYMBOL8 if all(len(symbol) < 256 for symbol in symbols) else SYMBOL32, tuple(symbols))


_SIGNED8, _UNSIGNED8 = range(-128, 128), range(256)
_WRITERS: Final[dict[type, Writer]] = {
    type(None): _write_null,
    bool: _write_boolean,
    int: _integer(None, SMALL_LONG, _SIGNED8, LONG, "q"),
    float: _packed(DOUBLE, "d"),
    str: _write_string,
    bytes: _write_binary,
    bytearray: _write_binary,
    memoryview: _write_binary,
    list: _write_list,
    tuple: _write_list,
    dict: _write_map,
    uuid.UUID: _write_uuid,
    UByte: _packed(UBYTE, "B"),
    UShort: _packed(USHORT, "H"),
    UInt: _integer(UINT0, SMALL_UINT, _UNSIGNED8, UINT, "I"),
    ULong: _integer(ULONG0, SMALL_ULONG, _UNSIGNED8, ULONG, "Q"),
    Byte: _packed(BYTE, "b"),
    Short: _packed(SHORT, "h"),
    Int: _integer(None, SMALL_INT, _SIGNED8, INT, "i"),
    Timestamp: _packed(TIMESTAMP, "q"),
    Float: _packed(FLOAT, "f"),
    Char: _write_char,
    Symbol: _write_symbol,
    Decimal32: _raw(DECIMAL32, 4),
    Decimal64: _raw(DECIMAL64, 8),
    Decimal128: _raw(DECIMAL128, 16),
    Described: _write_described,
    Array: _write_array,
}
