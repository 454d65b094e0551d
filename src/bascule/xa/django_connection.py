"""Django's connection for one branch, which replaces the thread's own connection while the thread works in the transaction.

To Django it looks like the inside of an ``atomic`` block: ``atomic()`` makes savepoints, ``on_commit()`` keeps its callbacks, and
``commit()``, ``rollback()`` and ``set_autocommit()`` are refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.transaction import TransactionManagementError, atomic

from bascule.core.log import get_log
from bascule.xa.database import close_quietly
from bascule.xa.errors import BranchRolledBack
from bascule.xa.two_phase import TransactionStatus

if TYPE_CHECKING:
    from bascule.xa.django import DjangoDatabase
    from bascule.xa.transaction import Transaction

_log = get_log("bascule.xa")


class BranchConnection:
    """A mixin for the class of a database backend. See ``branch_connection``."""

    #: Django's own connection of the thread. Its driver connection is lent to the branch.
    plain: Any
    transaction: Transaction
    resource: DjangoDatabase
    #: The driver connection after the end of the branch.
    returned: Any = None
    #: Attributes of the backend.
    connection: Any
    cursor: Callable[[], Any]
    errors_occurred: bool
    run_on_commit: list[tuple[object, Any, bool]]
    closed_in_transaction: bool
    needs_rollback: bool
    rollback_exc: BaseException | None

    def join(self, plain: Any, transaction: Transaction, resource: DjangoDatabase) -> None:
        """Replace ``plain`` in a transaction. Instrumentation that was installed on ``plain`` stays active."""
        self.plain, self.transaction, self.resource = plain, transaction, resource
        self.autocommit, self.in_atomic_block, self.atomic_blocks = False, True, [atomic(using=plain.alias)]
        self.execute_wrappers, self.queries_log = plain.execute_wrappers, plain.queries_log
        self.force_debug_cursor = plain.force_debug_cursor
        self._thread = threading.get_ident()
        # Twice: a hook that the application has added meanwhile may mark the transaction.
        transaction.before_completion(lambda: transaction.before_completion(self._before_completion))
        transaction.after_completion(self._completed)

    @property
    def in_own_thread(self) -> bool:
        """Return True in the thread that owns this connection."""
        return self._thread == threading.get_ident()

    def connect(self) -> None:
        """Begin the branch. Django connects with the first statement."""
        self.transaction.enlist(self.resource)

    @contextmanager
    def temporary_connection(self) -> Iterator[Any]:
        """Yield a cursor, as Django does, but keep the connection open for the whole branch."""
        with self.cursor() as cursor:
            yield cursor

    def _close(self) -> None:
        """Do nothing: Django notes that the connection was closed, so the transaction does not commit. The manager ends the session."""

    def borrow(self) -> Any:
        """Take the driver connection of ``plain``, not in autocommit mode. Django opens one if there is none."""
        try:
            self.plain.set_autocommit(False, force_begin_transaction_with_broken_autocommit=True)
        except BaseException:
            with suppress(Exception):
                self.plain.close()
            raise
        raw, self.plain.connection = self.plain.connection, None
        return raw

    def give_back(self) -> None:
        """Return the driver connection to ``plain``, in autocommit mode, or close it if Django has opened another one."""
        raw, self.returned = self.returned, None
        if raw is None:
            return
        if self.plain.connection is not None:
            discard(raw)
            return
        self.plain.connection = raw
        self.plain.errors_occurred |= self.errors_occurred
        try:
            self.plain.set_autocommit(True)
        except Exception:
            with suppress(Exception):
                self.plain.close()

    def _before_completion(self) -> None:
        """See Transaction.before_completion. Without a statement there is no branch, which would refuse the commit."""
        if self.connection is None:
            self.refuse_rollback_only()

    def refuse_rollback_only(self) -> None:
        """Raise BranchRolledBack if Django would not commit the transaction."""
        if self.closed_in_transaction:
            raise BranchRolledBack("the application closed Django's connection within the transaction")
        if not self.needs_rollback:
            return
        error = self.rollback_exc
        while isinstance(error, TransactionManagementError) and error.__cause__ is not None:  # raised later, because of the first error
            error = error.__cause__
        if error is None:
            raise BranchRolledBack(
                "the application marked the transaction for rollback (set_rollback), or an exception left atomic(savepoint=False)"
            )
        raise BranchRolledBack(
            f"an error in the ORM left the transaction unusable, and no atomic block rolled it back: {error}", cause=error
        )

    def _completed(self, status: TransactionStatus) -> None:
        """See Transaction.after_completion. After a timeout, the owning thread is told later."""
        if self.in_own_thread:
            self.give_back()
            self.resource.place()
        if status is TransactionStatus.COMMITTED:
            for _, callback, _ in self.run_on_commit:
                try:
                    callback()
                except Exception as error:
                    _log.error("on_commit callback failed", transaction=self.transaction.id, callback=repr(callback), error=repr(error))


def discard(raw: Any) -> None:
    """Close a driver connection, and tell the pool that it came from."""
    close_quietly(raw)
    if (pool := getattr(raw, "_pool", None)) is not None:
        pool.putconn(raw)


def plain_connection(using: str) -> Any:
    """Return Django's own connection of the calling thread."""
    found = connections[using]
    return found.plain if isinstance(found, BranchConnection) else found


def branch_connection(plain: Any, transaction: Transaction, resource: DjangoDatabase) -> Any:
    """Return the connection that stands for ``plain`` in a transaction."""
    connection = _in_branch(plain.__class__)(plain.settings_dict, plain.alias)
    connection.join(plain, transaction, resource)
    return connection


@cache
def _in_branch(backend: Any) -> Any:
    return type(backend.__name__, (BranchConnection, backend), {"__module__": backend.__module__})
