"""The shop: payments from Kafka, one row and one receipt each, although the program is killed several times."""

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

from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import EmbeddedPostgres
from tests.examples.pages import ROOT, blocks, missing, typed
from tests.scenarios.adapter_topics import Watcher, create, produce
from tests.support.system import wait_for

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]
GUIDE = ROOT / "docs" / "guides" / "adapter.md"
PAYMENTS = 60
COMMAND_S = 120.0
KILLS = 2


class Shop:
    def __init__(self, bootstrap: str, conninfo: str, directory: Path) -> None:
        self._argv = [sys.executable, str(ROOT / "examples" / "shop.py"), bootstrap, conninfo, str(directory)]
        self._conninfo = conninfo
        self._log = directory / "shop.log"
        self.start()

    def start(self) -> None:
        with self._log.open("a") as out:
            self.process = subprocess.Popen(self._argv, stdout=out, stderr=subprocess.STDOUT)

    def charged(self) -> list[str]:
        assert self.process.poll() is None, self._log.read_text()
        with psycopg.connect(self._conninfo) as connection:
            if connection.execute("SELECT to_regclass('charges')").fetchone() == (None,):
                return []
            return [row[0] for row in connection.execute("SELECT payment FROM charges").fetchall()]


@pytest.fixture
def shop(kafka: EmbeddedKafka, postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[Shop]:
    create(kafka.bootstrap, "payments", "receipts")
    running = Shop(kafka.bootstrap, postgres.conninfo, tmp_path)
    yield running
    running.process.kill()
    running.process.wait()


def follow_the_guide(kafka: EmbeddedKafka, directory: Path) -> None:
    """Type the commands that pay 4711 and show the receipt."""
    (directory / "examples").symlink_to(ROOT / "examples")
    (directory / "bascule-data").mkdir()
    (directory / "bascule-data" / "ports.json").write_text(json.dumps({"kafka": kafka.bootstrap.rpartition(":")[2]}))
    topics, pay = (block.text for block in blocks(GUIDE, "run") if "kafka_topic.py" in block.text)
    (shown,) = blocks(GUIDE, "shows")
    assert typed(topics, directory, COMMAND_S) == ""
    said = typed(pay, directory, COMMAND_S)
    assert missing(shown.text, said) is None, said


def test_each_payment_is_charged_once_and_confirmed_once_though_the_shop_is_killed(
    shop: Shop, kafka: EmbeddedKafka, tmp_path: Path
) -> None:
    follow_the_guide(kafka, tmp_path)
    payments = [json.dumps({"payment": f"p{number}", "customer": "c", "amount": number}) for number in range(PAYMENTS + 1)]
    produce(kafka.bootstrap, "payments", payments)  # the first confirmation belongs to no payment
    for part in range(1, KILLS + 1):
        wait_for(lambda part=part: len(shop.charged()) >= part * PAYMENTS // (2 * KILLS), f"some charges, part {part}", 120)  # type: ignore[misc]
        shop.process.kill()
        shop.process.wait()
        shop.start()
    wanted = Counter(["4711", *(f"p{number}" for number in range(1, PAYMENTS + 1))])
    wait_for(lambda: set(shop.charged()) >= set(wanted), "all charges", 120)
    receipts, letters = Watcher(kafka.bootstrap, "receipts"), Watcher(kafka.bootstrap, "shop.payments.dead-letter")
    receipts.wait(PAYMENTS + 1)
    assert json.loads(letters.wait(1)[0])["payment"] == "p0"
    assert dict(letters.records[0].headers())["__connect.errors.exception.message"] == b"a payment of 0"
    shop.process.send_signal(signal.SIGTERM)
    assert shop.process.wait(60) == 0
    shop.start()  # nothing is left to do
    assert Counter(shop.charged()) == wanted
    produce(kafka.bootstrap, "payments", [json.dumps({"payment": "last", "customer": "c", "amount": 1})])
    wait_for(lambda: "last" in shop.charged(), "the last charge", 120)
    receipts.wait(PAYMENTS + 2)
    assert Counter(shop.charged()) == wanted + Counter(["last"])
    assert Counter(record.key().decode() for record in receipts.records) == wanted + Counter(["last"])
    receipts.close()
    letters.close()
