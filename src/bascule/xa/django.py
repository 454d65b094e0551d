"""Django as a resource: the ORM of the thread that works in a transaction takes part in it, by the database's connection in ``DATABASES``.

database = django_resource("shop-db")
manager = TransactionManager("shop", FileLog(Path("shop.xalog")), [database, broker])

@manager.transactional()
def pay(order: int) -> None:
    Payment.objects.create(order=order)
    manager.enlist(broker).send(Queue("confirmations"), f"paid: {order}")
"""

from __future__ import annotations

from bascule.core.extras import require

require("django")

import asyncio
import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from django.db import connections
from django.db.backends.signals import connection_created

from bascule.core.errors import InvalidInput
from bascule.xa.context_value import ContextValue
from bascule.xa.database import DatabaseResource, Work
from bascule.xa.django_connection import BranchConnection, branch_connection, discard, plain_connection
from bascule.xa.driver_xids import driver_xid
from bascule.xa.errors import OutOfOrder
from bascule.xa.local_database import LocalConnection, LocalRules, LocalWork
from bascule.xa.postgres import PostgresRules
from bascule.xa.psycopg_loop import Finished, interrupt
from bascule.xa.resource import CommitPriority
from bascule.xa.transaction import Transaction
from bascule.xa.xid import Xid

#: The parameter placeholder in the driver's SQL, by Django's name of the database.
PLACEHOLDERS = {"sqlite": "?", "mysql": "%s"}


class _BranchWork:
    """A branch on the driver connection that Django's own connection of the thread has lent."""

    def __init__(self, branch: Any, raw: Any) -> None:
        self.handle = branch
        self.raw = raw

    def begin(self, xid: Any) -> None:
        self.raw.tpc_begin(xid)
        self.handle.connection = copy.copy(self.raw)

    def interrupt(self) -> bool:
        return interrupt(self.raw)

    def flush(self) -> None:
        self.handle.refuse_rollback_only()

    def cut_off(self) -> None:
        self.handle.connection.pgconn = Finished(self.raw.pgconn.backend_pid)

    def prepare(self) -> Any:
        return self.raw.tpc_prepare()

    def commit(self) -> None:
        self.raw.tpc_commit()

    def rollback(self) -> None:
        self.raw.tpc_rollback()

    def close(self, *, reusable: bool) -> None:
        if reusable:
            self.cut_off()
            self.handle.returned = self.raw
        else:
            discard(self.raw)


class _LocalBranchWork(LocalWork, _BranchWork):
    """A branch with a driver that has no two-phase commit."""

    def begin(self, xid: Any) -> None:  # noqa: ARG002 - the transaction has begun
        self.handle.connection = self.lent = LocalConnection(self.raw)

    def let_go(self, *, reusable: bool) -> None:
        _BranchWork.close(self, reusable=reusable and self.handle.in_own_thread)


