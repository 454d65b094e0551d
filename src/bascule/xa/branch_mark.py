"""A mark in the database transaction of a branch, for any driver: it shows whether the transaction is the one that the branch has begun.

A statement of the application (``COMMIT``, ``ROLLBACK``) may have ended the transaction, or a failed statement may have aborted it. Drivers
of PostgreSQL notice neither, and would prepare or commit the rest of the work. MySQL and MariaDB refuse such statements in a branch.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from typing import Any, Final

from bascule.xa.database_errors import in_words_of_xa
from bascule.xa.decision_table import SETTING, value_of
from bascule.xa.errors import BranchRolledBack, Code, ResourceFailed
from bascule.xa.xid import Xid

_PUT: Final = f"SET LOCAL {SETTING} = 'begun'"
#: Failed trials after which a database has no marks. A lost connection may be the reason of one.
TRIALS: Final = 3
_LOOK: Final = f"SELECT current_setting('{SETTING}', true)"


class BranchMark:
    """The marks of the branches of one database: a setting of PostgreSQL that ends with its transaction. Other databases have no marks."""

    def __init__(self, trial: Callable[[], AbstractContextManager[Any]]) -> None:
        """``trial`` yields a connection with a branch in which nobody works, and rolls the branch back."""
        self._trial = trial
        self.works: bool | None = None  # None: not known yet
        self._failures = 0
        self._unmarked: set[int] = set()  # connections of branches that began before it was known

    def put(self, raw: Any) -> None:
        """Mark the transaction of a connection, if the database can."""
        if self.works is None and (found := self._tried()) is not None:
            self.works = found
        if self.works:
            _put(raw)
            self._unmarked.discard(id(raw))
        elif self.works is None:
            self._unmarked.add(id(raw))

    def check(self, raw: Any, xid: Xid) -> None:
        """Raise BranchRolledBack if the transaction of a connection has failed, or is not the one that was marked."""
        if not self.works or id(raw) in self._unmarked:
            return
        try:
            there = _is_there(raw)
        except Exception as error:
            said = in_words_of_xa(error)
            if isinstance(said, BranchRolledBack):
                raise said from error
            raise _ended(xid, Code.XA_RBCOMMFAIL if isinstance(said, ResourceFailed) else Code.XA_RBROLLBACK, error) from error
        if not there:
            raise _ended(xid, Code.XA_RBROLLBACK)

    def _tried(self) -> bool | None:
        with self._trial() as raw:
            try:
                _put(raw)
                return _is_there(raw)
            except Exception:
                self._failures += 1
                return False if self._failures >= TRIALS else None


def _put(raw: Any) -> None:
    with closing(raw.cursor()) as cursor:
        cursor.execute(_PUT)


def _is_there(raw: Any) -> bool:
    with closing(raw.cursor()) as cursor:
        cursor.execute(_LOOK)
        return value_of(cursor.fetchone()) == "begun"


def _ended(xid: Xid, code: Code, error: Exception | None = None) -> BranchRolledBack:
    return BranchRolledBack(
        f"the database transaction of branch {xid} has failed, or the application has ended it. Statements before a COMMIT are committed "
        f"alone; all others are rolled back. Let the transaction manager end the transaction{'' if error is None else f': {error}'}",
        code,
        cause=error,
    )
