"""AMQP over WebSocket (OASIS AMQP WebSocket Binding 1.0): the same connections as over TCP, within binary messages.

WebSocket messages and AMQP frames are independent: a message may contain parts of frames, or many frames. Nothing is gathered: the content
of a message goes to the AMQP engine as it arrives, so a connection needs as much memory as over TCP. Thousands of small frames are handled
in several turns of the event loop.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
import urllib.parse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import LocalProtocolError, RemoteProtocolError

from bascule.config.fields import is_loopback
from bascule.config.websocket import ANY_ORIGIN
from bascule.core.log import get_log
from bascule.server.audit import WEBSOCKET
from bascule.server.connection import TURN_S, ClientConnection
from bascule.server.pieces import WEBSOCKET_PIECE_BYTES

if TYPE_CHECKING:
    from bascule.server.client_turns import ClientTurns
    from bascule.server.handshakes import Handshake
    from bascule.server.node import Node

log = get_log(__name__)

#: The subprotocol that a client must offer (AMQP WebSocket Binding, section 2.1).
SUBPROTOCOL: Final = "amqp"
#: Size of a message to a client. Qpid JMS ends a connection with a larger frame by default.
MESSAGE_BYTES_MAX: Final = 65_535
#: Bytes of unread output beyond which pings get no answer, so that a peer cannot fill the memory with answers that it does not read.
UNREAD_PONGS_BYTES: Final = 64 << 10
#: Characters of the address of a refused web page in a log line.
ORIGIN_SHOWN_MAX: Final = 200
_OPEN: Final = ConnectionState.OPEN


class ServedConnection(Protocol):
    """The part of a client's connection that a WebSocket uses; see ClientConnection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin with a transport."""

    def data_received(self, data: bytes) -> None:
        """Handle received bytes."""

    def pause_writing(self) -> None:
        """Stop writing."""

    def resume_writing(self) -> None:
        """Resume writing."""

    def eof_received(self) -> None:
        """Abort the connection after a time, because the client sends nothing more."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything."""


class Reader(Protocol):
    """Reads from a socket."""

    def pause_reading(self) -> None:
        """Stop reading."""

    def resume_reading(self) -> None:
        """Resume reading."""


class OriginRule:
    """The web pages whose scripts may connect.

    A browser connects to any server for a script, and names the page in the header Origin. Other clients send no such header, or, as Qpid
    JMS does, the address of the broker.
    """

    def __init__(self, origins: tuple[str, ...], *, trusts_names: bool) -> None:
        """``trusts_names``: a page of the broker's own address is accepted under each name, because nobody connects without a login.

        Otherwise only under names that an attacker cannot let point to this machine.
        """
        self._origins = frozenset(origins)
        self._trusts_names = trusts_names

    def allows(self, origin: str | None, host: str) -> bool:
        """Return whether a page may connect. ``host`` is the address under which it reached the broker."""
        if origin is None or ANY_ORIGIN in self._origins or origin.lower() in self._origins:
            return True
        try:
            parts = urllib.parse.urlsplit(origin)
            same, name = parts.netloc.lower() == host.lower(), parts.hostname or ""
        except ValueError:
            return False
        return same and (self._trusts_names or _is_fixed(name))


def _is_fixed(name: str) -> bool:
    """Return whether a host name cannot be pointed to another machine."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return is_loopback(name)
    return True


class WebSocketTransport:
    """The transport of a client's connection: it writes messages where a transport over TCP writes bytes."""

    def __init__(self, transport: asyncio.Transport, websocket: WSConnection, reader: Reader) -> None:
        self._transport = transport
        self._websocket = websocket
        self.set_write_buffer_limits = transport.set_write_buffer_limits
        self.get_write_buffer_size = transport.get_write_buffer_size
        self.get_extra_info = transport.get_extra_info
        self.pause_reading = reader.pause_reading
        self.resume_reading = reader.resume_reading
        self.abort = transport.abort

    def write(self, data: bytes) -> None:
        """Write bytes as messages of limited size."""
        if self._websocket.state is _OPEN:
            view, send = memoryview(data), self._websocket.send
            parts = [send(BytesMessage(bytes(view[at : at + MESSAGE_BYTES_MAX]))) for at in range(0, len(data), MESSAGE_BYTES_MAX)]
            self._transport.write(b"".join(parts))

    def is_closing(self) -> bool:
        """Return whether this end has closed the connection, or the connection has ended."""
        return self._websocket.state is not _OPEN or self._transport.is_closing()

    def close(self) -> None:
        """Close the WebSocket. The socket is closed once the client has answered; the caller aborts it if the client does not."""
        if self._websocket.state is _OPEN:
            self._transport.write(self._websocket.send(CloseConnection(CloseReason.NORMAL_CLOSURE)))


