"""The connection factory: the address of the broker and the options of connections."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from ssl import SSLContext
from typing import Any

from bascule.client.aio import AsyncContext, ConnectionTask
from bascule.client.blocking import Context
from bascule.client.core import ConnectionSettings, Core
from bascule.client.session import ExceptionListener
from bascule.client.session_links import Acknowledge
from bascule.client.thread import ConnectionThread
from bascule.client.token_supply import Token
from bascule.client.url import BrokerUrl, Plan

TIMEOUT_S = 30.0
PREFETCH = 1000


@dataclass(frozen=True, slots=True)
class ConnectionFactory:
    """Creates contexts. The arguments take precedence over the options of the URL.

    ``url``: ``amqp://[USER:PASSWORD@]HOST[:PORT]``, ``amqps://...``, ``failover:(URL,URL)?failover.maxReconnectDelay=5000``.
    ``token``: a token of an OpenID Connect provider, in place of a password, or a function that returns a fresh one. The function is called
    on a thread of its own before each connection; if it raises an exception, the attempt to connect has failed.
    ``tls``: an ``ssl.SSLContext`` for amqps. The default trusts the certificate authorities of the machine.
    ``require_channel_binding``: log in only with a password that is bound to the TLS connection (SCRAM-PLUS), and by no other mechanism.
    ``timeout_s``: the timeout in seconds of calls without a timeout of their own (default: 30).
    ``prefetch``: the number of messages that a consumer prefetches (default: 1000).
    ``on_exception``: called on the thread or task of the listeners with an error that kept a message from them. After a transaction that
    was rolled back with its connection, and after a timeout, the listeners continue; after the end of the connection they end.
    """

    url: str = field(repr=False)  # may have a password
    _: KW_ONLY
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    token: Token | None = field(default=None, repr=False)
    client_id: str | None = None
    tls: SSLContext | None = None
    require_channel_binding: bool = False
    timeout_s: float | None = None
    prefetch: int | None = None
    on_exception: ExceptionListener | None = None

    def connect(self, acknowledge: Acknowledge = Acknowledge.AUTO) -> Context:
        """Open a connection and return a blocking context. Raises Unavailable, SecurityDenied, InvalidClientId, TimedOut."""
        core, plan = self._core()
        thread = ConnectionThread(core, plan, self.tls)
        try:
            until_s = core.clock() + core.settings.timeout_s
            thread.run(core.connected(until_s))
            session = thread.run(core.open_session(acknowledge, until_s))
        except BaseException:
            thread.stop()
            raise
        return Context(thread, session, self.on_exception)

    def connect_async(self, acknowledge: Acknowledge = Acknowledge.AUTO) -> Connecting:
        """Open a connection and return an asyncio context, for ``async with`` or ``await``. Raises as ``connect`` does."""
        return Connecting(partial(self._connect_async, acknowledge))

    async def _connect_async(self, acknowledge: Acknowledge) -> AsyncContext:
        core, plan = self._core()
        task = ConnectionTask(core, plan, self.tls)
        try:
            until_s = core.clock() + core.settings.timeout_s
            await task.run(core.connected(until_s))
            session = await task.run(core.open_session(acknowledge, until_s))
        except BaseException:
            await task.stop()
            raise
        return AsyncContext(task, session, self.on_exception)

    def _core(self) -> tuple[Core, Plan]:
        address = BrokerUrl.parse(self.url)
        timeout_s = self.timeout_s if self.timeout_s is not None else address.timeout_s
        prefetch = self.prefetch if self.prefetch is not None else address.prefetch
        user = self.user if self.user is not None else address.user
        settings = ConnectionSettings(
            user=user,
            user_id=user if address.populate_user_id else None,
            password=self.password if self.password is not None else address.password,
            token=self.token,
            client_id=self.client_id if self.client_id is not None else address.client_id,
            prefetch=PREFETCH if prefetch is None else prefetch,
            timeout_s=TIMEOUT_S if timeout_s is None else timeout_s,
            reconnects=address.reconnect is not None,
            own_tls=self.tls is not None,
            require_channel_binding=self.require_channel_binding,
        )
        return Core(settings, time.monotonic), Plan(list(address.endpoints), address.reconnect)


class Connecting:
    """An asyncio context that is being opened."""

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, AsyncContext]]) -> None:
        """Prepare a connection; applications call ``connect_async`` of a factory."""
        self._connect = connect
        self._context: AsyncContext | None = None

    def __await__(self) -> Generator[Any, None, AsyncContext]:
        """Open the context."""
        return self._connect().__await__()

    async def __aenter__(self) -> AsyncContext:
        """Open the context; the end of the block closes it."""
        self._context = await self
        return self._context

    async def __aexit__(self, *error: Any) -> None:
        """Close the context."""
        if self._context is not None:
            await self._context.__aexit__(*error)


def connect(url: str, *, acknowledge: Acknowledge = Acknowledge.AUTO, **options: Any) -> Context:
    """Open a connection and return a blocking context. ``options`` are the fields of ConnectionFactory."""
    return ConnectionFactory(url, **options).connect(acknowledge)


def connect_async(url: str, *, acknowledge: Acknowledge = Acknowledge.AUTO, **options: Any) -> Connecting:
    """Open a connection and return an asyncio context. ``options`` are the fields of ConnectionFactory."""
    return ConnectionFactory(url, **options).connect_async(acknowledge)
