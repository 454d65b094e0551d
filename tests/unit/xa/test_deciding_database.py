"""A database decides transactions with its own commit, here with SQLite. ``scenarios/test_xa_deciding.py`` has the same for PostgreSQL."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bascule.core.effects import run_blocking
from bascule.core.errors import InvalidInput, Unavailable
from bascule.xa import TransactionFinding, TransactionInDoubt, TransactionManager, TransactionRolledBack
from bascule.xa import deciding_database as module
from bascule.xa.blocking import BlockingLog, BlockingParticipant
from bascule.xa.decision_table import DecisionTable
from bascule.xa.errors import BranchRolledBack, ResourceFailed
from bascule.xa.local_database import LocalDatabaseResource
from bascule.xa.log import DECISION_KEPT_S, Decision, Outcome
from bascule.xa.plan import Action
from bascule.xa.recovery import Recoverer
from bascule.xa.recovery_protocol import RecoveryProtocol
from bascule.xa.two_phase import TransactionStatus
from bascule.xa.xid import branch, new_gtrid
from tests.unit.xa.deciding_shop import BOTH, NEITHER, FakeClock, GeneralError, Killed, SerializationFailure, Shop, Unanswered, killed


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_database_commit_is_the_decision_and_its_row_is_deleted_after_all_resources_commit(shop: Shop) -> None:
    seen: list[int] = []
    shop.at["broker.commit.before"] = lambda: seen.append(len(shop.rows()) + len(shop.decisions()))
    run_blocking(shop.begin().commit())
    assert shop.where == BOTH
    assert seen == [2]  # the database has row and decision before the broker commits
    assert shop.log.durable.decisions == {}
    assert len(shop.decisions()) == 1
    shop.database.decisions("shop")
    assert shop.decisions() == []


@pytest.mark.parametrize("order", [False, True])
def test_other_resources_prepare_before_deciding_database_commits_in_any_enlistment_order(shop: Shop, order: bool) -> None:
    shop.broker.vote = "no"
    transaction = shop.begin(*((shop.broker, shop.database) if order else (shop.database, shop.broker)))
    with pytest.raises(TransactionRolledBack):
        run_blocking(transaction.commit())
    assert shop.where == NEITHER
    assert shop.decisions() == []


def test_database_with_only_read_only_branches_commits_without_decision_row(shop: Shop) -> None:
    shop.broker.vote = "read-only"
    run_blocking(shop.begin().commit())
    assert (shop.rows(), shop.decisions()) == (["row"], [])


@pytest.mark.parametrize(
    ("point", "left"),
    [("broker.prepare.before", NEITHER), ("broker.prepare.after", NEITHER), ("broker.commit.before", BOTH), ("broker.commit.after", BOTH)],
)
def test_transaction_killed_at_any_point_ends_as_deciding_database_has_decided(
    shop: Shop, point: str, left: tuple[list[str], list[str]]
) -> None:
    shop.at[point] = killed
    transaction = shop.begin()
    with pytest.raises(Killed):
        run_blocking(transaction.commit())
    for work in shop.database._work.values():  # the end of the process closes its connections
        work.close(reusable=False)
    for _ in range(3):
        shop.recover()
    assert shop.where == left
    assert shop.durable.prepared == {}


def test_process_killed_between_database_commit_and_answer_leaves_transaction_committed(
    shop: Shop, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = shop.database.commit_deciding

    def commit_and_die(*args: Any) -> None:
        commit(*args)
        raise Killed

    monkeypatch.setattr(shop.database, "commit_deciding", commit_and_die)
    with pytest.raises(Killed):
        run_blocking(shop.begin().commit())
    assert shop.where == (["row"], [])
    shop.recover()
    assert shop.where == BOTH


def test_recovery_rolls_nothing_back_while_deciding_database_is_away(shop: Shop) -> None:
    shop.at["broker.commit.before"] = killed
    with pytest.raises(Killed):
        run_blocking(shop.begin().commit())
    shop.away = sqlite3.OperationalError("unable to open database file")
    done = shop.recover()
    assert "database" in done.unreachable
    assert [(step.action, step.why) for step in done.steps] == [
        (Action.WAIT, "the decision may be in database, which does not answer"),
    ]
    assert len(shop.durable.prepared) == 1
    recoverer = Recoverer("shop", shop.log, shop.process(), by="operator", patient=False)
    xid = next(iter(shop.durable.prepared))
    assert recoverer.report(xid.gtrid).finding is TransactionFinding.NOT_KNOWN
    with pytest.raises(Unavailable, match="may have been committed by database, which does not answer"):
        recoverer.finish_now(xid, Outcome.COMMIT)
    shop.away = None
    assert recoverer.report(xid.gtrid).finding is TransactionFinding.COMMITTED
    shop.recover()
    assert shop.where == BOTH


def test_decision_stays_when_the_database_goes_away_while_recovery_looks(shop: Shop) -> None:
    """Recovery reads the rows twice. It must not delete the row that it read first if the second read fails."""
    shop.at["broker.commit.before"] = killed
    with pytest.raises(Killed):
        run_blocking(shop.begin().commit())
    database, broker = shop.process()
    recoverer = Recoverer("shop", shop.log, (database, broker), by="application", patient=False)
    shop.at["broker.recover.before"] = lambda: setattr(shop, "away", sqlite3.OperationalError("unable to open database file"))
    done = recoverer.run()
    assert [step.action for step in done.steps] == [Action.WAIT]
    shop.away = None
    for _ in range(2):
        recoverer.run()
    assert shop.where == BOTH
    assert shop.decisions() == []


def test_recovery_without_deciding_database_rolls_nothing_back(shop: Shop) -> None:
    shop.at["broker.commit.before"] = killed
    with pytest.raises(Killed):
        run_blocking(shop.begin().commit())
    done = shop.recover("database")
    assert [step.action for step in done.undecidable] == [Action.WAIT]
    assert len(shop.durable.prepared) == 1


def test_commit_of_slow_application_is_refused_after_rollback_by_recovery(shop: Shop) -> None:
    transaction = shop.begin()
    xid = branch(transaction.gtrid, "broker")
    prepare = shop.broker.prepare

    def recovered(_xid: Any) -> Any:
        vote = prepare(_xid)
        connection = shop.database._work[branch(transaction.gtrid, "database")].raw
        connection.rollback()  # else SQLite would have the recoverer wait
        DecisionTable("?").mark(connection)
        shop.recover()
        return vote

    shop.broker.prepare = recovered  # type: ignore[method-assign]
    with pytest.raises(TransactionRolledBack, match="recovery rolled back the transaction") as raised:
        run_blocking(transaction.commit())
    assert isinstance(raised.value.cause, BranchRolledBack)
    assert raised.value.cause.retriable
    assert xid not in shop.durable.prepared
    assert shop.where == NEITHER


@pytest.mark.parametrize(
    "error",
    [sqlite3.OperationalError("connection lost"), sqlite3.DatabaseError("protocol"), OSError("reset"), GeneralError("connection lost")],
)
def test_unanswered_commit_is_resolved_from_decision_table(shop: Shop, error: Exception) -> None:
    transaction = shop.begin()
    shop.unanswered(transaction, carried_out=False, error=error)
    with pytest.raises(TransactionRolledBack):
        run_blocking(transaction.commit())
    assert shop.where == NEITHER
    transaction = shop.begin()
    shop.unanswered(transaction, carried_out=True, error=error)
    run_blocking(transaction.commit())
    assert shop.where == BOTH


def test_lock_of_another_connection_rolls_transaction_back_and_work_may_be_repeated(shop: Shop) -> None:
    """SQLite refuses a commit while another connection reads."""
    shop.broker.vote = "read-only"
    reader = sqlite3.connect(shop.path)
    reader.execute("BEGIN")
    reader.execute("SELECT count(*) FROM payments").fetchall()
    transaction = shop.begin()
    with pytest.raises(TransactionRolledBack) as raised:
        run_blocking(transaction.commit())
    assert isinstance(raised.value.cause, BranchRolledBack)
    assert raised.value.cause.retriable
    reader.close()
    assert shop.rows() == []
    run_blocking(shop.begin().commit())
    assert shop.rows() == ["row"]


def test_application_may_have_rows_as_dictionaries(shop: Shop) -> None:
    def connect() -> sqlite3.Connection:
        connection = sqlite3.connect(shop.path, check_same_thread=False)
        connection.row_factory = lambda cursor, row: {column[0]: value for column, value in zip(cursor.description, row, strict=True)}
        return connection

    database = LocalDatabaseResource("database", connect)
    with TransactionManager("shop", shop.log, [database, shop.broker]) as manager:
        with manager.begin() as transaction:
            transaction.enlist(shop.broker).append("message")
            transaction.enlist(database).execute("INSERT INTO payments VALUES ('row')")
        assert [each.outcome for each in database.decisions("shop")] == []
        decision = Decision(new_gtrid("shop", 0, "aaaaaaaa", deciders=["database"]), Outcome.ROLLBACK, (), 0, "recoverer")
        assert database.decide(decision) == database.decide(replace(decision, outcome=Outcome.COMMIT)) == decision
    assert shop.where == BOTH


def test_unanswered_commit_is_reported_committed_when_other_process_finished_it(shop: Shop) -> None:
    def finish() -> None:
        for _ in range(3):
            shop.recover()
        assert shop.where == BOTH

    transaction = shop.begin()
    shop.unanswered(transaction, carried_out=True, error=sqlite3.OperationalError("connection lost"), then=finish)
    run_blocking(transaction.commit())
    assert transaction.status is TransactionStatus.COMMITTED
    assert shop.log.durable.heuristics == {}


def test_managers_with_same_host_and_process_id_keep_each_others_rows(shop: Shop) -> None:
    """Two containers that share the network of their host have the same host name, and each one runs its program as process 1."""
    other = TransactionManager("shop", shop.log, shop.process(), shared=True)

    def finish() -> None:
        recoverer = other.recoverer()
        for _ in range(2):
            recoverer.run(patient=False)
        assert shop.where == BOTH

    with TransactionManager("shop", shop.log, [shop.broker, shop.database], shared=True) as manager:
        transaction = manager.begin()
        transaction.enlist(shop.broker).append("message")
        transaction.enlist(shop.database).execute("INSERT INTO payments VALUES ('row')")
        work = shop.database._work[branch(transaction.gtrid, "database")]
        work.raw = Unanswered(work.raw, True, sqlite3.OperationalError("connection lost"), finish)
        transaction.commit()
        assert transaction.status is TransactionStatus.COMMITTED


@pytest.mark.parametrize("by", ["application", "recoverer"])
def test_committed_decision_of_other_process_is_deleted_after_one_day(shop: Shop, by: str) -> None:
    shop.at["broker.commit.before"] = killed
    with pytest.raises(Killed):
        run_blocking(shop.begin().commit())
    clock = FakeClock()
    participants = {each.name: BlockingParticipant(each) for each in shop.process()}
    recovery = RecoveryProtocol("shop", BlockingLog(shop.log), participants, clock, by)

    def run() -> Any:
        return run_blocking(recovery.run(tuple, patient=False))

    run()
    assert shop.where == BOTH
    if by == "recoverer":
        run()
        assert len(shop.decisions()) == 1
        clock.seconds = DECISION_KEPT_S
        assert run().steps == []  # recovery asks no resource again
        assert len(shop.decisions()) == 1
        clock.seconds += 1
    run()
    assert shop.decisions() == []
    assert shop.log.durable.decisions == {}


def test_executed_commit_is_not_repeated_after_database_outage(shop: Shop) -> None:
    """The broker may have forgotten the outcome of the branch, and the manager would record its answer as a heuristic outcome."""
    shop.at["broker.commit.before"] = killed
    with pytest.raises(Killed):
        run_blocking(shop.begin().commit())
    recoverer = Recoverer("shop", shop.log, shop.process(), by="recoverer", patient=False)
    recoverer.run()
    shop.away = sqlite3.OperationalError("unable to open database file")
    recoverer.run()
    shop.away = None
    assert recoverer.run().steps == []


def test_commit_in_one_database_counts_though_recovery_has_asked_another_one_for_a_rollback(shop: Shop, tmp_path: Path) -> None:
    """A recoverer does not know which database decides, so it asks the databases in turn."""
    another = LocalDatabaseResource("another", lambda: sqlite3.connect(tmp_path / "another.sqlite", check_same_thread=False))
    another.check()
    shop.at["broker.commit.before"] = killed
    with pytest.raises(Killed):
        run_blocking(shop.begin().commit())
    (xid,) = shop.durable.prepared
    another.decide(Decision(xid.gtrid, Outcome.ROLLBACK, (), 1, "a recoverer that was killed"))
    recoverer = Recoverer("shop", shop.log, (another, *shop.process()), by="application", patient=False)
    assert recoverer.report(xid.gtrid).finding is TransactionFinding.COMMITTED
    assert recoverer.finish_now(xid, Outcome.ROLLBACK) is Outcome.COMMIT
    assert shop.where == BOTH
    shop.database.forget_decisions([xid.gtrid])  # like the process of the transaction
    assert recoverer.report(xid.gtrid).finding is TransactionFinding.COMMITTED
    shop.database.decisions("shop")
    assert recoverer.report(xid.gtrid).finding is TransactionFinding.NOT_FOUND


def test_decision_row_deleted_during_rollback_decision_counts_as_commit(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Decision(new_gtrid("shop", 0, "aaaaaaaa", deciders=["database"]), Outcome.COMMIT, ("broker",), 1, "x")
    shop.database.decide(commit)
    table = shop.database._table
    monkeypatch.setattr(table, "find", lambda raw, gtrid: table.delete(raw, [gtrid]))
    assert shop.database.decide(replace(commit, outcome=Outcome.ROLLBACK)).outcome is Outcome.COMMIT


def test_unresolvable_commit_is_in_doubt_until_recovery(shop: Shop) -> None:
    for refusal in (sqlite3.OperationalError("unable to open database file"), SerializationFailure()):
        transaction = shop.begin()
        shop.unanswered(
            transaction,
            carried_out=True,
            error=sqlite3.OperationalError("connection lost"),
            then=lambda refusal=refusal: setattr(shop, "away", refusal),  # type: ignore[misc]
        )
        with pytest.raises(TransactionInDoubt):
            run_blocking(transaction.commit())
        assert transaction.status is TransactionStatus.IN_DOUBT
        shop.away = None
        shop.recover()
        assert shop.where == BOTH
        shop.empty()


def test_autocommit_connection_is_refused_when_manager_opens(shop: Shop) -> None:
    def connect() -> sqlite3.Connection:
        return sqlite3.connect(shop.path, isolation_level=None)

    database = LocalDatabaseResource("database", connect)
    with pytest.raises(InvalidInput, match="database: rows in table bascule_decisions survive a rollback"):
        TransactionManager("shop", shop.log, [shop.broker, database]).open()
    assert shop.decisions() == []


def test_failed_statement_in_deciding_database_is_rolled_back_with_transaction(shop: Shop) -> None:
    run_blocking(shop.begin().commit())
    transaction = shop.begin(shop.broker)
    handle = run_blocking(transaction.enlist(BlockingParticipant(shop.database)))
    with pytest.raises(sqlite3.IntegrityError):
        handle.execute("INSERT INTO payments VALUES ('row')")
    run_blocking(transaction.rollback())
    assert shop.where == BOTH


@pytest.mark.parametrize("alone", [True, False], ids=["in one phase", "with a decision"])
@pytest.mark.parametrize(
    "ended",
    [
        lambda handle: handle.execute("INSERT OR ROLLBACK INTO payments VALUES ('row')"),
        lambda handle: handle.execute("ROLLBACK"),
        lambda handle: handle.execute("COMMIT"),
    ],
    ids=["rolled back by an error", "rolled back by a statement", "committed by a statement"],
)
def test_branch_whose_transaction_the_database_has_ended_does_not_commit_its_rest(
    shop: Shop, ended: Callable[[Any], object], alone: bool
) -> None:
    transaction = shop.begin(*([shop.database] if alone else [shop.broker, shop.database]))
    handle = shop.database._work[branch(transaction.gtrid, "database")].handle
    with suppress(sqlite3.IntegrityError):  # the application goes on
        ended(handle)
    handle.execute("INSERT INTO payments VALUES ('rest')")
    with pytest.raises(TransactionRolledBack, match="has ended the transaction of branch"):
        run_blocking(transaction.commit())
    assert "rest" not in shop.rows()
    assert shop.durable.committed == []


def test_second_database_that_cannot_prepare_is_refused_and_error_names_both(shop: Shop) -> None:
    other = LocalDatabaseResource("other", shop.connect)
    transaction = shop.begin(shop.broker, shop.database)
    with pytest.raises(InvalidInput, match="neither other nor database can prepare a branch; at most one database"):
        run_blocking(transaction.enlist(BlockingParticipant(other)))
    with pytest.raises(TransactionRolledBack, match="marked for rollback"):
        run_blocking(transaction.commit())
    assert shop.where == NEITHER
    assert other._work == {}


def test_operator_cannot_commit_transaction_that_database_has_not_committed(shop: Shop) -> None:
    gtrid = new_gtrid("shop", 0, "aaaaaaaa", deciders=["database"])
    xid = branch(gtrid, "broker")
    shop.durable.prepared[xid] = ["message"]
    recoverer = Recoverer("shop", shop.log, shop.process(), by="operator", patient=False)
    with pytest.raises(InvalidInput, match="Roll the branch back"):
        recoverer.finish_now(xid, Outcome.COMMIT)
    assert recoverer.finish_now(xid, Outcome.ROLLBACK) is Outcome.ROLLBACK
    assert shop.durable.prepared == {}
    assert len(shop.decisions()) == 1  # the decision refuses the commit of a slow application


def test_operator_cannot_commit_transaction_with_stored_rollback_decision(shop: Shop) -> None:
    """The table has the ROLLBACK, but the log does not: the process ended, or the log was unavailable."""
    gtrid = new_gtrid("shop", 0, "aaaaaaaa", deciders=["database"])
    xid = branch(gtrid, "broker")
    shop.durable.prepared[xid] = ["message"]
    shop.database.decide(Decision(gtrid, Outcome.ROLLBACK, (), 1, "application"))
    recoverer = Recoverer("shop", shop.log, shop.process(), by="operator", patient=False)
    assert recoverer.finish_now(xid, Outcome.COMMIT) is Outcome.ROLLBACK
    assert shop.where == NEITHER
    assert shop.durable.prepared == {}


def test_commit_by_operator_keeps_decision_row_for_process_without_answer(shop: Shop) -> None:
    def finish() -> None:
        (xid,) = shop.durable.prepared
        recoverer = Recoverer("shop", shop.log, shop.process(), by="operator", patient=False)
        assert recoverer.finish_now(xid, Outcome.COMMIT) is Outcome.COMMIT
        for _ in range(2):
            recoverer.run()

    transaction = shop.begin()
    shop.unanswered(transaction, carried_out=True, error=sqlite3.OperationalError("connection lost"), then=finish)
    run_blocking(transaction.commit())
    assert transaction.status is TransactionStatus.COMMITTED
    assert shop.where == BOTH


def test_first_decision_in_table_stands_and_manager_reads_only_its_own_decisions(shop: Shop) -> None:
    own, like = (new_gtrid(name, 0, "aaaaaaaa", deciders=["database"]) for name in ("sh_p", "shop"))
    commit, rollback = (Decision(own, outcome, ("broker",), 1, "x") for outcome in Outcome)
    assert shop.database.decide(commit) == commit
    assert shop.process()[0].decide(rollback) == commit
    shop.database.decide(Decision(like, Outcome.ROLLBACK, (), 1, "x"))
    assert shop.database.decisions("sh_p") == [commit]
    shop.database.forget_decisions([own])
    assert shop.database.decisions("sh_p") == []
    assert len(shop.decisions()) == 1


def decision(outcome: Outcome = Outcome.COMMIT) -> Decision:
    return Decision(new_gtrid("shop", 0, "aaaaaaaa", deciders=["database"]), outcome, ("broker",), 1, "x")


def lost(*_: Any) -> None:
    raise sqlite3.OperationalError("connection lost")


def test_connection_lost_before_decision_is_written_rolls_back(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    transaction = shop.begin()
    monkeypatch.setattr(shop.database._table, "insert", lost)
    with pytest.raises(TransactionRolledBack, match=r"database lost branch .*connection lost"):
        run_blocking(transaction.commit())
    assert (shop.where, shop.decisions()) == (NEITHER, [])


def test_decision_that_cannot_be_stored_raises_resource_failed(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shop.database._table, "insert", lost)
        with pytest.raises(ResourceFailed, match="connection lost"):
            shop.database.decide(decision(Outcome.ROLLBACK))
    assert shop.decisions() == []


def test_database_without_decision_table_has_no_decisions(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shop.database, "has_decisions", lambda _: False)
    assert shop.database.decide(asked := decision(Outcome.ROLLBACK)) == asked
    assert (shop.database.decisions("shop"), shop.decisions()) == ([], [])


def test_forgotten_decisions_are_deleted_in_batches_and_kept_while_database_is_away(shop: Shop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORGOTTEN_MAX", 2)
    first, second, third = (shop.database.decide(decision()) for _ in range(3))
    shop.database.forget_decisions([first.gtrid])
    assert len(shop.decisions()) == 3
    shop.away = sqlite3.OperationalError("unable to open database file")
    shop.database.forget_decisions([second.gtrid])
    shop.away = None
    assert len(shop.decisions()) == 3
    shop.database.forget_decisions([first.gtrid])
    assert [each.gtrid for each in shop.database.decisions("shop")] == [third.gtrid]
