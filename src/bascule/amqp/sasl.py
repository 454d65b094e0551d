"""SASL in AMQP frames (part 5, section 5.3): the server's and the client's side of an exchange, and mechanisms for both."""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from bascule.amqp.composite import Composite
from bascule.amqp.errors import CONNECTION_FORCED, NOT_ALLOWED, UNAUTHORIZED_ACCESS, AmqpError, ConnectionFault, LimitExceeded
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

#: Checks whether the user has this password.
Authenticate = Callable[[str, str], bool]


class AuthenticationFailed(AmqpError):
    """The peer could not be authenticated, or violated the SASL mechanism it chose."""

    scope = Scope.CONNECTION
    condition = UNAUTHORIZED_ACCESS
    http_status = 401
    #: The SASL outcome.
    code = SaslCode.AUTH

    def __init__(self, description: str) -> None:
        super().__init__(self.condition, description)
        self.claimed_user = ""  # the name that the peer has given, if the one who raises the error knows it


@dataclass(frozen=True, slots=True)
class QuickCheck:
    """A check that takes microseconds, so that it need not wait behind slow checks."""

    check: Callable[[], bool]

    def __call__(self) -> bool:
        """Return whether the client is authenticated."""
        return self.check()


class LoginUnavailable(AuthenticationFailed):
    """The server cannot decide now whether the peer may log in; the peer should try again."""

    retriable = True
    condition = CONNECTION_FORCED
    http_status = 503
    code = SaslCode.SYS_TEMP


@dataclass(frozen=True, slots=True)
class TokenIdentity:
    """What a valid token says: the user, the user's roles, and the end of the login in seconds since 1970."""

    user: str
    roles: frozenset[str]
    until_s: float


class ExplainedCheck:
    """A check of a client that finds out who the client is, or why it is refused."""

    def __init__(self) -> None:
        self.identity: TokenIdentity | None = None
        self.refusal: AuthenticationFailed | None = None
        self.challenge: bytes | None = None  # tells the client of the refusal; its response precedes the outcome

    def __call__(self) -> bool:
        """Return whether the client is authenticated."""
        raise NotImplementedError


class ServerMechanism(Protocol):
    """The server's side of an exchange with any number of rounds."""

    #: The authenticated user; valid after the last step.
    user: str
    #: Additional data of the outcome (SCRAM's server signature).
    final: bytes | None

    def step(self, response: bytes | None) -> bytes | Callable[[], bool] | None:
        """Handle a response (None: no initial one); return the next challenge, or None if the client is authenticated.

        A returned function is a check, slow unless it is a QuickCheck; the client is authenticated if it returns True.
        Raises AuthenticationFailed.
        """


class ClientMechanism(Protocol):
    """The client's side of an exchange."""

    name: str

    def initial(self) -> bytes | None:
        """Return the initial response."""

    def step(self, challenge: bytes) -> bytes:
        """Return the response to a challenge. Raises AuthenticationFailed if the server cannot be trusted."""

    def finish(self, additional: bytes | None) -> None:
        """Handle the additional data of a successful outcome. Raises AuthenticationFailed if the server cannot be trusted."""


@runtime_checkable
class ToldWhy(Protocol):
    """A client's mechanism to which the server gives the reason of a refusal."""

    #: In the server's words; "" if there is none.
    reason: str


