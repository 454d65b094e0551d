"""An application with an endpoint, in a process that tests kill.

For each record, the endpoint writes a row and a receipt in one transaction. With a JMS broker, the transaction also receives a voucher and
sends a bill. A record ``fail-K-...`` fails its first K times. A record ``hold-...`` is in its endpoint until a file exists.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from bascule.adapter.inbound import ActivationSpec, Backoff, InboundLog, Record, ResourceAdapter, Start, Xa
from bascule.adapter.outbound import JmsConnectionFactory
from bascule.client import Queue
from bascule.core import crash
from bascule.xa import FileLog, TransactionManager
from bascule.xa.jms import JmsResource
from bascule.xa.kafka import KafkaResource
from bascule.xa.postgres import PostgresResource
from tests.support.preloaded import Program, fork
from tests.support.system import suspend, wait_for

END_S = 90.0
#: See ``kill_another``.
KILL_VARIABLE = "BASCULE_TEST_KILL"
VICTIM = Program("tests.scenarios.adapter_victim", "main")


@dataclass(frozen=True)
class Where:
    """What the members of a group share. The decisions are in topics of the group."""

    conninfo: str
    bootstrap: str
    group: str
    topic: str
    receipts: str
    table: str
    directory: str
    workers: int = 4
    batch: int = 500
    order: str = "none"
    retries: int = 1
    start: str = "earliest"
    broker: str = ""

    @property
    def vouchers(self) -> Queue:
        """Return the queue from which the endpoint receives a message for each record."""
        return Queue(f"{self.group}.vouchers")

    @property
    def bills(self) -> Queue:
        """Return the queue to which the endpoint sends a message for each record."""
        return Queue(f"{self.group}.bills")

    def kafka(self, member: str) -> dict[str, str | int]:
        """Return the settings of a member.

        Each member has a name, so that a restarted member immediately takes the place of the killed one.
        """
        return {"bootstrap.servers": self.bootstrap, "session.timeout.ms": 6000, "group.instance.id": member}

    def transactions(self, member: str) -> tuple[TransactionManager, InboundLog, PostgresResource, KafkaResource, JmsResource]:
        """Return the transaction manager. It has the JMS broker only if the test has one."""
        plain = {"bootstrap.servers": self.bootstrap}
        database = PostgresResource("db", self.conninfo)
        kafka = KafkaResource("kafka", plain, prefix=f"{self.group}.xa", instance=member)
        inbound = InboundLog("inbound", plain, group=self.group)
        broker = JmsResource("jms", self.broker or "amqp://127.0.0.1:1")
        log = FileLog(Path(self.directory) / "decisions.xalog")
        resources = [inbound, database, kafka, *([broker] if self.broker else [])]
        return TransactionManager("victim", log, resources, shared=True, timeout_s=30), inbound, database, kafka, broker


def kill_another(point: str) -> None:
    """Kill another process when this one passes a crash point: ``NAME:PASS:PROCESS``, or "" for none."""
    name, _, rest = point.partition(":")
    wanted, _, victim = rest.partition(":")
    passes, ordinary = itertools.count(1), crash.point

    def passed(reached: str, bring_about: Callable[[], object] | None = None) -> None:
        if reached == name and next(passes) == int(wanted):
            os.kill(int(victim), signal.SIGKILL)
        ordinary(reached, bring_about)

    if name:
        crash.point = passed


def main() -> None:
    kill_another(os.environ.get(KILL_VARIABLE, ""))
    where, member = Where(**json.loads(sys.argv[1])), sys.argv[2]
    logging.basicConfig(format="%(asctime)s %(threadName)s %(message)s", level=logging.INFO)
    manager, inbound, database, kafka, broker = where.transactions(member)
    jms = JmsConnectionFactory(broker, manager if where.broker else None)
    spec = ActivationSpec(
        topics=(where.topic,), group=where.group, workers=where.workers, batch=where.batch, order=where.order, retries=where.retries,
        backoff=Backoff(0.05, 2.0, 0.2), delivery_timeout_s=30.0, start=Start(where.start), transacted=Xa(manager, inbound, kafka),
    )  # fmt: skip
    adapter = ResourceAdapter(where.kafka(member))

    @adapter.endpoint(spec)
    def pay(record: Record) -> None:
        value = (record.value or b"").decode()
        manager.enlist(database).execute(f"INSERT INTO {where.table} VALUES (%s, %s)", (value, member))
        manager.enlist(kafka).send(where.receipts, record.value, record.key)
        if where.broker:
            with jms.connect() as context:
                voucher = context.consumer(where.vouchers).receive(END_S)
                if voucher is None:
                    raise LookupError("there is no voucher")
                context.send(where.bills, value)
        if value.startswith("fail-") and record.failures < int(value.split("-")[1]):
            raise ValueError(f"no luck with {value}")
        if value.startswith("hold-"):
            Path(where.directory, f"{value}.at-work").touch()
            while not Path(where.directory, value).exists():
                time.sleep(0.01)

    with manager:
        adapter.run(drain_s=20.0)
    for each in (jms, inbound, database, kafka, broker):
        each.close()


class Member:
    """Start the process."""

    def __init__(self, where: Where, member: str = "m1", environment: Mapping[str, str] | None = None) -> None:
        self.log = Path(where.directory, f"{member}.log")
        self.log.touch()
        self._process = fork(VICTIM, [__file__, json.dumps(asdict(where)), member], self.log, environment or {})

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def suspend(self) -> None:
        """Suspend the process (SIGSTOP), and return when none of its threads runs."""
        suspend(self._process.pid)

    def ended(self) -> int:
        """Wait until the process has ended, and return its exit code."""
        try:
            return self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it did not end:\n{self.log.read_text()[-4000:]}") from None

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
            self._process.kill()
        self._process.wait()


def await_file(path: Path) -> None:
    wait_for(path.exists, f"{path.name}")
