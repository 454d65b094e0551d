"""Generators of hostile logins: tokens that no provider has made or should have made, and SASL exchanges of each mechanism."""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Callable
from typing import Any, Final

import jwt

from tests.support.hostile import AMQP_HEADER, SASL_HEADER, Hostile, binary, described, frame, listed, symbol
from tests.support.provider import AUDIENCE, LIFE_S, Provider, SigningKey

SASL_INIT, SASL_RESPONSE = 0x41, 0x43
MECHANISMS: Final = (
    b"PLAIN",
    b"SCRAM-SHA-256",
    b"SCRAM-SHA-512",
    b"OAUTHBEARER",
    b"XOAUTH2",
    b"EXTERNAL",
    b"ANONYMOUS",
    b"",
    b"plain",
    b"X" * 300,
)
USERS: Final = (
    b"nobody", b"canary", b"", b"root", "é".encode(), b"\x00", b"a\nb\x1b[31m", b"\xff", b"u" * 4000, b"=2C=3D", b"=", b"n,r", b"anonymous",
    "\u202e\U0010ffff".encode(), b"nobody\x00canary",
)  # fmt: skip
#: JSON that costs much, or is read in different ways by different readers.
DOCUMENTS: Final = (
    b"", b"{", b"[]", b"null", b"{}", b'"x"', b"1" * 5000, b"[" * 5000, b'{"a":' * 2000 + b"1" + b"}" * 2000, b"[" * 4000 + b"]" * 4000,
    b'{"alg": 1' + b"0" * 5000 + b"}", b'{"exp": 1e999}', b'{"alg": NaN}', b"\xff\xfe", b"\xef\xbb\xbf{}", b'{"sub": "\\ud800"}', b"\x00",
    b'{"alg": "RS256", "alg": "none"}', b"{" + b",".join(b'"k%d": 0' % n for n in range(900)) + b"}", b'{"alg": "RS256", "kid": "first"} x',
)  # fmt: skip
ALGORITHMS: Final[tuple[Any, ...]] = (
    "none",
    "None",
    "NONE",
    "HS256",
    "HS512",
    "RS256",
    "rs256",
    "RS1",
    "ES256",
    "EdDSA",
    "PS256",
    "",
    "RS256\x00",
    ["RS256"],
    None,
    7,
    {},
)
KEY_IDS: Final[tuple[Any, ...]] = (
    "first", None, "", "second", "../../../../dev/null", "first' OR '1'='1", "\x00", "\ud800", "k" * 501, "k" * 9000, 7, ["first"], {},
    True,
    "http://127.0.0.1/key", "first\n",
)  # fmt: skip
TIMES: Final[tuple[Any, ...]] = (None, 0, -1, 1e308, float("inf"), float("nan"), 10**400, "1e12", True, [], {}, 1 << 63, 4_000_000_000)
NAMES: Final[tuple[Any, ...]] = (
    None, "", "ann", "canary", "anonymous", "a\nb", "\x1b[31m", "\ud800", "\u202e", "x" * 255, "x" * 256, "x" * 9000, 7, [], ["ann"], {},
    {"a": "ann"}, True, " ", "ann\x00",
)  # fmt: skip
ROLES: Final[tuple[Any, ...]] = (
    None,
    "may",
    "may may",
    ["may"],
    ["may", 7, None, {}, ["may"]],
    {"may": True},
    "x" * 9000,
    ["r"] * 2000,
    1.5,
    True,
)


