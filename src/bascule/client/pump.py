"""The only module of the client with sockets: it keeps a Core connected on an event loop.

The blocking API gives it an event loop on its own thread and a lock; the asyncio API gives it the application's loop and no lock.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Final, cast

from bascule.amqp.channel_binding import server_end_point
from bascule.client.core import Core
from bascule.client.errors import ConnectionLost
from bascule.client.token_supply import NoToken, TokenSupply
from bascule.client.url import Endpoint, Plan
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.log import get_log

log = get_log(__name__)

#: Timeout of connecting, with TCP and TLS.
CONNECT_TIMEOUT_S: Final = 15.0
#: Maximum size of the socket's write buffer; sending pauses when it is full.
WRITE_BUFFER_BYTES: Final = 1 << 20
#: Timeout of writing the last frames before the socket is closed.
LAST_WORDS_S: Final = 5.0
#: Maximum and minimum interval between calls of Core.tick.
TICK_S_MAX, TICK_S_MIN = 10.0, 0.05


class Pump:
    """Connects, reads, writes and reconnects."""

    def __init__(
        self, core: Core, plan: Plan, tls: ssl.SSLContext | None, lock: AbstractContextManager[object], changed: Callable[[], None]
    ) -> None:
        """Call ``changed`` within ``lock`` when the condition of a waiting operation may have become true."""
        self.core = core
        self.lock = lock
        self.changed = changed
        self._plan = plan
        self._tls = tls
        self._tokens = TokenSupply(core.settings.token)
        self._wire: ClientSocket | None = None

    async def run(self) -> None:
        """Keep the core connected until it ends or may not reconnect. An error here ends the core."""
        reason: BasculeError = ConnectionLost("the task of the connection was cancelled")
        try:
            await self._keep_connected()
        except Exception as error:
            log.exception("connection failed")
            reason = ConnectionLost(f"the connection failed: {error!r}")
        finally:
            with self.lock:
                self.core.fail(reason)  # the reason of an earlier end stays
                self.changed()
            self.report()

    async def _keep_connected(self) -> None:
        while True:
            with self.lock:
                if self.core.error is not None:
                    return
                step = self._plan.next()
                if step is None:
                    self.core.fail(self.core.reason)
                    return
            endpoint, delay_s = step
            await asyncio.sleep(delay_s)
            await self._serve(endpoint)

    async def _serve(self, endpoint: Endpoint) -> None:
        """Connect to ``endpoint`` and serve the connection until it ends."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                self.core.token = await self._tokens.fresh()
                tls = (self._tls or ssl.create_default_context()) if endpoint.tls else None
                transport, wire = await loop.create_connection(lambda: ClientSocket(self, endpoint), endpoint.host, endpoint.port, ssl=tls)
        except NoToken as error:
            with self.lock:
                self.core.reason = error
            log.debug("connection attempt failed", reason=error)
            return
        # TimeoutError and ssl.SSLError are subclasses of OSError; ValueError and OverflowError mean an invalid host or port.
        except (OSError, ValueError, OverflowError) as error:
            with self.lock:
                self.core.reason = Unavailable(f"cannot connect to broker {endpoint}: {_cause(error)}")
            log.debug("connection attempt failed", reason=self.core.reason)
            return
        self._wire = wire
        try:
            await wire.ended
        finally:
            with self.lock:  # no other thread is within a write to the socket, and none begins one
                self._wire = None
            transport.abort()

    def succeeded(self, endpoint: Endpoint) -> None:
        """Record that the broker has accepted the connection."""
        self._plan.succeeded(endpoint)
        for other in self.core.other_endpoints:
            self._plan.learn(other)
        self.core.other_endpoints.clear()

    def flush(self) -> None:
        """Write pending bytes. Must run on the loop's thread."""
        if self._wire is not None:
            self._wire.flush()
        self.report()

    def write_now(self) -> bool:
        """Write pending bytes on the calling thread, which has the lock. Return False if ``flush`` must be called on the loop's thread."""
        return self._wire is not None and not self.core.completed and self._wire.write_now()

    def report(self) -> None:
        """Call the callbacks of completed sends. Must run outside the lock, because callbacks are code of the application."""
        completed = self.core.completed
        while completed:
            with suppress(IndexError):
                sending = completed.popleft()
                if sending.on_done is not None:
                    try:
                        sending.on_done(sending.message, sending.error)
                    except Exception:
                        log.exception("callback of a send failed", message=sending.message.message_id)


