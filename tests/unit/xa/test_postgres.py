"""PostgreSQL as a resource, on a server in memory. ``scenarios/test_xa_databases.py`` checks the same with PostgreSQL."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.pq import ConnStatus, TransactionStatus

from bascule.core.errors import InvalidInput, Unavailable
from bascule.testing.xa import ModelLog, ModelResource
from bascule.xa import TransactionManager
from bascule.xa.database_errors import in_words_of_xa
from bascule.xa.errors import BranchHeuristic, BranchRolledBack, Code, OutOfOrder, ResourceFailed, RetryLater, UnknownXid, XaError
from bascule.xa.log import Decision, LogState, Outcome
from bascule.xa.postgres import PostgresResource
from bascule.xa.recovery import Recoverer
from bascule.xa.resource import Vote
from bascule.xa.sqlalchemy import SqlAlchemyResource
from bascule.xa.xid import Xid, branch, new_gtrid
from tests.unit.xa.postgres_server import Connection, Server

TIMEOUT_S = 30.0


@pytest.mark.parametrize("conninfo", ["postgres:/ann:hunter2@db/shop", "host=db pasword=hunter2", "host=db hunter2"])
def test_invalid_connection_string_is_refused_without_showing_it(conninfo: str) -> None:
    with pytest.raises(InvalidInput, match="connection string of resource 'db' is invalid") as raised:
        PostgresResource("db", conninfo)
    assert "hunter2" not in str(raised.value)
    assert raised.value.__suppress_context__


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    monkeypatch.setattr(psycopg, "connect", server.connect)
    return server


def ended_branch(resource: PostgresResource, *rows: str) -> tuple[Xid, Connection]:
    """Write ``rows`` in a branch, end its work, and return its XID and its connection."""
    xid = branch(new_gtrid("test", 0), "db")
    connection: Any = resource.start(xid, timeout_s=TIMEOUT_S)
    for row in rows:
        connection.insert(row)
    resource.end(xid, success=True)
    return xid, connection


def prepared(resource: PostgresResource, *rows: str) -> tuple[Xid, Connection]:
    xid, connection = ended_branch(resource, *rows)
    assert resource.prepare(xid) is Vote.YES
    return xid, connection


@pytest.mark.parametrize(("finish", "rows"), [("commit", ["1"]), ("rollback", [])])
def test_prepared_branch_may_be_finished_by_two_processes(server: Server, finish: str, rows: list[str]) -> None:
    first, second = PostgresResource("db", ""), PostgresResource("db", "")
    xid, _ = prepared(first, "1")
    assert (server.rows, list(second.recover())) == ([], [xid])
    getattr(second, finish)(xid)
    getattr(first, finish)(xid)  # the first process knows the number of the transaction, so it can ask for the outcome
    assert (server.rows, list(second.recover())) == (rows, [])
    with pytest.raises(UnknownXid):
        getattr(second, finish)(xid)
    with pytest.raises(UnknownXid):
        second.forget(xid)


def test_branch_without_writes_votes_read_only_and_returns_its_connection(server: Server) -> None:
    resource = PostgresResource("db", "")
    xid, _ = ended_branch(resource)
    assert resource.prepare(xid) is Vote.READ_ONLY
    assert (server.prepared, resource.token(xid)) == ({}, "")
    ended_branch(resource)
    assert len(server.connections) == 1  # the resource reuses the connection


@pytest.mark.parametrize("one_phase", [True, False])
def test_branch_with_failed_statement_votes_no(server: Server, one_phase: bool) -> None:
    """PostgreSQL rolls back a failed transaction at PREPARE TRANSACTION or COMMIT, without an error."""
    resource = PostgresResource("db", "")
    xid, connection = ended_branch(resource, "1")
    connection.info.transaction_status = TransactionStatus.INERROR
    with pytest.raises(BranchRolledBack):
        resource.commit(xid, one_phase=True) if one_phase else resource.prepare(xid)
    assert (server.rows, server.prepared, connection.closed) == ([], {}, True)
    with pytest.raises(UnknownXid):
        resource.rollback(xid)


def test_branch_is_finished_on_other_connection_after_connection_loss(server: Server) -> None:
    resource = PostgresResource("db", "")
    for finish in ("commit", "rollback"):
        xid, connection = prepared(resource, finish)
        connection.lost = "before"
        with pytest.raises(ResourceFailed):
            getattr(resource, finish)(xid)
        assert (connection.closed, list(resource.recover())) == (True, [xid])
        getattr(resource, finish)(xid)
    assert server.rows == ["commit"]


def test_connection_lost_before_prepare_rolls_branch_back(server: Server) -> None:
    resource = PostgresResource("db", "")
    xid, connection = ended_branch(resource, "1")
    connection.lost = "before"
    resource.rollback(xid)  # the loss of the connection has ended_branch the branch
    assert (server.rows, server.prepared, resource.recover()) == ([], {}, [])


def test_one_phase_commit_with_lost_answer_reports_actual_outcome(server: Server) -> None:
    resource = PostgresResource("db", "")
    xid, connection = ended_branch(resource, "1")
    connection.lost = "after"
    resource.commit(xid, one_phase=True)
    assert server.rows == ["1"]
    xid, connection = ended_branch(resource, "2")
    connection.lost = "before"
    with pytest.raises(BranchRolledBack) as rolled_back:
        resource.commit(xid, one_phase=True)
    assert (rolled_back.value.xa_code, rolled_back.value.retriable) == (Code.XA_RBCOMMFAIL, True)
    xid, connection = ended_branch(resource, "3")
    connection.lost, server.away = "after", True
    with pytest.raises(ResourceFailed):  # in doubt
        resource.commit(xid, one_phase=True)
    assert server.rows == ["1", "3"]


def test_connection_lost_before_one_phase_commit_is_asked_rolls_branch_back(server: Server) -> None:
    resource = PostgresResource("db", "")
    xid, connection = ended_branch(resource, "1")
    connection.broken, server.away = True, True
    with pytest.raises(BranchRolledBack) as rolled_back:
        resource.commit(xid, one_phase=True)
    assert rolled_back.value.retriable


@pytest.mark.parametrize(
    ("status", "error"), [("committed", ResourceFailed), ("in progress", ResourceFailed), ("aborted", BranchRolledBack)]
)
def test_status_after_server_crash_may_be_that_of_a_later_transaction(server: Server, status: str, error: type[Exception]) -> None:
    """The crash loses the number of the transaction, and the server gives the number to another one."""
    resource = PostgresResource("db", "")
    for _ in range(2):  # the second branch uses the connection of the first
        xid, connection = ended_branch(resource, "1")
        resource.commit(xid, one_phase=True)
    xid, connection = ended_branch(resource, "2")
    connection.lost = "crash"
    connection.crash = lambda: server.restart({str(len(server.statuses)): status})
    with pytest.raises(error):
        resource.commit(xid, one_phase=True)
    assert server.rows == ["1", "1"]


def test_one_phase_commit_with_lost_answer_stays_in_doubt_when_status_query_fails(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise psycopg.errors.SerializationFailure("could not serialize")

    resource = PostgresResource("db", "")
    xid, connection = ended_branch(resource, "1")
    connection.lost = "after"
    monkeypatch.setattr(psycopg, "connect", refuse)
    with pytest.raises(ResourceFailed, match="could not serialize"):
        resource.commit(xid, one_phase=True)
    assert server.rows == ["1"]


def test_role_without_privileges_on_decision_table_is_refused_when_manager_opens(server: Server) -> None:
    server.values |= {"max_prepared_transactions": "0", "to_regclass": True, "has_table_privilege": False}
    manager = TransactionManager("shop", ModelLog(), [PostgresResource("db", ""), ModelResource("broker")])
    with pytest.raises(Unavailable, match="GRANT SELECT, INSERT, DELETE ON bascule_decisions TO"):
        manager.open()


def test_decision_table_is_created_by_first_branch_when_server_was_away_at_open(server: Server) -> None:
    resource = PostgresResource("db", "", prepared=False)
    server.away = True
    with TransactionManager("shop", ModelLog(), [resource, ModelResource("broker")]):
        server.away = False
        for _ in range(2):
            ended_branch(resource)
    statements = [statement for connection in server.connections for statement in connection.statements]
    assert len([each for each in statements if each.startswith("CREATE TABLE IF NOT EXISTS bascule_decisions")]) == 1


@pytest.mark.parametrize(("wanted", "commit", "code"), [("commit", False, Code.XA_HEURRB), ("rollback", True, Code.XA_HEURCOM)])
def test_branch_finished_by_hand_is_reported_heuristic_until_forget(server: Server, wanted: str, commit: bool, code: Code) -> None:
    resource = PostgresResource("db", "")
    xid, _ = prepared(resource, "1")
    server.finish(next(iter(server.prepared)), commit=commit)
    for _ in range(2):
        with pytest.raises(BranchHeuristic) as found:
            getattr(resource, wanted)(xid)
        assert found.value.xa_code is code
    resource.forget(xid)
    with pytest.raises(UnknownXid):
        getattr(resource, wanted)(xid)


def test_outcome_is_known_only_by_transaction_id_token(server: Server) -> None:
    resource = PostgresResource("db", "")
    xid, _ = prepared(resource, "1")
    token = resource.token(xid)
    other = PostgresResource("db", "")
    with pytest.raises(RetryLater):
        other.outcome(xid, token)
    resource.commit(xid)
    assert other.outcome(xid, token) is Outcome.COMMIT
    assert other.outcome(xid) is None
    number = token.partition("@")[0]
    server.statuses[number] = "aborted"
    assert other.outcome(xid, token) is Outcome.ROLLBACK
    assert other.outcome(xid, number) is Outcome.ROLLBACK  # a token of an earlier version
    del server.statuses[number]  # PostgreSQL forgets the status of old transactions
    assert other.outcome(xid, token) is None


def test_unlisted_branch_whose_outcome_the_server_has_forgotten_is_heuristic_hazard(server: Server) -> None:
    """The transaction was rolled back by hand, and the program was down until the server forgot the status."""
    resource, log = PostgresResource("db", ""), ModelLog(LogState())
    xid, _ = prepared(resource, "1")
    log.decide(Decision(xid.gtrid, Outcome.COMMIT, ("db",), 0, "test", (resource.token(xid),)))
    server.finish(next(iter(server.prepared)), commit=False)
    server.statuses.clear()
    done = Recoverer("test", log, [PostgresResource("db", "")], by="later", patient=False).run()
    assert [(each.xid, each.code) for each in done.heuristics] == [(xid, Code.XA_HEURHAZ)]
    assert log.read().heuristics.keys() == {xid}


def test_status_of_a_number_does_not_count_on_a_promoted_standby_that_lacks_the_branch(server: Server) -> None:
    """The primary was lost after the prepare. Its standby has given the number of the branch to another transaction, which committed."""
    resource, log = PostgresResource("db", ""), ModelLog(LogState())
    xid, _ = prepared(resource, "1")
    log.decide(Decision(xid.gtrid, Outcome.COMMIT, ("db",), 0, "test", (resource.token(xid),)))
    server.prepared.clear()
    server.statuses["1"] = "committed"
    server.values["pg_control_system"] = "7/00000002"
    done = Recoverer("test", log, [PostgresResource("db", "")], by="later", patient=False).run()
    assert [(each.xid, each.code) for each in done.heuristics] == [(xid, Code.XA_HEURHAZ)]


def test_server_that_does_not_tell_its_history_prepares_branches(server: Server) -> None:
    server.values["pg_control_system"] = psycopg.errors.FeatureNotSupported("function is not supported")
    resource = PostgresResource("db", "")
    xid, connection = prepared(resource, "1")
    assert resource.token(xid) == "1"
    assert "ROLLBACK TO SAVEPOINT bascule_history" in connection.statements
    resource.commit(xid)
    assert PostgresResource("db", "").outcome(xid, "1") is Outcome.COMMIT


def test_recovery_and_outcome_queries_are_refused_on_standby_server(server: Server) -> None:
    resource = PostgresResource("db", "")
    xid, _ = prepared(resource, "1")
    server.values["pg_is_in_recovery"] = True
    with pytest.raises(ResourceFailed, match="standby"):
        resource.recover()
    with pytest.raises(ResourceFailed, match="standby"):
        resource.outcome(xid, "1")
    assert all(each.closed for each in server.connections[1:])


def test_foreign_branches_of_other_databases_are_not_listed(server: Server) -> None:
    resource = PostgresResource("db", "")
    xid, _ = prepared(resource, "1")
    server.foreign = [psycopg.Xid(7, "other", "db", None, "me", "warehouse"), psycopg.Xid(None, "by hand", None, None, "me", "shop")]
    assert list(resource.recover()) == [xid]


def test_idle_connections_are_limited_and_lost_connections_are_replaced(server: Server) -> None:
    resource = PostgresResource("db", "", idle_max=1)
    for xid, _ in [ended_branch(resource, "1"), ended_branch(resource, "2")]:
        resource.commit(xid, one_phase=True)
    first, second = server.connections
    assert (first.closed, second.closed) == (False, True)
    assert first.statements[0] == "SET LOCAL idle_in_transaction_session_timeout = 30000; SET LOCAL bascule.branch = 'begun'"
    first.lost = "before"
    _, third = ended_branch(resource, "3")
    assert (first.closed, third.closed) == (True, False)
    server.away = True
    with pytest.raises(ResourceFailed):
        ended_branch(resource)
    resource.close()


def test_handle_is_unusable_after_its_branch_while_session_is_reused(server: Server) -> None:
    resource = PostgresResource("db", "")
    xid = branch(new_gtrid("test", 0), "db")
    handle: Any = resource.start(xid, timeout_s=TIMEOUT_S)
    before = handle.pgconn.status
    assert before is ConnStatus.OK
    resource.end(xid, success=True)
    assert handle.pgconn.status is ConnStatus.BAD
    with pytest.raises(psycopg.OperationalError, match="transaction of this connection is over"):
        handle.pgconn.socket  # noqa: B018 - what psycopg waits for
    resource.commit(xid, one_phase=True)
    other: Any = resource.start(branch(new_gtrid("test", 0), "db"), timeout_s=TIMEOUT_S)
    assert (len(server.connections), other.pgconn.status) == (1, ConnStatus.OK)


def test_close_closes_idle_connections(server: Server) -> None:
    resource = PostgresResource("db", "")
    resource.rollback(ended_branch(resource, "1")[0])
    resource.close()
    assert [each.closed for each in server.connections] == [True]


def test_prepared_resource_without_max_prepared_transactions_is_refused_when_manager_opens(server: Server) -> None:
    resource = PostgresResource("db", "")
    resource.check()
    server.values["max_prepared_transactions"] = "0"
    resource = PostgresResource("db", "", prepared=True)
    with pytest.raises(Unavailable, match="max_prepared_transactions = 0"):
        resource.check()
    with pytest.raises(Unavailable, match="max_prepared_transactions = 0"):
        TransactionManager("shop", ModelLog(), [resource, ModelResource("other")]).open()
    with TransactionManager("shop", ModelLog(), [resource]) as manager:  # a transaction with one resource needs no prepare
        manager.begin().rollback()


def test_database_decides_by_commit_when_max_prepared_transactions_is_zero(server: Server) -> None:
    assert PostgresResource("db", "").decides is None
    for maximum, decides in (("0", True), ("10", False)):
        server.values["max_prepared_transactions"] = maximum
        resource = PostgresResource("db", "")
        resource.check()
        assert resource.decides is decides
    assert any(statement.startswith("CREATE TABLE") for each in server.connections for statement in each.statements)


def test_manager_opens_when_database_is_away_or_standby(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    resource = PostgresResource("db", "")
    server.values["pg_is_in_recovery"] = True
    with TransactionManager("shop", ModelLog(), [resource, ModelResource("other")]):
        assert "standby" in caplog.text
    server.away = True
    with TransactionManager("shop", ModelLog(), [resource, ModelResource("other")]):
        assert "connection refused" in caplog.text


@pytest.mark.parametrize(("state", "message"), [("42501", "role that prepared the transaction"), ("25006", "standby")])
@pytest.mark.parametrize("finish", ["commit", "rollback"])
def test_branch_that_role_or_server_must_not_finish_is_retried_later(
    server: Server, monkeypatch: pytest.MonkeyPatch, finish: str, state: str, message: str
) -> None:
    xid, _ = prepared(PostgresResource("db", ""), "1")

    def refuse(name: str, *, commit: bool) -> None:
        error = psycopg.ProgrammingError("permission denied to finish prepared transaction")
        error.sqlstate = state
        raise error

    resource = PostgresResource("db", "")
    with monkeypatch.context() as changed:
        changed.setattr(server, "finish", refuse)
        with pytest.raises(XaError, match=message) as raised:
            getattr(resource, finish)(xid)
        assert raised.value.retriable
    getattr(resource, finish)(xid)
    assert server.rows == (["1"] if finish == "commit" else [])


@pytest.mark.parametrize(
    ("state", "code"),
    [
        ("08006", Code.XAER_RMFAIL), ("23505", Code.XA_RBINTEGRITY), ("25P03", Code.XA_RBTIMEOUT), ("40002", Code.XA_RBROLLBACK),
        ("40001", Code.XA_RBTRANSIENT), ("40P01", Code.XA_RBDEADLOCK), ("42704", Code.XAER_NOTA), ("42710", Code.XAER_DUPID),
        ("55006", Code.XA_RETRY), ("57P01", Code.XAER_RMFAIL), ("22012", Code.XAER_RMERR), ("42601", Code.XAER_RMERR),
    ],
)  # fmt: skip
def test_sqlstate_determines_xa_code_for_any_error_class(state: str, code: Code) -> None:
    error = psycopg.IntegrityError("why")
    error.sqlstate = state
    assert in_words_of_xa(error).xa_code is code
    assert in_words_of_xa(sa.exc.DBAPIError("INSERT", {}, error)).xa_code is code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (psycopg.IntegrityError, Code.XA_RBINTEGRITY), (psycopg.OperationalError, Code.XAER_RMFAIL),
        (psycopg.InterfaceError, Code.XAER_RMFAIL), (psycopg.ProgrammingError, Code.XAER_RMERR), (ValueError, Code.XAER_RMERR),
    ],
)  # fmt: skip
def test_error_class_determines_xa_code_without_sqlstate(error: type[Exception], code: Code) -> None:
    assert in_words_of_xa(error("why")).xa_code is code


def test_sqlalchemy_driver_without_known_two_phase_support_is_refused() -> None:
    with pytest.raises(InvalidInput, match="pysqlite"):
        SqlAlchemyResource("db", sa.create_engine("sqlite://"))


@pytest.mark.parametrize("one_phase", [True, False])
@pytest.mark.parametrize(("ending", "rows"), [("ROLLBACK", []), ("COMMIT", ["1"])])
def test_branch_whose_transaction_the_application_has_ended_votes_no(server: Server, ending: str, rows: list[str], one_phase: bool) -> None:
    """psycopg begins another transaction with the next statement: its work would be prepared without the earlier work."""
    resource, xid = PostgresResource("db", ""), branch(new_gtrid("test", 0), "db")
    connection: Any = resource.start(xid, timeout_s=TIMEOUT_S)
    connection.insert("1")
    connection.execute(ending)
    connection.insert("2")
    resource.end(xid, success=True)
    with pytest.raises(BranchRolledBack, match="the application has ended the database transaction"):
        resource.commit(xid, one_phase=True) if one_phase else resource.prepare(xid)
    assert (server.rows, server.prepared) == (rows, {})
    ended_branch(resource)
    assert len(server.connections) == 2  # the connection is not used for the next branch


@pytest.mark.parametrize("method", ["tpc_begin", "tpc_prepare", "tpc_commit", "tpc_rollback"])
def test_handle_refuses_methods_that_end_the_transaction(server: Server, method: str) -> None:
    resource, xid = PostgresResource("db", ""), branch(new_gtrid("test", 0), "db")
    connection: Any = resource.start(xid, timeout_s=TIMEOUT_S)
    connection.insert("1")
    with pytest.raises(OutOfOrder, match=f"cannot call {method} within a transaction"):
        getattr(connection, method)()
    resource.end(xid, success=True)
    resource.commit(xid, one_phase=True)
    assert server.rows == ["1"]
