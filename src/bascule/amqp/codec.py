"""Decoding of AMQP 1.0 values (part 1, sections 1.2 to 1.6); :mod:`bascule.amqp.encoder` encodes them.

The decoder uses a table over the 256 constructor codes. It does not trust the peer: it checks sizes and counts against the bytes available
and against ``limits.py``.
"""

from __future__ import annotations

import struct
import sys
import uuid
from collections.abc import Callable
from typing import Any, Final, NoReturn

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
    SIZE8,
    SIZE32,
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
    WIDTH,
    ZERO_WIDTH,
)  # fmt: skip
from bascule.amqp.encoder import encode
from bascule.amqp.errors import DecodeError
from bascule.amqp.limits import DEPTH_MAX, ITEMS_MAX, NUMBER_KEYS_MAX, SYMBOL_SIZE_BYTES_MAX, ZERO_WIDTH_ITEMS_MAX
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

__all__ = ["Budget", "decode", "encode", "read_descriptor", "skip"]


class Budget:
    """The limits of a decoding: nesting depth, and the number of items of lists, maps and arrays, counted over all nested values."""

    __slots__ = ("depth", "items")

    def __init__(self, items: int = ITEMS_MAX) -> None:
        self.depth = DEPTH_MAX
        self.items = items

    def enter(self, count: int) -> None:
        """Begin a value with ``count`` items. Raises DecodeError."""
        self.depth -= 1
        if self.depth < 0:
            raise DecodeError(f"values are nested more than {DEPTH_MAX} levels deep")
        self.items -= count
        if self.items < 0:
            raise DecodeError(f"lists, maps and arrays have {-self.items} items more than allowed")

    def leave(self) -> None:
        """End the value."""
        self.depth += 1


#: (buffer, position after the constructor code, remaining budget) -> (value, position after it)
Reader = Callable[[bytes, int, Budget], tuple[Any, int]]

_U32 = struct.Struct(">I")
_PAIR8 = struct.Struct(">BB")
_PAIR32 = struct.Struct(">II")


def decode(buffer: bytes, position: int = 0, budget: Budget | None = None) -> tuple[Any, int]:
    """Return the value at ``position`` and the position after it. Values decoded with one ``budget`` share its limits.

    Raises DecodeError.
    """
    try:
        return _READERS[buffer[position]](buffer, position + 1, budget or Budget())
    except (struct.error, IndexError):
        raise DecodeError(f"the value at byte {position} is truncated") from None
    except UnicodeDecodeError as error:
        raise DecodeError(f"invalid text in the value at byte {position}: {error.reason}") from None


# --- reading ---------------------------------------------------------------------------------------------------------------------


def _unknown(buffer: bytes, position: int, _budget: Budget) -> NoReturn:
    raise DecodeError(f"unknown type code 0x{buffer[position - 1]:02x} at byte {position - 1}")


def _constant(value: Any) -> Reader:
    def read(_buffer: bytes, position: int, _budget: Budget) -> tuple[Any, int]:
        return value, position

    return read


def _fixed(layout: str, make: Callable[[Any], Any] | None = None) -> Reader:
    unpack_from, size = struct.Struct(layout).unpack_from, struct.calcsize(layout)

    if make is None:

        def read_plain(buffer: bytes, position: int, _budget: Budget) -> tuple[Any, int]:
            return unpack_from(buffer, position)[0], position + size

        return read_plain

    def read(buffer: bytes, position: int, _budget: Budget) -> tuple[Any, int]:
        return make(unpack_from(buffer, position)[0]), position + size

    return read


def _octets(buffer: bytes, position: int, size: int) -> bytes:
    octets = buffer[position : position + size]
    if len(octets) != size:
        raise DecodeError(f"value at byte {position} has a size of {size} bytes, but only {len(octets)} follow")
    return octets


def _variable8(make: Callable[[bytes], Any] | None) -> Reader:
    def read(buffer: bytes, position: int, _budget: Budget) -> tuple[Any, int]:
        size = buffer[position]
        octets = _octets(buffer, position + 1, size)
        return make(octets) if make else octets, position + 1 + size

    return read


def _variable32(make: Callable[[bytes], Any] | None) -> Reader:
    def read(buffer: bytes, position: int, _budget: Budget) -> tuple[Any, int]:
        (size,) = _U32.unpack_from(buffer, position)
        octets = _octets(buffer, position + 4, size)
        return make(octets) if make else octets, position + 4 + size

    return read


def _symbol(octets: bytes) -> Symbol:
    if len(octets) > SYMBOL_SIZE_BYTES_MAX:
        raise DecodeError(f"symbol of {len(octets)} bytes exceeds the limit of {SYMBOL_SIZE_BYTES_MAX}")
    return Symbol(octets.decode("ascii"))


def _char(number: int) -> Char:
    if number in SURROGATES or number > sys.maxunicode:
        raise DecodeError(f"invalid Unicode character 0x{number:x}")
    return Char(chr(number))


def _boolean(number: int) -> bool:
    if number > 1:
        raise DecodeError(f"invalid boolean value {number}")
    return number == 1


def _uuid(octets: bytes) -> uuid.UUID:
    return uuid.UUID(bytes=octets)


def _extent(buffer: bytes, position: int, pair: struct.Struct, budget: Budget) -> tuple[int, int, int]:
    """Return (item count, position of the first item, end) of the list, map or array that begins here."""
    size, count = pair.unpack_from(buffer, position)
    start = position + pair.size
    end = position + pair.size // 2 + size
    if end > len(buffer) or end < start:
        raise DecodeError(f"list, map or array at byte {position} has a size of {size} bytes, which exceeds its container")
    budget.enter(count)
    return count, start, end


