"""Several databases can decide, and one of them does not answer or was removed: the answers of the others prove nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from bascule.core.effects import run_blocking
from bascule.core.errors import InvalidInput, Unavailable
from bascule.xa import TransactionFinding, TransactionManager
from bascule.xa.blocking import BlockingLog, BlockingParticipant
from bascule.xa.errors import ResourceFailed
from bascule.xa.local_database import LocalDatabaseResource
from bascule.xa.log import DECISION_KEPT_S, Decision, Outcome
from bascule.xa.plan import Action
from bascule.xa.recovery import Recoverer
from bascule.xa.recovery_protocol import RecoveryProtocol
from bascule.xa.xid import DECIDERS_MAX, deadline_ms_of, lacks_decider, log_id_of_gtrid, manager_of_gtrid, may_be_in_database, new_gtrid
from tests.unit.xa.deciding_shop import BOTH, FakeClock, Killed, Shop, killed


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def test_rollback_in_one_database_proves_nothing_while_another_one_is_silent(shop: Shop, tmp_path: Path) -> None:
    """The silent database may have committed: a recoverer that died had asked only the other one for a ROLLBACK."""
    another = LocalDatabaseResource("another", lambda: sqlite3.connect(tmp_path / "another.sqlite", check_same_thread=False))
    another.check()
    shop.at["broker.commit.before"] = killed
    with pytest.raises(Killed):
        run_blocking(shop.begin().commit())
    shop.at.clear()
    (xid,) = shop.durable.prepared
    another.decide(Decision(xid.gtrid, Outcome.ROLLBACK, (), 1, "a recoverer that was killed"))
    recoverer = Recoverer("shop", shop.log, (another, *shop.process()), by="another process", patient=False)
    shop.away = sqlite3.OperationalError("connection refused")
    assert recoverer.report(xid.gtrid).finding is TransactionFinding.NOT_KNOWN
    with pytest.raises(Unavailable, match="may have been committed by database, which does not answer"):
        recoverer.finish_now(xid, Outcome.COMMIT)
    with pytest.raises(ResourceFailed):
        recoverer.finish_now(xid, Outcome.ROLLBACK)
    assert [(step.action, step.xid) for step in recoverer.run().steps] == [(Action.WAIT, xid)]
    assert list(shop.durable.prepared) == [xid]
    shop.away = None
    assert recoverer.report(xid.gtrid).finding is TransactionFinding.COMMITTED
    assert recoverer.finish_now(xid, Outcome.COMMIT) is Outcome.COMMIT
    assert shop.where == BOTH


def test_rollback_in_one_of_two_databases_is_no_decision_before_the_other_one_was_asked(shop: Shop, tmp_path: Path) -> None:
    """A recoverer died while it asked the databases for a ROLLBACK. The process of the transaction lives, and commits later."""
    another = LocalDatabaseResource("another", lambda: sqlite3.connect(tmp_path / "another.sqlite", check_same_thread=False))
    another.check()
    found: list[TransactionFinding] = []

    def look() -> None:
        (xid,) = shop.durable.prepared
        another.decide(Decision(xid.gtrid, Outcome.ROLLBACK, (), 1, "a recoverer that was killed"))
        recoverer = Recoverer("shop", shop.log, (another, *shop.process()), by="another process", patient=True)
        found.append(recoverer.report(xid.gtrid).finding)
        with pytest.raises(InvalidInput, match="the database that decides has not committed it"):
            recoverer.finish_now(xid, Outcome.COMMIT)

    shop.at["broker.prepare.after"] = look
    run_blocking(shop.begin().commit())
    assert found == [TransactionFinding.UNDECIDED]
    assert shop.where == BOTH


def test_age_of_a_rollback_in_a_database_counts_on_while_another_one_is_silent(shop: Shop, tmp_path: Path) -> None:
    another = LocalDatabaseResource("another", lambda: sqlite3.connect(tmp_path / "another.sqlite", check_same_thread=False))
    another.check()
    gtrid = new_gtrid("shop", 0, "aaaaaaaa", deciders=["database"])
    another.decide(Decision(gtrid, Outcome.ROLLBACK, (), 1, "another process"))
    clock = FakeClock()
    participants = {each.name: BlockingParticipant(each) for each in (another, *shop.process())}
    recovery = RecoveryProtocol("shop", BlockingLog(shop.log), participants, clock, "recoverer")
    for seconds, away, left in [(0.0, None, 1), (1.0, "no route", 1), (DECISION_KEPT_S + 1, "no route", 1), (DECISION_KEPT_S + 2, None, 0)]:
        clock.seconds, shop.away = seconds, sqlite3.OperationalError(away) if away else None
        run_blocking(recovery.run(tuple, patient=False))
        assert len(another.decisions("shop")) == left


@pytest.mark.parametrize(
    ("others", "asked"),
    [((), False), (("another",), False), (("another",), True)],
    ids=["log-alone", "another-decides", "another-was-asked"],
)
def test_commit_decided_by_a_removed_database_is_not_rolled_back(shop: Shop, tmp_path: Path, others: tuple[str, ...], asked: bool) -> None:
    """The gtrid says which databases may have decided. The others and the log know nothing of the transaction."""
    beside = [LocalDatabaseResource(name, lambda: sqlite3.connect(tmp_path / "other.sqlite", check_same_thread=False)) for name in others]
    shop.at["broker.commit.before"] = killed
    with pytest.raises(Killed):
        run_blocking(shop.begin().commit())
    shop.at.clear()
    (xid,) = shop.durable.prepared
    if asked:
        for each in beside:
            each.check()
            each.decide(Decision(xid.gtrid, Outcome.ROLLBACK, (), 1, "a recoverer that was killed"))
    _, broker = shop.process()
    with TransactionManager("shop", shop.log, [*beside, broker]) as manager:
        recoverer = manager.recoverer()
        (step,) = recoverer.run().steps
        assert (step.action, step.xid) == (Action.WAIT, xid)
        assert "a database that the manager does not have" in step.why
        assert manager.outcome(str(xid)).finding is TransactionFinding.NOT_KNOWN
        for outcome in Outcome:
            with pytest.raises(InvalidInput, match="may be in a database that the manager does not have"):
                recoverer.finish_now(xid, outcome)
    assert list(shop.durable.prepared) == [xid]
    with TransactionManager("shop", shop.log, [*beside, *shop.process()]):
        assert shop.where == BOTH


def test_gtrid_says_whether_a_manager_lacks_a_deciding_database() -> None:
    deadline_ms = 1_790_000_000_123
    gtrid = new_gtrid("s" * 31, deadline_ms, "0a1b2c3d", deciders=["orders", "billing"])
    assert len(gtrid) == 64
    assert (manager_of_gtrid(gtrid), log_id_of_gtrid(gtrid), deadline_ms_of(gtrid)) == ("s" * 31, "0a1b2c3d", deadline_ms)
    assert may_be_in_database(gtrid)
    present = [("billing", "orders"), ("orders", "audit", "billing"), ("orders",), ("billing", "audit"), ("audit",), ()]
    assert [lacks_decider(gtrid, names) for names in present] == [False, False, True, True, True, True]
    assert not lacks_decider(new_gtrid("shop", 0, "0a1b2c3d"), ())


def test_manager_names_its_deciding_databases_in_gtrids(shop: Shop) -> None:
    with TransactionManager("shop", shop.log, [shop.database, shop.broker]) as manager, manager.begin() as transaction:
        assert not lacks_decider(transaction.gtrid, ["database"])
        assert lacks_decider(transaction.gtrid, ["another"])


def test_gtrids_of_earlier_releases_and_of_many_databases_do_not_name_databases() -> None:
    many = [f"database-{number}" for number in range(DECIDERS_MAX + 1)]
    for gtrid in (b"shop/0000000000a-0a1b2c3d.0123456789a", new_gtrid("shop", 10, "0a1b2c3d", deciders=many)):
        assert (log_id_of_gtrid(gtrid), deadline_ms_of(gtrid), may_be_in_database(gtrid)) == ("0a1b2c3d", 10, True)
        assert [lacks_decider(gtrid, names) for names in ((), ("another",))] == [True, False]
    few = new_gtrid("shop", 10, "0a1b2c3d", deciders=many[:2])
    assert not lacks_decider(few, many)
