"""MariaDB with prepared branches, through a driver with two-phase commit: processes, sessions and the server die, or are suspended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("pymysql", reason="the driver of the development packages (make setup) is missing")

from bascule.embedded.jars import JarUnavailable
from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.xa import TransactionManager, TransactionRolledBack
from bascule.xa.database import DbapiResource
from bascule.xa.errors import RetryLater
from bascule.xa.log import LogState, Outcome
from tests.support.mariadb import MISSING, MariaDb, mariadb
from tests.support.mariadb_two_phase import TwoPhaseConnection
from tests.support.system import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(MISSING), reason=MISSING)]
BOTH: tuple[list[str], list[str]] = (["one"], ["message"])
NEITHER: tuple[list[str], list[str]] = ([], [])


class Killed(GeneratorExit):
    """The process has ended here."""


def killed() -> None:
    raise Killed


@pytest.fixture(scope="module")
def server() -> Iterator[MariaDb]:
    try:
        with mariadb() as server:
            yield server
    except JarUnavailable as error:
        pytest.skip(f"MariaDB could not be fetched: {error}")


@dataclass
class TwoPhaseShop:
    """A table in MariaDB, and a model of a broker. Each process has its own resources."""

    server: MariaDb
    durable: DurableBranches = field(default_factory=DurableBranches)
    log: ModelLog = field(default_factory=lambda: ModelLog(LogState(log_id="aaaaaaaa")))
    at: dict[str, Any] = field(default_factory=dict)

    def connect(self) -> TwoPhaseConnection:
        return TwoPhaseConnection(self.server.connect())

    def process(self) -> tuple[DbapiResource[TwoPhaseConnection], ModelResource]:
        return DbapiResource("database", self.connect), ModelResource("broker", self.durable, watch=self._watch)

    def pay(self, manager: TransactionManager, *, vote: bool = True) -> None:
        database, broker = manager.resources["database"], manager.resources["broker"]
        with manager.begin() as transaction:
            transaction.enlist(database).execute("INSERT INTO payments VALUES ('one')")
            transaction.enlist(broker).append("message")
            broker.vote = "yes" if vote else "no"  # type: ignore[attr-defined]

    def where(self) -> tuple[list[str], list[str]]:
        with closing(self.server.connect()) as connection, connection.cursor() as cursor:
            cursor.execute("SELECT item FROM payments")
            return [row[0] for row in cursor.fetchall()], self.durable.committed

    def await_recovery(self) -> None:
        """Return when no branch is prepared: until the server has ended the session of a killed process, only that session can end it."""
        with closing(self.connect()) as connection:
            wait_for(lambda: not connection.tpc_recover(), "recovery to finish the branch")

    def _watch(self, point: str) -> None:
        if point in self.at:
            self.at.pop(point)()


@pytest.fixture
def shop(server: MariaDb) -> TwoPhaseShop:
    with closing(server.connect()) as connection, connection.cursor() as cursor:
        cursor.execute("DROP TABLE IF EXISTS payments")
        cursor.execute("CREATE TABLE payments (item VARCHAR(64) UNIQUE)")
    return TwoPhaseShop(server)


def test_prepared_branch_in_mariadb_commits_or_rolls_back_with_others(shop: TwoPhaseShop) -> None:
    with TransactionManager("shop", shop.log, shop.process()) as manager:
        with pytest.raises(TransactionRolledBack):
            shop.pay(manager, vote=False)
        assert shop.where() == NEITHER
        shop.pay(manager)
    assert shop.where() == BOTH
    with closing(shop.connect()) as connection:
        assert connection.tpc_recover() == []
    assert shop.log.durable.decisions == {}


@pytest.mark.parametrize(("point", "left"), [("broker.prepare.after", NEITHER), ("broker.commit.before", BOTH)])
@pytest.mark.parametrize("restarts", [False, True], ids=["server stays", "server is killed, too"])
def test_recovery_finishes_branch_of_killed_process_in_mariadb(
    shop: TwoPhaseShop, point: str, left: tuple[list[str], list[str]], restarts: bool
) -> None:
    shop.at[point] = killed
    database, broker = shop.process()
    broker.priority = 50  # before the database, which is prepared at the time of the kill
    manager = TransactionManager("shop", shop.log, [database, broker])
    manager.open()
    with pytest.raises(Killed):
        shop.pay(manager)
    if restarts:
        shop.server.kill()
        shop.server.start()
    for work in database._work.values():
        work.close(reusable=False)  # as the end of the process would
    manager.close()
    with TransactionManager("shop", shop.log, shop.process()):
        shop.await_recovery()
    assert shop.where() == left
    assert shop.durable.prepared == {}


def test_decision_is_kept_while_suspended_process_holds_its_branch(shop: TwoPhaseShop) -> None:
    """MariaDB tells other sessions that there is no such branch. If that counted, a later recovery would roll the branch back."""
    waiting: list[Any] = []

    def recover_meanwhile() -> None:
        recovered = TransactionManager("shop", shop.log, shop.process(), shared=True).recoverer().run()
        waiting.extend(recovered.failed.values())
        raise Killed

    shop.at["broker.commit.before"] = recover_meanwhile
    database, broker = shop.process()
    broker.priority = 50
    manager = TransactionManager("shop", shop.log, [database, broker], shared=True)
    manager.open()
    with pytest.raises(Killed):
        shop.pay(manager)
    assert ["is still open" in each for each in waiting] == [True]
    assert [each.outcome for each in shop.log.durable.decisions.values()] == [Outcome.COMMIT]
    (xid,) = database.recover()
    with pytest.raises(RetryLater):
        shop.process()[0].rollback(xid)
    for work in database._work.values():
        work.close(reusable=False)
    manager.close()
    with TransactionManager("shop", shop.log, shop.process()):
        shop.await_recovery()
    assert shop.where() == BOTH
    assert shop.log.durable.decisions == {}
