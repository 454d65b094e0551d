"""The Spring Boot example with Atomikos and its broker are killed: each order is in all places once."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from bascule.client import Queue, connect
from bascule.embedded.jars import classpath, jar_sets
from bascule.embedded.java import find_jdk
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.embedded.process import Child
from tests.examples.pages import ROOT, blocks
from tests.scenarios.topics import Reader
from tests.support.java import JARS, SMALL_JVM, compiled_sources
from tests.support.maven import XA_PROJECT
from tests.support.system import PYTHON_FAILOVER, System, wait_for

pytestmark = [pytest.mark.services, pytest.mark.timeout(280)]
EXAMPLE = ROOT / "examples" / "spring-boot"
CONFIG = ROOT / "examples" / "spring-boot.toml"
SPRING_BOOT = "spring-boot"
SOURCES = [*(XA_PROJECT / "bascule-xa-jakarta" / "src" / "main" / "java").rglob("*.java"), EXAMPLE / "Payments.java"]
ORDERS = 40
LAST = "last"
#: After its next start, Atomikos waits 30 s before it rolls back branches without a decision.
DEADLINE_S = 150.0
PREPARED = "SELECT count(*) FROM pg_prepared_xacts"


@pytest.fixture
def system(kafka: EmbeddedKafka, topic_prefix: str, tmp_path: Path) -> Iterator[System]:
    config = CONFIG.read_text().replace('to = "payments"', f'to = "{topic_prefix}.payments"')
    with System(kafka.bootstrap, tmp_path / "system", prefix=topic_prefix, config=config) as running:
        yield running


def application(system: System, postgres: EmbeddedPostgres, directory: Path) -> Child:
    path = os.pathsep.join(
        map(str, [compiled_sources("spring-boot", sorted(SOURCES), JARS, SPRING_BOOT), EXAMPLE, *classpath(JARS), *classpath(SPRING_BOOT)])
    )
    settings = {
        "broker-url": f"{system.failover_url}&jms.prefetchPolicy.all=0",
        "database-url": f"jdbc:postgresql://127.0.0.1:{postgres.port}/postgres?user=postgres",
        "transaction-log": directory / "transactions",
    }
    arguments = [f"--shop.{name}={value}" for name, value in settings.items()]
    command = [find_jdk().executable, *SMALL_JVM, "-cp", path, "shop.Payments", *arguments]
    return Child(command, log_file=directory / "payments.log", name="payments")


def test_each_order_is_in_database_queue_and_kafka_once_though_application_and_broker_are_killed(
    system: System, kafka: EmbeddedKafka, postgres: EmbeddedPostgres, topic_prefix: str, tmp_path: Path
) -> None:
    with psycopg.connect(postgres.conninfo, autocommit=True) as database:
        database.execute("DROP TABLE IF EXISTS payments")
        before = database.execute(PREPARED).fetchone()
    orders = [f"order {number}" for number in range(ORDERS)]
    program = application(system, postgres, tmp_path)

    def paid() -> list[str]:
        try:
            with psycopg.connect(postgres.conninfo) as database:
                return [item for (item,) in database.execute("SELECT item FROM payments")]
        except psycopg.errors.UndefinedTable:
            return []

    def reaches(count: int) -> None:
        wait_for(lambda: len(paid()) >= count, lambda: f"{count} rows; the program said {program_log.read_text()[-2000:]}", DEADLINE_S)

    program_log = tmp_path / "payments.log"
    system.pipelines.launch()
    program.start()
    try:
        with connect(PYTHON_FAILOVER.format(system.url)) as context:
            context.producer(Queue("payments.orders")).send_many(orders)
            for share in (1, 2):
                reaches(share * ORDERS // 8)
                program.kill()
                program.start()
            reaches(3 * ORDERS // 8)
            system.broker.restart()
            reaches(ORDERS)
            wait_for(lambda: system.depth("payments.orders") == 0, "all orders to be done", DEADLINE_S)
            context.send(Queue("payments.audit"), LAST)
            confirmed = [str(message.body) for message in context.browse(Queue("payments.confirmed"))]
    finally:
        program.stop()
    reader = Reader(kafka.bootstrap, f"{topic_prefix}.payments")
    records = reader.read_until(LAST)[:-1]
    reader.close()
    assert Counter(paid()) == Counter(confirmed) == Counter(records) == Counter(orders)
    assert system.depth("payments.audit") == 0
    assert system.status()["branches"] == []
    with psycopg.connect(postgres.conninfo) as database:
        assert database.execute(PREPARED).fetchone() == before


def test_guide_names_the_atomikos_version_that_is_tested() -> None:
    pages = "".join(block.text for block in blocks(ROOT / "docs" / "guides" / "xa-java.md") if block.language == "xml")
    named = [":".join(part.text or "" for part in each) for each in ElementTree.fromstring(f"<all>{pages}</all>")]
    atomikos = [each for each in named if each.startswith("com.atomikos:")]
    assert len(atomikos) == 3
    assert set(atomikos) <= {jar.coordinates for jar in jar_sets()[SPRING_BOOT]}
