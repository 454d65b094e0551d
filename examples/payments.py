"""Receive payment orders over JMS; write a row in PostgreSQL and send a confirmation for each, exactly once whatever is killed.

    python examples/payments.py 'failover:(amqp://127.0.0.1:5672)' 'host=127.0.0.1 dbname=shop user=shop' payments.xalog

Orders are JSON in the queue payments.orders: {"order": 4711, "amount": 90}. Confirmations go to payments.confirmed.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import psycopg

from bascule import BasculeError, FileLog, JmsResource, Queue, TransactionManager
from bascule.xa.postgres import PostgresResource

ORDERS, CONFIRMED = Queue("payments.orders"), Queue("payments.confirmed")
WAIT_S = 1.0


def pay_next(manager: TransactionManager, broker: JmsResource, database: PostgresResource) -> None:
    """Process one order, if there is one, in one transaction."""
    with manager.begin(timeout_s=30) as transaction:
        jms = transaction.enlist(broker)
        message = jms.consumer(ORDERS).receive(WAIT_S)
        if message is not None:
            order = json.loads(message.body)
            transaction.enlist(database).execute("INSERT INTO payments VALUES (%s, %s)", (order["order"], order["amount"]))
            jms.send(CONFIRMED, json.dumps({"order": order["order"], "paid": order["amount"]}))


def main() -> None:
    """Process orders until SIGTERM."""
    url, conninfo, log = sys.argv[1:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with psycopg.connect(conninfo, autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS payments (number bigint, amount bigint)")
    # By these names, recovery finds the branches that a crash has left.
    broker, database = JmsResource("broker", url), PostgresResource("payments-db", conninfo)
    with TransactionManager("payments", FileLog(Path(log)), [broker, database]) as manager:
        while True:
            try:
                pay_next(manager, broker, database)
            except BasculeError as error:  # retry later; the manager finishes transactions in doubt
                print(error, file=sys.stderr)
                time.sleep(WAIT_S)


if __name__ == "__main__":
    main()
