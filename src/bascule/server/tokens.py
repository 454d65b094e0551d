"""Who the holder of a token is: JSON Web Tokens (RFC 7519) of an OpenID Connect provider, checked without asking the provider.

``bascule.server.logins`` uses it for AMQP, and for HTTP with ``Authorization: Bearer``.
"""

from __future__ import annotations

import base64
import binascii
import json
import time
from collections.abc import Callable
from typing import Any, Final

import jwt
from jwt import exceptions

from bascule.amqp.bearer import TOKEN_FRAME_SIZE_BYTES_MAX, TOKEN_PRE_OPEN_BYTES_MAX, TOKEN_SIZE_BYTES_MAX, TokenCheck
from bascule.amqp.errors import UNAUTHORIZED_ACCESS, AmqpError
from bascule.amqp.sasl import AuthenticationFailed, LoginUnavailable, TokenIdentity
from bascule.config.oidc import Oidc
from bascule.server.key_set import KEY_ID_LENGTH_MAX, KEY_WAIT_S, KeySet
from bascule.server.key_source import key_source

#: Characters of a user name: it is stored with each subscription of the user.
USER_LENGTH_MAX: Final = 255
#: Seconds since 1970 in a token, about 30,000 years: larger numbers are no times.
TIME_S_MAX: Final = 1e12
#: The name of clients without a login, which no token may give.
ANONYMOUS: Final = "anonymous"
#: The limits of connections (``bascule.amqp.limits.ConnectionLimits``) before their login, if clients log in with tokens.
TOKEN_LIMITS: Final[Any] = {
    "sasl_frame_size_bytes_max": TOKEN_FRAME_SIZE_BYTES_MAX,
    "pre_open_bytes_max": TOKEN_PRE_OPEN_BYTES_MAX,
}
#: What a client is told when its token ends.
TOKEN_EXPIRED: Final = AmqpError(UNAUTHORIZED_ACCESS, "the token of this connection has expired; connect again with a new token")
#: Which claim PyJWT complains of.
_REASONS: Final[tuple[tuple[type[Exception], str], ...]] = (
    (exceptions.InvalidIssuerError, "claim 'iss' is not broker.oidc.issuer"),
    (exceptions.InvalidAudienceError, "claim 'aud' has none of the names in broker.oidc.audience"),
    (exceptions.InvalidSignatureError, "the signature of the token is wrong"),
)


