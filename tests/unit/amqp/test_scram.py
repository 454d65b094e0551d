"""SCRAM: the exchange of RFC 7677, and invalid exchanges that must fail."""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections import Counter
from collections.abc import Mapping

import pytest

from bascule.amqp.channel_binding import TLS_SERVER_END_POINT, TLS_UNIQUE
from bascule.amqp.events import ConnectionClosed
from bascule.amqp.sasl import (
    AuthenticationFailed,
    ExternalClient,
    ExternalServer,
    PlainClient,
    PlainServer,
    QuickCheck,
    SaslClient,
    SaslServer,
)
from bascule.amqp.scram import CLIENT_NONCE_BYTES_MAX, ScramClient, ScramServer
from bascule.amqp.verifiers import ITERATIONS, ITERATIONS_MAX, SALT_BYTES, SALT_BYTES_MAX, SCRAM_SHA_256, SCRAM_SHA_512, Verifier, Verifiers
from tests.unit.amqp.pair import Pair, events_of

# RFC 7677, section 3.
CLIENT_NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
CLIENT_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
CLIENT_FINAL = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


#: AMQP 1.0 part 5, section 5.3.1.
SASL_FRAME_BYTES_OF_THE_STANDARD = 512


def verifiers(**passwords: str) -> Verifiers:
    return Verifiers({user: Verifier.of(password, SALT, 4096) for user, password in passwords.items()}, b"secret of this run")


def proven(asked: ScramServer, response: bytes) -> bool:
    """Return the result of the check that the last step returns."""
    check = asked.step(response)
    assert isinstance(check, QuickCheck)
    return check()


def server(**passwords: str) -> ScramServer:
    return ScramServer(verifiers(**passwords or {"user": "pencil"}), SERVER_NONCE)


def test_scram_exchange_matches_the_example_of_the_rfc() -> None:
    asked, asking = server(), ScramClient("user", "pencil", CLIENT_NONCE)
    assert asking.initial() == CLIENT_FIRST
    assert asked.step(CLIENT_FIRST) == SERVER_FIRST
    assert asking.step(SERVER_FIRST) == CLIENT_FINAL
    assert proven(asked, CLIENT_FINAL)
    assert (asked.user, asked.final) == ("user", SERVER_FINAL)
    asking.finish(SERVER_FINAL)


@pytest.mark.parametrize("user", ["ann", "a,b=c", "émile"])
def test_scram_client_authenticates_over_a_connection(user: str) -> None:
    offered = SaslServer({"SCRAM-SHA-256": lambda: server(**{user: "pässword"})})
    pair = Pair(sasl=offered, client_sasl=SaslClient([ScramClient(user, "pässword", "c")]), require_sasl=True).run()
    assert pair.server.user == user
    assert not pair.client.closed


@pytest.mark.parametrize(("user", "password"), [("user", "pen"), ("nobody", "pencil"), ("user", ""), ("", "pencil")])
def test_wrong_password_and_unknown_user_are_indistinguishable(user: str, password: str) -> None:
    asked, asking = server(), ScramClient(user, password, CLIENT_NONCE)
    challenge = asked.step(asking.initial())
    assert isinstance(challenge, bytes)
    assert challenge == server().step(asking.initial()), "the salt of an unknown user must not change between attempts"
    assert not proven(asked, asking.step(challenge))
    assert asked.final is None


def test_client_closes_when_server_does_not_know_the_password() -> None:
    class Impostor(ScramServer):
        def step(self, response: bytes | None) -> bytes | QuickCheck:
            following = super().step(response)
            self.final = b"v=" + base64.b64encode(bytes(32))
            return QuickCheck(lambda: True) if isinstance(following, QuickCheck) else following

    offered = SaslServer({"SCRAM-SHA-256": lambda: Impostor(verifiers(user="guessed"), SERVER_NONCE)})
    pair = Pair(sasl=offered, client_sasl=SaslClient([ScramClient("user", "pencil", "c")]), require_sasl=True).run()
    error = events_of(ConnectionClosed, pair.at_client)[0].error
    assert error is not None
    assert "could not prove that it knows the password" in str(error)


def test_server_success_before_client_proof_raises_authentication_failed() -> None:
    asking = ScramClient("user", "pencil", CLIENT_NONCE)
    asking.initial()
    with pytest.raises(AuthenticationFailed, match="could not prove that it knows the password"):
        asking.finish(b"v=")


