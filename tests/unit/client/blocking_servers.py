"""Reactions of the servers in the tests of the blocking API."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from bascule.amqp.connection import Connection
from bascule.client import (
    Queue,
)
from tests.support.speed import SLOWNESS
from tests.unit.client.server import obliging

QUEUE = Queue("q")


def failover(url: str) -> str:
    return f"failover:({url})?failover.reconnectDelay=1&failover.maxReconnectDelay=10"


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30 * SLOWNESS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def cut(when: type, after: int = 1, react: Any = obliging) -> Any:
    """React like ``react``, but break the connection at event number ``after`` of the type ``when``."""
    seen: list[Any] = []

    def reaction(connection: Connection, event: Any) -> None:
        if isinstance(event, when):
            seen.append(event)
            if len(seen) == after:
                raise ConnectionResetError
        react(connection, event)

    return reaction
