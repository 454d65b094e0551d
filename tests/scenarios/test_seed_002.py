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
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest

from bascule.client import Queue, connect
from bascule.core.crash import ARMED_VARIABLE, POINTS
from bascule.embedded.postgres import EmbeddedPostgres
from tests.scenarios.payments import END, WAYS, Application
from tests.support.side_by_side import side_by_side
from tests.support.system import System, wait_for

PROGRAM = Path(__file__).with_name("payments.py")
END_TIMEOUT_S = 120.0
#: Orders that are handled side by side: their applications are processes, which start at once.
AT_ONCE = 4
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
        return [self.system.url, self._conninfo, self._table, self.queue, str(self._directory / f"{self.queue}.xalog"), wait_at]

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


class Order:
    """The order of one row of the matrix, in a bank of its own."""

    def __init__(self, case: Case, bank: Bank) -> None:
        self.case, self.bank = case, bank
        self._waits: ExitStack = ExitStack()
        self._application: subprocess.Popen[str] | None = None

    def __repr__(self) -> str:
        return repr(self.case)

    def begin(self) -> None:
        """Send the order, and return when the application waits at the step at which somebody dies."""
        self.bank.send(ORDER, persistent=self.case.persistent)
        if self.case.step:
            self._application = self._waits.enter_context(self.bank.application(self.case.way, self.case.step))
            self.bank.wait_for(self.case, self._application)

    def end(self) -> None:
        """Let the application go on, or start it if it has died or was not started. Check the rows of the order."""
        if self._application is None or self.case.dies == "application":
            self.close()
            self.bank.send(END)
            self.bank.start_again(self.case.way)
        else:
            self.bank.send(END)
            self.bank.go_on(self._application)
            assert self._application.wait(END_TIMEOUT_S) == 0
        assert self.bank.rows() == self.case.rows

    def close(self) -> None:
        """Kill the application."""
        self._waits.close()


@pytest.mark.parametrize("dies", ["application", "broker"])
def test_payment_order_ends_as_its_row_of_the_matrix_states(
    system: System, postgres: EmbeddedPostgres, name: str, tmp_path: Path, dies: str
) -> None:
    with ExitStack() as stack:
        orders = []
        for number, case in enumerate(MATRIX):
            if case.dies == dies:
                # The transaction manager of an order has the number in its name.
                orders.append(Order(case, Bank(system, postgres, f"{name}.{number}", tmp_path)))
                stack.callback(orders[-1].close)
        side_by_side(Order.begin, orders, at_once=AT_ONCE)
        if dies == "broker":
            system.broker.restart()
        side_by_side(Order.end, orders, at_once=AT_ONCE)
