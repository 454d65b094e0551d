"""SCRAM-SHA-256 (RFC 5802, RFC 7677): both sides prove that they know the password, and neither sends or stores it.

A server stores a :class:`Verifier`, in PostgreSQL's format:
``SCRAM-SHA-256$<iterations>:<salt>$<stored key>:<server key>``, the three in base64.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass

from bascule.amqp.sasl import AuthenticationFailed

NAME = "SCRAM-SHA-256"
#: The minimum of RFC 7677. The broker's thread computes it for each PLAIN login, Java clients for each SCRAM login.
ITERATIONS = 16_384
#: Limit for clients: a server with more iterations could keep a client busy for minutes.
ITERATIONS_MAX = 1_000_000
SALT_BYTES = 16
_DIGEST_BYTES = hashlib.sha256().digest_size


def _hmac(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")


def _salted(password: str, salt: bytes, iterations: int) -> bytes:
    # The mapping part of SASLprep (RFC 4013); the rest of it forbids control characters.
    return hashlib.pbkdf2_hmac("sha256", unicodedata.normalize("NFKC", password).encode(), salt, iterations)


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


@dataclass(frozen=True, slots=True, repr=False)
class Verifier:
    """Verifies a password without storing it."""

    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    @classmethod
    def of(cls, password: str, salt: bytes, iterations: int = ITERATIONS) -> Verifier:
        """Return the verifier of a password; the salt should be random."""
        salted = _salted(password, salt, iterations)
        return cls(iterations, salt, hashlib.sha256(_hmac(salted, b"Client Key")).digest(), _hmac(salted, b"Server Key"))

    @classmethod
    def parse(cls, text: str) -> Verifier:
        """Parse the text form that ``str`` returns. Raises ValueError."""
        try:
            name, factors, keys = text.split("$")
            iterations, salt = factors.split(":")
            stored, server = (base64.b64decode(key, validate=True) for key in keys.split(":"))
            found = cls(int(iterations), base64.b64decode(salt, validate=True), stored, server)
        except (ValueError, binascii.Error):
            raise ValueError(f"must be {NAME}$ITERATIONS:SALT$STORED-KEY:SERVER-KEY, as `bascule user hash` prints it") from None
        if name != NAME or not 1 <= found.iterations <= ITERATIONS_MAX or {len(stored), len(server)} != {_DIGEST_BYTES}:
            raise ValueError(f"must be {NAME} with at most {ITERATIONS_MAX} iterations and keys of {_DIGEST_BYTES} bytes")
        return found

    def __str__(self) -> str:
        salt, stored, server = (base64.b64encode(part).decode() for part in (self.salt, self.stored_key, self.server_key))
        return f"{NAME}${self.iterations}:{salt}${stored}:{server}"

    def fits(self, password: str) -> bool:
        """Return whether the password is right, for PLAIN, which sends it."""
        return hmac.compare_digest(Verifier.of(password, self.salt, self.iterations).stored_key, self.stored_key)


class Verifiers:
    """The users of a broker, by name."""

    def __init__(self, users: Mapping[str, Verifier], secret: bytes) -> None:
        """``secret`` is random. An unknown user gets a constant salt derived from it, so that names cannot be probed."""
        self._users = dict(users)
        self._secret = secret
        self._iterations = next(iter(self._users.values())).iterations if users else ITERATIONS

    def get(self, user: str) -> Verifier | None:
        """Return the verifier of a user, None if the user is unknown."""
        return self._users.get(user)

    def shown(self, user: str) -> Verifier:
        """Return the verifier of a user; for an unknown user, one that no password matches."""
        salt = _hmac(self._secret, user.encode())[:SALT_BYTES]
        return self._users.get(user) or Verifier(self._iterations, salt, bytes(_DIGEST_BYTES), bytes(_DIGEST_BYTES))

    def check(self, user: str, password: str) -> bool:
        """Check a password for PLAIN. An unknown user takes as long as a wrong password."""
        return self.shown(user).fits(password) and user in self._users


def _attributes(message: bytes, names: str) -> list[str]:
    """Return the values of ``n=...,r=...`` in the order of ``names``. Raises AuthenticationFailed."""
    try:
        parts = message.decode().split(",")
    except UnicodeDecodeError:
        raise AuthenticationFailed(f"{NAME}: the message is not UTF-8") from None
    if len(parts) < len(names) or any(part[:2] != f"{name}=" for part, name in zip(parts, names, strict=False)):
        raise AuthenticationFailed(f"{NAME}: invalid message; attributes {names!r} are expected")
    return [part[2:] for part in parts[: len(names)]]


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise AuthenticationFailed(f"{NAME}: a value is not base64") from None


class ScramServer:
    """The server's side, without channel binding and authorization ids. ``nonce`` is random and printable, without a comma."""

    def __init__(self, verifiers: Verifiers, nonce: str) -> None:
        self._verifiers = verifiers
        self._nonce = nonce
        self._header = b""
        self._begun = b""  # client-first-message-bare and server-first-message
        self.user = ""
        self.final: bytes | None = None

    def step(self, response: bytes | None) -> bytes | None:
        """Handle the user and nonce, then the proof. Raises AuthenticationFailed."""
        if response is None:
            return b""
        if not self._begun:
            return self._first(response)
        self._last(response)
        return None

    def _first(self, response: bytes) -> bytes:
        flag, _, rest = response.partition(b",")
        actor, comma, bare = rest.partition(b",")
        if flag not in (b"n", b"y") or not comma:
            raise AuthenticationFailed(f"{NAME}: channel binding is not supported")
        name, nonce = _attributes(bare, "nr")
        self.user = name.replace("=2C", ",").replace("=3D", "=")
        if actor not in (b"", b"a=" + name.encode()):
            raise AuthenticationFailed(f"user {self.user!r:.60} may not act for another user")
        self._header = response[: len(response) - len(bare)]
        self._nonce = nonce + self._nonce
        verifier = self._verifiers.shown(self.user)
        challenge = f"r={self._nonce},s={base64.b64encode(verifier.salt).decode()},i={verifier.iterations}".encode()
        self._begun = bare + b"," + challenge
        return challenge

    def _last(self, response: bytes) -> None:
        without_proof, _, proof = response.rpartition(b",p=")
        binding, nonce = _attributes(without_proof, "cr")
        if _decoded(binding) != self._header or nonce != self._nonce:
            raise AuthenticationFailed(f"{NAME}: the nonce of the response does not match")
        verifier = self._verifiers.shown(self.user)
        said = self._begun + b"," + without_proof
        given = _decoded(proof.decode("ascii", "replace"))
        expected = _hmac(verifier.stored_key, said)
        if len(given) != _DIGEST_BYTES or not hmac.compare_digest(hashlib.sha256(_xor(given, expected)).digest(), verifier.stored_key):
            raise AuthenticationFailed(f"unknown user {self.user!r:.60} or wrong password")
        self.final = b"v=" + base64.b64encode(_hmac(verifier.server_key, said))


