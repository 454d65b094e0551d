"""The one place with sockets: keeps a Core connected, on an event loop, whichever face the application has.

The blocking face gives it a loop on a thread of its own, and a lock; the asyncio face its own loop, and no lock.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Final, cast

from bascule.client.core import Core
from bascule.client.errors import ConnectionLost
from bascule.client.url import Endpoint, Plan
from bascule.core.errors import BasculeError, Unavailable
from bascule.core.log import get_log

log = get_log(__name__)

#: For TCP and TLS; a broker that takes longer is as good as away.
CONNECT_TIMEOUT_S: Final = 15.0
#: What may wait in the socket's buffer before messages are held back.
WRITE_BUFFER_BYTES: Final = 1 << 20
#: For the last words to go out, once all is said; then the socket goes without them.
LAST_WORDS_S: Final = 5.0
#: How often heartbeats are looked at, at least and at most.
TICK_S_MAX, TICK_S_MIN = 10.0, 0.05


class Pump:
    """Connects, reads, writes, and connects again."""

    def __init__(
        self, core: Core, plan: Plan, tls: ssl.SSLContext | None, lock: AbstractContextManager[object], changed: Callable[[], None]
    ) -> None:
        """``changed`` is called within ``lock`` when something may have come true that an operation waits for."""
        self.core = core
        self.lock = lock
        self.changed = changed
        self._plan = plan
        self._tls = tls
        self._wire: ClientSocket | None = None

    async def run(self) -> None:
        """Keep the core connected until it ends, or is not to be connected again. Whatever ends this ends the core."""
        reason: BasculeError = ConnectionLost("the task of the connection was cancelled")
        try:
            await self._keep_connected()
        except Exception as error:
            log.exception("the connection ends")
            reason = ConnectionLost(f"the connection ends: {error!r}")
        finally:
            with self.lock:
                self.core.fail(reason)  # of one that has ended already the reason stays
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
        """One connection, from its beginning to its end."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                tls = (self._tls or ssl.create_default_context()) if endpoint.tls else None
                transport, wire = await loop.create_connection(lambda: ClientSocket(self, endpoint), endpoint.host, endpoint.port, ssl=tls)
        # TimeoutError and ssl.SSLError are kinds of the first; the others say that this can be no host, or no port.
        except (OSError, ValueError, OverflowError) as error:
            with self.lock:
                self.core.reason = Unavailable(f"no broker at {endpoint}: {_cause(error)}")
            log.debug("connection ended", reason=self.core.reason)
            return
        self._wire = wire
        try:
            await wire.ended
        finally:
            transport.abort()
            self._wire = None

    def succeeded(self, endpoint: Endpoint) -> None:
        """The broker has let us in."""
        self._plan.succeeded(endpoint)
        for other in self.core.other_endpoints:
            self._plan.learn(other)
        self.core.other_endpoints.clear()

    def flush(self) -> None:
        """Write what is due. On the loop's thread."""
        if self._wire is not None:
            self._wire.flush()
        self.report()

    def report(self) -> None:
        """Tell who wanted to know what became of a message. Outside the lock: what they do is theirs."""
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
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class ClientSocket(asyncio.Protocol):
    """One socket."""

    def __init__(self, pump: Pump, endpoint: Endpoint) -> None:
        self._pump = pump
        self._core = pump.core
        self._endpoint = endpoint
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._timer: asyncio.TimerHandle | None = None
        self._welcome = False
        self.ended: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is there."""
        self._transport = cast("asyncio.Transport", transport)  # as the loop gives to a Protocol
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        with self._pump.lock:
            self._core.begin(self._endpoint)
        self._tick()

    def data_received(self, data: bytes) -> None:
        """The broker speaks."""
        with self._pump.lock:
            self._core.receive(data, self._loop.time())
            if self._core.up and not self._welcome:
                self._welcome = True
                self._pump.succeeded(self._endpoint)
            self._pump.changed()
        self.flush()
        self._pump.report()

    def pause_writing(self) -> None:
        """The socket is full."""
        with self._pump.lock:
            self._core.congestion(True)

    def resume_writing(self) -> None:
        """It has room again."""
        with self._pump.lock:
            self._core.congestion(False)
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        """The socket is gone."""
        if self._timer is not None:
            self._timer.cancel()
        with self._pump.lock:
            told = self._core.amqp is not None and self._core.amqp.closed
            self._core.lost(None if told else ConnectionLost(f"connection lost: {exc}" if exc else "the broker closed the connection"))
            self._pump.changed()
        self._pump.report()
        if not self.ended.done():
            self.ended.set_result(None)

    def flush(self) -> None:
        """Write what is due; close when all is said."""
        if self._transport.is_closing():
            return
        with self._pump.lock:
            data = self._core.data_to_send()
            closed = self._core.amqp is None or self._core.amqp.closed
        if data:
            self._transport.write(data)
        if closed:
            self._transport.close()  # which waits for a broker that does not read, for ever
            self._again(LAST_WORDS_S, self._transport.abort)

    def _tick(self) -> None:
        with self._pump.lock:
            now_s = self._loop.time()
            due_s = self._core.tick(now_s)
            silent = self._core.amqp is not None and self._core.amqp.closed
            self._pump.changed()
        self.flush()
        if silent:
            self._transport.abort()  # nobody is there to read what still waits
        elif not self._transport.is_closing():
            self._again(min(max(due_s - now_s, TICK_S_MIN), TICK_S_MAX), self._tick)

    def _again(self, delay_s: float, what: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(delay_s, what)
