"""Numbers of the selector language, with the behaviour of Java's int, long, float and double.

The Python type of a value is its Java type: ``Byte``, ``Short`` and ``Int`` are int, ``int`` is long, ``Float`` is float and ``float`` is
double. Arithmetic follows Java's binary numeric promotion (The Java Language Specification, section 5.6): the wider of both types,
integers wrap around, integer division drops the fraction.
"""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Callable
from typing import Any, Final

from bascule.amqp.types import Byte, Float, Int, Short, Timestamp, UByte, UInt, ULong, UShort

Number = int | float

#: Decimal numbers with fewer digits are ints.
_INT_DIGITS: Final = 10
#: Ranks: the higher one wins. Types without a rank, such as bool, are not numbers.
INT, LONG, FLOAT, DOUBLE = range(4)
RANK: Final[dict[type, int]] = {
    Byte: INT, Short: INT, Int: INT, UByte: INT, UShort: INT,
    int: LONG, UInt: LONG, ULong: LONG, Timestamp: LONG,
    Float: FLOAT,
    float: DOUBLE,
}  # fmt: skip


def wrap(value: int, bits: int) -> int:
    """Return ``value`` as a two's complement number of ``bits`` bits."""
    half = 1 << (bits - 1)
    return ((value + half) & ((1 << bits) - 1)) - half


def single(value: float) -> Float:
    """Return the 32-bit float nearest to a double; infinite beyond its range."""
    return Float(array("f", (value,))[0])


def literal(word: str, *, negative: bool = False) -> Number:
    """Return the value of a numeric literal, with or without a minus (-9223372036854775808 is a long, 9223372036854775808 is not).

    Raises ValueError for literals that Java rejects: a number out of range, an octal number with a digit above 7.
    """
    if len(word) < _INT_DIGITS and word.isdecimal() and word[0] != "0":  # most literals
        return Int(f"-{word}" if negative else word)
    digits = word.lower().replace("_", "")
    approximate = "p" in digits if digits.startswith("0x") else not {".", "e", "f", "d"}.isdisjoint(digits)
    return _approximate(word, digits, negative) if approximate else _exact(word, digits, negative)


def _exact(word: str, digits: str, negative: bool) -> Number:
    """Return an int if the value fits and has no suffix L, otherwise a long."""
    magnitude = digits.removesuffix("l")
    octal = len(magnitude) > 1 and magnitude[0] == "0" and magnitude[1].isdigit()
    if octal and not set(magnitude) <= set("01234567"):
        raise ValueError(f"{word} starts with 0, so it is octal, and has a digit above 7")
    value = int(magnitude, 8 if octal else 0)
    value = -value if negative else value
    if value == wrap(value, 32) and digits == magnitude:
        return Int(value)
    if value == wrap(value, 64):
        return value
    raise ValueError(f"{'-' if negative else ''}{word} is beyond the range of long")


def _approximate(word: str, digits: str, negative: bool) -> float:
    """Return a float with the suffix F, otherwise a double."""
    hexadecimal = digits.startswith("0x")
    is_single = digits.endswith("f")
    number = digits.rstrip("fd")
    value = _from_hexadecimal(number) if hexadecimal else float(number)
    value = -value if negative else value
    if is_single:
        value = single(value)
    if math.isinf(value):
        raise ValueError(f"{word} is beyond the range of {'float' if is_single else 'double'}")
    return value


def _from_hexadecimal(number: str) -> float:
    try:
        return float.fromhex(number)
    except OverflowError:
        return math.inf


def promote(value: Number, rank: int, to: int) -> Number:
    """Convert a number to a higher rank; only integers that become floating-point numbers change."""
    if rank >= FLOAT or to < FLOAT:
        return value
    return float(value) if to == DOUBLE else single(float(value))


def negate(value: Number) -> Number:
    """Unary minus."""
    rank = RANK[type(value)]
    return _RESULT[rank](-value)


def _divide_integers(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _divide_floats(a: float, b: float) -> float:
    if b:
        return a / b
    if not a or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1.0, b)


_RESULT: Final[tuple[Callable[[Number], Number], ...]] = (
    lambda value: Int(wrap(int(value), 32)),
    lambda value: wrap(int(value), 64),
    single,
    float,
)

#: The operation on integers, and the one on floating-point numbers.
_OPERATIONS: Final[dict[str, tuple[Callable[[int, int], int], Callable[[float, float], float]]]] = {
    "+": (operator.add, operator.add),
    "-": (operator.sub, operator.sub),
    "*": (operator.mul, operator.mul),
    "/": (_divide_integers, _divide_floats),
}


def arithmetic(symbol: str) -> Callable[[object, object], Number | None]:
    """Return the function of + - * or /; its result is None (unknown) for a non-number, or an integer division by zero."""
    integers, floats = _OPERATIONS[symbol]

    def operate(a: Any, b: Any) -> Number | None:  # values with a rank are ints or floats
        rank_a, rank_b = RANK.get(type(a)), RANK.get(type(b))
        if rank_a is None or rank_b is None:
            return None
        rank = rank_a if rank_a > rank_b else rank_b
        if rank >= FLOAT:
            return _RESULT[rank](floats(promote(a, rank_a, rank), promote(b, rank_b, rank)))
        if symbol == "/" and not b:
            return None
        return _RESULT[rank](integers(int(a), int(b)))

    return operate
