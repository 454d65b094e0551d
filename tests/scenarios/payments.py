"""An application that receives payment orders from a queue and writes a row for each.

It uses one of the possible ways to acknowledge. It prints each step on standard output, and stops at one chosen step until it reads a line
or is killed. After the order "end" it ends.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import psycopg

from bascule.client import Acknowledge, Consumer, Context, Message, Queue, TransactionError, connect
from bascule.xa import FileLog, TransactionManager, TransactionRolledBack
from bascule.xa.jms import JmsResource
from bascule.xa.postgres import PostgresResource
from tests.support.system import PYTHON_FAILOVER

END = "end"
#: Much longer than a restart of the broker.
RECEIVE_S = 120.0


class Application:
    """One process of the application. ``wait_at`` is a step: received, written, stored, acknowledged."""

    def __init__(self, url: str, conninfo: str, table: str, queue: str, log: str, wait_at: str) -> None:
        self.url, self.conninfo, self.queue = PYTHON_FAILOVER.format(url), conninfo, Queue(queue)
        self._log = Path(log)
        self._insert = f"INSERT INTO {table} VALUES (%s, %s)"
        self._wait_at = wait_at

    def step(self, name: str) -> None:
        sys.stdout.write(f"{name}\n")
        sys.stdout.flush()
        if name == self._wait_at:
            self._wait_at = ""
            sys.stdin.readline()

    def write(self, database: psycopg.Connection, order: Message) -> None:
        database.execute(self._insert, (order.body, order.redelivered))
        self.step("written")

    @contextmanager
    def consumer(self, acknowledge: Acknowledge) -> Iterator[tuple[Context, Consumer]]:
        with connect(self.url, acknowledge=acknowledge, timeout_s=RECEIVE_S) as context:
            yield context, context.consumer(self.queue, prefetch=1)

    def receive(self, consumer: Consumer) -> Message:
        order = consumer.receive(RECEIVE_S)
        assert order is not None, "no order has come"
        self.step("received")
        return order

    # -- the ways ------------------------------------------------------------------------------------------------------

    def automatic(self) -> None:
        """Let the client acknowledge as soon as it has passed the order to the application."""
        with self.consumer(Acknowledge.AUTO) as (_, consumer), psycopg.connect(self.conninfo) as database:
            while (order := self.receive(consumer)).body != END:
                self.write(database, order)
                database.commit()
                self.step("stored")

    def explicit_before(self) -> None:
        """Acknowledge, then write."""
        with self.consumer(Acknowledge.CLIENT) as (_, consumer), psycopg.connect(self.conninfo) as database:
            while (order := self.receive(consumer)).body != END:
                order.acknowledge()
                self.step("acknowledged")
                self.write(database, order)
                database.commit()
                self.step("stored")

    def explicit(self) -> None:
        """Write, then acknowledge."""
        with self.consumer(Acknowledge.CLIENT) as (_, consumer), psycopg.connect(self.conninfo) as database:
            while (order := self.receive(consumer)).body != END:
                self.write(database, order)
                database.commit()
                self.step("stored")
                order.acknowledge()
                self.step("acknowledged")
            order.acknowledge()

    def jms_first(self) -> None:
        """Use two local transactions, and commit the broker's first."""
        with self.consumer(Acknowledge.TRANSACTED) as (context, consumer), psycopg.connect(self.conninfo) as database:
            while (order := self.receive(consumer)).body != END:
                self.write(database, order)
                try:
                    context.commit()
                except TransactionError:  # the order is redelivered
                    database.rollback()
                    continue
                self.step("acknowledged")
                database.commit()
                self.step("stored")
            context.commit()

    def database_first(self) -> None:
        """Use two local transactions, and commit the database's first."""
        with self.consumer(Acknowledge.TRANSACTED) as (context, consumer), psycopg.connect(self.conninfo) as database:
            while (order := self.receive(consumer)).body != END:
                self.write(database, order)
                database.commit()
                self.step("stored")
                try:
                    context.commit()
                except TransactionError:  # the order is redelivered
                    continue
                self.step("acknowledged")
            context.commit()

    def joint(self) -> None:
        """Use one transaction over both."""
        name = f"payments-{self.queue.name.rpartition('.')[2]}"
        with (
            closing(JmsResource("broker", self.url)) as broker,
            closing(PostgresResource("database", self.conninfo)) as database,
            TransactionManager(name, FileLog(self._log), [broker, database]) as manager,
        ):
            while not self._one_jointly(manager, broker, database):
                pass

    def _one_jointly(self, manager: TransactionManager, broker: JmsResource, database: PostgresResource) -> bool:
        """Print a step. Return whether the order was the last one."""
        with suppress(TransactionRolledBack), manager.begin(timeout_s=RECEIVE_S) as transaction:
            order = self.receive(transaction.enlist(broker).consumer(self.queue))
            if order.body != END:
                self.write(transaction.enlist(database), order)
            return bool(order.body == END)
        return False


WAYS: dict[str, Callable[[Application], None]] = {
    "automatic": Application.automatic,
    "explicit before": Application.explicit_before,
    "explicit": Application.explicit,
    "jms first": Application.jms_first,
    "database first": Application.database_first,
    "xa": Application.joint,
}

if __name__ == "__main__":
    WAYS[sys.argv[1]](Application(*sys.argv[2:]))
