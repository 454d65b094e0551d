"""SASL as AMQP frames carry it (part 5, section 5.3): a server's and a client's side of one exchange, and mechanisms for both."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from bascule.amqp.composite import Composite
from bascule.amqp.errors import NOT_ALLOWED, UNAUTHORIZED_ACCESS, AmqpError, ConnectionFault, LimitExceeded
from bascule.amqp.limits import SASL_ROUNDS_MAX
from bascule.amqp.performatives import (
    SaslChallenge,
    SaslCode,
    SaslInit,
    SaslMechanisms,
    SaslOutcome,
    SaslResponse,
)
from bascule.core.errors import Scope

#: Whether this password is this user's.
Authenticate = Callable[[str, str], bool]


class AuthenticationFailed(AmqpError):
    """The peer is not who it says, or does not speak the mechanism it chose."""

    scope = Scope.CONNECTION
    condition = UNAUTHORIZED_ACCESS
    http_status = 401

    def __init__(self, description: str) -> None:
        super().__init__(self.condition, description)


class ServerMechanism(Protocol):
    """A server's side of one exchange, of any number of rounds."""

    #: Who the client turned out to be; read after the last step.
    user: str
    #: What goes with the outcome (SCRAM's server signature).
    final: bytes | None

    def step(self, response: bytes | None) -> bytes | Callable[[], bool] | None:
        """Take a response (None: the client sent no initial one); the next challenge, or None when the client is proven.

        A function is a check that takes long: the client is proven if it returns True. Raises AuthenticationFailed.
        """


class ClientMechanism(Protocol):
    """A client's side of one exchange."""

    name: str

    def initial(self) -> bytes | None:
        """The initial response."""

    def step(self, challenge: bytes) -> bytes:
        """The response to a challenge. Raises AuthenticationFailed where the server is not to be trusted."""

    def finish(self, additional: bytes | None) -> None:
        """The server is content, and says this with it. Raises AuthenticationFailed where the server is not to be trusted."""


class SaslServer:
    """The server's side: offers mechanisms in the order of the mapping, drives the one chosen.

    While ``check`` is not None the client waits for its outcome: call it where it may take long, and give its result to ``checked``.
    """

    def __init__(self, mechanisms: Mapping[str, Callable[[], ServerMechanism]]) -> None:
        self._mechanisms = mechanisms
        self._chosen: ServerMechanism | None = None
        self._rounds = 0
        self.done = False
        self.user: str | None = None
        self.mechanism = ""  # that the client has chosen
        self.error: AuthenticationFailed | None = None
        self.check: Callable[[], bool] | None = None

    def first(self) -> Composite | None:
        """The frame to send unasked."""
        return SaslMechanisms(tuple(self._mechanisms))

    def receive(self, frame: Composite) -> Composite | None:
        """Take the client's frame, give the answer, None while ``check`` is due. Raises ConnectionFault on a frame out of turn."""
        if isinstance(frame, SaslInit) and self._chosen is None:
            factory = self._mechanisms.get(str(frame.mechanism))
            if factory is None:
                return self._fail(AuthenticationFailed(f"mechanism {frame.mechanism!s:.40} is not offered"))
            self._chosen, self.mechanism = factory(), str(frame.mechanism)
            return self._step(self._chosen, frame.initial_response)
        if isinstance(frame, SaslResponse) and self._chosen is not None:
            return self._step(self._chosen, frame.response)
        raise ConnectionFault(NOT_ALLOWED, f"{frame.SYMBOL} out of turn")

    def checked(self, proven: bool) -> Composite:
        """Take the result of ``check``, give the outcome."""
        mechanism, self.check = self._chosen, None
        if not proven or mechanism is None:
            return self._fail(AuthenticationFailed("the user is unknown, or the password is wrong"))
        return self._proven(mechanism)

    def _step(self, mechanism: ServerMechanism, response: bytes | None) -> Composite | None:
        self._rounds += 1
        if self._rounds > SASL_ROUNDS_MAX:
            raise LimitExceeded(f"more than {SASL_ROUNDS_MAX} rounds of SASL")
        try:
            following = mechanism.step(response)
        except AuthenticationFailed as error:
            return self._fail(error)
        if isinstance(following, bytes):
            return SaslChallenge(following)
        if following is None:
            return self._proven(mechanism)
        self.check = following
        return None

    def _proven(self, mechanism: ServerMechanism) -> Composite:
        self.done, self.user = True, mechanism.user
        return SaslOutcome(SaslCode.OK, mechanism.final)

    def _fail(self, error: AuthenticationFailed) -> SaslOutcome:
        self.done, self.error = True, error
        return SaslOutcome(SaslCode.AUTH)


