"""SQLAlchemy sessions as a resource: an application's own sessions work in the branch of its transaction."""

from __future__ import annotations

from bascule.core.extras import require

require("sqlalchemy")

import copy
from asyncio import AbstractEventLoop
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from bascule.core.errors import InvalidInput
from bascule.xa.database_errors import translated
from bascule.xa.driver_xids import driver_xid
from bascule.xa.errors import OutOfOrder
from bascule.xa.postgres import PostgresRules
from bascule.xa.psycopg_loop import Finished, interrupt
from bascule.xa.resource import CommitPriority
from bascule.xa.sqlalchemy_database import LentSession, SessionWork, SqlAlchemyDatabase
from bascule.xa.transaction import Transaction
from bascule.xa.xid import Xid

if TYPE_CHECKING:
    from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession  # needs greenlet, which is not always installed

    from bascule.xa.sqlalchemy_loop import LoopSession

#: Drivers whose two-phase behaviour is known, by SQLAlchemy's names.
DRIVERS = ("psycopg",)


class _PreparedSessionWork(LentSession):
    """A branch on a pooled connection. Sessions use a second object for the same PostgreSQL session."""

    def __init__(self, pooled: Connection) -> None:
        self._pooled = pooled
        self.raw: Any = pooled.connection.driver_connection
        self.on_loop: LoopSession | None = None

    def begin(self, xid: Any) -> None:
        self.raw.tpc_begin(xid)
        self._shared = copy.copy(self.raw)
        self._shared.commit = self._shared.rollback = self._shared.close = _nothing

    def lend_on_loop(self, engine: AsyncEngine, on_loop: LoopSession) -> AsyncSession:
        """Make an AsyncSession as the handle, and return it."""
        self.take_back()
        self.on_loop = on_loop
        self.handle = on_loop.open(engine, self)
        return on_loop.handle

    def dbapi_connection(self, engine: Engine) -> Any:
        if engine.dialect.is_async is not (self.on_loop is not None):
            raise OutOfOrder(
                "the branch is used both by an event loop and by threads. Use AsyncSession in asyncio programs, Session in other programs"
            )
        return self._shared if self.on_loop is None else self.on_loop.dbapi_connection(engine)

    def interrupt(self) -> bool:
        return interrupt(self.raw) if self.on_loop is None else self.on_loop.interrupt()

    def send(self) -> None:
        (self.on_loop or self.handle).flush()

    def cut_off(self) -> None:
        if self.on_loop is not None:
            self.on_loop.cut_off()
        self._shared.pgconn = Finished(self.raw.pgconn.backend_pid)

    def prepare(self) -> Any:
        return self.raw.tpc_prepare()

    def commit(self) -> None:
        self.raw.tpc_commit()

    def rollback(self) -> None:
        self.raw.tpc_rollback()

    def close(self, *, reusable: bool) -> None:
        if self.on_loop is not None:
            with suppress(Exception):  # the loop is gone, and nobody uses the session any more
                self.on_loop.close()
        elif self.handle is not None:
            self.take_back()
        if not reusable:
            self._pooled.invalidate()
        self._pooled.close()


def _nothing() -> None:
    """Do nothing: commit, rollback and close of an application's session do not affect the branch."""


class SqlAlchemyResource(SqlAlchemyDatabase, PostgresRules[Session]):
    """A SQLAlchemy Engine (PostgreSQL through psycopg). The handle is a Session; ``session.connection()`` is its Connection for Core.

    The application's own sessions take part if they are bound to ``engine`` or ``async_engine`` of the resource.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        *,
        async_engine: AsyncEngine | None = None,
        priority: int = CommitPriority.DATABASE,
        prepared: bool | None = None,
    ) -> None:
        """Use ``engine`` and, for AsyncSession outside of transactions, ``async_engine``. Without it, each use opens a connection.

        See CommitPriority for ``priority`` and PostgresRules for ``prepared``.
        """
        for driver in (engine.dialect.driver, *([] if async_engine is None else [async_engine.dialect.driver])):
            if driver not in DRIVERS:
                raise InvalidInput(
                    f"resource {name}: driver {driver!r} is not supported; use one of {', '.join(DRIVERS)} (postgresql+psycopg://). For "
                    "SQLite, MySQL and MariaDB, use SqlAlchemyLocalResource"
                )
        super().__init__(name, engine, prepared=prepared, priority=priority)
        self._plain_async = async_engine
        self._async_engine: AsyncEngine | None = None

    def enlist_in(self, transaction: Transaction, engine: Engine) -> None:
        """See SqlAlchemyDatabase."""
        if engine.dialect.is_async:
            from bascule.xa.sqlalchemy_loop import enlist_from_connect

            enlist_from_connect(transaction, self)
        else:
            transaction.enlist(self)

    def work_on(self, pooled: Connection, xid: Xid) -> SessionWork:
        """See SqlAlchemyDatabase."""
        work = _PreparedSessionWork(pooled)
        try:
            work.begin(driver_xid(work.raw, xid))
        except BaseException:
            work.close(reusable=False)
            raise
        return work

    def start_on_loop(self, xid: Xid, *, timeout_s: float, loop: AbstractEventLoop) -> AsyncSession:
        """See WorksOnLoop. The handle is an AsyncSession."""
        engine = self.async_engine
        from bascule.xa.sqlalchemy_loop import LoopSession

        self.start(xid, timeout_s=timeout_s)
        with self._lock:
            work = cast("_PreparedSessionWork", self._work[xid])
        try:
            with translated():
                return work.lend_on_loop(engine, LoopSession(work.raw, loop))
        except BaseException:
            self.rollback(xid)
            raise

    @property
    def async_engine(self) -> AsyncEngine:
        """The same as ``engine``, for AsyncSession. Raises InvalidInput if greenlet is not installed."""
        try:
            from bascule.xa.sqlalchemy_loop import async_engine, joining
        except ImportError as error:
            raise InvalidInput(f"resource {self.name}: {error}") from error
        with self._lock:
            if self._async_engine is None:
                self._async_engine = joining(self._plain_async or async_engine(self._plain.url), self)
            return self._async_engine