@pytest.mark.parametrize(
    "first",
    [
        b"",
        b"n,,",
        b"p=tls-unique,,n=user,r=c",
        b"n,a=bob,n=user,r=c",
        b"n,,m=ext,n=user,r=c",
        b"n,,n=\xff,r=c",
        b"x,,n=user,r=c",
        b"n,,n=user",
    ],
)
def test_malformed_client_first_message_is_refused(first: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        server().step(first)


def test_nonce_that_makes_the_challenge_larger_than_a_sasl_frame_is_refused() -> None:
    longest = b"n,,n=user,r=" + b"r" * CLIENT_NONCE_BYTES_MAX
    challenge = server(user="pencil").step(longest)
    assert isinstance(challenge, bytes)
    assert len(challenge) < SASL_FRAME_BYTES_OF_THE_STANDARD - 30
    with pytest.raises(AuthenticationFailed, match="nonce"):
        server(user="pencil").step(longest + b"r")


@pytest.mark.parametrize(
    "final",
    [
        b"", b"c=biws", b"c=biws,r=other,p=AAAA", CLIENT_FINAL.replace(b"biws", b"eSws"), CLIENT_FINAL[:-3],
        CLIENT_FINAL.replace(b"p=dHz", b"p=\xff\xff"), CLIENT_FINAL.replace(b"c=biws", b"c=*"),
    ],
)  # fmt: skip
def test_malformed_client_final_message_is_refused(final: bytes) -> None:
    asked = server()
    asked.step(CLIENT_FIRST)
    with pytest.raises(AuthenticationFailed):
        asked.step(final)


@pytest.mark.parametrize("final", [CLIENT_FINAL.replace(b"dHz", b"dHy"), CLIENT_FINAL[:-4]])
def test_client_final_message_with_wrong_proof_is_refused(final: bytes) -> None:
    asked = server()
    asked.step(CLIENT_FIRST)
    assert not proven(asked, final)


def test_proof_of_a_password_that_was_changed_after_the_challenge_is_refused() -> None:
    users = verifiers(user="pencil")
    asked, asking = ScramServer(users, SERVER_NONCE), ScramClient("user", "pencil", CLIENT_NONCE)
    challenge = asked.step(asking.initial() or b"")
    assert isinstance(challenge, bytes)
    users.replace({"user": Verifier.of("brush", SALT, 4096)}, b"secret of this run")
    assert not proven(asked, asking.step(challenge))


@pytest.mark.parametrize("mechanism", [SCRAM_SHA_256, SCRAM_SHA_512])
def test_each_mechanism_uses_its_own_hash(mechanism: str) -> None:
    users = Verifiers({"user": Verifier.of("pencil", SALT, 4096, mechanism)}, b"secret", mechanism)
    for password, proves in (("pencil", True), ("pen", False)):
        asked, asking = ScramServer(users, SERVER_NONCE), ScramClient("user", password, CLIENT_NONCE, mechanism)
        challenge = asked.step(asking.initial() or b"")
        assert isinstance(challenge, bytes)
        assert proven(asked, asking.step(challenge)) is proves
        if proves:
            asking.finish(asked.final)


@pytest.mark.parametrize(
    "challenge",
    [b"", b"r=other,s=AAAA,i=4096", b"r=rOprNGfwEbeRWgbNEkqO,s=AAAA,i=4096", SERVER_FIRST + b"0000", SERVER_FIRST.replace(b"4096", b"x")],
)
def test_challenge_with_foreign_nonce_or_costly_iterations_is_refused(challenge: bytes) -> None:
    with pytest.raises(AuthenticationFailed):
        ScramClient("user", "pencil", CLIENT_NONCE).step(challenge)


def test_verifier_has_the_text_form_of_postgresql_and_is_parsed_back() -> None:
    verifier = Verifier.of("pencil", SALT, 4096)
    text = str(verifier)
    assert text == (
        "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU="
    )
    assert Verifier.parse(text) == verifier
    assert "pencil" not in repr(verifier)


@pytest.mark.parametrize(
    "text",
    ["", "pencil", "SCRAM-SHA-256$4096:AAAA$AAAA:AAAA", "SCRAM-SHA-256$x:AAAA$AAAA:AAAA",
     *(str(Verifier.of("p", SALT, 1)).replace(*change) for change in (
         ("256", "1"), ("256", "512"), ("$1:", f"${ITERATIONS_MAX + 1}:"), ("$1:", "$0:"),
         ("$1:", "$1_0:"), ("$1:", "$ 1:"), ("$1:", "$-1:"),
     )),
     str(Verifier.of("p", b"", 1)), str(Verifier.of("p", bytes(SALT_BYTES_MAX + 1), 1))],
)  # fmt: skip
def test_malformed_verifier_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"SCRAM-SHA-256|iterations"):
        Verifier.parse(text)


