"""Databases without two-phase commit as a resource: SQLite, MySQL or MariaDB by any driver of PEP 249. The commit is the decision."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NoReturn

from bascule.core.errors import InvalidInput
from bascule.xa.database import Work, close_quietly, connection_of, translated
from bascule.xa.deciding_database import DecidingDatabase
from bascule.xa.decision_table import TABLE, DecisionTable
from bascule.xa.errors import OutOfOrder, ResourceFailed, UnknownXid
from bascule.xa.log import Outcome
from bascule.xa.resource import CommitPriority
from bascule.xa.xid import Xid

#: How long the end of a transaction waits for a call of the application that is still within it, and that is rolled back.
INTERRUPT_WITHIN_S: Final = 3.0


class LocalCalls:
    """The calls of the application in one branch, on its connection and the cursors of that."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._within = 0
        self._over = False

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a call. Raises OutOfOrder if the branch is over."""
        with self._changed:
            if self._over:
                raise OutOfOrder("the transaction of this connection is over: enlist the resource in the next one")
            self._within += 1
        try:
            yield
        finally:
            with self._changed:
                self._within -= 1
                self._changed.notify_all()

    def end(self, timeout_s: float = 0.0) -> bool:
        """Let no call in any more. Return whether none is at work, now or within ``timeout_s``."""
        with self._changed:
            self._over = True
            return self._changed.wait_for(lambda: self._within == 0, timeout_s)


class LocalCursor:
    """A cursor of the driver. Its calls are calls in the branch."""

    __slots__ = ("_calls", "_raw")

    def __init__(self, raw: Any, calls: LocalCalls) -> None:
        object.__setattr__(self, "_raw", raw)
        object.__setattr__(self, "_calls", calls)

    def __getattr__(self, name: str) -> Any:
        return _counted(getattr(self._raw, name), self._raw, self._calls)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._raw, name, value)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        with self._calls.call():
            return next(self._raw)


class LocalConnection:
    """The handle: a connection of the driver whose commit and rollback are the manager's. It ends with its branch."""

    def __init__(self, raw: Any) -> None:
        self._raw: Any = raw
        self._calls = LocalCalls()

    def __getattr__(self, name: str) -> Any:
        with self._calls.call():
            return _counted(getattr(self._raw, name), self._raw, self._calls)

    def commit(self) -> NoReturn:
        """Raises OutOfOrder."""
        raise OutOfOrder("commit: the transaction manager commits")

    def rollback(self) -> NoReturn:
        """Raises OutOfOrder."""
        raise OutOfOrder("rollback: the transaction manager rolls back")

    def close(self) -> NoReturn:
        """Raises OutOfOrder."""
        raise OutOfOrder("close: the transaction manager closes the connection")

    def cut_off(self, timeout_s: float = 0.0) -> bool:
        """End the use of the connection. Return whether no thread is within a call, now or within ``timeout_s``."""
        return self._calls.end(timeout_s)


def _counted(found: Any, owner: Any, calls: LocalCalls) -> Any:
    """An attribute of a driver's object. A method is called as a call in the branch; the cursor that it returns is a LocalCursor."""
    if not callable(found):
        return found

    def call(*arguments: Any, **options: Any) -> Any:
        with calls.call():
            returned = found(*arguments, **options)
        if returned is owner:  # a cursor's execute may return the cursor
            return LocalCursor(owner, calls)
        return LocalCursor(returned, calls) if hasattr(returned, "fetchone") else returned

    return call


class _LocalWork:
    """A branch on a connection of its own, in the driver's implicit transaction."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.handle = LocalConnection(raw)

    def begin(self, xid: Any) -> None:
        """The first statement begins the transaction."""

    def interrupt(self) -> bool:
        if self.handle.cut_off():
            return False
        if (cancel := getattr(self.raw, "interrupt", None)) is not None:  # SQLite has it
            cancel()
        self.handle.cut_off(INTERRUPT_WITHIN_S)
        return True

    def flush(self) -> None:
        """A connection sends at once."""

    def cut_off(self) -> None:
        self.handle.cut_off()

    def prepare(self) -> NoReturn:
        raise OutOfOrder("a database without two-phase commit prepares nothing")

    def commit(self) -> None:
        self.raw.commit()

    def rollback(self) -> None:
        if self.interrupt() and not self.handle.cut_off():
            raise ResourceFailed("a thread of the application is still within a call of the connection")
        self.raw.rollback()

    def close(self, *, reusable: bool) -> None:  # noqa: ARG002 - none is used again
        if self.handle.cut_off():
            close_quietly(self.raw)  # else the thread has the last reference to it, and its end rolls back


class LocalDatabaseResource(DecidingDatabase[Any]):
    """A database that cannot prepare. The handle is a connection; at most one such resource takes part in a transaction.

    Its table ``bascule_decisions``, which ``check`` creates, has the decisions; rows are deleted when nobody needs them.
    """

    def __init__(self, name: str, connect: Callable[[], Any], *, placeholder: str = "?", priority: int = CommitPriority.DATABASE) -> None:
        """``connect`` opens a connection that does not commit by itself, and that any thread may use (SQLite: ``check_same_thread``).

        ``placeholder`` is a parameter in the driver's SQL: ``?`` for sqlite3, ``%s`` for drivers of MySQL and MariaDB.
        """
        super().__init__(name, priority=priority, table=DecisionTable(placeholder))
        self._connect = connect

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

    def opened(self, xid: Xid) -> Work[Any]:  # noqa: ARG002 - the database does not know it
        """See DatabaseResource."""
        return _LocalWork(self._connect())

    def connected(self) -> AbstractContextManager[Any]:
        """See DatabaseResource."""
        return connection_of(self._connect)

    def has_decisions(self, raw: Any) -> bool:
        """See DecidingDatabase."""
        self._table.create(raw)
        return True

    def listed(self, raw: Any) -> Sequence[Xid]:  # noqa: ARG002
        """See DatabaseResource: nothing is prepared."""
        return []

    def _from_outside(self, xid: Xid, outcome: Outcome) -> None:
        raise UnknownXid(f"{self.name} prepares nothing: {outcome} of {xid}")
