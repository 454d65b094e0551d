"""Log-in with a token: SASL OAUTHBEARER (RFC 7628), XOAUTH2, and PLAIN with a token as the password.

A server is given a reader of tokens. It reads no token itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, Protocol

from bascule.amqp.sasl import Authenticate, AuthenticationFailed, ExplainedCheck, PlainServer, TokenIdentity

OAUTHBEARER: Final = "OAUTHBEARER"
XOAUTH2: Final = "XOAUTH2"
#: Bytes of a token. Tokens with many roles have some 4 KiB; providers and HTTP servers do not pass on larger ones than this.
TOKEN_SIZE_BYTES_MAX: Final = 16 * 1024
#: Bytes of a SASL frame with a token: the token, and a user name twice.
TOKEN_FRAME_SIZE_BYTES_MAX: Final = TOKEN_SIZE_BYTES_MAX + 4 * 1024
#: Bytes before the peer's open, with a token: a SASL frame, and an open frame of the largest size.
TOKEN_PRE_OPEN_BYTES_MAX: Final = TOKEN_FRAME_SIZE_BYTES_MAX + 28 * 1024
#: Separates the parts of a response.
_END: Final = "\x01"
#: Response to the error of the server (RFC 7628, section 3.2.3).
_DUMMY: Final = b"\x01"
#: Begin of each JSON Web Token: the base64 of `{"`.
_TOKEN_BEGIN: Final = "eyJ"
_TOKEN_DOTS: Final = 2


class TokenReader(Protocol):
    """Reads tokens."""

    def verify(self, token: str) -> TokenIdentity:
        """Return what a valid token says. Raises AuthenticationFailed."""
        ...

    def claimed_user(self, token: str) -> str:
        """Return the user that a token names, whether it is valid or not; "" if it names none."""
        ...


def is_token(password: str) -> bool:
    """Return whether a password has the form of a JSON Web Token."""
    return password.startswith(_TOKEN_BEGIN) and password.count(".") == _TOKEN_DOTS


class TokenCheck(ExplainedCheck):
    """The check of one token. It takes less than a millisecond, but the key of the token may have to be fetched first."""

    def __init__(self, reader: TokenReader, user: str, token: str) -> None:
        """``user`` is the name that the client gives, or "" if it gives none. Raises AuthenticationFailed for a token that is too long."""
        super().__init__()
        if len(token) > TOKEN_SIZE_BYTES_MAX:
            raise AuthenticationFailed(f"the token has more than {TOKEN_SIZE_BYTES_MAX} bytes")
        self._reader = reader
        self._user = user
        self.token = token
        #: Whom a failure concerns, in the audit and in the delays of logins.
        self.claimed_user = user or reader.claimed_user(token)

    def __call__(self) -> bool:
        """Return whether the token is valid, and is a token of the user."""
        try:
            identity = self._reader.verify(self.token)
            if self._user not in ("", identity.user):
                raise AuthenticationFailed(f"the token is not a token of user {self._user!r:.60}")
        except AuthenticationFailed as error:
            self.refused(error)
            return False
        self.identity = identity
        return True

    def refused(self, error: AuthenticationFailed) -> None:
        """Note why the token is refused."""
        self.refusal = error

    @property
    def undecided(self) -> bool:
        """Return whether the token could not be checked now."""
        return self.refusal is not None and self.refusal.retriable


class BearerCheck(TokenCheck):
    """A check whose refusal the server explains to the client (RFC 7628, section 3.2.2)."""

    def __init__(self, reader: TokenReader, user: str, token: str, configuration_url: str) -> None:
        """``configuration_url``: where clients find the provider of tokens."""
        super().__init__(reader, user, token)
        self._configuration_url = configuration_url

    def refused(self, error: AuthenticationFailed) -> None:
        """Note why the token is refused, for the client too, unless the client should try again."""
        super().refused(error)
        if not error.retriable:
            said = {"status": "invalid_token", "error_description": error.description, "openid-configuration": self._configuration_url}
            self.challenge = json.dumps(said).encode()


class BearerServer:
    """The server's side of a mechanism with tokens; ``read`` returns the user and the token in a response."""

    final: bytes | None = None

    def __init__(self, reader: TokenReader, configuration_url: str, read: Callable[[bytes], tuple[str, str]]) -> None:
        self.user = ""  # as the client claims; the token says who the user is
        self._reader = reader
        self._configuration_url = configuration_url
        self._read = read
        self._check: BearerCheck | None = None

    def step(self, response: bytes | None) -> bytes | BearerCheck:
        """Return the check of the token. The response to an error ends the exchange."""
        if self._check is not None:
            raise self._check.refusal or AuthenticationFailed("unexpected response")
        if response is None:
            return b""
        self._check = BearerCheck(self._reader, *self._read(response), self._configuration_url)
        self.user = self._check.claimed_user
        return self._check


