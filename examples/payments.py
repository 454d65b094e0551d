"""Payment orders: an order comes over JMS, becomes a row in PostgreSQL and a confirmation over JMS. Once each, whatever is killed.

    python examples/payments.py 'failover:(amqp://127.0.0.1:5672)' 'host=127.0.0.1 dbname=shop user=shop' payments.xalog

Orders are JSON in the queue payments.orders: {"order": 4711, "amount": 90}. Confirmations go to payments.confirmed. It works until SIGTERM.
Kill it, the broker or PostgreSQL at any moment: what was going on is finished or undone at the next start.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import psycopg

from bascule.client import Queue
from bascule.core.errors import BasculeError
from bascule.xa import FileLog, TransactionManager, TransactionRolledBack
from bascule.xa.jms import JmsResource
from bascule.xa.postgres import PostgresResource

ORDERS = Queue("payments.orders")
CONFIRMED = Queue("payments.confirmed")
WAIT_S = 1.0
#: Until who is away may be back.
RETRY_S = 0.5


class Payments:
    """What takes part. Its names find what a crash has left: keep them over restarts."""

    def __init__(self, url: str, conninfo: str, log: Path) -> None:
        self.broker = JmsResource("broker", url)
        self.database = PostgresResource("payments-db", conninfo)
        self.manager = TransactionManager("payments", FileLog(log), [self.broker, self.database])

    def pay_next(self) -> None:
        """One order, if there is one: all of it, or nothing."""
        with self.manager.begin(timeout_s=30) as transaction:
            jms = transaction.enlist(self.broker)
            message = jms.consumer(ORDERS).receive(WAIT_S)
            if message is None:
                return
            order = json.loads(message.body)
            transaction.enlist(self.database).execute("INSERT INTO payments VALUES (%s, %s)", (order["order"], order["amount"]))
            jms.send(CONFIRMED, json.dumps({"order": order["order"], "paid": order["amount"]}))

    def run(self) -> None:
        """Order after order."""
        with self.manager:
            print("ready", flush=True)
            while True:
                try:
                    self.pay_next()
                except TransactionRolledBack as error:
                    print(f"the order waits again: {error}", file=sys.stderr)
                    time.sleep(RETRY_S)
                except BasculeError as error:  # who is away may be back; what is in doubt, the manager finishes
                    print(error, file=sys.stderr)
                    time.sleep(RETRY_S)


def main() -> None:
    """Make the table, then work."""
    url, conninfo, log = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with psycopg.connect(conninfo, autocommit=True) as database:
        database.execute("CREATE TABLE IF NOT EXISTS payments (number bigint, amount bigint)")
    Payments(url, conninfo, Path(log)).run()


if __name__ == "__main__":
    main()
