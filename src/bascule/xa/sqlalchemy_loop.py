"""SQLAlchemy's AsyncSession for the tasks of an event loop, on the session of PostgreSQL that a branch has."""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import suppress
from typing import Any

import psycopg
from sqlalchemy.engine import URL
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool

from bascule.threads.loops import on_loop
from bascule.xa.errors import BranchRolledBack
from bascule.xa.psycopg_loop import RELEASE_WITHIN_S, LoopConnection

#: The connection that an engine shall use, while it connects.
_offered: contextvars.ContextVar[LoopConnection] = contextvars.ContextVar("bascule.xa.sqlalchemy_loop")


class _SharedConnection(LoopConnection):
    """A connection that is SQLAlchemy's to use and not to end: the branch is the transaction manager's."""

    rolled_back = False

    async def commit(self) -> None:
        """Nothing is committed before the transaction is."""

    async def rollback(self) -> None:
        """Note that the application has given its work up."""
        self.rolled_back = True

    async def close(self) -> None:
        """The session is given back with the branch."""


def async_engine(url: URL) -> AsyncEngine:
    """Return an engine whose every connection is the one that is offered to it."""

    async def offered() -> Any:
        return _offered.get()

    return create_async_engine(url, async_creator=offered, poolclass=NullPool)


class LoopSession:
    """An AsyncSession in a branch. Its methods are called from threads."""

    def __init__(self, engine: AsyncEngine, raw: psycopg.Connection[Any], loop: asyncio.AbstractEventLoop) -> None:
        """``raw`` has begun the branch."""
        self._loop = loop
        self._shared = _SharedConnection.of(raw, loop)
        self._connection: AsyncConnection
        self.handle: AsyncSession = on_loop(loop, lambda: self._open(engine))

    async def _open(self, engine: AsyncEngine) -> AsyncSession:
        token = _offered.set(self._shared)
        try:
            self._connection = await engine.connect()
        finally:
            _offered.reset(token)
        self._shared.rolled_back = False  # the first connection of an engine looks at the server, and rolls that back
        return AsyncSession(self._connection, join_transaction_mode="rollback_only", expire_on_commit=False)

    def flush(self) -> None:
        """Send what is still to be sent. Raises BranchRolledBack if the application has rolled back."""
        on_loop(self._loop, self._flush)

    async def _flush(self) -> None:
        if not self._shared.rolled_back:
            await self.handle.flush()
        if self._shared.rolled_back:
            raise BranchRolledBack("the application has rolled back its AsyncSession")

    def cut_off(self) -> None:
        """End the use of the handle. Raises BranchRolledBack if a task is within a statement."""
        self._shared.cut_off()

    def close(self) -> None:
        """Detach what the session has loaded. Nothing is sent."""
        with suppress(BranchRolledBack):
            self._shared.cut_off()
        on_loop(self._loop, self._close, RELEASE_WITHIN_S)

    async def _close(self) -> None:
        await self.handle.close()
        await self._connection.close()
