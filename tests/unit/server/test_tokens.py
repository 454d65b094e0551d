"""Tokens: which are accepted, which are refused and why, and what they give."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
from cryptography.exceptions import UnsupportedAlgorithm

from bascule.amqp.bearer import TOKEN_SIZE_BYTES_MAX
from bascule.amqp.performatives import SaslChallenge, SaslInit, SaslResponse
from bascule.amqp.sasl import AuthenticationFailed, LoginUnavailable, PlainClient, SaslClient, SaslServer, TokenIdentity
from bascule.amqp.types import Symbol
from bascule.config import Settings
from bascule.config.oidc import Oidc
from bascule.server import key_set
from bascule.server.key_source import DOCUMENT_SIZE_BYTES_MAX, FileSource, KeySourceUnavailable, key_source
from bascule.server.listener_tls import TlsPeer
from bascule.server.login_delays import FREE_FAILURES
from bascule.server.logins import REQUESTS_WAITING_MAX, LoginChecks, sasl_mechanisms
from bascule.server.tokens import TokenLogins, TokenVerifier
from bascule.server.user_directory import UserDirectory
from tests.support.provider import KEYS_PATH, LIFE_S, Provider, SigningKey, known_tokens, unsigned
from tests.unit.amqp.pair import Pair

OTHER = SigningKey("first")


@pytest.fixture(scope="module")
def running() -> Iterator[Provider]:
    with Provider() as provider:
        yield provider


@pytest.fixture
def provider(running: Provider) -> Provider:
    running.keys = running.keys[:1]
    running.answer, running.away = {}, False
    running.requests.clear()
    return running


def settings(provider: Provider, **options: Any) -> Oidc:
    given = {"issuer": provider.issuer, "audience": ["bascule"], "roles_claim": "realm_access.roles", "roles": ["sales"], **options}
    return Oidc.model_validate(given)


async def identify(tokens: TokenLogins, token: str) -> TokenIdentity:
    return await LoginChecks(tokens).identify(token, "192.0.2.1")


def verify(provider: Provider, token: str, now_s: float | None = None, **options: Any) -> TokenIdentity:
    oidc = settings(provider, **options)
    verifier = TokenVerifier(oidc, known_tokens(provider, oidc).keys, time.time if now_s is None else lambda: now_s)
    return verifier.verify(token)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_token_gives_user_known_roles_and_end(algorithm: str, provider: Provider) -> None:
    provider.keys.append(SigningKey("second", algorithm))
    ends_s = int(time.time()) + 60
    token = provider.token(exp=ends_s, realm_access={"roles": ["sales", "unknown", 7]})
    assert verify(provider, token) == TokenIdentity("ann", frozenset({"sales"}), ends_s + 30.0)


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"iss": "https://other.example"}, "claim 'iss'"),
        ({"iss": None}, "no claim 'iss'"),
        ({"aud": "other"}, "claim 'aud'"),
        ({"aud": ["other"]}, "claim 'aud'"),
        ({"aud": None}, "no claim 'aud'"),
        ({"exp": None}, "no claim 'exp'"),
        ({"exp": "soon"}, "claim 'exp' is not a time"),
        ({"exp": True}, "claim 'exp' is not a time"),
        ({"exp": float("inf")}, "claim 'exp' is not a time"),
        ({"exp": 10**400}, "claim 'exp' is not a time"),
        ({"exp": 1_000_000}, "expired"),
        ({"nbf": 1e11}, "not valid yet"),
        ({"iat": 1e11}, "not valid yet"),
        ({"sub": None}, "claim 'sub'"),
        ({"sub": "anonymous"}, "claim 'sub'"),
        ({"sub": "a\nb"}, "claim 'sub'"),
        ({"sub": "x" * 256}, "claim 'sub'"),
    ],
)
def test_wrong_claim_is_refused_by_its_name(claims: dict[str, Any], reason: str, provider: Provider) -> None:
    token = provider.token(**claims)
    with pytest.raises(AuthenticationFailed, match=reason) as refused:
        verify(provider, token)
    assert not any(part in str(refused.value) for part in token.split("."))


def test_times_are_checked_with_the_skew_of_clocks(provider: Provider) -> None:
    now_s = time.time()
    token = provider.token(nbf=now_s)
    for seconds in (-29, LIFE_S + 29):
        assert verify(provider, token, now_s + seconds).user == "ann"
    for seconds in (-31, LIFE_S + 31):
        with pytest.raises(AuthenticationFailed, match=r"exp|nbf|iat"):
            verify(provider, token, now_s + seconds)


def test_required_claims_have_the_value_or_list_it(provider: Provider) -> None:
    options = {"required_claims": {"typ": "Bearer"}}
    for typ in ("Bearer", ["ID", "Bearer"]):
        assert verify(provider, provider.token(typ=typ), **options).user == "ann"
    for typ in ("ID", None, ["ID"]):
        with pytest.raises(AuthenticationFailed, match="claim 'typ'"):
            verify(provider, provider.token(typ=typ), **options)


def claims_of(provider: Provider) -> dict[str, Any]:
    return {"iss": provider.issuer, "aud": "bascule", "sub": "eve", "exp": time.time() + LIFE_S}


@pytest.mark.parametrize("name", ["none", "None", "HS256", "RS1"])
def test_token_without_signature_or_with_the_public_key_as_secret_is_refused(name: str, provider: Provider) -> None:
    head = {"alg": name, "kid": "first"}
    said = unsigned(head, claims_of(provider)).removesuffix(".")
    signature = hmac.digest(provider.keys[0].pem, said.encode(), hashlib.sha256)
    for token in (f"{said}.", unsigned(head, claims_of(provider), signature)):
        with pytest.raises(AuthenticationFailed, match="'alg'"):
            verify(provider, token)


def test_key_of_another_algorithm_or_owner_with_the_same_name_does_not_count(provider: Provider) -> None:
    with pytest.raises(AuthenticationFailed, match="signature"):
        verify(provider, provider.token(key=OTHER))
    with pytest.raises(LoginUnavailable, match="key of the token"):
        verify(provider, provider.token(key=SigningKey("first", "ES256")))
    provider.keys.append(SigningKey("second"))
    with pytest.raises(AuthenticationFailed, match="signature"):
        verify(provider, provider.token(key=provider.keys[0], head={"kid": "second"}))


def test_token_with_a_key_in_its_own_head_is_refused(provider: Provider) -> None:
    with pytest.raises(AuthenticationFailed, match="signature"):
        verify(provider, provider.token(key=OTHER, head={"jwk": OTHER.public, "jku": "http://127.0.0.1/evil"}))


@pytest.mark.parametrize(
    "token",
    ["", ".", "..", "eyJ", "a.b.c", "é.é.é", unsigned({"alg": ["RS256"]}, {}), unsigned({"alg": "RS256", "kid": {}}, {}),
     unsigned({"alg": "RS256", "kid": "first", "crit": ["exp"]}, {}), unsigned({"alg": "RS256", "kid": "first"}, {}, b"x"),
     "W1tb" * 3000 + "..", "eyJ" + "x" * TOKEN_SIZE_BYTES_MAX + ".."],
)  # fmt: skip
def test_malformed_token_is_refused_without_another_error(token: str, provider: Provider) -> None:
    with pytest.raises(AuthenticationFailed) as refused:
        verify(provider, token)
    assert len(str(refused.value)) < 200


def test_token_without_key_name_is_accepted_only_if_there_is_one_key(provider: Provider) -> None:
    token = provider.token(head={"kid": None})
    assert verify(provider, token).user == "ann"
    provider.keys.append(SigningKey("second"))
    with pytest.raises(AuthenticationFailed, match="'kid'"):
        verify(provider, token)


def test_secrets_short_keys_and_keys_for_encryption_are_no_keys(provider: Provider) -> None:
    good = provider.keys[0].public
    bad = [
        {"kty": "oct", "k": "c2VjcmV0", "kid": "a"}, {**good, "use": "enc"}, {**good, "n": "AQAB"}, {**good, "n": 7}, {**good, "n": "?"},
        {**good, "kid": 7}, "text", {"kty": "EC", "crv": "P-384", "x": "AA", "y": "AA", "alg": "ES256"},
    ]  # fmt: skip
    assert list(key_set.keys_of({"keys": bad}, ["RS256", "ES256"])) == []
    assert [key[:2] for key in key_set.keys_of({"keys": [*bad, good]}, ["RS256", "ES256"])] == [("first", "RS256")]
    with pytest.raises(KeySourceUnavailable, match="list"):
        list(key_set.keys_of({"keys": [good] * 101}, ["RS256"]))


def test_key_that_the_machine_does_not_support_is_no_key_and_the_others_count(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    made = key_set.PyJWK

    def without_curves(entry: dict[str, Any], algorithm: str) -> Any:
        if entry["kty"] == "OKP":
            raise UnsupportedAlgorithm("ed25519 is not supported by this version of OpenSSL")  # as in FIPS mode
        return made(entry, algorithm)

    monkeypatch.setattr(key_set, "PyJWK", without_curves)
    keys = {"keys": [SigningKey("curve", "EdDSA").public, provider.keys[0].public]}
    assert [key[:2] for key in key_set.keys_of(keys, ["RS256", "EdDSA"])] == [("first", "RS256")]


def test_new_key_is_fetched_when_a_token_has_it_and_the_old_key_ends(provider: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_set, "READ_INTERVAL_S", 0.05)

    async def rotate() -> None:
        logins = TokenLogins(settings(provider), 60.0)
        logins.keys.start()
        old = provider.token()
        assert (await identify(logins, old)).user == "ann"
        provider.keys = [SigningKey("second")]
        assert (await identify(logins, provider.token("bob"))).user == "bob"
        with pytest.raises(LoginUnavailable):
            logins.verifier.verify(old)
        await logins.keys.stop()

    first = provider.keys
    asyncio.run(rotate())
    provider.keys = first
    assert provider.requests[:2] == ["/.well-known/openid-configuration", KEYS_PATH]


def test_known_keys_remain_while_the_provider_is_away_and_unknown_ones_wait_in_vain(
    provider: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_set, "READ_INTERVAL_S", 0.05)

    async def away() -> None:
        logins = TokenLogins(settings(provider), 1.0)
        logins.keys.start()
        known = provider.token()
        await identify(logins, known)
        provider.away = True
        with pytest.raises(LoginUnavailable, match="cannot be read now"):
            await identify(logins, provider.token(key=SigningKey("second")))
        assert (await identify(logins, known)).user == "ann"
        provider.away = False
        provider.keys.append(SigningKey("second"))
        assert (await identify(logins, provider.token())).user == "ann"
        await logins.keys.stop()

    asyncio.run(away())


class SilentSource:
    """A source that gives nothing until it is cut. It notes that."""

    def __init__(self, name: str, cuts: SimpleQueue[str]) -> None:
        self._name, self._cuts = name, cuts
        self.asked, self._ended = threading.Event(), threading.Event()

    def read(self) -> dict[str, Any]:
        self.asked.set()
        self._ended.wait(60)
        return {}

    def cut(self) -> None:
        self._cuts.put(self._name)
        self._ended.set()


class FaultySource:
    """A source whose first reads raise errors that no source should raise."""

    def __init__(self, document: dict[str, Any], *errors: Exception) -> None:
        self._document, self._errors = document, list(errors)

    def read(self) -> dict[str, Any]:
        if self._errors:
            raise self._errors.pop()
        return self._document

    def cut(self) -> None:
        raise AssertionError("a read that ends at once is not cut")


def test_key_set_is_read_again_after_any_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(key_set, "READ_INTERVAL_S", 0.01)
    key = SigningKey("first")

    async def read() -> None:
        keys = key_set.KeySet(FaultySource({"keys": [key.public]}, RuntimeError("can't start new thread"), KeyError("x")), ("RS256",), 60.0)
        keys.start()
        await keys.wait("first", "RS256", 20.0)
        assert keys.find("first", "RS256")
        assert keys.failure == ""
        await keys.stop()

    asyncio.run(read())
    assert "keys of tokens not read, known keys remain valid reason=KeyError" in caplog.text


def test_source_that_is_replaced_while_it_is_read_is_cut_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_set, "FETCH_S", 0.05)
    cuts: SimpleQueue[str] = SimpleQueue()
    old, new = SilentSource("old", cuts), SilentSource("new", cuts)

    async def replace() -> None:
        keys = key_set.KeySet(old, ("RS256",), 60.0)
        keys.start()
        assert await asyncio.to_thread(old.asked.wait, 60)
        keys.read_from(new)
        assert await asyncio.to_thread(cuts.get, timeout=60) == "old"
        await keys.stop()

    try:
        asyncio.run(replace())
    finally:
        old.cut()


def test_few_requests_to_the_admin_server_wait_for_unknown_keys_and_known_keys_do_not_wait(provider: Provider) -> None:
    async def attack() -> None:
        tokens = TokenLogins(settings(provider), 600.0)
        tokens.keys.start()
        logins = LoginChecks(tokens)
        assert (await logins.identify(provider.token(), "192.0.2.1")).user == "ann"
        unknown = [provider.token(head={"kid": str(number)}) for number in range(REQUESTS_WAITING_MAX + 5)]
        asked = [asyncio.create_task(logins.identify(token, "192.0.2.1")) for token in unknown]
        async with asyncio.timeout(20):
            while sum(each.done() for each in asked) < 5:
                await asyncio.sleep(0.01)
        refused, waiting = asked[REQUESTS_WAITING_MAX:], asked[:REQUESTS_WAITING_MAX]
        assert not any(each.done() for each in waiting)
        assert {type(each.exception()) for each in refused} == {LoginUnavailable}
        assert (await logins.identify(provider.token(), "192.0.2.1")).user == "ann"
        for each in waiting:
            each.cancel()
        await asyncio.wait(waiting)
        assert logins._waiting == 0
        await tokens.keys.stop()

    asyncio.run(attack())


def test_unknown_keys_cause_a_bounded_number_of_requests(provider: Provider) -> None:
    async def attack() -> None:
        logins = TokenLogins(settings(provider, jwks_url=provider.issuer + KEYS_PATH), 1.0)
        logins.keys.start()
        await identify(logins, provider.token())
        tokens = [provider.token(head={"kid": str(number)}) for number in range(50)]
        answers = await asyncio.gather(*(identify(logins, token) for token in tokens), return_exceptions=True)
        assert {type(answer) for answer in answers} == {LoginUnavailable}
        await logins.keys.stop()

    asyncio.run(attack())
    assert provider.requests == [KEYS_PATH]


@pytest.mark.parametrize(
    ("path", "answer", "reason"),
    [
        (KEYS_PATH, (302, {"Location": "/elsewhere"}, b""), "redirects are not followed"),
        (KEYS_PATH, (200, {}, b" " * (DOCUMENT_SIZE_BYTES_MAX + 1)), "more than"),
        (KEYS_PATH, (200, {}, b"[" * 100_000), "not a JSON object"),
        (KEYS_PATH, (200, {}, b"[]"), "not a JSON object"),
        (KEYS_PATH, (500, {}, b"{}"), "status 500"),
        ("/.well-known/openid-configuration", (200, {}, b'{"issuer": "https://other.example"}'), "its issuer"),
    ],
)
def test_answer_that_is_no_key_set_is_refused(
    path: str, answer: tuple[int, dict[str, str], bytes], reason: str, provider: Provider
) -> None:
    provider.answer[path] = answer
    with pytest.raises(KeySourceUnavailable, match=reason):
        key_source(settings(provider)).read()


def test_published_url_without_tls_is_refused(provider: Provider) -> None:
    body = f'{{"issuer": "{provider.issuer}", "jwks_uri": "http://keys.example/"}}'.encode()
    provider.answer["/.well-known/openid-configuration"] = (200, {}, body)
    with pytest.raises(KeySourceUnavailable, match="jwks_uri must begin with https"):
        key_source(settings(provider)).read()


def test_missing_key_file_and_authority_are_named(tmp_path: Any, provider: Provider) -> None:
    with pytest.raises(KeySourceUnavailable, match=r"none\.json"):
        FileSource(tmp_path / "none.json").read()
    with pytest.raises(Exception, match=r"broker\.oidc\.ca_file"):
        key_source(settings(provider, ca_file=str(tmp_path / "none.pem")))


ADDRESS = "192.0.2.1"


def test_tokens_are_accepted_only_where_passwords_are(provider: Provider, tmp_path: Path) -> None:
    given = {"broker": {"oidc": settings(provider).model_dump(exclude_unset=True)}, "embedded": {"data_dir": tmp_path}}
    chosen = Settings.model_validate(given)
    tokens, users = known_tokens(provider, chosen.broker.oidc), UserDirectory(chosen)
    assert list(sasl_mechanisms(chosen.broker, users, tokens)(TlsPeer())) == ["OAUTHBEARER", "XOAUTH2", "PLAIN"]
    exposed = chosen.broker.model_copy(update={"host": "0.0.0.0"})
    assert list(sasl_mechanisms(exposed, users, tokens)(TlsPeer())) == []
    accepted = exposed.model_copy(update={"allow_insecure": True})
    assert list(sasl_mechanisms(accepted, users, tokens)(TlsPeer())) == ["OAUTHBEARER", "XOAUTH2", "PLAIN"]
    plain = SaslServer(sasl_mechanisms(chosen.broker, users, tokens)(TlsPeer()))
    client = SaslClient([PlainClient("ann", "no token")])
    assert Pair(sasl=plain, client_sasl=client, require_sasl=True).run().server.user is None


def test_wrong_tokens_delay_logins_and_tokens_with_unknown_keys_do_not(provider: Provider, caplog: pytest.LogCaptureFixture) -> None:
    async def guess() -> None:
        checks = LoginChecks(known_tokens(provider, settings(provider)))
        for _ in range(FREE_FAILURES):
            with pytest.raises(LoginUnavailable):
                await checks.identify(provider.token(key=SigningKey("second")), ADDRESS)
        assert (checks.failed, checks.delayed) == (0, 0)
        for _ in range(FREE_FAILURES):
            with pytest.raises(AuthenticationFailed, match="signature"):
                await checks.identify(provider.token(key=OTHER), ADDRESS)
        assert (await checks.identify(provider.token("bob"), ADDRESS)).user == "bob"
        assert (checks.failed, checks.delayed) == (FREE_FAILURES, 0)
        assert (await checks.identify(provider.token(), ADDRESS)).user == "ann"
        assert (checks.failed, checks.delayed) == (FREE_FAILURES, 1)

    asyncio.run(guess())
    assert "logins delayed after failures user=ann" in caplog.text


@pytest.mark.parametrize(
    ("mechanism", "response", "user"),
    [
        ("XOAUTH2", "user=eve\x01auth=Bearer {}\x01\x01", "eve"),
        ("OAUTHBEARER", "n,a=eve,\x01auth=Bearer {}\x01\x01", "eve"),
        ("OAUTHBEARER", "n,,\x01auth=Bearer {}\x01\x01", "ann"),
        ("PLAIN", "\0eve\0{}", "eve"),
        ("PLAIN", "\0\0{}", "ann"),
    ],
)
def test_refused_token_is_reported_once_with_the_claimed_user(mechanism: str, response: str, user: str, provider: Provider) -> None:
    chosen = Settings.model_validate({"broker": {"oidc": settings(provider).model_dump(exclude_unset=True)}})
    tokens, reported = known_tokens(provider, chosen.broker.oidc), []
    server = SaslServer(sasl_mechanisms(chosen.broker, UserDirectory(chosen), tokens)(TlsPeer()), lambda *what: reported.append(what))
    server.receive(SaslInit(Symbol(mechanism), response.format(provider.token(aud="other")).encode()))
    assert server.check is not None
    assert server.claimed_user == user
    answer = server.checked(server.check())
    assert [what[:2] for what in reported] == [(user, mechanism)], "also of a client that never answers the challenge"
    if isinstance(answer, SaslChallenge):
        server.receive(SaslResponse(b"\x01"))
    assert server.done
    assert server.error is not None
    assert len(reported) == 1


@pytest.mark.parametrize("token", ["", "eyJ", "eyJ..", "eyJ.eyJ.", "a.b.c", unsigned({}, {"sub": 7}), unsigned({}, {})])
def test_token_that_names_no_user_claims_none(token: str, provider: Provider) -> None:
    assert known_tokens(provider, settings(provider)).verifier.claimed_user(token) == ""
