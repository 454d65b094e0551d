"""HTTP connections of the admin server: uvicorn with limits on the resources of a peer without a token.

uvicorn itself waits forever for the rest of a request and for a peer that does not read its answer, and parses all received data in one
turn of the event loop.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Any, Final

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bascule.server import handshakes
from bascule.server.admin_access import CERTIFIED, SECURITY_HEADERS
from bascule.server.handshakes import Handshake, HandshakeLimits
from bascule.server.listener_tls import tls_peer

#: Longest time for a request to arrive, and for its answer to be read. A request is a line, a few headers and small arguments.
REQUEST_TIMEOUT_S: Final = 10.0
#: A connection without a further request is closed after this time.
KEEP_ALIVE_S: Final = 5
#: Request line and headers: consoles and scrapers send some hundred bytes, a browser with cookies some thousand.
HEADERS_BYTES_MAX: Final = 16 << 10
#: Maximum number of connections that have not sent a complete request or do not read, in total and from one address: monitors and consoles
#: have a few.
WAITING_MAX: Final = 64
WAITING_PER_ADDRESS_MAX: Final = 48
#: Maximum number of connections, including those that are being answered; each may hold an answer of some megabytes. If all places are
#: taken, a new connection gets the place of the oldest connection without a login: clients without a login cannot keep out those with one.
CONNECTIONS_MAX: Final = 128
#: Bytes that one turn of the event loop parses. A chunk of one byte needs six bytes and about 20 µs. Nearly all requests are smaller.
PIECE_BYTES: Final = 4 << 10

#: Key of the state of a request whose peer has closed its side of the connection.
PEER_ENDED: Final = "peer_ended"
#: Key of a function in the state of a request that aborts its connection.
ABORT: Final = "abort"
#: Key of a function in the state of a request. The access calls it once the request has proven who sends it.
PROVEN: Final = "proven"
#: Key of the task in the state of a request that answers the request.
ANSWERING: Final = "answering"
#: Key of the state of a request whose connection has lost its place to another one.
DISPLACED: Final = "displaced"

#: The answer to data that is not HTTP.
_NOT_HTTP: Final = json.dumps({"error": "the request is not valid HTTP, or its head is too long"}).encode()
_NOT_HTTP_HEADERS: Final = {
    "content-type": "application/json", "content-length": str(len(_NOT_HTTP)), "connection": "close", **SECURITY_HEADERS,
}  # fmt: skip

LIMITS: Final = HandshakeLimits(WAITING_MAX, WAITING_PER_ADDRESS_MAX, REQUEST_TIMEOUT_S)


class AdminConnection(H11Protocol):
    """An HTTP connection. It has a place among those that wait for a request, until the request is complete.

    While the peer does not read its answers, the connection has such a place too, and a deadline, whatever requests follow.
    Once a request is answered before it is complete, the rest of the input is read and not parsed, until the peer ends the connection.
    """

    def __init__(self, config: uvicorn.Config, server: uvicorn.Server, handshake: Handshake) -> None:
        super().__init__(config, server.server_state, server.lifespan.state)
        self._handshake = handshake
        self._deadline: asyncio.TimerHandle | None = None
        self._unparsed = bytearray()
        self._next_piece: asyncio.Handle | None = None
        self._ignoring = False
        self._ended = False  # by the peer
        self._proven = self._displaced = False

    @property
    def waits_since_s(self) -> float:
        """Return since when this connection has a place without a login; infinite once one of its requests had a valid login."""
        return math.inf if self._proven else self._handshake.accepted_s

    def proven(self) -> None:
        """Note that a request has proven who sends it."""
        self._proven = True

    def displace(self) -> None:
        """End this connection in favour of another one, and the answer to its request."""
        self._displaced = True
        self._handshake.abort()
        self.connections.discard(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Handle a new connection."""
        super().connection_made(transport)
        certified = tls_peer(transport, self._handshake.may_log).user
        self.app_state = {**self.app_state, CERTIFIED: certified, ABORT: self._handshake.abort, PROVEN: self.proven}
        self._handshake.transport = transport
        self._wait(REQUEST_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        """Handle the end of the connection."""
        self._handshake.end()
        self._stop_waiting()
        super().connection_lost(exc)
        if self._displaced and not self._proven and self.scope is not None:
            state = self.scope["state"]
            state[DISPLACED] = True
            if (answering := state.get(ANSWERING)) is not None:
                answering.cancel()

    def data_received(self, data: bytes) -> None:
        """Parse one piece in each turn of the event loop. The connection reads nothing meanwhile."""
        if not self._ignoring:
            self._unparsed += data
            if self._next_piece is None:
                self._parse_piece()

    def _parse_piece(self) -> None:
        self._next_piece = None
        if self.transport.is_closing() or self._ignoring:
            self._unparsed.clear()
            return
        if not self._answering():
            piece = bytes(self._unparsed[:PIECE_BYTES])
            del self._unparsed[:PIECE_BYTES]
            super().data_received(piece)
        if self._unparsed:
            self.transport.pause_reading()
            if not self._answering():
                self._next_piece = self.loop.call_soon(self._parse_piece)
        elif self._ended and not self._answering():
            self.transport.close()
        elif not self.flow.read_paused:
            self.transport.resume_reading()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a peer that has closed its side until the answer is sent. TLS has no half-closed connections."""
        self._ended = True
        if self._answering():
            self.scope["state"][PEER_ENDED] = True
            self.cycle.message_event.set()  # wakes a page that waits for the end of the peer
        return self.scheme == "http" and (self._answering() or bool(self._unparsed))

    def _answering(self) -> bool:
        """Return whether a complete request is being answered; the next one waits."""
        cycle = self.cycle
        return cycle is not None and not cycle.more_body and not cycle.response_complete

    def handle_events(self) -> None:
        """Check whether the request is complete."""
        super().handle_events()
        self._go_on()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuse data that is not HTTP, with an answer like every other. If the body of a request is invalid, its page sends no answer."""
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:  # no answer has begun
            head = h11.Response(status_code=400, headers=list(_NOT_HTTP_HEADERS.items()), reason=b"Bad Request")
            with suppress(h11.LocalProtocolError):  # an answer to HEAD has no body
                for event in (head, h11.Data(data=_NOT_HTTP), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event))
        self.transport.close()

    def on_response_complete(self) -> None:
        """Wait for the next request, or for the end of the peer if this request was refused before it was complete."""
        whole = self.conn.their_state is not h11.SEND_BODY
        super().on_response_complete()
        if self._answering():  # the next request, which has arrived in the same piece
            return
        room = self._wait_for_peer()  # also if the connection is closing: the peer may not read the end of its answer
        if not room or (self._ended and not self._unparsed):
            self.transport.close()
        if self.transport.is_closing():
            return
        if not whole:
            self._ignore_the_rest()
        elif self._unparsed and self._next_piece is None:
            self._next_piece = self.loop.call_soon(self._parse_piece)

    def _ignore_the_rest(self) -> None:
        """Send nothing more. Closing a connection with unread data would reset it, and the peer might lose the answer."""
        self._ignoring = True
        self._unparsed.clear()
        with suppress(OSError):  # the peer has already reset the connection
            if self.transport.can_write_eof():
                self.transport.write_eof()
                self.transport.resume_reading()
                return
        self.transport.close()

    def pause_writing(self) -> None:
        """Handle a peer that does not read its answer."""
        super().pause_writing()
        self._wait_for_peer()

    def resume_writing(self) -> None:
        """Handle a peer that reads again."""
        super().resume_writing()
        self._go_on()

    def _go_on(self) -> None:
        """End the wait for the peer if a request is complete and the answers before it are read: the server is to act next."""
        if self._answering() and not self.flow.write_paused:
            self._handshake.end()
            self._stop_waiting()

    def _wait_for_peer(self) -> bool:
        """Wait for the peer, but for a moment only and return False if too many connections of its address wait.

        Each complete request admits another connection. Without this limit, one address could get all connections.
        """
        room = self._handshake.begin_again()
        self._wait(REQUEST_TIMEOUT_S if room else handshakes.GRACE_S)
        return room

    def _wait(self, timeout_s: float) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(timeout_s, self._handshake.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def config(app: Any, stop_timeout_s: int) -> uvicorn.Config:
    """Return the configuration with which uvicorn serves ``app``."""
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="error",  # below this level, each request of a peer that does not speak HTTP would be a line
        access_log=False,
        server_header=False,
        proxy_headers=False,  # permissions depend on the peer, so only the socket's address is trusted
        limit_concurrency=None,  # its answer would be plain text; see BoundedApp
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
        timeout_graceful_shutdown=stop_timeout_s,
    )


def displace_oldest(open_connections: Iterable[AdminConnection]) -> bool:
    """End the connection that has been without a login for longest. Return False if there is none, or if its login may still be checked."""
    oldest = min(open_connections, key=lambda each: each.waits_since_s, default=None)
    if oldest is None or time.monotonic() - oldest.waits_since_s < handshakes.GRACE_S:
        return False
    oldest.displace()
    return True


def connections(server: uvicorn.Server) -> partial[AdminConnection]:
    """Return the factory for the connections of a server."""
    return partial(AdminConnection, server.config, server)