class SaslServer:
    """The server's side: offers mechanisms in the order of the mapping and runs the one chosen.

    While ``check`` is not None, the client waits for its result: call it where it may block, and pass the result to ``checked``.
    """

    def __init__(
        self, mechanisms: Mapping[str, Callable[[], ServerMechanism]], on_refused: Callable[[str, str, str], object] | None = None
    ) -> None:
        """``on_refused`` is called with the user that a refused client claims to be, the mechanism and the reason."""
        self._mechanisms = mechanisms
        self._on_refused = on_refused
        self._chosen: ServerMechanism | None = None
        self._rounds = 0
        self.done = False
        self.user: str | None = None
        self.mechanism = ""  # chosen by the client
        self.identity: TokenIdentity | None = None  # of a client with a token
        self.error: AuthenticationFailed | None = None
        self.check: Callable[[], bool] | None = None

    @property
    def claimed_user(self) -> str:
        """Return the user that the client claims to be, proven or not; "" if it has not said so yet."""
        if self.user is not None:
            return self.user
        return self._chosen.user if self._chosen is not None else ""

    @property
    def token_roles(self) -> frozenset[str]:
        """Return the roles that the client has by its token."""
        return frozenset() if self.identity is None else self.identity.roles

    def first(self) -> Composite | None:
        """Return the first frame to send."""
        return SaslMechanisms(tuple(self._mechanisms))

    def receive(self, frame: Composite) -> Composite | None:
        """Handle the client's frame; return the answer, None while ``check`` is pending. Raises ConnectionFault for an unexpected frame."""
        if isinstance(frame, SaslInit) and self._chosen is None:
            factory = self._mechanisms.get(str(frame.mechanism))
            if factory is None:
                return self._fail(AuthenticationFailed(f"SASL mechanism {frame.mechanism!s:.40} is not offered"))
            self._chosen, self.mechanism = factory(), str(frame.mechanism)
            return self._step(self._chosen, frame.initial_response)
        if isinstance(frame, SaslResponse) and self._chosen is not None:
            return self._step(self._chosen, frame.response)
        raise ConnectionFault(NOT_ALLOWED, f"unexpected SASL frame {frame.SYMBOL}")

    def checked(self, proven: bool) -> Composite:
        """Handle the result of ``check``; return the outcome, or the challenge that tells a client why it is refused."""
        mechanism, check, self.check = self._chosen, self.check, None
        if isinstance(check, ExplainedCheck):
            self.identity = check.identity if proven else None
            if self.identity is None and check.refusal is not None:
                if check.challenge is None:
                    return self._fail(check.refusal)
                self._note(check.refusal)  # the client may never answer
                return SaslChallenge(check.challenge)
        if not proven or mechanism is None:
            return self._fail(AuthenticationFailed(f"unknown user {self.claimed_user!r:.60} or wrong password"))
        return self._proven(mechanism)

    def _step(self, mechanism: ServerMechanism, response: bytes | None) -> Composite | None:
        self._rounds += 1
        if self._rounds > SASL_ROUNDS_MAX:
            raise LimitExceeded(f"the SASL exchange exceeds {SASL_ROUNDS_MAX} rounds")
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
        self.done, self.user = True, mechanism.user if self.identity is None else self.identity.user
        return SaslOutcome(SaslCode.OK, mechanism.final)

    def _fail(self, error: AuthenticationFailed) -> SaslOutcome:
        self.done = True
        self._note(error)
        return SaslOutcome(error.code)

    def _note(self, error: AuthenticationFailed) -> None:
        """Note why the client is refused, and report the first reason."""
        if self.error is None and self._on_refused is not None:
            self._on_refused(self.claimed_user, self.mechanism, error.description)
        self.error = self.error or error


class SaslClient:
    """The client's side: uses the first of its mechanisms that the server offers."""

    def __init__(self, mechanisms: Sequence[ClientMechanism], hostname: str | None = None, none_fits: str | None = None) -> None:
        """``none_fits`` is the advice for a server that offers none of the mechanisms; None: the usual advice."""
        self._mechanisms = mechanisms
        self._none_fits = none_fits
        self._hostname = hostname
        self._chosen: ClientMechanism | None = None
        self._rounds = 0
        self.done = False
        self.user: str | None = None
        self.error: AuthenticationFailed | None = None

    def first(self) -> Composite | None:
        """Return None: the server sends the first frame."""
        return None

    def receive(self, frame: Composite) -> Composite | None:
        """Handle the server's frame; return the answer. Raises ConnectionFault for an unexpected frame."""
        if isinstance(frame, SaslMechanisms) and self._chosen is None:
            return self._choose(frame)
        if isinstance(frame, SaslChallenge) and self._chosen is not None:
            return self._step(self._chosen, frame.challenge)
        if isinstance(frame, SaslOutcome) and self._chosen is not None:
            self._finish(self._chosen, frame)
            return None
        raise ConnectionFault(NOT_ALLOWED, f"unexpected SASL frame {frame.SYMBOL}")

    def _choose(self, offer: SaslMechanisms) -> Composite | None:
        self._chosen = next((mechanism for mechanism in self._mechanisms if mechanism.name in offer.mechanisms), None)
        if self._chosen is None:
            self.done = True
            self.error = AuthenticationFailed(self._no_common(offer.mechanisms))
            return None
        return SaslInit(self._chosen.name, self._chosen.initial(), self._hostname)

    def _no_common(self, offered: Sequence[str]) -> str:
        advice = ""
        if self._none_fits is not None:
            advice = f"; {self._none_fits}"
        elif list(offered) == ["ANONYMOUS"]:
            advice = "; it has no users: connect without user and password"
        elif [each.name for each in self._mechanisms] == ["ANONYMOUS"]:
            advice = "; connect with user and password"
        return f"no common SASL mechanism; the server offers {', '.join(offered) or 'none'}{advice}"

    def _finish(self, mechanism: ClientMechanism, outcome: SaslOutcome) -> None:
        self.done = True
        if outcome.code == SaslCode.SYS_TEMP:
            self.error = LoginUnavailable(f"the server cannot check the login by {mechanism.name} now; try again")
            return
        if outcome.code != SaslCode.OK:
            reason = mechanism.reason if isinstance(mechanism, ToldWhy) else ""
            why = reason or "check user and password"
            self.error = AuthenticationFailed(f"the server refused {mechanism.name} (SASL code {outcome.code}); {why}")
            return
        try:
            mechanism.finish(outcome.additional_data)
        except AuthenticationFailed as error:
            self.error = error

    def _step(self, mechanism: ClientMechanism, challenge: bytes) -> Composite | None:
        self._rounds += 1
        if self._rounds > SASL_ROUNDS_MAX:
            raise LimitExceeded(f"the SASL exchange exceeds {SASL_ROUNDS_MAX} rounds")
        try:
            return SaslResponse(mechanism.step(challenge))
        except AuthenticationFailed as error:
            self.done, self.error = True, error
            return None


