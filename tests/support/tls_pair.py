"""TLS between two contexts in memory."""

from __future__ import annotations

import ssl
from typing import NamedTuple

ROUNDS_MAX = 20


class TlsPair(NamedTuple):
    """Both sides of a TLS connection after the handshake."""

    client: ssl.SSLObject
    server: ssl.SSLObject


def handshake(
    server: ssl.SSLContext | None, client: ssl.SSLContext, session: ssl.SSLSession | None = None, name: str = "localhost"
) -> TlsPair:
    """Return both sides of a new connection, which have exchanged a byte. Raises ssl.SSLError if a side refuses."""
    assert server is not None
    to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
    pair = TlsPair(
        client.wrap_bio(to_client, to_server, server_hostname=name, session=session),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    waiting = list(pair)
    for _ in range(ROUNDS_MAX):
        for side in list(waiting):
            try:
                side.do_handshake()
                waiting.remove(side)
            except ssl.SSLWantReadError:
                pass
    assert not waiting, "the handshake does not end"
    pair.server.write(b"x")  # TLS 1.3 sends the session, and the refusal of a client certificate, behind the handshake
    assert pair.client.read(1) == b"x"
    return pair


class OfPair:
    """A transport for the side of a server."""

    def __init__(self, side: ssl.SSLObject) -> None:
        self._extra = {"ssl_object": side, "peername": ("127.0.0.1", 1)}

    def get_extra_info(self, name: str) -> object:
        """Return the TLS object, or the peer's address."""
        return self._extra.get(name)
