"""The file of users: every content is read back, and no damage is read as something else or raises another error."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from bascule.amqp.verifiers import DIGESTS, Verifier
from bascule.config.user_names import NAME_LENGTH_MAX, check_name
from bascule.config.users_file import SECRET_BYTES, User, Users, UsersFileError, parse


def is_name(what: str, text: str) -> bool:
    try:
        return check_name(text, what) == text
    except ValueError:
        return False


names = st.text(min_size=1, max_size=NAME_LENGTH_MAX).filter(lambda text: is_name("user", text))
roles = st.text(min_size=1, max_size=20).filter(lambda text: is_name("role", text))


@cache
def verifier(mechanism: str, iterations: int, salt: bytes) -> Verifier:
    return Verifier.of("pencil", salt, iterations, mechanism)


@st.composite
def users(draw: st.DrawFn) -> Users:
    found: dict[str, User] = {}
    for name in draw(st.lists(names, unique=True, max_size=5)):
        kind = draw(st.integers(1, 3)), draw(st.sampled_from([b"a", b"salt", bytes(16)]))
        made = {mechanism: verifier(mechanism, *kind) for mechanism in DIGESTS}
        found[name] = User(name, made, tuple(draw(st.lists(roles, unique=True, max_size=3))))
    return Users(draw(st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES)), found)


def read(data: bytes) -> Users | None:
    """Return the users of a file; None if it is refused, with its name and a line."""
    try:
        return parse(data, "users")
    except UsersFileError as error:
        if str(error).startswith("users:"):
            return None
        raise


@given(users())
def test_each_content_is_read_back(content: Users) -> None:
    assert parse(content.text().encode(), "users") == content


@given(users(), st.data())
def test_file_that_was_cut_is_refused_or_complete(content: Users, data: st.DataObject) -> None:
    whole = content.text().encode()
    assert read(whole[: data.draw(st.integers(0, len(whole)))]) in (None, content)


@given(users(), st.data(), st.binary(max_size=10))
def test_damaged_file_raises_only_its_own_error(content: Users, data: st.DataObject, damage: bytes) -> None:
    whole = content.text().encode()
    start, end = sorted(data.draw(st.lists(st.integers(0, len(whole)), min_size=2, max_size=2)))
    read(whole[:start] + damage + whole[end:])


@given(st.binary(max_size=200))
def test_any_bytes_raise_only_the_error_of_the_file(data: bytes) -> None:
    assert read(data) is None


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(users().filter(lambda content: content.users), st.data(), values)
def test_value_of_a_wrong_type_in_any_place_is_refused(content: Users, data: st.DataObject, value: Any) -> None:
    rows = [json.loads(line) for line in content.text().splitlines()]
    row = data.draw(st.sampled_from(rows))
    key = data.draw(st.sampled_from(sorted(row)))
    if type(value) is type(row[key]):
        return
    row[key] = value
    assert read("\n".join(map(json.dumps, rows)).encode()) is None
