"""A process of a Django project. It pays for an item and sends a receipt in one transaction, unless a crash point kills it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from django.db import connections

from bascule.client import Queue
from bascule.xa import FileLog, TransactionManager
from bascule.xa.django import django_resource
from bascule.xa.jms import JmsResource
from tests.support.django_orm import Payment, add


def resources(broker: str, *, prepared: bool) -> tuple[JmsResource, Any]:
    """Return the settings that each process of the project has."""
    return JmsResource("broker", broker, timeout_s=60), django_resource("db", "shop", prepared=prepared)


def main(settings: dict[str, Any], broker: str, queue: str, log: str, prepared: bool, item: str) -> None:
    add("shop", **settings)
    jms, database = resources(broker, prepared=prepared)
    with TransactionManager("django", FileLog(Path(log)), [jms, database]) as manager, manager.begin() as transaction:
        transaction.enlist(jms).send(Queue(queue), item)
        Payment.objects.using("shop").create(item=item)
    connections["shop"].close()
    jms.close()


if __name__ == "__main__":
    main(*json.loads(sys.argv[1]))