class AnonymousServer:
    """ANONYMOUS (RFC 4505): the trace information is ignored."""

    final: bytes | None = None

    def __init__(self, user: str = "anonymous") -> None:
        self.user = user

    def step(self, response: bytes | None) -> bytes | None:
        """Request the trace information if there is no initial response."""
        return b"" if response is None else None


class PlainServer:
    """PLAIN (RFC 4616): authorization id, user and password, separated by NUL."""

    final: bytes | None = None

    def __init__(self, authenticate: Authenticate) -> None:
        """``authenticate`` may block; the last step returns a call of it."""
        self._authenticate = authenticate
        self.user = ""

    def step(self, response: bytes | None) -> bytes | Callable[[], bool]:
        """Return the check of user and password; an authorization id of another user is refused."""
        if response is None:
            return b""
        try:
            authorization, user, password = response.decode().split("\0")
        except ValueError:
            raise AuthenticationFailed("invalid PLAIN response") from None
        if authorization not in ("", user):
            raise AuthenticationFailed(f"user {user!r:.60} may not act for {authorization!r:.60}")
        self.user = user
        return self.check_of(user, password)

    def check_of(self, user: str, password: str) -> Callable[[], bool]:
        """Return the check of a password."""
        return partial(self._authenticate, user, password)


class AnonymousClient:
    """The client's side of ANONYMOUS."""

    name = "ANONYMOUS"

    def initial(self) -> bytes | None:
        """Return empty trace information."""
        return b""

    def step(self, challenge: bytes) -> bytes:
        """Answer a repeated challenge."""
        return challenge[:0]

    def finish(self, additional: bytes | None) -> None:
        """Check nothing."""


class PlainClient:
    """The client's side of PLAIN."""

    name = "PLAIN"

    def __init__(self, user: str, password: str) -> None:
        self._response = f"\0{user}\0{password}".encode()

    def initial(self) -> bytes | None:
        """Return user and password."""
        return self._response

    def step(self, challenge: bytes) -> bytes:
        """Answer an empty challenge with user and password."""
        if challenge:
            raise AuthenticationFailed("unexpected challenge: PLAIN has none")
        return self._response

    def finish(self, additional: bytes | None) -> None:
        """Check nothing."""


class ExternalServer:
    """EXTERNAL (RFC 4422, appendix A): the client was authenticated by other means, such as its TLS certificate."""

    final: bytes | None = None

    def __init__(self, user: str, admitted: Callable[[], bool] = lambda: True) -> None:
        """``admitted`` returns whether the user may log in now."""
        self.user = user
        self._admitted = admitted

    def step(self, response: bytes | None) -> bytes | None:
        """Accept the client; an authorization id of another user is refused."""
        if response is None:
            return b""
        if not self._admitted():
            raise AuthenticationFailed(f"user {self.user!r:.60} of the certificate is unknown")
        if response not in (b"", self.user.encode()):
            raise AuthenticationFailed(f"the holder of the certificate of {self.user!r:.60} may not act for another user")
        return None


class ExternalClient:
    """The client's side of EXTERNAL."""

    name = "EXTERNAL"

    def initial(self) -> bytes | None:
        """Return an empty authorization id."""
        return b""

    def step(self, challenge: bytes) -> bytes:
        """Answer a repeated challenge."""
        return challenge[:0]

    def finish(self, additional: bytes | None) -> None:
        """Check nothing."""


def password_check(passwords: Mapping[str, str]) -> Authenticate:
    """Return a check against a table of users, which takes the same time for every wrong guess."""

    def authenticate(user: str, password: str) -> bool:
        known = passwords.get(user, "")
        return hmac.compare_digest(known.encode(), password.encode()) and user in passwords

    return authenticate
