"""Refunds: requests from Kafka, approvals over JMS; one row, record and message each, although the program is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from bascule.client import Context, Message, Queue, connect
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from tests.examples.pages import ROOT
from tests.scenarios.adapter_topics import Watcher, create, produce
from tests.support.system import PYTHON_FAILOVER, System, wait_for

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]
REFUNDS = 30
KILLS = 2
#: Approvals before each kill.
STEP = REFUNDS // KILLS


class Shop:
    def __init__(self, bootstrap: str, conninfo: str, url: str, directory: Path) -> None:
        self._argv = [sys.executable, str(ROOT / "examples" / "refunds.py"), bootstrap, conninfo, url, str(directory)]
        self._conninfo = conninfo
        self._log = directory / "refunds.log"
        self.start()

    def start(self) -> None:
        with self._log.open("a") as out:
            self.process = subprocess.Popen(self._argv, stdout=out, stderr=subprocess.STDOUT)

    def rows(self, table: str) -> list[int]:
        assert self.process.poll() is None, self._log.read_text()
        with psycopg.connect(self._conninfo) as connection:
            if connection.execute("SELECT to_regclass(%s)", (table,)).fetchone() == (None,):
                return []
            return [row[0] for row in connection.execute(f"SELECT refund FROM {table}").fetchall()]


@pytest.fixture
def broker(kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path / "broker", prefix="refunds-example") as system:
        yield system


@pytest.fixture
def shop(kafka: EmbeddedKafka, postgres: EmbeddedPostgres, tmp_path: Path, broker: System) -> Iterator[Shop]:
    create(kafka.bootstrap, "refunds", "refunded")
    running = Shop(kafka.bootstrap, postgres.conninfo, PYTHON_FAILOVER.format(broker.url), tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


def approve(context: Context, numbers: range) -> None:
    for number in numbers:
        context.send(Queue("approvals"), Message("somebody", properties={"refund": number}))


def test_each_approved_refund_is_done_once_though_the_program_is_killed(shop: Shop, kafka: EmbeddedKafka, broker: System) -> None:
    wanted = Counter(range(REFUNDS))
    produce(kafka.bootstrap, "refunds", [json.dumps({"refund": number}) for number in range(REFUNDS + 1)])  # the last is never approved
    with connect(PYTHON_FAILOVER.format(broker.url)) as context:
        for part in range(KILLS):
            approve(context, range(part * STEP, (part + 1) * STEP))
            wait_for(lambda part=part: len(shop.rows("refunds")) > part * STEP, f"a refund of part {part}", 120)  # type: ignore[misc]
            shop.process.kill()
            shop.process.wait()
            shop.start()
        for table in ("refunds", "audit"):
            wait_for(lambda table=table: set(shop.rows(table)) >= set(wanted), f"all in {table}", 120)  # type: ignore[misc]
        records = Watcher(kafka.bootstrap, "refunded")
        records.wait(REFUNDS)
        shop.process.send_signal(signal.SIGTERM)
        assert shop.process.wait(60) == 0
        shop.start()  # nothing is left to do
        approve(context, range(REFUNDS, REFUNDS + 1))
        wait_for(lambda: REFUNDS in shop.rows("audit"), "the last refund", 120)
        wanted += Counter([REFUNDS])
        records.wait(REFUNDS + 1)
        assert Counter(shop.rows("refunds")) == Counter(shop.rows("audit")) == wanted
        assert Counter(json.loads(value)["refund"] for value in records.values) == wanted
        records.close()
        wait_for(lambda: len(list(context.browse(Queue("mails")))) > REFUNDS, "all mails")
        assert Counter(message.properties["refund"] for message in context.browse(Queue("mails"))) == wanted
        assert list(context.browse(Queue("approvals"))) == []
