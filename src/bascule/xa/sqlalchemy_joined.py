"""An Engine whose connections join the transaction: an application's own sessions work in its branch, and none of them ends it.

Outside of a transaction, the engine behaves like the engine that it was made from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from sqlalchemy import event
from sqlalchemy.engine import Connection, Engine, RootTransaction
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.orm import Session, SessionTransaction
from sqlalchemy.pool import NullPool, PoolProxiedConnection

from bascule.xa.xid import Xid

#: The first word of statements that write nothing, and of their command tags in PostgreSQL.
READS = frozenset({"SELECT", "FETCH", "MOVE", "DECLARE", "CLOSE", "SHOW", "SET", "EXPLAIN", "SAVEPOINT", "RELEASE", "ROLLBACK"})
ROLLED_BACK = "the application rolled back its session"
LEFT = "a session with uncommitted changes was closed"
#: Key in ``Session.info``: see Joins.gives_up.
_GIVES_UP = "bascule.xa.gives_up"


class JoinedBranch(Protocol):
    """A branch that connections join."""

    xid: Xid

    def dbapi_connection(self, engine: Engine) -> Any:
        """Return a driver connection on the session of the branch. Its commit, rollback and close do nothing."""

    def doom(self, reason: str) -> None:
        """Make sure that the branch is not prepared or committed."""


class Joins(Protocol):
    """Knows the branch of the current transaction."""

    def joined(self, engine: Engine) -> JoinedBranch | None:
        """Return the branch of the current transaction of this thread or task, begun if necessary, or None without a transaction."""

    def refuse_outside(self, branch: JoinedBranch | None) -> None:
        """Raise OutOfOrder if a connection takes no part in the current transaction. ``branch`` is that of the connection, if it has one.

        A statement on it would commit by itself, or with another transaction.
        """

    def gives_up(self) -> Callable[[str], None] | None:
        """Return a function that marks the current transaction for rollback, with a reason, or None without a transaction."""


class JoinedConnection(Connection):
    """A connection in a branch. Its commit flushes, and its rollback makes sure that the branch does not commit."""

    def __init__(self, engine: Engine, branch: JoinedBranch) -> None:
        # A pool would roll back a connection that is returned to it.
        pool = NullPool(lambda: branch.dbapi_connection(engine), dialect=engine.dialect, reset_on_return=None)
        super().__init__(engine, connection=pool.connect())
        self.branch = branch
        self.wrote = False
        event.listen(self, "after_cursor_execute", self._executed)

    def begin(self) -> RootTransaction:
        """Return a transaction of SQLAlchemy, as Connection does."""
        return super().begin() if self.in_transaction() else _JoinedTransaction(self)

    def _executed(self, _connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        tag = getattr(getattr(cursor, "_cursor", cursor), "statusmessage", statement)  # drivers other than psycopg have none
        words = (tag or "").split(None, 1)
        self.wrote = self.wrote or not words or words[0].upper() not in READS


class _JoinedTransaction(RootTransaction):
    __slots__ = ()
    connection: JoinedConnection

    def commit(self) -> None:
        super().commit()
        self.connection.wrote = False

    def rollback(self) -> None:
        self.connection.branch.doom(ROLLED_BACK)
        super().rollback()

    def close(self) -> None:
        if self.connection.wrote and self.is_active:
            self.connection.branch.doom(LEFT)
        super().close()


class JoiningEngine(OptionEngine):
    """An engine that shares pool, dialect and events with the engine that it was made from."""

    def __init__(self, proxied: Any, execution_options: Mapping[str, Any], joins: Joins | None = None) -> None:
        super().__init__(proxied, execution_options)
        self.joins: Joins = proxied.joins if joins is None else joins
        self.plain: Engine = proxied if joins is not None else proxied.plain

    def connect(self) -> Connection:
        """Return a connection in the branch of the current transaction, or a separate connection without one."""
        branch = self.joins.joined(self)
        connection = super().connect() if branch is None else JoinedConnection(self, branch)
        event.listen(connection, "before_cursor_execute", lambda *_: self.joins.refuse_outside(branch))
        return connection

    def raw_connection(self) -> PoolProxiedConnection:
        """Return a driver connection of the pool. Raises OutOfOrder in a transaction, in which it would take no part."""
        self.joins.refuse_outside(None)
        return super().raw_connection()


JoiningEngine._option_cls = JoiningEngine


@event.listens_for(Session, "after_transaction_create")
def _began(session: Session, transaction: SessionTransaction) -> None:
    if transaction.parent is None and isinstance(session.bind, JoiningEngine):
        session.info[_GIVES_UP] = session.bind.joins.gives_up()


@event.listens_for(Session, "after_soft_rollback")
def _rolled_back(session: Session, transaction: SessionTransaction) -> None:
    """Give up the work even of a session that has sent nothing and has no connection."""
    if transaction.parent is None and (gives_up := session.info.pop(_GIVES_UP, None)) is not None:
        gives_up(ROLLED_BACK)
