import pytest

from bascule.amqp.composite import Composite, decode_composite, encode_composite
from bascule.amqp.connection import Connection
from bascule.amqp.errors import RESOURCE_LIMIT_EXCEEDED, UNAUTHORIZED_ACCESS
from bascule.amqp.events import ConnectionClosed, Event
from bascule.amqp.frames import FRAME_HEADER, SASL_FRAME, SASL_HEADER, frame
from bascule.amqp.limits import SASL_ROUNDS_MAX
from bascule.amqp.performatives import Open, Role, SaslChallenge, SaslInit, SaslMechanisms, SaslOutcome, SaslResponse
from bascule.amqp.sasl import (
    AnonymousClient,
    AnonymousServer,
    AuthenticationFailed,
    PlainClient,
    PlainServer,
    SaslClient,
    SaslServer,
    password_check,
)  # fmt: skip
from tests.unit.amqp.pair import Pair, events_of


def plain() -> PlainServer:
    return PlainServer(password_check({"alice": "secret", "émile": "pässword"}))


class TwoRounds:
    """A mechanism of two rounds like SCRAM: the client proves its identity, then the server does."""

    def __init__(self) -> None:
        self.user = ""
        self.final: bytes | None = None
        self.round = 0

    def step(self, response: bytes | None) -> bytes | None:
        self.round += 1
        if self.round == 1:
            return b"nonce of " + (response or b"nobody")
        if response != b"proof":
            raise AuthenticationFailed("no proof")
        self.user, self.final = "bob", b"signature"
        return None


class TwoRoundsClient:
    name = "TWICE"

    def initial(self) -> bytes | None:
        return b"bob"

    def step(self, challenge: bytes) -> bytes:
        if challenge != b"nonce of bob":
            raise AuthenticationFailed("this is not the server")
        return b"proof"

    def finish(self, additional: bytes | None) -> None:
        if additional != b"signature":
            raise AuthenticationFailed("this is not the server")


class Endless:
    user = ""
    final: bytes | None = None

    def step(self, response: bytes | None) -> bytes | None:
        return b"again"


def mechanisms() -> SaslServer:
    return SaslServer({"TWICE": TwoRounds, "PLAIN": plain, "ANONYMOUS": AnonymousServer, "ENDLESS": Endless})


class RawClient:
    """A client that sends the SASL frames of a test."""

    def __init__(self) -> None:
        self.server = Connection(Role.SERVER, container_id="server", sasl=mechanisms(), require_sasl=True)
        self.server.receive(SASL_HEADER, 0.0)
        self.offer = self._frames()
        self.events: list[Event] = []

    def say(self, performative: Composite) -> list[Composite]:
        self.events = self.server.receive(frame(0, encode_composite(performative), SASL_FRAME), 0.0)
        if self.server.login_check is not None:
            self.events += self.server.login_checked(self.server.login_check())
        return self._frames()

    def _frames(self) -> list[Composite]:
        data, found = self.server.data_to_send().removeprefix(SASL_HEADER), []
        while data:
            size = FRAME_HEADER.unpack_from(data)[0]
            found.append(decode_composite(data[8:size])[0])
            data = data[size:]
        return found


@pytest.mark.parametrize(
    ("client", "user"),
    [
        (PlainClient("alice", "secret"), "alice"),
        (PlainClient("émile", "pässword"), "émile"),
        (AnonymousClient(), "anonymous"),
        (TwoRoundsClient(), "bob"),
    ],
)
def test_authenticated_client_is_known_by_user_name(client: PlainClient | AnonymousClient | TwoRoundsClient, user: str) -> None:
    pair = Pair(sasl=mechanisms(), client_sasl=SaslClient([client]), require_sasl=True).run()
    assert pair.server.user == user
    assert pair.client.remote_open.container_id == "server"


@pytest.mark.parametrize(("user", "password"), [("alice", "wrong"), ("nobody", ""), ("", ""), ("alice", "")])
def test_wrong_credentials_close_both_ends_as_unauthorized(user: str, password: str) -> None:
    pair = Pair(sasl=mechanisms(), client_sasl=SaslClient([PlainClient(user, password)]), require_sasl=True).run()
    for events, connection in ((pair.at_server, pair.server), (pair.at_client, pair.client)):
        error = events_of(ConnectionClosed, events)[0].error
        assert error is not None
        assert error.condition == UNAUTHORIZED_ACCESS
        assert connection.closed
        assert connection.user is None


def test_client_chooses_its_first_mechanism_that_server_offers() -> None:
    clients = [TwoRoundsClient(), PlainClient("alice", "secret")]
    clients[0].name = "SCRAM-SHA-256"  # type: ignore[misc]
    pair = Pair(sasl=mechanisms(), client_sasl=SaslClient(clients), require_sasl=True).run()
    assert pair.server.user == "alice"


def test_client_closes_when_no_mechanism_is_common() -> None:
    pair = Pair(sasl=SaslServer({"PLAIN": plain}), client_sasl=SaslClient([AnonymousClient()]), require_sasl=True).run()
    assert pair.client.closed
    assert "PLAIN" in str(pair.client.error)


def test_client_closes_when_server_fails_to_prove_its_identity() -> None:
    class Impostor(TwoRounds):
        def step(self, response: bytes | None) -> bytes | None:
            return b"of somebody else"

    pair = Pair(sasl=SaslServer({"TWICE": Impostor}), client_sasl=SaslClient([TwoRoundsClient()]), require_sasl=True).run()
    assert pair.client.closed
    assert "not the server" in str(pair.client.error)


def test_mechanisms_are_offered_in_order_and_outcome_carries_server_signature() -> None:
    raw = RawClient()
    assert raw.offer == [SaslMechanisms(("TWICE", "PLAIN", "ANONYMOUS", "ENDLESS"))]
    assert raw.say(SaslInit("TWICE", b"bob")) == [SaslChallenge(b"nonce of bob")]
    assert raw.say(SaslResponse(b"proof")) == [SaslOutcome(0, b"signature")]


def test_plain_without_initial_response_gets_a_challenge() -> None:
    raw = RawClient()
    assert raw.say(SaslInit("PLAIN")) == [SaslChallenge(b"")]
    assert raw.say(SaslResponse(b"\0alice\0secret")) == [SaslOutcome(0)]
    assert raw.server.user == "alice"


@pytest.mark.parametrize("response", [b"", b"alice", b"\0alice", b"bob\0alice\0secret", b"\0alice\0secret\0", b"\xff\0\xff\0\xff"])
def test_malformed_plain_response_is_refused(response: bytes) -> None:
    raw = RawClient()
    assert raw.say(SaslInit("PLAIN", response)) == [SaslOutcome(1)]
    assert raw.server.closed


def test_mechanism_that_is_not_offered_is_refused() -> None:
    raw = RawClient()
    assert raw.say(SaslInit("GSSAPI", b"")) == [SaslOutcome(1)]
    assert raw.server.closed


@pytest.mark.parametrize("performative", [SaslResponse(b""), SaslOutcome(0), SaslMechanisms(("X",)), Open("c")])
def test_frame_out_of_sequence_closes_sasl_exchange(performative: Composite) -> None:
    raw = RawClient()
    assert raw.say(performative) == []
    assert raw.server.closed


def test_sasl_exchange_beyond_limit_of_rounds_is_closed() -> None:
    raw = RawClient()
    raw.say(SaslInit("ENDLESS"))
    for _ in range(SASL_ROUNDS_MAX):
        assert not raw.server.closed
        raw.say(SaslResponse(b"more"))
    assert raw.server.error is not None
    assert raw.server.error.condition == RESOURCE_LIMIT_EXCEEDED
