"""PostgreSQL as a resource: with PREPARE TRANSACTION, or with its commit as the decision if the server has no prepared transactions."""

from __future__ import annotations

from bascule.core.extras import require

require("postgres")

import asyncio
import copy
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg.conninfo import conninfo_to_dict
from psycopg.pq import TransactionStatus
from psycopg.rows import tuple_row
from psycopg.sql import quote

from bascule.core.errors import InvalidInput, Unavailable
from bascule.xa.database import IDLE_MAX, DbapiResource, HandleT
from bascule.xa.database_errors import translated
from bascule.xa.deciding_database import DecidingDatabase
from bascule.xa.decision_table import CREATE, SETTING, TABLE, DecisionTable, qualified, row_of
from bascule.xa.errors import BranchRolledBack, ResourceError, ResourceFailed, RetryLater
from bascule.xa.log import Decision, Outcome
from bascule.xa.psycopg_loop import Finished, LoopConnection, interrupt, leave_end_to_manager
from bascule.xa.resource import CommitPriority, Vote
from bascule.xa.xid import Xid

#: By SQLSTATE: why this connection cannot finish a prepared branch although another connection can.
_NOT_NOW = {
    "42501": "connect as the role that prepared the transaction, or as a superuser",
    "25006": "the server is a standby; connect to the primary, for example with target_session_attrs=read-write",
}

_SCHEMA = f"SELECT nspname FROM pg_namespace n JOIN pg_class c ON c.relnamespace = n.oid WHERE c.oid = to_regclass('{TABLE}')"
_PRIVILEGES = ("SELECT", "INSERT", "DELETE")
_MAY_USE_TABLE = "SELECT " + " AND ".join(f"has_table_privilege('{TABLE}', '{each}')" for each in _PRIVILEGES)
#: All tables of decisions in the database, in any schema, and whether this role may use each: a table that it owns, or that has the same
#: owner as the table that it finds.
_TABLES = (
    "SELECT nspname, (has_schema_privilege(n.oid, 'USAGE') AND "
    + " AND ".join(f"has_table_privilege(c.oid, '{each}')" for each in _PRIVILEGES)
    + " AND (pg_get_userbyid(relowner) = current_user OR relowner = (SELECT relowner FROM pg_class WHERE oid = to_regclass(%s)))) IS TRUE "
    f"FROM pg_class c JOIN pg_namespace n ON c.relnamespace = n.oid WHERE relname = '{TABLE}' AND relkind IN ('r', 'p') "
    "AND relpersistence <> 't' ORDER BY nspname"
)
#: Differs after a crash, whether the server or only one of its sessions was killed, and on another server: a restart after a crash discards
#: the statistics.
_SERVER_RUN = (
    "SELECT concat(extract(epoch FROM pg_postmaster_start_time())::numeric, '/', "
    "extract(epoch FROM pg_stat_get_bgwriter_stat_reset_time())::numeric)"
)
#: Differs on a server that was promoted from a standby, or restored by archive recovery: both may lack the newest transactions, and give
#: their numbers to others. Not on one restored from a snapshot of its volume, or from a base backup without recovery.signal.
_HISTORY = "SELECT concat(system_identifier, '/', left(pg_walfile_name(pg_current_wal_insert_lsn()), 8)) FROM pg_control_system()"
_SAVEPOINT = "bascule_history"
#: A crash of the server would lose a decision that was committed without waiting for the disk, after others have obeyed the decision.
_DURABLE = "SELECT set_config('synchronous_commit', 'on', true) WHERE current_setting('synchronous_commit') = 'off'"
_GRANT = f"GRANT {', '.join(_PRIVILEGES)} ON {TABLE} TO"
#: The setting marks the database transaction of a branch: SET LOCAL ends with the transaction that it was made in.
_MARK = f"SET LOCAL {SETTING} = 'begun'"
_MARKED = f"current_setting('{SETTING}', true) = 'begun'"
#: The number of a transaction: NULL if it has written nothing, and '' if it may have written on a foreign server only, without a number.
_NUMBER = (
    f"SELECT ({_MARKED}) IS TRUE, coalesce(pg_current_xact_id_if_assigned()::text, "
    "CASE WHEN EXISTS (SELECT FROM pg_foreign_server) THEN '' END)"
)


