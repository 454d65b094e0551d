"""The types of properties and body items by name, with their text forms, for a conversion to Kafka and back without loss."""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
import uuid
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from bascule.amqp.types import Byte, Char, Float, Int, Short, Symbol, Timestamp, UByte, UInt, ULong, UShort
from bascule.core.errors import InvalidInput
from bascule.jms.selector.numbers import single

#: The types of properties and body items: those of JMS, and the other simple types of AMQP.
Value = bool | int | float | str | bytes | uuid.UUID | None

_DIGITS: Final = re.compile(r"[+-]?[0-9]+")
# Digits behind an optional point would be matched in as many ways as there are digits, each of which takes time.
_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_NOT_FINITE: Final = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Type(NamedTuple):
    """A type: its name in headers and JSON, its Python class, and its conversion to and from text (raises ValueError)."""

    name: str
    kind: type
    text: Callable[[Any], str]
    parse: Callable[[str], Any]


def _integer(name: str, kind: type, bits: int, *, signed: bool = True) -> Type:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)

    def parse(text: str) -> Any:
        if not _DIGITS.fullmatch(text) or not low <= (value := int(text)) <= high:
            raise ValueError(text)
        # mypyc would make the value a plain int if ``kind`` were declared as type[int].
        return kind(value)

    return Type(name, kind, lambda value: str(int(value)), parse)


def _parse_double(text: str) -> float:
    if text in _NOT_FINITE:
        return _NOT_FINITE[text]
    if not _DECIMAL.fullmatch(text):
        raise ValueError(text)
    return float(text)


def _double_text(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _float_text(value: float) -> str:
    """Return the shortest text of a 32-bit float: 0.1, not 0.10000000149011612."""
    if not math.isfinite(value):
        return _double_text(value)
    text = next(text for digits in range(6, 10) if single(float(text := f"{value:.{digits}g}")) == value)
    return text if "." in text or "e" in text else f"{text}.0"


def _parse_boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _parse_null(text: str) -> None:
    if text not in ("", "null"):
        raise ValueError(text)


def _parse_char(text: str) -> Char:
    if len(text) != 1:
        raise ValueError(text)
    return Char(text)


def _parse_symbol(text: str) -> Symbol:
    text.encode("ascii")
    return Symbol(text)


TYPES: Final = (
    Type("string", str, str, str),
    Type("boolean", bool, lambda value: "true" if value else "false", _parse_boolean),
    _integer("byte", Byte, 8),
    _integer("short", Short, 16),
    _integer("int", Int, 32),
    _integer("long", int, 64),
    Type("float", Float, _float_text, lambda text: single(_parse_double(text))),
    Type("double", float, _double_text, _parse_double),
    Type("char", Char, str, _parse_char),
    Type("bytes", bytes, lambda value: base64.b64encode(value).decode(), lambda text: base64.b64decode(text, validate=True)),
    Type("null", type(None), lambda _: "", _parse_null),
    # Types of AMQP that JMS does not have: other senders use them.
    _integer("ubyte", UByte, 8, signed=False),
    _integer("ushort", UShort, 16, signed=False),
    _integer("uint", UInt, 32, signed=False),
    _integer("ulong", ULong, 64, signed=False),
    _integer("timestamp", Timestamp, 64),
    Type("symbol", Symbol, str, _parse_symbol),
    Type("uuid", uuid.UUID, str, uuid.UUID),
)
BY_NAME: Final = {each.name: each for each in TYPES}
BY_CLASS: Final = {each.kind: each for each in TYPES}
#: Types whose values are JSON numbers or booleans.
_JSON_NATIVE: Final = (bool, int, float)


def type_of(value: object, where: str) -> Type:
    """Return the type of a value. Raises InvalidInput for an unknown class."""
    found = BY_CLASS.get(type(value))
    if found is None:
        raise InvalidInput(f"{where}: a value of type {type(value).__name__} can only be represented in AMQP")
    return found


def parse(type_name: str, text: str, where: str) -> Any:
    """Return the value of ``text``. Raises InvalidInput, with ``where`` as its prefix."""
    found = BY_NAME.get(type_name)
    if found is None:
        raise InvalidInput(f"{where}: unknown type {type_name!r}; the types are {', '.join(BY_NAME)}")
    try:
        return found.parse(text)
    except (ValueError, KeyError, binascii.Error):
        raise InvalidInput(f"{where}: {text[:60]!r} is not a valid {type_name}") from None


def to_json(value: object, where: str) -> dict[str, Any]:
    """Return a body item as JSON: ``{"type": ..., "value": ...}``; maps and lists have items of the same form."""
    if isinstance(value, dict):
        return {"type": "map", "value": {str(key): to_json(item, f"{where}.{key}") for key, item in value.items()}}
    if isinstance(value, list):
        return {"type": "list", "value": [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if value is None:
        return {"type": "null", "value": None}
    found = type_of(value, where)
    text = found.text(value)
    native = isinstance(value, _JSON_NATIVE) and text not in _NOT_FINITE
    return {"type": found.name, "value": json.loads(text) if native else text}


def from_json(item: object, where: str) -> Any:
    """Return the value of a body item. Raises InvalidInput."""
    if not isinstance(item, dict) or item.keys() != {"type", "value"} or not isinstance(item["type"], str):
        raise InvalidInput(f'{where}: expected {{"type": ..., "value": ...}}')
    name, value = item["type"], item["value"]
    if name == "map" and isinstance(value, dict):
        return {key: from_json(each, f"{where}.{key}") for key, each in value.items()}
    if name == "list" and isinstance(value, list):
        return [from_json(each, f"{where}[{index}]") for index, each in enumerate(value)]
    return parse(name, value if isinstance(value, str) else json.dumps(value), where)
