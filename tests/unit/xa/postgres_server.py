"""A PostgreSQL server in memory, with the methods of psycopg's connection that the resource uses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
from psycopg.pq import ConnStatus, TransactionStatus


class Server:
    """A server in memory: prepared transactions by name, and the statuses of ended_branch transactions by number."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.prepared: dict[str, tuple[str, list[str], psycopg.Xid]] = {}
        self.statuses: dict[str, str] = {}
        self.values: dict[str, object] = {
            "max_prepared_transactions": "100",
            "pg_is_in_recovery": False,
            "current_database": "shop",
            "relowner": [],  # the tables of decisions
            "nspname": "public",
            "to_regclass": False,
            "has_table_privilege": True,
            "pg_postmaster_start_time": "1/1",
            "pg_control_system": "7/00000001",
        }
        self.foreign: list[psycopg.Xid] = []
        self.connections: list[Connection] = []
        self.away = False

    def connect(self, _conninfo: str) -> Connection:
        if self.away:
            raise psycopg.OperationalError("connection refused")
        self.connections.append(Connection(self))
        return self.connections[-1]

    def finish(self, name: str, *, commit: bool) -> None:
        if name not in self.prepared:
            raise psycopg.errors.UndefinedObject(f'prepared transaction with identifier "{name}" does not exist')
        number, rows, _ = self.prepared.pop(name)
        self.end(number, rows, commit=commit)

    def restart(self, statuses: dict[str, str]) -> None:
        """Restart after a crash, with later transactions that have the ``statuses``."""
        self.values["pg_postmaster_start_time"] = "1/2"
        self.statuses |= statuses

    def end(self, number: str, rows: list[str], *, commit: bool) -> None:
        self.rows += rows if commit else []
        self.statuses[number] = "committed" if commit else "aborted"


class Handle:
    """A copy of a connection object. The copy uses the same session until it gets another ``pgconn``."""

    def __init__(self, connection: Connection) -> None:
        self.__dict__["connection"] = connection
        self.__dict__["pgconn"] = SimpleNamespace(backend_pid=4711, status=ConnStatus.OK)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.connection, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "pgconn" or name.startswith("tpc_"):
            self.__dict__[name] = value
        else:
            setattr(self.connection, name, value)


class Connection:
    """The methods of psycopg's connection that the resource uses.

    ``lost`` is "before" or "after": the connection fails before or after the server carries out the next end of a transaction. With
    "crash", the server crashes and calls ``crash``. A ``broken`` connection fails in every statement.
    """

    def __init__(self, server: Server) -> None:
        self.server = server
        self.info = SimpleNamespace(transaction_status=TransactionStatus.IDLE)
        self.lock = threading.Lock()
        self.lost = ""
        self.closed = False
        self.statements: list[str] = []
        self._xid: psycopg.Xid | None = None
        self._number: str | None = None
        self._rows: list[str] = []
        self.marked = False
        self.broken = False
        self.crash: Callable[[], object] = lambda: None
        self._result: Any = None

    def __copy__(self) -> Handle:
        return Handle(self)

    def xid(self, format_id: int, gtrid: str, bqual: str) -> psycopg.Xid:
        return psycopg.Xid.from_parts(format_id, gtrid, bqual)

    def tpc_begin(self, xid: psycopg.Xid) -> None:
        if self.lost:
            raise psycopg.OperationalError("the connection is lost")
        self._xid, self._number, self._rows, self.marked = xid, None, [], False
        self.info.transaction_status = TransactionStatus.INTRANS

    def insert(self, row: str) -> None:
        if self._number is None:
            self._number = str(len(self.server.statuses) + 1)
            self.server.statuses[self._number] = "in progress"
        self._rows.append(row)

    def tpc_prepare(self) -> None:
        self._reach("before")
        assert self._xid is not None
        assert self._number is not None
        self.server.prepared[str(self._xid)] = (self._number, self._rows, self._xid)
        self._reach("after")

    def tpc_commit(self, xid: psycopg.Xid | None = None) -> None:
        self._end(xid, commit=True)

    def tpc_rollback(self, xid: psycopg.Xid | None = None) -> None:
        self._end(xid, commit=False)

    def _end(self, xid: psycopg.Xid | None, *, commit: bool) -> None:
        self._reach("before")
        name = str(xid or self._xid)
        if xid is not None or name in self.server.prepared or self._was_prepared():
            self.server.finish(name, commit=commit)
        elif self._number is not None:
            self.server.end(self._number, self._rows, commit=commit)
        self._xid, self._number, self._rows = None, None, []
        self.info.transaction_status = TransactionStatus.IDLE
        self._reach("after")

    def _was_prepared(self) -> bool:
        return self._number is not None and self.server.statuses[self._number] != "in progress"

    def _reach(self, moment: str) -> None:
        if self.lost == moment:
            if moment == "before" and self._number is not None and str(self._xid) not in self.server.prepared:
                self.server.end(self._number, [], commit=False)
            raise psycopg.OperationalError("the connection is lost")
        if self.lost == "crash":
            self.crash()
            raise psycopg.OperationalError("the connection is lost")

    def tpc_recover(self) -> list[psycopg.Xid]:
        own = [
            psycopg.Xid(each.format_id, each.gtrid, each.bqual, None, "me", self.server.values["current_database"])  # type: ignore[arg-type]
            for _, _, each in self.server.prepared.values()
        ]
        return [*own, *self.server.foreign]

    def cursor(self, **_: Any) -> Connection:
        return self

    def execute(self, query: str, parameters: tuple[str, ...] = (), *, prepare: bool | None = None) -> Connection:
        self.statements.append(query)
        if self.broken:
            raise psycopg.OperationalError("the connection is lost")
        if "pg_current_xact_id_if_assigned" in query:
            self._result = (self.marked, self._number)
        elif "pg_xact_status" in query:
            self._result = self.server.statuses.get(parameters[0])
        elif query in ("COMMIT", "ROLLBACK"):
            self._replace(commit=query == "COMMIT")
        elif not query.startswith(("SET LOCAL", "CREATE TABLE", "SAVEPOINT", "ROLLBACK TO", "RELEASE")):
            self._result = next(value for name, value in self.server.values.items() if name in query)
            if isinstance(self._result, Exception):
                raise self._result
        self.marked = self.marked or "SET LOCAL bascule.branch" in query
        return self

    def _replace(self, *, commit: bool) -> None:
        """End the transaction. The next statement begins another one, as psycopg does."""
        if self._number is not None:
            self.server.end(self._number, self._rows, commit=commit)
        self._number, self._rows, self.marked = None, [], False

    def fetchone(self) -> tuple[Any, ...]:
        return self._result if isinstance(self._result, tuple) else (self._result,)

    def fetchall(self) -> Any:
        return self._result

    def rollback(self) -> None: ...

    def commit(self) -> None: ...

    def close(self) -> None:
        self.closed = True
