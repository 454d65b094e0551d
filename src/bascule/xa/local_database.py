"""Databases without two-phase commit as a resource: SQLite, MySQL or MariaDB with any PEP 249 driver. The commit is the decision."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, Final, NoReturn, Self

from bascule.core.errors import InvalidInput
from bascule.xa.database import HandleT, Work, close_quietly, connection_of
from bascule.xa.database_errors import translated
from bascule.xa.deciding_database import DecidingDatabase
from bascule.xa.decision_table import TABLE, DecisionTable
from bascule.xa.errors import BranchRolledBack, OutOfOrder, ResourceError, UnknownXid
from bascule.xa.log import Outcome
from bascule.xa.resource import CommitPriority, Vote, refuse_ending
from bascule.xa.xid import Xid

#: How long, in seconds, the end of a transaction waits for a call of the application in a branch that is rolled back.
INTERRUPT_WITHIN_S: Final = 3.0
#: Methods that end the transaction: of connections of PyMySQL and mysqlclient the first two, of MySQL Connector the third, of connections
#: and cursors of SQLite the fourth, of cursors of pyodbc the others. The handle has its own commit and rollback.
ENDING: Final = frozenset({"begin", "autocommit", "start_transaction", "executescript", "commit", "rollback"})
#: Marks the end of the rows.
_END: Final = object()


class LocalCalls:
    """The calls of the application in one branch, on its connection and cursors."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.handle: LocalConnection | None = None
        self._within = 0
        self._over = False
        self._afterwards: Callable[[], None] | None = None

    @contextmanager
    def call(self) -> Iterator[None]:
        """Surround a call. Raises OutOfOrder if the branch is over."""
        with self._changed:
            self.check()
            self._within += 1
        try:
            yield
        finally:
            with self._changed:
                self._within -= 1
                self._changed.notify_all()
                due = self._take_due()
            if due is not None:
                due()

    def check(self) -> None:
        """Raise OutOfOrder if the branch is over."""
        if self._over:
            raise OutOfOrder("the transaction of this connection is over; enlist the resource in the next transaction")

    @property
    def in_progress(self) -> bool:
        """Whether a thread is within a call."""
        return self._within > 0

    def end(self, timeout_s: float = 0.0) -> bool:
        """Refuse new calls. Return True if no call is in progress, now or within ``timeout_s`` seconds."""
        with self._changed:
            self._over = True
            return self._changed.wait_for(lambda: self._within == 0, timeout_s)

    def afterwards(self, function: Callable[[], None]) -> None:
        """Refuse new calls, and call ``function`` once: now, or at the end of the last call, in its thread."""
        with self._changed:
            self._over, self._afterwards = True, function
            due = self._take_due()
        if due is not None:
            due()

    def _take_due(self) -> Callable[[], None] | None:
        if self._within:
            return None
        due, self._afterwards = self._afterwards, None
        return due


class LocalCursor:
    """A cursor of the driver whose calls count as calls in the branch."""

    __slots__ = ("_calls", "_raw")

    def __init__(self, raw: Any, calls: LocalCalls) -> None:
        object.__setattr__(self, "_raw", raw)
        object.__setattr__(self, "_calls", calls)

    def __getattr__(self, name: str) -> Any:
        if name == "connection" and self._calls.handle is not None:
            return self._calls.handle  # the one of the driver could commit
        return _attribute(self._raw, name, self._calls)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._raw, name, value)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Any]:
        with self._calls.call():
            rows = iter(self._raw)  # some drivers have cursors that are no iterators
        while True:
            with self._calls.call():
                row = next(rows, _END)
            if row is _END:
                return
            yield row

    def __next__(self) -> Any:
        with self._calls.call():
            return next(self._raw)

    def close(self) -> None:
        """Close the cursor, unless the end of the branch has closed or will close it."""
        with suppress(OutOfOrder), self._calls.call():
            self._raw.close()


