"""What SQLAlchemy's databases as resources have in common: the sessions of the application work in the branch of its transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, cast

from sqlalchemy.engine import Connection, Engine
from sqlalchemy.orm import Session

from bascule.xa.context_value import ContextValue
from bascule.xa.database import DatabaseResource, Work
from bascule.xa.errors import BranchRolledBack, OutOfOrder
from bascule.xa.sqlalchemy_joined import JoinedBranch, JoinedConnection, JoiningEngine
from bascule.xa.transaction import Transaction
from bascule.xa.xid import Xid
from bascule.xa.xid import branch as branch_of


class SessionWork(Work[Session], JoinedBranch, Protocol):
    """A branch on a pooled connection."""

    def lend(self, engine: Engine) -> None:
        """Make a Session as the handle."""


class LentSession:
    """The Session of a branch that is the handle."""

    handle: Any = None
    xid: Xid
    _doomed = ""

    def dbapi_connection(self, engine: Engine) -> Any:
        """See JoinedBranch."""
        raise NotImplementedError

    def lend(self, engine: Engine) -> None:
        """See SessionWork."""
        self._connection = JoinedConnection(engine, self)
        self._connection.begin()
        self.handle = Session(bind=self._connection, join_transaction_mode="rollback_only")

    def doom(self, reason: str) -> None:
        """See JoinedBranch."""
        self._doomed = self._doomed or reason

    def flush(self) -> None:
        """See Work."""
        if not self._doomed:
            self.send()
        if self._doomed:
            raise BranchRolledBack(self._doomed)

    def send(self) -> None:
        """Send the changes that the session has collected."""
        self.handle.flush()

    def take_back(self) -> None:
        """Close the session, which detaches its objects."""
        self.handle.close()
        self._connection.close()


class SqlAlchemyDatabase(DatabaseResource[Session]):
    """The common rules. The application's own sessions take part if they are bound to ``engine``."""

    def __init__(self, name: str, plain: Engine, **rest: Any) -> None:
        super().__init__(name, **rest)
        self._plain = plain
        #: Like the given engine, but its connections take part in the current transaction if there is one.
        self.engine: Engine = JoiningEngine(plain, {}, self)
        self._current: ContextValue[Transaction] = ContextValue(f"bascule.xa.sqlalchemy.{name}")
        self._begun: dict[Xid, SessionWork] = {}  # branches until their end, also while a phase works on them

    def start(self, xid: Xid, *, timeout_s: float) -> Session:
        """See Resource."""
        handle = super().start(xid, timeout_s=timeout_s)
        with self._lock:
            self._begun[xid] = cast("SessionWork", self._work[xid])
        return handle

    def follow(self, transaction: Transaction | None) -> Callable[[], None]:
        """See FollowsTransaction."""
        return self._current.set(transaction)

    def joined(self, engine: Engine) -> SessionWork | None:
        """See Joins. Raises the errors of the transaction's ``enlist``, such as TransactionTimedOut."""
        transaction = self._at_work()
        if transaction is None:
            return None
        self.enlist_in(transaction, engine)
        with self._lock:
            return cast("SessionWork", self._work[branch_of(transaction.gtrid, self.name)])

    def enlist_in(self, transaction: Transaction, engine: Engine) -> None:  # noqa: ARG002 - for those who have several engines
        """Enlist the resource in a transaction, for a connection of an engine."""
        transaction.enlist(self)

    def refuse_outside(self, branch: JoinedBranch | None) -> None:
        """See Joins."""
        transaction = self._at_work()
        if transaction is None:
            return
        # The branch is not in ``_work`` while its sessions are flushed.
        if branch is None or branch.xid != branch_of(transaction.gtrid, self.name):
            raise OutOfOrder(
                f"a SQLAlchemy session or connection of {self.name} that was begun outside of transaction {transaction.id} takes "
                "no part in the transaction. End the session before the transaction begins, open it within the transaction, or suspend the "
                "transaction with `suspended()`"
            )

    def gives_up(self) -> Callable[[str], None] | None:
        """See Joins."""
        transaction = self._at_work()
        return None if transaction is None else partial(self._give_up, transaction)

    def opened(self, xid: Xid) -> Work[Session]:
        """See DatabaseResource."""
        work = self.work_on(self._plain.connect(), xid)
        work.xid = xid
        try:
            work.lend(self.engine)
        except BaseException:
            work.close(reusable=False)
            raise
        return work

    def work_on(self, pooled: Connection, xid: Xid) -> SessionWork:
        """Return a branch that has begun on a connection of the pool. Close the connection if that fails."""
        raise NotImplementedError

    def after_fork(self) -> None:
        """See Forks."""
        super().after_fork()
        self._begun = {}
        self._current.set(None)
        self._plain.dispose(close=False)

    @contextmanager
    def connected(self) -> Iterator[Any]:
        """See DatabaseResource."""
        pooled = self._plain.raw_connection()
        try:
            yield pooled.driver_connection
        finally:
            pooled.close()

    def _give_up(self, transaction: Transaction, reason: str) -> None:
        with self._lock:
            work = self._begun.get(branch_of(transaction.gtrid, self.name))
        if work is None:
            transaction.give_up()
        else:
            work.doom(reason)

    def _gone(self, xid: Xid, *, reusable: bool = True) -> None:
        with self._lock:
            self._begun.pop(xid, None)
        super()._gone(xid, reusable=reusable)

    def _at_work(self) -> Transaction | None:
        transaction = self._current.get()
        return None if transaction is None or transaction.over else transaction
