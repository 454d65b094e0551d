"""The example of payment orders and its broker are killed: each order is paid once and confirmed once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from bascule.client import Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.embedded.process import Child
from tests.examples.pages import ROOT, blocks, typed
from tests.support.client import all_in
from tests.support.system import PYTHON_FAILOVER, System, wait_for

pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]
GUIDE = ROOT / "docs" / "guides" / "xa.md"
ORDERS = 60
DEADLINE_S = 120.0
#: The order of the guide.
PAID = '{"order": 4711, "paid": 90}'
PREPARED = "SELECT gid FROM pg_prepared_xacts"


@pytest.fixture
def system(kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path / "system", prefix="payments") as running:
        yield running


def test_each_order_is_paid_and_confirmed_once_though_program_and_broker_are_killed(
    system: System, postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    with psycopg.connect(postgres.conninfo, autocommit=True) as database:
        database.execute("DROP TABLE IF EXISTS payments")
        others = database.execute(PREPARED).fetchall()
    conninfo, log = postgres.conninfo, tmp_path / "payments.log"
    url = PYTHON_FAILOVER.format(system.url)
    command: list[str | Path] = [
        sys.executable, ROOT / "examples" / "payments.py", url, conninfo, tmp_path / "payments.xalog",
    ]  # fmt: skip
    program = Child(command, log_file=log, name="payments")

    def paid() -> int:
        try:
            with psycopg.connect(conninfo) as database:
                (count,) = database.execute("SELECT count(*) FROM payments").fetchone() or (0,)
                return int(count)
        except psycopg.errors.UndefinedTable:
            return 0

    def reaches(count: int) -> None:
        wait_for(lambda: paid() >= count, lambda: f"{count} rows; the program said {log.read_text()[-2000:]}", DEADLINE_S)

    program.start()
    try:
        (try_it,) = (block.text for block in blocks(GUIDE, "run") if "payments.confirmed" in block.text)
        assert PAID in typed(try_it, tmp_path, DEADLINE_S, {"BASCULE_BROKER__PORT": str(system.port)})
        with connect(url) as context:
            context.producer(Queue("payments.orders")).send_many(json.dumps({"order": n, "amount": 10 * n}) for n in range(ORDERS))
        for share in (1, 2):
            reaches(share * ORDERS // 8)
            program.kill()
            program.start()
        reaches(3 * ORDERS // 8)
        system.broker.restart()
        reaches(4 * ORDERS // 8)
        program.kill()
        system.broker.restart()
        program.start()
        reaches(ORDERS + 1)
        wait_for(lambda: system.depth("payments.orders") == 0, "all orders to be done", DEADLINE_S)
        wait_for(lambda: system.depth("payments.confirmed") == ORDERS, "all confirmations", DEADLINE_S)
    finally:
        program.stop()
    with psycopg.connect(conninfo) as database:
        rows = database.execute("SELECT number, amount FROM payments ORDER BY number").fetchall()
        left = database.execute(PREPARED).fetchall()
    assert rows == [*((number, 10 * number) for number in range(ORDERS)), (4711, 90)]
    assert set(left) <= set(others)
    with connect(system.url) as context:
        confirmed = [json.loads(body)["order"] for body in all_in(context, Queue("payments.confirmed"), ORDERS)]
    assert sorted(confirmed) == list(range(ORDERS))
