"""Several databases can decide, and one of them does not answer: what the others say about its transactions proves nothing."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from bascule.core.effects import run_blocking
from bascule.core.errors import Unavailable
from bascule.xa import TransactionFinding
from bascule.xa.blocking import BlockingLog, BlockingParticipant
from bascule.xa.errors import ResourceFailed
from bascule.xa.local_database import LocalDatabaseResource
from bascule.xa.log import DECISION_KEPT_S, Decision, Outcome
from bascule.xa.plan import Action
from bascule.xa.recovery import Recoverer
from bascule.xa.recovery_protocol import RecoveryProtocol
from bascule.xa.xid import new_gtrid
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


def test_age_of_a_rollback_in_a_database_counts_on_while_another_one_is_silent(shop: Shop, tmp_path: Path) -> None:
    another = LocalDatabaseResource("another", lambda: sqlite3.connect(tmp_path / "another.sqlite", check_same_thread=False))
    another.check()
    gtrid = new_gtrid("shop", 0, "aaaaaaaa", decides=True)
    another.decide(Decision(gtrid, Outcome.ROLLBACK, (), 1, "another process"))
    clock = FakeClock()
    participants = {each.name: BlockingParticipant(each) for each in (another, *shop.process())}
    recovery = RecoveryProtocol("shop", BlockingLog(shop.log), participants, clock, "recoverer")
    for seconds, away, left in [(0.0, None, 1), (1.0, "no route", 1), (DECISION_KEPT_S + 1, "no route", 1), (DECISION_KEPT_S + 2, None, 0)]:
        clock.seconds, shop.away = seconds, sqlite3.OperationalError(away) if away else None
        run_blocking(recovery.run(tuple, patient=False))
        assert len(another.decisions("shop")) == left
