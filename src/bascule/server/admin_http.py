"""HTTP connections of the admin server: uvicorn's, with bounds on what a peer without a token may hold.

uvicorn itself waits for ever for the rest of a request, and for a peer that does not read its answer.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Final

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bascule.server.handshakes import Handshake, HandshakeLimits

#: A request is a line, a few headers and small arguments. It arrives in this time, and its answer is read in it.
REQUEST_TIMEOUT_S: Final = 10.0
#: A connection that asks nothing more is closed after so long.
KEEP_ALIVE_S: Final = 5
#: Request line and headers: consoles and scrapers send some hundred bytes, a browser with cookies some thousand.
HEADERS_BYTES_MAX: Final = 16 << 10
#: Connections that have not sent a whole request, in total and from one address: monitors and consoles have a few.
WAITING_MAX: Final = 64
WAITING_PER_ADDRESS_MAX: Final = 48
#: Connections at once, with those that are being answered; each may hold an answer of some megabytes.
CONNECTIONS_MAX: Final = 128

LIMITS: Final = HandshakeLimits(WAITING_MAX, WAITING_PER_ADDRESS_MAX, REQUEST_TIMEOUT_S)


class AdminConnection(H11Protocol):
    """A connection that has a place among those that wait for a request, until the request is whole."""

    def __init__(self, config: uvicorn.Config, server: uvicorn.Server, handshake: Handshake) -> None:
        super().__init__(config, server.server_state, server.lifespan.state)
        self._handshake = handshake
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A peer is there."""
        super().connection_made(transport)
        self._handshake.transport = transport
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._handshake.end()
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Look whether the request is whole."""
        super().handle_events()
        cycle = self.cycle
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._handshake.end()
            self._stop_waiting()

    def on_response_complete(self) -> None:
        """Wait for the next request, and for the rest of this one where it was refused before it was whole."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self._handshake.begin_again()
            self._wait()

    def pause_writing(self) -> None:
        """The peer does not read its answer."""
        super().pause_writing()
        self._wait()

    def resume_writing(self) -> None:
        """It reads on."""
        super().resume_writing()
        self._stop_waiting()

    def _wait(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, self._handshake.abort)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


def config(app: Any, stop_timeout_s: int) -> uvicorn.Config:
    """How uvicorn serves ``app``."""
    return uvicorn.Config(
        app,
        lifespan="off",
        ws="none",
        log_config=None,
        log_level="error",  # below, each request of a peer that speaks no HTTP would be a line
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who asks decides what they may do: only the socket is believed
        limit_concurrency=CONNECTIONS_MAX,
        timeout_keep_alive=KEEP_ALIVE_S,
        h11_max_incomplete_event_size=HEADERS_BYTES_MAX,
        timeout_graceful_shutdown=stop_timeout_s,
    )


def connections(server: uvicorn.Server) -> partial[AdminConnection]:
    """Return what makes the connections of a server."""
    return partial(AdminConnection, server.config, server)
