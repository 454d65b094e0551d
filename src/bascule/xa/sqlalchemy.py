"""SQLAlchemy sessions as a resource: the transaction of a Session is a two-phase branch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from bascule.core.errors import InvalidInput
from bascule.xa.database import Work, driver_xid
from bascule.xa.postgres import PostgresRules
from bascule.xa.resource import CommitPriority
from bascule.xa.xid import Xid

#: Drivers whose two-phase behaviour is known, by SQLAlchemy's names.
DRIVERS = ("psycopg",)


class _SessionWork:
    """A branch that a Session has joined: it flushes, and neither commits nor rolls back by itself."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.raw: Any = connection.connection.driver_connection
        self.handle = Session(bind=connection, join_transaction_mode="rollback_only")

    def begin(self, xid: Any) -> None:
        self._transaction = self._connection.begin_twophase(xid)

    def flush(self) -> None:
        self.handle.flush()

    def cut_off(self) -> None:
        """The Session is closed when the branch is over: before that its close would roll back."""

    def prepare(self) -> None:
        self._transaction.prepare()

    def commit(self) -> None:
        self._transaction.commit()

    def rollback(self) -> None:
        self._transaction.rollback()

    def close(self, *, reusable: bool) -> None:
        if not reusable:
            self._connection.invalidate()
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

    def opened(self, xid: Xid) -> Work[Session]:
        """See DatabaseResource."""
        work = _SessionWork(self._engine.connect())
        try:
            work.begin(driver_xid(work.raw, xid))
        except BaseException:
            work.close(reusable=False)
            raise
        return work

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
