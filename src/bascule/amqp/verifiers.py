"""What a server stores of passwords for SCRAM (RFC 5802, RFC 7677), and the users of a server.

The text form of a :class:`Verifier` is PostgreSQL's: ``SCRAM-SHA-256$<iterations>:<salt>$<stored key>:<server key>``, with salt and keys in
base64.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import math
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

SCRAM_SHA_256: Final = "SCRAM-SHA-256"
SCRAM_SHA_512: Final = "SCRAM-SHA-512"
#: End of the name of a mechanism with channel binding, which has the verifiers of the mechanism without.
PLUS: Final = "-PLUS"
#: Mechanism -> its hash, the strongest first.
DIGESTS: Final[Mapping[str, str]] = {SCRAM_SHA_512: "sha512", SCRAM_SHA_256: "sha256"}
#: More than the minimum of RFC 7677, 4096. The broker's thread computes it for each PLAIN login, Java clients for each SCRAM login.
ITERATIONS: Final = 16_384
#: Limit for clients: a server with more iterations could keep a client busy for minutes.
ITERATIONS_MAX: Final = 1_000_000
SALT_BYTES: Final = 16
#: Longer salts are no safer, and each login sends the salt to the client.
SALT_BYTES_MAX: Final = 64
#: Kinds of verifiers that an unknown user may seem to have. Users have the same number of iterations, or a few different ones.
SHAPES_MAX: Final = 16


def digest_bytes(mechanism: str) -> int:
    """Return the size of the keys of a mechanism."""
    return hashlib.new(DIGESTS[mechanism]).digest_size


def hmac_of(mechanism: str, key: bytes, data: bytes) -> bytes:
    """Return the HMAC with the hash of a mechanism."""
    return hmac.digest(key, data, DIGESTS[mechanism])


def hash_of(mechanism: str, data: bytes) -> bytes:
    """Return the hash of a mechanism."""
    return hashlib.new(DIGESTS[mechanism], data).digest()


def salted_password(mechanism: str, password: str, salt: bytes, iterations: int) -> bytes:
    """Return the secret from which both sides derive their keys. The call takes milliseconds."""
    # The mapping part of SASLprep (RFC 4013); the rest of it forbids control characters.
    return hashlib.pbkdf2_hmac(DIGESTS[mechanism], unicodedata.normalize("NFKC", password).encode(), salt, iterations)


@dataclass(frozen=True, slots=True, repr=False)
class Verifier:
    """Verifies a password without storing it."""

    mechanism: str
    iterations: int
    salt: bytes
    stored_key: bytes
    server_key: bytes

    @classmethod
    def of(cls, password: str, salt: bytes, iterations: int = ITERATIONS, mechanism: str = SCRAM_SHA_256) -> Verifier:
        """Return the verifier of a password; the salt should be random."""
        salted = salted_password(mechanism, password, salt, iterations)
        stored = hash_of(mechanism, hmac_of(mechanism, salted, b"Client Key"))
        return cls(mechanism, iterations, salt, stored, hmac_of(mechanism, salted, b"Server Key"))

    @classmethod
    def parse(cls, text: str) -> Verifier:
        """Parse the text form that ``str`` returns. Raises ValueError."""
        try:
            name, factors, keys = text.split("$")
            iterations, salt = factors.split(":")
            stored, server = (base64.b64decode(key, validate=True) for key in keys.split(":"))
            found = cls(name, _number(iterations), base64.b64decode(salt, validate=True), stored, server)
        except (ValueError, binascii.Error):
            raise ValueError(f"must be {SCRAM_SHA_256}$ITERATIONS:SALT$STORED-KEY:SERVER-KEY, as `bascule user hash` prints it") from None
        if name not in DIGESTS or {len(stored), len(server)} != {digest_bytes(name)}:
            raise ValueError(f"must begin with {SCRAM_SHA_256} or {SCRAM_SHA_512}, with keys of the size of this hash")
        if not 1 <= found.iterations <= ITERATIONS_MAX or not 1 <= len(found.salt) <= SALT_BYTES_MAX:
            raise ValueError(f"must have 1 to {ITERATIONS_MAX} iterations and a salt of 1 to {SALT_BYTES_MAX} bytes")
        return found

    def __str__(self) -> str:
        salt, stored, server = (base64.b64encode(part).decode() for part in (self.salt, self.stored_key, self.server_key))
        return f"{self.mechanism}${self.iterations}:{salt}${stored}:{server}"

    def fits(self, password: str) -> bool:
        """Return whether the password is right, for PLAIN, which sends it. The call takes milliseconds."""
        given = Verifier.of(password, self.salt, self.iterations, self.mechanism)
        return hmac.compare_digest(given.stored_key, self.stored_key)


class _Shape(NamedTuple):
    """What a server shows of a verifier before the login."""

    iterations: int
    salt_bytes: int


class _Known(NamedTuple):
    """The users at one time."""

    users: Mapping[str, Verifier]
    secret: bytes
    shapes: tuple[tuple[_Shape, int], ...]  # with the number of users that have it


class Verifiers:
    """The verifiers of all users for one mechanism. Another thread may call ``check`` while ``replace`` is called."""

    def __init__(self, users: Mapping[str, Verifier], secret: bytes, mechanism: str = SCRAM_SHA_256) -> None:
        """Begin with ``users``: see ``replace``."""
        self.mechanism = mechanism
        self.replace(users, secret)

    def replace(self, users: Mapping[str, Verifier], secret: bytes) -> None:
        """Replace all users. ``secret`` decides what an unknown user seems to have.

        It must be the same after a restart, and at each broker to which a client may connect. Otherwise changes show which users exist.
        """
        shapes = Counter(_Shape(each.iterations, len(each.salt)) for each in users.values())
        common = shapes.most_common(SHAPES_MAX) or [(_Shape(ITERATIONS, SALT_BYTES), 1)]
        self._known = _Known(dict(users), secret, tuple(common))

    def get(self, user: str) -> Verifier | None:
        """Return the verifier of a user, None if the user is unknown."""
        return self._known.users.get(user)

    def shown(self, user: str) -> Verifier:
        """Return the verifier of a user; for an unknown user, one that no password matches.

        The verifier of an unknown user has the iterations and salt length of some users, each as often as users have it. It changes only
        if these numbers do. To compute it takes the same time for each user, known or not.
        """
        known = self._known
        mimicked = _mimicked(known, user)
        unmatched = bytes(digest_bytes(self.mechanism))
        salt = derived_salt(known.secret, self.mechanism, user, mimicked.salt_bytes)
        return known.users.get(user, Verifier(self.mechanism, mimicked.iterations, salt, unmatched, unmatched))

    def check(self, user: str, password: str) -> bool:
        """Check a password for PLAIN. An unknown user takes as long as a wrong password."""
        return self.shown(user).fits(password) and user in self._known.users


def derived_salt(secret: bytes, mechanism: str, user: str, size_bytes: int = SALT_BYTES) -> bytes:
    """Return a salt that looks random, and is the same for each call."""
    return hashlib.shake_256(hmac.digest(secret, f"salt {mechanism} {user}".encode(), "sha256")).digest(size_bytes)


def _mimicked(known: _Known, user: str) -> _Shape:
    """Return a shape by weighted rendezvous hashing: with other users in ``known``, few unknown users get another shape."""

    def rank(entry: tuple[_Shape, int]) -> float:
        shape, users = entry
        drawn = hmac.digest(known.secret, f"shape {shape.iterations} {shape.salt_bytes} {user}".encode(), "sha256")
        return -users / math.log((int.from_bytes(drawn[:6]) + 0.5) / 2**48)

    return max(known.shapes, key=rank)[0]


def _number(text: str) -> int:
    """Return a number without sign, blanks and underscores. Raises ValueError."""
    if not text.isascii() or not text.isdigit() or len(text) > len(str(ITERATIONS_MAX)):
        raise ValueError(text)
    return int(text)
