"""SQLAlchemy sessions on databases that cannot prepare, SQLite, MySQL and MariaDB: their commit is the decision of the transaction."""

from __future__ import annotations

from bascule.core.extras import require

require("sqlalchemy")

from contextlib import suppress
from typing import Any

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from bascule.core.errors import InvalidInput
from bascule.xa.errors import BranchRolledBack, Code
from bascule.xa.local_database import LocalConnection, LocalRules, LocalWork
from bascule.xa.resource import CommitPriority
from bascule.xa.sqlalchemy_database import LentSession, SessionWork, SqlAlchemyDatabase
from bascule.xa.xid import Xid

#: The parameter placeholder in the driver's SQL, by SQLAlchemy's name of the database.
PLACEHOLDERS = {"sqlite": "?", "mysql": "%s", "mariadb": "%s"}


class _JoinedLocalConnection:
    """The driver connection of a branch as SQLAlchemy uses it: its sessions do not end the branch."""

    def __init__(self, lent: LocalConnection) -> None:
        self._lent = lent

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lent, name)

    def commit(self) -> None:
        """Do nothing: the transaction commits."""

    def rollback(self) -> None:
        """Do nothing: JoinedConnection tells the branch."""

    def close(self) -> None:
        """Do nothing: the connection is returned with the branch."""


class _LocalSessionWork(LentSession, LocalWork):
    """A branch in the implicit transaction of a pooled connection."""

    def __init__(self, pooled: Connection) -> None:
        self._pooled = pooled
        self.raw = pooled.connection.driver_connection
        self.lent = LocalConnection(self.raw)

    def begin(self, xid: Any) -> None:
        """Do nothing: the first statement begins the transaction."""

    def dbapi_connection(self, engine: Engine) -> Any:  # noqa: ARG002 - there is one engine
        return _JoinedLocalConnection(self.lent)

    def interrupt(self) -> bool:
        """See Work. Without a call in progress, the session has still to send its changes."""
        return self.lent.in_call and super().interrupt()

    def cut_off(self) -> None:
        """See Work. Raises BranchRolledBack if a thread is within a call."""
        if not self.lent.cut_off():
            raise BranchRolledBack("the application is still using a session of the branch", Code.XA_RBPROTO)

    def let_go(self, *, reusable: bool) -> None:
        with suppress(Exception):  # a session in the middle of a call
            self.take_back()
        if not reusable:
            self._pooled.invalidate()
        self._pooled.close()


class SqlAlchemyLocalResource(SqlAlchemyDatabase, LocalRules[Session]):
    """A SQLAlchemy Engine of SQLite, MySQL or MariaDB. The handle is a Session; ``session.connection()`` is its Connection for Core.

    The application's own sessions take part if they are bound to ``engine`` of the resource. Only one such resource can take part in a
    transaction.
    """

    def __init__(self, name: str, engine: Engine, *, priority: int = CommitPriority.DATABASE) -> None:
        """Use ``engine``, whose connections have no autocommit. See CommitPriority for ``priority``.

        Raises InvalidInput for other databases.
        """
        if engine.dialect.name not in PLACEHOLDERS or engine.dialect.is_async:
            raise InvalidInput(
                f"resource {name}: {engine.dialect.name}+{engine.dialect.driver} is not supported; use a blocking driver of SQLite, "
                "MySQL or MariaDB"
            )
        super().__init__(name, engine, placeholder=PLACEHOLDERS[engine.dialect.name], priority=priority)

    def work_on(self, pooled: Connection, xid: Xid) -> SessionWork:  # noqa: ARG002 - the database does not know it
        """See SqlAlchemyDatabase."""
        return _LocalSessionWork(pooled)
