"""Databases without two-phase commit as a resource: SQLite, MySQL or MariaDB by any driver of PEP 249. The commit is the decision."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NoReturn

from bascule.core.errors import InvalidInput
from bascule.xa.database import HandleT, Work, close_quietly, connection_of, translated
from bascule.xa.deciding_database import DecidingDatabase
from bascule.xa.decision_table import TABLE, DecisionTable
from bascule.xa.errors import OutOfOrder, UnknownXid
from bascule.xa.log import Outcome
from bascule.xa.resource import CommitPriority
from bascule.xa.xid import Xid


class LocalConnection:
    """The handle: a connection of the driver whose commit and rollback are the manager's. It ends with its branch."""

    def __init__(self, raw: Any) -> None:
        self._raw: Any = raw

    def __getattr__(self, name: str) -> Any:
        if self._raw is None:
            raise OutOfOrder("the transaction of this connection is over: enlist the resource in the next one")
        return getattr(self._raw, name)

    def commit(self) -> NoReturn:
        """Raises OutOfOrder."""
        raise OutOfOrder("commit: the transaction manager commits")

    def rollback(self) -> NoReturn:
        """Raises OutOfOrder."""
        raise OutOfOrder("rollback: the transaction manager rolls back")

    def close(self) -> NoReturn:
        """Raises OutOfOrder."""
        raise OutOfOrder("close: the transaction manager closes the connection")

    def cut_off(self) -> None:
        """End the use of the connection."""
        self._raw = None


class _LocalWork:
    """A branch on a connection of its own, in the driver's implicit transaction."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.handle = LocalConnection(raw)

    def begin(self, xid: Any) -> None:
        """The first statement begins the transaction."""

    def flush(self) -> None:
        """A connection sends at once."""

    def cut_off(self) -> None:
        self.handle.cut_off()

    def prepare(self) -> NoReturn:
        raise OutOfOrder("a database without two-phase commit prepares nothing")

    def commit(self) -> None:
        self.raw.commit()

    def rollback(self) -> None:
        self.raw.rollback()

    def close(self, *, reusable: bool) -> None:  # noqa: ARG002 - none is used again
        self.handle.cut_off()
        close_quietly(self.raw)


class LocalRules(DecidingDatabase[HandleT]):
    """What databases do differently that cannot prepare, for every way to them; at most one such resource takes part in a transaction.

    The table ``bascule_decisions``, which ``check`` creates, has the decisions; rows are deleted when nobody needs them.
    """

    def __init__(self, name: str, *, placeholder: str, **rest: Any) -> None:
        """``placeholder`` is a parameter in the driver's SQL: ``?`` for sqlite3, ``%s`` for drivers of MySQL and MariaDB."""
        super().__init__(name, table=DecisionTable(placeholder), **rest)

    @property
    def decides(self) -> bool:
        """See Decides."""
        return True

    def check(self) -> None:
        """See Checks."""
        with translated(), self.connected() as raw:
            self._table.create(raw)
            raw.commit()
            stays = self._table.outlives_rollback(raw)
        if stays:
            raise InvalidInput(
                f"{self.name}: what is written to {TABLE} stays after a rollback; open connections without autocommit, and use a storage "
                "engine with transactions"
            )

    def has_decisions(self, raw: Any) -> bool:
        """See DecidingDatabase."""
        self._table.create(raw)
        return True

    def listed(self, raw: Any) -> Sequence[Xid]:  # noqa: ARG002
        """See DatabaseResource: nothing is prepared."""
        return []

    def _from_outside(self, xid: Xid, outcome: Outcome) -> None:
        raise UnknownXid(f"{self.name} prepares nothing: {outcome} of {xid}")


class LocalDatabaseResource(LocalRules[Any]):
    """A database that cannot prepare. The handle is a connection."""

    def __init__(self, name: str, connect: Callable[[], Any], *, placeholder: str = "?", priority: int = CommitPriority.DATABASE) -> None:
        """``connect`` opens a connection that does not commit by itself, and that any thread may use (SQLite: ``check_same_thread``).

        For ``placeholder`` see LocalRules, for ``priority`` CommitPriority.
        """
        super().__init__(name, placeholder=placeholder, priority=priority)
        self._connect = connect

    def opened(self, xid: Xid) -> Work[Any]:  # noqa: ARG002 - the database does not know it
        """See DatabaseResource."""
        return _LocalWork(self._connect())

    def connected(self) -> AbstractContextManager[Any]:
        """See DatabaseResource."""
        return connection_of(self._connect)
