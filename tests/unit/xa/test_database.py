"""Two threads finish a branch of a database at the same time, for example a recovery that hung and its successor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from bascule.core.errors import InvalidInput
from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import TransactionManager
from bascule.xa.branch_mark import TRIALS, BranchMark
from bascule.xa.database import DbapiResource
from bascule.xa.database_errors import in_words_of_xa
from bascule.xa.errors import BranchRolledBack, Code, ResourceError, ResourceFailed, RetryLater, UnknownXid
from bascule.xa.resource import Vote
from bascule.xa.xid import FORMAT_ID, Xid
from tests.support.speed import SLOWNESS

FIRST, SECOND = Xid(7, b"first", b"db"), Xid(7, b"second", b"db")
WAIT_S = 30.0 * SLOWNESS


class Missing(Exception):
    sqlstate = "42704"


class Driver:
    """A connection whose commits hang until the test releases them. ``committed`` belongs to the database."""

    def __init__(self, committed: list[Any]) -> None:
        self.hangs, self.released = threading.Event(), threading.Event()
        self.commits = 0
        self.closed = False
        self._committed = committed
        self._xid: Any = None

    def xid(self, *xid: Any) -> Any:
        return xid

    def tpc_begin(self, xid: Any) -> None:
        self._xid = xid

    def tpc_prepare(self) -> None: ...

    def tpc_recover(self) -> list[Any]:
        return []

    def rollback(self) -> None: ...

    def tpc_commit(self, xid: Any = None) -> None:
        if (xid or self._xid) in self._committed:
            raise Missing
        self.commits += 1
        self.hangs.set()
        assert self.released.wait(WAIT_S)
        self._committed.append(xid or self._xid)

    def close(self) -> None:
        self.closed = True


def test_connection_is_not_reused_while_commit_hangs_so_second_commit_does_not_reach_next_branch() -> None:
    committed: list[Any] = []
    connections: list[Driver] = []

    def connect() -> Driver:
        connections.append(Driver(committed))
        return connections[-1]

    resource: DbapiResource[Driver] = DbapiResource("db", connect, idle_max=1)
    driver = resource.start(FIRST, timeout_s=60)
    resource.end(FIRST, success=True)
    resource.prepare(FIRST)
    hung = in_background(lambda: resource.commit(FIRST), "test-hung")
    assert driver.hangs.wait(WAIT_S)
    with pytest.raises(RetryLater):
        resource.commit(FIRST)
    with pytest.raises(RetryLater):
        resource.rollback(FIRST)
    assert driver.commits == 1
    driver.released.set()
    hung.result(WAIT_S)
    assert resource.start(SECOND, timeout_s=60) is driver
    with pytest.raises(UnknownXid):
        resource.commit(FIRST)
    assert committed == [(7, "first", "db")]


def test_dbapi_recovery_lists_prepared_branches_and_leaves_no_transaction_open() -> None:
    class Listing(Driver):
        open = False

        def tpc_recover(self) -> list[tuple[Any, str, str]]:
            self.open = True
            return [(FIRST.format_id, "first", "db"), (None, "of somebody who has no xid", ""), (SECOND.format_id, "second", "db")]

        def rollback(self) -> None:
            self.open = False

    driver = Listing([])
    assert list(DbapiResource("db", lambda: driver).recover()) == [FIRST, SECOND]
    assert not driver.open


@pytest.mark.parametrize("octets", [bytes, bytearray, memoryview])
def test_recovered_xids_may_be_any_bytes_like_objects(octets: Callable[[bytes], Any]) -> None:
    class Listing(Driver):
        def tpc_recover(self) -> list[Any]:
            return [(FIRST.format_id, octets(b"first"), octets(b"db"))]

        def rollback(self) -> None: ...

    assert list(DbapiResource("db", lambda: Listing([])).recover()) == [FIRST]


def test_row_of_xa_recover_has_lengths_of_both_parts_of_xid() -> None:
    """MariaDB Connector/Python returns the rows of XA RECOVER from ``tpc_recover``."""

    class Listing(Driver):
        def tpc_recover(self) -> list[Any]:
            return [(FIRST.format_id, 5, 2, "firstdb"), (SECOND.format_id, 6, 2, b"seconddb")]

    assert list(DbapiResource("db", lambda: Listing([])).recover()) == [FIRST, SECOND]


class UnknownToSession(Exception):
    """The answer of MariaDB to every session but the one that has prepared the branch."""

    sqlstate = "XAE04"


class Attached(Driver):
    """A connection to MariaDB, where the session that has prepared the branch is still open, or the branch has ended."""

    def __init__(self, prepared: list[Xid]) -> None:
        super().__init__([])
        self._prepared = prepared

    def tpc_commit(self, xid: Any = None) -> None:
        raise UnknownToSession(xid)

    tpc_rollback = tpc_commit

    def tpc_recover(self) -> list[Any]:
        return list(self._prepared)


@pytest.mark.parametrize("finish", ["commit", "rollback"])
def test_branch_that_is_still_listed_does_not_count_as_ended(finish: str) -> None:
    """Otherwise recovery would forget the decision of a suspended process, and roll the branch back when the process has ended."""
    prepared = [FIRST]
    resource = DbapiResource("db", lambda: Attached(prepared))
    with pytest.raises(RetryLater, match="is still open"):
        getattr(resource, finish)(FIRST)
    prepared.clear()
    with pytest.raises(UnknownXid):
        getattr(resource, finish)(FIRST)


class OracleError:
    full_code = "ORA-24756"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (type("DatabaseError", (Exception,), {})(OracleError()), Code.XAER_NOTA),
        (type("Error", (Exception,), {"sqlstate": "XA100"})(), Code.XA_RBROLLBACK),
        (type("Error", (Exception,), {"sqlstate": "XA106"})(), Code.XA_RBTIMEOUT),
        (type("Error", (Exception,), {"sqlstate": "XAE08"})(), Code.XAER_DUPID),
        (type("OperationalError", (Exception,), {"sqlite_errorname": "SQLITE_BUSY_SNAPSHOT"})(), Code.XA_RBTRANSIENT),
        (type("OperationalError", (Exception,), {"sqlite_errorname": "SQLITE_IOERR_FSYNC"})(), Code.XAER_RMFAIL),
        (type("OperationalError", (Exception,), {"sqlstate": "HY000"})(), Code.XAER_RMFAIL),
    ],
)
def test_errors_of_known_drivers_have_codes_of_xa(error: Exception, code: Code) -> None:
    assert in_words_of_xa(error).xa_code is code


@pytest.mark.parametrize(("answer", "vote"), [(False, Vote.READ_ONLY), (True, Vote.YES), (None, Vote.YES)])
def test_tpc_prepare_that_returns_false_is_read_only_vote(answer: bool | None, vote: Vote) -> None:
    class Answering(Driver):
        def tpc_prepare(self) -> bool | None:  # type: ignore[override]
            return answer

    resource = DbapiResource("db", lambda: Answering([]))
    resource.start(FIRST, timeout_s=60)
    resource.end(FIRST, success=True)
    assert resource.prepare(FIRST) is vote
    if vote is Vote.READ_ONLY:
        resource.start(FIRST, timeout_s=60)  # the resource no longer has the branch


class Refusal(Exception):
    sqlstate = "22000"


class Unclear(Exception):
    sqlstate = "40003"


class GeneralError(Exception):
    """MySQL Connector/Python and MariaDB Connector/Python raise such errors for a lost connection, too."""

    sqlstate = "HY000"


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (RuntimeError("packet out of order"), ResourceFailed),
        (Unclear(), ResourceFailed),
        (GeneralError(), ResourceFailed),
        (Refusal(), ResourceError),
    ],
)
def test_one_phase_commit_is_rolled_back_only_if_database_refuses_it(raised: Exception, expected: type[Exception]) -> None:
    """After "rolled back", the application repeats the work, so the branch must not be committed."""

    class Failing(Driver):
        def tpc_commit(self, xid: Any = None) -> None:
            raise raised

    resource = DbapiResource("db", lambda: Failing([]))
    resource.start(FIRST, timeout_s=60)
    resource.end(FIRST, success=True)
    with pytest.raises(expected):
        resource.commit(FIRST, one_phase=True)


def test_driver_without_two_phase_commit_is_refused_when_manager_opens() -> None:
    class Plain:
        def close(self) -> None: ...

    manager = TransactionManager("shop", ModelLog(), [DbapiResource("db", Plain), ModelResource("other")])
    with pytest.raises(InvalidInput, match=r"db: .* have no xid, tpc_begin"):
        manager.open()


class Trying(Driver):
    """A connection to a database in memory. ``listed`` changes the id of a branch, as some drivers do."""

    def __init__(self, prepared: list[Any], listed: Callable[[Any], Sequence[Any]]) -> None:
        super().__init__([])
        self._prepared, self._listed = prepared, listed

    def tpc_prepare(self) -> None:
        self._prepared.append(self._xid)

    def tpc_rollback(self, xid: Any = None) -> None:
        xid = xid or self._xid
        if xid in self.tpc_recover():
            self._prepared[:] = [each for each in self._prepared if xid not in self._listed(each)]

    def tpc_recover(self) -> list[Any]:
        return [each for xid in self._prepared for each in self._listed(xid)]


def opened_with(listed: Callable[[Any], Sequence[Any]], prepared: list[Any]) -> None:
    database = DbapiResource("db", lambda: Trying(prepared, listed))
    with TransactionManager("shop", ModelLog(), [database, ModelResource("other")]):
        pass


def test_driver_that_loses_a_part_of_xid_is_refused_when_manager_opens() -> None:
    """pg8000 prepares a branch under its gtrid only, and its ``tpc_commit`` does nothing for a branch that it does not list."""
    prepared: list[Any] = []
    with pytest.raises(InvalidInput, match=r"db: driver .* does not list a branch that it has prepared"):
        opened_with(lambda xid: [(0, xid[1], "")], prepared)
    assert prepared == []


def test_driver_that_lists_prepared_branches_is_accepted_and_branch_of_killed_check_removed(caplog: pytest.LogCaptureFixture) -> None:
    fresh = (FORMAT_ID, f"bascule-check/{2**40:x}.0123456789abcdef", "db")  # of a process that checks at the same time
    prepared: list[Any] = [(FORMAT_ID, "bascule-check/1.0123456789abcdef", "db"), fresh, (FORMAT_ID, "other", "db")]
    opened_with(lambda xid: [xid], prepared)
    assert prepared == [fresh, (FORMAT_ID, "other", "db")]
    assert "could not check resource" not in caplog.text


def test_driver_that_lists_nothing_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    opened_with(lambda _: [], [])
    assert "could not check resource" in caplog.text


class Cursor:
    """A cursor of a database that does not know the statement, such as MariaDB or Oracle."""

    def __init__(self, statements: list[str]) -> None:
        self._statements = statements

    def execute(self, statement: str) -> None:
        self._statements.append(statement)
        raise Refusal

    def close(self) -> None: ...


class WithCursors(Driver):
    def __init__(self, statements: list[str]) -> None:
        super().__init__([])
        self.released.set()
        self._statements = statements

    def cursor(self) -> Cursor:
        return Cursor(self._statements)

    def tpc_rollback(self, xid: Any = None) -> None: ...


def test_database_that_cannot_mark_transactions_works_without_marks() -> None:
    statements: list[str] = []
    resource = DbapiResource("db", lambda: WithCursors(statements))
    for xid in (FIRST, SECOND):
        resource.start(xid, timeout_s=60)
        resource.end(xid, success=True)
        assert resource.prepare(xid) is Vote.YES
        resource.commit(xid)
    assert statements == ["SET LOCAL bascule.branch = 'begun'"] * 2


def test_lost_connection_of_a_trial_does_not_switch_the_marks_off() -> None:
    fails = [True, False]

    class Marked:
        """A connection to a PostgreSQL. The first one is lost while it is in use."""

        def __init__(self) -> None:
            self._lost = fails.pop(0)

        def cursor(self) -> Marked:
            return self

        def execute(self, _: str) -> None:
            if self._lost:
                raise Refusal

        def fetchone(self) -> tuple[str]:
            return ("begun",)

        def close(self) -> None: ...

    mark = BranchMark(lambda: nullcontext(Marked()))
    earlier = WithCursors([])
    mark.put(earlier)
    assert mark.works is None
    put: list[str] = []
    connection = WithCursors(put)
    with pytest.raises(Refusal):
        mark.put(connection)
    assert (mark.works, put) == (True, ["SET LOCAL bascule.branch = 'begun'"])
    mark.check(earlier, FIRST)  # has no mark, and is not taken for an ended transaction
    with pytest.raises(BranchRolledBack):
        mark.check(connection, FIRST)


def test_database_without_marks_is_tried_a_few_times() -> None:
    statements: list[str] = []
    mark = BranchMark(lambda: nullcontext(WithCursors(statements)))
    for _ in range(TRIALS + 1):
        mark.put(None)
    assert (mark.works, len(statements)) == (False, TRIALS)


def test_connection_of_unknown_driver_is_closed_after_branch() -> None:
    """The application may still use the connection, and would write into the next branch."""
    connections: list[Driver] = []

    def connect() -> Driver:
        connections.append(Driver([]))
        connections[-1].released.set()
        return connections[-1]

    resource = DbapiResource("db", connect)
    for xid in (FIRST, SECOND):
        resource.start(xid, timeout_s=60)
        resource.end(xid, success=True)
        resource.commit(xid, one_phase=True)
    assert [each.closed for each in connections] == [True] * 4  # two of them were used to try out marks
