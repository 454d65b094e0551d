import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bascule.amqp.codec import decode, encode
from bascule.amqp.composite import Composite, decode_composite, encode_composite
from bascule.amqp.errors import DecodeError
from bascule.amqp.performatives import Attach, Flow, Source, Target, Transfer
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


def whole(cls: type, bits: int, signed: bool) -> st.SearchStrategy[Any]:
    low = -(1 << bits - 1) if signed else 0
    return st.integers(low, low + (1 << bits) - 1).map(cls)


TEXT = st.text(st.characters(exclude_categories=["Cs"]))
SYMBOLS = st.text(st.characters(max_codepoint=127)).map(Symbol)
UINTS = whole(UInt, 32, False)
PRIMITIVES = (
    st.none()
    | st.booleans()
    | whole(UByte, 8, False)
    | whole(UShort, 16, False)
    | UINTS
    | whole(ULong, 64, False)
    | whole(Byte, 8, True)
    | whole(Short, 16, True)
    | whole(Int, 32, True)
    | whole(int, 64, True)
    | whole(Timestamp, 64, True)
    | st.floats(allow_nan=False)
    | st.floats(width=32, allow_nan=False).map(Float)
    | st.characters(exclude_categories=["Cs"]).map(Char)
    | st.binary(min_size=4, max_size=4).map(Decimal32)
    | st.binary(min_size=8, max_size=8).map(Decimal64)
    | st.binary(min_size=16, max_size=16).map(Decimal128)
    | st.uuids()
    | st.binary(max_size=300)
    | TEXT
    | SYMBOLS
)
ARRAYS = (
    st.lists(SYMBOLS.filter(lambda symbol: len(symbol) < 256), max_size=5).map(lambda items: Array(0xA3, tuple(items)))
    | st.lists(TEXT, max_size=5).map(lambda items: Array(0xB1, tuple(items)))
    | st.lists(whole(Int, 32, True), max_size=5).map(lambda items: Array(0x71, tuple(items)))
    | st.lists(st.booleans(), max_size=5).map(lambda items: Array(0x56, tuple(items)))
    | st.lists(st.lists(PRIMITIVES, max_size=3), max_size=3).map(lambda items: Array(0xD0, tuple(items)))
)
VALUES = st.recursive(
    PRIMITIVES | ARRAYS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(TEXT | SYMBOLS | st.uuids() | whole(ULong, 64, False), inner, max_size=5)
        | st.builds(Described, SYMBOLS | whole(ULong, 64, False), inner)
    ),
    max_leaves=20,
)


def same(left: Any, right: Any) -> bool:
    """Return whether two values are equal in value and in type, recursively."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return math.isclose(left, right, rel_tol=0, abs_tol=0) or left == right
    if isinstance(left, list):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return same([*left.keys(), *left.values()], [*right.keys(), *right.values()])
    if isinstance(left, Described):
        return same([left.descriptor, left.value], [right.descriptor, right.value])
    if isinstance(left, Array):
        return (left.code, left.descriptor) == (right.code, right.descriptor) and list(left.items) == list(right.items)
    return bool(left == right)


@given(VALUES)
@settings(max_examples=300, deadline=None)
def test_every_amqp_value_survives_encoding_and_decoding(value: Any) -> None:
    encoded = encode(value)
    decoded, position = decode(encoded)
    assert position == len(encoded)
    assert same(decoded, value)


@given(VALUES, st.data())
@settings(max_examples=300, deadline=None)
def test_truncated_value_raises_decode_error(value: Any, data: st.DataObject) -> None:
    encoded = encode(value)
    cut = encoded[: data.draw(st.integers(0, len(encoded) - 1))]
    try:
        decode(cut)
    except DecodeError:
        return
    raise AssertionError(f"{cut.hex()} was read")


@given(st.binary(max_size=60))
@settings(max_examples=1000, deadline=None)
def test_any_bytes_decode_to_a_value_or_raise_decode_error(octets: bytes) -> None:
    try:
        _, position = decode(octets)
    except DecodeError:
        return
    assert 0 < position <= len(octets)


BOOLEANS = st.booleans()
TERMINI = st.builds(
    Source, address=st.none() | TEXT, durable=st.integers(0, 2), expiry_policy=SYMBOLS, dynamic=BOOLEANS,
    filter=st.none() | st.dictionaries(SYMBOLS, st.builds(Described, st.just(ULong(0x0000468C00000004)), TEXT), max_size=2),
    capabilities=st.lists(SYMBOLS, max_size=3).map(tuple),
)  # fmt: skip
PERFORMATIVES = (
    st.builds(Transfer, UINTS, UINTS, st.binary(max_size=32), UINTS, BOOLEANS, BOOLEANS, resume=BOOLEANS, aborted=BOOLEANS)
    | st.builds(Flow, st.none() | UINTS, UINTS, UINTS, UINTS, st.none() | UINTS, UINTS, UINTS, UINTS, BOOLEANS, BOOLEANS)
    | st.builds(Attach, TEXT, UINTS, BOOLEANS, source=st.none() | TERMINI, target=st.none() | st.builds(Target, address=TEXT))
)


@given(PERFORMATIVES)
@settings(max_examples=300, deadline=None)
def test_every_performative_survives_encoding_and_decoding(performative: Composite) -> None:
    encoded = encode_composite(performative)
    assert decode_composite(encoded) == (performative, len(encoded))
