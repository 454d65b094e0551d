"""Composite types as tables: a class lists its fields in wire order, each with its wire type, its default and whether it is mandatory.

Decoding accepts numeric and symbolic descriptors. Encoding writes numeric descriptors and omits trailing defaults (part 1, section 1.4).
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Callable
from typing import Any, ClassVar, Final, NamedTuple, TypeVar, dataclass_transform

from bascule.amqp.codec import Budget, decode, skip
from bascule.amqp.encoder import encode, symbol_array
from bascule.amqp.errors import DecodeError, LimitExceeded
from bascule.amqp.limits import PERFORMATIVE_ITEMS_MAX, SYMBOL_SIZE_BYTES_MAX, TRANSACTION_ID_SIZE_BYTES_MAX
from bascule.amqp.types import Array, Described, Symbol, UByte, UInt, ULong, UShort


class Wire(NamedTuple):
    """The wire type of a field: ``load`` converts a decoded value, ``dump`` returns a value to encode."""

    name: str
    load: Callable[[Any], Any]
    dump: Callable[[Any], Any]


class Field(NamedTuple):
    """A field of a composite type."""

    name: str
    wire: Wire
    default: Any
    mandatory: bool


class Composite:
    """The base class of composite types (described lists)."""

    __slots__ = ()
    CODE: ClassVar[int]
    SYMBOL: ClassVar[str]
    FIELDS: ClassVar[tuple[Field, ...]]


UINT_MAX: Final = 0xFFFFFFFF
_BY_DESCRIPTOR: Final[dict[Any, type[Composite]]] = {}
C = TypeVar("C", bound=Composite)


@dataclass_transform()
def composite(code: int, symbol: str) -> Callable[[type[C]], type[C]]:
    """Make a class a composite type with these two descriptors."""

    def register(cls: type[C]) -> type[C]:
        made = dataclasses.dataclass(slots=True)(cls)
        made.CODE, made.SYMBOL = code, symbol
        made.FIELDS = tuple(Field(field.name, **field.metadata) for field in dataclasses.fields(made))  # type: ignore[arg-type]
        _BY_DESCRIPTOR[code] = _BY_DESCRIPTOR[symbol] = made
        return made

    return register


def field(wire: Wire, default: Any = None, *, mandatory: bool = False) -> Any:
    """Declare a field. A mandatory field must be present and is always written."""
    return dataclasses.field(default=default, metadata={"wire": wire, "default": default, "mandatory": mandatory})


def load(value: Any) -> Any:
    """Return a decoded value with known described types as composites; unknown ones stay Described. Raises DecodeError."""
    if type(value) is not Described:
        return value
    cls = _BY_DESCRIPTOR.get(value.descriptor)
    if cls is None:
        return value
    rows, values = cls.FIELDS, value.value
    if type(values) is not list or len(values) > len(rows):
        raise DecodeError(f"{cls.SYMBOL} must have a list of at most {len(rows)} fields")
    loaded = cls()
    for row, item in zip(rows, values, strict=False):
        if item is not None:
            try:
                setattr(loaded, row.name, row.wire.load(item))
            except (TypeError, ValueError):
                raise DecodeError(f"{cls.SYMBOL} field {row.name} must be {row.wire.name}, not {type(item).__name__}") from None
    for row, item in zip(rows, values + [None] * (len(rows) - len(values)), strict=True):
        if row.mandatory and item is None:
            raise DecodeError(f"{cls.SYMBOL} has no field {row.name}, which is mandatory")
    return loaded


def dump(value: Any) -> Any:
    """Return a composite as the Described list that the codec encodes, and any other value unchanged."""
    if not isinstance(value, Composite):
        return value
    values: list[Any] = []
    filled = 0
    for row in value.FIELDS:
        item = getattr(value, row.name)
        if item is None or (item == row.default and not row.mandatory):
            values.append(None)
        else:
            values.append(row.wire.dump(item))
            filled = len(values)
    return Described(ULong(value.CODE), values[:filled])


def encode_composite(value: Composite) -> bytes:
    """Return the encoding of a composite. Raises EncodeError."""
    return encode(dump(value))


def decode_composite(buffer: bytes, position: int = 0, *, size_bytes_max: int = UINT_MAX) -> tuple[Composite, int]:
    """Return the composite at ``position`` and the position after it.

    Raises DecodeError, also for an unknown descriptor; LimitExceeded if the size is more than ``size_bytes_max``.
    """
    try:
        size_bytes = skip(buffer, position) - position
    except (IndexError, struct.error, ValueError):
        raise DecodeError(f"the value at byte {position} is truncated") from None
    if size_bytes > size_bytes_max:
        raise LimitExceeded(f"performative of {size_bytes} bytes exceeds the limit of {size_bytes_max}")
    value, position = decode(buffer, position, Budget(PERFORMATIVE_ITEMS_MAX))
    loaded = load(value)
    if not isinstance(loaded, Composite):
        raise DecodeError(f"not an AMQP 1.0 performative: {getattr(loaded, 'descriptor', type(loaded).__name__)!r:.60}")
    return loaded, position


# --- wire types of fields --------------------------------------------------------------------------------------------------------


def _of(cls: type) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        if not isinstance(value, cls):
            raise TypeError
        return value

    return check


def _whole(bits: int) -> Callable[[Any], int]:
    top = 1 << bits

    def check(value: Any) -> int:
        if type(value) is bool or not isinstance(value, int) or not 0 <= value < top:
            raise TypeError
        return int(value)

    return check


def _symbols(value: Any) -> tuple[Symbol, ...]:
    items = value.items if type(value) is Array else (value,)
    if not all(type(item) is Symbol for item in items):
        raise TypeError
    return tuple(items)


def _dump_symbols(value: tuple[str, ...]) -> Array:
    return symbol_array([Symbol(item) for item in value])


def _symbol(value: Any) -> Symbol:
    """Return a symbol; ASCII strings are accepted, because some peers write them for symbols."""
    if not isinstance(value, str) or not value.isascii() or len(value) > SYMBOL_SIZE_BYTES_MAX:
        raise TypeError
    return Symbol(value)


def _fields(value: Any) -> dict[Any, Any]:
    """Return a map with symbols as keys; annotations may also have ulongs."""
    return {key if type(key) is ULong else _symbol(key): load(item) for key, item in _of(dict)(value).items()}


def _dump_fields(value: dict[Any, Any]) -> dict[Any, Any]:
    return {Symbol(key) if type(key) is str else key: dump(item) for key, item in value.items()}


def _unsettled(value: Any) -> None:
    """Ignore the deliveries that a peer wants to resume, because deliveries are not resumed."""
    for tag in _of(dict)(value):
        _of(bytes)(tag)


def _transaction_id(value: Any) -> bytes:
    if len(_of(bytes)(value)) > TRANSACTION_ID_SIZE_BYTES_MAX:
        raise TypeError
    return bytes(value)


def a_composite(value: Any) -> Any:
    """Load a field of a described type."""
    if type(value) is not Described:
        raise TypeError
    return load(value)


def _same(value: Any) -> Any:
    return value


STRING = Wire("a string", _of(str), str)
SYMBOL = Wire("a symbol", _symbol, Symbol)
SYMBOLS = Wire("symbols", _symbols, _dump_symbols)
BOOLEAN = Wire("a boolean", _of(bool), bool)
BINARY = Wire("binary", _of(bytes), bytes)
UBYTE = Wire("a ubyte", _whole(8), UByte)
USHORT = Wire("a ushort", _whole(16), UShort)
UINT = Wire("a uint", _whole(32), UInt)
ULONG = Wire("a ulong", _whole(64), ULong)
FIELDS = Wire("a map", _fields, _dump_fields)
UNSETTLED = Wire("a map with delivery tags as keys", _unsettled, _same)
TRANSACTION_ID = Wire(f"binary of at most {TRANSACTION_ID_SIZE_BYTES_MAX} bytes", _transaction_id, bytes)
COMPOSITE = Wire("a described type", a_composite, dump)
ANY = Wire("any type", _same, _same)