class DjangoDatabase(DatabaseResource[Any]):
    """The common rules of Django's databases. The handle is Django's connection."""

    def __init__(self, name: str, using: str, **rest: Any) -> None:
        super().__init__(name, **rest)
        self._using = using
        self._current: ContextValue[Any] = ContextValue(f"bascule.xa.django.{name}")
        connection_created.connect(self._created)

    def follow(self, transaction: Transaction | None) -> Callable[[], None]:
        """See FollowsTransaction. Raises OutOfOrder if Django's connection of the thread is already in a transaction."""
        branch = None if transaction is None else self._joined(transaction)
        restore = self._current.set(branch)
        self.place()

        def take_back() -> None:
            restore()
            if branch is not None and branch.in_own_thread:
                branch.give_back()
            self.place()

        return take_back

    def place(self) -> None:
        """Let Django find the connection of the current transaction in this thread, or its own connection without one."""
        if not _on_loop() and self._is_free():
            plain, branch = plain_connection(self._using), self._current.get()
            mine = branch is not None and branch.plain is plain and not branch.transaction.over
            connections[self._using] = branch if mine else plain

    def opened(self, xid: Xid) -> Work[Any]:
        """See DatabaseResource. Raises OutOfOrder in a thread whose current transaction is another one."""
        branch = self._current.get()
        if branch is None or branch.transaction.gtrid != xid.gtrid or not branch.in_own_thread or _on_loop():
            raise OutOfOrder(
                f"{self.name}: branch {xid} does not belong to the current transaction of this thread. Use the ORM in the thread that "
                "entered the transaction with `with manager.begin()`; in asyncio programs, use the ORM within one sync_to_async function"
            )
        with self._set_aside():
            if branch.plain.connection is not None:
                with suppress(Exception):  # an idle connection may be broken; a new one shows whether the database is available
                    return self._begun(branch, xid)
            return self._begun(branch, xid)

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """See DatabaseResource."""
        connection = connections.create_connection(self._using)
        try:
            with self._set_aside():
                connection.set_autocommit(False)
            yield connection.connection
        finally:
            with suppress(Exception):
                connection.close()

    def after_fork(self) -> None:
        """See Forks."""
        super().after_fork()
        if self._current.get() is not None:
            self._current.set(None)
            self.place()

    def work_on(self, branch: Any, raw: Any, xid: Xid) -> Work[Any]:
        """Begin a branch on the driver connection."""
        raise NotImplementedError

    def _begun(self, branch: Any, xid: Xid) -> Work[Any]:
        raw = branch.borrow()
        try:
            return self.work_on(branch, raw, xid)
        except BaseException:
            discard(raw)
            raise

    def _joined(self, transaction: Transaction) -> Any:
        plain = plain_connection(self._using)
        if not self._is_free():
            raise OutOfOrder(f"Django's connection {self._using!r} is used by a transaction of another transaction manager in this thread")
        if plain.in_atomic_block or (plain.connection is not None and not plain.autocommit):
            raise OutOfOrder(
                f"an atomic block of Django's connection {self._using!r} is open. Begin the transaction outside of the block "
                "(with ATOMIC_REQUESTS: transaction.non_atomic_requests; in tests: TransactionTestCase)"
            )
        self._watch(plain)
        return branch_connection(plain, transaction, self)

    def _is_free(self) -> bool:
        found = connections[self._using]
        return not isinstance(found, BranchConnection) or found.resource is self

    @contextmanager
    def _set_aside(self) -> Iterator[None]:
        """Allow statements on Django's own connections within the block."""
        restore = self._current.set(None)
        try:
            yield
        finally:
            restore()

    def _created(self, connection: Any, **_: Any) -> None:
        """Handle Django's signal that a connection was opened."""
        if connection.alias == self._using:
            self._watch(connection)

    def _watch(self, plain: Any) -> None:
        if self._refuse_outside not in plain.execute_wrappers:
            plain.execute_wrappers.append(self._refuse_outside)

    def _refuse_outside(self, execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """Surround each statement. One that is not part of the current transaction would commit by itself."""
        branch = self._current.get()
        if branch is not None and context["connection"] is not branch and not branch.transaction.over:
            raise OutOfOrder(
                f"Django's connection {self._using!r} takes no part in the current transaction {branch.transaction.id}: the connection "
                "belongs to another thread, or was fetched before the transaction began. Use "
                f"connections[{self._using!r}] in the thread of the transaction, or suspend the transaction with `suspended()`"
            )
        return execute(sql, params, many, context)


class DjangoPostgresResource(DjangoDatabase, PostgresRules[Any]):
    """A PostgreSQL database of Django, through psycopg 3. ``django_resource`` creates it."""

    def work_on(self, branch: Any, raw: Any, xid: Xid) -> Work[Any]:
        """See DjangoDatabase."""
        work = _BranchWork(branch, raw)
        work.begin(driver_xid(raw, xid))
        return work


class DjangoLocalResource(DjangoDatabase, LocalRules[Any]):
    """A database of Django that cannot prepare. ``django_resource`` creates it."""

    def work_on(self, branch: Any, raw: Any, xid: Xid) -> Work[Any]:
        """See DjangoDatabase."""
        work = _LocalBranchWork(branch, raw)
        work.begin(xid)
        return work


def django_resource(
    name: str, using: str = "default", *, priority: int = CommitPriority.DATABASE, prepared: bool | None = None
) -> DjangoPostgresResource | DjangoLocalResource:
    """Return the resource for a database in ``DATABASES``, where ``using`` is its alias.

    See CommitPriority for ``priority`` and PostgresRules for ``prepared``; SQLite, MySQL and MariaDB cannot prepare. Raises InvalidInput
    for other databases, and if the settings have AUTOCOMMIT = False.
    """
    connection = plain_connection(using)
    if not connection.settings_dict["AUTOCOMMIT"]:
        raise InvalidInput(
            f"resource {name}: DATABASES[{using!r}] has AUTOCOMMIT = False; transactions need Django's default. Set AUTOCOMMIT = True"
        )
    if connection.vendor == "postgresql":
        return DjangoPostgresResource(name, using, priority=priority, prepared=prepared)
    if connection.vendor not in PLACEHOLDERS or prepared:
        raise InvalidInput(
            f"resource {name}: DATABASES[{using!r}] is a {connection.display_name} database, "
            + (
                "which cannot prepare transactions; leave out prepared=True"
                if connection.vendor in PLACEHOLDERS
                else f"which is not supported; use one of postgresql, {', '.join(PLACEHOLDERS)}"
            )
        )
    return DjangoLocalResource(name, using, priority=priority, placeholder=PLACEHOLDERS[connection.vendor])


def _on_loop() -> bool:
    """Return True if the calling thread runs an event loop, where Django's ORM refuses to work."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
