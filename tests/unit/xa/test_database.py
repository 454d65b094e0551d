"""Two threads finish a branch of a database at the same time, for example a recovery that hung and its successor."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from bascule.core.errors import InvalidInput
from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import TransactionManager
from bascule.xa.database import DbapiResource
from bascule.xa.errors import ResourceError, ResourceFailed, RetryLater, UnknownXid
from bascule.xa.resource import Vote
from bascule.xa.xid import Xid
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


@pytest.mark.parametrize(
    ("raised", "expected"), [(RuntimeError("packet out of order"), ResourceFailed), (Unclear(), ResourceFailed), (Refusal(), ResourceError)]
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
    assert [each.closed for each in connections] == [True, True]
