from typing import Any

import pytest

from bascule.amqp import performatives as p
from bascule.amqp.codec import encode
from bascule.amqp.composite import Composite, decode_composite, dump, encode_composite, load
from bascule.amqp.errors import NOT_FOUND, AmqpError, DecodeError
from bascule.amqp.types import Described, Symbol, ULong

TYPES = [cls for cls in vars(p).values() if isinstance(cls, type) and issubclass(cls, Composite) and cls is not Composite]
SAMPLE: dict[str, Any] = {
    "a string": "text", "a symbol": Symbol("symbol"), "symbols": (Symbol("a"), Symbol("b")), "a boolean": True, "binary": b"bytes",
    "a ubyte": 1, "a ushort": 2, "a uint": 3, "a ulong": 4, "a map": {Symbol("key"): "value"},
    "an error": p.Error(Symbol(NOT_FOUND), "gone"),
    "a map with delivery tags as keys": None, "binary of at most 256 bytes": b"transaction", "a delivery state": p.Received(1, 2),
    "an outcome": p.Released(), "a described type": p.Accepted(), "any type": "anything",
}  # fmt: skip


def full(cls: type[Composite]) -> Composite:
    value = cls()
    for row in cls.FIELDS:
        setattr(value, row.name, SAMPLE[row.wire.name])
    return value


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_composite_with_all_fields_round_trips(cls: type[Composite]) -> None:
    value = full(cls)
    encoded = encode_composite(value)
    assert decode_composite(encoded) == (value, len(encoded))


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_composite_of_defaults_round_trips(cls: type[Composite]) -> None:
    assert decode_composite(encode_composite(cls()))[0] == cls()


@pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.__name__)
def test_composite_is_decoded_by_its_symbolic_descriptor(cls: type[Composite]) -> None:
    numeric = dump(full(cls))
    assert load(Described(Symbol(cls.SYMBOL), numeric.value)) == load(numeric)


TYPED_FIELDS = {
    f"{cls.__name__}.{row.name}": (cls, position) for cls in TYPES for position, row in enumerate(cls.FIELDS) if row.wire.name != "any type"
}


@pytest.mark.parametrize(("cls", "position"), TYPED_FIELDS.values(), ids=TYPED_FIELDS)
def test_field_of_wrong_type_raises_decode_error(cls: type[Composite], position: int) -> None:
    row = cls.FIELDS[position]
    with pytest.raises(DecodeError, match=f"{row.name} must be {row.wire.name}"):
        load(Described(ULong(cls.CODE), [None] * position + [1.5]))


@pytest.mark.parametrize("cls", [cls for cls in TYPES if any(row.mandatory for row in cls.FIELDS)], ids=lambda cls: cls.__name__)
def test_missing_mandatory_field_raises_decode_error(cls: type[Composite]) -> None:
    with pytest.raises(DecodeError, match="which is mandatory"):
        load(Described(ULong(cls.CODE), []))


def test_excess_fields_raise_decode_error() -> None:
    with pytest.raises(DecodeError, match="at most 1 fields"):
        load(Described(ULong(p.End.CODE), [None, None]))


def test_single_symbol_is_decoded_as_a_list_of_one() -> None:
    opened, _ = decode_composite(encode(Described(ULong(0x10), ["c", *[None] * 6, Symbol("ANONYMOUS-RELAY")])))
    assert isinstance(opened, p.Open)
    assert opened.offered_capabilities == ("ANONYMOUS-RELAY",)


def test_unknown_described_types_round_trip_unchanged() -> None:
    selector = Described(ULong(0x0000468C00000004), "a = 1")
    source = p.Source("queue", filter={"jms-selector": selector}, default_outcome=Described(Symbol("x:y"), [1]))
    assert decode_composite(encode_composite(source))[0] == source


def test_value_other_than_a_composite_raises_decode_error() -> None:
    for value in (1, [], Described(ULong(0x99), []), Described([1], [])):
        with pytest.raises(DecodeError):
            decode_composite(encode(value))


def test_trailing_default_fields_are_not_encoded() -> None:
    assert encode_composite(p.Accepted()).hex() == "00532445"
    assert encode_composite(p.Detach(1, True)).hex() == "005316c00402520141"


def test_error_converts_to_exception_and_back() -> None:
    error = AmqpError(NOT_FOUND, "no such queue", {Symbol("queue"): "a"})
    wire = p.Error.of(error)
    assert wire is not None
    back = wire.exception()
    assert (back.condition, back.description, back.info) == (error.condition, error.description, error.info)
    assert p.Error.of(None) is None
