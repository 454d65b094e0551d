"""SCRAM-SHA-256 and SCRAM-SHA-512 (RFC 5802, RFC 7677): both sides prove that they know the password, and neither sends or stores it."""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Mapping
from functools import partial
from typing import Final

from bascule.amqp.channel_binding import NO_BINDINGS, TLS_SERVER_END_POINT
from bascule.amqp.sasl import AuthenticationFailed, QuickCheck
from bascule.amqp.verifiers import (
    ITERATIONS_MAX,
    PLUS,
    SCRAM_SHA_256,
    Verifiers,
    digest_bytes,
    hash_of,
    hmac_of,
    salted_password,
)

#: Bytes of a client's nonce, which the challenge repeats: a SASL frame has at most 512 bytes (AMQP 1.0 part 5, section 5.3.1). Clients use
#: some 40.
CLIENT_NONCE_BYTES_MAX: Final = 256


def _xor(left: bytes, right: bytes) -> bytes:
    return bytes(a ^ b for a, b in zip(left, right, strict=True))


def _attributes(message: bytes, names: str) -> list[str]:
    """Return the values of ``n=...,r=...`` in the order of ``names``. Raises AuthenticationFailed."""
    try:
        parts = message.decode().split(",")
    except UnicodeDecodeError:
        raise AuthenticationFailed("SCRAM: the message is not UTF-8") from None
    if len(parts) < len(names) or any(part[:2] != f"{name}=" for part, name in zip(parts, names, strict=False)):
        raise AuthenticationFailed(f"SCRAM: invalid message; attributes {names!r} are expected")
    return [part[2:] for part in parts[: len(names)]]


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise AuthenticationFailed("SCRAM: a value is not base64") from None


class ScramServer:
    """The server's side, without authorization ids. ``nonce`` is random and printable, without a comma."""

    def __init__(self, verifiers: Verifiers, nonce: str, bindings: Mapping[str, bytes] = NO_BINDINGS, *, plus: bool = False) -> None:
        """``bindings`` are the channel bindings of the connection; if there are any, the server also offers the variant with ``plus``."""
        self._verifiers = verifiers
        self._nonce = nonce
        self._bindings = bindings
        self._plus = plus
        self._binding = b""  # the header and the channel binding that the client must repeat
        self._begun = b""  # client-first-message-bare and server-first-message
        self.user = ""
        self.final: bytes | None = None

    def step(self, response: bytes | None) -> bytes | QuickCheck:
        """Handle the user and nonce, then return the check of the proof. Raises AuthenticationFailed."""
        if response is None:
            return b""
        return self._last(response) if self._begun else self._first(response)

    def _first(self, response: bytes) -> bytes:
        flag, _, rest = response.partition(b",")
        actor, comma, bare = rest.partition(b",")
        if not comma:
            raise AuthenticationFailed("SCRAM: the message has no header")
        data = self._bound(flag)
        name, nonce = _attributes(bare, "nr")
        if len(nonce.encode()) > CLIENT_NONCE_BYTES_MAX:
            raise AuthenticationFailed(f"SCRAM: the nonce has more than {CLIENT_NONCE_BYTES_MAX} bytes")
        self.user = name.replace("=2C", ",").replace("=3D", "=")
        if actor not in (b"", b"a=" + name.encode()):
            raise AuthenticationFailed(f"user {self.user!r:.60} may not act for another user")
        self._binding = response[: len(response) - len(bare)] + data
        self._nonce = nonce + self._nonce
        verifier = self._verifiers.shown(self.user)
        challenge = f"r={self._nonce},s={base64.b64encode(verifier.salt).decode()},i={verifier.iterations}".encode()
        self._begun = bare + b"," + challenge
        return challenge

    def _bound(self, flag: bytes) -> bytes:
        """Return the channel binding for the flag of the client (RFC 5802, section 6). Raises AuthenticationFailed."""
        if flag == b"n" and not self._plus:
            return b""
        if flag == b"y" and not self._plus:
            if self._bindings:
                raise AuthenticationFailed(
                    "SCRAM: the client supports channel binding, and has not seen that the server does; somebody between them may have"
                    " changed the list of mechanisms"
                )
            return b""
        kind = flag.removeprefix(b"p=").decode("ascii", "replace")
        if not self._plus or not flag.startswith(b"p="):
            raise AuthenticationFailed(f"SCRAM: the flag {flag[:20]!r} of the client does not fit the mechanism")
        if kind not in self._bindings:
            raise AuthenticationFailed(f"SCRAM: no channel binding {kind!r:.40}; this connection has {', '.join(self._bindings)}")
        return self._bindings[kind]

    def _last(self, response: bytes) -> QuickCheck:
        without_proof, _, proof = response.rpartition(b",p=")
        binding, nonce = _attributes(without_proof, "cr")
        if nonce != self._nonce:
            raise AuthenticationFailed("SCRAM: the nonce of the response does not match")
        if not hmac.compare_digest(_decoded(binding), self._binding):
            raise AuthenticationFailed(
                "SCRAM: the channel binding does not match: the client uses another TLS connection than the server; somebody between"
                " them ends TLS"
                if self._plus
                else "SCRAM: the header of the response does not match"
            )
        return QuickCheck(partial(self._proves, self._begun + b"," + without_proof, _decoded(proof.decode("ascii", "replace"))))

    def _proves(self, said: bytes, given: bytes) -> bool:
        """Check the proof against the verifier of now: the password may have changed since the challenge, which makes the proof wrong."""
        verifier = self._verifiers.shown(self.user)
        mechanism = verifier.mechanism
        expected = hmac_of(mechanism, verifier.stored_key, said)
        if len(given) != digest_bytes(mechanism):
            return False
        proven = hmac.compare_digest(hash_of(mechanism, _xor(given, expected)), verifier.stored_key)
        self.final = b"v=" + base64.b64encode(hmac_of(mechanism, verifier.server_key, said)) if proven else None
        return proven


