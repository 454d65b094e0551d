"""The two-phase methods of PEP 249 as MariaDB Connector/Python has them, over PyMySQL, which has none and needs no library in C."""

from __future__ import annotations

from typing import Any, NoReturn

import pymysql

#: SQLSTATE by MariaDB's error code; PyMySQL reports the code only.
SQLSTATES = {1397: "XAE04", 1399: "XAE07", 1402: "XA100", 1440: "XAE08", 1613: "XA106", 1614: "XA102", 1062: "23000"}
DriverXid = tuple[int, str, str]


class TwoPhaseError(Exception):
    """An error with an SQLSTATE. It is HY000 if the connection is lost."""

    def __init__(self, error: pymysql.MySQLError) -> None:
        super().__init__(*error.args)
        self.sqlstate = SQLSTATES.get(error.args[0], "HY000")


class TwoPhaseConnection:
    """A connection to MariaDB."""

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self._xid: DriverXid | None = None
        self._prepared = False

    def xid(self, format_id: int, gtrid: str, bqual: str) -> DriverXid:
        return format_id, gtrid, bqual

    def execute(self, statement: str) -> list[Any]:
        try:
            with self._raw.cursor() as cursor:
                cursor.execute(statement)
                return list(cursor.fetchall())
        except pymysql.MySQLError as error:
            raise TwoPhaseError(error) from error

    def tpc_begin(self, xid: DriverXid) -> None:
        self._xid, self._prepared = xid, False
        self._run("XA BEGIN", xid)

    def tpc_prepare(self) -> None:
        xid = self._current()
        self._run("XA END", xid)
        self._run("XA PREPARE", xid)
        self._prepared = True

    def tpc_commit(self, xid: DriverXid | None = None) -> None:
        if xid is None and not self._prepared:
            xid = self._current()
            self._run("XA END", xid)
            self._run("XA COMMIT", xid, " ONE PHASE")
        else:
            self._run("XA COMMIT", xid or self._current())

    def tpc_rollback(self, xid: DriverXid | None = None) -> None:
        if xid is None and not self._prepared:
            self._run("XA END", self._current())
        self._run("XA ROLLBACK", xid or self._current())

    def tpc_recover(self) -> list[tuple[int, int, int, str]]:
        return self.execute("XA RECOVER")

    def rollback(self) -> None:
        self._raw.rollback()

    def close(self) -> None:
        self._raw.close()

    def commit(self) -> NoReturn:
        raise AssertionError("a branch is not committed by commit()")

    def _current(self) -> DriverXid:
        assert self._xid is not None
        return self._xid

    def _run(self, command: str, xid: DriverXid, more: str = "") -> None:
        format_id, gtrid, bqual = xid
        self.execute(f"{command} '{gtrid}','{bqual}',{format_id}{more}")
