"""AMQP 1.0 primitive types as Python values (part 1, section 1.6).

None, bool, int (long), float (double), str (string), bytes (binary), uuid.UUID, list and dict represent themselves;
the classes here represent the other types. They are ints, strs and bytes to all code but the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class UByte(int):
    """Integer of 8 bits, unsigned."""

    __slots__ = ()


class UShort(int):
    """Integer of 16 bits, unsigned."""

    __slots__ = ()


class UInt(int):
    """Integer of 32 bits, unsigned."""

    __slots__ = ()


class ULong(int):
    """Integer of 64 bits, unsigned."""

    __slots__ = ()


class Byte(int):
    """Integer of 8 bits, signed."""

    __slots__ = ()


class Short(int):
    """Integer of 16 bits, signed."""

    __slots__ = ()


class Int(int):
    """Integer of 32 bits, signed."""

    __slots__ = ()


class Timestamp(int):
    """Milliseconds since the Unix epoch."""

    __slots__ = ()


class Float(float):
    """IEEE 754 number of 32 bits."""

    __slots__ = ()


class Char(str):
    """One Unicode character."""

    __slots__ = ()


class Symbol(str):
    """An ASCII name from a constrained domain."""

    __slots__ = ()


class Decimal32(bytes):
    """IEEE 754 decimal32 as its 4 bytes."""

    __slots__ = ()


class Decimal64(bytes):
    """IEEE 754 decimal64 as its 8 bytes."""

    __slots__ = ()


class Decimal128(bytes):
    """IEEE 754 decimal128 as its 16 bytes."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Described:
    """A value with a descriptor (a ULong or a Symbol) that defines its meaning."""

    descriptor: Any
    value: Any


@dataclass(frozen=True, slots=True)
class Array:
    """Values of one type. ``code`` is the constructor of all items; a ``descriptor`` makes them described values."""

    code: int
    items: tuple[Any, ...]
    descriptor: Any = None