class PostgresRules(DecidingDatabase[HandleT]):
    """The special rules of PostgreSQL, for every kind of connection. ``raw`` is a psycopg connection.

    A branch that has written nothing votes read-only. PREPARE TRANSACTION of a failed transaction rolls it back and reports success, so the
    state is checked before. The transaction number, kept until the end, distinguishes a branch that somebody finished by hand from a branch
    that was told before. A number counts only in the history of the server in which it was given.
    """

    commits_with_row = True

    def __init__(self, name: str, *, prepared: bool | None = None, **rest: Any) -> None:
        """Set whether branches are prepared; None means if the server has ``max_prepared_transactions`` above 0.

        If branches are not prepared, the commit of the database is the decision of the transaction.
        """
        super().__init__(name, table=DecisionTable(cursor=_tuples), **rest)
        self._numbers: dict[Xid, str] = {}
        self._runs: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by connection
        self._histories: WeakKeyDictionary[Any, str] = WeakKeyDictionary()  # by connection
        self._run_of: dict[Xid, str] = {}  # of branches that commit in one phase
        self._prepares = prepared
        self._checked = False

    def begun(self, raw: Any, timeout_s: float) -> None:
        """Limit the idle time, so that a stalled application loses its locks at the transaction's deadline. Mark the transaction."""
        # psycopg would prepare a statement that it has seen several times; a prepared statement cannot have two commands.
        raw.execute(f"SET LOCAL idle_in_transaction_session_timeout = {max(1, int(timeout_s * 1000))}; {_MARK}", prepare=False)
        if self._prepares is None:
            self._prepares = _prepares(raw)
        if not self._prepares and not self._checked:  # the server was unavailable when the manager opened
            self.check()

    def refuse_failed(self, raw: Any, xid: Xid) -> None:
        """See DatabaseResource."""
        if raw.info.transaction_status == TransactionStatus.INERROR:
            raise BranchRolledBack(f"a statement of branch {xid} failed, and PostgreSQL aborted the transaction")

    def vote(self, raw: Any, xid: Xid) -> Vote:
        """See DatabaseResource."""
        self.refuse_failed(raw, xid)
        marked, number = _row(raw, _NUMBER)
        if not marked:
            raise _replaced(xid.gtrid)
        if number is None:
            return Vote.READ_ONLY
        if number:
            history = self._history(raw)
            self._numbers[xid] = f"{number}@{history}" if history else number
        return Vote.YES

    def _history(self, raw: Any) -> str:
        """Return the history of a server within a transaction. Return "" if the server does not tell it, as some managed services."""
        if raw not in self._histories:
            raw.execute(f"SAVEPOINT {_SAVEPOINT}")
            try:
                history = _one(raw, _HISTORY)
            except psycopg.Error:
                raw.execute(f"ROLLBACK TO SAVEPOINT {_SAVEPOINT}")
                history = ""
            raw.execute(f"RELEASE SAVEPOINT {_SAVEPOINT}")
            self._histories[raw] = history
        return self._histories[raw]

    def vote_alone(self, raw: Any, xid: Xid) -> Vote:
        """See DatabaseResource. Remember the run of the server.

        A crash may lose the number of a transaction that has not ended, and the server then gives the number to another transaction.
        """
        vote = self.vote(raw, xid)
        if vote is Vote.YES:
            if raw not in self._runs:
                self._runs[raw] = _one(raw, _SERVER_RUN)
            self._run_of[xid] = self._runs[raw]
        return vote

    def listed(self, raw: Any) -> Sequence[Xid]:
        """Return the prepared branches of this database. PostgreSQL lists all databases. Raises ResourceFailed for a standby."""
        self._refuse_standby(raw)
        database = _one(raw, "SELECT current_database()")
        recovered = [each for each in raw.tpc_recover() if each.database == database and each.format_id is not None]
        raw.rollback()
        return [Xid(each.format_id, each.gtrid.encode(), each.bqual.encode()) for each in recovered]

    @property
    def decides(self) -> bool | None:
        """See Decides. Known once the server was asked."""
        return None if self._prepares is None else not self._prepares

    def check(self) -> None:
        """See Checks. Creates the table of decisions if branches are not prepared."""
        failure: Exception | None = None
        with translated(), self.connected() as raw:
            self._refuse_standby(raw)
            possible = _prepares(raw)
            prepares = possible if self._prepares is None else self._prepares
            if not prepares and not self.has_decisions(raw):
                try:
                    self._table.create(raw)
                except psycopg.errors.InsufficientPrivilege as error:
                    failure = error
            if not prepares and failure is None:
                self._table.locate(raw, _SCHEMA, '"')
            allowed = prepares or failure is not None or _one(raw, _MAY_USE_TABLE)
            raw.commit()
        if failure is not None:
            raise Unavailable(
                f"{self.name}: could not create the table of decisions: {failure}; run as the owner of the table: {CREATE.format(TABLE)}"
            ) from failure
        if not allowed:
            raise Unavailable(
                f"{self.name}: the role lacks privileges on the table of decisions; run as the owner of the table: {_GRANT} <role>"
            )
        if prepares and not possible:
            raise Unavailable(
                f"{self.name}: PostgreSQL has max_prepared_transactions = 0; set max_prepared_transactions to the largest number of "
                "concurrent transactions, or leave out prepared=True"
            )
        self._prepares, self._checked = prepares, True

    def has_decisions(self, raw: Any) -> bool:
        """See DecidingDatabase. Raises ResourceFailed for a standby."""
        self._refuse_standby(raw)
        if _one(raw, "SELECT to_regclass(%s) IS NOT NULL", self._table.name) is not True:
            return False
        self._table.locate(raw, _SCHEMA, '"')
        return True

    def tables(self, raw: Any, gtrid: bytes | None = None) -> Sequence[DecisionTable]:
        """See DecidingDatabase. A process with another ``search_path`` may have made its decisions in the table of another schema.

        The tables of other owners are not touched: their triggers would run with the rights of this role. Raises ResourceError if one of
        them may be the table of this program.
        """
        own = [self._table] if self.has_decisions(raw) else []
        found = [(qualified(schema, '"'), usable) for schema, usable in _tuples(raw).execute(_TABLES, (self._table.name,)).fetchall()]
        others = [(name, usable) for name, usable in found if name != self._table.name]
        hidden = [name for name, usable in others if not usable]
        if hidden and not own and (gtrid is not None or self._decides_here(raw)):
            raise ResourceError(
                f"{self.name}: this role finds no table of decisions, and may not use {', '.join(hidden)}; connect as the role whose "
                f"process decides, or, if the table belongs to another application, run: {CREATE.format(TABLE)}"
            )
        return [*own, *(self._table.elsewhere(name) for name, usable in others if usable)]

    def _decides_here(self, raw: Any) -> bool:
        return not (_prepares(raw) if self._prepares is None else self._prepares)

    def write_row(self, raw: Any, decision: Decision) -> None:
        """See DecidingDatabase. If a statement fails, PostgreSQL does not run the next one.

        Raises BranchRolledBack if the transaction is not the one that the branch began: its row has no key then, and is refused.
        """
        gtrid, text = (quote(each, raw) for each in row_of(decision))
        insert = f"INSERT INTO {self._table.name} (gtrid, decision) VALUES (CASE WHEN {_MARKED} THEN {gtrid} END, {text})"
        try:
            _tuples(raw).execute(f"{_DURABLE}; {insert}; COMMIT".encode(raw.info.encoding))
        except psycopg.errors.NotNullViolation as error:
            if error.diag.table_name == TABLE:
                raise _replaced(decision.gtrid, error) from error
            raise

    def make_durable(self, raw: Any) -> None:
        """See DecidingDatabase."""
        _tuples(raw).execute(_DURABLE)

    def is_decided(self, error: Exception) -> bool:
        """See DecidingDatabase. The commit may fail too, because of a deferred constraint of a table of the application."""
        return isinstance(error, psycopg.errors.UniqueViolation) and error.diag.table_name == TABLE

    def _from_outside(self, xid: Xid, outcome: Outcome) -> None:
        try:
            super()._from_outside(xid, outcome)
        except ResourceError as error:
            reason = _NOT_NOW.get(getattr(error.cause, "sqlstate", None) or "")
            if reason is None:
                raise
            raise RetryLater(f"{self.name}: {error}: {reason}") from error

    def token(self, xid: Xid) -> str:
        """See TellsOutcome. The token is the number of the transaction and the history of the server."""
        return self._numbers.get(xid, "")

    def outcome(self, xid: Xid, token: str = "") -> Outcome | None:
        """See TellsOutcome. Raises RetryLater while the branch is being finished, ResourceFailed for a standby."""
        if not (known := token or self.token(xid)):
            return None
        number, _, history = known.partition("@")
        with translated(), self.connected() as raw:
            self._refuse_standby(raw)
            if history and history != _one(raw, _HISTORY):
                return None  # the server may have lost the transaction and given its number to another one
            status = _one(raw, "SELECT pg_xact_status(%s::xid8)", number)
            run = self._run_of.get(xid)
            if run is not None and status != "aborted" and run != _one(raw, _SERVER_RUN):
                return None  # it may be the status of a later transaction with the same number
        if status == "in progress":
            raise RetryLater(f"branch {xid} is being finished by another session")
        return {"committed": Outcome.COMMIT, "aborted": Outcome.ROLLBACK}.get(str(status))

    def _refuse_standby(self, raw: Any) -> None:
        """Raise ResourceFailed for a standby, which may lag: an unlisted branch may be prepared, and a listed branch may have ended."""
        if _one(raw, "SELECT pg_is_in_recovery()"):
            raise ResourceFailed(
                f"{self.name}: the server is a standby; connect to the primary, for example with target_session_attrs=read-write"
            )

    def forget(self, xid: Xid) -> None:
        """See Resource."""
        if self._numbers.pop(xid, None) is None:
            super().forget(xid)

    def _gone(self, xid: Xid, *, reusable: bool = True) -> None:
        if reusable:
            self._run_of.pop(xid, None)
            self._numbers.pop(xid, None)
        super()._gone(xid, reusable=reusable)


