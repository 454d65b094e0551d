"""SQLAlchemy sessions as a resource: the transaction of a Session is a two-phase branch."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from bascule.core.errors import InvalidInput
from bascule.xa.database import Work, driver_xid, translated
from bascule.xa.postgres import PostgresRules
from bascule.xa.resource import CommitPriority
from bascule.xa.xid import Xid

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession  # needs greenlet, which is not always installed

    from bascule.xa.sqlalchemy_loop import LoopSession

#: Drivers whose two-phase behaviour is known, by SQLAlchemy's names.
DRIVERS = ("psycopg",)


class _SessionWork:
    """A branch that a Session has joined: it flushes, and neither commits nor rolls back by itself."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.raw: Any = connection.connection.driver_connection
        self.handle: Any = Session(bind=connection, join_transaction_mode="rollback_only")
        self._on_loop: LoopSession | None = None

    def begin(self, xid: Any) -> None:
        self._transaction = self._connection.begin_twophase(xid)

    def lend(self, on_loop: LoopSession) -> None:
        """The handle is an AsyncSession."""
        self.handle, self._on_loop = on_loop.handle, on_loop

    def flush(self) -> None:
        (self._on_loop or self.handle).flush()

    def cut_off(self) -> None:
        """A Session is closed when the branch is over: before that its close would roll back."""
        if self._on_loop is not None:
            self._on_loop.cut_off()

    def prepare(self) -> None:
        self._transaction.prepare()

    def commit(self) -> None:
        self._transaction.commit()

    def rollback(self) -> None:
        self._transaction.rollback()

    def close(self, *, reusable: bool) -> None:
        if self._on_loop is not None:
            with suppress(Exception):  # the loop is gone, and nobody uses the session any more
                self._on_loop.close()
        if not reusable:
            self._connection.invalidate()
        if self._on_loop is None:
            self.handle.close()
        self._connection.close()


class SqlAlchemyResource(PostgresRules[Session]):
    """An Engine (PostgreSQL by psycopg). The handle is a Session; ``session.connection()`` gives its Connection for SQLAlchemy Core."""

    def __init__(self, name: str, engine: Engine, *, priority: int = CommitPriority.DATABASE, prepared: bool | None = None) -> None:
        """For ``priority`` see CommitPriority, for ``prepared`` PostgresRules."""
        super().__init__(name, prepared=prepared, priority=priority)
        if engine.dialect.driver not in DRIVERS:
            raise InvalidInput(
                f"resource {name}: driver {engine.dialect.driver!r} is not one of {', '.join(DRIVERS)} (postgresql+psycopg://)"
            )
        self._engine = engine
        self._async_engine: AsyncEngine | None = None

    def opened(self, xid: Xid) -> Work[Session]:
        """See DatabaseResource."""
        work = _SessionWork(self._engine.connect())
        try:
            work.begin(driver_xid(work.raw, xid))
        except BaseException:
            work.close(reusable=False)
            raise
        return work

    def start_on_loop(self, xid: Xid, *, timeout_s: float, loop: AbstractEventLoop) -> AsyncSession:
        """See WorksOnLoop. The handle is an AsyncSession."""
        try:
            from bascule.xa.sqlalchemy_loop import LoopSession, async_engine
        except ImportError as error:
            raise InvalidInput(f"resource {self.name}: {error}") from error
        self.start(xid, timeout_s=timeout_s)
        with self._lock:
            work = self._work[xid]
            if self._async_engine is None:
                self._async_engine = async_engine(self._engine.url)
        try:
            with translated():
                on_loop = LoopSession(self._async_engine, work.raw, loop)
        except BaseException:
            self.rollback(xid)
            raise
        cast("_SessionWork", work).lend(on_loop)
        return on_loop.handle

    def after_fork(self) -> None:
        """See Forks."""
        super().after_fork()
        self._engine.dispose(close=False)

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """See DatabaseResource."""
        pooled = self._engine.raw_connection()
        try:
            yield pooled.driver_connection
        finally:
            pooled.close()
