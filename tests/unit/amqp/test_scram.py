"""SCRAM-SHA-256: the exchange of RFC 7677, and invalid exchanges that must fail."""

from __future__ import annotations

import base64

import pytest

from bascule.amqp.events import ConnectionClosed
from bascule.amqp.sasl import AuthenticationFailed, ExternalClient, ExternalServer, PlainClient, PlainServer, SaslClient, SaslServer
from bascule.amqp.scram import ITERATIONS_MAX, ScramClient, ScramServer, Verifier, Verifiers
from tests.unit.amqp.pair import Pair, events_of

# RFC 7677, section 3.
CLIENT_NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = "%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SALT = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
CLIENT_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
CLIENT_FINAL = b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def verifiers(**passwords: str) -> Verifiers:
    return Verifiers({user: Verifier.of(password, SALT, 4096) for user, password in passwords.items()}, b"secret of this run")


def server(**passwords: str) -> ScramServer:
    return ScramServer(verifiers(**passwords or {"user": "pencil"}), SERVER_NONCE)


def test_scram_exchange_matches_the_example_of_the_rfc() -> None:
    asked, asking = server(), ScramClient("user", "pencil", CLIENT_NONCE)
    assert asking.initial() == CLIENT_FIRST
    assert asked.step(CLIENT_FIRST) == SERVER_FIRST
    assert asking.step(SERVER_FIRST) == CLIENT_FINAL
    assert asked.step(CLIENT_FINAL) is None
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
    assert challenge is not None
    assert challenge == server().step(asking.initial()), "the salt of an unknown user must not change between attempts"
    with pytest.raises(AuthenticationFailed, match=r"unknown user .* or wrong password"):
        asked.step(asking.step(challenge))
    assert asked.final is None


def test_client_closes_when_server_does_not_know_the_password() -> None:
    class Impostor(ScramServer):
        def step(self, response: bytes | None) -> bytes | None:
            try:
                return super().step(response)
            except AuthenticationFailed:
                self.final = b"v=" + base64.b64encode(bytes(32))
                return None

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


@pytest.mark.parametrize(
    "final",
    [
        b"", b"c=biws", b"c=biws,r=other,p=AAAA", CLIENT_FINAL.replace(b"biws", b"eSws"), CLIENT_FINAL.replace(b"dHz", b"dHy"),
        CLIENT_FINAL[:-4], CLIENT_FINAL.replace(b"p=dHz", b"p=\xff\xff"), CLIENT_FINAL.replace(b"c=biws", b"c=*"),
    ],
)  # fmt: skip
def test_client_final_message_without_valid_proof_is_refused(final: bytes) -> None:
    asked = server()
    asked.step(CLIENT_FIRST)
    with pytest.raises(AuthenticationFailed):
        asked.step(final)


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
     str(Verifier.of("p", SALT, 1)).replace("256", "1"), str(Verifier.of("p", SALT, 1)).replace("$1:", f"${ITERATIONS_MAX + 1}:")],
)  # fmt: skip
def test_malformed_verifier_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="SCRAM-SHA-256"):
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