class TokenVerifier:
    """Checks tokens by a key set and the settings."""

    def __init__(self, oidc: Oidc, keys: KeySet, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns seconds since 1970."""
        self._oidc = oidc
        self._keys = keys
        self._clock = clock

    def key_of(self, token: str) -> tuple[str | None, str]:
        """Return key id and algorithm of a token whose signature is not checked yet. Raises AuthenticationFailed."""
        if len(token) > TOKEN_SIZE_BYTES_MAX:
            raise AuthenticationFailed(f"the token has more than {TOKEN_SIZE_BYTES_MAX} bytes")
        head = _json(token.partition(".")[0])
        algorithm, key_id = head.get("alg"), head.get("kid")
        if algorithm not in self._oidc.algorithms:
            raise AuthenticationFailed("the algorithm of the token's signature ('alg') is not in broker.oidc.algorithms")
        if key_id is not None and not (isinstance(key_id, str) and len(key_id) <= KEY_ID_LENGTH_MAX):
            raise AuthenticationFailed("the name of the token's key ('kid') is not a text, or too long")
        if "crit" in head or "b64" in head:
            raise AuthenticationFailed("the token has extensions ('crit') that the broker does not know")
        return key_id, str(algorithm)

    def verify(self, token: str) -> TokenIdentity:
        """Return what a valid token says. Raises AuthenticationFailed, and LoginUnavailable if its key is not known."""
        key_id, algorithm = self.key_of(token)
        keys = self._keys.find(key_id, algorithm)
        if not keys:
            raise LoginUnavailable(f"the key of the token is not in the key set{self._keys.failure and '; the key set cannot be read now'}")
        if key_id is None and len(keys) > 1:
            raise AuthenticationFailed("the token does not name its key ('kid'), and the key set has several keys")
        claims = self._claims(token, keys[-1].key, algorithm)
        for claim, value in self._oidc.required_claims.items():
            found = claims.get(claim)
            if not (found == value or (isinstance(found, list) and value in found)):
                raise AuthenticationFailed(f"claim {claim!r} does not have the value in broker.oidc.required_claims")
        return TokenIdentity(self._user(claims), self._roles(claims), float(claims["exp"]) + self._oidc.clock_skew_s)

    def claimed_user(self, token: str) -> str:
        """Return the user that a token names, whether it is valid or not; "" if it names none."""
        try:
            user = _at(_json(token.split(".")[1]), self._oidc.user_claim)
        except (AuthenticationFailed, IndexError):
            return ""
        return user[:USER_LENGTH_MAX] if isinstance(user, str) else ""

    def _claims(self, token: str, key: Any, algorithm: str) -> dict[str, Any]:
        """Return the claims of a token whose signature, times, issuer and audience are right. Raises AuthenticationFailed."""
        oidc = self._oidc
        required = ["exp", "iss", "aud"]
        # PyJWT reads the clock of the machine itself, so times are checked below.
        options: Any = {"require": required, "verify_exp": False, "verify_nbf": False, "verify_iat": False}
        try:
            claims = jwt.decode(token, key, [algorithm], options, audience=oidc.audience, issuer=oidc.issuer)
        except exceptions.MissingRequiredClaimError as error:
            raise AuthenticationFailed(f"the token has no claim {error.claim!r}") from None
        except Exception as error:  # a malformed token can make JSON or cryptography raise anything
            reason = next((text for kind, text in _REASONS if isinstance(error, kind)), "the token is malformed")
            raise AuthenticationFailed(reason) from None
        self._check_times(claims)
        return claims

    def _check_times(self, claims: dict[str, Any]) -> None:
        now_s, skew_s = self._clock(), self._oidc.clock_skew_s
        for claim in ("exp", "nbf", "iat"):
            value = claims.get(claim)
            if value is None and claim != "exp":
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < TIME_S_MAX:
                raise AuthenticationFailed(f"claim {claim!r} is not a time in seconds since 1970")
            if claim == "exp" and value + skew_s <= now_s:
                raise AuthenticationFailed("the token has expired (claim 'exp'); get a new token")
            if claim != "exp" and value - skew_s > now_s:
                raise AuthenticationFailed(f"the token is not valid yet (claim {claim!r}); check the clocks")

    def _user(self, claims: dict[str, Any]) -> str:
        claim = self._oidc.user_claim
        user = _at(claims, claim)
        if not isinstance(user, str) or not 0 < len(user) <= USER_LENGTH_MAX or not user.isprintable() or user == ANONYMOUS:
            raise AuthenticationFailed(f"claim {claim!r} is not a name of a user: 1 to {USER_LENGTH_MAX} printable characters")
        return user

    def _roles(self, claims: dict[str, Any]) -> frozenset[str]:
        """Return the roles of a token that the settings know. A token without the claim gives no roles."""
        found = None if self._oidc.roles_claim is None else _at(claims, self._oidc.roles_claim)
        named = found.split() if isinstance(found, str) else found if isinstance(found, list) else []
        return frozenset(role for role in named if isinstance(role, str)) & frozenset(self._oidc.roles)


class TokenLogins:
    """The logins with tokens of a broker."""

    def __init__(self, oidc: Oidc, handshake_timeout_s: float) -> None:
        """Prepare logins. Raises InvalidInput for settings that name a file that cannot be used."""
        self.keys = KeySet(key_source(oidc), oidc.algorithms, oidc.refresh_s)
        self.verifier = TokenVerifier(oidc, self.keys)
        self.configuration_url = oidc.configuration_url
        self._wait_s = min(KEY_WAIT_S, handshake_timeout_s / 2)

    def knows_key_of(self, token: str) -> bool:
        """Return whether a token can be checked, or refused, without a wait for its key."""
        try:
            return bool(self.keys.find(*self.verifier.key_of(token)))
        except AuthenticationFailed:
            return True

    async def check(self, check: TokenCheck) -> bool:
        """Return the result of the check of a token. The check waits for an unknown key."""
        try:
            await self.keys.wait(*self.verifier.key_of(check.token), self._wait_s)
        except AuthenticationFailed as error:
            check.refused(error)
            return False
        return check()


def _json(part: str) -> dict[str, Any]:
    """Return the JSON object in a part of a token. Raises AuthenticationFailed."""
    try:
        found = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, RecursionError, binascii.Error):
        found = None
    if not isinstance(found, dict):
        raise AuthenticationFailed("the token is malformed")
    return found


def _at(claims: dict[str, Any], name: str) -> Any:
    """Return a claim by its name, or by a path with dots. A name may have dots itself, as URLs do."""
    if name in claims:
        return claims[name]
    found: Any = claims
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
