"""The connections between the elected broker and its standbys. They carry nothing: their end is a reason to challenge the broker.

A standby sends one line, the id that Kafka has given the elected broker as a member of the group. Only who may read Kafka knows the id. The
elected broker answers with one line. Neither side trusts the connection further, so it is not encrypted.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, cast

from bascule.server.listener import Listener, bind

#: How long, in seconds, a connection may take to send or to answer the first line.
HELLO_S: Final = 5.0
#: Maximum number of connections that have not sent their greeting. Nobody needs that many standbys.
PENDING_MAX: Final = 32
#: Maximum number of standbys. A further standby takes over only after the session timeout.
STANDBYS_MAX: Final = 32
#: Maximum size of the greeting: Kafka makes the id from the name of the broker and a UUID.
LINE_BYTES_MAX: Final = 1024
WELCOME: Final = b"elected\n"
DISMISSAL: Final = b"dismissed\n"


class StandbyListener:
    """Accepts connections of standbys while this broker is elected, and closes others."""

    def __init__(self, host: str, port: int, reserved: int, member: Callable[[], str]) -> None:
        """Bind the port. ``member`` returns the id that a standby must send; "" while this broker is not elected. Raises OSError."""
        self._member = member
        self._loop = asyncio.get_running_loop()
        self._pending: dict[_Standby, None] = {}  # oldest first
        self._standbys: dict[_Standby, None] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._listener = Listener(bind(host, port), self._take, name="standbys", reserved=reserved)
        self._listener.start()

    @property
    def port(self) -> int:
        """Return the port."""
        return self._listener.port

    def dismiss(self) -> None:
        """Tell every standby that this broker is no longer elected, and close its connection."""
        for standby in [*self._pending, *self._standbys]:
            standby.dismiss()

    def close(self) -> None:
        """Accept no more connections, and close the existing ones."""
        self._listener.close()
        self.dismiss()

    def _take(self, sock: socket.socket, _address: tuple[Any, ...]) -> bool:
        if len(self._pending) >= PENDING_MAX:
            next(iter(self._pending)).abort()
        sock.setblocking(False)
        task = self._loop.create_task(self._loop.connect_accepted_socket(lambda: _Standby(self), sock))
        self._tasks.add(task)
        task.add_done_callback(self._taken)
        return True

    def _taken(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the peer may have left already

    def begun(self, standby: _Standby) -> None:
        """Note a connection that has sent nothing."""
        self._pending[standby] = None

    def welcome(self, standby: _Standby, line: bytes) -> bool:
        """Return True if a line is that of a standby of this broker, and there is room for the standby."""
        self._pending.pop(standby, None)
        member = self._member()
        if not member or len(self._standbys) >= STANDBYS_MAX or not hmac.compare_digest(line, member.encode()):
            return False
        self._standbys[standby] = None
        return True

    def ended(self, standby: _Standby) -> None:
        """Note the end of a connection."""
        self._pending.pop(standby, None)
        self._standbys.pop(standby, None)


class _Standby(asyncio.Protocol):
    """A connection of a standby to this broker."""

    def __init__(self, listener: StandbyListener) -> None:
        self._listener = listener
        self._line = bytearray()
        self._transport: asyncio.WriteTransport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Wait for the line of the standby."""
        self._transport = cast(asyncio.WriteTransport, transport)
        self._timer = asyncio.get_running_loop().call_later(HELLO_S, self.abort)
        self._listener.begun(self)

    def data_received(self, data: bytes) -> None:
        """Compare the line. A standby sends nothing else."""
        self._line += data
        if self._timer is None or len(self._line) > LINE_BYTES_MAX:
            self.abort()
        elif self._line.endswith(b"\n"):
            self._timer.cancel()
            self._timer = None
            if self._listener.welcome(self, bytes(self._line[:-1])) and self._transport is not None:
                self._transport.write(WELCOME)
            else:
                self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        """Forget the connection."""
        del error
        if self._timer is not None:
            self._timer.cancel()
        self._listener.ended(self)

    def dismiss(self) -> None:
        """Close the connection in an orderly way."""
        if self._transport is not None:
            self._transport.write(DISMISSAL)
            self._transport.close()

    def abort(self) -> None:
        """Reset the connection."""
        self._listener.ended(self)
        if self._transport is not None:
            self._transport.abort()


async def watch(host: str, port: int, member: str, on_connected: Callable[[], None]) -> None:
    """Connect to the elected broker, and return when it dismisses its standbys.

    Raises ConnectionError if the connection is reset, refused or ended; other OSErrors and TimeoutError if no connection can be made.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(HELLO_S):
            reader, writer = await asyncio.open_connection(host, port, limit=LINE_BYTES_MAX)
            writer.write(member.encode() + b"\n")
            welcomed = await reader.readline() == WELCOME
        if not welcomed:
            raise ConnectionResetError("not welcome")
        on_connected()
        if await reader.readline() != DISMISSAL:
            raise ConnectionResetError("ended without a dismissal")
    except ValueError as error:
        raise ConnectionResetError("the line is too long") from error
    finally:
        if writer is not None:
            with suppress(OSError):
                writer.close()