def encoded(data: bytes) -> str:
    """Return base64 as tokens have it."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class HostileTokens:
    """A random choice of tokens by a seed. ``signed`` says whether the key of the provider has signed the last one."""

    def __init__(self, seed: int, provider: Provider) -> None:
        self.random = random.Random(seed)
        self.signed = False
        self._provider = provider
        self._other = SigningKey("first", "ES256")

    def token(self) -> str:
        """Return a token, or a text that only looks like one."""
        make = self.random.choices((self._claims, self._head, self._mangled, self._parts, self._text), (6, 5, 4, 4, 1))[0]
        self.signed = make == self._claims
        return make()

    def _some(self, *values: Any) -> Any:
        return self.random.choice(values)

    def _claims(self) -> str:
        """Return a token with a valid signature and hostile claims."""
        if self.random.random() < 0.2:
            return self.sign(self._some(*DOCUMENTS))
        now_s = time.time()
        given: dict[str, Any] = {"iss": self._provider.issuer, "aud": AUDIENCE, "sub": "ann", "iat": now_s, "exp": now_s + LIFE_S}
        for names, values in (
            (("exp", "nbf", "iat"), TIMES), (("sub", "iss", "jti"), NAMES), (("aud",), (*NAMES, AUDIENCE, [AUDIENCE, 7])),
            (("roles",), ROLES),
        ):  # fmt: skip
            if self.random.random() < 0.4:
                given[self._some(*names)] = self._some(*values)
        return self.sign(json.dumps(given).encode())

    def sign(self, payload: bytes) -> str:
        """Return a token of any bytes; no library makes one of claims of the wrong type."""
        key = self._provider.keys[0]
        return jwt.PyJWS().encode(payload, key.private, key.algorithm, {"kid": key.key_id})

    def _head(self) -> str:
        """Return a token with a hostile head."""
        head = {"typ": self._some("JWT", None, 7), "alg": self._some(*ALGORITHMS), "kid": self._some(*KEY_IDS)}
        for name, value in (
            ("crit", ["exp"]), ("b64", False), ("jku", "http://127.0.0.1/"), ("x5u", "file:///etc/passwd"), ("zip", "DEF"),
            ("enc", "A128GCM"), ("jwk", self._other.public), ("x5c", ["AA"] * 100),
        ):  # fmt: skip
            if self.random.random() < 0.15:
                head[name] = value
        body = {"iss": self._provider.issuer, "aud": AUDIENCE, "sub": "eve", "exp": 4_000_000_000, "roles": ["may"]}
        signature = self._some(b"", b"x", bytes(256), self.random.randbytes(256), self.random.randbytes(64), self.random.randbytes(8000))
        return ".".join(map(encoded, (json.dumps(head).encode(), json.dumps(body).encode(), signature)))

    def _mangled(self) -> str:
        """Return a valid token with a change."""
        token = self._provider.token(roles=["may"])
        head, body, signature = token.split(".")
        other = self._provider.token("eve", roles=["may"], exp=5_000_000_000)
        place = self.random.randrange(len(head) + 1, len(head) + len(body))
        twisted = token[:place] + self._some("A", "-", "_") * 2 + token[place + 2 :] + "A"
        return str(self._some(
            f"{head}.{other.split('.')[1]}.{signature}", f"{head}.{body}.", f"{head}.{body}", f"{head}..{signature}",
            f".{body}.{signature}",
            f"{token}.{signature}", twisted, token[: -1 - place % 200], self._provider.token(key=self._other, roles=["may"]),
            token.upper(), f"{head}.{body}.{encoded(bytes(256))}", token[::-1],
        ))  # fmt: skip

    def _parts(self) -> str:
        """Return a token of hostile documents."""
        return ".".join(encoded(self._some(*DOCUMENTS)) for _ in range(self._some(1, 2, 3, 3, 3, 4)))

    def _text(self) -> str:
        return str(self._some("", ".", "..", "." * 16_000, "eyJ" + "x" * 16_381, "eyJ.é.x", "eyJ.\ud800.x", "eyJ.\x00.x", "eyJ" + "." * 3))


class HostileLogins:
    """A random choice of the bytes that a peer sends before it has logged in. It never has valid credentials."""

    def __init__(self, seed: int, provider: Provider) -> None:
        self._hostile = Hostile(seed)
        self.random = self._hostile.random
        self._tokens = HostileTokens(seed, provider)

    def pieces(self) -> list[bytes]:
        """Return the pieces of an exchange, and what an eager peer sends behind it."""
        chance, choose = self._hostile.chance, self.random.choice
        mechanism = choose(MECHANISMS)
        said = [SASL_HEADER if chance(0.95) else choose((AMQP_HEADER, b"AMQP\x02\x01\0\0", b"HTTP/1.1", self.random.randbytes(8)))]
        hostname = symbol(b"h") if chance(0.1) else self._hostile.value(1) if chance(0.2) else b"\x40"
        said.append(frame(described(SASL_INIT, listed(symbol(mechanism), self._field(mechanism), hostname)), kind=1))
        for _ in range(choose((0, 1, 1, 2, 12))):
            said.append(frame(described(SASL_RESPONSE, listed(self._field(mechanism))), kind=choose((1, 1, 1, 0))))
        if chance(0.1):
            self.random.shuffle(said)
        if chance(0.5):
            eager = Hostile(self.random.randrange(1 << 30), b"ANONYMOUS")
            said += [eager.opening()[len(SASL_HEADER) :] if chance(0.5) else AMQP_HEADER, *eager.session(), eager.frame()]
        return [b"".join(said)] if chance(0.5) else said

    def _field(self, mechanism: bytes) -> bytes:
        return self._hostile.value(2) if self._hostile.chance(0.1) else binary(self._response(mechanism))

    def _response(self, mechanism: bytes) -> bytes:
        choose = self.random.choice
        user, password = choose(USERS), choose((b"", b"wrong", b"song\x00", b"p" * 9000, b"\xff", self._token()))
        forms: dict[bytes, Callable[[], bytes]] = {
            b"PLAIN": lambda: b"\0".join((choose((b"", user, b"canary")), user, password)[choose((0, 0, 1)) :]),
            b"OAUTHBEARER": lambda: (
                b"n," + choose((b"", b"a=" + user)) + b",\x01auth=Bearer " + self._token() + choose((b"\x01\x01", b"\x01", b""))
            ),
            b"XOAUTH2": lambda: b"user=" + user + b"\x01auth=" + choose((b"Bearer ", b"bearer ", b"Basic ")) + self._token() + b"\x01\x01",
            b"EXTERNAL": lambda: user,
        }
        scram = (
            b"n,,n=" + user + b",r=abc", b"y,,n=nobody,r=" + b"r" * 4000, b"p=tls-unique,,n=nobody,r=abc", b"n,a=canary,n=nobody,r=abc",
            b"c=biws,r=abc,p=" + encoded(bytes(32)).encode(), b"c=biws,r=,p=", b"c=" + b"A" * 4000, b"n,,m=x,n=nobody,r=abc", b",,,",
            b"n,,",
        )  # fmt: skip
        if self._hostile.chance(0.2):
            return self.random.randbytes(choose((1, 20, 3000)))
        return forms.get(mechanism, lambda: choose(scram))()

    def _token(self) -> bytes:
        token = self._tokens.token()
        while self._tokens.signed:  # it might be valid
            token = self._tokens.token()
        return token.encode(errors="surrogatepass")
