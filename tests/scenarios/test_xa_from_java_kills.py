"""JTA transactions over the broker and PostgreSQL, by Narayana: application, broker and database are killed in them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
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
SOURCES = [*(XA_PROJECT / "bascule-xa-jakarta" / "src" / "main" / "java").rglob("*.java"), *(XA_PROJECT / "narayana").glob("*.java")]
POINTS = [
    f"{resource}.{call}"
    for resource in ("database", "jms")
    for call in ("end.after", "prepare.before", "prepare.after", "commit.before", "commit.after")
]
#: Undecided with both prepared; decided; half committed.
SHORT = ("jms.prepare.after", "database.commit.before", "jms.commit.before")
PAID, UNPAID = ([], ["order"], ["order"]), (["order"], [], [])


@dataclass(frozen=True)
class Shop:
    """The application's surroundings."""

    system: System
    database: EmbeddedPostgres
    directory: Path
    name: str

    def command(self, action: str, *point: str) -> list[str]:
        path = os.pathsep.join(
            map(str, (compiled_sources("payments", sorted(SOURCES), JARS, "narayana"), *classpath(JARS), *classpath("narayana")))
        )
        jdbc = f"jdbc:postgresql://127.0.0.1:{self.database.port}/postgres?user=postgres"
        return [
            str(find_jdk().executable), *SMALL_JVM, "-cp", path, "bascule.payments.Payments", action, self.system.failover_url, jdbc,
            str(self.directory / "narayana"), self.name, *point,
        ]  # fmt: skip

    def run(self, action: str) -> None:
        done = subprocess.run(self.command(action), capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
        assert done.stdout == "done\n", done.stderr

    def prepare(self) -> None:
        with psycopg.connect(self.database.conninfo, autocommit=True) as rows:
            rows.execute(f"CREATE TABLE {self.name} (item text)")
        with connect(self.system.url) as context:
            context.send(Queue(f"{self.name}.orders"), "order")

    def outcome(self) -> tuple[list[str], list[str], list[str]]:
        """Return the orders, the rows and the bills."""
        with psycopg.connect(self.database.conninfo) as rows, connect(self.system.url) as context:
            orders, bills = ([str(each.body) for each in context.browse(Queue(f"{self.name}.{queue}"))] for queue in ("orders", "bills"))
            return orders, [row[0] for row in rows.execute(f"SELECT item FROM {self.name}")], bills


@pytest.fixture(scope="module")
def system(kafka: EmbeddedKafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path_factory.mktemp("java"), prefix="java-xa", config="[broker]\nallow_anonymous = true\n") as running:
        yield running


@pytest.fixture
def shop(system: System, postgres: EmbeddedPostgres, tmp_path: Path, name: str) -> Shop:
    shop = Shop(system, postgres, tmp_path, "".join(letter if letter.isalnum() else "_" for letter in name.lower()))
    shop.prepare()
    return shop


@pytest.mark.parametrize(("action", "outcome"), [("pay", PAID), ("fail", UNPAID)])
def test_narayana_commits_or_rolls_back_messages_and_rows_together(
    shop: Shop, action: str, outcome: tuple[list[str], list[str], list[str]]
) -> None:
    shop.run(action)
    assert shop.outcome() == outcome


@pytest.mark.parametrize("point", [point if point in SHORT else pytest.param(point, marks=pytest.mark.slow) for point in POINTS])
def test_narayana_recovers_after_the_application_is_killed(shop: Shop, point: str) -> None:
    with subprocess.Popen(shop.command("pay", point), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdout is not None
        assert victim.stdout.readline() == f"at {point}\n"
        victim.kill()
    shop.run("recover")
    assert shop.outcome() == (PAID if ".commit." in point else UNPAID)


@pytest.mark.slow
@pytest.mark.parametrize("point", POINTS)
def test_narayana_finishes_what_the_death_of_the_broker_leaves(shop: Shop, point: str) -> None:
    with subprocess.Popen(shop.command("pay", point), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as victim:
        assert victim.stdin is not None
        assert victim.stdout is not None
        assert victim.stdout.readline() == f"at {point}\n"
        shop.system.broker.restart()
        victim.stdin.write("\n")
        victim.stdin.flush()
        victim.stdout.read()
    shop.run("recover")
    assert shop.outcome() in (PAID, UNPAID)
