"""Transactions in programs that fork their workers: gunicorn and Celery. Rules of a fork: ``unit/xa/test_usage.py``."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from bascule.client import Queue, connect
from bascule.embedded.postgres import EmbeddedPostgres
from bascule.embedded.process import free_port
from tests.support.client import all_in
from tests.support.speed import SLOWNESS
from tests.support.system import PYTHON_FAILOVER, System, wait_for

ROOT = Path(__file__).parents[2]
WAIT_S = 90.0 * SLOWNESS
PAYMENTS = 10
#: Where a worker is killed, and whether its payment is committed.
POINTS = {"xa.prepare.after:2": False, "xa.decide.after:1": True, "xa.finish.after:1": True}


class Prefork:
    """What a shop works with, and what it has paid."""

    def __init__(self, system: System, postgres: EmbeddedPostgres, name: str, directory: Path) -> None:
        self._url, self._conninfo, self._queue = system.url, postgres.conninfo, Queue(name)
        self._table = f'"{name}"'
        self.log = directory / "program.log"
        settings = {
            "name": f"prefork-{os.getpid()}",
            "broker": PYTHON_FAILOVER.format(system.url),
            "conninfo": postgres.conninfo,
            "log": str(directory / "shop.xalog"),
            "queue": name,
            "table": self._table,
            "files": str(directory),
        }
        self.environment = {**os.environ, "PREFORK_SHOP": json.dumps(settings)}
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            connection.execute(f"CREATE TABLE {self._table} (item text)")  # type: ignore[call-overload]

    def rows(self) -> list[str]:
        with psycopg.connect(self._conninfo) as connection:
            return [item for (item,) in connection.execute(f"SELECT item FROM {self._table} ORDER BY item")]  # type: ignore[call-overload]

    def prepared(self) -> list[str]:
        """Return the prepared transactions of programs that fork. Their names in PostgreSQL are in Base64."""
        with psycopg.connect(self._conninfo) as connection:
            return [xid.gtrid for xid in connection.tpc_recover() if (xid.gtrid or "").startswith("prefork-")]

    def check(self, expected: list[str]) -> None:
        """Check that each payment has exactly one row and one receipt, after recovery."""
        wait_for(lambda: self.rows() == sorted(expected) and not self.prepared(), "the payments", 90.0)
        with connect(self._url) as context:
            assert sorted(all_in(context, self._queue, len(expected))) == sorted(expected)

    def is_running(self, process: subprocess.Popen[bytes]) -> bool:
        assert process.poll() is None, self.log.read_text()[-4000:]
        return True

    @contextmanager
    def program(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a Python module until the block ends; then check that SIGTERM ends it in an orderly way."""
        with self.log.open("ab") as log:
            process = subprocess.Popen([sys.executable, "-m", *arguments], cwd=ROOT, env=self.environment, stdout=log, stderr=log)
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0, self.log.read_text()[-4000:]
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture
def shop(system: System, postgres: EmbeddedPostgres, name: str, tmp_path: Path) -> Prefork:
    return Prefork(system, postgres, name, tmp_path)


def requested(port: int, item: str, point: str = "") -> int:
    """Return the id of the process that has paid. Raises OSError or HTTPException if it has not answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    try:
        connection.request("GET", f"/{item}?{point}")
        answer = connection.getresponse()
        assert answer.status == 200
        return int(answer.read())
    finally:
        connection.close()


def answers(port: int) -> bool:
    with suppress(OSError), closing(socket.create_connection(("127.0.0.1", port))):
        return True
    return False


def test_gunicorn_workers_pay_and_finish_payments_of_killed_workers(shop: Prefork) -> None:
    port = free_port()
    module = "tests.scenarios.prefork_gunicorn"
    expected = ["paid by the parent", "first"]
    with shop.program("gunicorn", "-c", f"python:{module}", "-b", f"127.0.0.1:{port}", f"{module}:application") as master:
        wait_for(lambda: shop.is_running(master) and answers(port), "gunicorn to serve", 90.0)
        processes = {requested(port, "first")}
        round_number = 0
        while len(processes) < 2:  # the system chooses the worker
            items = [f"{round_number}-{number}" for number in range(PAYMENTS)]
            with ThreadPoolExecutor(4) as threads:
                processes |= set(threads.map(lambda item: requested(port, item), items))
            expected += items
            round_number += 1
        assert master.pid not in processes
        for point, commits in POINTS.items():
            item = point.replace(":", "-")
            with pytest.raises((OSError, http.client.HTTPException)):
                requested(port, item, point)
            expected += [item] if commits else []
        master.send_signal(signal.SIGHUP)  # new workers replace the old ones
        after = {requested(port, f"after {number}".replace(" ", "-")) for number in range(PAYMENTS)}
        expected += [f"after-{number}" for number in range(PAYMENTS)]
        assert master.pid not in after
        shop.check(expected)


def test_celery_workers_pay_and_finish_payments_of_killed_workers(shop: Prefork) -> None:
    module = "tests.scenarios.prefork_celery"
    expected = ["paid by the parent"]
    arguments = ("worker", "--pool", "prefork", "--concurrency", "2", "--loglevel", "WARNING")
    with shop.program("celery", "-A", module, *arguments) as parent:
        before, after = ([[f"{when} {number}"] for number in range(PAYMENTS)] for when in ("before", "after"))
        processes, *killed, later = sent_to_celery(shop, module, [before, *([[point, point]] for point in POINTS), after])
        assert parent.pid not in processes
        assert len(set(processes)) == 2
        assert killed == [["WorkerLostError"]] * len(POINTS)
        assert all(isinstance(each, int) for each in later)
        expected += [item for (item,) in (*before, *after)]
        expected += [point for point, commits in POINTS.items() if commits]
        shop.check(expected)


#: Runs in a process of its own, because Celery's settings are those of the process that imports the application.
CELERY_CLIENT = """
import importlib, json, sys
module, groups, wait_s = json.loads(sys.argv[1])
paid = importlib.import_module(module).paid
answers = []
for calls in groups:
    answers.append([])
    for result in [paid.delay(*call) for call in calls]:
        try:
            answers[-1].append(result.get(timeout=wait_s, interval=0.05))
        except Exception as error:
            answers[-1].append(type(error).__name__)
print(json.dumps(answers))
"""


def sent_to_celery(shop: Prefork, module: str, groups: list[list[list[str]]]) -> list[list[Any]]:
    """Send each group of tasks when the group before has ended. Return for each task the id of its process, or the name of its error."""
    done = subprocess.run(
        [sys.executable, "-c", CELERY_CLIENT, json.dumps([module, groups, WAIT_S])],
        cwd=ROOT,
        env=shop.environment,
        capture_output=True,
        timeout=len(groups) * WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    answers: list[list[Any]] = json.loads(done.stdout)
    return answers