class PostgresResource(PostgresRules[psycopg.Connection[Any]], DbapiResource[psycopg.Connection[Any]]):
    """A PostgreSQL database through psycopg 3. The handle is a connection: use ``execute``, not commit and rollback."""

    def __init__(
        self,
        name: str,
        conninfo: str,
        *,
        idle_max: int = IDLE_MAX,
        priority: int = CommitPriority.DATABASE,
        prepared: bool | None = None,
    ) -> None:
        """Connect with ``conninfo``, a connection string of libpq. Up to ``idle_max`` connections are kept between branches.

        See CommitPriority for ``priority`` and PostgresRules for ``prepared``. Raises InvalidInput if libpq cannot parse ``conninfo``.
        """
        try:
            conninfo_to_dict(conninfo)
        except psycopg.Error:  # its text may quote a password
            form = "use postgresql://USER@HOST/DATABASE or host=HOST dbname=DATABASE"
            raise InvalidInput(f"connection string of resource {name!r} is invalid; {form}") from None
        super().__init__(name, prepared=prepared, connect=lambda: psycopg.connect(conninfo), idle_max=idle_max, priority=priority)

    def lent(self, connection: psycopg.Connection[Any]) -> psycopg.Connection[Any]:
        """Return a copy of the object on the same session: it becomes invalid with its branch, and the session stays open."""
        handle = copy.copy(connection)
        leave_end_to_manager(handle)
        return handle

    def start_on_loop(self, xid: Xid, *, timeout_s: float, loop: asyncio.AbstractEventLoop) -> LoopConnection:
        """See WorksOnLoop. The handle is a psycopg.AsyncConnection for the tasks of the loop."""
        self.start(xid, timeout_s=timeout_s)
        with self._lock:
            work = self._work[xid]
        self.cut_off(work.handle)
        handle = LoopConnection.of(work.raw, loop)
        work.handle = handle  # type: ignore[assignment]  # in the place of the one for threads
        return handle

    def interrupt(self, connection: psycopg.Connection[Any]) -> bool:
        """See DbapiResource. A thread in a call on the handle holds the lock of the connection, because the handle is a copy."""
        return interrupt(connection)

    def cut_off(self, handle: psycopg.Connection[Any] | LoopConnection) -> None:
        """See DbapiResource. Afterwards the handle and its cursors report that they are closed."""
        if isinstance(handle, LoopConnection):
            handle.cut_off()
        else:
            handle.pgconn = Finished(handle.pgconn.backend_pid)  # type: ignore[assignment]


def _prepares(raw: Any) -> bool:
    return bool(_one(raw, "SHOW max_prepared_transactions") != "0")


def _tuples(raw: Any) -> Any:
    return raw.cursor(row_factory=tuple_row)


def _one(raw: Any, query: str, *parameters: str) -> Any:
    """Return the single value of a query, whatever row type the application has set on the connection."""
    return _row(raw, query, *parameters)[0]


def _row(raw: Any, query: str, *parameters: str) -> tuple[Any, ...]:
    found: tuple[Any, ...] = _tuples(raw).execute(query, parameters).fetchone()
    return found


def _replaced(gtrid: bytes, cause: BaseException | None = None) -> BranchRolledBack:
    """Return the error for a branch whose database transaction the application has ended, by any statement or method."""
    return BranchRolledBack(
        f"the application has ended the database transaction of {gtrid.decode()} with COMMIT, ROLLBACK or RESET ALL. Statements before a "
        "COMMIT are committed alone; all others are rolled back. Let the transaction manager end the transaction",
        cause=cause,
    )
