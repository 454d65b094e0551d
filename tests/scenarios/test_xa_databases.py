"""PostgreSQL as a resource keeps its promises, also when another client interferes with its branches."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from bascule.embedded.postgres import EmbeddedPostgres
from bascule.testing.xa import ModelLog, ModelResource
from bascule.threads.background import in_background
from bascule.xa import HeuristicOutcome, TransactionManager, TransactionRolledBack, Vote, Xid, psycopg_loop
from bascule.xa.database import DatabaseResource, DbapiResource
from bascule.xa.errors import BranchHeuristic, BranchRolledBack, Code, DuplicateXid, OutOfOrder, ResourceError, ResourceFailed, UnknownXid
from bascule.xa.postgres import PostgresResource
from bascule.xa.sqlalchemy import SqlAlchemyResource
from bascule.xa.xid import branch, new_gtrid
from tests.support.postgres import items
from tests.support.system import wait_for

TIMEOUT_S = 30.0
Make = Callable[[], DatabaseResource[Any]]


@pytest.fixture(params=["psycopg", "sqlalchemy"])
def make(request: pytest.FixtureRequest, postgres: EmbeddedPostgres) -> Iterator[Make]:
    """Create the resource as each process would."""
    engines: list[sa.Engine] = []
    resources: list[PostgresResource] = []

    def make() -> DatabaseResource[Any]:
        if request.param == "psycopg":
            resources.append(PostgresResource("db", postgres.conninfo))
            return resources[-1]
        engines.append(sa.create_engine(postgres.url))
        return SqlAlchemyResource("db", engines[-1])

    yield make
    for engine in engines:
        engine.dispose()
    for resource in resources:
        resource.close()


def insert(handle: Any, table: str, item: str) -> None:
    statement = f"INSERT INTO {table} VALUES ('{item}')"
    handle.execute(sa.text(statement) if hasattr(handle, "get_bind") else statement)


def new_xid() -> Xid:
    return branch(new_gtrid("test", 0), "db")


def prepared(resource: DatabaseResource[Any], table: str, item: str) -> Xid:
    xid = new_xid()
    insert(resource.start(xid, timeout_s=TIMEOUT_S), table, item)
    resource.end(xid, success=True)
    assert resource.prepare(xid) is Vote.YES
    return xid


def test_prepared_database_branch_commits_in_the_process_that_prepared_it(make: Make, postgres: EmbeddedPostgres, table: str) -> None:
    resource = make()
    xid = prepared(resource, table, "one")
    assert items(postgres, table) == []
    assert xid in resource.recover()
    resource.commit(xid)
    assert items(postgres, table) == ["one"]
    assert xid not in resource.recover()


@pytest.mark.parametrize("finish", ["commit", "rollback"])
def test_prepared_database_branch_can_be_finished_by_another_process(
    make: Make, postgres: EmbeddedPostgres, table: str, finish: str
) -> None:
    first, second = make(), make()
    xid = prepared(first, table, "one")
    assert re.fullmatch(r"\d+@\d+/[0-9A-F]{8}", first.token(xid))
    assert xid in second.recover()
    getattr(second, finish)(xid)
    getattr(first, finish)(xid)  # the process knows the outcome
    with pytest.raises(UnknownXid):
        getattr(second, finish)(xid)
    assert items(postgres, table) == (["one"] if finish == "commit" else [])


def test_a_branch_that_wrote_nothing_votes_read_only(make: Make, table: str) -> None:
    resource, xid = make(), new_xid()
    handle = resource.start(xid, timeout_s=TIMEOUT_S)
    statement = f"SELECT * FROM {table}"
    handle.execute(sa.text(statement) if hasattr(handle, "get_bind") else statement)
    resource.end(xid, success=True)
    assert resource.prepare(xid) is Vote.READ_ONLY
    with pytest.raises(UnknownXid):
        resource.commit(xid)


def test_notify_takes_no_part_in_two_phase_commit(make: Make, postgres: EmbeddedPostgres, table: str) -> None:
    resource, alone, with_a_row, one_phase = make(), new_xid(), new_xid(), new_xid()
    for xid in (alone, with_a_row, one_phase):
        handle, statement = resource.start(xid, timeout_s=TIMEOUT_S), f"NOTIFY {table}"
        handle.execute(sa.text(statement) if hasattr(handle, "get_bind") else statement)
        if xid is with_a_row:
            insert(handle, table, "one")
        resource.end(xid, success=True)
    with psycopg.connect(postgres.conninfo, autocommit=True) as listener:
        listener.execute(f"LISTEN {table}")
        assert resource.prepare(alone) is Vote.READ_ONLY
        with pytest.raises(ResourceError, match="cannot PREPARE a transaction that has executed"):
            resource.prepare(with_a_row)
        assert list(listener.notifies(timeout=0.2)) == []
        resource.commit(one_phase, one_phase=True)
        assert [each.channel for each in listener.notifies(timeout=20, stop_after=1)] == [table]


def test_database_branch_commits_in_one_phase(make: Make, postgres: EmbeddedPostgres, table: str) -> None:
    resource, xid = make(), new_xid()
    insert(resource.start(xid, timeout_s=TIMEOUT_S), table, "one")
    resource.end(xid, success=True)
    resource.commit(xid, one_phase=True)
    assert items(postgres, table) == ["one"]


@pytest.mark.parametrize("one_phase", [True, False])
def test_a_branch_with_a_failed_statement_votes_no(make: Make, postgres: EmbeddedPostgres, table: str, one_phase: bool) -> None:
    resource, xid = make(), new_xid()
    handle = resource.start(xid, timeout_s=TIMEOUT_S)
    insert(handle, table, "one")
    with pytest.raises((psycopg.Error, sa.exc.DBAPIError)):
        insert(handle, table, "one")
    resource.end(xid, success=True)
    with pytest.raises(BranchRolledBack):
        resource.commit(xid, one_phase=True) if one_phase else resource.prepare(xid)
    with pytest.raises(UnknownXid):
        resource.rollback(xid)
    assert items(postgres, table) == []


def test_unflushed_objects_of_a_session_are_flushed_before_the_vote(postgres: EmbeddedPostgres, table: str) -> None:
    engine = sa.create_engine(postgres.url)
    base = sa.orm.declarative_base()
    row = type("Row", (base,), {"__tablename__": table, "item": sa.Column(sa.Text, primary_key=True)})
    resource, xid = SqlAlchemyResource("db", engine), new_xid()
    resource.start(xid, timeout_s=TIMEOUT_S).add(row(item="one"))
    resource.end(xid, success=True)
    assert resource.prepare(xid) is Vote.YES
    resource.commit(xid)
    assert items(postgres, table) == ["one"]
    second = new_xid()
    resource.start(second, timeout_s=TIMEOUT_S).add(row(item="one"))
    with pytest.raises(BranchRolledBack) as refused:
        resource.end(second, success=True)
    assert refused.value.xa_code is Code.XA_RBINTEGRITY
    engine.dispose()


def test_branch_can_be_rolled_back_before_and_after_prepare(make: Make, postgres: EmbeddedPostgres, table: str) -> None:
    resource, xid = make(), new_xid()
    insert(resource.start(xid, timeout_s=TIMEOUT_S), table, "one")
    resource.end(xid, success=False)
    resource.rollback(xid)
    assert items(postgres, table) == []
    again = prepared(resource, table, "two")
    resource.rollback(again)
    assert items(postgres, table) == []


def test_calls_out_of_order_on_a_database_branch_are_refused(make: Make, table: str) -> None:
    resource, xid = make(), new_xid()
    insert(resource.start(xid, timeout_s=TIMEOUT_S), table, "one")
    with pytest.raises(DuplicateXid):
        resource.start(xid, timeout_s=TIMEOUT_S)
    for call in (lambda: resource.prepare(xid), lambda: resource.commit(xid), lambda: resource.commit(xid, one_phase=True)):
        with pytest.raises(OutOfOrder):
            call()
    resource.end(xid, success=True)
    with pytest.raises(OutOfOrder):
        resource.commit(xid)
    resource.rollback(xid)
    with pytest.raises(UnknownXid):
        resource.end(xid, success=True)


@pytest.mark.parametrize(("wanted", "forced", "code"), [("commit", "ROLLBACK", "XA_HEURRB"), ("rollback", "COMMIT", "XA_HEURCOM")])
def test_branch_finished_by_hand_is_reported_as_heuristic_outcome(
    make: Make, postgres: EmbeddedPostgres, table: str, wanted: str, forced: str, code: str
) -> None:
    resource = make()
    xid = prepared(resource, table, "one")
    by_hand(postgres, forced, xid)
    for _ in range(2):  # until the outcome is forgotten
        with pytest.raises(BranchHeuristic) as found:
            getattr(resource, wanted)(xid)
        assert found.value.xa_code.name == code
    resource.forget(xid)
    with pytest.raises(UnknownXid):
        getattr(resource, wanted)(xid)


def by_hand(postgres: EmbeddedPostgres, forced: str, xid: Xid) -> None:
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        name = str(connection.xid(xid.format_id, xid.gtrid.decode(), xid.bqual.decode()))
        connection.execute(f"{forced} PREPARED '{name}'")


def test_manager_raises_and_records_heuristic_outcome_of_a_branch_finished_by_hand(postgres: EmbeddedPostgres, table: str) -> None:
    resource = PostgresResource("db", postgres.conninfo)
    log = ModelLog()
    log._watch = lambda point: by_hand(postgres, "ROLLBACK", resource.recover()[0]) if point == "log.decide.after" else None
    other = ModelResource("other")
    with TransactionManager("hand", log, [resource, other]) as manager:
        transaction = manager.begin()
        insert(transaction.enlist(resource), table, "one")
        transaction.enlist(other).append("one")
        with pytest.raises(HeuristicOutcome, match="is committed, except for"):
            transaction.commit()
        assert [each.code for each in log.durable.heuristics.values()] == [Code.XA_HEURRB]
        (xid,) = log.durable.heuristics
        manager.recoverer().forget(xid)
        assert log.durable.heuristics == {}
    resource.close()


def test_lost_connection_rolls_back_an_unprepared_branch_and_keeps_a_prepared_branch(postgres: EmbeddedPostgres, table: str) -> None:
    resource, xid = PostgresResource("db", postgres.conninfo), new_xid()
    connection = resource.start(xid, timeout_s=TIMEOUT_S)
    insert(connection, table, "lost")
    terminate(postgres, connection)
    resource.end(xid, success=True)
    with pytest.raises(ResourceFailed):
        resource.prepare(xid)
    with pytest.raises(UnknownXid):
        resource.rollback(xid)
    kept = new_xid()
    connection = resource.start(kept, timeout_s=TIMEOUT_S)
    insert(connection, table, "kept")
    resource.end(kept, success=True)
    assert resource.prepare(kept) is Vote.YES
    terminate(postgres, connection)
    with pytest.raises(ResourceFailed):
        resource.commit(kept)
    assert kept in resource.recover()
    resource.commit(kept)
    assert items(postgres, table) == ["kept"]
    resource.close()


def terminate(postgres: EmbeddedPostgres, victim: psycopg.Connection[Any]) -> None:
    with psycopg.connect(postgres.conninfo, autocommit=True) as connection:
        assert connection.execute("SELECT pg_terminate_backend(%s, 20000)", (victim.info.backend_pid,)).fetchone() == (True,)


def test_serialization_failure_is_retried(postgres: EmbeddedPostgres, table: str) -> None:
    resource, other = PostgresResource("db", postgres.conninfo), ModelResource("other")
    attempts = []
    with TransactionManager("again", ModelLog(), [resource, other]) as manager:

        @manager.transactional(attempts=3, retry_on=(psycopg.errors.SerializationFailure,))
        def work() -> None:
            connection = manager.enlist(resource)
            attempts.append(1)
            insert(connection, table, "one")
            manager.enlist(other).append("one")
            if len(attempts) == 1:
                raise psycopg.errors.SerializationFailure("as PostgreSQL would")

        work()
    assert len(attempts) == 2
    assert items(postgres, table) == ["one"]
    assert other.durable.committed == ["one"]
    resource.close()


def test_violated_deferred_constraint_rolls_back_all_resources(postgres: EmbeddedPostgres, table: str) -> None:
    with psycopg.connect(postgres.conninfo) as connection:
        connection.execute(f"ALTER TABLE {table} DROP CONSTRAINT {table}_item_key")
        connection.execute(f"ALTER TABLE {table} ADD UNIQUE (item) DEFERRABLE INITIALLY DEFERRED")
    resource, other = PostgresResource("db", postgres.conninfo), ModelResource("other")
    with TransactionManager("constraint", ModelLog(), [resource, other]) as manager:
        transaction = manager.begin()
        transaction.enlist(other).append("one")
        for _ in range(2):
            insert(transaction.enlist(resource), table, "one")
        with pytest.raises(TransactionRolledBack, match="XA_RBINTEGRITY"):
            transaction.commit()
    assert items(postgres, table) == []
    assert other.durable.committed == []
    resource.close()


def test_dbapi_resource_works_with_a_driver_that_has_two_phase_methods(postgres: EmbeddedPostgres, table: str) -> None:
    first = DbapiResource("db", lambda: psycopg.connect(postgres.conninfo))
    second = DbapiResource("db", lambda: psycopg.connect(postgres.conninfo))
    kept, undone = prepared(first, table, "kept"), prepared(first, table, "undone")
    assert {kept, undone} <= set(second.recover())
    second.commit(kept)
    first.rollback(undone)
    with pytest.raises(UnknownXid):
        first.commit(kept)  # no other session can report it
    assert items(postgres, table) == ["kept"]
    first.close()


@pytest.mark.parametrize("ending", ["commit", "commit in one phase", "rollback"])
def test_handle_of_a_finished_branch_writes_nothing_into_the_next_branch(
    make: Make, postgres: EmbeddedPostgres, table: str, ending: str
) -> None:
    resource = make()
    xid = new_xid()
    old = resource.start(xid, timeout_s=TIMEOUT_S)
    insert(old, table, "old")
    statement = f"INSERT INTO {table} VALUES ('late')"
    cursor = None if hasattr(old, "get_bind") else old.cursor()
    resource.end(xid, success=True)
    if ending == "commit":
        resource.prepare(xid)
    if ending == "rollback":
        resource.rollback(xid)
    else:
        resource.commit(xid, one_phase=ending != "commit")
    following = new_xid()
    new = resource.start(following, timeout_s=TIMEOUT_S)
    insert(new, table, "new")
    for use in [lambda: insert(old, table, "late"), *([] if cursor is None else [lambda: cursor.execute(statement), old.commit])]:
        with pytest.raises((psycopg.Error, sa.exc.SQLAlchemyError)):
            use()
    resource.end(following, success=True)
    resource.commit(following, one_phase=True)
    assert items(postgres, table) == (["new"] if ending == "rollback" else ["new", "old"])


@pytest.mark.parametrize("alone", [True, False], ids=["in one phase", "in two phases"])
def test_transaction_ending_during_a_statement_of_another_thread_is_rolled_back(
    make: Make, postgres: EmbeddedPostgres, table: str, alone: bool
) -> None:
    resource, other = make(), ModelResource("other")
    with TransactionManager("shop", ModelLog(), [resource, other]) as manager:
        transaction = manager.begin()
        handle = transaction.enlist(resource)
        if not alone:
            transaction.enlist(other).append("work")
        insert(handle, table, "undone")
        working = in_background(lambda: insert(handle, table, "late' || pg_sleep(30) || '"), "works")
        with psycopg.connect(postgres.conninfo, autocommit=True) as watching:
            wait_for(lambda: _sleeping(watching), "the statement to run")
            with pytest.raises(TransactionRolledBack, match="still using") as raised:
                transaction.commit()
            assert isinstance(raised.value.cause, BranchRolledBack)
            assert raised.value.cause.xa_code is Code.XA_RBPROTO
            assert isinstance(working.exception(TIMEOUT_S), psycopg.Error | sa.exc.SQLAlchemyError)
            assert not _sleeping(watching)
        assert other.durable.committed == []
        with manager.begin() as following:
            insert(following.enlist(resource), table, "next")
    assert items(postgres, table) == ["next"]


@pytest.mark.parametrize("alone", [True, False], ids=["in one phase", "in two phases"])
def test_transaction_ending_during_a_row_stream_of_its_own_thread_is_rolled_back(
    postgres: EmbeddedPostgres, table: str, monkeypatch: pytest.MonkeyPatch, alone: bool
) -> None:
    """The stream holds the lock of the connection until its end. Without the cancellation, the rollback would wait for it for ever."""
    monkeypatch.setattr(psycopg_loop, "CANCEL_WITHIN_S", 0.5)
    resource, other = PostgresResource("db", postgres.conninfo), ModelResource("other")

    def work() -> None:
        transaction = manager.begin()
        handle = transaction.enlist(resource)
        if not alone:
            transaction.enlist(other).append("work")
        insert(handle, table, "undone")
        rows = handle.cursor().stream("SELECT generate_series(1, 1000000)")
        next(rows)
        with pytest.raises(TransactionRolledBack, match="still using"):
            transaction.commit()
        with pytest.raises(psycopg.Error):
            list(rows)

    with closing(resource), TransactionManager("shop", ModelLog(), [resource, other]) as manager:
        in_background(work, "works").result(TIMEOUT_S)
        assert other.durable.committed == []
        with manager.begin() as following:
            insert(following.enlist(resource), table, "next")
    assert items(postgres, table) == ["next"]


def test_call_after_the_refused_end_of_a_branch_is_refused(postgres: EmbeddedPostgres, table: str) -> None:
    """Without the cancellation, it would continue in the branch, or after the rollback on a session that is returned to the pool."""
    with closing(PostgresResource("db", postgres.conninfo)) as resource:
        xid = new_xid()
        handle = resource.start(xid, timeout_s=TIMEOUT_S)
        working = in_background(lambda: handle.execute("SELECT pg_sleep(30)"), "works")
        with psycopg.connect(postgres.conninfo, autocommit=True) as watching:
            wait_for(lambda: _sleeping(watching, "SELECT pg_sleep%"), "the statement to run")
        with pytest.raises(BranchRolledBack, match="still using"):
            resource.end(xid, success=True)
        assert isinstance(working.exception(TIMEOUT_S), psycopg.errors.QueryCanceled)
        with pytest.raises(psycopg.OperationalError, match="the connection is closed"):
            insert(handle, table, "late")
        resource.rollback(xid)
    assert items(postgres, table) == []


def test_cancel_that_arrives_before_the_statement_has_begun_is_repeated(postgres: EmbeddedPostgres) -> None:
    requested, locked = threading.Event(), threading.Event()
    with psycopg.connect(postgres.conninfo) as connection:
        cancel = connection.cancel_safe

        def request(**options: Any) -> None:
            cancel(**options)
            requested.set()

        connection.cancel_safe = request  # type: ignore[method-assign]

        def execute() -> Any:
            with connection.lock:
                locked.set()
                assert requested.wait(TIMEOUT_S)
                return connection.pgconn.exec_(b"SELECT pg_sleep(30)")

        working = in_background(execute, "works")
        assert locked.wait(TIMEOUT_S)
        assert psycopg_loop.interrupt(connection)
        assert b"canceling statement" in working.result(TIMEOUT_S).error_message
        assert connection.execute("SELECT 1").fetchone() == (1,)  # the session has not ended


def test_cancel_of_a_task_that_arrives_before_the_statement_has_begun_is_repeated(postgres: EmbeddedPostgres) -> None:
    async def main() -> None:
        requested, locked = asyncio.Event(), asyncio.Event()
        handle = psycopg_loop.LoopConnection.of(connection, asyncio.get_running_loop())
        cancel = handle.cancel_safe

        async def request(**options: Any) -> None:
            await cancel(**options)
            requested.set()

        handle.cancel_safe = request  # type: ignore[method-assign]

        async def execute() -> Any:
            async with handle.lock:
                locked.set()
                await requested.wait()
                return await asyncio.to_thread(connection.pgconn.exec_, b"SELECT pg_sleep(30)")

        working = asyncio.create_task(execute())
        await locked.wait()
        with pytest.raises(BranchRolledBack, match="its statement was cancelled"):
            await asyncio.to_thread(handle.cut_off)
        assert b"canceling statement" in (await working).error_message

    with psycopg.connect(postgres.conninfo) as connection:
        asyncio.run(asyncio.wait_for(main(), TIMEOUT_S))
        assert connection.execute("SELECT 1").fetchone() == (1,)  # the session has not ended


def _sleeping(connection: psycopg.Connection[Any], statement: str = "INSERT%pg_sleep%") -> bool:
    query = "SELECT count(*) FROM pg_stat_activity WHERE query LIKE %s AND state = 'active'"
    (count,) = connection.execute(query, (statement,)).fetchone() or (0,)
    return bool(count)


def test_database_connections_are_reused_and_a_broken_connection_is_replaced(postgres: EmbeddedPostgres, table: str) -> None:
    resource = PostgresResource("db", postgres.conninfo)
    pids = []
    for number in range(3):
        xid = new_xid()
        connection = resource.start(xid, timeout_s=TIMEOUT_S)
        pids.append(connection.info.backend_pid)
        insert(connection, table, f"{number}")
        resource.end(xid, success=True)
        resource.commit(xid, one_phase=True)
        if number == 1:
            with psycopg.connect(postgres.conninfo, autocommit=True) as other:
                other.execute("SELECT pg_terminate_backend(%s)", (pids[-1],))
    assert pids[0] == pids[1] != pids[2]
    assert items(postgres, table) == ["0", "1", "2"]
    resource.close()
