"""Any bytes in the place of a response with a token are refused, and only the form of the standard is accepted."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bascule.amqp.bearer import BearerCheck, BearerServer, OauthBearerClient, PlainTokenServer, TokenCheck, read_oauthbearer, read_xoauth2
from bascule.amqp.sasl import AuthenticationFailed, TokenIdentity

PARTS = st.sampled_from([b"n,", b"y,", b"p=x,", b",", b"a=ann", b"user=", b"\x01", b"auth=Bearer ", b"auth=", b"eyJ.a.b", b"\0", b"\xff"])
RESPONSES = st.binary(max_size=200) | st.lists(PARTS, max_size=12).map(b"".join)


class Nobody:
    """Accepts no token."""

    def verify(self, _token: str) -> TokenIdentity:
        raise AuthenticationFailed("nobody")

    def claimed_user(self, token: str) -> str:
        return token[:10]


NOBODY = Nobody()


@pytest.mark.parametrize("read", [read_oauthbearer, read_xoauth2])
@given(response=RESPONSES)
def test_any_response_is_read_or_refused(read: Callable[[bytes], tuple[str, str]], response: bytes) -> None:
    with suppress(AuthenticationFailed):
        user, token = read(response)
        assert token
        assert "\x01" not in user + token


@given(responses=st.lists(st.none() | RESPONSES, min_size=1, max_size=4))
def test_no_sequence_of_responses_is_authenticated_without_a_valid_token(responses: list[bytes | None]) -> None:
    for server in (
        BearerServer(NOBODY, "", read_oauthbearer),
        BearerServer(NOBODY, "", read_xoauth2),
        PlainTokenServer(NOBODY, lambda *_: False),
    ):
        with suppress(AuthenticationFailed):
            for response in responses:
                found = server.step(response)
                assert found == b"" or (callable(found) and not found())


@given(user=st.text(st.characters(exclude_characters="\0\x01", exclude_categories=["Cs"])), token=st.from_regex(r"\A[A-Za-z0-9._-]+\Z"))
def test_client_and_server_of_oauthbearer_agree(user: str, token: str) -> None:
    assert read_oauthbearer(OauthBearerClient(user, token).initial() or b"") == (user, token)


@given(challenge=st.binary(max_size=100))
def test_client_answers_any_error_with_the_dummy_response(challenge: bytes) -> None:
    client = OauthBearerClient("ann", "token")
    assert client.step(challenge) == (b"\x01" if challenge else client.initial())
    assert client.reason.isprintable()


def test_refusal_is_told_before_the_outcome_and_a_temporary_one_is_not() -> None:
    check = BearerServer(NOBODY, "https://login.example", read_xoauth2).step(b"user=ann\x01auth=Bearer eyJ.a.b\x01\x01")
    assert isinstance(check, BearerCheck)
    assert not check()
    assert b'"error_description": "nobody"' in (check.challenge or b"")
    assert isinstance(check, TokenCheck)
