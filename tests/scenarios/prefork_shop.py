"""A shop whose processes fork: a payment is a row in PostgreSQL and a receipt at the broker, in one transaction.

The parent process opens the manager and pays before it forks, as a careless program does. Each child opens the manager for itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from bascule.client import Queue
from bascule.core import crash
from bascule.xa import FileLog, TransactionManager
from bascule.xa.jms import JmsResource
from bascule.xa.postgres import PostgresResource

SETTINGS = json.loads(os.environ["PREFORK_SHOP"])
#: A worker that dies without a decision leaves its transaction to the others after this time.
TIMEOUT_S = 5.0
BY_PARENT = "paid by the parent"

broker = JmsResource("broker", SETTINGS["broker"], timeout_s=60)
database = PostgresResource("database", SETTINGS["conninfo"])
manager = TransactionManager(
    SETTINGS["name"], FileLog(Path(SETTINGS["log"])), [broker, database], shared=True, timeout_s=TIMEOUT_S, recovery_interval_s=0.5
)


@manager.transactional()
def pay(item: str) -> None:
    """Pay for an item."""
    manager.enlist(database).execute(f"INSERT INTO {SETTINGS['table']} VALUES (%s)", (item,))  # type: ignore[call-overload]
    manager.enlist(broker).send(Queue(SETTINGS["queue"]), item)


def pay_or_die(item: str, point: str) -> int:
    """Pay for an item, or end this process at a crash point. Return the id of the process."""
    crash.arm(point)
    pay(item)
    return os.getpid()


def open_in_parent() -> None:
    """Open the manager and pay, before the process forks."""
    manager.open()
    pay(BY_PARENT)
