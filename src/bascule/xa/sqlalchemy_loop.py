"""SQLAlchemy's AsyncSession for the tasks of an event loop, on the PostgreSQL session of a branch."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import psycopg
from sqlalchemy.engine import URL, Engine
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.pool import NullPool
from sqlalchemy.util import await_, greenlet_spawn

from bascule.threads.loops import on_loop
from bascule.xa.aio import LoopParticipant, in_thread
from bascule.xa.errors import BranchRolledBack
from bascule.xa.psycopg_loop import RELEASE_WITHIN_S, LoopConnection
from bascule.xa.sqlalchemy_joined import JoinedBranch, JoinedConnection, JoiningEngine, Joins

if TYPE_CHECKING:
    from bascule.xa.resource import Resource
    from bascule.xa.transaction import Transaction


class _SharedConnection(LoopConnection):
    """A connection that SQLAlchemy uses but must not end: the branch belongs to the transaction manager."""

    async def commit(self) -> None:
        """Do nothing: the transaction commits."""

    async def rollback(self) -> None:
        """Do nothing: JoinedConnection tells the branch."""

    async def close(self) -> None:
        """Do nothing: the session is returned with the branch."""


def async_engine(url: URL) -> AsyncEngine:
    """Return an engine that opens a connection for each use: a kept connection would belong to one event loop."""
    return create_async_engine(url, poolclass=NullPool)


def joining(engine: AsyncEngine, joins: Joins) -> AsyncEngine:
    """Return an engine whose connections join the current transaction."""
    return AsyncEngine(JoiningEngine(engine.sync_engine, {}, joins))


def enlist_from_connect(transaction: Transaction, resource: Resource[Any]) -> None:
    """Enlist the resource, while SQLAlchemy waits for a connection on the event loop."""
    participant = LoopParticipant(resource, asyncio.get_running_loop())
    await_(in_thread(lambda: transaction.enlist_as(resource, participant)))


class LoopSession:
    """An AsyncSession in a branch. Threads call its methods."""

    handle: AsyncSession

    def __init__(self, raw: psycopg.Connection[Any], loop: asyncio.AbstractEventLoop) -> None:
        """Use the branch that ``raw`` has begun."""
        self._loop = loop
        self._shared = _SharedConnection.of(raw, loop)
        self._connection: AsyncConnection | None = None

    def open(self, engine: AsyncEngine, branch: JoinedBranch) -> AsyncSession:
        """Make and return the handle."""
        return on_loop(self._loop, lambda: self._open(engine, branch))

    async def _open(self, engine: AsyncEngine, branch: JoinedBranch) -> AsyncSession:
        if engine.sync_engine.dialect.server_version_info is None:  # only a separate connection tells an engine the version of its server
            await greenlet_spawn(lambda: cast("JoiningEngine", engine.sync_engine).plain.connect().close())
        joined = await greenlet_spawn(JoinedConnection, engine.sync_engine, branch)
        await greenlet_spawn(joined.begin)
        self._connection = AsyncConnection(engine, joined)
        self.handle = AsyncSession(self._connection, join_transaction_mode="rollback_only", expire_on_commit=False)
        return self.handle

    def dbapi_connection(self, engine: Engine) -> Any:
        """See JoinedBranch. SQLAlchemy calls it on the event loop."""
        return engine.dialect.connect(async_creator_fn=self._offered)

    async def _offered(self) -> LoopConnection:
        return self._shared

    def interrupt(self) -> bool:
        """Cancel the statement of a task in progress, and end the use of the handle. Return True if there was one."""
        if not self._shared.lock.locked():
            return False
        with suppress(BranchRolledBack):
            self._shared.cut_off()
        return True

    def flush(self) -> None:
        """Send pending changes."""
        on_loop(self._loop, self.handle.flush)

    def cut_off(self) -> None:
        """End the use of the handle. Raises BranchRolledBack if a task is within a statement."""
        self._shared.cut_off()

    def close(self) -> None:
        """Detach the objects that the session has loaded. Sends nothing."""
        with suppress(BranchRolledBack):
            self._shared.cut_off()
        on_loop(self._loop, self._close, RELEASE_WITHIN_S)

    async def _close(self) -> None:
        if self._connection is not None:
            await self.handle.close()
            await self._connection.close()
