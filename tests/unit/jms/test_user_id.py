"""The user id in encoded messages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.amqp.codec import encode
from bascule.amqp.types import Described, Symbol, ULong
from bascule.jms.errors import MalformedMessage
from bascule.jms.sections import PROPERTIES, places, property_fields_of, scan, section_bytes
from bascule.jms.user_id import with_user_id
from tests.unit.jms.test_sections import GOLDEN

BODY = section_bytes(0x77, "x")
USERS = st.one_of(st.none(), st.text(min_size=1, max_size=300).map(str.encode))


def apart(data: bytes) -> list[tuple[int, bytes]]:
    """Return all sections but the properties."""
    return [(section, data[start:end]) for section, start, end in places(data) if section != PROPERTIES]


@pytest.mark.parametrize("name", GOLDEN)
@given(user=USERS)
def test_user_id_replaces_only_its_field(name: str, user: bytes | None) -> None:
    before = bytes.fromhex(GOLDEN[name])
    after = with_user_id(before, user)
    assert scan(after)._replace(user_id=None) == scan(before)._replace(user_id=None)
    assert scan(after).user_id == user
    assert apart(after) == apart(before)
    assert [*property_fields_of(after)[:1], *property_fields_of(after)[2:]] == [
        *property_fields_of(before)[:1], *property_fields_of(before)[2:],
    ]  # fmt: skip
    assert with_user_id(after, user) == after


@pytest.mark.parametrize("fields", [[], ["id"], [None, b"mallory"], ["id", b"mallory", "to"], [None, None, None, "subject", *[None] * 9]])
@pytest.mark.parametrize("user", [b"ann", None])
def test_any_number_of_properties_gets_a_user_id(fields: list[object], user: bytes | None) -> None:
    after = with_user_id(section_bytes(PROPERTIES, fields) + BODY, user)
    assert scan(after).user_id == user
    expected = [*fields, *[None] * (13 - len(fields))]
    expected[1] = user
    assert list(property_fields_of(after)) == expected


def test_message_without_properties_gets_a_section_in_its_place() -> None:
    annotations = section_bytes(0x72, {Symbol("x-a"): 1})
    application = section_bytes(0x74, {"p": 1})
    after = with_user_id(section_bytes(0x70, [True]) + annotations + application + BODY, b"ann")
    assert [section for section, _, _ in places(after)] == [0x70, 0x72, 0x73, 0x74, 0x77]
    assert scan(after).user_id == b"ann"
    assert with_user_id(application + BODY, None) == application + BODY


def test_descriptors_in_their_long_form_are_understood() -> None:
    for descriptor in (ULong(0x73), Symbol("amqp:properties:list")):
        data = encode(Described(descriptor, ["id", b"mallory"])) + BODY
        assert scan(with_user_id(data, b"ann")).user_id == b"ann"


def test_damaged_properties_are_an_error() -> None:
    data = bytes((0, 0x53, PROPERTIES, 0xC0, 4, 2, 0xA1, 9, 0x41)) + BODY
    with pytest.raises(MalformedMessage):
        with_user_id(data, b"ann")
