"""A provider of tokens for tests: real keys, signed tokens, and an HTTP server that publishes the key set."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Self

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from bascule.config.oidc import Oidc
from bascule.server.key_set import keys_of
from bascule.server.tokens import TokenLogins

AUDIENCE = "bascule"
LIFE_S = 300.0
KEYS_PATH = "/keys"
TOKEN_PATH = "/token"


class SigningKey:
    """A private key with a name."""

    def __init__(self, key_id: str, algorithm: str = "RS256") -> None:
        """Make a new key."""
        self.key_id, self.algorithm = key_id, algorithm
        make: dict[str, Callable[[], Any]] = {
            "RS256": lambda: rsa.generate_private_key(65537, 2048),
            "ES256": lambda: ec.generate_private_key(ec.SECP256R1()),
            "EdDSA": ed25519.Ed25519PrivateKey.generate,
        }
        self.private = make[algorithm]()

    @property
    def public(self) -> dict[str, Any]:
        """Return the entry of the key set."""
        entry = jwt.get_algorithm_by_name(self.algorithm).to_jwk(self.private.public_key(), as_dict=True)
        return {**entry, "kid": self.key_id, "alg": self.algorithm, "use": "sig"}

    @property
    def pem(self) -> bytes:
        """Return the public key as a text."""
        return bytes(self.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


class Provider:
    """An HTTP server with a key set. ``answer`` replaces the answer for a path: status, headers and body."""

    def __init__(self) -> None:
        """Prepare a provider with one RSA key."""
        self.keys = [SigningKey("first")]
        self.requests: list[str] = []
        #: The secrets of clients that may get tokens of their own.
        self.clients: dict[str, str] = {}
        self.answer: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.away = False
        provider = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                provider.requests.append(self.path)
                if provider.away:
                    self.close_connection = True
                    return
                status, headers, body = provider.answer.get(self.path) or provider.usual(self.path)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self) -> None:
                """Answer a client that asks for a token with its secret (RFC 6749, section 4.4)."""
                provider.requests.append(self.path)
                self.rfile.read(int(self.headers["content-length"]))
                kind, _, credentials = self.headers.get("authorization", "").partition(" ")
                client, _, secret = base64.b64decode(credentials).decode().partition(":") if kind == "Basic" else ("", "", "")
                known = self.path == TOKEN_PATH and provider.clients.get(client) == secret
                answer = {"access_token": provider.client_token(client), "token_type": "Bearer", "expires_in": int(LIFE_S)} if known else {}
                body = json.dumps(answer or {"error": "invalid_client"}).encode()
                self.send_response(200 if known else 401)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:
                """Log nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Self:
        """Start the server."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def issuer(self) -> str:
        """Return the URL of the provider."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    @property
    def key_set(self) -> dict[str, Any]:
        """Return the key set that the server publishes."""
        return {"keys": [key.public for key in self.keys]}

    def usual(self, path: str) -> tuple[int, dict[str, str], bytes]:
        """Return the answer of a provider that works."""
        documents = {
            "/.well-known/openid-configuration": {"issuer": self.issuer, "jwks_uri": self.issuer + KEYS_PATH},
            KEYS_PATH: self.key_set,
        }
        return (200, {}, json.dumps(documents[path]).encode()) if path in documents else (404, {}, b"")

    def token(self, user: str = "ann", *, key: SigningKey | None = None, head: dict[str, Any] | None = None, **claims: Any) -> str:
        """Return a token, with the last key by default. A claim of None is left out."""
        key = key or self.keys[-1]
        now_s = time.time()
        given = {"iss": self.issuer, "aud": AUDIENCE, "sub": user, "iat": now_s, "exp": now_s + LIFE_S, **claims}
        given = {name: value for name, value in given.items() if value is not None}
        return jwt.encode(
            given, key.private, key.algorithm, {name: value for name, value in {"kid": key.key_id, **(head or {})}.items() if value}
        )

    def client_token(self, client: str) -> str:
        """Return a token for a client itself. Clients of Kafka read times as whole numbers."""
        now_s = int(time.time())
        return self.token(client, iat=now_s, exp=now_s + int(LIFE_S))


def known_tokens(provider: Provider, oidc: Oidc) -> TokenLogins:
    """Return logins with tokens whose key set is read already, and is not read again."""
    tokens = TokenLogins(oidc, 0.2)
    tokens.keys._keys = tuple(keys_of(provider.key_set, oidc.algorithms))
    return tokens


def unsigned(head: dict[str, Any], claims: dict[str, Any], signature: bytes = b"") -> str:
    """Return a token with any head and signature."""
    parts = (json.dumps(head).encode(), json.dumps(claims).encode(), signature)
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in parts)