def test_plain_password_is_checked_against_the_scram_verifier() -> None:
    users = verifiers(user="pencil")
    assert [users.check(*given) for given in (("user", "pencil"), ("user", "pen"), ("nobody", "pencil"))] == [True, False, False]
    pair = Pair(
        sasl=SaslServer({"PLAIN": lambda: PlainServer(users.check)}),
        client_sasl=SaslClient([PlainClient("user", "pencil")]),
        require_sasl=True,
    ).run()
    assert pair.server.user == "user"


def test_external_mechanism_takes_identity_from_the_transport() -> None:
    offered = SaslServer({"EXTERNAL": lambda: ExternalServer("CN=ann")})
    assert Pair(sasl=offered, client_sasl=SaslClient([ExternalClient()]), require_sasl=True).run().server.user == "CN=ann"
    with pytest.raises(AuthenticationFailed):
        ExternalServer("ann").step(b"bob")
    assert ExternalServer("ann").step(None) == b""


def shapes(users: Verifiers, names: int) -> Counter[tuple[int, int]]:
    """Return what unknown users seem to have: the number of iterations and the size of the salt."""
    return Counter((shown.iterations, len(shown.salt)) for shown in (users.shown(f"nobody{number}") for number in range(names)))


@pytest.mark.parametrize("mechanism", [SCRAM_SHA_256, SCRAM_SHA_512])
def test_unknown_users_have_the_iterations_and_salt_sizes_of_users_as_often_as_users_have_them(mechanism: str) -> None:
    kinds = {(1, 16): 6, (2, 16): 3, (2, 8): 1}
    known = {
        f"{kind}{number}": Verifier.of("x", bytes(kind[1]), kind[0], mechanism) for kind, count in kinds.items() for number in range(count)
    }
    found = shapes(Verifiers(known, b"secret", mechanism), 1000)
    assert set(found) == set(kinds)
    assert all(abs(found[kind] - 100 * count) < 60 for kind, count in kinds.items()), found


def test_unknown_user_keeps_salt_and_iterations_over_a_restart_and_nearly_always_when_users_change() -> None:
    known = {f"user{number}": Verifier.of("x", SALT, 1 + number % 2) for number in range(10)}
    before = Verifiers(known, b"secret")
    after = Verifiers({**known, "new": Verifier.of("x", SALT, 1)}, b"secret")
    names = [f"nobody{number}" for number in range(200)]
    assert [Verifiers(known, b"secret").shown(name) for name in names] == [before.shown(name) for name in names]
    changed = sum(before.shown(name) != after.shown(name) for name in names)
    assert changed < 20
    assert len({before.shown(name).salt for name in names}) == len(names)
    assert not {before.shown(name).salt for name in names} & {Verifiers(known, b"other").shown(name).salt for name in names}


def test_unknown_user_has_the_default_iterations_if_there_are_no_users() -> None:
    assert shapes(Verifiers({}, b"secret"), 5) == {(ITERATIONS, SALT_BYTES): 5}


@pytest.mark.parametrize("mechanism", [SCRAM_SHA_256, SCRAM_SHA_512])
def test_unknown_user_and_wrong_password_cause_the_same_work(mechanism: str, monkeypatch: pytest.MonkeyPatch) -> None:
    users = Verifiers({"user": Verifier.of("pencil", SALT, 7, mechanism)}, b"secret", mechanism)
    work: list[tuple[object, ...]] = []
    pbkdf2, digest = hashlib.pbkdf2_hmac, hmac.digest
    monkeypatch.setattr(hashlib, "pbkdf2_hmac", lambda *given: work.append(("pbkdf2", given[0], given[3])) or pbkdf2(*given))  # type: ignore[func-returns-value]
    monkeypatch.setattr(hmac, "digest", lambda *given: work.append(("hmac", given[2])) or digest(*given))  # type: ignore[func-returns-value]

    def by_plain(user: str) -> None:
        assert not users.check(user, "wrong")

    def by_scram(user: str) -> None:
        asked, asking = ScramServer(users, SERVER_NONCE), ScramClient(user, "wrong", CLIENT_NONCE, mechanism)
        challenge = asked.step(asking.initial() or b"")
        assert isinstance(challenge, bytes)
        response = asking.step(challenge)
        assert not proven(asked, response)

    for login in (by_plain, by_scram):
        done = []
        for user in ("user", "nobody"):
            work.clear()
            login(user)
            done.append(list(work))
        assert done[0] == done[1]
        assert done[0]


def test_salt_of_an_unknown_user_differs_between_mechanisms() -> None:
    assert Verifiers({}, b"s", SCRAM_SHA_256).shown("x").salt != Verifiers({}, b"s", SCRAM_SHA_512).shown("x").salt


BINDING = b"hash of the certificate"
BINDINGS = {TLS_SERVER_END_POINT: BINDING, TLS_UNIQUE: b"finished"}


