"""JTA transactions over the broker and PostgreSQL, by Narayana and by Atomikos: application, broker, database and recovery are killed."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from bascule.client import Queue, connect
from bascule.embedded.jars import classpath
from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from tests.support.java import JARS, SMALL_JVM, compiled_sources
from tests.support.maven import XA_PROJECT
from tests.support.speed import SLOWNESS
from tests.support.system import System

#: Two passes of recovery, each with its pauses, on a loaded machine.
RUN_TIMEOUT_S = 120.0 * SLOWNESS
#: Of a transaction, for which the recovery of Atomikos waits; the second one has room for the next start of a service.
TIMEOUT_S = round(10 * SLOWNESS)
LONG_TIMEOUT_S = round(30 * SLOWNESS)
SOURCES = [*(XA_PROJECT / "bascule-xa-jakarta" / "src" / "main" / "java").rglob("*.java"), *(XA_PROJECT / "payments").glob("*.java")]
#: Transaction managers, by their sets of jars.
MANAGERS = ("narayana", "atomikos")
RESOURCES = ("database", "jms")
POINTS = [
    f"{resource}.{call}"
    for resource in RESOURCES
    for call in ("end.after", "prepare.before", "prepare.after", "commit.before", "commit.after")
]
ROLLBACK_POINTS = [f"{resource}.rollback.{when}" for resource in RESOURCES for when in ("before", "after")]
ALL_POINTS = (*POINTS, *ROLLBACK_POINTS)
#: Undecided with both prepared; decided; half committed.
SHORT = ("jms.prepare.after", "database.commit.before", "jms.commit.before")
#: Of the points at which a service is killed.
SHORT_SERVICE = ("jms.commit.before",)
#: Where the application is killed, and where in the recovery that follows.
RECOVERIES = [
    *(("database.commit.before", f"{resource}.commit.{when}") for resource in RESOURCES for when in ("before", "after")),
    *(("jms.prepare.after", point) for point in ROLLBACK_POINTS),
]
COMMITTED, ROLLED_BACK = "committed", "rolled back"
Outcome = tuple[list[str], list[str], list[str]]
#: Orders that wait, rows, bills.
OUTCOMES: dict[str, Outcome] = {COMMITTED: ([], ["order"], ["order"]), ROLLED_BACK: (["order"], [], [])}
#: What a resource that was away has kept is found by the next recovery.
RECOVERIES_MAX = 3


def action_to(point: str) -> str:
    return "fail" if ".rollback." in point else "pay"


def expected(point: str) -> str:
    """Return what becomes of a transaction whose application is killed at a point."""
    return COMMITTED if ".commit." in point else ROLLED_BACK


class Shop:
    """The surroundings of an application whose transactions share a transaction log; each has queues and a table of its own."""

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
        """Return what became of the transaction."""
        command = self._command(action, name)
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.removesuffix("\n")

    @contextmanager
    def stopped(self, action: str, name: str, point: str) -> Iterator[Callable[[], str]]:
        """The application stands at a point until it is killed at the end of the block.

        What is given lets it go on, and returns what became of its transaction.
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
        """Let the application come to a point, and kill it there."""
        with self.stopped(action, name, point):
            pass

    def order(self) -> str:
        """Make queues and a table, and send an order: returns their name."""
        name = next(self._names)
        with psycopg.connect(self.database.conninfo, autocommit=True) as rows:
            rows.execute(f"CREATE TABLE {name} (item text)")
        with connect(self.system.url) as context:
            context.send(Queue(f"{name}.orders"), "order")
        return name

    def recover(self) -> None:
        """Until nothing is in doubt."""
        for _ in range(RECOVERIES_MAX):
            if self.in_doubt():
                assert self.run("recover") == "recovered"
        assert self.in_doubt() == []

    def in_doubt(self) -> list[str]:
        """Return the prepared branches in the database and in the broker."""
        with psycopg.connect(self.database.conninfo) as rows:
            prepared = [str(gid) for (gid,) in rows.execute("SELECT gid FROM pg_prepared_xacts")]
        return prepared + [branch["xid"] for branch in self.system.status()["branches"]]

    def outcome(self, name: str) -> Outcome:
        """Return the orders, the rows and the bills."""
        with psycopg.connect(self.database.conninfo) as rows, connect(self.system.url) as context:
            orders, bills = ([str(each.body) for each in context.browse(Queue(f"{name}.{queue}"))] for queue in ("orders", "bills"))
            return orders, [row[0] for row in rows.execute(f"SELECT item FROM {name}")], bills