class SaslClient:
    """The client's side: takes the first of its mechanisms that the server offers."""

    def __init__(self, mechanisms: Sequence[ClientMechanism], hostname: str | None = None) -> None:
        self._mechanisms = mechanisms
        self._hostname = hostname
        self._chosen: ClientMechanism | None = None
        self._rounds = 0
        self.done = False
        self.user: str | None = None
        self.error: AuthenticationFailed | None = None

    def first(self) -> Composite | None:
        """Nothing: the server speaks first."""
        return None

    def receive(self, frame: Composite) -> Composite | None:
        """Take the server's frame, give the answer. Raises ConnectionFault on a frame out of turn."""
        if isinstance(frame, SaslMechanisms) and self._chosen is None:
            return self._choose(frame)
        if isinstance(frame, SaslChallenge) and self._chosen is not None:
            return self._step(self._chosen, frame.challenge)
        if isinstance(frame, SaslOutcome) and self._chosen is not None:
            self._finish(self._chosen, frame)
            return None
        raise ConnectionFault(NOT_ALLOWED, f"{frame.SYMBOL} out of turn")

    def _choose(self, offer: SaslMechanisms) -> Composite | None:
        self._chosen = next((mechanism for mechanism in self._mechanisms if mechanism.name in offer.mechanisms), None)
        if self._chosen is None:
            self.done = True
            self.error = AuthenticationFailed(f"no common mechanism; the server offers {', '.join(offer.mechanisms) or 'none'}")
            return None
        return SaslInit(self._chosen.name, self._chosen.initial(), self._hostname)

    def _finish(self, mechanism: ClientMechanism, outcome: SaslOutcome) -> None:
        self.done = True
        if outcome.code != SaslCode.OK:
            self.error = AuthenticationFailed(f"the server refused {mechanism.name} (code {outcome.code})")
            return
        try:
            mechanism.finish(outcome.additional_data)
        except AuthenticationFailed as error:
            self.error = error

    def _step(self, mechanism: ClientMechanism, challenge: bytes) -> Composite | None:
        self._rounds += 1
        if self._rounds > SASL_ROUNDS_MAX:
            raise LimitExceeded(f"more than {SASL_ROUNDS_MAX} rounds of SASL")
        try:
            return SaslResponse(mechanism.step(challenge))
        except AuthenticationFailed as error:
            self.done, self.error = True, error
            return None


class AnonymousServer:
    """ANONYMOUS (RFC 4505): the trace information is taken and forgotten."""

    final: bytes | None = None

    def __init__(self, user: str = "anonymous") -> None:
        self.user = user

    def step(self, response: bytes | None) -> bytes | None:
        """Ask for the trace information where it did not come at once."""
        return b"" if response is None else None


class PlainServer:
    """PLAIN (RFC 4616): authorization id, user and password, parted by NUL."""

    final: bytes | None = None

    def __init__(self, authenticate: Authenticate) -> None:
        """``authenticate`` may take long: it is what the last step returns."""
        self._authenticate = authenticate
        self.user = ""

    def step(self, response: bytes | None) -> bytes | Callable[[], bool]:
        """Take user and password, and return their check; acting for somebody else is refused."""
        if response is None:
            return b""
        try:
            authorization, user, password = response.decode().split("\0")
        except ValueError:
            raise AuthenticationFailed("no PLAIN response") from None
        if authorization not in ("", user):
            raise AuthenticationFailed(f"user {user!r:.60} may not act for {authorization!r:.60}")
        self.user = user
        return partial(self._authenticate, user, password)


class AnonymousClient:
    """ANONYMOUS as a client."""

    name = "ANONYMOUS"

    def initial(self) -> bytes | None:
        """No trace information."""
        return b""

    def step(self, challenge: bytes) -> bytes:
        """A server that asks again."""
        return challenge[:0]

    def finish(self, additional: bytes | None) -> None:
        """Nothing to check."""


class PlainClient:
    """PLAIN as a client."""

    name = "PLAIN"

    def __init__(self, user: str, password: str) -> None:
        self._response = f"\0{user}\0{password}".encode()

    def initial(self) -> bytes | None:
        """User and password at once."""
        return self._response

    def step(self, challenge: bytes) -> bytes:
        """A server that wants them again, by an empty challenge."""
        if challenge:
            raise AuthenticationFailed("PLAIN has no challenges")
        return self._response

    def finish(self, additional: bytes | None) -> None:
        """Nothing to check."""


class ExternalServer:
    """EXTERNAL (RFC 4422, appendix A): who the client is has been shown by other means, such as its TLS certificate."""

    final: bytes | None = None

    def __init__(self, user: str) -> None:
        self.user = user

    def step(self, response: bytes | None) -> bytes | None:
        """Acting for somebody else is refused."""
        if response is None:
            return b""
        if response not in (b"", self.user.encode()):
            raise AuthenticationFailed(f"the holder of the certificate of {self.user!r:.60} may not act for somebody else")
        return None


class ExternalClient:
    """EXTERNAL as a client: the server knows already."""

    name = "EXTERNAL"

    def initial(self) -> bytes | None:
        """As whoever the server takes us for."""
        return b""

    def step(self, challenge: bytes) -> bytes:
        """A server that asks again."""
        return challenge[:0]

    def finish(self, additional: bytes | None) -> None:
        """Nothing to check."""


def password_check(passwords: Mapping[str, str]) -> Authenticate:
    """Check against a table of users, taking the same time for every wrong guess."""

    def authenticate(user: str, password: str) -> bool:
        known = passwords.get(user, "")
        return hmac.compare_digest(known.encode(), password.encode()) and user in passwords

    return authenticate