def _items(buffer: bytes, position: int, count: int, end: int, budget: Budget) -> list[Any]:
    """Return the items of a list or map. Raises DecodeError unless the items end at ``end``."""
    if count > end - position:
        raise DecodeError(f"invalid count: {count} items in {end - position} bytes")
    readers = _READERS
    items: list[Any] = []
    for _ in range(count):
        value, position = readers[buffer[position]](buffer, position + 1, budget)
        items.append(value)
    if position != end:
        raise DecodeError(f"the items of a list or map end at byte {position}, but its size says {end}")
    budget.leave()
    return items


def _list(pair: struct.Struct) -> Reader:
    def read(buffer: bytes, position: int, budget: Budget) -> tuple[Any, int]:
        count, start, end = _extent(buffer, position, pair, budget)
        return _items(buffer, start, count, end, budget), end

    return read


def _map(pair: struct.Struct) -> Reader:
    def read(buffer: bytes, position: int, budget: Budget) -> tuple[Any, int]:
        count, start, end = _extent(buffer, position, pair, budget)
        if count % 2:
            raise DecodeError(f"map with {count} items: the last key has no value")
        items = _items(buffer, start, count, end, budget)
        keys = items[::2]
        if not _TEXT_KEYS.issuperset(map(type, keys)):
            _check_keys(keys)
        made = dict(zip(keys, items[1::2], strict=True))
        if len(made) < len(keys):
            raise DecodeError(f"the map at byte {position - 1} has a duplicate key")
        return made, end

    return read


def _check_keys(keys: list[Any]) -> None:
    """Raise DecodeError for keys that are not hashable, and for too many keys whose hashes a peer can make collide."""
    kinds = set(map(type, keys)) - _TEXT_KEYS
    if wrong := kinds - _NUMBER_KEYS:
        raise DecodeError(f"invalid type of a map key: {', '.join(sorted(kind.__name__ for kind in wrong))}")
    if sum(type(key) in kinds for key in keys) > NUMBER_KEYS_MAX:
        raise DecodeError(f"a map has more than {NUMBER_KEYS_MAX} keys that are neither text nor binary")


def _array(pair: struct.Struct) -> Reader:
    def read(buffer: bytes, position: int, budget: Budget) -> tuple[Any, int]:
        count, start, end = _extent(buffer, position, pair, budget)
        descriptor = None
        if buffer[start] == DESCRIBED:
            descriptor, start = _descriptor(buffer, start + 1, budget)
        code = buffer[start]
        start += 1
        if count > (ZERO_WIDTH_ITEMS_MAX if code in ZERO_WIDTH else end - start):
            raise DecodeError(f"invalid count: array of {count} items of type 0x{code:02x} in {end - start} bytes")
        reader = _READERS[code] if code != DESCRIBED else _unknown
        items = []
        for _ in range(count):
            value, start = reader(buffer, start, budget)
            items.append(value)
        if start != end:
            raise DecodeError(f"the items of an array end at byte {start}, but its size says {end}")
        budget.leave()
        return Array(code, tuple(items), descriptor), end

    return read


def _descriptor(buffer: bytes, position: int, budget: Budget) -> tuple[Any, int]:
    """Return the descriptor at ``position``. AMQP reserves all types but ulong and symbol (part 1, section 1.2.1).

    The type is checked before the value is read, because any other type may have a million items.
    """
    code = buffer[position]
    if code not in _DESCRIPTOR_CODES:
        raise DecodeError(f"the descriptor at byte {position} has type code 0x{code:02x}; it must be a ulong or symbol")
    return _READERS[code](buffer, position + 1, budget)


def _described(buffer: bytes, position: int, budget: Budget) -> tuple[Any, int]:
    budget.enter(1)
    descriptor, position = _descriptor(buffer, position, budget)
    value, position = _READERS[buffer[position]](buffer, position + 1, budget)
    budget.leave()
    return Described(descriptor, value), position


def read_descriptor(data: bytes, position: int) -> tuple[Any, int]:
    """Return the descriptor at ``position``, which is a ULong or a Symbol, and the position after it.

    Raises IndexError, struct.error, ValueError, DecodeError.
    """
    return _descriptor(data, position, Budget())


def skip(data: bytes, position: int) -> int:
    """Return the end of the value at ``position`` according to its size, which may be beyond the data.

    Raises IndexError, struct.error, ValueError, DecodeError.
    """
    levels = 0
    while data[position] == DESCRIBED:
        levels += 1
        if levels > DEPTH_MAX:  # a message of 64 MiB could have 33 million levels
            raise DecodeError(f"values are nested more than {DEPTH_MAX} levels deep")
        _, position = read_descriptor(data, position + 1)
    width = WIDTH[data[position]]
    if width >= 0:
        return position + 1 + width
    if width == SIZE8:
        return position + 2 + data[position + 1]
    if width == SIZE32:
        size: int = _U32.unpack_from(data, position + 1)[0]
        return position + 5 + size
    raise ValueError(f"unknown type code 0x{data[position]:02x} at byte {position}")


#: The types of descriptors.
_DESCRIPTOR_CODES: Final = frozenset({ULONG, SMALL_ULONG, ULONG0, SYMBOL8, SYMBOL32})
#: Key types whose hash is randomized per process, so that a peer cannot make keys collide.
_TEXT_KEYS: Final = frozenset({str, Symbol, bytes})
#: Key types whose hash a peer can choose. Null and floats are not allowed as keys, because NaN is not equal to itself.
_NUMBER_KEYS: Final = frozenset({bool, UByte, UShort, UInt, ULong, Byte, Short, Int, int, Timestamp, Char, uuid.UUID})


def _empty_list(_buffer: bytes, position: int, _budget: Budget) -> tuple[Any, int]:
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
