"""The application of java/xa/payments, with its queues, tables, and the log of its transaction manager."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from bascule.client import Queue, connect
from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bascule.embedded.postgres import EmbeddedPostgres
from tests.support.java import JARS, SMALL_JVM, compiled_sources
from tests.support.maven import XA_PROJECT
from tests.support.speed import SLOWNESS
from tests.support.system import System

#: Duration of two recovery passes with their pauses, on a loaded machine.
RUN_TIMEOUT_S = 120.0 * SLOWNESS
#: Timeouts of a transaction, for which the recovery of Atomikos waits. The second one leaves time for a restart of a service.
TIMEOUT_S = round(10 * SLOWNESS)
LONG_TIMEOUT_S = round(30 * SLOWNESS)
SOURCES = [*(XA_PROJECT / "bascule-xa-jakarta" / "src" / "main" / "java").rglob("*.java"), *(XA_PROJECT / "payments").glob("*.java")]
#: Transaction managers, by the names of their sets of jars.
MANAGERS = ("narayana", "atomikos")
#: The manager of tests that the default suite runs with only one.
MANAGER_PARAMS = [MANAGERS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in MANAGERS[1:])]
COMMITTED, ROLLED_BACK = "committed", "rolled back"
#: The number of waiting orders, of rows, and of bills.
Outcome = tuple[int, int, int]
OUTCOMES: dict[str, Outcome] = {COMMITTED: (0, 1, 1), ROLLED_BACK: (1, 0, 0)}
#: The next recovery finds what a resource kept while it was unavailable.
RECOVERIES_MAX = 3


class Shop:
    """The environment of an application whose transactions share a transaction log. Each has its own queues and table."""

    def __init__(self, manager: str, system: System, database: EmbeddedPostgres, directory: Path, name: str) -> None:
        self.manager = manager
        self.system = system
        self.database = database
        self.timeout_s = TIMEOUT_S
        self._log = directory / manager
        self._names = (f"{''.join(each if each.isalnum() else '_' for each in name.lower())}_{number}" for number in itertools.count())

    def _command(self, action: str, name: str, *point: str) -> list[str]:
        jars = [*classpath(JARS), *classpath(self.manager)]
        path = os.pathsep.join(map(str, [compiled_sources("payments", sorted(SOURCES), JARS, *MANAGERS), *jars]))
        jdbc = f"jdbc:postgresql://127.0.0.1:{self.database.port}/postgres?user=postgres"
        return [
            str(find_jdk().executable), *SMALL_JVM, "-cp", path, "bascule.payments.Payments", action, self.manager, str(self.timeout_s),
            self.system.failover_url, jdbc, str(self._log), name, *point,
        ]  # fmt: skip

    def run(self, action: str, name: str = "") -> str:
        """Run the application, and return the outcome of its transaction."""
        command = self._command(action, name)
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=RUN_TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stdout
        return done.stdout.removesuffix("\n")

    @contextmanager
    def stopped(self, action: str, name: str, point: str) -> Iterator[Callable[[], str]]:
        """Hold the application at a point until the end of the block, which kills it.

        The function that the block receives lets the application continue, and returns the outcome of its transaction.
        """
        command = self._command(action, name, point)
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as application:
            assert application.stdout is not None
            reached = application.stdout.readline()
            try:
                assert reached == f"at {point}\n"
                yield lambda: _result(application)
            finally:
                application.kill()

    def kill(self, action: str, name: str, point: str) -> None:
        """Kill the application at a point."""
        with self.stopped(action, name, point):
            pass

    def order(self) -> str:
        """Create a table, and send an order. Return the name of the table, which is the text of the order."""
        name = next(self._names)
        with psycopg.connect(self.database.conninfo, autocommit=True) as rows:
            rows.execute(f"CREATE TABLE {name} (item text)")
        with connect(self.system.url) as context:
            context.send(Queue(f"{name}.orders"), name)
        return name

    def recover(self) -> None:
        """Run recovery until nothing is in doubt."""
        for _ in range(RECOVERIES_MAX):
            if self.in_doubt():
                assert self.run("recover") == "recovered"
        assert self.in_doubt() == []

    def in_doubt(self) -> list[str]:
        """Return the prepared branches of the database and of the broker."""
        with psycopg.connect(self.database.conninfo) as rows:
            prepared = [str(gid) for (gid,) in rows.execute("SELECT gid FROM pg_prepared_xacts")]
        return prepared + [branch["xid"] for branch in self.system.status()["branches"]]

    def outcome(self, name: str) -> Outcome:
        """Return what the database and the broker have of an order."""
        with psycopg.connect(self.database.conninfo) as rows:
            (count,) = rows.execute(f"SELECT count(*) FROM {name} WHERE item = '{name}'").fetchone() or (0,)
        return self.system.depth(f"{name}.orders"), int(count), self.system.depth(f"{name}.bills")


def _result(application: subprocess.Popen[str]) -> str:
    assert application.stdin is not None
    assert application.stdout is not None
    application.stdin.write("\n")
    application.stdin.flush()
    return application.stdout.read().removesuffix("\n")