class PlainTokenServer(PlainServer):
    """PLAIN with a token as the password; other passwords are checked as usual."""

    def __init__(self, reader: TokenReader, authenticate: Authenticate) -> None:
        super().__init__(authenticate)
        self._reader = reader

    def check_of(self, user: str, password: str) -> Callable[[], bool]:
        """Return the check of a password or token."""
        if not is_token(password):
            return super().check_of(user, password)
        check = TokenCheck(self._reader, user, password)
        self.user = check.claimed_user
        return check


def read_oauthbearer(response: bytes) -> tuple[str, str]:
    """Return the user ("" if none is given) and the token in a response of OAUTHBEARER (RFC 7628). Raises AuthenticationFailed."""
    head, *pairs = _parts(response, OAUTHBEARER)
    flag, comma, rest = head.partition(",")
    actor, second_comma, following = rest.partition(",")
    if not (comma and second_comma) or following or flag not in ("n", "y"):
        raise AuthenticationFailed(f"{OAUTHBEARER}: invalid begin of the response; n,, or n,a=USER, is expected")
    if actor and not actor.startswith("a="):
        raise AuthenticationFailed(f"{OAUTHBEARER}: invalid user in the response; a=USER is expected")
    return actor.removeprefix("a=").replace("=2C", ",").replace("=3D", "="), _bearer(pairs, OAUTHBEARER)


def read_xoauth2(response: bytes) -> tuple[str, str]:
    """Return the user and the token in a response of XOAUTH2, which Google's mail servers have defined. Raises AuthenticationFailed."""
    head, *pairs = _parts(response, XOAUTH2)
    if not head.startswith("user="):
        raise AuthenticationFailed(f"{XOAUTH2}: invalid begin of the response; user=USER is expected")
    return head.removeprefix("user="), _bearer(pairs, XOAUTH2)


def _parts(response: bytes, mechanism: str) -> list[str]:
    """Return the parts of a response, which ends with two separators. Raises AuthenticationFailed."""
    try:
        text = response.decode()
    except UnicodeDecodeError:
        raise AuthenticationFailed(f"{mechanism}: the response is not UTF-8") from None
    if not text.endswith(2 * _END):
        raise AuthenticationFailed(f"{mechanism}: the response does not end with two bytes 01")
    return text[:-2].split(_END)


def _bearer(pairs: list[str], mechanism: str) -> str:
    """Return the token in ``auth=Bearer TOKEN``. Raises AuthenticationFailed."""
    given = [pair.removeprefix("auth=") for pair in pairs if pair.startswith("auth=")]
    scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
    if scheme.lower() != "bearer" or not token.strip():
        raise AuthenticationFailed(f"{mechanism}: the response has no token; auth=Bearer TOKEN is expected once")
    return token.strip()


class OauthBearerClient:
    """The client's side of OAUTHBEARER."""

    name = OAUTHBEARER

    def __init__(self, user: str, token: str) -> None:
        """``user`` may be ""; the token says who the user is."""
        actor = f"a={user.replace('=', '=3D').replace(',', '=2C')}" if user else ""
        self._response = f"n,{actor},{_END}auth=Bearer {token}{2 * _END}".encode()
        self.reason = ""  # of a refusal, in the server's words

    def initial(self) -> bytes | None:
        """Return the token."""
        return self._response

    def step(self, challenge: bytes) -> bytes:
        """Answer a request for the token with the token, and an error with the dummy response."""
        if not challenge:
            return self._response
        self.reason = _reason(challenge)
        return _DUMMY

    def finish(self, additional: bytes | None) -> None:
        """Check nothing."""


def _reason(challenge: bytes) -> str:
    """Return the reason in an error of the server; "" if it has none that can be shown."""
    try:
        said = json.loads(challenge)
    except (ValueError, RecursionError):
        return ""
    words = [said.get(key) for key in ("error_description", "status")] if isinstance(said, dict) else []
    return next((word for word in words if isinstance(word, str) and word.isprintable()), "")
