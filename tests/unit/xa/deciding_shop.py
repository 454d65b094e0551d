"""A shop with a SQLite database that decides its transactions, and a model of a broker. Its process can be killed at a point."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bascule.core.effects import run_blocking
from bascule.testing.xa import DurableBranches, ModelLog, ModelResource
from bascule.xa.blocking import BlockingLog, BlockingParticipant, SystemClock
from bascule.xa.decision_table import TABLE
from bascule.xa.local_database import LocalDatabaseResource
from bascule.xa.log import LogState
from bascule.xa.recovery import Recoverer
from bascule.xa.two_phase import TwoPhase
from bascule.xa.xid import branch, new_gtrid


class Killed(GeneratorExit):
    """The process was killed at this point."""


class Unanswered:
    """A connection that carries out its commit, or not, and then raises an error instead of an answer."""

    def __init__(self, raw: sqlite3.Connection, carried_out: bool, error: Exception, then: Callable[[], object]) -> None:
        self.raw, self.carried_out, self.error, self.then = raw, carried_out, error, then

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)

    def commit(self) -> None:
        if self.carried_out:
            self.raw.commit()
        self.then()
        raise self.error


class SerializationFailure(Exception):
    sqlstate = "40001"


class GeneralError(Exception):
    """A driver of MySQL raises such an error if the server refuses a statement, and also if the connection is lost."""

    sqlstate = "HY000"


class FakeClock:
    """A clock that only the test advances."""

    seconds = 0.0

    def now_ms(self) -> int:
        return 0

    def monotonic_s(self) -> float:
        return self.seconds


class Shop:
    """A database, and a model of a broker. ``at`` has the calls to make at points of the broker. Each process has its own resources."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "shop.sqlite"
        self.durable, self.log = DurableBranches(), ModelLog(LogState(log_id="aaaaaaaa"))
        self.at: dict[str, Callable[[], object]] = {}
        self.away: Exception | None = None
        with sqlite3.connect(self.path) as connection:
            connection.execute("CREATE TABLE payments (item TEXT UNIQUE)")
        self.database, self.broker = self.process()
        self.database.check()

    def process(self) -> tuple[LocalDatabaseResource, ModelResource]:
        return LocalDatabaseResource("database", self.connect), ModelResource("broker", self.durable, watch=self._watch)

    def connect(self) -> sqlite3.Connection:
        if self.away is not None:
            raise self.away
        return sqlite3.connect(self.path, timeout=0.1, check_same_thread=False)

    def begin(self, *resources: Any) -> TwoPhase:
        gtrid = new_gtrid("shop", 0, "aaaaaaaa", deciders=["database"])
        transaction = TwoPhase(gtrid, 60.0, BlockingLog(self.log), SystemClock(), "application")
        for resource in resources or (self.broker, self.database):
            handle = run_blocking(transaction.enlist(BlockingParticipant(resource)))
            if resource is self.broker:
                handle.append("message")
            else:
                handle.execute("INSERT INTO payments VALUES ('row')")
        return transaction

    def recover(self, *without: str) -> Any:
        resources = [each for each in self.process() if each.name not in without]
        return Recoverer("shop", self.log, resources, by="recoverer", patient=False).run()

    def empty(self) -> None:
        with sqlite3.connect(self.path) as connection:
            connection.execute("DELETE FROM payments")
        self.durable.committed.clear()

    def rows(self) -> list[str]:
        return self.select("SELECT item FROM payments")

    def decisions(self) -> list[str]:
        return self.select(f"SELECT decision FROM {TABLE}")

    def select(self, query: str) -> list[str]:
        connection = sqlite3.connect(self.path)
        found = [row[0] for row in connection.execute(query)]
        connection.close()
        return found

    def unanswered(self, transaction: TwoPhase, *, carried_out: bool, error: Exception, then: Callable[[], object] = int) -> None:
        """Let the database carry out the commit, or not; then call ``then``, and let the driver raise ``error``."""
        work = self.database._work[branch(transaction.gtrid, "database")]
        work.raw = Unanswered(work.raw, carried_out, error, then)

    @property
    def where(self) -> tuple[list[str], list[str]]:
        return self.rows(), self.durable.committed

    def _watch(self, point: str) -> None:
        if point in self.at:
            self.at.pop(point)()


BOTH: tuple[list[str], list[str]] = (["row"], ["message"])
NEITHER: tuple[list[str], list[str]] = ([], [])


def killed() -> None:
    raise Killed
