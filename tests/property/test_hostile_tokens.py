"""Hostile tokens and key sets: each is refused by a short reason that does not quote it, at little cost."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from typing import Any, Final

import pytest

from bascule.amqp.bearer import TokenCheck
from bascule.amqp.sasl import AuthenticationFailed
from bascule.config.oidc import Oidc
from bascule.server.key_set import KEYS_MAX, keys_of
from bascule.server.key_source import DOCUMENT_SIZE_BYTES_MAX, KeySourceUnavailable, _document
from bascule.server.tokens import USER_LENGTH_MAX, TokenLogins
from tests.support.costs import COST_S_MAX, processor_s
from tests.support.hostile_login import HostileTokens, encoded
from tests.support.provider import Provider, SigningKey, known_tokens

TOKENS_OF_ONE_TEST = 400
REASON_LENGTH_MAX = 250
#: A shorter part of a token may be in a reason by chance.
QUOTED_LENGTH: Final = 12
ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "ES512", "EdDSA")


def tokens_of(provider: Provider) -> TokenLogins:
    oidc = Oidc.model_validate(
        {
            "issuer": provider.issuer,
            "audience": ["bascule"],
            "roles_claim": "roles",
            "roles": ["may"],
            "algorithms": ["RS256", "ES256", "EdDSA"],
        }
    )
    return known_tokens(provider, oidc)


def judge(tokens: TokenLogins, hostile: HostileTokens) -> None:
    """Check one token, as a login does."""
    token = hostile.token()

    def check() -> None:
        try:
            asked = TokenCheck(tokens.verifier, "", token)
        except AuthenticationFailed as error:
            judge_reason(str(error), token)
            return
        assert len(asked.claimed_user) <= USER_LENGTH_MAX
        if not asked():
            assert asked.refusal is not None
            judge_reason(str(asked.refusal), token)
            return
        assert asked.identity is not None
        assert hostile.signed, f"accepted without a signature: {token[:300]}"
        assert asked.identity.user.isprintable()
        assert 0 < len(asked.identity.user) <= USER_LENGTH_MAX
        assert asked.identity.roles <= {"may"}

    assert processor_s(check) < COST_S_MAX, token[:300]


def judge_reason(reason: str, token: str) -> None:
    assert len(reason) < REASON_LENGTH_MAX, reason
    assert reason.isprintable()
    assert not any(part in reason for part in token.split(".") if len(part) >= QUOTED_LENGTH), reason


def judge_some(provider: Provider, first: int, count: int) -> None:
    tokens = tokens_of(provider)
    for seed in range(first, first + count):
        judge(tokens, HostileTokens(seed, provider))


def test_hostile_token_is_refused_cheaply_unless_the_provider_has_signed_it(provider: Provider) -> None:
    judge_some(provider, 0, TOKENS_OF_ONE_TEST)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_many_hostile_tokens_are_refused_cheaply(provider: Provider) -> None:
    judge_some(provider, int(os.environ.get("BASCULE_HOSTILE_FIRST", "10000")), int(os.environ.get("BASCULE_HOSTILE_SEEDS", "20000")))


#: Values of members of a key: of wrong types, and numbers that are no key, or cost much.
MEMBERS: Final = (
    None, 0, -1, 1.5, True, [], {}, "", "A", "AA", "AQAB", "?", "\ud800", "\x00", 10**400, ["AQAB"], {"n": "AQAB"},
    encoded(b"\xff" * 256), encoded(b"\xff" * 255 + b"\xfe"), encoded(b"\xff" * 2049), encoded(b"\xff" * 150_000), encoded(bytes(300)),
    "P-256", "P-521", "secp256k1", "Ed448", "X25519", "RSA", "EC", "OKP", "oct", "none", "HS256", "enc",
)  # fmt: skip
NAMES: Final = ("n", "e", "kty", "crv", "x", "y", "alg", "use", "kid", "k", "p", "q", "d", "dp", "oth", "key_ops", "x5c")


def key_sets(count: int) -> Iterator[Any]:
    """Yield key sets with changed members."""
    chance = random.Random(1)
    good = [SigningKey("a").public, SigningKey("b", "ES256").public, SigningKey("c", "EdDSA").public]
    for _ in range(count):
        entry = dict(chance.choice(good))
        if chance.random() < 0.5:
            del entry["alg"]
        for _ in range(chance.randrange(1, 4)):
            entry[chance.choice([*entry, *NAMES])] = chance.choice(MEMBERS)
        yield {"keys": [entry]}
    large = {"kty": "RSA", "e": "AQAB", "n": encoded(b"\xff" * (DOCUMENT_SIZE_BYTES_MAX // KEYS_MAX * 7 // 10))}
    yield {"keys": [large] * KEYS_MAX}
    yield from ({"keys": each} for each in (None, {}, "x", [None, 7, [], "x"], [[]] * KEYS_MAX, [{}] * (KEYS_MAX + 1)))


def test_no_key_set_causes_another_error_or_costs_much() -> None:
    def read(found: Any) -> None:
        try:
            keys = list(keys_of(found, ALGORITHMS))
        except KeySourceUnavailable:
            return
        assert all(type(key.key).__name__.endswith("PublicKey") for key in keys), "no secret and no private key is a key"

    for found in key_sets(1_500):
        assert processor_s(lambda found=found: read(found)) < COST_S_MAX, json.dumps(found)[:300]  # type: ignore[misc]


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 100_000, b'{"keys": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b'{"keys":[' + b'{"a":' * 40_000 + b"1]}",
        b'{"keys": [' + b"9" * 200_000 + b"]}", b"x" * (DOCUMENT_SIZE_BYTES_MAX + 1), b"\xff\xfe", b"null", b"", b"1e999",
    ],
    ids=lambda data: f"{data[:12].decode(errors='replace')} {len(data)}",
)  # fmt: skip
def test_document_that_is_no_key_set_is_refused_cheaply(data: bytes) -> None:
    def read() -> None:
        with pytest.raises(KeySourceUnavailable):
            list(keys_of(_document(data, "the provider"), ALGORITHMS))

    assert processor_s(read) < COST_S_MAX
