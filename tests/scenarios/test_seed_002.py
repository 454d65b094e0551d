"""Payment orders from a queue into a database, for each way to send, to acknowledge and to die.

A row states the possible outcomes of an order, and the test produces each of them: "lost" rows lose the order and "doubled" rows
duplicate it, wherever the application allows this.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from bascule.client import Queue, connect
from bascule.core.crash import ARMED_VARIABLE, POINTS
from bascule.embedded.postgres import EmbeddedPostgres
from tests.scenarios.payments import END, WAYS, Application
from tests.support.system import System, wait_for

PROGRAM = Path(__file__).with_name("payments.py")
END_TIMEOUT_S = 120.0
ORDER = "payment order"
LOST, ONCE, ONCE_MARKED, DOUBLED = [], [False], [True], [False, True]


class Case(NamedTuple):
    """``dies`` is the application or the broker, when the application reaches ``step``, one of its own steps or a crash point; "" is
    before all of them.

    ``rows`` are the rows of the order at the end: for each, whether the message was marked JMSRedelivered.
    """

    persistent: bool
    way: str
    dies: str
    step: str
    rows: list[bool]


# fmt: off
MATRIX = [
    # Not persistent: any outcome is possible, whatever the acknowledgement.
    Case(False, "automatic",       "broker",      "",             LOST),
    Case(False, "explicit",        "broker",      "",             LOST),
    Case(False, "database first",  "broker",      "",             LOST),
    Case(False, "xa",              "broker",      "",             LOST),
    Case(False, "automatic",       "application", "received",     LOST),
    # Persistent: the broker loses nothing.
    Case(True,  "automatic",       "broker",      "",             ONCE),
    Case(True,  "explicit",        "broker",      "",             ONCE),
    Case(True,  "database first",  "broker",      "",             ONCE),
    # Automatic: may be lost; the order is acknowledged before it is written.
    Case(True,  "automatic",       "application", "received",     LOST),
    Case(True,  "automatic",       "application", "stored",       ONCE),
    # Explicit, after the work: at least once.
    Case(True,  "explicit",        "application", "received",     ONCE_MARKED),
    Case(True,  "explicit",        "application", "stored",       DOUBLED),
    Case(True,  "explicit",        "broker",      "stored",       DOUBLED),
    Case(True,  "explicit",        "application", "acknowledged", ONCE),
    # Explicit, before the work: may be lost.
    Case(True,  "explicit before", "application", "acknowledged", LOST),
    # Two local transactions: lost or duplicated, by their order.
    Case(True,  "jms first",       "application", "received",     ONCE_MARKED),
    Case(True,  "jms first",       "application", "acknowledged", LOST),
    Case(True,  "jms first",       "broker",      "acknowledged", ONCE),
    Case(True,  "database first",  "application", "received",     ONCE_MARKED),
    Case(True,  "database first",  "application", "stored",       DOUBLED),
    Case(True,  "database first",  "broker",      "stored",       DOUBLED),
    # One transaction over both: exactly once.
    Case(True,  "xa",              "application", "received",         ONCE_MARKED),
    Case(True,  "xa",              "application", "written",          ONCE_MARKED),
    Case(True,  "xa",              "application", "xa.prepare.after", ONCE_MARKED),
    Case(True,  "xa",              "application", "xa.decide.after",  ONCE),
    Case(True,  "xa",              "application", "xa.finish.after",  ONCE),
    Case(True,  "xa",              "broker",      "",                 ONCE),
    Case(True,  "xa",              "broker",      "written",          ONCE_MARKED),
    Case(True,  "xa",              "broker",      "xa.prepare.after", ONCE),
    Case(True,  "xa",              "broker",      "xa.decide.after",  ONCE),
    Case(True,  "xa",              "broker",      "xa.finish.after",  ONCE),
]
# fmt: on


class Bank:
    """A queue of orders, a table of rows, and the application between them."""

    def __init__(self, system: System, postgres: EmbeddedPostgres, name: str, directory: Path) -> None:
        self.system, self.queue, self._directory = system, name, directory
        self._conninfo, self._table = postgres.conninfo, name.replace(".", "_")
        with psycopg.connect(self._conninfo, autocommit=True) as database:
            database.execute(f"CREATE TABLE {self._table} (item text, redelivered boolean)")

    def send(self, order: str, *, persistent: bool = True) -> None:
        with connect(self.system.url) as context:
            context.producer(Queue(self.queue), persistent=persistent).send(order)

    def rows(self) -> list[bool]:
        with psycopg.connect(self._conninfo) as database:
            found = database.execute(f"SELECT item, redelivered FROM {self._table} ORDER BY redelivered").fetchall()
        assert {item for item, _ in found} <= {ORDER}
        return [redelivered for _, redelivered in found]

    def _arguments(self, wait_at: str = "") -> list[str]:
        return [self.system.url, self._conninfo, self._table, self.queue, str(self._directory / "payments.xalog"), wait_at]

    def start_again(self, way: str) -> None:
        """Return when the application has ended."""
        WAYS[way](Application(*self._arguments()))

    @contextmanager
    def application(self, way: str, wait_at: str) -> Iterator[subprocess.Popen[str]]:
        """Start a process of the application that waits at a step."""
        armed = f"{wait_at}:1:stop" if wait_at in POINTS else ""
        argv = [sys.executable, PROGRAM, way, *self._arguments("" if armed else wait_at)]
        process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, ARMED_VARIABLE: armed}
        )
        try:
            yield process
        finally:
            process.kill()
            with suppress(BrokenPipeError):
                process.communicate()

    def wait_for(self, case: Case, process: subprocess.Popen[str]) -> None:
        """Return when the application waits at the step and the broker has received what the application has sent so far."""
        assert process.stdout is not None
        if case.step in POINTS:
            stopped = os.WSTOPPED | os.WNOHANG | os.WNOWAIT
            wait_for(lambda: os.waitid(os.P_PID, process.pid, stopped), f"the application at {case.step}")
        else:
            assert case.step in (line.strip() for line in process.stdout)
        if case.step == "acknowledged" or case.way == "automatic":
            self.system.wait_depth(self.queue, 0)

    def go_on(self, process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("go on\n")
        process.stdin.flush()
        process.send_signal(signal.SIGCONT)


@pytest.fixture
def bank(system: System, postgres: EmbeddedPostgres, name: str, tmp_path: Path) -> Bank:
    return Bank(system, postgres, name, tmp_path)


@pytest.mark.parametrize("case", MATRIX, ids=lambda case: f"{'' if case.persistent else 'non-'}persistent-{'-'.join(case[1:4])}")
def test_payment_order_ends_as_its_row_of_the_matrix_states(bank: Bank, case: Case) -> None:
    bank.send(ORDER, persistent=case.persistent)
    if case.step == "":
        bank.system.broker.restart()
    else:
        with bank.application(case.way, case.step) as first:
            bank.wait_for(case, first)
            if case.dies == "broker":
                bank.system.broker.restart()
                bank.send(END)
                bank.go_on(first)
                assert first.wait(END_TIMEOUT_S) == 0
                assert bank.rows() == case.rows
                return
    bank.send(END)
    bank.start_again(case.way)
    assert bank.rows() == case.rows