class WebSocketConnection(asyncio.Protocol):
    """One client's socket: first a request of HTTP, then messages for a connection as over TCP."""

    def __init__(
        self, handshake: Handshake, rule: OriginRule, timeout_s: float, serve: Callable[[Handshake], ServedConnection], turns: ClientTurns
    ) -> None:
        """``serve`` makes the connection of the client after its request is accepted, within ``timeout_s``."""
        self.behind = False  # continues in the next turn
        self._handshake = handshake
        self._rule = rule
        self._timeout_s = timeout_s
        self._serve = serve
        self._turns = turns
        self._websocket = WSConnection(ConnectionType.SERVER)
        self._transport: asyncio.Transport | None = None
        self._connection: ServedConnection | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unhandled = b""  # input that waits for another turn
        self._content: list[bytes] = []  # of messages, for the connection
        self._held = False  # the connection wants nothing to be read
        self._over = False  # nothing more is read

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Handle a new socket."""
        self._transport = self._handshake.transport = cast(asyncio.Transport, transport)  # asyncio declares a BaseTransport
        self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._transport.abort)

    def data_received(self, data: bytes) -> None:
        """Handle the request, or messages: at once, or in the next turn if clients have used their time in this one."""
        self._unhandled = self._unhandled + data if self._unhandled else data
        if self.behind:
            return
        if self._turns.run(self._handle_some):
            self._pass_on()
        else:
            self._go_on_later()

    def _go_on_later(self) -> None:
        """Handle the rest of the input in the next turn. Nothing is read meanwhile."""
        self.behind = True
        if self._transport is not None:
            self._transport.pause_reading()
        self._turns.later(self._go_on)

    def _go_on(self) -> None:
        self._handle_some()
        self._pass_on()

    def _handle_some(self) -> None:
        """Handle input as far as the time of one turn allows."""
        data, position, end_s = self._unhandled, 0, time.monotonic() + TURN_S
        while position < len(data) and not self._over:
            connecting = self._connection is None
            self._handle(data[position : position + WEBSOCKET_PIECE_BYTES])
            position += WEBSOCKET_PIECE_BYTES
            if connecting and self._connection is not None:
                position = len(data)  # a client waits for the answer to its request (RFC 6455, section 4.1)
            if time.monotonic() > end_s:
                break
        self._unhandled = b"" if self._over else data[position:]

    def _pass_on(self) -> None:
        """Pass content to the connection, and go on with the rest of the input."""
        content, self._content = self._content, []
        if content and self._connection is not None:
            self._connection.data_received(b"".join(content))
        if self._unhandled:
            self._go_on_later()
        elif self.behind:
            self.behind = False
            if not self._held:
                self.resume_reading()

    def pause_reading(self) -> None:
        """Read nothing until ``resume_reading`` is called."""
        self._held = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        """Read again, once all input is handled."""
        self._held = False
        if self._transport is not None and not self.behind and not self._over:
            self._transport.resume_reading()

    def _handle(self, data: bytes) -> None:
        try:
            self._websocket.receive_data(data)
            for event in self._websocket.events():
                self._take(event)
                if self._over:
                    break
        except RemoteProtocolError as error:
            hint = error.event_hint
            self._reject(hint if isinstance(hint, RejectConnection) else RejectConnection(status_code=400), str(error))
        except (LocalProtocolError, ValueError) as error:  # also a host name that cannot be decoded
            self._reject(RejectConnection(status_code=400), str(error))

    def _take(self, event: Event) -> None:
        if isinstance(event, BytesMessage):
            self._content.append(bytes(event.data))
        elif isinstance(event, Request):
            self._requested(event)
        elif isinstance(event, TextMessage):
            self._end(CloseConnection(CloseReason.UNSUPPORTED_DATA, "AMQP needs binary messages"))
        elif isinstance(event, Ping):
            transport = self._transport
            if self._websocket.state is _OPEN and transport is not None and transport.get_write_buffer_size() <= UNREAD_PONGS_BYTES:
                transport.write(self._websocket.send(event.response()))
        elif isinstance(event, CloseConnection):
            # Either the client's message, or the error of bytes that are no WebSocket.
            self._end(event.response() if self._websocket.state is ConnectionState.REMOTE_CLOSING else event)

    def _requested(self, request: Request) -> None:
        headers = {name.lower(): value.decode("latin-1") for name, value in request.extra_headers}
        origin = headers.get(b"origin")
        if SUBPROTOCOL not in request.subprotocols:
            self._reject(RejectConnection(status_code=400), f"the subprotocol {SUBPROTOCOL!r} must be offered in Sec-WebSocket-Protocol")
        elif not self._rule.allows(origin, request.host):
            reason = f"pages of {origin} may not connect; see broker.websocket.origins"
            if self._handshake.refused(WEBSOCKET, reason):
                shown = f"{origin:.{ORIGIN_SHOWN_MAX}}"
                log.info("WebSocket refused, its page is not in broker.websocket.origins", peer=self._handshake.peer, origin=shown)
            self._reject(RejectConnection(status_code=403), reason)
        elif self._transport is not None:
            self._transport.write(self._websocket.send(AcceptConnection(subprotocol=SUBPROTOCOL)))
            if self._timer is not None:
                self._timer.cancel()
            self._connection = self._serve(self._handshake)
            transport: Any = WebSocketTransport(self._transport, self._websocket, self)
            self._connection.connection_made(transport)
            self._handshake.transport = self._transport

    def _reject(self, rejection: RejectConnection, reason: str) -> None:
        """Answer a request that is refused, and close the socket."""
        self._over = True
        transport = self._transport
        if transport is None:
            return
        if self._websocket.state is ConnectionState.CONNECTING:
            body = f"{reason}\n".encode()
            headers = [*rejection.headers, (b"Content-Type", b"text/plain; charset=utf-8"), (b"Content-Length", b"%d" % len(body))]
            headers.append((b"Connection", b"close"))
            answer = RejectConnection(status_code=rejection.status_code, headers=headers, has_body=True)
            transport.write(self._websocket.send(answer) + self._websocket.send(RejectData(body)))
        transport.close()

    def _end(self, close: CloseConnection) -> None:
        """Close the WebSocket, or answer that the client has closed it, and close the socket."""
        self._over = True
        if self._transport is not None:
            if self._websocket.state in (_OPEN, ConnectionState.REMOTE_CLOSING):
                self._transport.write(self._websocket.send(close))
            self._transport.close()
            self.eof_received()

    def eof_received(self) -> None:
        """Abort the connection after a time; before the request is accepted, this happens after ``timeout_s``."""
        if self._connection is not None:
            self._connection.eof_received()

    def pause_writing(self) -> None:
        """Stop writing, because the client does not read."""
        if self._connection is not None:
            self._connection.pause_writing()

    def resume_writing(self) -> None:
        """Resume writing."""
        if self._connection is not None:
            self._connection.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Release everything after the socket has ended."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._connection.connection_lost(exc)
        else:
            self._handshake.end()


def websocket_server(node: Node) -> Callable[[Handshake], asyncio.Protocol]:
    """Return what serves the sockets of a node's listener for WebSockets."""

    def serve(handshake: Handshake) -> asyncio.Protocol:
        broker = node.settings.broker
        rule = OriginRule(broker.websocket.origins, trusts_names=broker.tls.enabled or not broker.anonymous_allowed)
        return WebSocketConnection(handshake, rule, broker.handshake_timeout_s, lambda of: ClientConnection(node, of), node.client_turns)

    return serve