def _cause(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no connection within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER":
        return "the port does not use TLS; use amqp:// in place of amqps://, or the broker's port with TLS"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _end_point(transport: asyncio.BaseTransport) -> bytes | None:
    """Return the channel binding of the broker's certificate; None without TLS, or if it is not defined for the certificate."""
    ssl_object = transport.get_extra_info("ssl_object")
    certificate = None if ssl_object is None else ssl_object.getpeercert(binary_form=True)
    return None if certificate is None else server_end_point(certificate)


class ClientSocket(asyncio.Protocol):
    """The protocol of one socket."""

    def __init__(self, pump: Pump, endpoint: Endpoint) -> None:
        self._pump = pump
        self._core = pump.core
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._welcome = False
        self._descriptor = -1  # for writes of other threads; -1 if only the loop's thread may write
        self._process = os.getpid()
        self._left = b""  # of a write of another thread
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the core's protocol on the new socket."""
        self._transport = cast("asyncio.Transport", transport)  # asyncio passes a Transport to a Protocol
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        with self._pump.lock:
            if not self._endpoint.tls:
                self._descriptor = self._transport.get_extra_info("socket").fileno()
            self._core.begin(self._endpoint, _end_point(transport))
        self._tick()

    def data_received(self, data: bytes) -> None:
        """Pass received bytes to the core."""
        with self._pump.lock:
            self._core.receive(data, self._loop.time())
            if self._core.up and not self._welcome:
                self._welcome = True
                self._pump.succeeded(self._endpoint)
            self.flush()  # before other threads continue, which would otherwise wake this thread to write
            self._pump.changed()
        self._pump.report()

    def pause_writing(self) -> None:
        """Pause sending: the write buffer is full."""
        with self._pump.lock:
            self._core.congestion(True)

    def resume_writing(self) -> None:
        """Resume sending: the write buffer has room again."""
        with self._pump.lock:
            self._core.congestion(False)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """Report the closed socket to the core."""
        if self._timer is not None:
            self._timer.cancel()
        with self._pump.lock:
            self._descriptor = -1  # asyncio closes the socket after this call
            told = self._core.amqp is not None and self._core.amqp.closed
            self._core.lost(None if told else f"connection lost: {exc}" if exc else "the broker closed the connection")
            self._pump.changed()
        self._pump.report()
        if not self.ended.done():
            self.ended.set_result(None)

    def write_now(self) -> bool:
        """Write pending bytes on any thread that has the lock. Return False if ``flush`` must be called on the loop's thread.

        This saves the wake-up of the loop's thread. Bytes that the transport has not written yet go first.
        """
        mine = self._descriptor >= 0 and self._process == os.getpid()  # a forked child must not write to the parent's connection
        if not mine or self._left or self._transport.is_closing() or self._transport.get_write_buffer_size():
            return False
        data = self._core.data_to_send()
        sent = 0
        with suppress(OSError):  # the socket is full, or the transport meets the same error
            sent = os.write(self._descriptor, data)
        self._left = data[sent:]
        return not self._left and self._core.amqp is not None and not self._core.amqp.closed

    def flush(self) -> None:
        """Write pending bytes; close the socket after the last ones."""
        if self._transport.is_closing():
            return
        with self._pump.lock:  # within the lock, so that the bytes of other threads come before or after these
            data, self._left = self._left + self._core.data_to_send(), b""
            closed = self._core.amqp is None or self._core.amqp.closed
            if data:
                self._transport.write(data)
        if closed:
            self._transport.close()  # waits without limit for a broker that does not read
            self._again(LAST_WORDS_S, self._transport.abort)

    def _tick(self) -> None:
        with self._pump.lock:
            now_s = self._loop.time()
            due_s = self._core.tick(now_s)
            silent = self._core.amqp is not None and self._core.amqp.closed
            self._pump.changed()
        self.flush()
        if silent:
            self._transport.abort()  # the silent broker will not read the pending bytes
        elif not self._transport.is_closing():
            self._again(min(max(due_s - now_s, TICK_S_MIN), TICK_S_MAX), self._tick)

    def _again(self, delay_s: float, what: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, what)