def _result(application: subprocess.Popen[str]) -> str:
    assert application.stdin is not None
    assert application.stdout is not None
    application.stdin.write("\n")
    application.stdin.flush()
    return application.stdout.read().removesuffix("\n")


@pytest.fixture(scope="module")
def system(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("java"), prefix="java-xa", config="[broker]\nallow_anonymous = true\n") as running:
        yield running


@pytest.fixture(scope="module")
def own_postgres() -> Iterator[EmbeddedPostgres]:
    """Unlike that of the whole run it may be killed, and no other test has branches in it."""
    directory = Path(tempfile.mkdtemp(prefix="bascule-postgres-"))
    directory.chmod(0o755)
    try:
        with EmbeddedPostgres(directory / "data", fsync=False) as running:
            yield running
    finally:
        shutil.rmtree(directory)


@pytest.fixture(params=MANAGERS)
def shop(request: pytest.FixtureRequest, system: System, own_postgres: EmbeddedPostgres, tmp_path: Path, name: str) -> Shop:
    return Shop(request.param, system, own_postgres, tmp_path, name)


def some_and_all(some: tuple[str, ...]) -> pytest.MarkDecorator:
    everything = pytest.param(ALL_POINTS, marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="all")
    return pytest.mark.parametrize("points", [pytest.param(some, id="some"), everything])


@pytest.mark.parametrize(("action", "told"), [("pay", COMMITTED), ("fail", ROLLED_BACK)])
def test_manager_commits_or_rolls_back_messages_and_rows_together(shop: Shop, action: str, told: str) -> None:
    name = shop.order()
    assert shop.run(action, name) == told
    assert shop.outcome(name) == OUTCOMES[told]
    assert shop.in_doubt() == []


@some_and_all(SHORT)
def test_manager_recovers_after_the_application_is_killed(shop: Shop, points: tuple[str, ...]) -> None:
    names = {point: shop.order() for point in points}
    for point, name in names.items():
        shop.kill(action_to(point), name, point)
    shop.recover()
    assert {point: shop.outcome(name) for point, name in names.items()} == {point: OUTCOMES[expected(point)] for point in points}


@some_and_all(SHORT_SERVICE)
@pytest.mark.parametrize("service", ["broker", "database"])
def test_manager_finishes_what_the_death_of_a_service_leaves(shop: Shop, points: tuple[str, ...], service: str) -> None:
    shop.timeout_s = LONG_TIMEOUT_S
    names = {point: shop.order() for point in points}
    told = {}
    for point, name in names.items():
        with shop.stopped(action_to(point), name, point) as go_on:
            restart(shop, service)
            told[point] = go_on()
    shop.recover()
    wanted = {point: OUTCOMES.get(told[point], OUTCOMES[expected(point)]) for point in points}
    assert {point: shop.outcome(name) for point, name in names.items()} == wanted, told


def restart(shop: Shop, service: str) -> None:
    if service == "broker":
        shop.system.broker.restart()
    else:
        shop.database.kill()
        shop.database.start()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_recovery_that_is_killed_is_finished_by_the_next_one(shop: Shop) -> None:
    names = {points: shop.order() for points in RECOVERIES}
    for (point, recovery_point), name in names.items():
        shop.kill("pay", name, point)
        shop.kill("recover", "", recovery_point)
    shop.recover()
    assert {points: shop.outcome(name) for points, name in names.items()} == {points: OUTCOMES[expected(points[0])] for points in names}