class LocalConnection:
    """The handle: a driver connection that only the manager commits and rolls back. It ends with its branch."""

    def __init__(self, raw: Any) -> None:
        self._raw: Any = raw
        self._calls = LocalCalls()
        self._calls.handle = self

    def __getattr__(self, name: str) -> Any:
        with self._calls.call():
            return _attribute(self._raw, name, self._calls)

    def commit(self) -> NoReturn:
        """Raise OutOfOrder."""
        raise OutOfOrder("cannot commit this connection: the transaction manager commits the transaction")

    def rollback(self) -> NoReturn:
        """Raise OutOfOrder."""
        raise OutOfOrder("cannot roll back this connection: the transaction manager rolls back the transaction")

    def close(self) -> NoReturn:
        """Raise OutOfOrder."""
        raise OutOfOrder("cannot close this connection: the transaction manager closes the connection")

    @property
    def in_call(self) -> bool:
        """Whether a thread is within a call."""
        return self._calls.in_progress

    def cut_off(self) -> bool:
        """End the use of the connection. Return True if no thread is within a call."""
        return self._calls.end()

    def interrupt(self) -> bool:
        """End the use of the connection, and a call in progress if the driver can. Return True if there was one."""
        if self.cut_off():
            return False
        if (cancel := getattr(self._raw, "interrupt", None)) is not None:  # SQLite has it
            cancel()
        self._calls.end(INTERRUPT_WITHIN_S)
        return True

    def afterwards(self, function: Callable[[], None]) -> None:
        """End the use of the connection, and call ``function`` when no thread is within a call: now, or in the last thread."""
        self._calls.afterwards(function)


def _attribute(raw: Any, name: str, calls: LocalCalls) -> Any:
    """Return an attribute of a driver connection or cursor. A method that ends the transaction becomes one that raises OutOfOrder."""
    found = getattr(raw, name)
    return partial(refuse_ending, name) if name in ENDING and callable(found) else _counted(found, raw, calls)


def _counted(found: Any, owner: Any, calls: LocalCalls) -> Any:
    """Return an attribute of a driver object. A method counts as a call in the branch; a cursor that it returns becomes a LocalCursor.

    A class is returned unchanged: a driver connection may have its error classes as attributes.
    """
    if not callable(found) or isinstance(found, type):
        return found

    def call(*arguments: Any, **options: Any) -> Any:
        with calls.call():
            returned = found(*arguments, **options)
            is_cursor = returned is owner or hasattr(returned, "fetchone")  # a cursor's execute may return the cursor
            try:
                calls.check()
            except OutOfOrder:
                if is_cursor:
                    close_quietly(returned)  # as long as it has rows, SQLite does not roll back
                raise
        return LocalCursor(returned, calls) if is_cursor else returned

    return call


class LocalWork:
    """A branch in the implicit transaction of a driver connection ``raw``. The application works with ``lent``."""

    raw: Any
    lent: LocalConnection

    def interrupt(self) -> bool:
        """See Work."""
        return self.lent.interrupt()

    def cut_off(self) -> None:
        """See Work."""
        self.lent.cut_off()

    def prepare(self) -> NoReturn:
        """Raise OutOfOrder."""
        raise OutOfOrder("a database without two-phase commit cannot prepare a branch")

    def commit(self) -> None:
        """See Work."""
        self.raw.commit()

    def rollback(self) -> None:
        """See Work."""
        self.raw.rollback()

    def close(self, *, reusable: bool) -> None:
        """See Work. If another thread is still within a call, it closes the connection at the end of the call."""
        free = self.lent.cut_off()
        self.lent.afterwards(partial(self._leave, reusable=reusable and free))

    def _leave(self, *, reusable: bool) -> None:
        if not reusable:
            with suppress(Exception):  # SQLite continues a transaction after close as long as there is an open cursor
                self.raw.rollback()
        self.let_go(reusable=reusable)

    def let_go(self, *, reusable: bool) -> None:
        """Return the connection to its owner, or close it."""
        raise NotImplementedError


class _OwnWork(LocalWork):
    """A branch on a connection of its own."""

    def __init__(self, raw: Any) -> None:
        self.raw = raw
        self.handle = self.lent = LocalConnection(raw)

    def begin(self, xid: Any) -> None:
        """Do nothing: the first statement begins the transaction."""

    def flush(self) -> None:
        """Do nothing: a connection sends at once."""

    def let_go(self, *, reusable: bool) -> None:  # noqa: ARG002 - none is used again
        close_quietly(self.raw)