class ScramClient:
    """The client's side. ``nonce`` is random and printable, without a comma."""

    def __init__(
        self, user: str, password: str, nonce: str, name: str = SCRAM_SHA_256, end_point: bytes | None = None, *, plus: bool = False
    ) -> None:
        """``name`` is the mechanism without its variant. ``end_point`` is the binding ``tls-server-end-point`` of the connection, if any.

        ``plus``: use the binding. Otherwise tell the server that its list of mechanisms had no variant with a binding.
        """
        self.name = f"{name}{PLUS}" if plus else name
        self._hash = name
        self._header = b"n,," if end_point is None else f"p={TLS_SERVER_END_POINT},,".encode() if plus else b"y,,"
        self._binding = self._header + (end_point or b"" if plus else b"")
        self._password = password
        self._nonce = nonce
        self.reason = "check user and password, and whether somebody between client and server ends TLS" if plus else ""
        escaped = user.replace("=", "=3D").replace(",", "=2C")
        self._bare = f"n={escaped},r={nonce}".encode()
        self._signature = b""
        self._verified = False

    def initial(self) -> bytes | None:
        """Return the user and a nonce."""
        return self._header + self._bare

    def step(self, challenge: bytes) -> bytes:
        """Return the proof; then nothing for a server that sends its signature as a challenge. Raises AuthenticationFailed."""
        if self._signature:
            self._verify(challenge)
            return b""
        nonce, salt, iterations = _attributes(challenge, "rsi")
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise AuthenticationFailed("SCRAM: the nonce of the challenge does not match")
        if not iterations.isdecimal() or not 1 <= int(iterations) <= ITERATIONS_MAX:
            raise AuthenticationFailed(f"SCRAM: the server wants {iterations:.20} iterations; the limit is {ITERATIONS_MAX}")
        salted = salted_password(self._hash, self._password, _decoded(salt), int(iterations))
        key = hmac_of(self._hash, salted, b"Client Key")
        without_proof = f"c={base64.b64encode(self._binding).decode()},r={nonce}".encode()
        said = self._bare + b"," + challenge + b"," + without_proof
        proof = _xor(key, hmac_of(self._hash, hash_of(self._hash, key), said))
        self._signature = b"v=" + base64.b64encode(hmac_of(self._hash, hmac_of(self._hash, salted, b"Server Key"), said))
        return without_proof + b",p=" + base64.b64encode(proof)

    def finish(self, additional: bytes | None) -> None:
        """Check the server's proof, unless it was checked before. Raises AuthenticationFailed."""
        if not self._verified:
            self._verify(additional)

    def _verify(self, signature: bytes | None) -> None:
        self._verified = bool(self._signature) and signature is not None and hmac.compare_digest(signature, self._signature)
        if not self._verified:
            raise AuthenticationFailed("the server could not prove that it knows the password")
