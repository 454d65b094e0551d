"""The Django shop is killed at different points: each order is paid once and confirmed once, and its client learns it."""

from __future__ import annotations

import base64
import http.client
import signal
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psycopg
import pytest

from bascule.client import Queue, connect
from bascule.core.crash import ARMED_VARIABLE
from bascule.embedded.kafka import EmbeddedKafka
from bascule.embedded.postgres import HOST, USER, EmbeddedPostgres
from bascule.embedded.process import Child, free_port
from bascule.threads.background import in_background
from tests.examples.pages import ROOT
from tests.support.client import all_in
from tests.support.system import PYTHON_FAILOVER, System, wait_for

pytest.importorskip("django")
pytestmark = [pytest.mark.services, pytest.mark.timeout(300)]
ORDERS = 60
CLIENTS = 3
DEADLINE_S = 120.0
#: Each kills a process of the shop: prepared and undecided, decided with no branch committed, half committed.
POINTS = ["xa.prepare.after:16", "xa.decide.after:8", "xa.finish.after:9"]
#: Part of the names of its branches in PostgreSQL (base64 of "django-shop/").
MANAGER = base64.b64encode(b"django-shop/").decode()


@pytest.fixture
def system(kafka: EmbeddedKafka, tmp_path: Path) -> Iterator[System]:
    with System(kafka.bootstrap, tmp_path / "system", prefix="django-shop") as running:
        yield running


class Shop:
    """Run processes one after the other, on one port."""

    def __init__(self, system: System, postgres: EmbeddedPostgres, directory: Path) -> None:
        self._port = free_port()
        self._log = directory / "shop.log"
        url = PYTHON_FAILOVER.format(system.url)
        self._argv = [sys.executable, ROOT / "examples" / "django_shop.py", str(self._port), url, "postgres", directory / "shop.xalog"]
        self._env = {"PGHOST": HOST, "PGUSER": USER, "PGPORT": str(postgres.port)}
        self.process = self.started("")

    def started(self, point: str) -> Child:
        """Start a process; ``point`` kills it."""
        self.process = Child(self._argv, log_file=self._log, env=self._env | {ARMED_VARIABLE: point}, name="shop")
        self.process.start()
        return self.process

    def pay(self, order: int) -> None:
        """Ask like a client that repeats its request until it gets an answer."""
        form = urllib.parse.urlencode({"order": order, "amount": 10 * order}).encode()

        def told() -> bool:
            try:
                with urllib.request.urlopen(f"http://{HOST}:{self._port}/payments", form, timeout=DEADLINE_S) as answer:
                    return bool(answer.status == 201)
            except urllib.error.HTTPError as error:
                with error:
                    return error.code == 409
            except (OSError, http.client.HTTPException):  # the shop is dead, or died during the request
                return False

        wait_for(told, lambda: f"order {order} to be paid; the shop said {self._log.read_text()[-2000:]}", DEADLINE_S)


@pytest.fixture
def shop(system: System, postgres: EmbeddedPostgres, tmp_path: Path) -> Iterator[Shop]:
    with psycopg.connect(postgres.conninfo, autocommit=True) as database:
        database.execute("DROP TABLE IF EXISTS shop_payment")
    running = Shop(system, postgres, tmp_path)
    yield running
    running.process.stop()


def test_each_order_is_paid_and_confirmed_once_though_the_shop_is_killed(system: System, postgres: EmbeddedPostgres, shop: Shop) -> None:
    def client(first: int) -> None:
        for order in range(first, ORDERS, CLIENTS):
            shop.pay(order)

    shop.process.kill()
    process = shop.started(POINTS[0])
    clients = [in_background(partial(client, first), "test-client") for first in range(CLIENTS)]
    for point in (*POINTS[1:], ""):
        assert process.wait(DEADLINE_S)
        assert process.returncode == -signal.SIGKILL
        process = shop.started(point)
    for each in clients:
        each.result(2 * DEADLINE_S)
    with psycopg.connect(postgres.conninfo) as database:
        rows = database.execute('SELECT "order", amount FROM shop_payment ORDER BY "order"').fetchall()
        prepared = database.execute("SELECT gid FROM pg_prepared_xacts WHERE gid LIKE %s", (f"%{MANAGER}%",)).fetchall()
    assert rows == [(order, 10 * order) for order in range(ORDERS)]
    assert prepared == []
    with connect(system.url) as context:
        confirmed = all_in(context, Queue("django.confirmed"), ORDERS)
    assert sorted(confirmed) == sorted(f"{order}: {10 * order}" for order in range(ORDERS))