def bound(*, plus: bool, bindings: Mapping[str, bytes] = BINDINGS) -> ScramServer:
    return ScramServer(verifiers(user="pencil"), SERVER_NONCE, bindings, plus=plus)


def offer(bindings: Mapping[str, bytes] = BINDINGS) -> SaslServer:
    """Return a server that offers both variants, the one with channel binding only if there is one."""
    plus = {"SCRAM-SHA-256-PLUS": lambda: bound(plus=True, bindings=bindings)} if bindings else {}
    return SaslServer({**plus, "SCRAM-SHA-256": lambda: bound(plus=False, bindings=bindings)})


def clients(end_point: bytes | None) -> list[ScramClient]:
    """Return the mechanisms of a client that prefers channel binding."""
    plus = () if end_point is None else (True,)
    return [ScramClient("user", "pencil", CLIENT_NONCE, end_point=end_point, plus=each) for each in (*plus, False)]


@pytest.mark.parametrize(
    ("bindings", "end_point", "mechanism"),
    [
        (BINDINGS, BINDING, "SCRAM-SHA-256-PLUS"),
        (BINDINGS, None, "SCRAM-SHA-256"),  # a client without channel binding
        ({}, BINDING, "SCRAM-SHA-256"),  # a server without, behind a proxy that ends TLS
        ({}, None, "SCRAM-SHA-256"),
    ],
)
def test_client_binds_its_login_to_the_connection_if_both_sides_can(
    bindings: Mapping[str, bytes], end_point: bytes | None, mechanism: str
) -> None:
    sasl = offer(bindings)
    pair = Pair(sasl=sasl, client_sasl=SaslClient(clients(end_point)), require_sasl=True).run()
    assert (pair.server.user, sasl.mechanism) == ("user", mechanism)
    assert not pair.client.closed


def test_login_over_another_connection_than_the_clients_is_refused() -> None:
    sasl = offer()
    Pair(sasl=sasl, client_sasl=SaslClient(clients(b"hash of the certificate of another")), require_sasl=True).run()
    assert sasl.user is None
    assert sasl.error is not None
    assert "somebody between them ends TLS" in sasl.error.description


def test_client_that_was_not_shown_the_variants_with_channel_binding_is_refused() -> None:
    sasl = offer()
    _, without = clients(BINDING)
    Pair(sasl=sasl, client_sasl=SaslClient([without]), require_sasl=True).run()
    assert sasl.user is None
    assert sasl.error is not None
    assert "changed the list of mechanisms" in sasl.error.description


@pytest.mark.parametrize(
    ("plus", "first", "reason"),
    [
        (True, b"n,,n=user,r=c", "does not fit the mechanism"),
        (True, b"y,,n=user,r=c", "does not fit the mechanism"),
        (False, b"p=tls-server-end-point,,n=user,r=c", "does not fit the mechanism"),
        (True, b"p=,,n=user,r=c", "no channel binding ''"),
        (True, b"p=tls-exporter,,n=user,r=c", "no channel binding 'tls-exporter'; this connection has tls-server-end-point, tls-unique"),
        (True, b"p=\xff,,n=user,r=c", "no channel binding"),
    ],
)
def test_flag_of_another_variant_and_unknown_channel_binding_are_refused(plus: bool, first: bytes, reason: str) -> None:
    with pytest.raises(AuthenticationFailed, match=reason):
        bound(plus=plus).step(first)


@pytest.mark.parametrize("kind", BINDINGS)
@pytest.mark.parametrize("sent", [None, b"", b"other"])
def test_the_proof_covers_the_channel_binding_that_the_client_names(kind: str, sent: bytes | None) -> None:
    """The client computes its proof over the binding that it sends; the server accepts only the binding of its own connection."""
    header, asked = f"p={kind},,".encode(), bound(plus=True)
    bare = f"n=user,r={CLIENT_NONCE}".encode()
    challenge = asked.step(header + bare)
    assert isinstance(challenge, bytes)
    nonce = challenge.partition(b",")[0]
    final = b"c=" + base64.b64encode(header + (BINDINGS[kind] if sent is None else sent)) + b"," + nonce
    key = hmac.digest(hashlib.pbkdf2_hmac("sha256", b"pencil", SALT, 4096), b"Client Key", "sha256")
    signature = hmac.digest(hashlib.sha256(key).digest(), bare + b"," + challenge + b"," + final, "sha256")
    proof = base64.b64encode(bytes(a ^ b for a, b in zip(key, signature, strict=True)))
    if sent is None:
        assert proven(asked, final + b",p=" + proof)
    else:
        with pytest.raises(AuthenticationFailed, match="channel binding does not match"):
            asked.step(final + b",p=" + proof)
