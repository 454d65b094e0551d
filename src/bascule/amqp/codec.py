"""AMQP 1.0 values from bytes and to bytes (part 1, sections 1.2 to 1.6).

Decoding goes by a table over the 256 constructor codes, encoding by a table over Python types. Nothing a peer writes is
trusted: sizes and counts are held against the bytes that are there and against ``limits.py``.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Callable
from typing import Any, Final, NoReturn

from bascule.amqp.errors import DecodeError, EncodeError
from bascule.amqp.limits import DEPTH_MAX, ITEMS_MAX, SYMBOL_SIZE_BYTES_MAX, ZERO_WIDTH_ITEMS_MAX
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

#: buffer, position after the constructor code, levels of nesting left -> value, position after it
Reader = Callable[[bytes, int, int], tuple[Any, int]]
Writer = Callable[[Any, bytearray], None]

DESCRIBED: Final = 0x00
NULL, TRUE, FALSE, UINT0, ULONG0, LIST0 = 0x40, 0x41, 0x42, 0x43, 0x44, 0x45
UBYTE, BYTE, SMALL_UINT, SMALL_ULONG, SMALL_INT, SMALL_LONG, BOOLEAN = 0x50, 0x51, 0x52, 0x53, 0x54, 0x55, 0x56
USHORT, SHORT = 0x60, 0x61
UINT, INT, FLOAT, CHAR, DECIMAL32 = 0x70, 0x71, 0x72, 0x73, 0x74
ULONG, LONG, DOUBLE, TIMESTAMP, DECIMAL64 = 0x80, 0x81, 0x82, 0x83, 0x84
DECIMAL128, UUID = 0x94, 0x98
BINARY8, STRING8, SYMBOL8, BINARY32, STRING32, SYMBOL32 = 0xA0, 0xA1, 0xA3, 0xB0, 0xB1, 0xB3
LIST8, MAP8, LIST32, MAP32, ARRAY8, ARRAY32 = 0xC0, 0xC1, 0xD0, 0xD1, 0xE0, 0xF0

_U32 = struct.Struct(">I")
_PAIR8 = struct.Struct(">BB")
_PAIR32 = struct.Struct(">II")


def decode(buffer: bytes, position: int = 0, depth: int = DEPTH_MAX) -> tuple[Any, int]:
    """The value that begins at ``position``, and the position after it. Raises DecodeError."""
    try:
        return _READERS[buffer[position]](buffer, position + 1, depth)
    except (struct.error, IndexError):
        raise DecodeError(f"the value at byte {position} is cut off") from None
    except UnicodeDecodeError as error:
        raise DecodeError(f"the value at byte {position} holds text that is none: {error.reason}") from None


def encode(value: Any) -> bytes:
    """The shortest usual encoding of a value. Raises EncodeError."""
    out = bytearray()
    write(value, out)
    return bytes(out)


def write(value: Any, out: bytearray) -> None:
    """Append the encoding of a value. Raises EncodeError."""
    try:
        _WRITERS[type(value)](value, out)
    except KeyError:
        raise EncodeError(f"no AMQP type for {type(value).__name__}") from None
    except (struct.error, UnicodeEncodeError) as error:
        raise EncodeError(f"{type(value).__name__} {value!r:.60}: {error}") from None


# --- reading ---------------------------------------------------------------------------------------------------------------------


def _unknown(buffer: bytes, position: int, _depth: int) -> NoReturn:
    raise DecodeError(f"unknown type code 0x{buffer[position - 1]:02x} at byte {position - 1}")


def _constant(value: Any) -> Reader:
    def read(_buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
        return value, position

    return read


def _fixed(layout: str, make: Callable[[Any], Any] | None = None) -> Reader:
    unpack_from, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    if make is None:

        def read_plain(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
            return unpack_from(buffer, position)[0], position + size

        return read_plain

    def read(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
        return make(unpack_from(buffer, position)[0]), position + size

    return read


def _octets(buffer: bytes, position: int, size: int) -> bytes:
    octets = buffer[position : position + size]
    if len(octets) != size:
        raise DecodeError(f"{size} bytes announced at byte {position}, {len(octets)} are there")
    return octets


def _variable8(make: Callable[[bytes], Any] | None) -> Reader:
    def read(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
        size = buffer[position]
        octets = _octets(buffer, position + 1, size)
        return make(octets) if make else octets, position + 1 + size

    return read


def _variable32(make: Callable[[bytes], Any] | None) -> Reader:
    def read(buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
        (size,) = _U32.unpack_from(buffer, position)
        octets = _octets(buffer, position + 4, size)
        return make(octets) if make else octets, position + 4 + size

    return read


def _symbol(octets: bytes) -> Symbol:
    if len(octets) > SYMBOL_SIZE_BYTES_MAX:
        raise DecodeError(f"symbol of {len(octets)} bytes, at most {SYMBOL_SIZE_BYTES_MAX} are taken")
    return Symbol(octets.decode("ascii"))


def _char(number: int) -> Char:
    try:
        return Char(chr(number))
    except (ValueError, OverflowError):
        raise DecodeError(f"no Unicode character 0x{number:x}") from None


def _boolean(number: int) -> bool:
    if number > 1:
        raise DecodeError(f"boolean of value {number}")
    return number == 1


def _uuid(octets: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=octets)


def _extent(buffer: bytes, position: int, pair: struct.Struct, depth: int) -> tuple[int, int, int]:
    """(item count, position of the first item, end) of a list, map or array."""
    if depth <= 0:
        raise DecodeError(f"values nested more than {DEPTH_MAX} deep")
    size, count = pair.unpack_from(buffer, position)
    start = position + pair.size
    end = position + pair.size // 2 + size
    if end > len(buffer) or end < start:
        raise DecodeError(f"compound of {size} bytes at byte {position} does not fit")
    if count > ITEMS_MAX:
        raise DecodeError(f"compound of {count} items, at most {ITEMS_MAX} are taken")
    return count, start, end


def _items(buffer: bytes, position: int, count: int, end: int, depth: int) -> list[Any]:
    if count > end - position:
        raise DecodeError(f"{count} items announced in {end - position} bytes")
    readers = _READERS
    items: list[Any] = []
    for _ in range(count):
        value, position = readers[buffer[position]](buffer, position + 1, depth)
        items.append(value)
    if position != end:
        raise DecodeError(f"the items of a compound end at byte {position}, not at {end}")
    return items


def _list(pair: struct.Struct) -> Reader:
    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        count, start, end = _extent(buffer, position, pair, depth)
        return _items(buffer, start, count, end, depth - 1), end

    return read


def _map(pair: struct.Struct) -> Reader:
    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        count, start, end = _extent(buffer, position, pair, depth)
        if count % 2:
            raise DecodeError(f"map of {count} items: a key has no value")
        items = _items(buffer, start, count, end, depth - 1)
        try:
            return dict(zip(items[::2], items[1::2], strict=True)), end
        except TypeError:
            raise DecodeError("a map's key is a list, map or array") from None

    return read


def _array(pair: struct.Struct) -> Reader:
    def read(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
        count, start, end = _extent(buffer, position, pair, depth)
        descriptor = None
        if buffer[start] == DESCRIBED:
            descriptor, start = decode(buffer, start + 1, depth - 1)
        code = buffer[start]
        start += 1
        if count > (ZERO_WIDTH_ITEMS_MAX if code in _ZERO_WIDTH else end - start):
            raise DecodeError(f"array of {count} items of type 0x{code:02x} in {end - start} bytes")
        reader = _READERS[code] if code != DESCRIBED else _unknown
        items = []
        for _ in range(count):
            value, start = reader(buffer, start, depth - 1)
            items.append(value)
        if start != end:
            raise DecodeError(f"the items of an array end at byte {start}, not at {end}")
        return Array(code, tuple(items), descriptor), end

    return read


def _described(buffer: bytes, position: int, depth: int) -> tuple[Any, int]:
    if depth <= 0:
        raise DecodeError(f"values nested more than {DEPTH_MAX} deep")
    descriptor, position = _READERS[buffer[position]](buffer, position + 1, depth - 1)
    value, position = _READERS[buffer[position]](buffer, position + 1, depth - 1)
    return Described(descriptor, value), position


_ZERO_WIDTH: Final = frozenset({NULL, TRUE, FALSE, UINT0, ULONG0, LIST0})


def _empty_list(_buffer: bytes, position: int, _depth: int) -> tuple[Any, int]:
    return [], position


_READER_OF_CODE: Final[dict[int, Reader]] = {
    DESCRIBED: _described,
    NULL: _constant(None),
    TRUE: _constant(True),
    FALSE: _constant(False),
    UINT0: _constant(UInt(0)),
    ULONG0: _constant(ULong(0)),
    LIST0: _empty_list,
    UBYTE: _fixed(">B", UByte),
    BYTE: _fixed(">b", Byte),
    SMALL_UINT: _fixed(">B", UInt),
    SMALL_ULONG: _fixed(">B", ULong),
    SMALL_INT: _fixed(">b", Int),
    SMALL_LONG: _fixed(">b"),
    BOOLEAN: _fixed(">B", _boolean),
    USHORT: _fixed(">H", UShort),
    SHORT: _fixed(">h", Short),
    UINT: _fixed(">I", UInt),
    INT: _fixed(">i", Int),
    FLOAT: _fixed(">f", Float),
    CHAR: _fixed(">I", _char),
    DECIMAL32: _fixed("4s", Decimal32),
    ULONG: _fixed(">Q", ULong),
    LONG: _fixed(">q"),
    DOUBLE: _fixed(">d"),
    TIMESTAMP: _fixed(">q", Timestamp),
    DECIMAL64: _fixed("8s", Decimal64),
    DECIMAL128: _fixed("16s", Decimal128),
    UUID: _fixed("16s", _uuid),
    BINARY8: _variable8(None),
    STRING8: _variable8(bytes.decode),
    SYMBOL8: _variable8(_symbol),
    BINARY32: _variable32(None),
    STRING32: _variable32(bytes.decode),
    SYMBOL32: _variable32(_symbol),
    LIST8: _list(_PAIR8),
    MAP8: _map(_PAIR8),
    LIST32: _list(_PAIR32),
    MAP32: _map(_PAIR32),
    ARRAY8: _array(_PAIR8),
    ARRAY32: _array(_PAIR32),
}
_READERS: Final[list[Reader]] = [_READER_OF_CODE.get(code, _unknown) for code in range(256)]


# --- writing ---------------------------------------------------------------------------------------------------------------------


def _packed(code: int, layout: str) -> Writer:
    pack = struct.Struct(f">B{layout}").pack

    def write_fixed(value: Any, out: bytearray) -> None:
        out += pack(code, value)

    return write_fixed


def _integer(zero: int | None, small: int, small_range: range, wide: int, wide_layout: str) -> Writer:
    """The integer types with a shorter form for small values."""
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
    if len(value) != 1:
        raise EncodeError(f"a char is one character, not {value!r:.20}")
    out.append(CHAR)
    out += _U32.pack(ord(value))


def _raw(code: int, size: int) -> Writer:
    def write_raw(value: bytes, out: bytearray) -> None:
        if len(value) != size:
            raise EncodeError(f"{type(value).__name__} of {len(value)} bytes, {size} are right")
        out.append(code)
        out += value

    return write_raw


def _write_uuid(value: uuid.UUID, out: bytearray) -> None:
    out.append(UUID)
    out += value.bytes


def _compound(content: bytearray, count: int, out: bytearray, code8: int, code32: int) -> None:
    if len(content) < 255 and count < 256:  # the size byte counts the count byte, too
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
#: The wide form of a code whose elements have a size before them.
_WIDE_OF_CODE: Final = {BINARY8: BINARY32, STRING8: STRING32, SYMBOL8: SYMBOL32, LIST8: LIST32, MAP8: MAP32, ARRAY8: ARRAY32}
_WIDE: Final = frozenset(_WIDE_OF_CODE.values())


def element(code: int, value: Any) -> bytes:
    """A value as an item of an array whose constructor is ``code``. Raises EncodeError."""
    if code in _ZERO_WIDTH:
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
    """Symbols as the array that fields with ``multiple=true`` use."""
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