class LocalRules(DecidingDatabase[HandleT]):
    """The rules of databases that cannot prepare, for every kind of connection. Only one such resource can take part in a transaction.

    The table ``bascule_decisions``, which ``check`` creates, has the decisions. Rows are deleted when nobody needs them.
    """

    def __init__(self, name: str, *, placeholder: str, **rest: Any) -> None:
        """Use ``placeholder`` as a parameter in SQL: ``?`` for sqlite3, ``%s`` for drivers of MySQL and MariaDB."""
        super().__init__(name, table=DecisionTable(placeholder), **rest)
        self._located = False
        self._tried_out = False  # whether a test has shown that a rollback on a connection undoes the transaction
        self._check_failed = False

    @property
    def decides(self) -> bool:
        """See Decides."""
        return True

    def start(self, xid: Xid, *, timeout_s: float) -> HandleT:
        """See Resource. Checks the database first if it was unavailable when its manager opened. Raises InvalidInput like ``check``."""
        if self._check_failed:
            self.check()
        try:
            return super().start(xid, timeout_s=timeout_s)
        except ResourceError as error:
            if isinstance(error.cause, InvalidInput):
                raise error.cause from None
            raise

    def check(self) -> None:
        """See Checks."""
        self._check_failed = True
        with translated(), self.connected() as raw:
            self._locate(raw)
            self._table.create(raw)
            raw.commit()
            stays = self._table.outlives_rollback(raw)
        if stays:
            raise InvalidInput(
                f"{self.name}: rows in table {TABLE} survive a rollback. Open connections without autocommit, and use a storage engine "
                "with transactions"
            )
        self._check_failed, self._tried_out = False, True

    def begun(self, raw: Any, timeout_s: float) -> None:  # noqa: ARG002 - the database has no timeout
        """See DatabaseResource."""
        self._locate(raw)
        if not self._tried_out:
            self._try_out(raw)
        self._table.mark(raw)
        self._tried_out = True

    def _try_out(self, raw: Any) -> None:
        """Check that a transaction lasts until a method of the connection ends it. Raises InvalidInput for autocommit.

        ``check`` is called only if the manager has several resources. The check here needs no table.
        """
        self._table.mark(raw)
        lasts = self._is_marked(raw)
        self._table.mark(raw)
        raw.rollback()
        if not lasts or self._is_marked(raw):
            raise InvalidInput(
                f"{self.name}: the connection has autocommit, so its commit and rollback do nothing. Open connections without autocommit"
            )

    def _is_marked(self, raw: Any) -> bool:
        """Return whether a transaction has the mark, and remove the mark."""
        try:
            self._table.remove_mark(raw)
        except Exception:
            raw.cursor().execute("SELECT 1")  # raises an error if the connection is lost
            return False
        return True

    def _gone(self, xid: Xid, *, reusable: bool = True) -> None:
        self._tried_out = self._tried_out and reusable  # after an outage, the database may have other settings
        super()._gone(xid, reusable=reusable)

    def _locate(self, raw: Any) -> None:
        """Find the database of the table. SQLite has neither the function nor statements that select another database."""
        if self._located:
            return
        try:
            self._table.locate(raw, "SELECT DATABASE()", "`")
        except Exception:
            raw.cursor().execute("SELECT 1")  # raises an error if the connection is lost
        self._located = True

    def vote(self, raw: Any, xid: Xid) -> Vote:
        """See DatabaseResource."""
        self.refuse_failed(raw, xid)
        return Vote.YES

    def refuse_failed(self, raw: Any, xid: Xid) -> None:
        """See DatabaseResource. Raises BranchRolledBack if the database has ended the transaction: the rest would be committed alone."""
        try:
            self._table.remove_mark(raw)
        except Exception as error:
            raise BranchRolledBack(
                f"{self.name} has ended the transaction of branch {xid} before its commit: it was rolled back because of an error (a "
                "deadlock), or a statement has committed it implicitly (in MySQL and MariaDB, for example, CREATE TABLE)",
                cause=error,
            ) from error

    def has_decisions(self, raw: Any) -> bool:
        """See DecidingDatabase."""
        self._locate(raw)
        self._table.create(raw)
        return True

    def listed(self, raw: Any) -> Sequence[Xid]:  # noqa: ARG002
        """See DatabaseResource: nothing is ever prepared."""
        return []

    def _from_outside(self, xid: Xid, outcome: Outcome) -> None:
        raise UnknownXid(f"{self.name} has no prepared branch {xid} ({outcome})")


class LocalDatabaseResource(LocalRules[Any]):
    """A database that cannot prepare. The handle is a connection."""

    def __init__(
        self,
        name: str,
        connect: Callable[[], Any],
        *,
        placeholder: str = "?",
        priority: int = CommitPriority.DATABASE,
        violations: Collection[enum.StrEnum] = frozenset(),
    ) -> None:
        """``connect`` opens a connection that has no autocommit and that any thread may use (SQLite: ``check_same_thread``).

        See LocalRules for ``placeholder`` and CommitPriority for ``priority``.
        """
        super().__init__(name, placeholder=placeholder, priority=priority, violations=violations)
        self._connect = connect

    def opened(self, xid: Xid) -> Work[Any]:  # noqa: ARG002 - the database does not know it
        """See DatabaseResource."""
        return _OwnWork(self._connect())

    def connected(self) -> AbstractContextManager[Any]:
        """See DatabaseResource."""
        return connection_of(self._connect)
