"""Processes that run one transaction, or one recovery, over PostgreSQL, Kafka and the broker, and are killed at a point of it.

The process reads one case a line (JSON) and forks a process for each, so that modules are imported once. It answers each case with a line:
how the process ended, what its application was told, and the points that it passed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psycopg

from bascule.client import Message, Queue
from bascule.client.branch import BranchContext
from bascule.core.errors import BasculeError, Unavailable
from bascule.testing.xa import Checked, Watched, WatchedLog
from bascule.xa.errors import TransactionInDoubt, TransactionRolledBack, XaError
from bascule.xa.file_log import FileLog
from bascule.xa.jms import JmsResource
from bascule.xa.kafka import KafkaResource
from bascule.xa.kafka_log import KafkaLog
from bascule.xa.log import Decision, DecisionLog
from bascule.xa.postgres import PostgresResource
from bascule.xa.recovery import Recoverer
from bascule.xa.resource import Resource
from bascule.xa.transaction import Transaction, TransactionEnvironment
from bascule.xa.xid import Xid

TIMEOUT_S = 60.0
MESSAGES = 2


@dataclass(frozen=True)
class Where:
    """What all cases share. Cases of each kind of log have their own manager."""

    conninfo: str
    bootstrap: str
    prefix: str
    topic: str
    table: str
    directory: str
    broker: str = ""  # URL; "" if the broker takes no part
    decides: bool = False  # the commit of the database is the decision

    def resources(self, instance: str) -> dict[str, Resource[Any]]:
        kafka = KafkaResource("kafka", {"bootstrap.servers": self.bootstrap}, prefix=self.prefix, instance=instance)
        database = PostgresResource("db", self.conninfo, prepared=False if self.decides else None)
        found: dict[str, Resource[Any]] = {"db": database, "kafka": kafka}
        if self.broker:
            found["jms"] = JmsResource("jms", self.broker, timeout_s=TIMEOUT_S)
        return found

    @property
    def orders(self) -> Queue:
        return Queue(f"{self.topic}.orders")

    @property
    def bills(self) -> Queue:
        return Queue(f"{self.topic}.bills")

    def log(self, kind: str) -> DecisionLog:
        if kind == "file":
            return FileLog(Path(self.directory) / "matrix.xalog")
        return KafkaLog({"bootstrap.servers": self.bootstrap}, topic=f"{self.prefix}.decisions")


@dataclass(frozen=True)
class Case:
    """``votes`` are those of database and Kafka. ``at`` is the number of the point (from 0).

    ``delay_s`` later the victim is killed: this process, or the process with a given id.
    """

    id: str
    at: int = -1
    delay_s: float = 0.0
    victim: int = 0
    log: str = "file"
    parts: tuple[str, ...] = ("db", "kafka")  # in the order of their enlistment
    votes: tuple[str, str] = ("yes", "yes")
    ending: str = "commit"
    recovery: bool = False


class WatchedDecider(Watched[Any]):
    """A database whose commit is the decision, and that reports its calls."""

    inner: PostgresResource

    @property
    def decides(self) -> bool | None:
        return self.inner.decides

    def commit_deciding(self, xid: Xid, decision: Decision) -> None:
        self._around("commit_deciding", lambda: self.inner.commit_deciding(xid, decision))

    def decide(self, decision: Decision) -> Decision:
        return self._around("decide", lambda: self.inner.decide(decision))

    def decisions(self, manager: str) -> Sequence[Decision]:
        return self._around("decisions", lambda: self.inner.decisions(manager))

    def forget_decisions(self, gtrids: Iterable[bytes]) -> None:
        self._around("forget_decisions", lambda: self.inner.forget_decisions(gtrids))


class Armed:
    """Kills at a point."""

    def __init__(self, case: Case, points: Any) -> None:
        self._case = case
        self._points = points
        self._seen = 0

    def __call__(self, point: str) -> None:
        self._points.write(f"{point}\n")
        self._points.flush()
        if self._seen == self._case.at:
            victim = self._case.victim or os.getpid()
            if self._case.delay_s:
                threading.Thread(target=lambda: (time.sleep(self._case.delay_s), os.kill(victim, signal.SIGKILL)), daemon=True).start()
            else:
                os.kill(victim, signal.SIGKILL)
        self._seen += 1


def manager(log: str) -> str:
    return f"matrix-{log}"


def run(case: Case, where: Where, points: Any) -> str:
    armed = Armed(case, points)
    plain_log, by = where.log(case.log), f"victim/{os.getpid()}"
    log_id = plain_log.read().log_id if where.decides else ""
    log = WatchedLog(plain_log, armed)
    resources: dict[str, Resource[Any]] = {
        name: WatchedDecider(each, armed) if where.decides and name == "db" else Watched(each, armed)
        for name, each in where.resources("victim").items()
    }
    if case.recovery:
        Recoverer(manager(case.log), log, list(resources.values()), by=by, patient=False).run()
        return "recovered"
    environment = TransactionEnvironment(
        manager(case.log), log, by, lambda _: True, lambda _: lambda: None, lambda *_: None, log_id, where.decides
    )
    transaction = Transaction(environment, TIMEOUT_S)
    try:
        with transaction:
            for name in case.parts:
                resource = resources[name]
                WORK[name](transaction.enlist(resource if isinstance(resource, WatchedDecider) else Checked(resource)), where, case)
            if case.ending == "rollback":
                transaction.rollback()
                return "rolled back"
    except (TransactionRolledBack, XaError, BasculeError, psycopg.Error):
        return "rolled back" if transaction.status.value == "rolled back" else transaction.status.value
    except TransactionInDoubt:
        return "in doubt"
    return "committed"


def work_on_database(connection: Any, where: Where, case: Case) -> None:
    if case.votes[0] == "read-only":
        connection.execute("SELECT 1")
    else:
        connection.execute(f"INSERT INTO {where.table} VALUES (%s)", (case.id,))
    if case.votes[0] == "no":
        try:
            connection.execute("SELECT 1/0")
        except psycopg.errors.DivisionByZero:
            return  # like an application that does not check


def work_on_kafka(handle: Any, where: Where, case: Case) -> None:
    if case.votes[1] == "yes":
        for part in range(MESSAGES):
            handle.send(where.topic, f"{case.id}/{part}".encode())


def work_on_broker(context: BranchContext, where: Where, case: Case) -> None:
    """Receive the order of the case, and send a bill for it."""
    order = context.consumer(where.orders, selector=f"JMSType = '{case.id}'").receive()
    if order is None:
        raise Unavailable(f"there is no order {case.id}")
    context.send(where.bills, Message(order.body, type=order.type))


WORK: dict[str, Callable[[Any, Where, Case], None]] = {"db": work_on_database, "kafka": work_on_kafka, "jms": work_on_broker}


def main(where: Where) -> None:
    for line in sys.stdin:
        fields = json.loads(line)
        case = Case(**{**fields, "votes": tuple(fields["votes"]), "parts": tuple(fields["parts"])})
        points_read, points_write = os.pipe()
        told_read, told_write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(points_read)
            os.close(told_read)
            told = run(case, where, os.fdopen(points_write, "w"))
            os.write(told_write, told.encode())
            os._exit(0)
        os.close(points_write)
        os.close(told_write)
        points = os.fdopen(points_read).read().split()
        told = os.fdopen(told_read).read()
        _, status = os.waitpid(child, 0)
        sys.stdout.write(json.dumps({"status": status, "told": told, "points": points}) + "\n")
        sys.stdout.flush()


def line(case: Case) -> str:
    """A case as ``main`` reads it."""
    return json.dumps(asdict(case)) + "\n"


if __name__ == "__main__":
    main(Where(**json.loads(sys.argv[1])))