class ScramClient:
    """The client's side. ``nonce`` is random and printable, without a comma."""

    name = NAME

    def __init__(self, user: str, password: str, nonce: str) -> None:
        self._password = password
        self._nonce = nonce
        name = user.replace("=", "=3D").replace(",", "=2C")
        self._bare = f"n={name},r={nonce}".encode()
        self._signature = b""
        self._verified = False

    def initial(self) -> bytes | None:
        """Return the user and a nonce."""
        return b"n,," + self._bare

    def step(self, challenge: bytes) -> bytes:
        """Return the proof; then nothing for a server that sends its signature as a challenge. Raises AuthenticationFailed."""
        if self._signature:
            self._verify(challenge)
            return b""
        nonce, salt, iterations = _attributes(challenge, "rsi")
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise AuthenticationFailed(f"{NAME}: the nonce of the challenge does not match")
        if not iterations.isdecimal() or not 1 <= int(iterations) <= ITERATIONS_MAX:
            raise AuthenticationFailed(f"{NAME}: the server wants {iterations:.20} iterations; the limit is {ITERATIONS_MAX}")
        salted = _salted(self._password, _decoded(salt), int(iterations))
        key = _hmac(salted, b"Client Key")
        without_proof = f"c={base64.b64encode(b'n,,').decode()},r={nonce}".encode()
        said = self._bare + b"," + challenge + b"," + without_proof
        proof = _xor(key, _hmac(hashlib.sha256(key).digest(), said))
        self._signature = b"v=" + base64.b64encode(_hmac(_hmac(salted, b"Server Key"), said))
        return without_proof + b",p=" + base64.b64encode(proof)

    def finish(self, additional: bytes | None) -> None:
        """Check the server's proof, unless it was checked before. Raises AuthenticationFailed."""
        if not self._verified:
            self._verify(additional)

    def _verify(self, signature: bytes | None) -> None:
        self._verified = bool(self._signature) and signature is not None and hmac.compare_digest(signature, self._signature)
        if not self._verified:
            raise AuthenticationFailed("the server could not prove that it knows the password")
